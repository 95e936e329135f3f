//! What every link has to do, whatever fabric it is on: one suite over [`LinkEnd`], to be run for
//! each of them by `tests/conformance.rs`. Not here: how a link is made.

use rdmasock_core::fabric::layout::{MAX_STREAMS, READY_QUEUES};
use rdmasock_core::fabric::ring::{Consumer, End, Ended, Producer, RxFlags, Stopped, Wake};
use rdmasock_core::fabric::waiter::{MAX_WAITERS, WaiterId};
use rdmasock_core::fabric::{LinkEnd, OpenError};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::wire::{Message, Reason};

/// How the suite gets links of one fabric, and what it needs beside [`LinkEnd`].
pub trait Harness {
    /// One end.
    type End: LinkEnd;
    /// A link whose arenas have this many bytes each for rings, up, with nothing open.
    fn link(data_bytes: u64) -> [Self::End; 2];
    /// The next message that has arrived.
    fn recv(end: &Self::End) -> Option<Message>;
    /// A waiter of this end announces that it will sleep.
    fn begin_sleep(end: &Self::End, waiter: WaiterId);
    /// It is awake: how often its doorbell was rung since.
    fn end_sleep(end: &Self::End, waiter: WaiterId) -> u64;
}

/// A test of the suite.
pub type Test = fn();

/// The tests by name.
pub fn suite<H: Harness>() -> Vec<(&'static str, Test)> {
    macro_rules! tests {
        ($($name:ident)*) => { vec![$((stringify!($name), $name::<H> as Test)),*] };
    }
    tests! {
        what_is_written_at_one_end_is_read_at_the_other
        streams_do_not_mix
        the_end_mark_comes_after_the_last_byte
        a_ring_grows_and_shrinks_in_mid_stream
        what_was_not_read_can_be_sent_again
        only_one_side_ends_a_direction
        a_reader_that_leaves_is_seen_by_the_writer
        a_number_is_free_only_when_both_ends_are_done
        a_number_that_the_peer_never_knew_is_free_at_once
        a_number_whose_open_is_unanswered_is_not_free
        a_number_used_again_starts_a_new_stream
        an_arena_without_room_refuses_and_recovers
        numbers_out_of_range_are_refused
        messages_arrive_once_and_in_order
        a_sleeping_waiter_is_rung_once
        a_waiter_that_is_awake_is_not_rung
        a_stream_is_queued_once_however_often_it_is_told
        a_waiter_for_space_is_told_when_there_is_some
        a_sleeper_is_rung_whatever_is_queued
        both_that_a_word_names_are_told
    }
}

/// A stream in one direction.
struct Stream {
    number: Vqpn,
    consumer: Consumer,
    producer: Producer,
}

fn open<E: LinkEnd>(reader: &E, writer: &E, log2: u8) -> Stream {
    let opened = reader.open(log2).unwrap();
    assert_eq!(opened.ring.bytes(), 1 << log2);
    Stream {
        number: opened.vqpn,
        consumer: opened.consumer,
        producer: writer.producer(opened.vqpn).unwrap(),
    }
}

fn write(producer: &mut Producer, data: &[u8]) -> (usize, Wake) {
    let spans = producer.spans(data.len()).unwrap();
    // SAFETY: the data is readable and apart from the ring.
    let n = unsafe { spans.copy_in(0, data.as_ptr(), data.len()) };
    (n, producer.commit(n))
}

/// Writes all of `data`, with nobody to wake.
fn put(producer: &mut Producer, data: &[u8]) {
    assert_eq!(write(producer, data), (data.len(), Wake::NONE));
}

/// All that is there.
fn read(consumer: &mut Consumer) -> (Vec<u8>, Wake) {
    let (mut all, mut wake) = (Vec::new(), Wake::NONE);
    loop {
        let spans = consumer.spans(1).unwrap();
        let mut piece = vec![0; spans.len()];
        // SAFETY: the piece is writable and apart from the ring.
        unsafe { spans.copy_out(0, piece.as_mut_ptr(), piece.len()) };
        let n = piece.len();
        all.extend(piece);
        wake = Wake(wake.0 | consumer.consume(n).0);
        if n == 0 {
            return (all, wake);
        }
    }
}

