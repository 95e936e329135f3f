//! How the loops of sends and receives wait, call the kernel, and end a call of the program.

use std::ffi::c_int;

use libc::ssize_t;

use crate::notify::call::{self, Call, Place};
use crate::notify::wait::{self, Patience, Wanted};
use crate::sys::errno;

/// Returned in place of the kernel's result if a signal handler has run, and the kernel was not called.
const INTERRUPTED: ssize_t = -3;

/// Why a call ends before it has moved all bytes.
pub(super) enum Stop {
    /// The call has moved no byte, and its fd stands for another file by now: the call begins again on that file.
    Anew,
    /// The fd does not stand for the call's connection any more, and the connection is not held for the call. The
    /// `Place` says why.
    Elsewhere(Place),
    /// The call fails with this errno, if it has moved no bytes.
    Failed(c_int),
}

impl From<c_int> for Stop {
    fn from(error: c_int) -> Self {
        Self::Failed(error)
    }
}

impl Stop {
    /// Returns the errno for a call that has moved `moved` bytes; `None` if the call begins anew. The caller holds no
    /// lock.
    pub(super) fn error(self, call: &Call, moved: usize) -> Option<c_int> {
        match self {
            Self::Anew => None,
            Self::Failed(error) => Some(error),
            Self::Elsewhere(place) => {
                call::look_again(call.socket, call.fd);
                (place != Place::Moved || moved > 0).then_some(libc::EBADF)
            }
        }
    }

    /// Returns the result of a call that has moved `moved` bytes; `None` if the call begins anew.
    #[inline]
    pub(super) fn result(went: Result<(), Self>, call: &Call, moved: usize) -> Option<ssize_t> {
        match went {
            Ok(()) => Some(moved as ssize_t),
            Err(stop) => Some(errno::after(moved, stop.error(call, moved)?)),
        }
    }
}

/// Returns an error unless the connection is still the call's own. `place` is the result of a check by `notify/call`.
#[inline(always)]
pub(super) fn check_place(place: Place) -> Result<(), Stop> {
    match place {
        Place::Here => Ok(()),
        place => Err(Stop::Elsewhere(place)),
    }
}

/// Makes the call hold the connection, because the call is about to wait: a close by another thread then leaves the
/// connection as it is until the call returns.
pub(super) fn hold(call: &mut Call) -> Result<(), Stop> {
    if call.is_held() {
        Ok(())
    } else {
        check_place(call.hold_now())
    }
}

/// Waits until the call, which has moved `moved` bytes, should try again. Returns true if the thread was still spinning
/// then, and has not slept.
pub(super) fn wait<A: Wanted>(call: &Call, patience: &mut Patience, moved: usize) -> Result<bool, Stop> {
    patience.is_partial = moved > 0;
    let has_spun = wait::wait_for::<A>(call.socket, patience)?;
    restart(call, patience, moved)?;
    Ok(has_spun)
}

/// If a signal handler has run after which the kernel would restart the call (SA_RESTART), ends the call in two cases:
/// it has moved bytes, or its fd stands for another file by now. In all other cases the call goes on.
fn restart(call: &Call, patience: &mut Patience, moved: usize) -> Result<(), Stop> {
    match patience.take_restart() {
        true if moved > 0 => Err(Stop::Failed(libc::EINTR)),
        true if !call.is_named() => Err(Stop::Anew),
        _ => Ok(()),
    }
}

/// Makes the kernel's call, `real`, for a call of the program. `has_waited`: the program's call has waited in the
/// library before. If it has, and a signal handler has run since it began, the handler could not end a wait in the
/// kernel any more. So the kernel is not called, errno is EINTR, and the result is [`INTERRUPTED`].
pub(super) fn unless_interrupted(has_waited: bool, patience: &Patience, real: impl FnOnce() -> ssize_t) -> ssize_t {
    if has_waited && patience.is_interrupted() {
        errno::set(libc::EINTR);
        return INTERRUPTED;
    }
    real()
}

/// Returns the number of bytes that the call has moved, by the result `n` of [`unless_interrupted`]. `None` if the call
/// is restarted. The call had moved no bytes before.
pub(super) fn moved<A: Wanted>(call: &Call, patience: &mut Patience, n: ssize_t) -> Result<Option<usize>, Stop> {
    if n == INTERRUPTED {
        patience.interrupt(call.socket, A::IS_DATA)?;
        restart(call, patience, 0)?;
        return Ok(None);
    }
    usize::try_from(n).map(Some).map_err(|_| Stop::Failed(errno::get()))
}
