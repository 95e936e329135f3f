//! How many bytes can be read: FIONREAD.
//!
//! The count has all bytes that have come, as the kernel's has. An edge-triggered program may read just as many bytes,
//! take that for the end of the available bytes (nginx does), and wait.

use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::scratch::Scratch;
use rdmasock_core::stream::connection::{self, Ahead, AtMark};
use rdmasock_core::wire::scan::payload_in;
use rustix::net::RecvFlags;

use crate::notify::ready::{ENDED, has_peer_ended, is_watched};
use crate::objects::socket::{Mode, Rx, Socket};

/// Returns the bytes that can be read now; `None` where the kernel's own count is right.
pub fn available(socket: &'static Socket) -> Option<usize> {
    crate::notify::reclaim::reclaim(socket);
    // Each pass may move the direction on. It moves at most from TCP to the link and back.
    for _ in 0..4 {
        match socket.rx_mode.load(Acquire) {
            Mode::Link => {
                let mut rx = socket.rx.lock()?;
                let goes_on = rx.goes_on_in_tcp();
                let n = rx.consumer.as_mut()?.available().ok()? as usize;
                if n > 0 && goes_on {
                    return Some(n + rx.carry.len() + in_kernel(socket));
                }
                drop(rx);
                if n > 0 || !connection::leave_link_at_end(socket) {
                    return Some(n);
                }
            }
            Mode::Marked => {
                let mut control = socket.control.lock()?;
                let rx = socket.rx.lock()?;
                let (ahead, rx) = connection::look_ahead(socket, &mut control, rx, AtMark::Stop)?;
                match ahead {
                    Ahead::Payload { .. } => return Some(among_markers(socket, &rx)),
                    Ahead::Nothing | Ahead::Shut => return Some(0),
                    Ahead::Ended => return None,
                    Ahead::Changed => {}
                }
            }
            _ => return None,
        }
    }
    None
}

/// Returns whether the bytes that TCP has may be markers.
pub fn may_have_markers(socket: &'static Socket) -> bool {
    socket.rx_mode.load(Acquire) != Mode::Tcp
}

/// Returns whether the program reads something else before the first byte that TCP has. An urgent mark in TCP is not
/// next then.
pub fn comes_before_tcp(socket: &'static Socket) -> bool {
    let mode = socket.rx_mode.load(Acquire);
    mode != Mode::Tcp
        && socket.rx.lock().is_some_and(|mut rx| {
            let consumer = rx.consumer.as_mut().filter(|_| mode == Mode::Link);
            let on_link = consumer.is_some_and(|c| c.available().is_ok_and(|n| n > 0));
            on_link || !rx.carry.is_empty()
        })
}

/// The part of the receiving direction that the kernel does not count, or wrongly counts as the program's.
#[derive(Clone, Copy, Default)]
pub struct Uncounted {
    /// Bytes on the link that have not been read.
    pub on_link: u64,
    /// Bytes taken from TCP that have not been read.
    pub carried: u64,
    /// Bytes of markers that TCP has brought, whether they are still in TCP or in the carry.
    pub ours: u64,
    /// When bytes were last taken from the link, by the [tick](crate::sys::time::tick); 0 means never.
    pub last: u64,
}

/// Returns the [`Uncounted`] of this moment, without moving the direction on. The caller holds the direction's lock.
pub fn uncounted(socket: &Socket, rx: &mut Rx) -> Uncounted {
    let mode = socket.rx_mode.load(Acquire);
    let in_tcp = || (rx.carry.len() + in_kernel(socket)) as u64;
    let ours = match mode {
        // The bytes that TCP has are, or will be, a RESUME.
        Mode::Link if !rx.goes_on_in_tcp() => in_tcp(),
        Mode::Marked => in_tcp().saturating_sub(among_markers(socket, rx) as u64),
        _ => 0,
    };
    let (carried, last) = (rx.carry.len() as u64, rx.own.last);
    let consumer = rx.consumer.as_mut().filter(|_| mode == Mode::Link);
    Uncounted {
        on_link: consumer.map_or(0, |c| c.available().unwrap_or(0)),
        carried,
        ours,
        last,
    }
}

/// Returns how many bytes can be read after a receive, for TCP_INQ. The end counts as one more, as in Linux
/// (`tcp_inq_hint`). On a watched socket the check for the end makes no system call before the connection has ended.
pub fn after_receive(socket: &'static Socket) -> usize {
    let n = available(socket).unwrap_or_else(|| in_kernel(socket));
    let may_have_ended = !is_watched(socket) || socket.wakes.anchor.load(Acquire) & ENDED != 0;
    let has_ended = || {
        let _rx = socket.rx.lock();
        socket.numbers.anchor_fd().is_some_and(has_peer_ended)
    };
    n + usize::from(may_have_ended && has_ended())
}

fn among_markers(socket: &Socket, rx: &Rx) -> usize {
    let (carried, more) = (rx.carry.len(), in_kernel(socket));
    let Some(nonce) = rx.scan else {
        return carried + more;
    };
    let Some(mut bytes) = Scratch::new(carried + more) else {
        return carried + more;
    };
    if let Some(front) = bytes.get_mut(..carried) {
        front.copy_from_slice(rx.carry.as_slice());
    }
    let peeked = match (socket.numbers.anchor_fd(), bytes.get_mut(carried..)) {
        // Without room, a receive would take an error from the socket.
        (Some(fd), Some(rest)) if more > 0 => {
            rustix::net::recv(fd, rest, RecvFlags::PEEK | RecvFlags::DONTWAIT).map_or(0, |(_, n)| n.min(more))
        }
        _ => 0,
    };
    payload_in(&nonce, bytes.get(..carried + peeked).unwrap_or_default())
}

fn in_kernel(socket: &Socket) -> usize {
    let n = socket.numbers.anchor_fd().map(rustix::io::ioctl_fionread);
    n.and_then(Result::ok).unwrap_or(0) as usize
}
