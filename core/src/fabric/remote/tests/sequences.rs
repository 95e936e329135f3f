//! Two ends without failures: all bytes sent arrive, for any order of events, and streams take turns.

use crate::fabric::remote::tests::*;
use crate::fabric::ring::EndMark;
use crate::wire::Message;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_arrives_is_what_was_sent(
        immediate in any::<bool>(),
        roomy in any::<bool>(),
        streams in 1usize..6,
        ops in proptest::collection::vec(op(), 1..250),
    ) {
        let (mut config, mut tuning) = tiny(immediate);
        if roomy {
            config = Config { delay: 5, ..Config::default() };
            config.limits.immediate = immediate;
            tuning = Tuning::default();
        }
        let mut world = World::new(config, tuning, streams);
        let mut sent = [0, 0];
        for op in &ops {
            world.apply(op, &mut sent);
        }
        world.settle();
        prop_assert_eq!(world.ends[0].qp().why(), "");
        // All bytes are read, which makes room for more.
        world.drain();
        for d in &mut world.directions {
            // After its end mark a direction moves to a ring of any size. The reader of a larger ring may hold back
            // more, but then no producer waits for room.
            let has_space = d.producer.has_space();
            prop_assert!(
                d.ended || has_space == Ok(true),
                "W4: nobody says more than that"
            );
            prop_assert_eq!(d.got, d.sent);
            prop_assert_eq!(world.ends[d.reader].received(d.number), Some(d.sent));
            prop_assert_eq!(d.consumer.end(), Ok(d.ended.then_some(EndMark::Fin)));
            let _ = d.consumer.publish();
            world.ends[d.reader].touch(d.back);
            // The reader has not read the end mark, so the writer asks for a confirmation.
            let _ = world.ends[1 - d.reader].unconfirmed(d.number);
        }
        world.settle();
        for d in &mut world.directions {
            prop_assert_eq!(d.producer.used(), Ok(0));
            prop_assert_eq!(world.ends[1 - d.reader].unconfirmed(d.number), Some(0));
        }
        world.takes(0, sent[1]);
        world.takes(1, sent[0]);
    }
}

#[test]
fn a_large_stream_does_not_keep_small_ones_waiting() {
    for immediate in [false, true] {
        let (config, tuning) = tiny(immediate);
        let mut world = World::new(config, tuning, 12);
        world.grow(16);
        let World { directions, ends, .. } = &mut world;
        assert_eq!(directions[0].write(ends, 1 << 16), 1 << 16);
        for d in &mut directions[2..] {
            if d.reader == 0 {
                assert_eq!(d.write(ends, 50), 50);
            }
        }
        let small: Vec<Vqpn> = world.directions[2..]
            .iter()
            .filter(|d| d.reader == 0)
            .map(|d| d.number)
            .collect();
        for _ in 0..200 {
            if small.iter().all(|v| world.ends[0].received(*v) == Some(50)) {
                break;
            }
            world.round();
        }
        assert!(small.iter().all(|v| world.ends[0].received(*v) == Some(50)));
        let large = world.ends[0].received(world.directions[0].number).unwrap();
        assert!(large < 20_000, "{large} bytes first");
    }
}

#[test]
fn a_burst_of_small_writes_travels_in_few_messages() {
    let mut world = World::new(Config::default(), Tuning::default(), 40);
    let before = world.ends[1].counts().sends;
    {
        // No end polls. So credits run out, and further records are collected into one message.
        let World { directions, ends, .. } = &mut world;
        for _ in 0..40 {
            for d in directions.iter_mut().filter(|d| d.reader == 0) {
                d.write(ends, 8);
            }
        }
    }
    world.settle();
    let sends = world.ends[1].counts().sends - before;
    assert!(sends < 160, "{sends} messages for 1600 writes");
    for d in world.directions.iter_mut().filter(|d| d.reader == 0) {
        assert_eq!(d.read(&world.ends, usize::MAX), 320);
    }
}

