//! How the loops of sends and receives wait, call the kernel, and end a call.

use std::ffi::c_int;

use libc::ssize_t;

use crate::notify::call::{self, Call, Place};
use crate::notify::wait::{self, Patience, Wanted};
use crate::sys::errno;

/// A result in place of the kernel's: a signal handler has run, and the kernel was not called.
const INTERRUPTED: ssize_t = -3;

/// Why a call ends before it has moved all bytes.
pub(super) enum Stop {
    /// The call has not begun yet, and its fd stands for another file by now: the call begins anew, from the fd table.
    Anew,
    /// The connection is no longer the call's own, for the reason that the `Place` gives.
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

/// Returns an error unless the connection is still the call's own.
#[inline(always)]
pub(super) fn check_place(place: Place) -> Result<(), Stop> {
    match place {
        Place::Here => Ok(()),
        place => Err(Stop::Elsewhere(place)),
    }
}

/// Makes the call hold the connection, because it is about to wait.
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

/// After a handler at which the kernel would restart the call, ends the call if it has moved bytes, or if its fd stands
/// for another file by now. Otherwise the call goes on.
fn restart(call: &Call, patience: &mut Patience, moved: usize) -> Result<(), Stop> {
    match patience.take_restart() {
        true if moved > 0 => Err(Stop::Failed(libc::EINTR)),
        true if !call.is_named() => Err(Stop::Anew),
        _ => Ok(()),
    }
}

/// Makes the kernel's own call, `real`. Does not make it if the program's call `has_waited` and a signal handler has
/// run since the call began, because that handler could not end the kernel's wait any more. Returns [`INTERRUPTED`]
/// with EINTR in that case.
pub(super) fn unless_interrupted(has_waited: bool, patience: &Patience, real: impl FnOnce() -> ssize_t) -> ssize_t {
    if has_waited && patience.is_interrupted() {
        errno::set(libc::EINTR);
        return INTERRUPTED;
    }
    real()
}

/// Returns how many bytes a call has moved whose [`unless_interrupted`] has returned `n`. `None` if the call is
/// restarted. The call has moved no bytes before.
pub(super) fn moved<A: Wanted>(call: &Call, patience: &mut Patience, n: ssize_t) -> Result<Option<usize>, Stop> {
    if n == INTERRUPTED {
        patience.interrupt(call.socket, A::IS_DATA)?;
        restart(call, patience, 0)?;
        return Ok(None);
    }
    usize::try_from(n).map(Some).map_err(|_| Stop::Failed(errno::get()))
}
