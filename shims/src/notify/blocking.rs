//! Whether a socket's calls wait, and for how long: O_NONBLOCK, SO_RCVTIMEO and SO_SNDTIMEO.
//!
//! Another process that holds the socket too can change them where no hook sees it. So the kernel is asked before a
//! sleep, but no more than once while this process is the only holder.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::Acquire;

use crate::objects::holders;
use crate::objects::socket::blocking::Known;
use crate::objects::socket::{Socket, Stage};
use crate::sys::sockopt;
use crate::sys::time::Timeout;

/// Whether a call with these flags is back at once, whatever another process does with the socket: one that has been
/// passed on is not watched any more.
#[inline]
pub fn is_quick(socket: &Socket, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT != 0
        || socket.blocking.is_nonblocking()
            && socket.promotion.stage() == Stage::Watching
            && !socket.promotion.holders.may_be_several()
}

/// How long a call on the socket may wait now, to receive (`data`) or to send; `None`: not at all.
pub fn patience(socket: &Socket, data: bool) -> Option<Timeout> {
    let blocking = &socket.blocking;
    // Without the lock, in a signal handler above its holder, all is asked.
    let mut unknown = Known::default();
    let mut guard = blocking.known.lock();
    let known = guard.as_deref_mut().unwrap_or(&mut unknown);
    // First these: what is changed while the kernel is asked is asked for again next time.
    let now = (holders::epoch(), blocking.sets.load(Acquire));
    let is_shared = socket.promotion.holders.may_be_several();
    if is_shared || known.at != Some(now) {
        // Keeps close() out.
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

/// A time-out option's value, ns; 0 is no bound.
fn option_timeout(fd: BorrowedFd<'_>, option: c_int) -> u64 {
    let mut tv = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<libc::timeval>() as libc::socklen_t;
    // SAFETY: a buffer of the right size.
    if !unsafe { sockopt::read(fd.as_raw_fd(), (libc::SOL_SOCKET, option), &raw mut tv, &mut len) } {
        return 0;
    }
    (tv.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(tv.tv_usec as u64 * 1000)
}
