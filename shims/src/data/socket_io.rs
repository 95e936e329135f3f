//! Implements core's traits for a connection (`stream::connection`). By these traits the connection reaches the process
//! around it: the kernel's socket, the links, the service thread and the statistics.
//!
//! No file imports this one: core's functions find these implementations by the socket's type.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rdmasock_core::fabric::ring::{Producer, Wake};
use rdmasock_core::ids::{InstanceId, Vqpn};
use rdmasock_core::stats::{Path, Reason, Why};
use rdmasock_core::stream::connection::{Gone, Half, Peeked, SocketIo, Task, Tcp, Unsent};
use rdmasock_core::stream::handshake::Role;
use rdmasock_core::wire::LinkOffer;
use rustix::event::PollFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use crate::config::config;
use crate::data::{backpressure, tx};
use crate::notify::{ready, reset};
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::mailbox::Command;
use crate::objects::socket::{Socket, Stage, Tx};
use crate::objects::{link, socket};
use crate::sys::points::point;
use crate::sys::sockopt;
use crate::sys::tcp_info::Positions;

impl SocketIo for Socket {
    type Link = &'static Link;
    type Tcp = Anchor;
    type Tx = socket::TxOwn;
    type Rx = socket::RxOwn;
    type Control = socket::ControlOwn;

    fn slot(&self) -> u32 {
        self.slot
    }

    fn instance(&self) -> InstanceId {
        Library::get().id
    }

    fn now(&self) -> u64 {
        crate::sys::time::now_ns()
    }

    fn later(&self, task: Task) {
        Library::get().service.submit(Command::Do(self.into(), task));
    }

    fn tcp(&self) -> Option<Anchor> {
        self.numbers.anchor_fd().map(Anchor)
    }

    fn reset_on_close(&self) {
        if let Some(fd) = self.numbers.anchor_fd() {
            let _ = rustix::net::sockopt::set_socket_linger(fd, Some(std::time::Duration::ZERO));
        }
    }

    fn reset(&self) {
        reset::reset(self);
    }

    fn report_reset(&self, is_shut: bool) {
        reset::report_reset(self, is_shut);
    }

    fn may_scan(&self, &Anchor(fd): &Anchor) -> bool {
        if sockopt::is_beyond_links(fd) {
            return false;
        }
        // The program may have set these options on the listener, and the accepted socket has inherited them. These
        // stores only switch an option on. If a call of the program is switching the option off at this moment, that
        // call clears the value itself.
        if sockopt::get(fd, sockopt::INQ) == Some(1) {
            self.options.tells_more.store(true, Relaxed);
        }
        if let Some(ms @ 1..) = sockopt::get(fd, sockopt::USER_TIMEOUT) {
            self.options.user_timeout.store(ms.cast_unsigned(), Release);
        }
        true
    }

    fn bound_wait(&self) {
        if let Some(fd) = self.numbers.anchor_fd() {
            self.keepalive.bound(fd);
        }
    }

