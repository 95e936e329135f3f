//! A blocking receive whose buffer a device writes to, past the ring. The peer's device does so after an advert
//! (docs/protocol.md, P90–P95). This end's device does so by a READ of what the peer's program lends (P97). Bytes in
//! the buffer count as the ring's next bytes, though the ring does not have them.
//!
//! The buffer is registered for one wait. Before the call returns, in any way, the peer has confirmed that it writes no
//! more, and all READs have completed. If the peer does not answer, the bulk queue pair is given up instead. Then the
//! registration ends too.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::remote::qp::Role;
use rdmasock_core::fabric::remote::{Buffer, Landed};
use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Event;

use crate::config::{ZeroCopy, config};
use crate::notify::ready;
use crate::objects::library::Library;
use crate::objects::link::Remote;
use crate::objects::pinned::Pinned;
use crate::objects::socket::{Mode, Rx, Socket};
use crate::signals::handler;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::time::now_ns;

/// The wait of a receive with a buffer that a device may write to. See the file's header.
pub struct Landing {
    socket: &'static Socket,
    remote: &'static Remote,
    mine: Vqpn,
    serial: u32,
    memory: *mut u8,
    /// Dropped after `Landing::drop` has run, so that the registration ends last.
    pinned: Pinned,
    /// Whether the call has taken the bytes from the buffer.
    is_taken: bool,
}

impl Landing {
    /// Advertises the next piece of `iov` to the peer. The call is about to wait, holds the connection and has found
    /// the ring empty. Returns `None` if an advert does not pay or is not possible. Preserves errno.
    pub fn new(socket: &'static Socket, iov: &mut Iov) -> Option<Self> {
        let errno = errno::get();
        let landing = Self::advertise(socket, iov);
        errno::set(errno);
        landing
    }

    fn advertise(socket: &'static Socket, iov: &mut Iov) -> Option<Self> {
        let link = socket.link()?;
        let remote = link.remote()?;
        let (memory, len) = iov.head();
        let least = remote.threshold(false);
        if len < least || !remote.goes_direct(link.slot()) {
            return None;
        }
        let is_fixed = config().zcopy != ZeroCopy::Auto;
        let may_try = socket.rx.lock()?.own.direct.may_try(least, is_fixed, now_ns());
        // Registering memory allocates, which a signal handler must not do.
        if !may_try || handler::is_in_one() {
            return None;
        }
        let is_on_link = || socket.rx_mode.load(Acquire) == Mode::Link;
        // The advert is for the bytes that follow all that was read, so the peer has to know the head first.
        let (theirs, wake) = {
            let mut rx = socket.rx.lock().filter(|_| is_on_link())?;
            (socket.peer_vqpn.load(Relaxed), rx.consumer.as_mut()?.publish())
        };
        ready::notify_peer(socket, wake);
        let end = remote.end();
        let (mine, room) = end.room_to_land(Vqpn(theirs))?;
        let len = len.min(room as usize);
        if len < least {
            return None;
        }
        // SAFETY: the memory is the program's buffer, which only this call uses before it returns. This value is
        // dropped before that.
        let pinned = unsafe { Pinned::new(remote, memory, len, least, Role::Target) }?;
        let address = memory.expose_provenance() as u64;
        let serial = socket.rx.lock().and_then(|mut rx| {
            // Meanwhile the stream may have left the link and come back as another stream.
            let is_same = is_on_link() && link.slot_of(mine) == Some(socket.slot);
            let is_free = is_same && !rx.own.direct.is_waiting && rx.consumer.as_ref().is_some_and(|c| !c.is_frozen());
            let buffer = Buffer {
                address,
                length: pinned.len() as u32,
                key: *pinned.key(),
            };
            let advert = is_free.then(|| end.advertise(mine, buffer))?;
            rx.own.direct.is_waiting = advert.is_some();
            Some(advert?.serial)
        })?;
        Some(Self {
            socket,
            remote,
            mine,
            serial,
            memory,
            pinned,
            is_taken: false,
        })
    }

