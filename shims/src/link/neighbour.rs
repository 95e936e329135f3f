//! The ways to a peer on the same host that are not memory: its side channel and its doorbells.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr,
    Ordering::{AcqRel, Acquire, Release, SeqCst},
};

use once_cell::race::OnceRef;
use rdmasock_core::fabric::SendError;
use rdmasock_core::fabric::layout::MAX_STREAMS;
use rdmasock_core::fabric::shm::Outside;
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::wire::{MAX_MESSAGE, Message};
use rustix::io::Errno;

use super::Link;
use crate::library::Library;
use crate::service::Command;
use crate::wait::{MAX_WAITERS, WaiterId};

/// A message for which there was no room.
struct Letter {
    bytes: Vec<u8>,
    fds: Vec<PrivateFd>,
}

/// More is not kept for a peer that reads nothing. A correct one owes at most a few a stream.
const MAX_OUTBOX: usize = 8 * MAX_STREAMS as usize;

/// See the module.
pub struct Neighbour {
    /// Whose they are, for the service thread.
    pub(super) link: OnceRef<'static, Link>,
    /// Null, or what only the service thread may free, under the outbox's lock.
    channel: AtomicPtr<Channel>,
    /// What the channel had no room for, in order.
    outbox: Lock<VecDeque<Letter>>,
    doorbells: Box<[AtomicI32]>,
    /// Rings at doorbells that are not known yet.
    owed: Box<[AtomicBool]>,
}

