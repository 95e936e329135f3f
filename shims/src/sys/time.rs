//! Time as the calls of the program give it: time-outs in their several forms, and deadlines.

use std::ffi::c_int;

/// CLOCK_MONOTONIC in ns.
#[inline]
pub fn now_ns() -> u64 {
    ns(rustix::time::ClockId::Monotonic)
}

#[inline]
fn ns(clock: rustix::time::ClockId) -> u64 {
    let t = rustix::time::clock_gettime(clock);
    (t.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(t.tv_nsec as u64)
}

/// CLOCK_MONOTONIC_COARSE in ns: the time of the kernel's last timer interrupt (clock_getres(2)). It moves on every 1
/// to 10 ms, and to read it costs a fifth of the other, which has to wait for the processor's counter.
#[inline]
pub fn tick() -> u64 {
    ns(rustix::time::ClockId::MonotonicCoarse)
}

/// How long a call may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum Timeout {
    /// No bound.
    Forever,
    /// Nanoseconds.
    Ns(u64),
}

/// When a call that waits has to be back.
#[derive(Clone, Copy)]
pub struct Deadline(Option<u64>, bool);

impl Timeout {
    /// Only a look.
    pub const ZERO: Self = Self::Ns(0);

    /// From epoll_wait's and poll's milliseconds; negative is no bound.
    pub fn from_ms(ms: c_int) -> Self {
        u64::try_from(ms).map_or(Self::Forever, |ms| Self::Ns(ms * 1_000_000))
    }

    /// From a timespec; `None` for an invalid one.
    pub fn from_timespec(ts: Option<&libc::timespec>) -> Option<Self> {
        let Some(ts) = ts else {
            return Some(Self::Forever);
        };
        let s = u64::try_from(ts.tv_sec).ok()?;
        let ns = u64::try_from(ts.tv_nsec).ok().filter(|ns| *ns < 1_000_000_000)?;
        Some(Self::Ns(s.saturating_mul(1_000_000_000).saturating_add(ns)))
    }

    /// As milliseconds, rounded up so that a wait is never too short.
    pub fn to_ms(self) -> c_int {
        match self {
            Self::Forever => -1,
            Self::Ns(ns) => c_int::try_from(ns.div_ceil(1_000_000)).unwrap_or(c_int::MAX),
        }
    }

    /// As a timespec; `None` is no bound.
    pub fn to_timespec(self) -> Option<libc::timespec> {
        match self {
            Self::Forever => None,
            Self::Ns(ns) => Some(libc::timespec {
                tv_sec: (ns / 1_000_000_000) as libc::time_t,
                tv_nsec: (ns % 1_000_000_000) as libc::c_long,
            }),
        }
    }

    /// Not longer than `bound` ns.
    pub fn at_most(self, bound: u64) -> Self {
        match self {
            Self::Forever => Self::Ns(bound),
            Self::Ns(ns) => Self::Ns(ns.min(bound)),
        }
    }

    /// Whether it is only a look.
    pub fn is_zero(self) -> bool {
        self == Self::ZERO
    }

    /// Counted from now.
    pub fn deadline(self) -> Deadline {
        match self {
            Self::Forever => Deadline(None, false),
            Self::Ns(0) => Deadline(None, true),
            Self::Ns(ns) => Deadline(Some(now_ns().saturating_add(ns)), false),
        }
    }
}

impl Deadline {
    /// Only a look.
    pub fn is_zero(self) -> bool {
        self.1
    }

    /// What is left.
    pub fn left(self) -> Timeout {
        match self {
            Self(_, true) => Timeout::ZERO,
            Self(None, _) => Timeout::Forever,
            Self(Some(at), _) => Timeout::Ns(at.saturating_sub(now_ns())),
        }
    }

    /// Whether the time is up.
    pub fn is_over(self) -> bool {
        self.left().is_zero()
    }
}
/// How long a handshake that is under way, the peer's way back or a thread may take to end, ns.
const PATIENCE: u64 = 2_000_000_000;

/// Asks again and again, for as long as others may take to follow.
pub fn wait_until(mut done: impl FnMut() -> bool) {
    let until = now_ns() + PATIENCE;
    while !done() && now_ns() < until {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 50_000,
        });
    }
}
