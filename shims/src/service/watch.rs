//! Watches the TCP sockets of connections that are being promoted or are on a link. Puts them back into the kernel's
//! epoll sets when both directions are on TCP again.
//!
//! Also handles connections where only TCP shows that the peer has ended ([`Ends`]), and closed connections whose other
//! end may still write markers.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::connection::Awaited;
use rdmasock_core::wire::marker::{Found, scan};
use rdmasock_core::wire::{MAX_MARKER, Marker};
use rustix::event::{PollFlags, epoll as kernel};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::data::tx;
use crate::notify::ready;
use crate::objects::link::Link;
use crate::objects::mailbox::{Ref, Remains};
use crate::objects::socket;
use crate::objects::socket::{ERROR_QUEUE, Mode, Socket};
use crate::polling::readiness;
use crate::service::links::LINK_TIMEOUT;
use crate::service::{Peer, Watched, Worker};
use crate::sys::points::point;

/// How long the peer's process may take to put the end mark on the link once TCP has brought the peer's FIN, ns. This
/// end asks that process to check the connection. The process then sets the mark, or is seen to have ended.
const MARK_WITHIN: u64 = 1_000_000_000;
/// Time to the first check for a reader, and the longest time between two, ns. Half-closed connections may live for
/// days.
const LOOK_FIRST: u64 = 100_000_000;
const LOOK_LAST: u64 = 1_000_000_000;
/// How long a stream whose peer's process has ended waits until TCP shows that too (FIN or reset), ns. If another
/// process holds the peer's socket as well, TCP never shows it.
const END_WITHIN: u64 = 1_000_000_000;
/// How long the other end may take to write a marker, ns. It writes one when there is a link, or none can be made.
pub(super) const PATIENCE: u64 = LINK_TIMEOUT.as_nanos() as u64 + 5_000_000_000;
/// How long the other end may take to make room for the unsent bytes, ns.
pub(super) const PATIENCE_UNSENT: u64 = 60_000_000_000;
/// The events that the epoll set reports of a closed connection.
pub(super) const EVENTS: kernel::EventFlags = kernel::EventFlags::IN
    .union(kernel::EventFlags::OUT)
    .union(kernel::EventFlags::RDHUP)
    .union(kernel::EventFlags::ET);

impl Worker {
    /// Begins to watch the TCP socket; from now on the library reports the socket's readiness.
    pub(super) fn watch(&mut self, socket: &'static Socket) -> Watched {
        if socket.is_watched() {
            // An attempt that ended before its scan began has left the socket watched.
            return Watched::Done;
        }
        {
            let Some(_control) = socket.control.lock() else {
                return Watched::Impossible;
            };
            let Some(fd) = socket.numbers.anchor_fd() else {
                return Watched::Impossible;
            };
            if !ready::watch(socket, fd) {
                return Watched::Impossible;
            }
            // The TCP socket may have had events before it was watched, which no later event reports. They are noted
            // here.
            note_anchor(socket);
            socket.wakes.watched.publish(true);
        }
        point!("watch: the socket is ours, and nobody knows");
        ready::tell_onlookers(socket);
        point!("watch: pollers have been told");
        let members = socket.wakes.members();
        if members.iter().all(|m| m.epoll.take_over(m.item, socket)) {
            return Watched::Done;
        }
        self.unwatch(socket);
        Watched::AfterMod
    }

    fn unwatch(&mut self, socket: &'static Socket) {
        {
            let Some(_control) = socket.control.lock() else {
                return;
            };
            if !socket.wakes.watched.publish(false) {
                return;
            }
            if let Some(fd) = socket.numbers.anchor_fd() {
                self.service.forget(fd);
            }
            socket.wakes.anchor.store(0, SeqCst);
        }
        point!("unwatch: the socket is the kernel's, and nobody knows");
        ready::hand_back(socket);
        point!("unwatch: sets have been told");
        // Wakes the threads that sleep on doorbells of the library for this socket: from now on they have to sleep on
        // the kernel's object.
        ready::notify_local(socket);
    }

    pub(super) fn on_anchor(&mut self, id: u64) {
        let Some(socket) = socket::by_slot((id >> 32) as u32) else {
            return;
        };
        if socket.generation.load(Acquire) & 0xffff_ffff != id & 0xffff_ffff {
            return;
        }
        note_anchor(socket);
        if !self.ends.dying.is_empty() && socket.wakes.anchor.load(Acquire) & ready::ENDED != 0 {
            self.leave_dying(0);
        }
        if socket.tx_mode.load(Acquire) == Mode::Marked {
            connection::flush(socket);
        }
        if socket.rx_mode.load(Acquire) == Mode::Marked {
            // Finds markers even if the program does not read now.
            ready::among_markers(socket);
            if !socket.numbers.left_behind.load(Acquire) {
                connection::read_ahead(socket, tx::is_full(socket));
            }
        }
        if socket.rx_mode.load(Acquire) == Mode::Link
            && let Some(mut control) = socket.control.lock()
        {
            connection::look_for_resume(socket, &mut control);
        }
        if socket.wakes.anchor.load(Acquire) & libc::EPOLLRDHUP as u32 != 0 {
            self.ends.on_end_of_tcp(socket);
        }
        ready::notify_local(socket);
        if socket.numbers.left_behind.load(Acquire) {
            self.settle(Ref::new(socket));
        }
    }

