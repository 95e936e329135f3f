//! A blocking receive whose buffer the peer's device writes to, past the ring (docs/protocol.md, P90–P95). What it has
//! written counts as what the ring has next; the ring does not have it.
//!
//! The buffer is registered for this one wait. Before the call returns, by whatever way, the peer has said that it
//! writes there no more, or its bulk queue pair is given up; then the registration ends too.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::remote::Landed;
use rdmasock_core::fabric::remote::qp::Role;
use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Event;

use crate::config::{ZeroCopy, config};
use crate::errno;
use crate::handler;
use crate::iov::Iov;
use crate::library::Library;
use crate::link::Remote;
use crate::pinned::Pinned;
use crate::ready;
use crate::socket::{Mode, Rx, Socket};

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
        if len < remote.direct_min() || !remote.goes_direct(link.slot()) {
            return None;
        }
        // Where the user has fixed a size here, that holds.
        let least = match config().zcopy {
            ZeroCopy::Auto => match remote.end().invited(Vqpn(socket.peer_vqpn.load(Relaxed)))? {
                0 => return None,
                invited => remote.direct_min().max(invited as usize),
            },
            ZeroCopy::Off | ZeroCopy::From(_) => remote.direct_min(),
        };
        let may_try = len >= least && socket.rx.lock()?.own.direct.may_try(least);
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
            let (len, key) = (pinned.len() as u32, pinned.key().remote);
            let advert = is_free.then(|| end.advertise(mine, address, len, key))?;
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

    /// Whether the peer has had its say, and how many bytes are there then.
    pub fn landed(&self) -> Option<usize> {
        // First: what is not there when the link is down never will be.
        let is_down = self.remote.is_down();
        match self.remote.end().landed(self.mine, self.serial) {
            Some(Landed::Over(bytes)) => Some(bytes as usize),
            Some(Landed::Waits) if is_down => Some(0),
            Some(Landed::Waits) | None => None,
        }
    }

    /// Takes what has come; gives how much, and whom to tell: then the peer [is told](Self::tell) too. The caller holds
    /// the lock, and drops this when it has let go of it.
    pub fn take(&mut self, rx: &mut Rx) -> (usize, Wake) {
        let landed = self.landed().unwrap_or(0);
        rx.own.direct.on_landed(landed);
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
        stats.count_many(Event::DirectReceived, taken as u64);
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
        if self.landed().is_none() {
            self.remote.end().withdraw(self.mine, self.serial);
            self.remote.await_word(|| self.landed().is_some());
        }
    }

    /// The call is unwound: what has come goes where the next call looks for it.
    #[cold]
    fn put_back(&mut self) {
        self.end_wait();
        let landed = self.landed().unwrap_or(0);
        if let Some(mut rx) = self.socket.rx.lock() {
            rx.own.direct.on_landed(landed);
            if let Some(Ok(spans)) = rx.consumer.as_mut().map(|consumer| consumer.spans(landed)) {
                // SAFETY: the buffer has so many bytes that were written by the peer; the ring does not have them, and
                // its producer does not write there before they are read.
                unsafe { spans.copy_in(0, self.memory, landed.min(spans.len())) };
            }
        }
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
