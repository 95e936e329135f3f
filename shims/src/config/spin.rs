//! How long a waiting thread spins before it sleeps.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};

use rdmasock_core::os::privatefd::PrivateFd;

use crate::sys::time::now_ns;

/// Decides whether and how long to spin before a sleep, from how earlier spins ended.
///
/// Spinning pays when the awaited event usually comes within the bound and no other thread needs the core. So a hit
/// raises a score and a miss lowers it. At a score of 0 or below only one wait in `PROBE_EVERY` spins.
///
/// While more threads can run than there are cores, the bound is the cost of a sleep and its wake-up. To spin that long
/// and then sleep costs at most twice the better of the two, in any case (Karlin et al., "Competitive randomized
/// algorithms for nonuniform problems", 1990).
///
/// The bound does not count the delay of a thread that yields its core, which runs again only after all other threads.
/// A thread that is woken from a sleep runs before those that have used the core for long. So if the cores stay crowded
/// for more than a moment, a wait for processes of this host does not spin at all.
pub struct Spinner {
    score: AtomicI32,
    skipped: AtomicU32,
    /// Waits in a row that ended after the spinning thread had yielded.
    in_turns: AtomicU32,
}

/// The processes that a wait is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Peers {
    /// Only processes of this host: a sleep costs this side a system call, and the peer another.
    Near,
    /// Processes of other hosts too. A sleep costs more, because completions have to be requested, and they may bring
    /// another connection's bytes.
    Far,
}

impl Peers {
    pub fn new(are_far: bool) -> Self {
        if are_far { Self::Far } else { Self::Near }
    }
}

/// How long a quick peer takes to answer, ns.
const GLANCE: u64 = 1_000;
/// Time after which a spinning thread yields between checks, ns. If threads wait for a core it yields early. Else it
/// yields late, because a peer that has a core of its own may still be woken onto this one.
const POLITE_AFTER: u64 = 4_000;
const POLITE_AFTER_CROWDED: u64 = 1_000;
/// Checks, each with a pause, between two readings of the clock: about half a microsecond. With more of them, a thread
/// that spins beside too many others would yield too late.
const BETWEEN_CLOCKS: u32 = 8;
/// The cost of a sleep and its wake-up, both sides together, ns.
const SLEEP_COST: u64 = 5_000;
/// Waits in a row in which the peer ran only after this thread had yielded. After this many the two may share a core
/// while another is idle. The wake-up from a sleep finds the idle core, a yield does not.
const IN_TURNS_MAX: u32 = 64;
const SCORE_MAX: i32 = 8;
const PROBE_EVERY: u32 = 16;

impl Default for Spinner {
    fn default() -> Self {
        Self::new()
    }
}

impl Spinner {
    /// Returns a spinner with the best score.
    pub const fn new() -> Self {
        Self {
            score: AtomicI32::new(SCORE_MAX),
            skipped: AtomicU32::new(0),
            in_turns: AtomicU32::new(0),
        }
    }

    /// Returns how long to spin this time, ns; 0 means not at all.
    pub fn bound(&self, of: Peers) -> u64 {
        let bound = crate::config::config().spin.as_nanos() as u64;
        if bound == 0
            || self.score.load(Relaxed) <= 0 && !self.skipped.fetch_add(1, Relaxed).is_multiple_of(PROBE_EVERY)
        {
            return 0;
        }
        match LOAD.room() {
            Room::Free => bound,
            Room::Full if of == Peers::Near => 0,
            Room::Crowded | Room::Full => bound.min(SLEEP_COST),
            // The peer cannot run while this thread spins.
            Room::OneCore => 0,
        }
    }

    /// Returns whether waits have ended in a spin lately, and the next one may. Unlike [`Self::bound`], never probes.
    pub fn pays(&self) -> bool {
        let is_off = crate::config::config().spin.is_zero();
        !is_off && self.score.load(Relaxed) > 0 && !matches!(LOAD.room(), Room::Full | Room::OneCore)
    }

    /// Spins until `done` returns true, for at most `bound` ns. Returns the last value of `done`. Returns false at once
    /// if only a sleep gets two threads off one core.
    pub fn spin(&self, bound: u64, done: impl FnMut() -> bool) -> bool {
        if bound == 0 {
            return false;
        }
        if self.in_turns.load(Relaxed) >= IN_TURNS_MAX {
            self.in_turns.store(0, Relaxed);
            return false;
        }
        let end = spin_for(bound, done);
        let score = self.score.load(Relaxed);
        let score = if end == SpinEnd::Miss { score - 1 } else { score + 2 };
        self.score.store(score.clamp(-SCORE_MAX, SCORE_MAX), Relaxed);
        let in_turns = match end {
            SpinEnd::HitInTurn => self.in_turns.load(Relaxed) + 1,
            SpinEnd::Hit | SpinEnd::Miss => 0,
        };
        self.in_turns.store(in_turns, Relaxed);
        end != SpinEnd::Miss
    }
}

/// Spins for as long as a quick peer takes to answer, before a call that costs as much. Does not change any score.
pub(crate) fn glance(done: impl FnMut() -> bool) -> bool {
    spin_for(GLANCE, done) != SpinEnd::Miss
}

/// How a spin ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SpinEnd {
    Hit,
    /// The event came after this thread had yielded.
    HitInTurn,
    Miss,
}

