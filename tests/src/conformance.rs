//! The rules that every link keeps, on every fabric: one suite over [`LinkEnd`], which `tests/conformance.rs` runs for
//! each fabric. Not here: how a link is made.

use rdmasock_core::fabric::layout::{MAX_STREAMS, READY_QUEUES};
use rdmasock_core::fabric::ring::{Consumer, EndMark, Ended, Producer, RxFlags, Stopped, Wake};
use rdmasock_core::fabric::waiter::{MAX_WAITERS, WaiterId};
use rdmasock_core::fabric::{LinkEnd, OpenError};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::region::Region;
use rdmasock_core::wire::{Message, Reason};

/// How the suite gets links of one fabric, and the calls that it needs beside [`LinkEnd`].
pub trait Harness {
    /// An end of a link.
    type End: LinkEnd;
    /// Whether an end keeps the bytes that its peer's ring has no room for.
    const KEEPS: bool = false;
    /// A link whose arenas have this many bytes each for rings, up, with nothing open.
    fn link(data_bytes: u64) -> [Self::End; 2];
    /// Returns the next message that has arrived; `None` if none has.
    fn recv(end: &Self::End) -> Option<Message>;
    /// A waiter of this end announces that it will sleep.
    fn begin_sleep(end: &Self::End, waiter: WaiterId);
    /// The waiter is awake again. Returns how often its doorbell was rung while it slept.
    fn end_sleep(end: &Self::End, waiter: WaiterId) -> u64;
    /// Carries all notifications and messages to the other end, where that does not happen by itself.
    fn settle(_ends: &[Self::End; 2]) {}
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
        what_an_end_keeps_goes_on_as_the_other_reads
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

/// A link whose ends have all that they send each other carried over at once.
struct Link<H: Harness>([H::End; 2]);

/// A stream with one direction in use.
struct Stream {
    /// The end that reads.
    reader: usize,
    /// The stream's vQPN at the end that reads.
    number: Vqpn,
    /// The stream's vQPN at the end that writes.
    back: Vqpn,
    consumer: Consumer,
    producer: Producer,
    /// The consumer of the direction that is not used.
    other: Consumer,
}

impl<H: Harness> Link<H> {
    fn new(data_bytes: u64) -> Self {
        Self(H::link(data_bytes))
    }

    fn ends(&self) -> [&H::End; 2] {
        let [a, b] = &self.0;
        [a, b]
    }

    /// A stream that `self.0[reader]` reads from, with a first ring of `1 << log2` bytes.
    fn open(&self, reader: usize, log2: u8) -> Stream {
        let (r, w) = (&self.0[reader], &self.0[1 - reader]);
        let (opened, back) = (r.open(log2).unwrap(), w.open(12).unwrap());
        assert_eq!(opened.ring.log2(), log2);
        r.pair(opened.vqpn, back.vqpn, back.ring);
        w.pair(back.vqpn, opened.vqpn, opened.ring);
        H::settle(&self.0);
        Stream {
            reader,
            number: opened.vqpn,
            back: back.vqpn,
            consumer: opened.consumer,
            producer: w.producer(opened.vqpn).unwrap(),
            other: back.consumer,
        }
    }

    /// The reading end notifies the other as its cursor asks.
    fn by_reader(&self, s: &Stream, wake: Wake) {
        self.0[s.reader].notify(wake, s.back);
        H::settle(&self.0);
    }

    /// The writing end notifies the other as its cursor asks.
    fn by_writer(&self, s: &Stream, wake: Wake) {
        self.0[1 - s.reader].notify(wake, s.number);
        H::settle(&self.0);
    }

    /// Writes as much as there is room for. Returns the number of bytes.
    fn write(&self, s: &mut Stream, data: &[u8]) -> usize {
        let (n, wake) = write(&mut s.producer, data);
        self.by_writer(s, wake);
        n
    }

