//! Send buffers: they keep bytes for which the peer's ring has no room. The bytes are carried over as the ring gets
//! room, and can be sent again.

use crate::fabric::remote::tests::*;
use crate::fabric::ring::EndMark;

/// Fills the first ring of a stream, which has 4 KiB, and a buffer of `1 << log2` bytes. Returns how many bytes are in
/// the buffer.
fn full(world: &mut World, log2: u8) -> usize {
    let World { directions, ends, .. } = world;
    let d = &mut directions[0];
    assert_eq!(d.write(ends, 1 << 20), 4096);
    assert!(!d.lend(ends, 12), "as much as there is");
    assert!(d.lend(ends, log2));
    assert!(d.producer.is_aside() && !d.lend(ends, log2));
    d.write(ends, 1 << 20)
}

fn in_use(world: &World) -> u64 {
    world.ends[1].buffers_in_use()
}

#[test]
fn more_is_taken_at_once_than_the_peer_has_room_for() {
    for immediate in [false, true] {
        let mut config = Config::default();
        config.limits.immediate = immediate;
        let mut world = World::new(config, Tuning::default(), 1);
        let World { directions, ends, .. } = &mut world;
        let d = &mut directions[0];
        assert_eq!(d.write(ends, 4096), 4096);
        assert!(d.lend(ends, 16));
        assert_eq!(d.write(ends, 1 << 16), 1 << 16);
        world.settle();
        let d = &mut world.directions[0];
        assert_eq!(world.ends[0].received(d.number), Some(4096), "no more");
        // The peer's ring is too small, although the producer has not found it full. The reader can see that it is.
        assert_eq!(d.read(&world.ends, 1), 1);
        assert!(d.consumer.producer_limited());
        world.drain();
        assert_eq!(world.directions[0].got, 4096 + (1 << 16));
        assert_eq!(world.ends[0].qp().why(), "");
    }
}

#[test]
fn a_larger_ring_is_adopted_in_the_producers_place() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    assert_eq!(full(&mut world, 17), 1 << 17);
    world.settle();
    // The ring is offered while the producer is idle. The engine carries over as many bytes as the ring has room for.
    world.directions[0].read(&world.ends, 1);
    world.directions[0].offer(&world.ends, 16);
    world.settle();
    let number = world.directions[0].number;
    assert_eq!(world.ends[0].received(number), Some(4096 + (1 << 16)));
    assert_eq!(world.directions[0].producer.adopt(), Ok(false));
    world.drain();
    world.rest();
    assert!(world.directions[0].take_back(&world.ends));
    // The producer is back in the peer's ring, so it makes further switches itself.
    for log2 in [12, 14] {
        world.directions[0].offer(&world.ends, log2);
        world.settle();
        assert_eq!(world.directions[0].write(&world.ends, 1 << 20), 1 << log2);
        world.drain();
        world.rest();
    }
    assert_eq!(world.directions[0].got, world.directions[0].sent);
}

#[test]
fn a_ring_that_was_on_offer_is_adopted_behind_what_was_sent_before() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    world.directions[0].write(&world.ends, 4000);
    world.settle();
    let World { directions, ends, .. } = &mut world;
    let d = &mut directions[0];
    d.read(ends, 1);
    d.offer(ends, 14);
    let _ = ends[1].progress();
    // The producer has not read the offer.
    assert!(d.lend(ends, 16));
    assert_eq!(d.write(ends, 1 << 20), 1 << 16);
    world.settle();
    let number = world.directions[0].number;
    assert_eq!(world.ends[0].received(number), Some(4000 + (1 << 14)));
    world.drain();
    assert_eq!(world.directions[0].got, 4000 + (1 << 16));
}

#[test]
fn a_buffer_is_given_back_when_all_is_read() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    full(&mut world, 16);
    assert_eq!(in_use(&world), 1 << 16);
    assert!(!world.directions[0].take_back(&world.ends));
    world.drain();
    world.rest();
    assert!(world.directions[0].take_back(&world.ends));
    assert!(!world.directions[0].producer.is_aside());
    assert!(!world.directions[0].take_back(&world.ends), "once");
    assert_eq!(in_use(&world), 0);
    // Only the peer's ring is left, and it works.
    assert_eq!(world.directions[0].write(&world.ends, 1 << 20), 4096);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
    assert!(world.directions[0].producer.rest(0).is_err());
}