/// Bytes that tell where they belong.
pub fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len)
        .map(|i| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

fn what_is_written_at_one_end_is_read_at_the_other<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    for (reader, writer) in [(&a, &b), (&b, &a)] {
        let mut s = open(reader, writer, 12);
        let (mut sent, mut got) = (0, 0);
        for step in 1..400 {
            sent += write(&mut s.producer, &pattern(sent, step * 7)).0;
            if step % 3 == 0 {
                let data = read(&mut s.consumer).0;
                assert_eq!(data, pattern(got, data.len()));
                got += data.len();
            }
        }
        assert_eq!((sent, sent > 100_000), (got, true));
    }
}

fn streams_do_not_mix<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let mut streams: Vec<Stream> = (0..50).map(|_| open(&a, &b, 12)).collect();
    for (i, s) in streams.iter_mut().enumerate() {
        assert_eq!(write(&mut s.producer, &pattern(i * 1000, 4096)).0, 4096);
    }
    for (i, s) in streams.iter_mut().enumerate() {
        assert_eq!(read(&mut s.consumer).0, pattern(i * 1000, 4096));
    }
}

fn the_end_mark_comes_after_the_last_byte<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    for mark in [End::Fin, End::Demote] {
        let mut s = open(&a, &b, 12);
        put(&mut s.producer, b"last");
        let _ = s.producer.end(mark).unwrap();
        assert_eq!(s.consumer.end(), Ok(None));
        assert_eq!(read(&mut s.consumer).0, b"last");
        assert_eq!(s.consumer.end(), Ok(Some(mark)));
        assert_eq!(write(&mut s.producer, b"more").0, 0);
    }
}

fn a_ring_grows_and_shrinks_in_mid_stream<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let mut s = open(&a, &b, 12);
    let mut at = 0;
    for log2 in [14, 16, 12, 13] {
        at += write(&mut s.producer, &pattern(at, 100)).0;
        // The switch before this is over once the reader has seen it.
        assert!(s.consumer.has_data().unwrap());
        let _ = s.consumer.offer(a.allocate(log2).unwrap()).unwrap();
        let (n, _) = write(&mut s.producer, &pattern(at, 1 << 17));
        assert_eq!(n, 1 << log2, "the whole of the new ring");
        assert_eq!(read(&mut s.consumer).0, pattern(at - 100, n + 100));
        at += n;
        a.free(s.consumer.take_retired().unwrap().unwrap());
    }
}

fn what_was_not_read_can_be_sent_again<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let mut s = open(&a, &b, 12);
    put(&mut s.producer, &pattern(0, 3000));
    let _ = s.consumer.spans(1000).unwrap();
    let _ = s.consumer.consume(1000);
    let _ = s.consumer.offer(a.allocate(13).unwrap()).unwrap();
    put(&mut s.producer, &pattern(3000, 500));
    assert_eq!(s.consumer.position(), 1000);
    let _ = s.consumer.stop().unwrap();
    assert_eq!(s.producer.end(End::Fin), Err(Stopped));
    assert_eq!(s.producer.unread().unwrap(), pattern(1000, 2500));
}

fn only_one_side_ends_a_direction<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let mut s = open(&a, &b, 12);
    put(&mut s.producer, &pattern(0, 10));
    let _ = s.producer.end(End::Demote).unwrap();
    assert_eq!(s.consumer.stop(), Err(Ended));
    assert_eq!(read(&mut s.consumer).0, pattern(0, 10));
    assert_eq!(s.consumer.end(), Ok(Some(End::Demote)));
}

fn a_reader_that_leaves_is_seen_by_the_writer<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let mut s = open(&a, &b, 12);
    put(&mut s.producer, &[0; 4096]);
    assert_eq!(s.producer.arm_space(WaiterId(3).queue_bits()), Ok(false));
    let wake = s.consumer.set_flags(RxFlags::RX_CLOSED);
    assert!(!wake.is_none());
    assert!(s.producer.has_space().unwrap());
    assert_eq!(s.producer.consumer_flags(), RxFlags::RX_CLOSED);
}

