//! How long a waiting thread spins before it sleeps.

use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::config::load;
use crate::sys::time::now_ns;

/// Whether and how long to spin before a sleep, learnt from how earlier spins ended.
///
/// Spinning pays when what is waited for usually comes within the bound and nobody else needs the
/// core. So: a score that a hit raises and a miss lowers; below the threshold only one wait in sixteen
/// tries. While more threads can run than there are cores the bound is what a sleep and its wake-up
/// cost: to spin that long and then sleep is at most twice as dear as the better of the two, whatever
/// comes (Karlin et al., "Competitive randomized algorithms for nonuniform problems", 1990). That does not
/// count what becomes of a thread that has to let others run: it comes after all of them, and who is woken from a sleep
/// before those that have used the core for long. So where there are more for more than a moment who waits for
/// processes of this host does not spin at all.
pub struct Spinner {
    score: AtomicI32,
    skipped: AtomicU32,
    /// Waits in a row that ended after others had been let run.
    in_turns: AtomicU32,
}

/// Who is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Peers {
    /// Processes of this host alone: to sleep costs this side a system call, and the peer another.
    Near,
    /// Others too: a sleep is dearer, for completions are to be asked for, and what they bring is another's as well.
    Far,
}

impl Peers {
    pub fn new(are_far: bool) -> Self {
        if are_far { Self::Far } else { Self::Near }
    }
}

/// How long a quick peer takes to answer, ns.
const GLANCE: u64 = 1_000;
/// From when on a spinning thread lets others run in between, ns: at once where they wait for a core, and else late,
/// for a peer that has a core of its own may yet be woken onto this one.
const POLITE_AFTER: u64 = 4_000;
const POLITE_AFTER_CROWDED: u64 = 1_000;
/// So many looks, each with a pause, at a time: about half a microsecond. With more of them a thread that spins beside
/// too many others is polite too late.
const BETWEEN_CLOCKS: u32 = 8;
/// What a sleep and its wake-up cost both sides together, ns.
const SLEEP_COST: u64 = 5_000;
/// After so many waits in which the peer ran only when it was let, the two may share a core while
/// another is idle: the wake-up from a sleep finds the idle one, the yields do not.
const IN_TURNS_MAX: u32 = 64;
const SCORE_MAX: i32 = 8;
const PROBE_EVERY: u32 = 16;

impl Default for Spinner {
    fn default() -> Self {
        Self::new()
    }
}

impl Spinner {
    /// Begins optimistic.
    pub const fn new() -> Self {
        Self {
            score: AtomicI32::new(SCORE_MAX),
            skipped: AtomicU32::new(0),
            in_turns: AtomicU32::new(0),
        }
    }

    /// For how long to spin this time, ns; 0 is not at all.
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
            // The peer could not run while we spin.
            Room::OneCore => 0,
        }
    }

    /// Whether waits have ended in a spin lately, and may again. Unlike [`Self::bound`] it tries nothing anew.
    pub fn pays(&self) -> bool {
        let is_off = crate::config::config().spin.is_zero();
        !is_off && self.score.load(Relaxed) > 0 && !matches!(LOAD.room(), Room::Full | Room::OneCore)
    }

    /// Spins until `done` or for `bound` ns; gives what `done` said last. False at once where only a
    /// sleep gets two threads off one core.
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

/// Spins for as long as a quick peer takes to answer: before a call that costs as much. Nothing is
/// learnt from it.
pub fn glance(done: impl FnMut() -> bool) -> bool {
    spin_for(GLANCE, done) != SpinEnd::Miss
}

/// How a spin ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SpinEnd {
    Hit,
    /// Others were let run before it came.
    HitInTurn,
    Miss,
}

fn spin_for(bound: u64, mut done: impl FnMut() -> bool) -> SpinEnd {
    let mut hit = SpinEnd::Hit;
    // What comes at once costs no look at the clock.
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
            // Whoever we wait for may have been woken onto this core.
            rustix::thread::sched_yield();
            hit = SpinEnd::HitInTurn;
        }
    }
}

/// Whether the cores are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Room {
    /// No more threads can run than there are cores.
    Free = 0,
    /// More do now.
    Crowded = 1,
    /// They did at the last look too.
    Full = 2,
    OneCore = 3,
}

impl Room {
    /// With so many threads that can run on so many cores, of which there was one for each at the last look, or not.
    fn of(running: u32, cores: u32, was_free: bool) -> Self {
        match running <= cores {
            true => Self::Free,
            false if was_free => Self::Crowded,
            false => Self::Full,
        }
    }
}

/// Whether the cores are taken, looked at now and then.
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

    /// How it is on the cores, as of the kernel clock's last tick.
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
        if load::processors()? < 2 {
            return Some(Room::OneCore);
        }
        let load = load::now()?;
        let was_free = self.room.load(Relaxed) == Room::Free as u8;
        Some(Room::of(load.running, load.processors, was_free))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(room: Room, of: Peers) -> u64 {
        // The next look is at the kernel clock's next tick.
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
        // Another test may have looked in between, or the clock moved on.
        let mut tries = 0..1_000;
        assert!(tries.any(|_| bound(Room::Full, Peers::Near) == 0 && bound(Room::Full, Peers::Far) == SLEEP_COST));
        assert!(tries.any(|_| bound(Room::Crowded, Peers::Near) == SLEEP_COST));
        assert!(tries.any(|_| bound(Room::Free, Peers::Near) > SLEEP_COST));
        assert!(tries.any(|_| bound(Room::OneCore, Peers::Far) == 0));
    }
}