    /// Puts a socket where its directions require it: into the kernel's epoll sets, or under the library's watch. Goes
    /// on with the end of a connection that the program has closed.
    pub(super) fn settle(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        if let Some(link) = socket.link() {
            readiness::look_for_confirmation(socket, link);
        }
        if socket.numbers.left_behind.load(Acquire) {
            if socket.rx_mode.load(Acquire) == Mode::Marked {
                connection::drop_unread(socket);
            }
            if crate::process::close::finish(socket) {
                self.free_dead_links();
            }
            return;
        }
        if !self.close_if_over(socket) {
            ready::change_interest(socket, |_| {});
            ready::notify_local(socket);
        }
    }

    /// Gives a connection back to the kernel's epoll sets if both directions are on TCP and no handshake is under way.
    /// Returns false if that is not so.
    pub(super) fn close_if_over(&mut self, socket: &'static Socket) -> bool {
        {
            let Some(mut control) = socket.control.lock() else {
                return true;
            };
            let Some(returns) = connection::close_if_over(socket, &mut control) else {
                return false;
            };
            if returns {
                socket.promotion.retry_later();
            }
            if let Some(fd) = socket.numbers.anchor_fd() {
                socket.keepalive.end(fd);
            }
        }
        crate::data::view::settle(socket);
        self.forget_asks(socket);
        self.unwatch(socket);
        socket.promotion.holders.on_returned();
        true
    }
}

/// Stores the kernel's events of the TCP socket that readiness has to report.
fn note_anchor(socket: &Socket) {
    let Some(_rx) = socket.rx.lock() else { return };
    let now = ready::kernel(socket, PollFlags::IN | PollFlags::RDHUP | PollFlags::PRI);
    let told = ready::ENDED | libc::EPOLLPRI as u32;
    let events = ready::without_queue(now);
    let queue = if events == now { 0 } else { ERROR_QUEUE };
    socket.wakes.anchor.fetch_or(events & told | queue, SeqCst);
}

// Connections whose peer has ended, or may have, although no message or mark on the link shows it.

/// A connection whose peer has ended, which only TCP or only the link shows yet.
struct Ending {
    r: Ref,
    /// When this end stops waiting for the other of the two to show it, monotonic ns.
    deadline: u64,
}

/// A connection that sends on a link, while TCP shows that the peer has sent its last byte. If the peer's program
/// closes the fd where no hook sees it, TCP shows nothing more. So while bytes stay unread, this end asks the peer's
/// library to check whether there still is a reader.
struct OneWay {
    r: Ref,
    /// The position of the reader at the last check.
    reader_at: Option<u64>,
    /// The time between two checks, ns.
    every: u64,
    /// The time of the next check, monotonic ns.
    deadline: u64,
}

/// The connections whose peer has ended, or may have, by what they wait for.
#[derive(Default)]
pub(super) struct Ends {
    /// Connections whose peer has ended in TCP, though without an end mark on the link: the peer's fd was probably
    /// closed where its library did not see it.
    unmarked: Vec<Ending>,
    /// Streams whose peer's process has ended without reading all bytes from this end, while TCP does not show that
    /// yet. Until TCP shows it, such a stream stays on the link: a call that was woken earlier would find the TCP
    /// connection alive.
    dying: Vec<Ending>,
    /// Connections that send over a link to a peer that has sent its last byte; by their slots.
    one_way: HashMap<u32, OneWay>,
}

impl Ends {
    /// Returns the time of the next check, monotonic ns; `None` if there is none.
    pub(super) fn next_timeout(&self) -> Option<u64> {
        let ending = self.unmarked.iter().chain(&self.dying).map(|ending| ending.deadline);
        let one_way = self.one_way.values().map(|look| look.deadline);
        ending.chain(one_way).min()
    }

    /// Handles that the process at the other end of the socket's link has ended. Returns true if the stream waits for
    /// TCP to show it.
    pub(super) fn on_peer_gone(&mut self, socket: &'static Socket) -> bool {
        let is_unread = socket.tx.lock().is_some_and(|tx| {
            let unread = tx.producer.as_ref().is_some_and(|p| p.is_unread());
            unread && !tx.end.is_shut() && socket.tx_mode.load(Acquire) == Mode::Link
        });
        let waits = is_unread && !has_ended(socket);
        if waits {
            let (r, deadline) = (Ref::new(socket), crate::sys::time::now_ns() + END_WITHIN);
            self.dying.push(Ending { r, deadline });
        }
        waits
    }

