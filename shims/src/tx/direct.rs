//! A blocking send of much: which way it goes, and its bytes from the program's memory, past the mirror, when the
//! peer's program waits for them with a buffer (docs/protocol.md, P90–P95). It waits for such a reader for a moment
//! only, as kernel TCP would not wait at all.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Event;

use super::lent::{By, Taken, Within, lend};
use super::offered::offer;
use super::room::give_back;
use crate::call::{Call, Place};
use crate::config::{ZeroCopy, config};
use crate::errno;
use crate::handler;
use crate::iov::Iov;
use crate::library::Library;
use crate::link::Remote;
use crate::socket::Socket;
use crate::time::{Timeout, now_ns};
use crate::wait::{self, Wanted};
use crate::ways::{Send, Way};

/// Less is never sent so, whatever `RDMASOCK_ZCOPY_MIN` says.
pub(super) const LEAST: usize = 4096;

/// How long a reader with a buffer is waited for, ns; and one that has just read what was sent so, and may have to be
/// woken.
const READER_WITHIN: u64 = 200_000;
const READER_BACK_WITHIN: u64 = 1_000_000;
/// How long it may stand still before it has read what was sent before, and how long that may take in all, ns.
const READS_WITHIN: u64 = 500_000;
const ALL_READ_WITHIN: u64 = 10_000_000;
/// How long the peer may take to take what was lent; what is left then goes by the mirror.
const TAKEN: Within = Within {
    begins: 100_000_000,
    byte: 0,
};

/// What a call with much to send waits for first: somebody to take it.
struct Reader;

impl Wanted for Reader {
    const IS_DATA: bool = false;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
        let remote = socket.link().and_then(|link| link.remote());
        Taken::is_over(socket) || remote.is_some_and(|remote| remote.end().wanted(theirs) >= remote.direct_min() as u64)
    }
}

/// What has become of a send.
pub(super) enum Went {
    /// So many bytes of it, past the mirror.
    Directly(usize),
    /// Nothing: it goes by the mirror, at first what precedes the last so many bytes: a large piece behind small ones.
    Not { first: usize },
}

const NOTHING: Went = Went::Not { first: 0 };

/// Sends from the next piece of `iov`, if a reader waits for it or does so in a moment.
///
/// The call began with `total` bytes.
pub(super) fn send(call: &mut Call, iov: &mut Iov, flags: c_int, total: usize) -> Went {
    let socket = call.socket;
    let Some((link, remote)) = socket.link().and_then(|link| Some((link, link.remote()?))) else {
        return NOTHING;
    };
    let (memory, len) = iov.head();
    if total < remote.direct_min() || flags & libc::MSG_MORE != 0 || !remote.goes_direct(link.slot()) {
        return NOTHING;
    }
    let can_wait = wait::may_wait(socket, flags).is_ok();
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let way = choose(socket, remote, theirs, (total, iov.len() < total), can_wait);
    let is_lent = matches!(way, Way::Direct | Way::Lent);
    if !is_lent || !can_wait || iov.is_implausible() {
        return NOTHING;
    }
    if len < remote.direct_min() {
        let first = iov.left_at_large(remote.direct_min());
        return Went::Not { first };
    }
    // What registers memory allocates.
    if handler::is_in_one() || !call.is_held() && call.hold_now() != Place::Here {
        return NOTHING;
    }
    let errno = errno::get();
    let (mut sent, mut tried, mut reader_waits) = (0, false, false);
    if way == Way::Direct {
        let adverts = remote.end().adverts(theirs);
        let may_try = socket
            .tx
            .lock()
            .is_some_and(|mut tx| tx.own.direct.may_try(adverts, now_ns()));
        if may_try {
            tried = true;
            sent = to_reader(call, remote, theirs, memory, len);
            reader_waits = sent > 0;
            if let Some(mut tx) = socket.tx.lock() {
                tx.own.direct.on_tried(sent > 0, now_ns());
            }
        }
    }
    // Where the user has fixed the size the other way without a copy is the next best.
    if sent == 0 && (way == Way::Lent || config().zcopy != ZeroCopy::Auto && config().way.is_none()) {
        tried = true;
        (sent, reader_waits) = offer(call, remote, theirs, memory, len);
    }
    let is_by_load = socket.tx.lock().is_some_and(|mut tx| {
        let direct = &mut tx.own.direct;
        let is_by_load = direct.is_by_load() && sent > 0;
        if tried {
            direct.on_sent(sent == 0, reader_waits);
        }
        is_by_load
    });
    if is_by_load {
        let event = match way {
            Way::Lent => Event::PulledByLoad,
            _ => Event::PushedByLoad,
        };
        Library::get().stats.count_many(event, sent as u64);
    }
    // Whatever it was that was tried, the call has not failed.
    errno::set(errno);
    iov.advance(sent);
    if sent > 0 { Went::Directly(sent) } else { NOTHING }
}