#[test]
fn a_buffer_is_lent_before_it_is_known_that_the_ring_before_is_read() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    world.directions[0].write(&world.ends, 100);
    world.settle();
    world.directions[0].read(&world.ends, 1);
    world.directions[0].offer(&world.ends, 14);
    world.settle();
    let World { directions, ends, .. } = &mut world;
    let d = &mut directions[0];
    assert_eq!(d.write(ends, 1 << 20), 1 << 14, "another ring");
    assert!(d.lend(ends, 16));
    assert_eq!(d.write(ends, 1 << 20), 1 << 16);
    // Three rings hold the unread bytes.
    for from in [0, 99, 100, 100 + (1 << 14), d.sent] {
        assert_eq!(d.producer.rest(from).unwrap(), bytes(d.seed, from, d.sent));
    }
    world.drain();
    world.rest();
    let d = &mut world.directions[0];
    assert_eq!(d.got, d.sent);
    assert!(d.take_back(&world.ends));
    assert!(d.producer.rest(d.sent - 1).is_err(), "it is another's place");
}

#[test]
fn a_bound_holds_in_a_buffer() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let World { directions, ends, .. } = &mut world;
    let d = &mut directions[0];
    d.write(ends, 4096);
    d.producer.set_bound(10_000);
    assert!(d.lend(ends, 18));
    assert_eq!(d.producer.ring_size(), 1 << 14, "the next power of two");
    assert_eq!(d.write(ends, 1 << 20), 10_000 - 4096);
    // The peer's next ring is larger than the producer's bound, and its reader may hold back more than W4 allows. So
    // the producer does not move back to that ring.
    world.settle();
    world.directions[0].read(&world.ends, 1);
    world.directions[0].offer(&world.ends, 16);
    world.drain();
    assert_eq!(world.directions[0].producer.has_space(), Ok(true));
    world.rest();
    assert!(!world.directions[0].take_back(&world.ends));
    assert_eq!(world.directions[0].write(&world.ends, 1 << 20), 10_000);
    // The larger bound admits the ring.
    world.drain();
    world.rest();
    world.directions[0].producer.set_bound(1 << 16);
    assert!(world.directions[0].take_back(&world.ends));
    assert_eq!(world.directions[0].write(&world.ends, 1 << 20), 1 << 16);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
}

#[test]
fn what_precedes_an_end_takes_any_ring() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let sent = 4096 + full(&mut world, 13) as u64;
    world.settle();
    let d = &mut world.directions[0];
    d.read(&world.ends, 1);
    d.offer(&world.ends, 16);
    world.settle();
    let number = world.directions[0].number;
    let received = world.ends[0].received(number).unwrap();
    assert!(received < sent, "too large for a buffer that small");
    let wake = world.directions[0].producer.end(EndMark::Fin).unwrap();
    world.ends[1].notify(wake, number);
    world.settle();
    assert_eq!(world.ends[0].received(number), Some(sent));
}

#[test]
fn there_are_no_more_buffers_than_was_said() {
    let mut world = World::new(Config::default(), Tuning::default(), 5);
    let World { directions, ends, .. } = &mut world;
    let mut lent = 0;
    for d in directions.iter_mut().filter(|d| d.reader == 0) {
        d.write(ends, 4096);
        lent += u64::from(d.lend(ends, 18));
    }
    assert_eq!(lent << 18, BUFFERS);
}

#[test]
fn a_link_that_fails_leaves_all_that_was_taken() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let taken = 4096 + full(&mut world, 16) as u64;
    world.ends[0].qp().cut();
    assert!(world.ends.iter().all(|end| end.progress().is_err()));
    let d = &mut world.directions[0];
    let received = world.ends[0].received(d.number).unwrap();
    assert_eq!(d.producer.rest(received).unwrap(), bytes(d.seed, received, taken));
}

#[test]
fn what_has_arrived_is_confirmed_though_the_rest_waits() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let kept = full(&mut world, 16) as u64;
    let number = world.directions[0].number;
    assert_eq!(world.ends[1].unconfirmed(number), Some(4096 + kept));
    world.settle();
    assert_eq!(world.ends[1].unconfirmed(number), Some(kept));
    assert_eq!(world.ends[1].unsent(number), kept);
    world.drain();
    // The peer's heads and its answers have confirmed all bytes.
    assert_eq!(world.ends[1].unconfirmed(number), Some(0));
    assert_eq!(world.ends[1].unsent(number), 0);
}