    /// Writes all of `data`.
    fn put(&self, s: &mut Stream, data: &[u8]) {
        assert_eq!(self.write(s, data), data.len());
    }

    /// Reads all bytes that are in the ring.
    fn read(&self, s: &mut Stream) -> Vec<u8> {
        let (data, wake) = read(&mut s.consumer);
        self.by_reader(s, wake);
        data
    }

    fn offer(&self, s: &mut Stream, log2: u8) {
        let region = self.0[s.reader].allocate(log2).unwrap();
        let wake = s.consumer.offer(region).unwrap();
        self.by_reader(s, wake);
    }

    fn end(&self, s: &mut Stream, mark: EndMark) {
        let wake = s.producer.end(mark).unwrap();
        self.by_writer(s, wake);
    }

    /// Notifies the peer of `from` about its stream.
    fn notify(&self, from: usize, word: u32, theirs: Vqpn) {
        self.0[from].notify(Wake(word), theirs);
        H::settle(&self.0);
    }

    /// Returns the next message at an end.
    fn recv(&self, at: usize) -> Option<Message> {
        H::settle(&self.0);
        H::recv(&self.0[at])
    }
}

fn write(producer: &mut Producer, data: &[u8]) -> (usize, Wake) {
    let spans = producer.spans(data.len()).unwrap();
    // SAFETY: the data is readable and apart from the ring.
    let n = unsafe { spans.copy_in(0, data.as_ptr(), data.len()) };
    (n, producer.commit(n))
}

/// Reads all bytes that are in the ring.
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

/// Returns bytes whose values follow from their offset.
pub fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len)
        .map(|i| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

fn what_is_written_at_one_end_is_read_at_the_other<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    for reader in [0, 1] {
        let mut s = link.open(reader, 12);
        let (mut sent, mut got) = (0, 0);
        for step in 1..400 {
            sent += link.write(&mut s, &pattern(sent, step * 7));
            if step % 3 == 0 {
                let data = link.read(&mut s);
                assert_eq!(data, pattern(got, data.len()));
                got += data.len();
            }
        }
        assert_eq!((sent, sent > 100_000), (got, true));
    }
}

fn streams_do_not_mix<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let mut streams: Vec<Stream> = (0..50).map(|_| link.open(0, 12)).collect();
    for (i, s) in streams.iter_mut().enumerate() {
        link.put(s, &pattern(i * 1000, 4096));
    }
    for (i, s) in streams.iter_mut().enumerate() {
        assert_eq!(link.read(s), pattern(i * 1000, 4096));
    }
}

fn the_end_mark_comes_after_the_last_byte<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    for mark in [EndMark::Fin, EndMark::Demote] {
        let mut s = link.open(0, 12);
        link.put(&mut s, b"last");
        link.end(&mut s, mark);
        assert_eq!(s.consumer.end(), Ok(None));
        assert_eq!(link.read(&mut s), b"last");
        assert_eq!(s.consumer.end(), Ok(Some(mark)));
        assert_eq!(link.write(&mut s, b"more"), 0);
    }
}

fn a_ring_grows_and_shrinks_in_mid_stream<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let mut s = link.open(0, 12);
    let mut at = 0;
    for log2 in [14, 16, 12, 13] {
        at += link.write(&mut s, &pattern(at, 100));
        // The switch before this ends when the reader has seen it.
        assert!(s.consumer.has_data().unwrap());
        link.offer(&mut s, log2);
        let n = link.write(&mut s, &pattern(at, 1 << 17));
        assert_eq!(n, 1 << log2, "the whole of the new ring");
        assert_eq!(link.read(&mut s), pattern(at - 100, n + 100));
        at += n;
        link.0[0].free(s.consumer.take_retired().unwrap().unwrap());
    }
}

