//! Decides about a connection whose promotion has not come about: whether it stays on TCP for good, and when it is
//! asked for again.

use std::time::Duration;

use rdmasock_core::stats::{Reason, Why};
use rdmasock_core::wire;

use crate::notify::threshold::stay;
use crate::objects::socket::{Socket, Stage};

/// How often a connection is asked for again when the peer could not answer YES yet: its program may take seconds to
/// accept it. A reason that [`passes`] has no such bound: after the longest pause the connection is asked for again.
const TRIES: u32 = 8;
/// The first pause, ns. Each is four times the one before, the last 16 s.
const FIRST_PAUSE: u64 = 1_000_000;
/// How long a host that does not answer is not asked.
pub(super) const HOST_ABSENT_FOR: Duration = Duration::from_secs(30);
/// The pause after another host has not answered, ns.
const NOBODY_PAUSE: u64 = HOST_ABSENT_FOR.as_nanos() as u64;

/// Handles a peer without the library. Within the host that is certain, and the connection stays on TCP. Another host
/// may have been too busy to answer, or its datagrams were lost: a connection that lives on is asked for again.
pub(super) fn nobody(socket: &'static Socket, remote: bool) {
    let why = Reason::PeerWithout.into();
    if remote {
        later_than(socket, why, NOBODY_PAUSE);
    } else {
        stay(socket, why);
    }
}

/// Has the connection asked for again after a pause. After `TRIES` keeps it on TCP for good, unless the reason passes.
pub(super) fn later(socket: &'static Socket, why: Why) {
    later_than(socket, why, 0);
}

fn later_than(socket: &'static Socket, why: Why, pause: u64) {
    let tries = socket.promotion.attempts.count();
    if tries >= TRIES && !passes(why) {
        return stay(socket, why);
    }
    if let Some(stats) = socket.told.stats() {
        stats.set_why(why);
    }
    let pause = pause.max(FIRST_PAUSE << (2 * tries.min(TRIES - 1)));
    socket.promotion.attempts.put_off(pause);
    socket.promotion.set_stage(Stage::Watching);
}

/// Returns whether the reason is only the present load of one of the two processes, and not the connection.
fn passes(why: Why) -> bool {
    let reason = why.peer.unwrap_or(why.reason);
    matches!(reason, Reason::LinkLimit | Reason::TimedOut | Reason::Resources)
}

/// Handles a NO from the other end.
pub(super) fn after_no(socket: &'static Socket, reason: wire::Reason) {
    let why = why_declined(reason);
    match reason {
        // The other end has not finished with the link that failed.
        wire::Reason::Use | wire::Reason::Limit if socket.promotion.attempts.have_failed() => {
            socket.told.set_why(why);
            socket.promotion.retry_later();
        }
        wire::Reason::Rule | wire::Reason::Use | wire::Reason::NotOwner => stay(socket, why),
        _ => later(socket, why),
    }
}

fn why_declined(reason: wire::Reason) -> Why {
    Why::declined(match reason {
        wire::Reason::NotHeld => Reason::NoMatch,
        wire::Reason::Rule => Reason::Rule,
        wire::Reason::Shared => Reason::Inherited,
        wire::Reason::NotOwner => Reason::NotOwner,
        wire::Reason::Closing => Reason::Closed,
        wire::Reason::Limit => Reason::LinkLimit,
        wire::Reason::Resources => Reason::Resources,
        wire::Reason::Timeout => Reason::TimedOut,
        wire::Reason::Violation | wire::Reason::Secret => Reason::Violation,
        _ => Reason::Unsupported,
    })
}