    fn link(&self) -> Option<&'static Link> {
        self.link()
    }

    fn set_link(&self, link: Option<&&'static Link>) {
        let link = link.map_or(std::ptr::null(), |link| std::ptr::from_ref::<Link>(link));
        self.link.store(link.cast_mut(), Release);
    }

    fn set_peer(&self, theirs: Vqpn) {
        point!("opened: the peer's number is not known");
        self.peer_vqpn.store(theirs.0, Release);
    }

    fn notify_peer(&self, wake: Wake) {
        ready::notify_peer(self, wake);
    }

    fn wakes_at_end(&self, wake: Wake) -> Option<(&'static Link, Wake, Vqpn)> {
        let theirs = Vqpn(self.peer_vqpn.load(Relaxed));
        let link = self.link().filter(|l| !wake.is_none() && !l.is_remote());
        link.map(|link| (link, wake, theirs))
    }

    fn is_link_over(&self) -> bool {
        let mut ends = ready::ENDED;
        if self.rx_shut.load(Acquire) {
            // Once this program has shut its receiving direction, the kernel reports RDHUP whether or not the peer has
            // ended.
            ends &= !(libc::EPOLLRDHUP as u32);
        }
        self.wakes.anchor.load(Acquire) & ends != 0 || self.link().is_none_or(|l| !l.is_alive())
    }

    fn offer_link(&self, peer: InstanceId, reached_at: Option<IpAddr>) -> Option<LinkOffer> {
        link::offer(peer, reached_at)
    }

    fn need_link(&self, peer: InstanceId, offer: Option<LinkOffer>) {
        Library::get()
            .service
            .submit(Command::NeedLink(self.into(), peer, offer));
    }

    fn on_link(&self, tx: &mut Tx) {
        // A reader may offer larger rings. If the program has set the size of its send buffer, that size bounds how
        // many bytes may be unread in these rings.
        if let Some(size) = backpressure::set_size(self)
            && let Some(producer) = tx.producer.as_mut()
        {
            producer.estimate_bound(size.min(config().ring_max.bytes()));
        }
    }

    fn off_link(&self, tx: &mut Tx) {
        tx::pass_cork(self, tx);
    }

    fn on_marked(&self, tx: &Tx) {
        // If bytes are in a send buffer of this end, the service thread asks the peer for room until they are gone.
        if tx.producer.as_ref().is_some_and(Producer::is_aside) {
            Library::get().service.submit(Command::Blocked(self.into()));
        }
    }

    fn fill_ring(&self, _: &Tx) {
        if let Some(remote) = self.link().and_then(Link::remote) {
            // SAFETY: lent memory (`zero_copy`) is readable. The call that has lent it has not returned, and takes it
            // back before it returns (`Lent`).
            unsafe { remote.end().take_source(Vqpn(self.peer_vqpn.load(Relaxed))) };
        }
    }

    fn promoted(&self) {
        self.promotion.attempts.on_promoted();
        self.told.set_why(Reason::None);
        if !self.told.shown.swap(true, Relaxed) {
            crate::notify::threshold::show_addresses(self);
        }
        if self.link().is_some_and(Link::is_remote)
            && let Some(fd) = self.numbers.anchor_fd()
        {
            self.keepalive.begin(fd);
        }
    }

    fn pin(&self) {
        self.promotion.set_stage(Stage::Pinned);
    }

    fn abandoned(&self, is_unwanted: bool) {
        if self.promotion.stage() == Stage::Busy {
            if is_unwanted {
                self.promotion.set_stage(Stage::Pinned);
            } else {
                self.promotion.retry_later();
            }
        }
    }

    fn set_why(&self, why: Why) {
        self.told.set_why(why);
    }

    fn set_path(&self, direction: Half, on_link: bool) {
        let path = self.link().filter(|_| on_link).map_or(Path::Tcp, Link::path);
        if path != Path::Tcp {
            self.told.was_between_hosts.store(path == Path::Verbs, Relaxed);
        }
        self.told.count(|stats| match direction {
            Half::Sending => stats.set_tx_path(path),
            Half::Receiving => stats.set_rx_path(path),
        });
    }

    fn show_link(&self, link: Option<&&'static Link>) {
        self.told.count(|stats| stats.set_link(link.map(|l| l.slot())));
    }

    fn count_again(&self, bytes: usize) {
        self.told.count(|stats| stats.move_tx_to_tcp(bytes as u64));
    }

    fn count_ours(&self, direction: Half, bytes: usize) {
        match direction {
            Half::Sending => self.told.ledger.sent.add_ours(bytes),
            Half::Receiving => self.told.ledger.received.add_ours(bytes),
        }
    }
}

