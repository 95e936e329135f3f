//! Connections with an end that is over, or may be, although no message or mark on the link shows it.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;

use crate::data::tx;
use crate::notify::ready;
use crate::objects::link::Link;
use crate::objects::mailbox::Ref;
use crate::objects::socket::{Mode, Socket};

/// How long the other end's process may take to mark an end that TCP has shown, ns. It is asked to check, and marks the
/// end or is itself seen to have ended.
const MARK_WITHIN: u64 = 1_000_000_000;

/// Time to the first check for a reader, and the longest time between two, ns. Half-closed connections may live for
/// days.
const LOOK_FIRST: u64 = 100_000_000;
const LOOK_LAST: u64 = 1_000_000_000;

/// Returns whether the receiving direction is on a link within the host, and no end mark has come.
fn is_unmarked(socket: &'static Socket) -> bool {
    let Some(rx) = socket.rx.lock() else {
        return false;
    };
    socket.rx_mode.load(Acquire) == Mode::Link
        && !rx.stays
        && !socket.rx_shut.load(Acquire)
        && rx.consumer.as_ref().is_some_and(|c| !c.has_mark() && !c.has_left())
}

/// Returns whether the sending direction is on a link within the host.
fn sends_on_link(socket: &'static Socket) -> bool {
    socket.tx_mode.load(Acquire) == Mode::Link && socket.link().is_some_and(|l| l.is_alive() && !l.is_remote())
}

/// How long TCP has to show the end of a peer whose process has ended, ns. If another process has that end too, TCP
/// never shows it.
const END_WITHIN: u64 = 1_000_000_000;

fn awaits_end(socket: &'static Socket) -> bool {
    let is_unread = socket.tx.lock().is_some_and(|tx| {
        let unread = tx.producer.as_ref().is_some_and(|p| p.is_unread());
        unread && !tx.is_shut && socket.tx_mode.load(Acquire) == Mode::Link
    });
    is_unread && !has_ended(socket)
}

fn has_ended(socket: &'static Socket) -> bool {
    let Some(_control) = socket.control.lock() else {
        return true;
    };
    ready::without_queue(ready::kernel(socket, rustix::event::PollFlags::RDHUP)) & ready::ENDED != 0
}

/// A stream whose peer's process has ended without reading all bytes from here, and whose TCP does not show that yet.
/// Until then the stream stays as it is: a call that was woken before would find the connection still standing.
struct Dying {
    r: Ref,
    /// When the wait for TCP ends, monotonic ns.
    deadline: u64,
}

/// A connection whose other end is over in TCP, though not on the link.
struct Unmarked {
    r: Ref,
    /// When the wait for the mark ends, monotonic ns.
    deadline: u64,
}

/// A connection that sends on a link to a peer which, as TCP shows, has sent its last byte. If the peer's program
/// closes the fd where no hook sees it, TCP shows nothing more. So while bytes stay unread, this end has the peer's
/// library check whether there still is a reader.
struct OneWay {
    r: Ref,
    /// The position of the reader at the last check.
    reader_at: Option<u64>,
    /// The time between two checks, ns.
    every: u64,
    /// The time of the next check, monotonic ns.
    deadline: u64,
}

/// The connections of this file, by what they wait for.
#[derive(Default)]
pub struct Ends {
    /// Connections whose other end was probably closed past its library.
    unmarked: Vec<Unmarked>,
    dying: Vec<Dying>,
    /// Connections that send over a link to a peer that has sent its last byte; by their slots.
    one_way: HashMap<u32, OneWay>,
}

impl Ends {
    /// Returns the time of the next check, monotonic ns; `None` if there is none.
    pub fn next_timeout(&self) -> Option<u64> {
        let unmarked = self.unmarked.iter().map(|unmarked| unmarked.deadline);
        let dying = self.dying.iter().map(|dying| dying.deadline);
        let one_way = self.one_way.values().map(|look| look.deadline);
        unmarked.chain(dying).chain(one_way).min()
    }

    /// Makes the checks that are due, except for [dying streams](Self::over), which the caller handles.
    pub fn on_timeout(&mut self, now: u64) {
        self.leave_unmarked(now);
        self.look_for_readers(now);
    }

    /// Handles that the process at the other end of the socket's link has ended. Returns true if the stream waits for
    /// TCP to show it.
    pub fn on_peer_gone(&mut self, socket: &'static Socket) -> bool {
        let waits = awaits_end(socket);
        if waits {
            self.dying.push(Dying {
                r: Ref::new(socket),
                deadline: crate::sys::time::now_ns() + END_WITHIN,
            });
        }
        waits
    }

    /// Returns whether a stream waits for TCP to show the end of its peer.
    pub fn has_dying(&self) -> bool {
        !self.dying.is_empty()
    }

    /// Removes and returns the dying streams whose peer's end is visible in TCP, or whose time for that is over.
    pub fn over(&mut self, now: u64) -> Vec<&'static Socket> {
        let is_over = |d: &mut Dying| d.deadline <= now || d.r.get().is_none_or(has_ended);
        self.dying.extract_if(.., is_over).filter_map(|d| d.r.get()).collect()
    }

    /// Handles that TCP shows the peer's last byte.
    pub fn on_end_of_tcp(&mut self, socket: &'static Socket) {
        let now = crate::sys::time::now_ns();
        let r = Ref::new(socket);
        let is_unmarked = is_unmarked(socket);
        if is_unmarked {
            let deadline = now + MARK_WITHIN;
            self.unmarked.push(Unmarked { r, deadline });
        }
        if is_unmarked || tx::is_full(socket) {
            // Has the peer's service thread check whether there still is a reader.
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

    /// Has the peer's process check whether there still is a reader, for each connection whose bytes are not read.
    fn look_for_readers(&mut self, now: u64) {
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

    /// Takes the connections back to TCP that the peer has closed or shut down past its library. TCP knows how to
    /// answer what is sent from now on.
    fn leave_unmarked(&mut self, now: u64) {
        let late: Vec<Unmarked> = self.unmarked.extract_if(.., |u| u.deadline <= now).collect();
        for socket in late.into_iter().filter_map(|u| u.r.get()) {
            if is_unmarked(socket) && socket.link().is_some_and(Link::is_alive) {
                if tx::is_unread(socket) {
                    connection::look_for_reset(socket);
                }
                tx::take_back(socket, Reason::Closed);
            }
        }
    }
}