fn a_number_is_free_only_when_both_ends_are_done<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let s = open(&a, &b, 12);
    a.close(s.number, Some(Vqpn(77)), Some(s.consumer));
    assert!(matches!(
        H::recv(&b),
        Some(Message::Closed { yours: Vqpn(77) })
    ));
    let other = a.open(12).unwrap();
    assert_ne!(other.vqpn, s.number);
    assert_ne!(
        other.ring.page(),
        0,
        "the first ring may still be written to"
    );
    a.on_closed(s.number);
    assert_eq!(a.open(12).unwrap().vqpn, s.number);

    let s = open(&a, &b, 12);
    a.on_closed(s.number);
    assert_ne!(
        a.open(12).unwrap().vqpn,
        s.number,
        "it is we who still use it"
    );
}

fn a_number_that_the_peer_never_knew_is_free_at_once<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let opened = a.open(12).unwrap();
    a.close(opened.vqpn, None, Some(opened.consumer));
    assert!(H::recv(&b).is_none());
    assert_eq!(a.open(12).unwrap().vqpn, opened.vqpn);
}

fn a_number_whose_open_is_unanswered_is_not_free<H: Harness>() {
    let [a, _b] = H::link(1 << 20);
    let opened = a.open(12).unwrap();
    a.close_unanswered(opened.vqpn, Some(opened.consumer));
    assert_ne!(a.open(12).unwrap().vqpn, opened.vqpn);
    a.on_closed(opened.vqpn);
    assert_eq!(a.open(12).unwrap().vqpn, opened.vqpn);
}

fn a_number_used_again_starts_a_new_stream<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    for round in 0..20 {
        let mut s = open(&a, &b, 12);
        assert!(s.consumer.end().unwrap().is_none() && !s.consumer.has_data().unwrap());
        assert_eq!(s.producer.consumer_flags(), RxFlags::empty());
        put(&mut s.producer, &pattern(round, 50));
        assert_eq!(read(&mut s.consumer).0, pattern(round, 50));
        put(&mut s.producer, b"unread");
        let _ = s.producer.end(End::Fin).unwrap();
        let _ = s.consumer.set_flags(RxFlags::RX_CLOSED);
        a.on_closed(s.number);
        a.close(s.number, Some(Vqpn(0)), Some(s.consumer));
    }
    assert_eq!(a.open(12).unwrap().vqpn, Vqpn(0));
}

fn an_arena_without_room_refuses_and_recovers<H: Harness>() {
    let [a, _b] = H::link(1 << 14);
    let mut all: Vec<_> = (0..4).map(|_| a.open(12).unwrap()).collect();
    assert_eq!(a.open(12).err(), Some(OpenError::Arena));
    assert!(a.allocate(12).is_none());
    let last = all.pop().unwrap();
    a.close(last.vqpn, None, Some(last.consumer));
    assert_eq!(a.open(12).unwrap().vqpn, last.vqpn);
    assert_eq!(
        a.open(11).err(),
        Some(OpenError::Arena),
        "no ring has that size"
    );
}

fn numbers_out_of_range_are_refused<H: Harness>() {
    let [a, b] = H::link(1 << 14);
    assert!(a.producer(Vqpn(MAX_STREAMS)).is_none());
    assert!(a.producer(Vqpn(u32::MAX)).is_none());
    a.on_closed(Vqpn(u32::MAX));
    a.notify(Wake(u32::MAX), Vqpn(u32::MAX));
    a.notify(Wake(WaiterId(0).queue_bits()), Vqpn(MAX_STREAMS));
    assert!(ready(&b, WaiterId(0)).is_empty());
    for waiter in [READY_QUEUES as u16, MAX_WAITERS, u16::MAX] {
        a.notify(Wake((u32::from(waiter) + 1) << 16), Vqpn(0));
        assert!(!b.has_ready(WaiterId(waiter)));
        assert!(ready(&b, WaiterId(waiter)).is_empty());
    }
}

fn messages_arrive_once_and_in_order<H: Harness>() {
    let [a, b] = H::link(1 << 14);
    for (from, to) in [(&a, &b), (&b, &a)] {
        for i in 0..20 {
            from.send(&Message::OpenRefuse {
                yours: Vqpn(i),
                reason: Reason::Limit,
            })
            .unwrap();
        }
        for i in 0..20 {
            assert!(
                matches!(H::recv(to), Some(Message::OpenRefuse { yours, .. }) if yours == Vqpn(i))
            );
        }
        assert!(H::recv(to).is_none());
    }
}

