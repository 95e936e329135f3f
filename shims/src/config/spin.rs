//! How long a waiting thread spins before it sleeps.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};

use rdmasock_core::os::privatefd::PrivateFd;

use crate::sys::time::now_ns;

/// Decides whether and how long a thread spins before it sleeps, from how its earlier spins ended.
///
/// Spinning pays when the awaited event usually comes within the bound and no other thread needs the core. So a spin in
/// which the event came (a hit) raises a score, and a spin that timed out (a miss) lowers it. At a score of 0 or below
/// only one wait in `PROBE_EVERY` spins.
///
/// While more threads can run than there are cores, the bound is the cost of a sleep and its wake-up. A thread that
/// spins that long and then sleeps pays at most twice the cost of the better choice (Karlin et al., "Competitive
/// randomized algorithms for nonuniform problems", 1990).
///
/// The bound leaves out one cost: a spinning thread that yields its core runs again only after all other threads. A
/// thread that is woken from a sleep runs before those that have used the core for long. So if the cores are
/// overcommitted at two checks in a row, a wait for processes of this host does not spin at all.
pub struct Spinner {
    score: AtomicI32,
    skipped: AtomicU32,
    /// The number of hits in a row that came only after the spinning thread had yielded.
    in_turns: AtomicU32,
}

/// Where the processes run that a wait is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Peers {
    /// Only on this host. A sleep costs this side one system call, and the peer another.
    Near,
    /// Also on other hosts. A sleep costs more: the thread has to request a completion event first, and the event may
    /// be for the bytes of another connection.
    Far,
}

impl Peers {
    pub fn new(are_far: bool) -> Self {
        if are_far { Self::Far } else { Self::Near }
    }
}

/// How long `glance` spins, ns: the time that a quick peer takes to answer.
const GLANCE: u64 = 1_000;
/// The time after which a spinning thread yields its core between checks, ns. It yields even if each thread has a core,
/// because the kernel may have woken the peer's thread onto this core. If threads wait for a core, it yields after
/// `POLITE_AFTER_CROWDED`, which is earlier.
const POLITE_AFTER: u64 = 4_000;
const POLITE_AFTER_CROWDED: u64 = 1_000;
/// The number of checks, each with a pause instruction, between two readings of the clock: about 0.5 µs. With more
/// checks, a thread would yield too late on crowded cores.
const BETWEEN_CLOCKS: u32 = 8;
/// The cost of a sleep and its wake-up, both sides together, ns.
const SLEEP_COST: u64 = 5_000;
/// The number of hits in a row, each only after a yield, after which the next wait sleeps at once. This thread and the
/// peer's may then share a core while another core is idle. A wake-up from a sleep finds the idle core; a yield does
/// not.
const IN_TURNS_MAX: u32 = 64;
const SCORE_MAX: i32 = 8;
const PROBE_EVERY: u32 = 16;

impl Default for Spinner {
    fn default() -> Self {
        Self::new()
    }
}

impl Spinner {
    /// Returns a spinner with the highest score.
    pub const fn new() -> Self {
        Self {
            score: AtomicI32::new(SCORE_MAX),
            skipped: AtomicU32::new(0),
            in_turns: AtomicU32::new(0),
        }
    }

    /// Returns how long the next wait may spin, ns; 0 means not at all.
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

    /// Returns whether the score is above 0 and the load of the cores allows a spin. Unlike [`Self::bound`], never
    /// allows a spin only to probe.
    pub fn pays(&self) -> bool {
        let is_off = crate::config::config().spin.is_zero();
        !is_off && self.score.load(Relaxed) > 0 && !matches!(LOAD.room(), Room::Full | Room::OneCore)
    }

    /// Spins until `done` returns true, for at most `bound` ns. Returns whether `done` has returned true. After
    /// `IN_TURNS_MAX` hits in a row that needed a yield, returns false at once, so that the caller sleeps.
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

/// Spins for up to `GLANCE` ns, before a system call that costs as much. Returns whether `done` has returned true.
/// Changes no score.
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
    // The clock is first read after `BETWEEN_CLOCKS` checks: an event that comes at once costs no reading.
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

/// The load of the cores: how many threads can run on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Room {
    /// No more threads can run than there are cores.
    Free = 0,
    /// More threads can run than there are cores. The check before found `Free`.
    Crowded = 1,
    /// More threads can run than there are cores, at this check and at the one before.
    Full = 2,
    OneCore = 3,
}

impl Room {
    /// Returns the load of `cores` cores on which `running` threads can run. `was_free` says that the check before
    /// found [`Self::Free`].
    fn of(running: u32, cores: u32, was_free: bool) -> Self {
        match running <= cores {
            true => Self::Free,
            false if was_free => Self::Crowded,
            false => Self::Full,
        }
    }
}

/// The last measured `Room`. It is measured at most once a tick of the kernel's clock.
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

    /// Returns the load of the cores. Measures it again if the kernel's clock has ticked since the last measurement.
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

// The number of threads that can run on this machine, and the number of processors for this process.

static FD: AtomicI32 = AtomicI32::new(-1);
static PROCESSORS: AtomicU32 = AtomicU32::new(0);

/// Forgets the descriptor of /proc/loadavg in a fork child, where it is closed.
pub(crate) fn after_fork() {
    FD.store(-1, Release);
}

/// Returns the number of processors that this process may use: with a container or taskset, only its share. `None` if
/// the kernel does not report it.
fn processors() -> Option<u32> {
    let mut processors = PROCESSORS.load(Relaxed);
    if processors == 0 {
        processors = rustix::thread::sched_getaffinity(None).ok()?.count();
        PROCESSORS.store(processors, Relaxed);
    }
    Some(processors)
}

/// Returns the number of threads that can run, the calling thread included, by one system call. `None` if the kernel
/// does not report it.
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

/// Returns the number of running threads from a text such as "0.00 0.01 0.05 2/123 4567". Its fourth field is
/// running/existing.
fn running(text: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(text).ok()?;
    text.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(room: Room, of: Peers) -> u64 {
        // Keeps `bound` from measuring again before the kernel clock's next tick.
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
        // Another test may have measured the load in between, or the clock may have ticked.
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