impl Neighbour {
    pub(super) fn new() -> Self {
        Self {
            link: OnceRef::new(),
            channel: AtomicPtr::new(null_mut()),
            outbox: Lock::new(VecDeque::new()),
            doorbells: (0..MAX_WAITERS).map(|_| AtomicI32::new(-1)).collect(),
            owed: (0..MAX_WAITERS).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// The side channel, if there is one. Service thread only, or under the outbox's lock.
    pub(super) fn channel(&self) -> Option<&Channel> {
        // SAFETY: null, or a box that `end` frees, on the service thread and under the lock.
        unsafe { self.channel.load(Acquire).as_ref() }
    }

    /// There is a peer, on the other side of this channel.
    pub(super) fn begin(&self, channel: Channel) {
        self.channel
            .store(Box::into_raw(Box::new(channel)), Release);
    }

    /// There is none any more. Service thread only.
    pub(super) fn end(&self) {
        if let Some(mut outbox) = self.outbox.lock() {
            outbox.clear();
            let channel = self.channel.swap(null_mut(), AcqRel);
            if !channel.is_null() {
                // SAFETY: from `begin`, and nobody uses it (`channel`).
                drop(unsafe { Box::from_raw(channel) });
            }
        }
        self.forget_doorbells();
    }

    /// Sends a message on the side channel, once there is room: delivered in order, and if the link
    /// does not go down.
    pub(super) fn post(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).map_err(|_| SendError::Encoding)?;
        // Held while sending: what is kept goes first.
        let mut outbox = self.outbox.lock().ok_or(SendError::Full)?;
        let sent = match self.channel() {
            None => Err(Errno::PIPE),
            Some(channel) if outbox.is_empty() => channel.send(bytes, fds),
            Some(_) => Err(Errno::AGAIN),
        };
        tracing::trace!(target: "rdmasock::link", link = self.link.get().map(|l| l.slot()), ?message, ?sent);
        if sent != Err(Errno::AGAIN) {
            return sent.map_err(send_error);
        }
        if outbox.len() >= MAX_OUTBOX {
            drop(outbox);
            self.ask_service(Command::Overfull);
            return Err(SendError::Down);
        }
        let fds: Result<Vec<_>, _> = fds.iter().map(|fd| PrivateFd::duplicate(*fd)).collect();
        outbox.push_back(Letter {
            bytes: bytes.to_vec(),
            fds: fds.map_err(send_error)?,
        });
        let first = outbox.len() == 1;
        drop(outbox);
        if first {
            self.ask_service(Command::AwaitRoom);
        }
        Ok(())
    }

    fn ask_service(&self, command: fn(&'static Link) -> Command) {
        if let Some(link) = self.link.get() {
            Library::get().service.submit(command(link));
        }
    }

    /// Whether more messages wait for room than a correct peer leaves unread.
    pub(super) fn is_overfull(&self) -> bool {
        self.outbox.lock().is_some_and(|o| o.len() >= MAX_OUTBOX)
    }

    /// Whether messages wait for room.
    pub(super) fn has_outbox(&self) -> bool {
        self.outbox.lock().is_none_or(|o| !o.is_empty())
    }

    /// There may be room on the side channel again. True if nothing is kept any more.
    pub(super) fn flush(&self) -> bool {
        let Some(mut outbox) = self.outbox.lock() else {
            return false;
        };
        while let Some(letter) = outbox.front() {
            let fds: Vec<BorrowedFd<'_>> = letter.fds.iter().map(AsFd::as_fd).collect();
            if self.channel().map(|c| c.send(&letter.bytes, &fds)) == Some(Err(Errno::AGAIN)) {
                return false;
            }
            outbox.pop_front();
        }
        true
    }

    /// The peer's waiter `id` sleeps on this eventfd.
    pub(super) fn on_waiter(&self, id: u32, fd: PrivateFd) {
        if let (Some(slot), Ok(id)) = (self.doorbells.get(id as usize), u16::try_from(id)) {
            let old = slot.swap(fd.release(), SeqCst);
            close_raw(old);
            self.pay(WaiterId(id));
        }
    }

    /// Rings if that is owed and possible.
    fn pay(&self, waiter: WaiterId) {
        if let (Some(owed), Some(fd)) = (
            self.owed.get(waiter.0 as usize),
            self.doorbells.get(waiter.0 as usize),
        ) && fd.load(SeqCst) >= 0
            && owed.swap(false, SeqCst)
        {
            self.try_ring(waiter);
        }
    }

    /// False if the doorbell is not known.
    fn try_ring(&self, waiter: WaiterId) -> bool {
        let fd = self
            .doorbells
            .get(waiter.0 as usize)
            .map_or(-1, |d| d.load(Acquire));
        if fd < 0 {
            return false;
        }
        // SAFETY: a doorbell is only closed with the link, by the service thread, after `alive`
        // was cleared and the fd taken out; a ring on a reused number is a needless wake-up of
        // our own eventfds at worst, since private numbers hold nothing else that takes 8 bytes.
        crate::wait::ring(unsafe { BorrowedFd::borrow_raw(fd) });
        true
    }
}

impl Outside for Neighbour {
    fn send(&self, message: &Message) -> Result<(), SendError> {
        self.post(message, &[])
    }

    /// Rings a doorbell of the peer; if its eventfd is still on its way to us, as soon as it is here.
    fn ring(&self, waiter: WaiterId) {
        if self.try_ring(waiter) {
            return;
        }
        // Noted first, then looked at again; `on_waiter` the other way round.
        if let Some(owed) = self.owed.get(waiter.0 as usize) {
            owed.store(true, SeqCst);
            self.pay(waiter);
        }
    }
}

/// Why a message was not sent, from the kernel's word.
fn send_error(errno: Errno) -> SendError {
    match errno {
        Errno::INVAL => SendError::Encoding,
        Errno::AGAIN | Errno::TOOMANYREFS | Errno::MFILE | Errno::NOBUFS => SendError::Full,
        _ => SendError::Down,
    }
}

impl Neighbour {
    /// Nobody is rung any more.
    fn forget_doorbells(&self) {
        for (slot, owed) in self.doorbells.iter().zip(&self.owed) {
            close_raw(slot.swap(-1, AcqRel));
            owed.store(false, Release);
        }
    }
}

fn close_raw(fd: i32) {
    drop(PrivateFd::adopt(fd));
}