#[test]
fn a_device_without_memory_for_us_sends_all_in_messages() {
    let clock = Clock::default();
    let qps = pair(Config::default(), &clock);
    qps.iter().for_each(MemQp::refuse_memory);
    let ends = qps.map(|qp| end(qp, Tuning::default()));
    let mut world = World {
        directions: Vec::new(),
        ends,
        clock,
        fired: [0, 0],
    };
    world.open();
    world.settle();
    world.grow(16);
    assert_eq!(world.directions[0].write(&world.ends, 60_000), 60_000);
    world.settle();
    assert_eq!(world.directions[0].read(&world.ends, usize::MAX), 60_000);
    assert_eq!(world.ends[1].counts().writes, 0);
}

#[test]
fn a_write_with_an_immediate_needs_no_message() {
    let mut config = Config::default();
    config.limits.immediate = true;
    let mut world = World::new(config, Tuning::default(), 1);
    world.grow(16);
    // The first bytes for a chunk go in messages, while the chunk's memory is registered.
    for _ in 0..3 {
        world.directions[0].write(&world.ends, 10_000);
        world.settle();
        world.directions[0].read(&world.ends, usize::MAX);
        world.settle();
    }
    let counts = world.ends[1].counts();
    assert!(counts.immediates >= 2, "{counts:?}");
}

#[test]
fn what_fills_a_packet_goes_without_a_header() {
    let mut config = Config::default();
    config.limits.immediate = true;
    config.limits.packet_bytes = 1024;
    let mut world = World::new(config, Tuning::default(), 1);
    world.grow(16);
    let mut immediates = |size| {
        let before = world.ends[1].counts().immediates;
        world.directions[0].write(&world.ends, size);
        world.settle();
        assert_eq!(world.directions[0].read(&world.ends, usize::MAX), size);
        world.settle();
        world.ends[1].counts().immediates - before
    };
    // The first bytes for a chunk go in messages, while the chunk's memory is registered.
    let _ = immediates(1024);
    for (size, expected) in [(64, 0), (1005, 0), (1006, 1), (1024, 1), (1025, 0), (2048, 1)] {
        assert_eq!(immediates(size), expected, "{size} bytes");
    }
}

#[test]
fn a_message_takes_what_fits_where_a_write_needs_one_too() {
    let config = Config::default();
    let tuning = Tuning::fit(&config.limits);
    let mut world = World::new(config, tuning, 1);
    world.grow(16);
    for (size, expected) in [(4000, 0), (5000, 1)] {
        for _ in 0..2 {
            world.directions[0].write(&world.ends, size);
            world.settle();
            world.directions[0].read(&world.ends, usize::MAX);
            world.settle();
        }
        let writes = world.ends[1].counts().writes;
        assert_eq!(writes.min(1), expected, "{size} bytes");
    }
}

#[test]
fn closed_comes_after_all_that_was_sent() {
    for immediate in [false, true] {
        let (config, tuning) = tiny(immediate);
        let mut world = World::new(config, tuning, 1);
        let [mut to_a, mut to_b] = <[Direction; 2]>::try_from(std::mem::take(&mut world.directions))
            .ok()
            .unwrap();
        // End B (`ends[1]`) writes more than one message takes, and closes.
        assert_eq!(to_a.write(&world.ends, 4096), 4096);
        let wake = to_a.producer.end(EndMark::Fin).unwrap();
        world.ends[1].notify(wake, to_a.number);
        world.ends[1].close(to_b.number, Some(to_a.number), Some(to_b.consumer));
        assert_eq!(to_b.producer.used(), Ok(0));
        while world.ends[0].take_message().is_none() {
            world.round();
        }
        assert_eq!(to_a.read(&world.ends, usize::MAX), 4096);
        assert_eq!(to_a.consumer.end(), Ok(Some(EndMark::Fin)));
        // End A has not closed yet, so the number is not free at B.
        assert_ne!(world.ends[1].open(12).unwrap().vqpn, to_b.number);
        world.ends[0].on_closed(to_a.number);
        world.ends[0].close(to_a.number, Some(to_b.number), Some(to_a.consumer));
        world.settle();
        assert!(matches!(
            world.ends[1].take_message(),
            Some(Message::Closed { yours }) if yours == to_b.number
        ));
        world.ends[1].on_closed(to_b.number);
        assert_eq!(world.ends[1].open(12).unwrap().vqpn, to_b.number);
        assert_eq!(world.ends[0].open(12).unwrap().vqpn, to_a.number);
    }
}

