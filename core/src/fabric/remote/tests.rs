//! Tests of a link between hosts, over queue pairs in memory: two ends, any number of streams.

mod buffers;
mod direct;
mod failures;
mod first_ring;
mod heads;
mod hostile;
mod loans;
mod sequences;
mod silence;
mod threads;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use crate::fabric::layout::Layout;
use crate::fabric::mem::Clock;
use crate::fabric::remote::mem::{Config, MemQp, pair};
use crate::fabric::remote::qp::{Limits, QueuePair};
use crate::fabric::remote::*;
use crate::fabric::ring::{Consumer, Producer};
use crate::fabric::side::Side;
use crate::fabric::waiter::{MAX_WAITERS, WaiterId};
use crate::fabric::{LinkEnd, Opened};
use crate::ids::Vqpn;
use crate::os::memfd::Mapping;
use crate::region::Region;
use crate::sync::SleepFlag;

impl<Q: QueuePair, L: Local> End<Q, L> {
    fn has_bulk(&self) -> bool {
        self.with(|engine| engine.means.bulk.is_some()).unwrap_or(false)
    }

    fn buffers_in_use(&self) -> u64 {
        self.shared.buffers.bytes_in_use()
    }

    /// Calls `f` while this thread holds the engine's lock, as a signal handler does that has interrupted the thread
    /// there.
    fn while_in_use<T>(&self, f: impl FnOnce() -> T) -> T {
        let engine = self.engine.lock();
        let value = f();
        drop(engine);
        let _ = self.again();
        value
    }
}

/// The waiters of one end's process.
struct Here {
    flags: Vec<SleepFlag>,
    bells: Vec<AtomicU64>,
    armed: AtomicBool,
    lent: AtomicU64,
    taken: AtomicU64,
}

impl Here {
    fn new() -> Self {
        Self {
            flags: (0..MAX_WAITERS).map(|_| SleepFlag::default()).collect(),
            bells: (0..MAX_WAITERS).map(|_| AtomicU64::new(0)).collect(),
            armed: AtomicBool::new(false),
            lent: AtomicU64::new(0),
            taken: AtomicU64::new(0),
        }
    }
}

impl Local for Here {
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag> {
        self.flags.get(usize::from(waiter.0))
    }

    fn ring(&self, waiter: WaiterId) {
        self.bells[usize::from(waiter.0)].fetch_add(1, Ordering::SeqCst);
    }

    fn armed(&self) -> &AtomicBool {
        &self.armed
    }

    /// Does nothing, since each test calls `settle` itself.
    fn settle_later(&self) {}

    fn on_lent(&self, bytes: u64) {
        self.lent.fetch_add(bytes, Ordering::Relaxed);
    }

    fn on_taken(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }
}

type TestEnd = End<MemQp, Here>;

const DATA: u64 = 1 << 20;
/// The size of an end's send buffers in bytes. Data area and buffers together are not a whole number of chunks.
const BUFFERS: u64 = 3 << 18;

/// Returns the first ring that the peer names for a stream, in tests that play the peer themselves, without an `End`.
fn first_ring() -> Region {
    Region::new(0, 12).unwrap()
}

fn end(qp: MemQp, tuning: Tuning) -> TestEnd {
    let side = |data| {
        let side = Side::anonymous().unwrap();
        side.map_data(&Layout::for_data(data).unwrap()).unwrap();
        side
    };
    let tuning = Tuning {
        buffers: BUFFERS,
        ..tuning
    };
    let (mine, mirror) = (side(DATA), side(DATA + BUFFERS));
    // SAFETY: the tests keep the end for longer than its cursors, and make one producer for each stream.
    unsafe { End::new(qp, mine, mirror, Here::new(), tuning) }.unwrap()
}

/// Returns the smallest limits that a link can have, and settings that suit them.
fn tiny(immediate: bool) -> (Config, Tuning) {
    let config = Config {
        limits: Limits {
            receive_buffers: MIN_BUFFERS,
            buffer_bytes: MIN_BUFFER,
            immediate,
            packet_bytes: 0,
            reads: 2,
        },
        send_queue: 3,
        signal_every: 2,
        delay: 5,
    };
    let tuning = Tuning {
        eager_max: 60,
        piece: 700,
        chunk_log2: 13,
        buffers: 0,
        direct_min: 100,
    };
    (config, tuning)
}

