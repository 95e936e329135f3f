//! What a close leaves to be done: the end of the directions, and of the stream on the link.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::{End, RxFlags, Wake};
use rdmasock_core::ids::{Nonce, Vqpn};

use super::flush;
use super::leave::{ask_back, end_on_link};
use super::scan::{Ahead, AtMark, look_ahead};
use crate::library::Library;
use crate::link::Link;
use crate::ready;
use crate::service::Command;
use crate::socket::{Control, Mode, Opened, Socket};

/// The program has closed the socket: nobody will read what comes over the link. (Not for a
/// direction that goes back to TCP: the peer would send there before it has sent again what we
/// have not read.) Gives whom the peer has waiting for room: nobody, in a ring that has been read; else the reset of the
/// kernel's socket tells, if there still is one.
pub fn refuse(socket: &'static Socket) -> Wake {
    let rx = socket.rx.lock();
    let consumer = rx.as_ref().and_then(|rx| rx.consumer.as_ref());
    consumer.map_or(Wake::NONE, |c| c.set_flags(RxFlags::RX_CLOSED))
}

/// The connection was closed where no hook saw it, so the kernel knows nothing of what is unread on the link. The peer sends that
/// again over TCP, where it is answered as TCP answers it: by a reset. True if there is something. The caller holds the
/// control lock.
pub fn return_unread(socket: &'static Socket, control: &Control) -> bool {
    let (Some(opened), Some(yours)) = (control.opened, control.peer) else {
        return false;
    };
    let (from, wake) = {
        let Some(mut rx) = socket.rx.lock() else {
            return false;
        };
        // What TCP has brought already comes after what the link holds.
        if socket.rx_mode.load(Acquire) != Mode::Link || rx.stays || !rx.carry.is_empty() {
            return false;
        }
        let Some(consumer) = rx.consumer.as_mut() else {
            return false;
        };
        if !consumer.available().is_ok_and(|n| n > 0) {
            return false;
        }
        let Ok(wake) = consumer.stop() else {
            return false;
        };
        (consumer.position(), wake)
    };
    ready::notify_peer(socket, wake);
    ask_back(opened.link, yours, Some(from));
    true
}

/// Markers that may be on their way to a socket that is being closed.
pub struct Awaited {
    /// What each of the markers starts with.
    pub nonce: Nonce,
    /// The part of the next marker that has come.
    pub part: Vec<u8>,
}

/// The program closes the socket: the markers that may be on their way from the other end. The caller
/// holds the control lock.
pub fn scan_left(socket: &'static Socket, control: &mut Control) -> Option<Awaited> {
    let rx = socket.rx.lock()?;
    let (ahead, mut rx) = look_ahead(socket, control, rx, AtMark::GoOn, || socket.rx.lock())?;
    match ahead {
        Ahead::Nothing => rx.scan.map(|nonce| Awaited {
            nonce,
            part: rx.carry.take(),
        }),
        // The kernel has no part in these unread bytes, so it would not reset.
        Ahead::Payload { carry: 1.., .. } => {
            if let Some(anchor) = socket.anchor_fd() {
                let now = Some(std::time::Duration::ZERO);
                let _ = rustix::net::sockopt::set_socket_linger(anchor, now);
            }
            None
        }
        _ => None,
    }
}

/// Who sleeps at the other end of a link within the host, to be woken once the kernel has sent its FIN: only then is the mark an
/// end. That the FIN wakes him too is not enough, for he would hear of it after what is sent on other connections next.
pub struct Farewell(Option<(&'static Link, Wake, Vqpn)>);

impl Farewell {
    /// Nobody is to be woken.
    pub const NONE: Self = Self(None);

    /// Who is woken by `wake`, which the end mark has given.
    pub fn of(socket: &Socket, wake: Wake) -> Self {
        let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
        let link = socket.link().filter(|l| !wake.is_none() && !l.is_remote());
        Self(link.map(|link| (link, wake, theirs)))
    }

    /// The kernel's socket is closed, or shut down.
    pub fn tell(self) {
        // The number may be another stream's by now, which is looked at in vain then.
        if let Some((link, wake, theirs)) = self.0 {
            let errno = crate::errno::get();
            link.notify(wake, theirs);
            crate::errno::set(errno);
        }
    }
}

/// The program closes the socket: ends the sending direction, and gives what TCP has not taken yet
/// of what has to precede its end. The caller holds the control lock.
pub fn close_tx(socket: &'static Socket) -> (Vec<u8>, Farewell) {
    let mut farewell = Farewell::NONE;
    {
        let Some(mut tx) = socket.tx.lock() else {
            return (Vec::new(), farewell);
        };
        if socket.tx_mode.load(Acquire) == Mode::Link {
            farewell = Farewell::of(socket, end_on_link(socket, &mut tx, End::Fin));
        } else if std::mem::take(&mut tx.then_link)
            && let Some(producer) = tx.producer.as_mut()
        {
            let _ = producer.end(End::Fin);
        }
        tx.then_shut = false;
    }
    flush(socket);
    let unsent = socket.tx.lock();
    let unsent = unsent.map(|mut tx| std::mem::take(&mut tx.marker));
    (unsent.unwrap_or_default(), farewell)
}

/// The program closes the socket before all of `unsent` is in TCP, or while markers are `awaited`: see
/// `service::linger`. The caller holds the control lock.
pub fn linger(socket: &'static Socket, awaited: Option<Awaited>, unsent: Vec<u8>) {
    let Some(anchor) = socket.anchor_fd() else {
        return;
    };
    // A program that asked for a reset gets it.
    let hard = rustix::net::sockopt::socket_linger(anchor)
        .is_ok_and(|l| l == Some(std::time::Duration::ZERO));
    if hard || (awaited.is_none() && unsent.is_empty()) {
        return;
    }
    if let Ok(copy) = rdmasock_core::os::privatefd::PrivateFd::duplicate_closing(anchor) {
        if unsent.is_empty() {
            let _ = rustix::net::shutdown(&copy, rustix::net::Shutdown::Write);
        }
        Library::get()
            .service
            .submit(Command::Linger(copy, awaited, unsent));
    }
}

/// Gives our end of the stream on the link back. The directions are on TCP, or the socket is
/// being closed.
pub fn close_stream(socket: &'static Socket, control: &mut Control) {
    let consumer = socket.rx.lock().and_then(|mut rx| {
        rx.stays = false;
        rx.consumer.take()
    });
    control.resume = None;
    if let Some(mut tx) = socket.tx.lock() {
        tx.producer = None;
        tx.is_suspended = false;
    }
    let peer = control.peer.take();
    match control.opened.take() {
        Some(Opened {
            link,
            mine,
            asked: true,
        }) => link.close_unanswered(mine, consumer),
        Some(Opened { link, mine, .. }) => link.close(mine, peer, consumer),
        None => {
            if let (Some(link), Some(peer)) = (socket.link(), peer) {
                link.done_with(peer);
            }
        }
    }
    socket.link.store(std::ptr::null_mut(), Relaxed);
    control.asked_back = false;
    if let Some(stats) = socket.stats() {
        stats.set_link(None);
    }
}
