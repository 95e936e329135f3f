//! Memory that a sending program lends to the reader's device, in single cases. `direct.rs` tries all orders.

use crate::fabric::remote::put::Landings;
use crate::fabric::remote::tests::direct::large;
use crate::fabric::remote::tests::mem::pair_beside;
use crate::fabric::remote::tests::qp::QueuePair;
use crate::fabric::remote::tests::record::{Builder, Memory, Record};
use crate::fabric::remote::tests::*;

/// Returns two ends with a slow bulk queue pair. End 1 writes the first direction.
fn slow() -> World {
    let tuning = Tuning {
        direct_min: 1000,
        ..Tuning::default()
    };
    let mut world = World::new(Config::default(), tuning, 1);
    world.grow(16);
    world.directions[0].write(&world.ends, 5000);
    world.drain();
    world.rest();
    let config = Config {
        delay: 1_000_000,
        ..Config::default()
    };
    let pairs = pair_beside(config, &world.clock, Some(world.ends[0].qp()));
    for (end, qp) in world.ends.iter().zip(pairs) {
        assert!(end.attach_bulk(qp).is_none());
    }
    world
}

/// Polls both ends often enough for all work that needs no bulk queue pair.
fn pass(world: &World) {
    for _ in 0..20 {
        for end in &world.ends {
            end.settle();
            let _ = end.progress();
        }
    }
}

#[test]
fn bytes_go_from_the_writers_memory_into_the_readers_ring() {
    let (mut world, _) = large();
    let number = world.directions[0].number;
    for round in 1..6 {
        let eager = world.ends[1].counts().eager_bytes;
        world.directions[0].offer_from(&world.ends, 40_000);
        world.settle();
        assert!(
            world.ends[1].is_source_done(number),
            "all is in the ring before any of it was read"
        );
        assert_eq!(world.directions[0].got, world.directions[0].sent - 40_000);
        world.directions[0].take(&world.ends);
        // A process that takes over the reader's end may ask for the bytes that its program has not read.
        let d = &mut world.directions[0];
        assert_eq!(d.producer.rest(d.got).ok(), Some(bytes(d.seed, d.got, d.sent)));
        world.drain();
        world.rest();
        assert_eq!(world.directions[0].got, world.directions[0].sent);
        assert_eq!(world.ends[1].counts().eager_bytes, eager);
        assert_eq!(world.read(), [40_000 * round, 40_000 * round]);
        assert_eq!(world.ends[1].counts().lost, 0);
    }
}

#[test]
fn what_was_written_before_comes_before_and_what_comes_after_waits() {
    let (mut world, _) = large();
    world.directions[0].write(&world.ends, 300);
    world.directions[0].offer_from(&world.ends, 20_000);
    assert!(world.directions[0].lent.is_some());
    world.directions[0].write(&world.ends, 700);
    assert_eq!(world.ends[1].unsent(world.directions[0].number), 20_700);
    world.settle();
    world.directions[0].take(&world.ends);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
    assert_eq!(world.read()[0], 20_000);
}

#[test]
fn what_is_lent_to_a_reader_that_waits_goes_into_its_buffer_and_the_advert_is_void() {
    let (mut world, _) = large();
    for _ in 0..2 {
        let [before, _] = world.read();
        let d = &mut world.directions[0];
        // The reader waits before the writer's end has received the advert.
        d.wait(&world.ends, 30_000);
        d.offer_from(&world.ends, 20_000);
        world.settle();
        assert_eq!(world.ends[1].wanted(world.directions[0].number), 0);
        assert_eq!(
            world.directions[0].collect(&world.ends),
            20_000,
            "at once, not by pieces"
        );
        world.settle();
        assert_eq!(world.directions[0].got, world.directions[0].sent);
        assert_eq!(world.read()[0] - before, 20_000);
        // The writer's end does not keep bytes that the reader has consumed.
        assert!(world.ends[1].is_source_done(world.directions[0].number));
        assert_eq!(
            world.ends[1].untaken(world.directions[0].number, world.directions[0].sent),
            0
        );
        world.directions[0].take(&world.ends);
    }
    // The writer can use the reader's next buffer again.
    world.rest();
    world.directions[0].wait(&world.ends, 30_000);
    world.settle();
    assert_eq!(world.ends[1].wanted(world.directions[0].number), 30_000);
}

#[test]
fn what_the_buffer_has_no_room_for_goes_into_the_ring_behind() {
    let (mut world, _) = large();
    world.directions[0].wait(&world.ends, 7_000);
    world.directions[0].offer_from(&world.ends, 20_000);
    world.settle();
    assert_eq!(world.directions[0].collect(&world.ends), 7_000);
    world.drain();
    world.rest();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
    assert_eq!(world.read()[0], 20_000);
    world.directions[0].take(&world.ends);
}

