//! The descriptors of a link within the host: the side channel, and the buttons by which this process wakes the peer's
//! waiters. The link's memory is not here.
//!
//! All descriptors are closed when the link is down. Threads that are about to use a descriptor are counted
//! (`LocalPeer::while_open`), and no descriptor is closed meanwhile. Otherwise the program's next file could get the
//! fd, and the thread would use that file.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use rdmasock_core::fabric::SendError;
use rdmasock_core::fabric::layout::MAX_STREAMS;
use rdmasock_core::fabric::shm::Outside;
use rdmasock_core::fabric::waiter::{FlagPage, MAX_WAITERS, POLLING, WaiterId};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::doorbell::{self, Button};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::scratch;
use rdmasock_core::stream::connection::Broken;
use rdmasock_core::sync::{Presence, Published};
use rdmasock_core::wire::{MAX_MESSAGE, Message};
use rustix::io::Errno;

use crate::objects::library::Library;
use crate::objects::mailbox::Command;
use crate::objects::waiters::SERVICE;

/// A message that waits for room on the side channel.
struct Queued {
    bytes: Vec<u8>,
    fds: Vec<PrivateFd>,
}

/// The most messages that are kept for a peer that reads none. A correct peer leaves at most a few for each stream.
const MAX_OUTBOX: usize = 8 * MAX_STREAMS as usize;

/// The size of a buffer for RING, the message that asks the peer's service thread to wake a waiter, bytes.
const SHORT_MESSAGE: usize = 64;

/// The descriptors of one link, and the messages that wait for room on the side channel.
pub(crate) struct LocalPeer {
    /// The slot of the link.
    slot: AtomicU32,
    /// The fd of the side channel, -1 once it is closed.
    channel: AtomicI32,
    /// Messages that wait for room on the channel, in order.
    outbox: Lock<VecDeque<Queued>>,
    /// By waiter id of the peer: the fd of its button, -1 without one.
    buttons: Box<[AtomicI32]>,
    /// Number of buttons.
    button_count: AtomicU32,
    /// A bit for each waiter of the peer: whether the peer is to be asked to wake it once the channel has room.
    owed: Box<[AtomicU64]>,
    /// Threads that may be using a descriptor.
    users: Presence,
    is_closed: Published<AtomicBool>,
}

