//! Connections that the program has closed while a promotion was under way.
//!
//! The other end still writes markers, which no thread here would read. The kernel answers bytes that arrive unread at
//! a closed socket with a reset. So the peer program would see its connection fail because of an attempt to promote it
//! (ARCHITECTURE, I2).
//!
//! Therefore the TCP socket stays open here, with its sending half shut as close() would, until the other end's closing
//! marker or its end has come. Any other bytes that arrive are bytes that the program has not read: they lead to the
//! reset that close() would have sent.
//!
//! A connection also stays if TCP has not taken all bytes of the direction that was being closed.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};

use rdmasock_core::stream::connection::Awaited;
use rdmasock_core::wire::scan::{Found, scan};
use rdmasock_core::wire::{MAX_MARKER, Marker};
use rustix::event::epoll as kernel;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::link_table::LINK_TIMEOUT;
use crate::sys::remains::Remains;

/// How long the other end may take to write a marker, ns. It writes one when there is a link, or none can be made.
const PATIENCE: u64 = LINK_TIMEOUT.as_nanos() as u64 + 5_000_000_000;
/// How long the other end may take to make room for the unsent bytes, ns.
const PATIENCE_UNSENT: u64 = 60_000_000_000;

/// A connection that outlives its close.
struct Closed {
    remains: Remains,
    /// When the connection is closed in any case, monotonic ns.
    deadline: u64,
}

/// The events that the epoll set reports of each connection.
pub const EVENTS: kernel::EventFlags = kernel::EventFlags::IN
    .union(kernel::EventFlags::OUT)
    .union(kernel::EventFlags::RDHUP)
    .union(kernel::EventFlags::ET);

/// The connections that outlive their close.
#[derive(Default)]
pub struct Lingering {
    all: HashMap<u64, Closed>,
}

impl Lingering {
    /// Adds a connection, known by `id`, and does what can be done for it at once.
    pub fn begin(&mut self, id: u64, remains: Remains) {
        let patience = match remains.unsent.is_empty() {
            true => PATIENCE,
            false => PATIENCE_UNSENT,
        };
        let closed = Closed {
            remains,
            deadline: crate::sys::time::now_ns() + patience,
        };
        self.all.insert(id, closed);
        self.on_event(id);
    }

    /// Handles an event of the connection `id`: bytes have come, or there is room.
    pub fn on_event(&mut self, id: u64) {
        if self.all.get_mut(&id).is_none_or(|closed| closed.remains.is_over()) {
            self.all.remove(&id);
        }
    }

    /// Returns when the next connection is closed in any case, monotonic ns; `None` if there is none.
    pub fn next_timeout(&self) -> Option<u64> {
        self.all.values().map(|closed| closed.deadline).min()
    }

    /// Closes the connections whose time is over.
    pub fn on_timeout(&mut self, now: u64) {
        self.all.retain(|_, closed| closed.deadline > now);
    }
}

impl Remains {
    /// Sends and receives as far as possible. Returns true when the connection can be closed.
    fn is_over(&mut self) -> bool {
        if !self.send() {
            return false;
        }
        let Some(awaited) = self.awaited.as_mut() else {
            return true;
        };
        let is_over = is_over(self.fd.as_fd(), awaited, &mut self.unsent);
        self.send();
        is_over
    }

    /// Sends the unsent bytes, then the end. Returns false while TCP does not take all of them.
    fn send(&mut self) -> bool {
        if self.unsent.is_empty() {
            return true;
        }
        while !self.unsent.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.fd, &self.unsent, flags) {
                Ok(n) => {
                    self.unsent.drain(..n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => self.unsent.clear(),
            }
        }
        if !self.ends_last() {
            let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Write);
        }
        true
    }
}

/// Takes the markers that have come, and appends the answer to `unsent`. Returns true when the connection can be
/// closed.
fn is_over(fd: BorrowedFd<'_>, awaited: &mut Awaited, unsent: &mut Vec<u8>) -> bool {
    let mut buf = [0u8; MAX_MARKER];
    loop {
        match rustix::net::recv(fd, &mut buf[..], RecvFlags::DONTWAIT) {
            Ok((_, n)) if n > 0 => {
                let new = buf.get(..n).unwrap_or_default();
                awaited.part.extend_from_slice(new);
            }
            Err(Errno::AGAIN) => return false,
            Err(Errno::INTR) => continue,
            // The program has shut the receiving direction here; that is no end of the peer's.
            Ok(_) if awaited.precede_end && !crate::notify::ready::has_peer_ended(fd) => return false,
            _ => return true,
        }
        loop {
            let seen = scan(&awaited.nonce, &awaited.part);
            let len = match seen.what {
                _ if seen.payload > 0 => {
                    reset(fd);
                    return true;
                }
                Found::Marker {
                    marker: Marker::Hello(_),
                    len,
                } => {
                    unsent.append(&mut awaited.answer);
                    len
                }
                Found::Marker { len, .. } | Found::Bad { len, .. } => {
                    if awaited.part.len() > len {
                        reset(fd);
                    }
                    return true;
                }
                Found::PartialMarker { .. } | Found::Payload => break,
            };
            awaited.part.drain(..len);
        }
    }
}

/// Has the close that follows send a reset: unread data has come, though the kernel does not have it any more.
fn reset(fd: BorrowedFd<'_>) {
    let _ = rustix::net::sockopt::set_socket_linger(fd, Some(std::time::Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use rdmasock_core::ids::{InstanceId, Nonce};
    use rdmasock_core::os::privatefd::PrivateFd;
    use rdmasock_core::wire::{Hello, Reason};

    use super::*;

    /// A connection was shut, and then closed before a HELLO had come. The HELLO is answered, and the end follows the
    /// marker that closes the attempt.
    #[test]
    fn a_greeting_of_what_has_not_ended_yet_is_answered() {
        let [mine, theirs] = [[0xc0; 16], [0xc1; 16]].map(Nonce::from_bytes);
        let encoded = |marker: Marker, to: &Nonce| {
            let mut buf = [0u8; MAX_MARKER];
            marker.encode(to, &mut buf).unwrap().to_vec()
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        rustix::net::shutdown(&ours, rustix::net::Shutdown::Read).unwrap();
        let abort = encoded(Marker::Abort(Reason::Cancelled), &theirs);
        let awaited = Awaited {
            nonce: mine,
            precede_end: true,
            answer: abort.clone(),
            part: Vec::new(),
        };
        let copy = PrivateFd::duplicate_closing(ours.as_fd()).unwrap();
        drop(ours);
        let mut remains = Remains::new(copy, Some(awaited), Vec::new());
        assert!(!remains.is_over(), "an end of our own is none of the peer's");
        let hello = Hello {
            instance: InstanceId::random().unwrap(),
            link: None,
        };
        peer.write_all(&encoded(Marker::Hello(hello), &mine)).unwrap();
        let mut answer = vec![0; abort.len()];
        peer.set_nonblocking(true).unwrap();
        while peer.read_exact(&mut answer).is_err() {
            assert!(!remains.is_over());
        }
        assert_eq!(answer, abort);
        peer.write_all(&encoded(Marker::Abort(Reason::Cancelled), &mine))
            .unwrap();
        while !remains.is_over() {
            std::thread::yield_now();
        }
        peer.set_nonblocking(false).unwrap();
        drop(remains);
        assert_eq!(peer.read(&mut answer).unwrap(), 0, "an end, and no reset");
    }
}
