//! Clocks, and the time-outs and deadlines of the program's calls.

use std::ffi::c_int;

/// Returns CLOCK_MONOTONIC in ns.
#[inline]
pub(crate) fn now_ns() -> u64 {
    ns(rustix::time::ClockId::Monotonic)
}

#[inline]
fn ns(clock: rustix::time::ClockId) -> u64 {
    let t = rustix::time::clock_gettime(clock);
    (t.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(t.tv_nsec as u64)
}

/// Returns CLOCK_MONOTONIC_COARSE in ns: the time of the kernel's last timer interrupt (clock_getres(2)). It advances
/// every 1 to 10 ms. Reading it costs a fifth of [`now_ns`], which has to wait for the processor's counter.
#[inline]
pub(crate) fn tick() -> u64 {
    ns(rustix::time::ClockId::MonotonicCoarse)
}

/// How long a call may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) enum Timeout {
    /// No bound.
    Forever,
    /// At most this many nanoseconds.
    Ns(u64),
}

/// The time by which a call that waits has to return, monotonic ns, `None` for no bound. The flag is set for a call
/// that only checks and does not wait.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Option<u64>, bool);

impl Timeout {
    /// A call with this time-out only checks, and does not wait.
    pub(crate) const ZERO: Self = Self::Ns(0);

    /// Returns the time-out for an argument of epoll_wait and poll, ms; a negative one means no bound.
    pub(crate) fn from_ms(ms: c_int) -> Self {
        u64::try_from(ms).map_or(Self::Forever, |ms| Self::Ns(ms * 1_000_000))
    }

    /// Returns the time-out for a timespec; no timespec means no bound. Returns `None` for an invalid timespec.
    pub(crate) fn from_timespec(ts: Option<&libc::timespec>) -> Option<Self> {
        let Some(ts) = ts else {
            return Some(Self::Forever);
        };
        let s = u64::try_from(ts.tv_sec).ok()?;
        let ns = u64::try_from(ts.tv_nsec).ok().filter(|ns| *ns < 1_000_000_000)?;
        Some(Self::Ns(s.saturating_mul(1_000_000_000).saturating_add(ns)))
    }

    /// Returns the time-out in ms, rounded up so that a wait is never too short; -1 means no bound.
    pub(crate) fn to_ms(self) -> c_int {
        match self {
            Self::Forever => -1,
            Self::Ns(ns) => c_int::try_from(ns.div_ceil(1_000_000)).unwrap_or(c_int::MAX),
        }
    }

    /// Returns the time-out as a timespec; `None` means no bound.
    pub(crate) fn to_timespec(self) -> Option<libc::timespec> {
        match self {
            Self::Forever => None,
            Self::Ns(ns) => Some(libc::timespec {
                tv_sec: (ns / 1_000_000_000) as libc::time_t,
                tv_nsec: (ns % 1_000_000_000) as libc::c_long,
            }),
        }
    }

    /// Returns the time-out, shortened to at most `bound` ns.
    pub(crate) fn at_most(self, bound: u64) -> Self {
        match self {
            Self::Forever => Self::Ns(bound),
            Self::Ns(ns) => Self::Ns(ns.min(bound)),
        }
    }

    /// Returns whether the call only checks, and does not wait.
    pub(crate) fn is_zero(self) -> bool {
        self == Self::ZERO
    }

    /// Returns the deadline of a wait that begins at this call.
    pub(crate) fn deadline(self) -> Deadline {
        match self {
            Self::Forever => Deadline(None, false),
            Self::Ns(0) => Deadline(None, true),
            Self::Ns(ns) => Deadline(Some(now_ns().saturating_add(ns)), false),
        }
    }
}

impl Deadline {
    /// Returns whether the call only checks, and does not wait.
    pub(crate) fn is_zero(self) -> bool {
        self.1
    }

    /// Returns the time that is left.
    pub(crate) fn left(self) -> Timeout {
        match self {
            Self(_, true) => Timeout::ZERO,
            Self(None, _) => Timeout::Forever,
            Self(Some(at), _) => Timeout::Ns(at.saturating_sub(now_ns())),
        }
    }

    /// Returns whether the time is up.
    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }
}
/// The bound of `wait_until`, ns. It waits for a handshake, the peer's return to TCP, or a thread to end.
const PATIENCE: u64 = 2_000_000_000;

/// Calls `done` every 50 us until it returns true, for at most `PATIENCE` ns.
pub(crate) fn wait_until(mut done: impl FnMut() -> bool) {
    let until = now_ns() + PATIENCE;
    while !done() && now_ns() < until {
        sleep(50_000);
    }
}

/// Sleeps for `ns` ns, less than a second, or until a signal comes.
pub(crate) fn sleep(ns: i64) {
    let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: ns };
    let _ = rustix::thread::nanosleep(&time);
}