impl LocalPeer {
    pub(super) fn new() -> Self {
        Self {
            slot: AtomicU32::new(0),
            channel: AtomicI32::new(-1),
            outbox: Lock::new(VecDeque::new()),
            buttons: (0..POLLING).map(|_| AtomicI32::new(-1)).collect(),
            button_count: AtomicU32::new(0),
            owed: (0..MAX_WAITERS.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            users: Presence::default(),
            is_closed: Published::from(true),
        }
    }

    /// Begins a link whose side channel is `channel`. If the object had an earlier link, the caller has
    /// [closed](Self::close) that link's descriptors. Service thread only.
    pub(super) fn begin(&self, slot: u32, channel: Channel) {
        self.slot.store(slot, Relaxed);
        self.button_count.store(0, Relaxed);
        for word in &self.owed {
            word.store(0, Relaxed);
        }
        self.channel.store(channel.release(), Release);
        self.is_closed.publish(false);
    }

    /// Marks the descriptors as closed in a fork child, which later closes them with the library's other fds. A signal
    /// handler may have forked in the middle of a call. The call goes on in the child, and uses none of the descriptors
    /// there.
    pub(super) fn after_fork(&self) {
        self.is_closed.publish(true);
    }

    /// Calls `f`, which may use the link's descriptors, and returns its result. `None`, without a call, if they are
    /// closed.
    fn while_open<R>(&self, f: impl FnOnce() -> Option<R>) -> Option<R> {
        // Either `close` sees this user, or this call sees that `is_closed` is set. So no descriptor is closed during
        // `f`.
        self.users.enter();
        let result = if self.is_closed.look() { None } else { f() };
        self.users.leave();
        result
    }

    /// Closes the channel and the buttons of a link that is down. False if a thread is about to use one: the caller
    /// tries again later. Service thread only.
    pub(super) fn close(&self) -> bool {
        self.is_closed.publish(true);
        if !self.users.is_empty() {
            return false;
        }
        drop(PrivateFd::adopt(self.channel.swap(-1, AcqRel)).map(Channel::new));
        for slot in &self.buttons {
            drop(PrivateFd::adopt(slot.swap(-1, AcqRel)));
        }
        if let Some(mut outbox) = self.outbox.lock() {
            outbox.clear();
        }
        true
    }

    /// Calls `f` with the side channel; `None`, without a call, if it is closed.
    pub(super) fn with_channel<R>(&self, f: impl FnOnce(&Channel) -> R) -> Option<R> {
        self.while_open(|| {
            let fd = PrivateFd::adopt(self.channel.load(Acquire))?;
            // Not dropped, so the fd stays open for the link.
            let channel = ManuallyDrop::new(Channel::new(fd));
            Some(f(&channel))
        })
    }

    fn send_now(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        self.with_channel(|channel| channel.send(bytes, fds))
            .unwrap_or(Err(Errno::PIPE))
    }

    /// Sends a message on the side channel, or queues it until the channel has room. Messages arrive in order, unless
    /// the link goes down. `Err` if the message is neither sent nor queued.
    pub(super) fn post(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        // The buffer is not on the stack, which may be the small alternate stack of a signal handler.
        let mut buf = scratch::zeroed(MAX_MESSAGE).ok_or(SendError::Full)?;
        let bytes = message.encode(&mut buf).map_err(|_| SendError::Encoding)?;
        // The lock is held while sending, so that no message overtakes a queued one.
        let mut outbox = self.outbox.lock().ok_or(SendError::Full)?;
        let sent = if outbox.is_empty() {
            self.send_now(bytes, fds)
        } else {
            Err(Errno::AGAIN)
        };
        tracing::trace!(target: "rdmasock::link", link = self.slot.load(Relaxed), ?message, ?sent);
        if sent != Err(Errno::AGAIN) {
            return sent.map_err(send_error);
        }
        if outbox.len() >= MAX_OUTBOX {
            drop(outbox);
            self.ask_service();
            return Err(SendError::Down);
        }
        let fds: Result<Vec<_>, _> = fds.iter().map(|fd| PrivateFd::duplicate(*fd)).collect();
        outbox.push_back(Queued {
            bytes: bytes.to_vec(),
            fds: fds.map_err(send_error)?,
        });
        let first = outbox.len() == 1;
        drop(outbox);
        if first {
            self.ask_service();
        }
        Ok(())
    }

    fn ask_service(&self) {
        Library::get().service.submit(Command::Outbox(self.slot.load(Relaxed)));
    }

    /// Returns whether `MAX_OUTBOX` messages wait for room, more than a correct peer leaves unread.
    pub(super) fn is_overfull(&self) -> bool {
        self.outbox.lock().is_some_and(|o| o.len() >= MAX_OUTBOX)
    }

    /// Returns whether messages or requests to wake wait for room.
    pub(super) fn has_outbox(&self) -> bool {
        self.outbox.lock().is_none_or(|o| !o.is_empty()) || self.owed.iter().any(|word| word.load(SeqCst) != 0)
    }

    /// Sends the queued messages and requests to wake, since the side channel may have room again. True if none is
    /// left.
    pub(super) fn flush(&self) -> bool {
        let Some(mut outbox) = self.outbox.lock() else {
            return false;
        };
        while let Some(queued) = outbox.front() {
            let fds: Vec<BorrowedFd<'_>> = queued.fds.iter().map(AsFd::as_fd).collect();
            if self.send_now(&queued.bytes, &fds) == Err(Errno::AGAIN) {
                return false;
            }
            outbox.pop_front();
        }
        drop(outbox);
        for (at, word) in self.owed.iter().enumerate() {
            let mut bits = word.swap(0, SeqCst);
            while bits != 0 {
                let waiter = WaiterId((at * 64) as u16 + bits.trailing_zeros() as u16);
                if self.ask_to_wake(waiter) == Err(Errno::AGAIN) {
                    word.fetch_or(bits, SeqCst);
                    return false;
                }
                bits &= bits - 1;
            }
        }
        true
    }

    /// Keeps the button by which the peer's waiter `id` is woken, as long as the link is up. A second button for a
    /// waiter is an error: it would replace the first one, and a thread may be pressing that. At most `most` buttons
    /// are kept, and further ones are dropped. `Err` if the fd is no button, or if the waiter does not exist, is the
    /// service thread, or has a button already. Service thread only.
    pub(super) fn on_waiter(&self, id: u32, fd: PrivateFd, most: u32) -> Result<(), Broken> {
        let slot = self.buttons.get(id as usize).ok_or(Broken)?;
        if id == u32::from(SERVICE.0) || slot.load(Acquire) >= 0 {
            return Err(Broken);
        }
        let button = Button::received(fd).ok_or(Broken)?;
        if self.button_count.load(Acquire) < most {
            self.button_count.fetch_add(1, AcqRel);
            slot.store(button.release(), SeqCst);
        }
        Ok(())
    }

    /// Presses the button of the peer's `waiter`. False if there is none, or the descriptors are closed.
    fn press(&self, waiter: WaiterId) -> bool {
        let rung = self.while_open(|| {
            let fd = self.buttons.get(usize::from(waiter.0))?.load(Acquire);
            // SAFETY: the fd is open until `close`, and `while_open` keeps `close` from closing it meanwhile.
            (fd >= 0).then(|| doorbell::press(unsafe { BorrowedFd::borrow_raw(fd) }))
        });
        rung.is_some()
    }

    fn ask_to_wake(&self, waiter: WaiterId) -> Result<(), Errno> {
        let mut buf = [0u8; SHORT_MESSAGE];
        let id = waiter.0.into();
        let bytes = Message::Ring { id }.encode(&mut buf);
        self.send_now(bytes.map_err(|_| Errno::INVAL)?, &[])
    }
}

impl Outside for LocalPeer {
    fn send(&self, message: &Message) -> Result<(), SendError> {
        self.post(message, &[])
    }