/// Which way a call with so many bytes goes, or goes on; the peer hears whether buffers are of use.
fn choose(socket: &Socket, remote: &Remote, theirs: Vqpn, (len, goes_on): (usize, bool), can_wait: bool) -> Way {
    let Some(mut tx) = socket.tx.lock() else {
        return Way::Rings;
    };
    let state = &mut *tx;
    let Some(producer) = state.producer.as_ref() else {
        return Way::Rings;
    };
    let send = Send {
        now: now_ns(),
        position: producer.position(),
        len,
        ring: producer.ring_size(),
        can_wait,
        can_lend: can_wait && remote.can_lend(),
        goes_on,
    };
    let (way, ended) = match config().way {
        Some(way) => (way, None),
        None => {
            let is_learned = config().zcopy == ZeroCopy::Auto;
            let issuer = is_learned.then(|| remote.issuer()).flatten();
            state.own.direct.way(config().zcopy, &remote.known, send, issuer)
        }
    };
    if let Some(has_changed) = ended {
        let stats = &Library::get().stats;
        stats.count(Event::DirectTrials);
        stats.count_many(Event::DirectChanges, has_changed.into());
    }
    let invites = matches!(way, Way::Staged | Way::Direct);
    if invites || state.own.direct.has_invited {
        let least = if invites { remote.direct_min() as u32 } else { 0 };
        remote.end().invite(theirs, least);
        state.own.direct.has_invited = invites;
    }
    way
}

/// Waits for a moment for a reader with a buffer, and for somewhat longer while it reads what precedes. Gives how much
/// of `len` it wants.
fn await_reader(call: &Call, remote: &'static Remote, theirs: Vqpn, len: usize) -> Option<usize> {
    let (socket, end) = (call.socket, remote.end());
    let (sent, reader_within) = {
        let tx = socket.tx.lock()?;
        let within = if tx.own.direct.goes_well() {
            READER_BACK_WITHIN
        } else {
            READER_WITHIN
        };
        (tx.producer.as_ref()?.position(), within)
    };
    let begun = now_ns();
    let (mut moved, mut unread) = (begun, u64::MAX);
    loop {
        let wanted = (end.wanted(theirs) as usize).min(len);
        if wanted >= remote.direct_min() {
            return Some(wanted);
        }
        let now = now_ns();
        let before = std::mem::replace(&mut unread, end.untaken(theirs, sent));
        if unread < before {
            moved = now;
            if unread == 0 {
                // What was sent before may have gone by a buffer of this end's own.
                give_back(socket);
            }
        }
        let within = if unread == 0 { reader_within } else { READS_WITHIN };
        let left = (moved + within).min(begun + ALL_READ_WITHIN).saturating_sub(now);
        if left == 0 || Taken::is_over(socket) {
            return None;
        }
        // It ends when the time is over, or by any word of the reader's.
        let mut patience = wait::Patience::at_most(Timeout::Ns(left));
        if wait::wait_for::<Reader>(socket, &mut patience) == Err(libc::EINTR) {
            return None;
        }
    }
}

fn to_reader(call: &mut Call, remote: &'static Remote, theirs: Vqpn, memory: *mut u8, len: usize) -> usize {
    let Some(wanted) = await_reader(call, remote, theirs, len) else {
        return 0;
    };
    lend(call, (remote, theirs), (memory, wanted, len), By::Writes, TAKEN).0
}
