//! Loom models of the protocols of `sync`, at least one for each. A model runs two or three threads that must not miss
//! each other. A thread whose wake-up is lost sleeps for ever, which loom reports as a deadlock. A missing release or
//! acquire shows as two accesses to a cell without an order, which loom reports too.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::sync::*;

/// Models an eventfd: `ring` adds one, `wait` sleeps until the count is not 0 and clears it.
pub(crate) struct Doorbell(Mutex<u32>, Condvar);

impl Doorbell {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(0), Condvar::new())
    }
    pub(crate) fn ring(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_all();
    }
    pub(crate) fn wait(&self) {
        let mut n = self.0.lock().unwrap();
        while *n == 0 {
            n = self.1.wait(n).unwrap();
        }
        *n = 0;
    }
}

/// A value that one thread writes before its publication, and another thread reads after it has seen the publication.
struct Cell(UnsafeCell<u32>);

// SAFETY: the model fails if two accesses are not ordered, because loom detects them.
unsafe impl Sync for Cell {}

impl Cell {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }
    fn write(&self) {
        self.add(1);
    }
    fn add(&self, n: u32) {
        // SAFETY: loom detects any other access at the same time.
        self.0.with_mut(|value| unsafe { *value += n });
    }
    fn read(&self) -> u32 {
        // SAFETY: as in `add`.
        self.0.with(|value| unsafe { *value })
    }
}

pub(crate) fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Runs all `sides` on the same `words`: the first in the calling thread, each other one in a thread of its own.
/// Returns the words and the results of the sides.
fn race<W: Send + Sync + 'static, R: Send + 'static, const N: usize>(words: W, sides: [fn(&W) -> R; N]) -> (W, Vec<R>) {
    let words = Arc::new(words);
    let threads: Vec<_> = sides
        .iter()
        .skip(1)
        .map(|&side| {
            let words = words.clone();
            thread::spawn(move || side(&words))
        })
        .collect();
    let mut all = vec![sides[0](&words)];
    all.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
    let Ok(words) = Arc::try_unwrap(words) else {
        panic!("all threads have ended")
    };
    (words, all)
}

/// Models two sides. Each writes its cell and publishes its word by the function `way`. If it sees the other side's
/// word, it reads the other side's cell.
fn two_who_publish(way: fn(&Published<AtomicU32>)) {
    struct Side(Published<AtomicU32>, Cell);
    fn run(way: fn(&Published<AtomicU32>), mine: &Side, theirs: &Side) -> bool {
        mine.1.write();
        way(&mine.0);
        let seen = theirs.0.look() != 0;
        assert!(!seen || theirs.1.read() == 1);
        seen
    }
    check(move || {
        let side = || Side(Published::default(), Cell::new());
        let sides = (side(), side(), way);
        let (_, seen) = race(sides, [|(a, b, way)| run(*way, a, b), |(a, b, way)| run(*way, b, a)]);
        assert!(seen.contains(&true), "both have missed the other");
    });
}

#[test]
fn loom_of_two_who_publish_one_sees_the_other() {
    two_who_publish(|word| {
        word.publish(1);
    });
    two_who_publish(|word| word.add_bits(1));
    two_who_publish(|word| word.add_one());
    two_who_publish(|word| assert_eq!(word.claim(1), Ok(())));
}

/// A thread that sees a quiet publication also sees the writes before the publication.
#[test]
fn loom_what_is_published_quietly_is_released() {
    check(|| {
        let words = (Published::<AtomicU64>::default(), Cell::new());
        let say = |(word, cell): &(Published<AtomicU64>, Cell)| {
            cell.write();
            word.publish_quietly(1);
        };
        race(
            words,
            [|(word, cell)| assert!(word.look() == 0 || cell.read() == 1), say],
        );
    });
}

/// A thread that takes bits acquires the writes of all threads that have published them.
#[test]
fn loom_who_takes_acquires_from_all_who_have_published() {
    type Words = (Published<AtomicU32>, [Cell; 2]);
    fn say(words: &Words, at: usize) {
        words.1[at].write();
        words.0.add_bits(1 << at);
    }
    check(|| {
        let words = (Published::default(), [Cell::new(), Cell::new()]);
        let take = |(word, cells): &Words| {
            let bits = word.take();
            for (at, cell) in cells.iter().enumerate() {
                assert!(bits & 1 << at == 0 || cell.read() == 1);
            }
        };
        race(words, [take, |w| say(w, 0), |w| say(w, 1)]);
    });
}

