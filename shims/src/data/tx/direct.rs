//! Put: the device writes a large blocking send (`ways.rs`) into the buffer of the peer's blocked receive
//! (docs/protocol.md, P90–P95). The bytes go from the program's memory, past the mirror. The send waits for such a
//! reader only for a moment, because kernel TCP would not wait at all.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::ids::Vqpn;

use super::lent::{By, Taken, Within, lend};
use super::offered::offer;
use super::room::give_back;
use crate::config::{Way, arenas, config};
use crate::notify::call::{Call, Place};
use crate::notify::wait::{self, Wanted};
use crate::objects::link::Remote;
use crate::objects::socket::Socket;
use crate::signals::handler;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::time::{Timeout, now_ns};

/// The smallest send that may go directly, bytes. A smaller `RDMASOCK_ZCOPY_MIN` does not lower it.
pub(super) const LEAST: usize = 4096;

/// How long a send waits for a reader with a buffer, ns. The longer time is for a reader that has just read a direct
/// transfer and may have to be woken.
const READER_WITHIN: u64 = 200_000;
const READER_BACK_WITHIN: u64 = 1_000_000;
/// How long the reader may stand still while it reads earlier bytes, ns. `ALL_READ_WITHIN` bounds that time in all, ns.
const READS_WITHIN: u64 = 500_000;
const ALL_READ_WITHIN: u64 = 10_000_000;
/// How long the peer may take to read the lent bytes. The rest then goes by the mirror.
const TAKEN: Within = Within {
    begins: 100_000_000,
    byte: 0,
};

/// A wait for a reader with a buffer, which a large send makes first.
struct Reader;

impl Wanted for Reader {
    const IS_DATA: bool = false;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
        let remote = socket.link().and_then(|link| link.remote());
        Taken::is_over(socket) || remote.is_some_and(|remote| remote.end().wanted(theirs) >= remote.direct_min() as u64)
    }
}

/// How a large send went.
pub(super) enum Went {
    /// This many bytes went past the mirror.
    Directly(usize),
    /// No byte went directly. Bytes go by the mirror; the next attempt sends all that precedes the last `first` bytes,
    /// because a large piece follows small ones. 0 means all.
    Not { first: usize },
}

const NOTHING: Went = Went::Not { first: 0 };

/// Sends from the next piece of `iov` directly, if a reader waits with a buffer, or will in a moment. If none does,
/// offers the piece to the reader's device. The call began with `total` bytes.
pub(super) fn send(call: &mut Call, iov: &mut Iov, flags: c_int, total: usize) -> Went {
    let socket = call.socket;
    let Some((link, remote)) = socket.link().and_then(|link| Some((link, link.remote()?))) else {
        return NOTHING;
    };
    let (memory, len) = iov.head();
    if total < remote.direct_min() || total < remote.threshold(arenas::is_kept(memory.addr())) {
        return NOTHING;
    }
    if flags & libc::MSG_MORE != 0 || !remote.goes_direct(link.slot()) {
        return NOTHING;
    }
    let way = config().way;
    let can_wait = wait::may_wait(socket, flags).is_ok();
    if way == Some(Way::Eager) || !can_wait || iov.is_implausible() {
        return NOTHING;
    }
    if len < remote.direct_min() {
        let first = iov.left_at_large(remote.direct_min());
        return Went::Not { first };
    }
    // Registering memory allocates, which a signal handler must not do.
    if handler::is_in_one() || !call.is_held() && call.hold_now() != Place::Here {
        return NOTHING;
    }
    let errno = errno::get();
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let mut sent = 0;
    if way != Some(Way::Get) {
        let adverts = remote.end().adverts(theirs);
        let may_try = socket
            .tx
            .lock()
            .is_some_and(|mut tx| tx.own.direct.may_try(adverts, now_ns()));
        if may_try {
            sent = to_reader(call, remote, theirs, memory, len);
            if let Some(mut tx) = socket.tx.lock() {
                tx.own.direct.on_tried(sent > 0, now_ns());
            }
        }
    }
    if sent == 0 && way != Some(Way::Put) {
        sent = offer(call, remote, theirs, memory, len);
    }
    // The call has not failed: restores the errno from before the attempts.
    errno::set(errno);
    iov.advance(sent);
    if sent > 0 { Went::Directly(sent) } else { NOTHING }
}

/// Waits for a reader with a buffer, and longer while the reader still reads earlier bytes. Returns how many of `len`
/// bytes the buffer takes; `None` if no buffer came in time.
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
                // The earlier bytes may have gone by a send buffer of this end, which can be given back now.
                give_back(socket);
            }
        }
        let within = if unread == 0 { reader_within } else { READS_WITHIN };
        let left = (moved + within).min(begun + ALL_READ_WITHIN).saturating_sub(now);
        if left == 0 || Taken::is_over(socket) {
            return None;
        }
        // The wait ends when the time is up or when the reader notifies this end.
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