fn what_was_not_read_can_be_sent_again<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let mut s = link.open(0, 12);
    link.put(&mut s, &pattern(0, 3000));
    let _ = s.consumer.spans(1000).unwrap();
    let wake = s.consumer.consume(1000);
    link.by_reader(&s, wake);
    link.offer(&mut s, 13);
    link.put(&mut s, &pattern(3000, 500));
    assert_eq!(s.consumer.position(), 1000);
    let wake = s.consumer.stop().unwrap();
    link.by_reader(&s, wake);
    // The message's promise has to hold when the message has arrived.
    let request = Message::DemoteRequest {
        yours: s.back,
        resend_from: Some(1000),
    };
    link.0[0].send(&request).unwrap();
    assert!(link.recv(1).is_some());
    assert_eq!(s.producer.end(EndMark::Fin), Err(Stopped));
    assert_eq!(s.producer.unread().unwrap(), pattern(1000, 2500));
}

fn what_an_end_keeps_goes_on_as_the_other_reads<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let mut s = link.open(0, 12);
    for _ in 0..3 {
        let at = s.producer.position() as usize;
        let mut end = at + link.write(&mut s, &pattern(at, 1 << 17));
        assert_eq!(end, at + (1 << 12), "the reader's ring");
        let keeps = link.0[1].lend(s.number, &mut s.producer, 16);
        assert_eq!(keeps, H::KEEPS);
        let more = link.write(&mut s, &pattern(end, 1 << 17));
        assert_eq!(more, if keeps { 1 << 16 } else { 0 });
        end += more;
        let mut got = at;
        while got < end {
            let piece = link.read(&mut s);
            assert!(!piece.is_empty(), "{got} of {end}");
            assert_eq!(piece, pattern(got, piece.len()));
            got += piece.len();
        }
        assert!(link.read(&mut s).is_empty());
        let wake = s.consumer.publish();
        link.by_reader(&s, wake);
        assert_eq!(link.0[1].take_back(s.number, &mut s.producer), keeps);
    }
}

fn only_one_side_ends_a_direction<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let mut s = link.open(0, 12);
    link.put(&mut s, &pattern(0, 10));
    link.end(&mut s, EndMark::Demote);
    assert_eq!(s.consumer.stop(), Err(Ended));
    assert_eq!(link.read(&mut s), pattern(0, 10));
    assert_eq!(s.consumer.end(), Ok(Some(EndMark::Demote)));
}

fn a_reader_that_leaves_is_seen_by_the_writer<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let mut s = link.open(0, 12);
    link.put(&mut s, &[0; 4096]);
    assert_eq!(s.producer.arm_space(WaiterId(3).queue_bits()), Ok(false));
    let wake = s.consumer.set_flags(RxFlags::RX_CLOSED);
    assert!(!wake.is_none());
    link.by_reader(&s, wake);
    assert!(s.producer.has_space().unwrap());
    assert_eq!(s.producer.consumer_flags(), RxFlags::RX_CLOSED);
    assert_eq!(ready(&link.0[1], WaiterId(3)), [s.back]);
}

fn a_number_is_free_only_when_both_ends_are_done<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let [a, _] = link.ends();
    let s = link.open(0, 12);
    a.close(s.number, Some(s.back), Some(s.consumer));
    assert!(matches!(link.recv(1), Some(Message::Closed { yours }) if yours == s.back));
    let other = a.open(12).unwrap();
    assert_ne!(other.vqpn, s.number);
    assert_ne!(other.ring.page(), 0, "the first ring may still be written to");
    a.on_closed(s.number);
    assert_eq!(a.open(12).unwrap().vqpn, s.number);

    let s = link.open(0, 12);
    a.on_closed(s.number);
    assert_ne!(a.open(12).unwrap().vqpn, s.number, "it is we who still use it");
}