#[test]
fn an_end_mark_and_a_stop_that_cross_both_stay() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let World { directions, ends, .. } = &mut world;
    let d = &mut directions[0];
    d.write(ends, 100);
    // Each end sets its mark before it knows of the other's.
    let wake = d.producer.end(EndMark::Demote).unwrap();
    let _ = d.consumer.stop().unwrap();
    ends[1].notify(wake, d.number);
    ends[0].touch(d.back);
    world.settle();
    assert!(world.directions[0].producer.is_ended());
    assert!(world.ends.iter().all(|e| e.fault().is_none()));
}

#[test]
fn an_adopted_ring_is_told_of_without_data() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    world.directions[0].write(&world.ends, 100);
    world.settle();
    world.directions[0].read(&world.ends, 100);
    world.directions[0].offer(&world.ends, 14);
    world.settle();
    let d = &mut world.directions[0];
    assert_eq!(d.producer.adopt(), Ok(true));
    world.ends[1].touch(d.number);
    world.settle();
    let retired = world.directions[0].consumer.take_retired().unwrap();
    assert!(retired.is_some());
}

#[test]
fn what_is_confirmed_is_told_to_the_service() {
    let (config, tuning) = tiny(false);
    let mut world = World::new(config, tuning, 1);
    let (number, back) = (world.directions[0].number, world.directions[0].back);
    world.directions[0].write(&world.ends, 3000);
    assert_eq!(world.ends[1].unconfirmed(number), Some(3000));
    world.settle();
    let mut told = Vec::new();
    world.ends[1].drain_ready(WaiterId(0), |v| told.push(v));
    assert_eq!(told, [back]);
    assert_eq!(world.ends[1].unconfirmed(number), Some(0));
    assert_eq!(world.ends[1].confirmed(number), Some(3000));
}

#[test]
fn an_armed_end_is_told_of_what_comes_and_has_looked_at_what_had() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    world.directions[0].write(&world.ends, 10);
    assert!(!world.ends[0].is_armed(), "it never was");
    assert_eq!(world.ends[0].arm(), Ok(true), "what had come");
    assert!(!world.ends[0].is_armed(), "something has come since");
    assert_eq!(world.ends[0].arm(), Ok(false));
    assert!(world.ends[0].is_armed());
    let before = world.ends[0].qp().fired();
    world.directions[0].write(&world.ends, 10);
    let _ = world.ends[1].progress();
    assert_eq!(world.ends[0].qp().fired(), before + 1);
    assert!(world.ends[0].is_armed(), "nobody has looked, and the fd is readable");
    assert_eq!(world.ends[0].progress(), Ok(true));
    assert!(!world.ends[0].is_armed());
    assert_eq!(world.ends[0].arm(), Ok(false));
    world.ends[0].on_readable();
    assert!(!world.ends[0].is_armed());
}

#[test]
fn a_link_needs_buffers_that_hold_a_message() {
    let clock = Clock::default();
    for (buffer_bytes, receive_buffers) in [(MIN_BUFFER - 1, 100), (4096, MIN_BUFFERS - 1)] {
        let config = Config {
            limits: Limits {
                receive_buffers,
                buffer_bytes,
                immediate: false,
                packet_bytes: 0,
                reads: 4,
            },
            ..Config::default()
        };
        let [qp, _] = pair(config, &clock);
        let side = || {
            let layout = Layout::for_data(4096).unwrap();
            let bytes = layout.file_len() as usize;
            Side::new(Mapping::anonymous(bytes).unwrap(), layout).unwrap()
        };
        // SAFETY: `new` fails here, so no cursor is made.
        let made = unsafe { End::new(qp, side(), side(), Here::new(), Tuning::default()) };
        assert!(made.is_err());
    }
}
