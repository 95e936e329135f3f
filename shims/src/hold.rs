//! What keeps all connections of this process on TCP from some moment on, because it has done something after which a link
//! cannot serve them. Not here: what keeps a single one there, and the rules.

use std::sync::atomic::{AtomicU16, Ordering::SeqCst};

use rdmasock_core::stats::Reason;

use crate::library::Library;
use crate::{errno, fork, pass};

/// The first reason, as its code; none at 0. A fork child inherits it, with what it stands for.
static HELD: AtomicU16 = AtomicU16::new(Reason::None as u16);

/// Why no connection may leave TCP any more.
pub fn reason() -> Option<Reason> {
    Reason::try_from(HELD.load(SeqCst))
        .ok()
        .filter(|reason| *reason != Reason::None)
}

/// From now on none may; those that have stay where they are.
pub fn begin(reason: Reason) {
    let _ = HELD.compare_exchange(Reason::None as u16, reason as u16, SeqCst, SeqCst);
    if let Some(library) = Library::current() {
        library.stats.set_held(reason);
    }
}

/// From now on none may, and those that have return. Waits for that, as `pass::release` does.
pub fn all_on_tcp(reason: Reason) {
    let errno = errno::get();
    begin(reason);
    // After that: who makes a connection busy looks at the reason then.
    fork::for_each_socket(|socket| {
        if socket.may_be_on_link() {
            pass::release(socket, reason);
        }
    });
    errno::set(errno);
}