fn a_number_that_the_peer_never_knew_is_free_at_once<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let [a, _] = link.ends();
    let opened = a.open(12).unwrap();
    a.close(opened.vqpn, None, Some(opened.consumer));
    assert!(link.recv(1).is_none());
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
    let link = Link::<H>::new(1 << 20);
    let [a, b] = link.ends();
    for round in 0..20 {
        let mut s = link.open(0, 12);
        assert!(s.consumer.end().unwrap().is_none() && !s.consumer.has_data().unwrap());
        assert_eq!(s.producer.consumer_flags(), RxFlags::empty());
        link.put(&mut s, &pattern(round, 50));
        assert_eq!(link.read(&mut s), pattern(round, 50));
        link.put(&mut s, b"unread");
        link.end(&mut s, EndMark::Fin);
        let wake = s.consumer.set_flags(RxFlags::RX_CLOSED);
        link.by_reader(&s, wake);
        // End `a` closes before it is notified, end `b` after.
        a.close(s.number, Some(s.back), Some(s.consumer));
        assert!(matches!(link.recv(1), Some(Message::Closed { yours }) if yours == s.back));
        b.on_closed(s.back);
        b.close(s.back, Some(s.number), Some(s.other));
        assert!(matches!(link.recv(0), Some(Message::Closed { yours }) if yours == s.number));
        a.on_closed(s.number);
    }
    for end in link.ends() {
        assert_eq!(end.open(12).unwrap().vqpn, Vqpn(0));
    }
}

fn an_arena_without_room_refuses_and_recovers<H: Harness>() {
    let [a, _b] = H::link(1 << 14);
    let mut all: Vec<_> = (0..4).map(|_| a.open(12).unwrap()).collect();
    assert_eq!(a.open(12).err(), Some(OpenError::Arena));
    assert!(a.allocate(12).is_none());
    let last = all.pop().unwrap();
    a.close(last.vqpn, None, Some(last.consumer));
    assert_eq!(a.open(12).unwrap().vqpn, last.vqpn);
    assert_eq!(a.open(11).err(), Some(OpenError::Arena), "no ring has that size");
}

fn numbers_out_of_range_are_refused<H: Harness>() {
    let link = Link::<H>::new(1 << 14);
    let [a, b] = link.ends();
    assert!(a.producer(Vqpn(MAX_STREAMS)).is_none());
    assert!(a.producer(Vqpn(u32::MAX)).is_none());
    let ring = Region::new(0, 12).unwrap();
    a.pair(Vqpn(u32::MAX), Vqpn(0), ring);
    a.pair(Vqpn(0), Vqpn(u32::MAX), ring);
    a.on_closed(Vqpn(u32::MAX));
    link.notify(0, u32::MAX, Vqpn(u32::MAX));
    link.notify(0, WaiterId(0).queue_bits(), Vqpn(MAX_STREAMS));
    assert!(ready(b, WaiterId(0)).is_empty());
    for waiter in [READY_QUEUES as u16, MAX_WAITERS, u16::MAX] {
        link.notify(0, (u32::from(waiter) + 1) << 16, Vqpn(0));
        assert!(!b.has_ready(WaiterId(waiter)));
        assert!(ready(b, WaiterId(waiter)).is_empty());
    }
}

fn messages_arrive_once_and_in_order<H: Harness>() {
    let link = Link::<H>::new(1 << 14);
    for from in [0, 1] {
        for i in 0..20 {
            let message = Message::OpenRefuse {
                yours: Vqpn(i),
                reason: Reason::Limit,
            };
            link.0[from].send(&message).unwrap();
        }
        for i in 0..20 {
            assert!(matches!(link.recv(1 - from), Some(Message::OpenRefuse { yours, .. }) if yours == Vqpn(i)));
        }
        assert!(link.recv(1 - from).is_none());
    }
}

/// Returns the streams that are queued for a waiter.
fn ready<E: LinkEnd>(end: &E, waiter: WaiterId) -> Vec<Vqpn> {
    let mut all = Vec::new();
    end.drain_ready(waiter, |v| all.push(v));
    all
}

/// Arms for data on behalf of a waiter, which finds none.
fn arm_data<H: Harness>(link: &Link<H>, s: &mut Stream, waiter: WaiterId) {
    let armed = s.consumer.arm_data(waiter.queue_bits()).unwrap();
    assert!(!armed.ready);
    link.by_reader(s, armed.wake);
}