/// Models a sleeper that arms a wake-up word by the function `arm`, and two publishers.
fn attention(arm: fn(&Attention)) {
    struct Words {
        attention: Attention,
        news: Published<AtomicU64>,
        cells: [Cell; 2],
        bell: Doorbell,
        arm: fn(&Attention),
    }
    fn publisher(words: &Words, at: usize) {
        words.cells[at].write();
        words.news.add_bits(1 << at);
        if words.attention.take() != 0 {
            words.bell.ring();
        }
    }
    check(move || {
        let words = Words {
            attention: Attention::default(),
            news: Published::default(),
            cells: [Cell::new(), Cell::new()],
            bell: Doorbell::new(),
            arm,
        };
        let sleeper = |words: &Words| {
            while words.news.look() != 3 {
                (words.arm)(&words.attention);
                if words.news.look() != 3 {
                    words.bell.wait();
                }
            }
            assert_eq!(words.cells.each_ref().map(Cell::read), [1, 1]);
        };
        race(words, [sleeper, |w| publisher(w, 0), |w| publisher(w, 1)]);
    });
}

#[test]
fn loom_who_asks_to_be_told_finds_it_or_is_told() {
    attention(|word| word.arm(1));
    attention(|word| word.keep_armed(1));
}

/// A sleeper raises its flag before it sleeps. Two publishers check the flag: one by `must_ring`, with a `RungMark`,
/// the other by `is_sleeping`.
#[test]
fn loom_who_is_about_to_sleep_finds_it_or_is_rung_for() {
    struct Words {
        flag: SleepFlag,
        news: Published<AtomicU64>,
        cells: [Cell; 2],
        bell: Doorbell,
    }
    fn publish(words: &Words, at: usize) {
        words.cells[at].write();
        words.news.add_bits(1 << at);
    }
    check(|| {
        let words = Words {
            flag: SleepFlag::default(),
            news: Published::default(),
            cells: [Cell::new(), Cell::new()],
            bell: Doorbell::new(),
        };
        let sleeper = |words: &Words| {
            while words.news.look() != 3 {
                words.flag.begin();
                if words.news.look() != 3 {
                    words.bell.wait();
                }
                words.flag.end();
            }
            assert_eq!(words.cells.each_ref().map(Cell::read), [1, 1]);
        };
        let peer = |words: &Words| {
            publish(words, 0);
            if words.flag.must_ring(&RungMark::default()) {
                words.bell.ring();
            }
        };
        let own = |words: &Words| {
            publish(words, 1);
            if words.flag.is_sleeping() {
                words.bell.ring();
            }
        };
        race(words, [sleeper, peer, own]);
    });
}

/// A sleeper arms its wake-up word, and raises its sleep flag only after that. A peer publishes FIRST and then SECOND.
/// A third thread may take FIRST out of `news` before the sleeper looks. The sleeper must still get SECOND.
#[test]
fn loom_who_says_late_that_he_sleeps_is_rung_for_though_another_takes_what_came() {
    const FIRST: u64 = 1;
    const SECOND: u64 = 2;
    struct Words {
        attention: Attention,
        flag: SleepFlag,
        news: Published<AtomicU64>,
        bell: Doorbell,
    }
    check(|| {
        let words = Words {
            attention: Attention::default(),
            flag: SleepFlag::default(),
            news: Published::default(),
            bell: Doorbell::new(),
        };
        let sleeper = |words: &Words| {
            while words.news.take_bits(FIRST | SECOND) & SECOND == 0 {
                words.attention.arm(1);
                words.flag.begin();
                if words.news.look() == 0 && words.attention.left() != 0 {
                    words.bell.wait();
                }
                words.flag.end();
            }
        };
        let peer = |words: &Words| {
            for what in [FIRST, SECOND] {
                words.news.add_bits(what);
                if words.attention.take() != 0 && words.flag.is_sleeping() {
                    words.bell.ring();
                }
            }
        };
        let third = |words: &Words| {
            words.news.take_bits(FIRST);
        };
        race(words, [sleeper, peer, third]);
    });
}

