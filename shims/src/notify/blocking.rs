//! Whether a socket's calls wait, and for how long: O_NONBLOCK, SO_RCVTIMEO and SO_SNDTIMEO.
//!
//! Another process that holds the socket can change these without a hook of this process. So the kernel is asked before
//! a sleep; while this process is the only holder, it is asked only once.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::Acquire;

use crate::objects::holders;
use crate::objects::socket::blocking::Known;
use crate::objects::socket::{Socket, Stage};
use crate::sys::sockopt;
use crate::sys::time::Timeout;

/// Whether a call with these flags returns at once, even if another process changes the socket's O_NONBLOCK. Without
/// MSG_DONTWAIT it is false for a socket that was passed to another process. Such a socket is not in
/// [`Stage::Watching`] any more, or has several holders.
#[inline]
pub fn is_quick(socket: &Socket, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT != 0
        || socket.blocking.is_nonblocking()
            && socket.promotion.stage() == Stage::Watching
            && !socket.promotion.holders.may_be_several()
}

/// Returns how long a call may wait now, to receive (`data`) or to send. `None`: the call may not wait.
pub fn patience(socket: &Socket, data: bool) -> Option<Timeout> {
    let blocking = &socket.blocking;
    // Without the lock (in a signal handler above its holder) every value is asked for.
    let mut unknown = Known::default();
    let mut guard = blocking.known.lock();
    let known = guard.as_deref_mut().unwrap_or(&mut unknown);
    // The counters are read first: a value that changes while the kernel is asked is asked for again next time.
    let now = (holders::epoch(), blocking.sets.load(Acquire));
    let is_shared = socket.promotion.holders.may_be_several();
    if is_shared || known.at != Some(now) {
        // This lock keeps close() out.
        let _control = socket.control.lock();
        if let Some(fd) = socket.numbers.anchor_fd() {
            let flags = rustix::fs::fcntl_getfl(fd);
            if flags.is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK)) {
                blocking.set_nonblocking(true);
            }
            *known = Known {
                at: (!is_shared).then_some(now),
                receive: option_timeout(fd, libc::SO_RCVTIMEO),
                send: option_timeout(fd, libc::SO_SNDTIMEO),
            };
        }
    }
    if blocking.is_nonblocking() {
        return None;
    }
    Some(match if data { known.receive } else { known.send } {
        0 => Timeout::Forever,
        ns => Timeout::Ns(ns),
    })
}

/// Returns the value of a time-out option, ns; 0: no bound.
fn option_timeout(fd: BorrowedFd<'_>, option: c_int) -> u64 {
    let mut tv = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<libc::timeval>() as libc::socklen_t;
    // SAFETY: `tv` is a timeval and `len` is its size; both outlive the call.
    if !unsafe { sockopt::read(fd.as_raw_fd(), (libc::SOL_SOCKET, option), &raw mut tv, &mut len) } {
        return 0;
    }
    (tv.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(tv.tv_usec as u64 * 1000)
}
