//! Puts off the next check of a reader that keeps up with a writer of small messages (`socket/pace.rs`).

use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

use crate::notify::wait;
use crate::objects::socket::{Mode, Socket};
use crate::sys::time::now_ns;

/// The pause of a reader that keeps up, before it looks for data again, ns. Several cache misses long, and shorter than
/// any wake-up.
const REST: u64 = 200;

/// Puts off the check of a receive with these `flags`, if that is due and the call may wait.
#[inline]
pub fn rest(socket: &Socket, flags: c_int) {
    if socket.wakes.rx_rests.load(Relaxed)
        && socket.rx_mode.load(Relaxed) == Mode::Link
        && wait::may_wait(socket, flags).is_ok()
    {
        rest_now();
    }
}

#[inline(never)]
fn rest_now() {
    let start = now_ns();
    while now_ns().wrapping_sub(start) < REST {
        std::hint::spin_loop();
    }
}
