//! What keeps all connections of this process on TCP from some moment on, because it has done something after which a
//! link cannot serve them. Not here: what keeps a single one there, the rules, and who brings back those that have left
//! (`pass`).

use std::sync::atomic::{AtomicU16, Ordering::SeqCst};

use rdmasock_core::stats::Reason;

/// The first reason, as its code; none at 0. A fork child inherits it, with what it stands for.
static REASON: AtomicU16 = AtomicU16::new(Reason::None as u16);

/// Why no connection may leave TCP any more.
pub fn reason() -> Option<Reason> {
    Reason::try_from(REASON.load(SeqCst))
        .ok()
        .filter(|reason| *reason != Reason::None)
}

/// From now on none may; those that have stay where they are.
pub fn begin(reason: Reason) {
    let _ = REASON.compare_exchange(Reason::None as u16, reason as u16, SeqCst, SeqCst);
}