/// The kernel's TCP socket. Its fd stands for the connection as long as one of the connection's locks is held.
#[derive(Clone, Copy)]
pub struct Anchor(BorrowedFd<'static>);

impl Tcp for Anchor {
    fn has_failed(&self) -> bool {
        ready::has_failed(ready::anchor(self.0, PollFlags::empty()))
    }

    fn send(&self, bytes: &[u8]) -> Result<usize, Unsent> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        retry_on_intr(|| rustix::net::send(self.0, bytes, flags)).map_err(|error| match error {
            Errno::AGAIN => Unsent::Full,
            error if reset::is_end(error.raw_os_error()) => Unsent::Failed(error.raw_os_error()),
            _ => Unsent::Dead,
        })
    }

    fn written(&self) -> Option<u64> {
        Positions::of(self.0, Role::Connector).map(|p| p.written)
    }

    /// Makes the kernel send a marker at once. Nagle's algorithm would otherwise hold the marker until the other end's
    /// delayed acknowledgement, and stop the direction for 40 ms. Setting TCP_NODELAY sends it even if the socket is
    /// corked (tcp(7)).
    fn push(&self) {
        use rustix::net::sockopt::{set_tcp_nodelay, tcp_nodelay};
        if tcp_nodelay(self.0) == Ok(false) {
            let _ = set_tcp_nodelay(self.0, true);
            point!("flush: TCP_NODELAY is on for a moment");
            let _ = set_tcp_nodelay(self.0, false);
        }
    }

    /// Makes no receive while TCP has no bytes. Such a receive would take a pending error from the socket (`sk_err`),
    /// which SO_ERROR, poll and send have to report as well.
    fn peek(&self, buf: &mut [u8]) -> Peeked {
        let fd = self.0;
        let mut is_over = false;
        loop {
            let is_empty = rustix::io::ioctl_fionread(fd).is_ok_and(|n| n == 0);
            if is_empty && is_over {
                return Peeked::Ended;
            }
            if is_empty {
                let events = ready::anchor(fd, PollFlags::IN | PollFlags::RDHUP);
                // Once the end has come, all bytes that precede it have come too, so they are counted once more.
                is_over = ready::is_peers_end(fd, events);
                if is_over {
                    continue;
                }
                if ready::without_queue(events) & ready::ENDED != 0 {
                    return Peeked::Shut;
                }
                // FIONREAD does not count bytes behind urgent data.
                if events & libc::EPOLLIN as u32 == 0 {
                    return Peeked::Nothing;
                }
            }
            match rustix::net::recv(fd, &mut *buf, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((_, 0)) if !ready::has_peer_ended(fd) => return Peeked::Shut,
                Ok((_, 0)) => return Peeked::Ended,
                Ok((_, n)) => return Peeked::Bytes(n.min(buf.len())),
                Err(Errno::AGAIN) => return Peeked::Nothing,
                Err(Errno::INTR) => {}
                Err(_) => return Peeked::Ended,
            }
        }
    }

    fn peek_all(&self, buf: &mut [u8]) -> usize {
        let room = buf.len().min(self.unread());
        if room == 0 {
            // As in `peek`, a receive while TCP has no bytes would take an error from the socket. A receive into an
            // empty buffer would do so too.
            return 0;
        }
        match rustix::net::recv(self.0, buf, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, n)) => n.min(room),
            Err(_) => 0,
        }
    }

    fn unread(&self) -> usize {
        rustix::io::ioctl_fionread(self.0).unwrap_or(0) as usize
    }

    fn take(&self, len: usize) -> Result<(), Gone> {
        let (mut left, mut sink) = (len, [0u8; 512]);
        while let Some(piece) = sink.get_mut(..left.min(512)).filter(|piece| !piece.is_empty()) {
            match retry_on_intr(|| rustix::net::recv(self.0, &mut *piece, RecvFlags::DONTWAIT)) {
                Ok((_, n)) if n > 0 => left -= n.min(left),
                _ => return Err(Gone),
            }
        }
        Ok(())
    }

    fn receive(&self, buf: &mut [u8]) -> Peeked {
        let fd = self.0;
        let is_empty = || rustix::io::ioctl_fionread(fd).is_ok_and(|n| n == 0);
        // A receive while TCP has no bytes would take an error from the socket, which other calls have to report.
        if is_empty() {
            let has_ended = ready::has_peer_ended(fd) && is_empty();
            return if has_ended { Peeked::Ended } else { Peeked::Nothing };
        }
        if sockopt::is_at_mark(fd) {
            return Peeked::Nothing;
        }
        match retry_on_intr(|| rustix::net::recv(fd, &mut *buf, RecvFlags::DONTWAIT)) {
            Ok((_, 0)) => Peeked::Ended,
            Ok((_, n)) => Peeked::Bytes(n.min(buf.len())),
            Err(_) => Peeked::Nothing,
        }
    }

    fn is_at_mark(&self) -> bool {
        sockopt::is_at_mark(self.0)
    }

    fn has_peer_ended(&self) -> bool {
        ready::has_peer_ended(self.0)
    }

    fn end(&self) {
        let _ = rustix::net::shutdown(self.0, Shutdown::Write);
    }

    fn end_receiving(&self) {
        let _ = rustix::net::shutdown(self.0, Shutdown::Read);
    }
}

#[cfg(test)]
mod tests;