    /// If the transfer is over, returns the bytes in the buffer, and true if this end's device has read them. `None` if
    /// the transfer goes on.
    fn look(&self) -> Option<(usize, bool)> {
        // Read first: bytes that have not come when the link is down never will.
        let is_down = self.remote.is_down();
        match self.remote.end().landed(self.mine, self.serial) {
            Some(Landed::Over(bytes)) => Some((bytes as usize, false)),
            Some(Landed::Read(bytes)) => Some((bytes as usize, true)),
            Some(Landed::Waits) if is_down => Some((0, false)),
            Some(Landed::Waits) | None => None,
        }
    }

    /// Returns the socket whose call waits.
    pub fn socket(&self) -> &'static Socket {
        self.socket
    }

    /// Returns whether the transfer is over.
    pub fn is_over(&self) -> bool {
        self.look().is_some()
    }

    /// Takes the bytes in the buffer. Returns how many, and the wake-up that [`tell`](Self::tell) has to send. The
    /// caller holds the direction's lock, and drops this value only after it has released the lock.
    pub fn take(&mut self, rx: &mut Rx) -> (usize, Wake) {
        let (landed, is_read) = self.look().unwrap_or_default();
        rx.own.direct.on_landed(landed, now_ns());
        self.is_taken = true;
        // The count is bounded by what the ring counts, because after RESUME the rest comes by TCP.
        let Some(consumer) = rx.consumer.as_mut().filter(|_| landed > 0) else {
            return (0, Wake::NONE);
        };
        let taken = consumer.spans(landed).map_or(0, |spans| spans.len()).min(landed);
        if let Some(stats) = self.socket.told.stats() {
            stats.add_rx_link(taken as u64);
        }
        let stats = &Library::get().stats;
        let event = if is_read {
            Event::RendezvousLanded
        } else {
            Event::DirectReceived
        };
        stats.count_many(event, taken as u64);
        rx.own.direct.bytes += taken as u64;
        let wake = consumer.consume(taken);
        let other = consumer.publish();
        (taken, if wake.is_none() { other } else { wake })
    }

    /// Notifies the peer that the bytes were taken.
    pub fn tell(&self, wake: Wake) {
        ready::notify_peer(self.socket, wake);
        self.remote.end().settle_head(self.mine);
    }

    /// Ends a wait whose transfer is not known to be over, because the call returns or goes on by another way.
    /// Withdraws the advert and waits until the peer confirms. Returns the bytes in the buffer. Preserves errno, which
    /// may be the one that the call fails with.
    #[cold]
    pub fn leave(mut self) -> usize {
        if self.pinned.is_of_a_parent() {
            return 0;
        }
        let errno = errno::get();
        self.end_wait();
        let socket = self.socket;
        let landed = socket.rx.lock().map(|mut rx| self.take(&mut rx));
        if let Some((_, wake)) = landed {
            self.tell(wake);
        }
        // The drop ends the registration.
        drop(self);
        errno::set(errno);
        landed.map_or(0, |(taken, _)| taken)
    }

    fn end_wait(&self) {
        if !self.is_over() {
            self.remote.end().withdraw(self.mine, self.serial);
            self.remote.await_word(|| self.is_over());
        }
    }

    /// Puts the bytes from the buffer into the ring, where the next call looks for them. The call is being unwound.
    #[cold]
    fn put_back(&mut self) {
        self.end_wait();
        let (landed, _) = self.look().unwrap_or_default();
        if let Some(mut rx) = self.socket.rx.lock() {
            rx.own.direct.on_landed(landed, now_ns());
            if let Some(Ok(spans)) = rx.consumer.as_mut().map(|consumer| consumer.spans(landed)) {
                // SAFETY: a device has written at least `landed` bytes to the buffer. The ring's spans at these
                // positions hold no bytes, and the producer does not write there before the bytes are consumed.
                unsafe { spans.copy_in(0, self.memory, landed.min(spans.len())) };
            }
        }
        self.remote.end().put_back(self.mine);
        ready::notify_local(self.socket);
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if self.pinned.is_of_a_parent() {
            return;
        }
        if !self.is_taken {
            self.put_back();
        }
    }
}