#[test]
fn the_lender_hears_when_the_reader_has_taken_what_is_in_its_buffer_or_will_not() {
    let (mut world, _) = large();
    let number = world.directions[0].number;
    for unwinds in [false, true] {
        world.directions[0].wait(&world.ends, 30_000);
        world.directions[0].offer_from(&world.ends, 20_000);
        world.settle();
        assert!(!world.ends[1].is_source_done(number), "the reader is about to take it");
        if unwinds {
            world.directions[0].unwind(&world.ends);
        } else {
            world.directions[0].collect(&world.ends);
        }
        world.settle();
        assert!(world.ends[1].is_source_done(number));
        let left = if unwinds { 20_000 } else { 0 };
        assert_eq!(world.ends[1].untaken(number, world.directions[0].sent), left);
        world.directions[0].take(&world.ends);
        world.drain();
        world.rest();
    }
    assert_eq!(world.directions[0].got, world.directions[0].sent);
}

#[test]
fn a_reader_that_waits_no_longer_gets_what_was_asked_for_and_the_rest_goes_into_the_ring() {
    let mut world = slow();
    world.directions[0].wait(&world.ends, 30_000);
    world.directions[0].offer_from(&world.ends, 30_000);
    pass(&world);
    world.directions[0].leave_off(&world.ends);
    pass(&world);
    assert_eq!(world.directions[0].collect(&world.ends), 0, "a READ is under way");
    assert!(world.directions[0].waiting.is_some());
    world.clock.advance(1_000_000);
    world.settle();
    assert_eq!(world.directions[0].collect(&world.ends), 30_000);
}

#[test]
fn a_buffer_whose_queue_pair_is_given_up_has_what_had_come() {
    let mut world = slow();
    world.directions[0].wait(&world.ends, 30_000);
    world.directions[0].offer_from(&world.ends, 30_000);
    pass(&world);
    world.ends[0].drop_bulk();
    assert_eq!(world.directions[0].collect(&world.ends), 0);
    assert!(
        world.directions[0].waiting.is_none(),
        "nobody waits for what may never come"
    );
    assert!(
        !world.ends[1].is_source_done(world.directions[0].number),
        "it may still come"
    );
    assert_eq!(world.ends[0].end_retired(drop), 1);
    pass(&world);
    world.directions[0].take(&world.ends);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
}

#[test]
fn a_peer_may_not_say_that_it_has_written_to_a_buffer_that_is_read_into() {
    let mut landings = Landings::default();
    let advert = Memory {
        serial: 1,
        position: 2,
        address: 1 << 20,
        length: 1000,
        rkey: 5,
    };
    landings.begin(advert, 4);
    landings.on_told();
    landings.on_loan();
    assert_eq!(landings.on_placed(1, 500, 10_000), Err(Breach::Advert));
}

#[test]
fn a_loan_is_answered_when_nothing_can_come_any_more() {
    let mut world = slow();
    let number = world.directions[0].number;
    world.directions[0].offer_from(&world.ends, 30_000);
    pass(&world);
    assert!(!world.ends[1].is_source_done(number), "a READ is under way");
    // The reader's end gives its bulk queue pair up, but has not ended it: READs may still bring bytes.
    world.ends[0].drop_bulk();
    pass(&world);
    assert!(!world.ends[1].is_source_done(number));
    assert_eq!(world.ends[0].end_retired(drop), 1);
    pass(&world);
    assert!(world.ends[1].is_source_done(number));
    world.directions[0].take(&world.ends);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
    assert_eq!(world.read(), [0, 0]);
}

#[test]
fn who_cannot_read_says_so_at_once_and_nothing_is_lost() {
    let (mut world, _) = large();
    world.ends[0].drop_bulk();
    world.directions[0].offer_from(&world.ends, 30_000);
    pass(&world);
    assert!(world.ends[1].is_source_done(world.directions[0].number));
    world.directions[0].take(&world.ends);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
    assert_eq!(world.read()[0], 0);
}

#[test]
fn a_key_that_is_none_costs_the_bulk_queue_pair_and_nothing_else() {
    let (mut world, _) = large();
    let number = world.directions[0].number;
    world.directions[0].offer_from(&world.ends, 30_000);
    // The registration ends before the reader's device reads.
    let region = world.directions[0].lent.as_ref().unwrap().region;
    world.ends[1].qp().deregister(region);
    for _ in 0..3 {
        pass(&world);
        world.tell_lost();
    }
    assert!(world.ends[1].is_source_done(number));
    world.directions[0].take(&world.ends);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
    let lost = [0, 1].map(|at: usize| world.ends[at].counts().lost);
    assert_eq!(
        (lost, world.ends[0].fault(), world.ends[1].fault()),
        ([1, 1], None, None)
    );
}