/// Returns the byte at a position of a direction.
fn byte(seed: u64, pos: u64) -> u8 {
    ((seed.wrapping_mul(31) + pos).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn bytes(seed: u64, from: u64, to: u64) -> Vec<u8> {
    (from..to).map(|p| byte(seed, p)).collect()
}

/// A direction of a stream.
struct Direction {
    seed: u64,
    producer: Producer,
    consumer: Consumer,
    sent: u64,
    got: u64,
    reader: usize,
    /// The stream's number at the reader; `back` is its number at the writer.
    number: Vqpn,
    back: Vqpn,
    ended: bool,
    waiting: Option<direct::Waiting>,
    lent: Option<direct::Lent>,
}

impl Direction {
    fn write(&mut self, ends: &[TestEnd; 2], n: usize) -> usize {
        let data = bytes(self.seed, self.sent, self.sent + n as u64);
        let spans = self.producer.spans(n).unwrap();
        // SAFETY: the source is readable, and apart from the ring.
        let n = unsafe { spans.copy_in(0, data.as_ptr(), n) };
        let wake = self.producer.commit(n);
        self.sent += n as u64;
        ends[1 - self.reader].notify(wake, self.number);
        n
    }

    fn read(&mut self, ends: &[TestEnd; 2], most: usize) -> usize {
        let mut done = self.collect(ends);
        while done < most && self.waiting.is_none() {
            let spans = self.consumer.spans(1).unwrap();
            let mut data = vec![0; spans.len().min(most - done)];
            if data.is_empty() {
                break;
            }
            // SAFETY: the target is writable, and apart from the ring.
            unsafe { spans.copy_out(0, data.as_mut_ptr(), data.len()) };
            assert!(data == bytes(self.seed, self.got, self.got + data.len() as u64));
            self.got += data.len() as u64;
            done += data.len();
            let wake = self.consumer.consume(data.len());
            ends[self.reader].notify(wake, self.back);
        }
        if let Ok(Some(old)) = self.consumer.take_retired() {
            ends[self.reader].free(old);
        }
        done
    }

    fn lend(&mut self, ends: &[TestEnd; 2], log2: u8) -> bool {
        ends[1 - self.reader].lend(self.number, &mut self.producer, log2)
    }

    fn take_back(&mut self, ends: &[TestEnd; 2]) -> bool {
        ends[1 - self.reader].take_back(self.number, &mut self.producer)
    }

    fn offer(&mut self, ends: &[TestEnd; 2], log2: u8) {
        if self.consumer.is_switching() {
            return;
        }
        if let Some(region) = ends[self.reader].allocate(log2) {
            let wake = self.consumer.offer(region).unwrap();
            ends[self.reader].notify(wake, self.back);
        }
    }
}

/// The longest delay of a bulk queue pair, in µs.
const BULK_DELAY: u64 = 12;

/// Two ends and their streams, which have two directions each.
struct World {
    directions: Vec<Direction>,
    ends: [TestEnd; 2],
    clock: Clock,
    /// For each end, how often its completion fd had fired when it was last armed.
    fired: [u64; 2],
}

impl World {
    /// Returns how many bytes the device of end 0 has read from lent memory, and how many of them end 1 knows of.
    fn read(&self) -> [u64; 2] {
        let [reader, lender] = self.ends.each_ref().map(TestEnd::local);
        [&reader.taken, &lender.lent].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    fn new(config: Config, tuning: Tuning, streams: usize) -> Self {
        let clock = Clock::default();
        let ends = pair(config, &clock).map(|qp| end(qp, tuning));
        let mut world = Self {
            directions: Vec::new(),
            ends,
            clock,
            fired: [0, 0],
        };
        for _ in 0..streams {
            world.open();
        }
        world.settle();
        world
    }

    fn open(&mut self) {
        let [a, b]: [Opened; 2] = [0, 1].map(|i| self.ends[i].open(12).unwrap());
        self.ends[0].pair(a.vqpn, b.vqpn, b.ring);
        self.ends[1].pair(b.vqpn, a.vqpn, a.ring);
        let numbers = [a.vqpn, b.vqpn];
        for (reader, opened) in [a, b].into_iter().enumerate() {
            let writer = &self.ends[1 - reader];
            self.directions.push(Direction {
                seed: self.directions.len() as u64,
                producer: writer.producer(opened.vqpn).unwrap(),
                consumer: opened.consumer,
                sent: 0,
                got: 0,
                reader,
                number: opened.vqpn,
                back: numbers[1 - reader],
                ended: false,
                waiting: None,
                lent: None,
            });
        }
    }

    /// Makes the first direction use its first ring by sending one byte, then offers it a larger ring.
    fn grow(&mut self, log2: u8) {
        self.directions[0].write(&self.ends, 1);
        self.settle();
        self.directions[0].read(&self.ends, 1);
        self.directions[0].offer(&self.ends, log2);
        self.settle();
    }

    /// Polls each end once. Returns true if there was a completion, or if the clock was advanced to the next arrival.
    fn round(&self) -> bool {
        let mut came = false;
        for end in &self.ends {
            came |= end.owes();
            end.settle();
            came |= end.progress().unwrap();
        }
        if !came && let Some(at) = self.ends[0].qp().next_arrival() {
            self.clock.advance(at.saturating_sub(self.clock.now()));
            return true;
        }
        came
    }

    /// Reads all bytes, until no more come.
    fn drain(&mut self) {
        loop {
            self.settle();
            let ends = &self.ends;
            let all = &mut self.directions;
            if all.iter_mut().map(|d| d.read(ends, usize::MAX)).sum::<usize>() == 0 {
                return;
            }
        }
    }

    /// Makes the readers publish their heads, as they do before a sleep.
    fn rest(&mut self) {
        for d in &mut self.directions {
            let wake = d.consumer.publish();
            self.ends[d.reader].notify(wake, d.back);
        }
        self.settle();
    }

    fn settle(&self) {
        let mut is_quiet = false;
        for round in 0.. {
            if self.round() {
                is_quiet = false;
            } else if is_quiet {
                return;
            } else {
                // Bytes may be under way on a bulk queue pair.
                self.clock.advance(BULK_DELAY);
                is_quiet = true;
            }
            assert!(round < 100_000, "it comes to rest");
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(prop::sample::Index, usize),
    Read(prop::sample::Index, usize),
    Offer(prop::sample::Index, u8),
    Lend(prop::sample::Index, u8),
    TakeBack(prop::sample::Index),
    End(prop::sample::Index),
    Quietly(prop::sample::Index),
    Message(usize),
    Tell(prop::sample::Index),
    Confirm(prop::sample::Index),
    Arm(usize),
    Look(usize),
    Pass(u64),
    Settle(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        8 => (index(), 1usize..6000).prop_map(|(i, n)| Op::Write(i, n)),
        2 => (index(), 6000usize..70_000).prop_map(|(i, n)| Op::Write(i, n)),
        4 => (index(), 1usize..80).prop_map(|(i, n)| Op::Write(i, n)),
        8 => (index(), 1usize..9000).prop_map(|(i, n)| Op::Read(i, n)),
        3 => (index(), 12u8..16).prop_map(|(i, n)| Op::Offer(i, n)),
        3 => (index(), 12u8..17).prop_map(|(i, n)| Op::Lend(i, n)),
        3 => index().prop_map(Op::TakeBack),
        1 => index().prop_map(Op::End),
        1 => index().prop_map(Op::Quietly),
        2 => (0usize..2).prop_map(Op::Message),
        1 => index().prop_map(Op::Tell),
        1 => index().prop_map(Op::Confirm),
        1 => (0usize..2).prop_map(Op::Arm),
        8 => (0usize..2).prop_map(Op::Look),
        4 => (0u64..20).prop_map(Op::Pass),
        1 => (0usize..2).prop_map(Op::Settle),
    ]
}

/// The number of messages that each end has sent.
type Sent = [u32; 2];

impl World {
    /// Applies an operation. Errors of the link are checked later.
    fn apply(&mut self, op: &Op, sent: &mut Sent) {
        let (ends, all) = (&self.ends, &mut self.directions);
        let n = all.len();
        match op {
            Op::Write(i, bytes) => {
                all[i.index(n)].write(ends, *bytes);
            }
            Op::Read(i, bytes) => {
                all[i.index(n)].read(ends, *bytes);
            }
            Op::Offer(i, log2) => all[i.index(n)].offer(ends, *log2),
            Op::Lend(i, log2) => {
                all[i.index(n)].lend(ends, *log2);
            }
            Op::TakeBack(i) => {
                all[i.index(n)].take_back(ends);
            }
            Op::End(i) => {
                let d = &mut all[i.index(n)];
                d.ended = true;
                let wake = d.producer.end(crate::fabric::ring::EndMark::Fin).unwrap();
                ends[1 - d.reader].notify(wake, d.number);
            }
            Op::Quietly(i) => {
                let d = &mut all[i.index(n)];
                let data = bytes(d.seed, d.sent, d.sent + 10);
                let spans = d.producer.spans(10).unwrap();
                // SAFETY: the source is readable, and apart from the ring.
                let n = unsafe { spans.copy_in(0, data.as_ptr(), 10) };
                d.producer.commit_quietly(n);
                d.sent += n as u64;
                let wake = d.producer.wake();
                ends[1 - d.reader].notify(wake, d.number);
            }
            Op::Message(from) => {
                let message = crate::wire::Message::Ring { id: sent[*from] };
                if ends[*from].send(&message).is_ok() {
                    sent[*from] += 1;
                }
            }
            Op::Tell(i) => {
                let d = &all[i.index(n)];
                let wake = crate::fabric::ring::Wake(WaiterId(0).queue_bits());
                ends[1 - d.reader].notify(wake, d.number);
            }
            Op::Confirm(i) => {
                let d = &all[i.index(n)];
                let _ = ends[1 - d.reader].unconfirmed(d.number);
            }
            Op::Arm(at) => {
                self.fired[*at] = ends[*at].qp().fired();
                let _ = ends[*at].arm();
            }
            Op::Look(at) => {
                let was_armed = ends[*at].is_armed();
                let came = ends[*at].progress().unwrap_or(false);
                // The poll makes the device carry out the work requests that are due.
                let has_fired = ends[*at].qp().fired() > self.fired[*at];
                assert!(
                    has_fired || !was_armed || !came,
                    "an end that is armed would have slept on"
                );
            }
            Op::Pass(us) => self.clock.advance(*us),
            Op::Settle(at) => ends[*at].settle(),
        }
    }

    /// Checks that the messages at end `at` are those numbered `0..to`.
    fn takes(&self, at: usize, to: u32) {
        for want in 0..to {
            match self.ends[at].take_message() {
                Some(crate::wire::Message::Ring { id }) => assert_eq!(id, want),
                other => panic!("{other:?}"),
            }
        }
        assert!(self.ends[at].take_message().is_none());
    }
}