    /// Removes and returns the dying streams for which TCP shows that the peer has ended, or whose time for that is
    /// over.
    pub(super) fn over(&mut self, now: u64) -> Vec<&'static Socket> {
        let is_over = |d: &mut Ending| d.deadline <= now || d.r.get().is_none_or(has_ended);
        self.dying.extract_if(.., is_over).filter_map(|d| d.r.get()).collect()
    }

    /// Handles the peer's FIN in TCP: the peer has sent its last byte.
    fn on_end_of_tcp(&mut self, socket: &'static Socket) {
        let now = crate::sys::time::now_ns();
        let r = Ref::new(socket);
        let is_unmarked = is_unmarked(socket);
        if is_unmarked {
            let deadline = now + MARK_WITHIN;
            self.unmarked.push(Ending { r, deadline });
        }
        if is_unmarked || tx::is_full(socket) {
            // Asks the peer's service thread to check whether there still is a reader.
            ready::notify_peer(socket, Wake(Link::service_bits()));
        }
        if sends_on_link(socket) {
            let look = OneWay {
                r,
                reader_at: None,
                every: LOOK_FIRST,
                deadline: now + LOOK_FIRST,
            };
            self.one_way.insert(socket.slot, look);
        }
    }

    /// Asks the peer's library to check whether there still is a reader, for each connection whose bytes stay unread.
    pub(super) fn look_for_readers(&mut self, now: u64) {
        self.one_way.retain(|_, look| {
            let Some(socket) = look.r.get().filter(|s| sends_on_link(s)) else {
                return false;
            };
            if look.deadline > now {
                return true;
            }
            let reader_at = tx::reader_at(socket);
            let has_read = std::mem::replace(&mut look.reader_at, reader_at) != reader_at;
            if tx::is_unread(socket) && !has_read {
                ready::notify_peer(socket, Wake(Link::service_bits()));
            }
            look.every = (look.every * 2).min(LOOK_LAST);
            look.deadline = now + look.every;
            true
        });
    }

    /// Takes back to TCP the connections that the peer has closed or shut down where its library did not see it. From
    /// then on the kernel answers what this end sends.
    pub(super) fn leave_unmarked(&mut self, now: u64) {
        let late = self.unmarked.extract_if(.., |u| u.deadline <= now);
        for socket in late.filter_map(|u| u.r.get()) {
            if is_unmarked(socket) && socket.link().is_some_and(Link::is_alive) {
                if tx::is_unread(socket) {
                    connection::look_for_reset(socket);
                }
                tx::take_back(socket, Reason::Closed);
            }
        }
    }
}

/// Returns whether the receiving direction is on a link within the host, and no end mark has come.
fn is_unmarked(socket: &'static Socket) -> bool {
    let Some(rx) = socket.rx.lock() else {
        return false;
    };
    socket.rx_mode.load(Acquire) == Mode::Link
        && !rx.stays()
        && !socket.rx_shut.load(Acquire)
        && rx.consumer.as_ref().is_some_and(|c| !c.has_mark() && !c.has_left())
}

/// Returns whether the sending direction is on a link within the host.
fn sends_on_link(socket: &'static Socket) -> bool {
    socket.tx_mode.load(Acquire) == Mode::Link && socket.link().is_some_and(|l| l.is_alive() && !l.is_remote())
}

fn has_ended(socket: &'static Socket) -> bool {
    let Some(_control) = socket.control.lock() else {
        return true;
    };
    ready::without_queue(ready::kernel(socket, rustix::event::PollFlags::RDHUP)) & ready::ENDED != 0
}

// Connections that outlive their close: the program has closed them while a promotion was under way.
//
// The other end still writes markers, which no thread here would read. The kernel answers bytes that arrive unread at
// a closed socket with a reset. So the peer program would see its connection fail because of an attempt to promote it
// (ARCHITECTURE, I2).
//
// Therefore the TCP socket stays open here, with its sending half shut as close() would, until the other end's closing
// marker or its end has come. Any other bytes that arrive are bytes that the program has not read: they lead to the
// reset that close() would have sent.
//
// A connection also stays if TCP has not taken all bytes of the direction that was being closed.

impl Worker {
    /// Handles an event of a connection that outlives its close: bytes have come, or there is room.
    pub(super) fn on_closed(&mut self, id: u64) {
        if let Some(Peer::Closed(remains)) = self.conns.get_mut(&id).map(|conn| &mut conn.peer)
            && remains.is_over()
        {
            self.conns.remove(&id);
        }
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

    /// Sends the unsent bytes, then shuts the sending half. Returns false while TCP does not take all bytes.
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
            // The program has shut the receiving direction at this end, but the peer has not ended.
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
                    marker: Ok(Marker::Hello(_)),
                    len,
                } => {
                    unsent.append(&mut awaited.answer);
                    len
                }
                Found::Marker { len, .. } => {
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

/// Makes the close that follows send a reset. The unread data has been taken out of the kernel, which therefore would
/// not reset the connection by itself.
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