/// Two calls enter a region, and write their cell if they find the old mode, 0. A third thread changes the mode. Work
/// that follows the change is done by that thread, or by the last call that leaves. The cells show that the work never
/// runs beside a call that has found the old mode.
#[test]
fn loom_what_waits_for_all_to_leave_is_done_when_they_have_left() {
    struct Words {
        inside: Presence,
        mode: Published<AtomicU8>,
        calls: [Cell; 2],
        done: Mutex<bool>,
    }
    fn call(words: &Words, at: usize) {
        words.inside.enter();
        if words.mode.look() == 0 {
            words.calls[at].write();
        }
        if words.inside.leave() && words.mode.look() != 0 {
            go_on(words);
        }
    }
    /// Does the work if no call is inside. A call that is still inside may have found the old mode.
    fn go_on(words: &Words) {
        let mut done = words.done.lock().unwrap();
        if words.inside.is_empty() {
            words.calls.iter().for_each(Cell::write);
            *done = true;
        }
    }
    check(|| {
        let words = Words {
            inside: Presence::default(),
            mode: Published::default(),
            calls: [Cell::new(), Cell::new()],
            done: Mutex::new(false),
        };
        let change = |words: &Words| {
            words.mode.publish(1);
            go_on(words);
        };
        let (words, _) = race(words, [change, |w| call(w, 0), |w| call(w, 1)]);
        assert!(*words.done.lock().unwrap(), "nobody has gone on");
    });
}

/// Two threads each publish their news and then make a request. A server sleeps until the bell rings, and must find the
/// news of both threads.
#[test]
fn loom_what_was_asked_for_is_done_after_that_or_asked_for_again() {
    struct Words {
        request: Request,
        news: [Published<AtomicU32>; 2],
        cells: [Cell; 2],
        bell: Doorbell,
    }
    fn ask(words: &Words, at: usize) {
        words.cells[at].write();
        words.news[at].publish(1);
        if words.request.ask() {
            words.bell.ring();
        }
    }
    check(|| {
        let words = Words {
            request: Request::default(),
            news: Default::default(),
            cells: [Cell::new(), Cell::new()],
            bell: Doorbell::new(),
        };
        let server = |words: &Words| {
            let mut done = [false; 2];
            while done != [true; 2] {
                words.bell.wait();
                words.request.begin();
                done = words.news.each_ref().map(|n| n.look() != 0);
            }
            assert_eq!(words.cells.each_ref().map(Cell::read), [1, 1]);
        };
        race(words, [server, |w| ask(w, 0), |w| ask(w, 1)]);
    });
}

/// Tries to take the lock: first by a load, then by a compare-exchange. By the memory model a compare-exchange that
/// fails may have read an older value. In loom it always reads the newest value, but a load may read an older one.
fn try_lock(lock: &AtomicU32) -> bool {
    lock.load(Ordering::Relaxed) == 0
        && lock
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
}

/// Two threads each add work, and only try to take the lock. A thread that finds the lock taken leaves its work to the
/// holder.
#[test]
fn loom_what_is_left_to_the_holder_of_a_lock_is_done() {
    struct Words {
        handoff: Handoff,
        lock: AtomicU32,
        done: Cell,
    }
    fn run(words: &Words, bits: u32) {
        words.handoff.add(bits);
        while !words.handoff.is_empty() {
            if !try_lock(&words.lock) {
                return;
            }
            let bits = words.handoff.take();
            words.done.add(bits);
            words.lock.swap(0, Ordering::Release);
        }
    }
    check(|| {
        let words = Words {
            handoff: Handoff::default(),
            lock: AtomicU32::new(0),
            done: Cell::new(),
        };
        let (words, _) = race(words, [|w| run(w, 1), |w| run(w, 2)]);
        assert_eq!(words.done.read(), 3);
    });
}

#[test]
fn loom_a_fence_between_store_and_load_will_do_for_any_words() {
    fn side(mine: &AtomicU32, theirs: &AtomicU32) -> bool {
        mine.store(1, Ordering::Relaxed);
        store_load_fence();
        theirs.load(Ordering::Relaxed) != 0
    }
    check(|| {
        let words = (AtomicU32::new(0), AtomicU32::new(0));
        let (_, seen) = race(words, [|(a, b)| side(a, b), |(a, b)| side(b, a)]);
        assert!(seen.contains(&true), "both have missed the other");
    });
}