#[test]
fn a_number_is_not_another_streams_while_its_ring_is_read_into() {
    let mut world = slow();
    world.directions[0].offer_from(&world.ends, 30_000);
    pass(&world);
    let d = &world.directions[0];
    let reader = (d.number, d.back);
    let before = world.ends[0].open(12).unwrap().vqpn;
    assert_ne!(before, reader.0);
    // Both ends leave the stream.
    world.ends[1].close(reader.1, Some(reader.0), None);
    world.ends[0].close(reader.0, Some(reader.1), None);
    pass(&world);
    for end in &world.ends {
        while let Some(message) = end.take_message() {
            if let crate::wire::Message::Closed { yours } = message {
                end.on_closed(yours);
            }
        }
    }
    pass(&world);
    let fresh = world.ends[0].open(12).unwrap().vqpn;
    assert_ne!(fresh, reader.0, "a READ is under way");
    world.ends[0].drop_bulk();
    assert_ne!(world.ends[0].open(12).unwrap().vqpn, reader.0, "it may still come");
    world.ends[0].end_retired(drop);
    assert_eq!(world.ends[0].open(12).unwrap().vqpn, reader.0);
}

#[test]
fn each_breach_of_a_loan_is_one() {
    let source = |position, address, length| Record::Source {
        theirs: 0,
        memory: Memory {
            serial: 1,
            position,
            address,
            length,
            rkey: 5,
        },
    };
    let switch = Record::Switch {
        theirs: 0,
        generation: 1,
        position: 0,
    };
    let data = Record::Data {
        theirs: 0,
        tail: 2,
        payload: b"ab",
    };
    let end_mark = Record::End {
        theirs: 0,
        end: 1,
        tail: 0,
    };
    let taken = Record::Taken {
        theirs: 0,
        serial: 1,
        tail: 0,
    };
    let good = source(0, 4096, 4096);
    let cases: &[(&[Record<'_>], Option<Breach>)] = &[
        (&[switch, good], None),
        (&[good], Some(Breach::Loan)),
        (&[switch, source(1, 4096, 10)], Some(Breach::Loan)),
        (&[switch, source(0, 4096, 4097)], Some(Breach::Loan)),
        (&[switch, source(0, 4096, 0)], Some(Breach::Loan)),
        (&[switch, source(0, u64::MAX, 10)], Some(Breach::Loan)),
        (&[switch, good, good], Some(Breach::Loan)),
        (&[switch, good, data], Some(Breach::Loan)),
        (&[switch, good, end_mark], Some(Breach::End)),
        (&[switch, end_mark, good], Some(Breach::End)),
        (&[switch, good, switch], Some(Breach::Loan)),
        (&[taken], Some(Breach::Loan)),
    ];
    for (records, want) in cases {
        let clock = Clock::default();
        let [qp, peer] = pair(Config::default(), &clock);
        let e = end(qp, Tuning::default());
        let slow = Config {
            delay: 1000,
            ..Config::default()
        };
        let [bulk, _bulk_peer] = pair_beside(slow, &clock, Some(e.qp()));
        assert!(e.attach_bulk(bulk).is_none());
        let opened = e.open(12).unwrap();
        e.pair(opened.vqpn, Vqpn(7), first_ring());
        let mut builder = Builder::new(1000);
        assert!(records.iter().all(|r| builder.push(r)));
        peer.send(builder.finish(0)).unwrap();
        let _ = e.progress();
        assert_eq!(e.fault(), want.map(Fault::Violation), "{records:?}");
    }
}

#[test]
fn an_answer_beyond_what_was_lent_is_a_breach() {
    for (serial, tail) in [(1, 4000), (1, 6001), (2, 5000)] {
        let clock = Clock::default();
        let [qp, peer] = pair(Config::default(), &clock);
        let e = end(qp, Tuning::default());
        let [bulk, _bulk_peer] = pair_beside(Config::default(), &clock, Some(e.qp()));
        assert!(e.attach_bulk(bulk).is_none());
        let opened = e.open(12).unwrap();
        e.pair(opened.vqpn, Vqpn(7), Region::new(0, 13).unwrap());
        let mut producer = e.producer(Vqpn(7)).unwrap();
        let say = |record: &Record<'_>| {
            let mut builder = Builder::new(1000);
            builder.push(record);
            peer.send(builder.finish(0)).unwrap();
            let _ = e.progress();
        };
        say(&Record::Offer {
            theirs: 0,
            word: 1 << 40 | 13 << 32,
        });
        assert!(producer.spans(5000).unwrap().len() >= 5000);
        e.notify(producer.commit(4001), Vqpn(7));
        let memory = vec![0u8; 2000];
        assert!(e.offer_source(Vqpn(7), 4001, memory.as_ptr().expose_provenance(), 1999, 3));
        e.notify(producer.commit(1999), Vqpn(7));
        say(&Record::Head { theirs: 0, head: 5500 });
        assert_eq!(e.fault(), None, "the reader may have read what it took");
        say(&Record::Taken {
            theirs: 0,
            serial,
            tail,
        });
        assert_eq!(e.fault(), Some(Fault::Violation(Breach::Loan)), "{serial} {tail}");
    }
}
