//! Each test runs the two sides of a protocol against each other. At least one side must see what the other side has
//! published. On x86-64, a test with too weak an ordering fails rarely. In Miri such a test fails soon, because there a
//! load may return an older value wherever the orderings allow that.

use std::sync::Barrier;

use crate::sync::*;

/// Runs the sides `one` and `other` against each other 500 times (40 in Miri), each time on fresh words from `make`. A
/// side returns true if it has seen what the other side has published.
fn never_miss<W: Sync>(make: impl Fn() -> W, one: impl Fn(&W) -> bool + Sync, other: impl Fn(&W) -> bool + Sync) {
    for _ in 0..if cfg!(miri) { 40 } else { 500 } {
        let (words, start) = (make(), Barrier::new(2));
        let seen = std::thread::scope(|s| {
            let one = s.spawn(|| {
                start.wait();
                one(&words)
            });
            start.wait();
            let seen = other(&words);
            one.join().unwrap() || seen
        });
        assert!(seen, "both have missed the other");
    }
}

#[test]
fn of_two_who_publish_one_sees_the_other() {
    type Words = [Published<AtomicU32>; 2];
    let ways: [fn(&Published<AtomicU32>); 4] = [
        |word| assert_eq!(word.publish(1), 0),
        |word| word.add_bits(1),
        |word| word.add_one(),
        |word| assert_eq!(word.claim(1), Ok(())),
    ];
    for way in ways {
        never_miss(
            Words::default,
            |[mine, theirs]| {
                way(mine);
                theirs.look() != 0
            },
            |[theirs, mine]| {
                mine.publish(1);
                theirs.look() != 0
            },
        );
    }
}

#[test]
fn who_asks_to_be_told_finds_it_or_is_told() {
    let ways: [fn(&Attention); 2] = [|word| word.arm(1), |word| word.keep_armed(1)];
    for arm in ways {
        never_miss(
            || (Attention::default(), Published::<AtomicU64>::default()),
            |(attention, news)| {
                arm(attention);
                news.look() != 0
            },
            |(attention, news)| {
                news.publish(1);
                attention.take() != 0
            },
        );
    }
}

#[test]
fn who_asks_before_he_says_that_he_sleeps_finds_the_word_taken_or_is_rung_for() {
    never_miss(
        || {
            let attention = Attention::default();
            attention.arm(1);
            (attention, SleepFlag::default())
        },
        |(attention, flag)| {
            flag.begin();
            attention.left() == 0
        },
        |(attention, flag)| {
            assert_eq!(attention.take(), 1);
            flag.is_sleeping()
        },
    );
}

#[test]
fn who_is_about_to_sleep_finds_it_or_is_rung_for() {
    let ways: [fn(&SleepFlag) -> bool; 2] = [|flag| flag.must_ring(&RungMark::default()), SleepFlag::is_sleeping];
    for rings in ways {
        never_miss(
            || (SleepFlag::default(), Published::<AtomicU64>::default()),
            |(flag, news)| {
                flag.begin();
                news.look() != 0
            },
            |(flag, news)| {
                news.publish(1);
                rings(flag)
            },
        );
    }
}

#[test]
fn who_comes_in_finds_it_closed_or_is_seen() {
    never_miss(
        || (Presence::default(), Published::<AtomicBool>::default()),
        |(presence, closed)| {
            presence.enter();
            closed.look()
        },
        |(presence, closed)| {
            closed.publish(true);
            !presence.is_empty()
        },
    );
}

#[test]
fn the_last_who_leaves_sees_who_waits_or_that_one_finds_the_place_empty() {
    never_miss(
        || {
            let presence = Presence::default();
            presence.enter();
            (presence, Published::<AtomicBool>::default())
        },
        |(presence, closed)| presence.leave() && closed.look(),
        |(presence, closed)| {
            closed.publish(true);
            presence.is_empty()
        },
    );
}

#[test]
fn what_was_asked_for_is_done_after_that_or_asked_for_again() {
    never_miss(
        || {
            let request = Request::default();
            assert!(request.ask() && request.is_asked() && !request.ask());
            (request, Published::<AtomicU64>::default())
        },
        |(request, news)| {
            news.publish(1);
            request.ask()
        },
        |(request, news)| {
            assert!(request.begin());
            news.look() != 0
        },
    );
}

#[test]
fn what_is_left_to_the_holder_of_a_lock_is_seen_by_it_or_done() {
    never_miss(
        || (Handoff::default(), AtomicU32::new(1)),
        |(handoff, lock)| {
            handoff.add(1);
            // In real use this side now tries the lock by a compare-exchange, and does the work if it gets the lock.
            // The test loads the lock's word instead. In Miri a compare-exchange always reads the newest value, so the
            // test would pass even without the fence in `Handoff::is_empty`. A relaxed load may read an older value.
            handoff.is_empty() || lock.load(Ordering::Relaxed) == 0
        },
        |(handoff, lock)| {
            lock.swap(0, Ordering::Release);
            !handoff.is_empty()
        },
    );
}

#[test]
fn a_fence_between_store_and_load_will_do_for_any_words() {
    type Words = [AtomicU32; 2];
    let side = |mine: &AtomicU32, theirs: &AtomicU32| {
        mine.store(1, Ordering::Relaxed);
        store_load_fence();
        theirs.load(Ordering::Relaxed) != 0
    };
    never_miss(Words::default, |[a, b]| side(a, b), |[a, b]| side(b, a));
}

#[test]
fn an_attention_word_is_taken_once_and_by_all_its_bits() {
    let attention = Attention::default();
    assert_eq!(attention.take(), 0);
    attention.arm(1);
    attention.arm(4);
    attention.keep_armed(2);
    attention.disarm(4);
    assert_eq!((attention.take(), attention.take()), (3, 0));
}