fn spin_for(bound: u64, mut done: impl FnMut() -> bool) -> SpinEnd {
    let mut hit = SpinEnd::Hit;
    // An event that comes at once costs no reading of the clock.
    let mut start = None;
    loop {
        for _ in 0..BETWEEN_CLOCKS {
            if done() {
                return hit;
            }
            std::hint::spin_loop();
        }
        let now = now_ns();
        let spent = now.wrapping_sub(*start.get_or_insert(now));
        if spent >= bound {
            return SpinEnd::Miss;
        }
        if spent >= LOAD.polite_after() {
            // The peer's thread may have been woken onto this core.
            rustix::thread::sched_yield();
            hit = SpinEnd::HitInTurn;
        }
    }
}

/// Whether the cores are taken, by threads that can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Room {
    /// No more threads can run than there are cores.
    Free = 0,
    /// More threads can run than there are cores. At the check before, there was room.
    Crowded = 1,
    /// More threads can run than there are cores, at this check and at the one before.
    Full = 2,
    OneCore = 3,
}

impl Room {
    /// Returns the room for `running` threads that can run on `cores` cores. `was_free` says that the last check found
    /// [`Self::Free`].
    fn of(running: u32, cores: u32, was_free: bool) -> Self {
        match running <= cores {
            true => Self::Free,
            false if was_free => Self::Crowded,
            false => Self::Full,
        }
    }
}

/// Whether the cores are taken, checked once a tick at most.
struct Load {
    at: AtomicU64,
    room: AtomicU8,
}

static LOAD: Load = Load {
    at: AtomicU64::new(0),
    room: AtomicU8::new(Room::Free as u8),
};

impl Load {
    fn polite_after(&self) -> u64 {
        if self.room.load(Relaxed) == Room::Free as u8 {
            POLITE_AFTER
        } else {
            POLITE_AFTER_CROWDED
        }
    }

    /// Returns the room on the cores. Checks it again if the kernel's clock has ticked since the last check.
    fn room(&self) -> Room {
        let now = crate::sys::time::tick();
        let last = self.at.load(Relaxed);
        if now != last && self.at.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            let room = self.measure().unwrap_or(Room::Free);
            self.room.store(room as u8, Relaxed);
        }
        match self.room.load(Relaxed) {
            0 => Room::Free,
            1 => Room::Crowded,
            2 => Room::Full,
            _ => Room::OneCore,
        }
    }

    fn measure(&self) -> Option<Room> {
        let processors = processors()?;
        if processors < 2 {
            return Some(Room::OneCore);
        }
        let running = runnable()?;
        let was_free = self.room.load(Relaxed) == Room::Free as u8;
        Some(Room::of(running, processors, was_free))
    }
}

// How many threads can run on this machine, and on how many processors.

static FD: AtomicI32 = AtomicI32::new(-1);
static PROCESSORS: AtomicU32 = AtomicU32::new(0);

/// Forgets the descriptor in a fork child, where it is closed.
pub(crate) fn after_fork() {
    FD.store(-1, Release);
}

/// Returns the number of processors that this process may use, which is a container's or taskset's share. `None` if the
/// kernel does not report it.
fn processors() -> Option<u32> {
    let mut processors = PROCESSORS.load(Relaxed);
    if processors == 0 {
        processors = rustix::thread::sched_getaffinity(None).ok()?.count();
        PROCESSORS.store(processors, Relaxed);
    }
    Some(processors)
}

/// Returns the number of threads that can run, the caller's included, by one system call. `None` if the kernel does not
/// report it.
fn runnable() -> Option<u32> {
    let mut fd = FD.load(Acquire);
    if fd < 0 {
        let placed = PrivateFd::open(|| {
            rustix::fs::open(
                c"/proc/loadavg",
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )
        })
        .ok()?;
        fd = placed.as_raw_fd();
        std::mem::forget(placed);
        FD.store(fd, Release);
    }
    let mut text = [0u8; 64];
    // SAFETY: the descriptor was opened above, and is never closed.
    let n = rustix::io::pread(unsafe { BorrowedFd::borrow_raw(fd) }, &mut text, 0).ok()?;
    running(text.get(..n)?)
}

/// Returns the running threads from a text such as "0.00 0.01 0.05 2/123 4567", whose fourth field is running/existing.
fn running(text: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(text).ok()?;
    text.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(room: Room, of: Peers) -> u64 {
        // The next check is due at the kernel clock's next tick.
        LOAD.at.store(crate::sys::time::tick(), Relaxed);
        LOAD.room.store(room as u8, Relaxed);
        Spinner::new().bound(of)
    }

    #[test]
    fn a_moment_with_too_many_threads_is_not_yet_a_full_machine() {
        assert_eq!(Room::of(2, 2, false), Room::Free);
        assert_eq!(Room::of(3, 2, true), Room::Crowded);
        assert_eq!(Room::of(3, 2, false), Room::Full);
    }

    #[test]
    fn on_a_full_machine_nobody_spins_for_processes_of_this_host() {
        // Another test may have checked in between, or the clock may have ticked.
        let mut tries = 0..1_000;
        assert!(tries.any(|_| bound(Room::Full, Peers::Near) == 0 && bound(Room::Full, Peers::Far) == SLEEP_COST));
        assert!(tries.any(|_| bound(Room::Crowded, Peers::Near) == SLEEP_COST));
        assert!(tries.any(|_| bound(Room::Free, Peers::Near) > SLEEP_COST));
        assert!(tries.any(|_| bound(Room::OneCore, Peers::Far) == 0));
    }

    #[test]
    fn the_kernels_text_is_understood() {
        assert_eq!(running(b"0.00 0.01 0.05 2/123 4567\n"), Some(2));
        for wrong in [&b""[..], b"0.00 0.01 0.05", b"0.00 0.01 0.05 x/123 4", b"\xff"] {
            assert_eq!(running(wrong), None);
        }
        assert!(processors() > Some(0) && runnable() > Some(0));
    }
}