/// Takes the two directions of a world's only stream out of the world.
fn both(world: &mut World) -> [Direction; 2] {
    let all = std::mem::take(&mut world.directions);
    <[Direction; 2]>::try_from(all).ok().unwrap()
}

#[test]
fn what_precedes_an_end_mark_goes_on_after_a_close() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let kept = full(&mut world, 16);
    let [mut to_a, to_b] = both(&mut world);
    let wake = to_a.producer.end(EndMark::Fin).unwrap();
    world.ends[1].notify(wake, to_a.number);
    drop(to_a.producer);
    world.ends[1].close(to_b.number, Some(to_a.number), Some(to_b.consumer));
    world.settle();
    assert!(world.ends[0].take_message().is_none(), "CLOSED waits");
    let mut consumer = to_a.consumer;
    let mut got = 0;
    while consumer.end() == Ok(None) {
        let spans = consumer.spans(1).unwrap();
        let mut data = vec![0; spans.len()];
        // SAFETY: the target is writable, and apart from the ring.
        unsafe { spans.copy_out(0, data.as_mut_ptr(), data.len()) };
        assert_eq!(data, bytes(to_a.seed, got, got + data.len() as u64));
        got += data.len() as u64;
        let wake = consumer.consume(data.len());
        world.ends[0].notify(wake, to_a.back);
        world.settle();
    }
    assert_eq!(got, 4096 + kept as u64);
    assert!(world.ends[0].take_message().is_some(), "CLOSED has come");
    assert_eq!(in_use(&world), 1 << 16, "until the peer has closed");
    world.ends[0].on_closed(to_a.number);
    world.ends[0].close(to_a.number, Some(to_b.number), Some(consumer));
    world.settle();
    assert!(world.ends[1].take_message().is_some());
    world.ends[1].on_closed(to_b.number);
    assert_eq!(in_use(&world), 0);
}

#[test]
fn what_nobody_waits_for_does_not_keep_a_stream() {
    // Without an end mark the bytes go over TCP. With one, a peer that has closed the stream reads none of them.
    for marked in [false, true] {
        let mut world = World::new(Config::default(), Tuning::default(), 1);
        full(&mut world, 16);
        let [mut to_a, to_b] = both(&mut world);
        if marked {
            let wake = to_a.producer.end(EndMark::Fin).unwrap();
            world.ends[1].notify(wake, to_a.number);
        }
        drop(to_a.producer);
        world.ends[1].close(to_b.number, Some(to_a.number), Some(to_b.consumer));
        world.settle();
        assert_eq!(world.ends[0].take_message().is_none(), marked);
        world.ends[0].close(to_a.number, Some(to_b.number), Some(to_a.consumer));
        world.settle();
        assert!(world.ends[1].take_message().is_some());
        assert_eq!(world.ends[0].take_message().is_some(), marked);
        world.ends[1].on_closed(to_b.number);
        world.ends[0].on_closed(to_a.number);
        assert_eq!(in_use(&world), 0);
        assert_eq!(world.ends[1].open(12).unwrap().vqpn, to_b.number);
        assert!(world.ends.iter().all(|end| end.fault().is_none()));
    }
}

#[test]
fn a_producer_that_has_adopted_a_ring_and_not_used_it_comes_back_to_that() {
    let (config, tuning) = tiny(false);
    let mut world = World::new(config, tuning, 1);
    world.directions[0].write(&world.ends, 4096);
    world.drain();
    world.directions[0].offer(&world.ends, 12);
    world.rest();
    let d = &mut world.directions[0];
    // A send asks for free pieces of the ring before it moves to a buffer.
    assert!(!d.producer.spans(1).unwrap().is_empty());
    assert!(d.lend(&world.ends, 13));
    let is_back = d.take_back(&world.ends);
    d.write(&world.ends, 1);
    world.drain();
    assert_eq!(world.directions[0].got, 4097);
    assert!(!is_back, "the peer has not heard of the ring");
    world.rest();
    assert!(world.directions[0].take_back(&world.ends));
    world.directions[0].write(&world.ends, 100);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
}