/// What is queued for a waiter.
fn ready<E: LinkEnd>(end: &E, waiter: WaiterId) -> Vec<Vqpn> {
    let mut all = Vec::new();
    end.drain_ready(waiter, |v| all.push(v));
    all
}

fn a_sleeping_waiter_is_rung_once<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let (mut s, mut t) = (open(&a, &b, 12), open(&a, &b, 12));
    for stream in [&mut s, &mut t] {
        let armed = stream.consumer.arm_data(WaiterId(5).queue_bits()).unwrap();
        assert!(!armed.ready && armed.wake.is_none());
    }
    H::begin_sleep(&a, WaiterId(5));
    assert!(!a.has_ready(WaiterId(5)));
    for stream in [&mut s, &mut t] {
        let wake = write(&mut stream.producer, b"x").1;
        b.notify(wake, stream.number);
    }
    assert_eq!(H::end_sleep(&a, WaiterId(5)), 1);
    assert!(a.has_ready(WaiterId(5)) && !a.has_ready(WaiterId(4)));
    assert_eq!(ready(&a, WaiterId(5)), [s.number, t.number]);
    assert!(!a.has_ready(WaiterId(5)));
    assert!(write(&mut s.producer, b"x").1.is_none(), "not armed again");
}

fn a_waiter_that_is_awake_is_not_rung<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let mut s = open(&a, &b, 12);
    let _ = s.consumer.arm_data(WaiterId(0).queue_bits()).unwrap();
    let wake = write(&mut s.producer, b"x").1;
    b.notify(wake, s.number);
    H::begin_sleep(&a, WaiterId(0));
    assert!(a.has_ready(WaiterId(0)), "seen before it sleeps");
    assert_eq!(H::end_sleep(&a, WaiterId(0)), 0);
    assert_eq!(ready(&a, WaiterId(0)), [s.number]);
}

fn a_stream_is_queued_once_however_often_it_is_told<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    for _ in 0..1000 {
        b.notify(Wake(WaiterId(1).queue_bits()), Vqpn(9));
        b.notify(Wake(WaiterId(1).queue_bits()), Vqpn(8000));
    }
    assert_eq!(ready(&a, WaiterId(1)), [Vqpn(9), Vqpn(8000)]);
    assert!(ready(&a, WaiterId(1)).is_empty());
}

fn a_waiter_for_space_is_told_when_there_is_some<H: Harness>() {
    let [a, b] = H::link(1 << 20);
    let mut s = open(&a, &b, 12);
    assert_eq!(write(&mut s.producer, &[1; 5000]).0, 4096);
    assert_eq!(s.producer.arm_space(WaiterId(2).queue_bits()), Ok(false));
    H::begin_sleep(&b, WaiterId(2));
    // The writer's own number for the way back is what the reader names.
    let (data, wake) = read(&mut s.consumer);
    assert_eq!(data.len(), 4096);
    a.notify(wake, Vqpn(4));
    assert_eq!(H::end_sleep(&b, WaiterId(2)), 1);
    assert_eq!(ready(&b, WaiterId(2)), [Vqpn(4)]);
    assert!(s.producer.has_space().unwrap());
}

fn a_sleeper_is_rung_whatever_is_queued<H: Harness>() {
    let [a, b] = H::link(1 << 14);
    let sleeper = WaiterId(MAX_WAITERS - 1);
    b.notify(Wake(sleeper.sleeper_bits()), Vqpn(4));
    H::begin_sleep(&a, sleeper);
    assert_eq!(H::end_sleep(&a, sleeper), 1, "it was about to sleep");
    assert!((0..READY_QUEUES as u16).all(|w| !a.has_ready(WaiterId(w))));
}

fn both_that_a_word_names_are_told<H: Harness>() {
    let [a, b] = H::link(1 << 14);
    let (queue, sleeper) = (WaiterId(7), WaiterId(100));
    H::begin_sleep(&a, queue);
    H::begin_sleep(&a, sleeper);
    b.notify(Wake(queue.queue_bits() | sleeper.sleeper_bits()), Vqpn(4));
    assert_eq!(H::end_sleep(&a, queue), 1);
    assert_eq!(H::end_sleep(&a, sleeper), 1);
    assert_eq!(ready(&a, queue), [Vqpn(4)]);
}
