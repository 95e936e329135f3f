//! Values that no correct peer writes lead to an error and never to an access outside the ring.

use proptest::prelude::*;

use crate::fabric::ring::tests::*;
use crate::sync::Ordering;

fn pair() -> (Memory, Producer, Consumer) {
    let m = Memory::new(1 << 14);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    assert_eq!(send(&mut p, &[7; 100]).unwrap().0, 100);
    assert_eq!(c.available(), Ok(100));
    (m, p, c)
}

#[test]
fn a_jumping_tail_is_refused() {
    for (tail, want) in [
        (99, Violation::TailMovedBack),
        (4097, Violation::TailBeyondWindow),
        (u64::MAX, Violation::TailBeyondWindow),
    ] {
        let (m, _, mut c) = pair();
        m.block.producer.tail.reset(tail);
        let spans = c.spans(1000).map(|s| s.len());
        assert_eq!(spans, Err(RingError::PeerViolation(want)));
        assert_eq!(c.spans(100).unwrap().len(), 100);
    }
}

#[test]
fn a_wandering_head_is_refused() {
    let (m, mut p, _) = pair();
    m.block.consumer.head.reset(101);
    assert_eq!(p.free(), Err(Violation::HeadBeyondTail.into()));
    m.block.consumer.head.reset(50);
    assert_eq!(p.used(), Ok(50));
    m.block.consumer.head.reset(49);
    assert_eq!(p.arm_space(1), Err(Violation::HeadMovedBack.into()));
}

#[test]
fn bad_offers_are_refused() {
    let offer = |generation: u64, log2: u64, page: u64| generation << 40 | log2 << 32 | page;
    for word in [
        offer(0, 12, 0),
        offer(2, 11, 0),
        offer(2, 27, 0),
        offer(2, 255, 0),
        offer(2, 12, 4),
        offer(2, 14, 1),
        offer(2, 26, 0),
        offer(2, 12, u64::from(u32::MAX)),
    ] {
        let (m, mut p, _) = pair();
        m.block.consumer.offer.reset(word);
        assert_eq!(p.adopt(), Err(Violation::BadOffer.into()), "{word:x}");
        let (m, mut p, _) = pair();
        assert_eq!(send(&mut p, &[0; 5]).unwrap().0, 5);
        m.block.consumer.offer.reset(word);
        let spans = p.spans(5000).map(|s| s.len());
        assert_eq!(spans, Err(Violation::BadOffer.into()));
    }
}

#[test]
fn a_ring_beyond_the_allowance_is_refused() {
    let (m, p, _) = pair();
    let reach = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(1 << 20));
    let mut p = p.with_allowance(Allowance::new(12, reach));
    m.block.consumer.offer.reset(2 << 40 | 13 << 32);
    assert_eq!(p.adopt(), Err(Violation::BeyondAllowance.into()));
}

#[test]
fn bad_switches_are_refused() {
    for (generation, pos, offered) in [
        (2, 100, false),
        (3, 100, true),
        (0, 100, true),
        (2, 99, true),
        (2, 4097, true),
        (2, u64::MAX, true),
    ] {
        let (m, _, mut c) = pair();
        if offered {
            let _ = c.offer(Region::new(1, 12).unwrap()).unwrap();
        }
        let line = &m.block.producer;
        line.switch_pos.store(pos, Ordering::Relaxed);
        line.generation.store(generation, Ordering::Relaxed);
        assert_eq!(c.available(), Err(Violation::BadSwitch.into()));
    }
}

#[test]
fn an_unknown_end_is_refused() {
    let (m, _, mut c) = pair();
    m.block.producer.end.reset(77);
    assert_eq!(c.end(), Ok(None));
    assert_eq!(recv(&mut c, &mut [0; 100]).unwrap().0, 100);
    assert_eq!(c.end(), Err(Violation::BadEnd.into()));
}

#[test]
fn what_two_rings_do_not_hold_is_not_sent_again() {
    let m = Memory::new(1 << 14);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    assert_eq!(send(&mut p, &[1; 5000]).unwrap().0, 4096);
    for page in 1..3_u64 {
        // The test has read nothing, so a correct consumer would not offer the third ring.
        let word = (page + 1) << 40 | 12 << 32 | page;
        m.block.consumer.offer.reset(word);
        assert_eq!(send(&mut p, &[page as u8 + 1; 5000]).unwrap().0, 4096);
    }
    assert_eq!(p.unread(), Err(Violation::NotHeld.into()));
    assert_eq!(p.rest(4095), Err(Violation::NotHeld.into()));
    let held = [[2; 4096], [3; 4096]].concat();
    assert_eq!(p.rest(4096), Ok(held));
}

fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..10_000,
        any::<u64>(),
        (0u64..8, 0u64..30, 0u64..8).prop_map(|(g, l, p)| g << 40 | l << 32 | p),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, ..ProptestConfig::default() })]
    /// Overwrites words of the block at random between the operations of both sides. Whatever the results are, the
    /// copies stay inside the area. `inside` and Miri check that.
    #[test]
    fn random_words_never_leave_the_area(
        ops in proptest::collection::vec((0u8..13, word(), 0usize..6000), 1..100),
    ) {
        let (m, mut p, mut c) = pair();
        let (pl, cl) = (&m.block.producer, &m.block.consumer);
        let area = m.area.as_ptr() as usize..m.area.as_ptr() as usize + m.area.len();
        let inside = |s: &Spans<'_>| s.pieces().iter().all(|&(ptr, n)| {
            n == 0 || area.contains(&(ptr as usize)) && ptr as usize + n <= area.end
        });
        let mut buf = vec![0; 6000];
        for (what, word, n) in ops {
            match what {
                0 => pl.tail.reset(word),
                1 => pl.generation.store(word as u32, Ordering::Relaxed),
                2 => pl.switch_pos.store(word, Ordering::Relaxed),
                3 => pl.end.reset(word as u32),
                4 => cl.head.reset(word),
                5 => cl.offer.reset(word),
                6 => { let _ = c.offer(Region::new(word as u32 % 5, 12 + (n % 3) as u8).unwrap()); }
                7 => { let _ = c.take_retired(); }
                8 => { let _ = c.peek(n, n).map(|s| assert!(inside(&s))); }
                9 | 10 => { let _ = p.spans(n).map(|s| assert!(inside(&s))); let _ = send(&mut p, &buf[..n]); }
                _ => { let _ = c.spans(n).map(|s| assert!(inside(&s))); let _ = recv(&mut c, &mut buf[..n]); }
            }
            let _ = (p.has_space(), c.has_data(), c.end(), c.arm_data(1), p.arm_space(1));
        }
    }
}

#[test]
fn a_reserve_that_is_none_is_not_taken() {
    let reserve = |generation: u64, log2: u64, page: u64| generation << 40 | log2 << 32 | page;
    for (word, said) in [
        (reserve(0, 13, 0), Ok(false)),
        (reserve(1, 11, 0), Ok(false)),
        (reserve(1, 27, 0), Ok(false)),
        (reserve(1, 13, 3), Err(Violation::BadOffer.into())),
        (reserve(1, 26, 0), Err(Violation::BadOffer.into())),
        (reserve(1, 13, u64::from(u32::MAX)), Err(Violation::BadOffer.into())),
    ] {
        let (m, mut p, _) = pair();
        assert_eq!(send(&mut p, &[1; 4096]).unwrap().0, 3996);
        m.block.consumer.reserve.store(word, Ordering::Relaxed);
        assert_eq!(p.make_room(|_| true), said, "{word:x}");
        assert_eq!(p.free(), Ok(0));
    }
}

#[test]
fn what_was_consumed_counts_for_no_more_than_was_sent() {
    let (m, mut p, _) = pair();
    for (consumed, said) in [
        (101, Err(Violation::HeadBeyondTail.into())),
        (100, Ok(true)),
        (0, Ok(true)),
    ] {
        let word = &m.block.last.consumed;
        word.store(consumed, Ordering::Relaxed);
        assert_eq!(p.make_room(|_| true), said, "{consumed}");
    }
    assert_eq!(p.used(), Ok(0));
    m.block.consumer.head.reset(101);
    assert_eq!(p.make_room(|_| true), Err(Violation::HeadBeyondTail.into()));
}

#[test]
fn a_producer_moves_on_to_nothing_but_what_is_in_reserve() {
    let word = |part: u32, generation: u32| part << 24 | generation;
    // The switch has to come after all bytes that the consumer knows of (100), and within the window of the first ring
    // (4096).
    let places = [(100, true), (4096, true), (99, false), (4097, false)];
    for (word, fits) in [
        (word(13, 2), true),
        (word(12, 2), true),
        (word(0, 2), false),
        (word(11, 2), false),
        (word(14, 2), false),
        (word(255, 2), false),
        (word(13, 1), false),
        (word(13, 3), false),
    ] {
        for (at, is_place) in places {
            let (m, _, mut c) = pair();
            c.offer_reserve(Region::new(2, 13).unwrap()).unwrap();
            m.block.producer.reserve_pos.store(at, Ordering::Relaxed);
            m.block.producer.generation.store(word, Ordering::Relaxed);
            m.block.producer.tail.reset(at);
            let said = c.available();
            assert_eq!(said.is_ok(), fits && is_place, "{word:x} at {at}: {said:?}");
        }
    }
    // Without a reserve the producer cannot have moved to one.
    let (m, _, mut c) = pair();
    m.block.producer.generation.store(word(13, 2), Ordering::Relaxed);
    assert_eq!(c.available(), Err(Violation::BadSwitch.into()));
}
