//! A blocking receive whose buffer a device writes to, past the ring: the peer's, which is told of it
//! (docs/protocol.md, P90–P95), or this end's, which reads what the peer's program lends (P97). What it has written
//! counts as what the ring has next; the ring does not have it.
//!
//! The buffer is registered for this one wait. Before the call returns, by whatever way, the peer has said that it
//! writes there no more, and what was asked for has come, or the bulk queue pair is given up; then the registration
//! ends too.

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

/// See the module.
pub struct Landing {
    socket: &'static Socket,
    remote: &'static Remote,
    mine: Vqpn,
    serial: u32,
    memory: *mut u8,
    /// Its registration ends last.
    pinned: Pinned,
    /// What has come was taken.
    is_taken: bool,
}

impl Landing {
    /// Tells the peer of the next piece of `iov`, for a call that is about to wait, holds the connection and has found
    /// nothing. `None` if that does not pay, or cannot be.
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
        // What registers memory allocates.
        if !may_try || handler::is_in_one() {
            return None;
        }
        let is_on_link = || socket.rx_mode.load(Acquire) == Mode::Link;
        // The buffer is for what follows all that was read.
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
        // SAFETY: the program's buffer, which nobody else looks at before the call returns, and this value goes first.
        let pinned = unsafe { Pinned::new(remote, memory, len, least, Role::Target) }?;
        let address = memory.expose_provenance() as u64;
        let serial = socket.rx.lock().and_then(|mut rx| {
            // Meanwhile the stream may have left the link, and come back as another.
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

    /// Whether it is over, and how many bytes are there then; they were read by this end's device, or not.
    fn look(&self) -> Option<(usize, bool)> {
        // First: what is not there when the link is down never will be.
        let is_down = self.remote.is_down();
        match self.remote.end().landed(self.mine, self.serial) {
            Some(Landed::Over(bytes)) => Some((bytes as usize, false)),
            Some(Landed::Read(bytes)) => Some((bytes as usize, true)),
            Some(Landed::Waits) if is_down => Some((0, false)),
            Some(Landed::Waits) | None => None,
        }
    }

    /// Whose call waits with it.
    pub fn socket(&self) -> &'static Socket {
        self.socket
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.look().is_some()
    }

    /// Takes what has come; gives how much, and whom to tell: then the peer [is told](Self::tell) too. The caller holds
    /// the lock, and drops this when it has let go of it.
    pub fn take(&mut self, rx: &mut Rx) -> (usize, Wake) {
        let (landed, is_read) = self.look().unwrap_or_default();
        rx.own.direct.on_landed(landed, now_ns());
        self.is_taken = true;
        // What the ring counts: after RESUME the rest comes by TCP.
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

    /// The peer hears of what was taken.
    pub fn tell(&self, wake: Wake) {
        ready::notify_peer(self.socket, wake);
        self.remote.end().settle_head(self.mine);
    }

    /// The call is about to return, or to go on elsewhere, and has not seen the end of it: has the peer say that it
    /// writes no more. Gives how many bytes have come.
    /// errno is as before: it may be what the call fails with.
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
        // Its end is the registration's.
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

    /// The call is unwound: what has come goes where the next call looks for it.
    #[cold]
    fn put_back(&mut self) {
        self.end_wait();
        let (landed, _) = self.look().unwrap_or_default();
        if let Some(mut rx) = self.socket.rx.lock() {
            rx.own.direct.on_landed(landed, now_ns());
            if let Some(Ok(spans)) = rx.consumer.as_mut().map(|consumer| consumer.spans(landed)) {
                // SAFETY: the buffer has so many bytes that were written by a device; the ring does not have them, and
                // its producer does not write there before they are read.
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
