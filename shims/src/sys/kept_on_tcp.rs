//! The reason that keeps all further connections of this process on TCP: the process has done something after which a
//! link cannot serve them. This file does not keep a single connection there, has no rules, and does not bring
//! connections back that have left TCP (`pass`).

use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::SeqCst;

use rdmasock_core::stats::Reason;

/// The first reason, as its code; [`Reason::None`] means there is none. A fork child inherits the reason, which holds
/// for it too.
static REASON: AtomicU16 = AtomicU16::new(Reason::None as u16);

/// Returns why no connection may leave TCP any more; `None` if connections may.
pub fn reason() -> Option<Reason> {
    Reason::try_from(REASON.load(SeqCst))
        .ok()
        .filter(|reason| *reason != Reason::None)
}

/// Keeps connections on TCP from now on. Connections on a link stay there. Only the first reason is recorded.
pub fn begin(reason: Reason) {
    let _ = REASON.compare_exchange(Reason::None as u16, reason as u16, SeqCst, SeqCst);
}