fn a_sleeping_waiter_is_rung_once<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let [a, _] = link.ends();
    let (mut s, mut t) = (link.open(0, 12), link.open(0, 12));
    for stream in [&mut s, &mut t] {
        arm_data(&link, stream, WaiterId(5));
    }
    H::begin_sleep(a, WaiterId(5));
    assert!(!a.has_ready(WaiterId(5)));
    for stream in [&mut s, &mut t] {
        link.put(stream, b"x");
    }
    assert_eq!(H::end_sleep(a, WaiterId(5)), 1);
    assert!(a.has_ready(WaiterId(5)) && !a.has_ready(WaiterId(4)));
    assert_eq!(ready(a, WaiterId(5)), [s.number, t.number]);
    assert!(!a.has_ready(WaiterId(5)));
    link.put(&mut s, b"x");
    assert!(!a.has_ready(WaiterId(5)), "not armed again");
}

fn a_waiter_that_is_awake_is_not_rung<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let [a, _] = link.ends();
    let mut s = link.open(0, 12);
    arm_data(&link, &mut s, WaiterId(0));
    link.put(&mut s, b"x");
    H::begin_sleep(a, WaiterId(0));
    assert!(a.has_ready(WaiterId(0)), "seen before it sleeps");
    assert_eq!(H::end_sleep(a, WaiterId(0)), 0);
    assert_eq!(ready(a, WaiterId(0)), [s.number]);
}

fn a_stream_is_queued_once_however_often_it_is_told<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let [a, b] = link.ends();
    for _ in 0..1000 {
        b.notify(Wake(WaiterId(1).queue_bits()), Vqpn(9));
        b.notify(Wake(WaiterId(1).queue_bits()), Vqpn(200));
    }
    H::settle(&link.0);
    assert_eq!(ready(a, WaiterId(1)), [Vqpn(9), Vqpn(200)]);
    assert!(ready(a, WaiterId(1)).is_empty());
}

fn a_waiter_for_space_is_told_when_there_is_some<H: Harness>() {
    let link = Link::<H>::new(1 << 20);
    let [_, b] = link.ends();
    let mut s = link.open(0, 12);
    assert_eq!(link.write(&mut s, &[1; 5000]), 4096);
    assert_eq!(s.producer.arm_space(WaiterId(2).queue_bits()), Ok(false));
    H::begin_sleep(b, WaiterId(2));
    assert_eq!(link.read(&mut s).len(), 4096);
    assert_eq!(H::end_sleep(b, WaiterId(2)), 1);
    assert_eq!(ready(b, WaiterId(2)), [s.back]);
    assert!(s.producer.has_space().unwrap());
}

fn a_sleeper_is_rung_whatever_is_queued<H: Harness>() {
    let link = Link::<H>::new(1 << 14);
    let [a, _] = link.ends();
    let sleeper = WaiterId(MAX_WAITERS - 1);
    link.notify(1, sleeper.sleeper_bits(), Vqpn(4));
    H::begin_sleep(a, sleeper);
    assert_eq!(H::end_sleep(a, sleeper), 1, "it was about to sleep");
    assert!((0..READY_QUEUES as u16).all(|w| !a.has_ready(WaiterId(w))));
}

fn both_that_a_word_names_are_told<H: Harness>() {
    let link = Link::<H>::new(1 << 14);
    let [a, _] = link.ends();
    let (queue, sleeper) = (WaiterId(7), WaiterId(100));
    H::begin_sleep(a, queue);
    H::begin_sleep(a, sleeper);
    link.notify(1, queue.queue_bits() | sleeper.sleeper_bits(), Vqpn(4));
    assert_eq!(H::end_sleep(a, queue), 1);
    assert_eq!(H::end_sleep(a, sleeper), 1);
    assert_eq!(ready(a, queue), [Vqpn(4)]);
}
