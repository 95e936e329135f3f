//! Connections of which an end is over, or may be, where nobody has said so.

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

/// How long the process at the other end may take to mark an end that TCP has shown, which it is asked to, or to be
/// seen to have ended, ns.
const MARK_WITHIN: u64 = 1_000_000_000;

/// How soon the first look for a reader is, ns, and how long it is between two at most: half closed connections may
/// live for days.
const LOOK_FIRST: u64 = 100_000_000;
const LOOK_LAST: u64 = 1_000_000_000;

/// Whether a socket's receiving direction is on a link within the host, and no end mark has come.
fn is_unmarked(socket: &'static Socket) -> bool {
    let Some(rx) = socket.rx.lock() else {
        return false;
    };
    socket.rx_mode.load(Acquire) == Mode::Link
        && !rx.stays
        && !socket.rx_shut.load(Acquire)
        && rx.consumer.as_ref().is_some_and(|c| !c.has_mark() && !c.has_left())
}

/// Whether a socket's sending direction is on a link within the host.
fn sends_on_link(socket: &'static Socket) -> bool {
    socket.tx_mode.load(Acquire) == Mode::Link && socket.link().is_some_and(|l| l.is_alive() && !l.is_remote())
}

/// How long TCP has to show the end of a peer whose process has ended, ns; where another process has the other end too,
/// it never does.
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

/// A stream whose peer's process has ended with bytes of ours unread, which TCP does not show yet. Until it does the
/// stream stays what it is: who is told before that finds the connection still standing.
struct Dying {
    r: Ref,
    /// Monotonic ns.
    deadline: u64,
}

/// A connection whose other end TCP says is over, though nothing on the link has said so.
struct Unmarked {
    r: Ref,
    /// Monotonic ns.
    deadline: u64,
}

/// A connection on whose link is something to be read yet, or may be, by an end that TCP says has sent its last. If
/// that closes it where its library does not see it, TCP has nothing more to say, and its library is to look.
struct OneWay {
    r: Ref,
    /// How far the other end had read when this was last looked at.
    reader_at: Option<u64>,
    /// How long it is between two looks, ns.
    every: u64,
    /// When the next look is, monotonic ns.
    deadline: u64,
}

/// See the module.
#[derive(Default)]
pub struct Ends {
    /// Their other end was closed where its library did not see it, it seems.
    unmarked: Vec<Unmarked>,
    dying: Vec<Dying>,
    /// Their other end has sent its last, and is sent to over a link; by their slots.
    one_way: HashMap<u32, OneWay>,
}

impl Ends {
    /// When one is looked at next, monotonic ns.
    pub fn next_timeout(&self) -> Option<u64> {
        let unmarked = self.unmarked.iter().map(|unmarked| unmarked.deadline);
        let dying = self.dying.iter().map(|dying| dying.deadline);
        let one_way = self.one_way.values().map(|look| look.deadline);
        unmarked.chain(dying).chain(one_way).min()
    }

    /// Looks at those whose time has come. What becomes of [the dying](Self::over) is the caller's business.
    pub fn on_timeout(&mut self, now: u64) {
        self.leave_unmarked(now);
        self.look_for_readers(now);
    }

    /// The process at the other end of its link has ended. True if the stream waits for TCP to show it.
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

    /// Whether any waits for that.
    pub fn has_dying(&self) -> bool {
        !self.dying.is_empty()
    }

    /// Those of which TCP says how their peer has ended, or does not within the time.
    pub fn over(&mut self, now: u64) -> Vec<&'static Socket> {
        let is_over = |d: &mut Dying| d.deadline <= now || d.r.get().is_none_or(has_ended);
        self.dying.extract_if(.., is_over).filter_map(|d| d.r.get()).collect()
    }

    /// TCP says that the other end has sent its last.
    pub fn on_end_of_tcp(&mut self, socket: &'static Socket) {
        let now = crate::sys::time::now_ns();
        let r = Ref::new(socket);
        let is_unmarked = is_unmarked(socket);
        if is_unmarked {
            let deadline = now + MARK_WITHIN;
            self.unmarked.push(Unmarked { r, deadline });
        }
        if is_unmarked || tx::is_full(socket) {
            // Whether there still is a reader the other process is to look.
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

    /// Has the other process look whether there still is a reader, where what was sent is not read.
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

    /// The other program has closed or shut down its socket where its library did not see it: what is sent now
    /// goes over TCP, which knows how to answer it.
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