    /// Wakes a waiter of the peer. If this process cannot, asks the peer's service thread to do so, by the message
    /// RING. RING goes ahead of queued messages, since it depends on none of them.
    fn ring(&self, waiter: WaiterId, page: &FlagPage) {
        let is_woken = match waiter {
            SERVICE => false,
            polling if polling.is_polling() => self.press(polling),
            thread => page.wake(thread),
        };
        // If the channel is full, the peer's service thread has unread messages, so it is awake and needs no wake-up.
        // Any other waiter is still owed one.
        if is_woken || self.ask_to_wake(waiter) != Err(Errno::AGAIN) || waiter == SERVICE {
            return;
        }
        if let Some(word) = self.owed.get(usize::from(waiter.0) / 64) {
            word.fetch_or(1 << (waiter.0 % 64), SeqCst);
            self.ask_service();
        }
    }
}

/// Returns the reason why a message was not sent, for the kernel's errno.
fn send_error(errno: Errno) -> SendError {
    match errno {
        Errno::INVAL => SendError::Encoding,
        Errno::AGAIN | Errno::TOOMANYREFS | Errno::MFILE | Errno::NOBUFS => SendError::Full,
        _ => SendError::Down,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_asks_to_wake_is_short() {
        let message = Message::Ring { id: u32::MAX };
        assert!(message.encode(&mut [0; SHORT_MESSAGE]).is_ok());
    }
}
