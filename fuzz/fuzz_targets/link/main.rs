//! The engine of a link between hosts under a peer that sends any messages, in any order, between any operations of
//! this end (P50–P59). The engine goes on, or ends the link with a reason. Its cursors only ever see valid values, and
//! it writes to its rings alone. After the link has failed, no message is sent or applied.
#![no_main]

mod peer;
mod wire;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};

use libfuzzer_sys::arbitrary::Arbitrary;
use libfuzzer_sys::{arbitrary, fuzz_target};
use peer::Said;
use rdmasock_core::fabric::layout::{DATA_OFFSET, Layout, PAGE, Region};
use rdmasock_core::fabric::remote::{End, Local, Tuning};
use rdmasock_core::fabric::ring::{Consumer, Producer, RxFlags, Wake};
use rdmasock_core::fabric::shm::Side;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::fabric::{LinkEnd, Opened, ring};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::os::memfd::Mapping;
use rdmasock_core::sync::SleepFlag;
use rdmasock_core::wire::{Message, Reason};
use wire::{Setting, Wire};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    setting: Setting,
    eager_max: u8,
    begin: Begin,
    steps: Vec<Step<'a>>,
}

/// The state at the beginning, as most faults need a stream.
#[derive(Arbitrary, Debug, PartialEq)]
enum Begin {
    Empty,
    Paired,
    /// Both ends have rings.
    Ready,
}

/// A message of the peer, then an operation of this end.
#[derive(Arbitrary, Debug)]
struct Step<'a> {
    said: Option<Said<'a>>,
    /// Whether the message stays in the queue for now.
    is_queued: bool,
    op: Option<Op>,
}

#[derive(Arbitrary, Debug)]
enum Op {
    Open(u8),
    Pair(u8, u8),
    Write(u8, u16),
    Read(u8, u16),
    Grow(u8, u8),
    /// The producer writes into one of this end's send buffers; `TakeBack` ends that.
    Lend(u8, u8),
    TakeBack(u8),
    EndSending(u8, bool),
    Stop(u8),
    Freeze(u8, u16),
    Shut(u8),
    Close(u8),
    CloseUnanswered(u8),
    Unconfirmed(u8),
    Arm(u8),
    Touch(u32),
    Message,
    Sleep(u8),
    Drain(u8),
    Settle,
    Doubt,
    /// The time advances by this many seconds.
    Tick(u8),
    /// The peer's device stops or resumes answering probes.
    Silent(bool),
    /// The device's send queue becomes full, or has room again.
    Full(bool),
    Down,
    SetDown,
}

/// Waiters that may sleep; no thread is woken.
struct Here {
    flags: [SleepFlag; 4],
    rung: AtomicU32,
    armed: AtomicBool,
}

impl Local for Here {
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag> {
        self.flags.get(usize::from(waiter.0))
    }

    fn ring(&self, _: WaiterId) {
        self.rung.fetch_add(1, Relaxed);
    }

    fn armed(&self) -> &AtomicBool {
        &self.armed
    }

    fn settle_later(&self) {}
}

/// A stream of this end.
struct Stream {
    mine: Vqpn,
    theirs: Option<Vqpn>,
    consumer: Consumer,
    producer: Option<Producer>,
    /// Whether the peer has given the number to two streams; then the content of its block is undefined.
    shared: bool,
    /// Whether this end's consumer has stopped: its own mark lies in place of the peer's.
    stopped: bool,
    /// The position up to which the peer has sent; then the offers that this end has made, and those of the peer.
    told: u64,
    offers: u32,
    their_offers: u32,
    received: u64,
}

const PAGES: usize = 16;
/// Send buffers, behind the mirror's data area.
const BUFFER_PAGES: usize = 8;
/// The area behind all others, where no code writes.
const GUARD: usize = 2 * PAGE;
const MOST_STREAMS: usize = 6;

struct World {
    end: End<Wire, Here>,
    streams: Vec<Stream>,
    /// The time in ns.
    now: u64,
    /// The pages that were part of a ring: of this end's rings, and of the peer's.
    mine: [bool; PAGES],
    mirror: [bool; PAGES],
    at: [*const u8; 2],
    failed: bool,
}

fuzz_target!(|input: Input<'_>| {
    let mut world = World::new(&input);
    if input.begin != Begin::Empty {
        world.open(0);
        world.pair(0, 0);
    }
    if input.begin == Begin::Ready {
        world.hear(&Said::rings());
        world.look();
        assert_eq!(world.end.fault(), None);
    }
    for step in &input.steps {
        if let Some(said) = &step.said {
            world.hear(said);
        }
        // The messages behind it in the queue are not applied either.
        world.failed |= world.end.qp().is_next_malformed();
        if !step.is_queued {
            world.look();
        }
        if let Some(op) = &step.op {
            world.apply(op);
        }
        world.check();
    }
    world.check_memory();
});

impl World {
    fn new(input: &Input<'_>) -> Self {
        let mut at = [std::ptr::null(); 2];
        let [mine, mirror] = [0, 1].map(|i| {
            let data = ((PAGES + i * BUFFER_PAGES) * PAGE) as u64;
            let layout = Layout::for_data(data).expect("whole pages");
            let bytes = layout.file_len() as usize + GUARD;
            let mapping = Mapping::anonymous(bytes).expect("memory");
            at[i] = mapping.as_ptr().cast_const();
            Side::new(mapping, layout).expect("large enough")
        });
        let tuning = Tuning {
            eager_max: u32::from(input.eager_max) * 16,
            piece: 3000,
            chunk_log2: 13,
            buffers: (BUFFER_PAGES * PAGE) as u64,
            direct_min: 100,
        };
        let here = Here {
            flags: std::array::from_fn(|_| SleepFlag::default()),
            rung: AtomicU32::new(0),
            armed: AtomicBool::new(false),
        };
        // SAFETY: the end outlives the cursors, which are dropped with their streams. If a producer is requested twice,
        // as the library does if the peer uses a number twice, this is the only thread.
        let end = unsafe { End::new(Wire::new(input.setting), mine, mirror, here, tuning) };
        Self {
            end: end.expect("enough buffers"),
            streams: Vec::new(),
            now: 0,
            mine: [false; PAGES],
            mirror: [false; PAGES],
            at,
            failed: false,
        }
    }

    fn stream(&mut self, n: u8) -> Option<&mut Stream> {
        let n = usize::from(n).checked_rem(self.streams.len())?;
        self.streams.get_mut(n)
    }

    fn open(&mut self, log2: u8) {
        if self.streams.len() >= MOST_STREAMS {
            return;
        }
        if let Ok(Opened { vqpn, ring, consumer }) = self.end.open(12 + log2 % 3) {
            use_pages(&mut self.mine, ring.page(), ring.log2());
            self.streams.push(Stream {
                mine: vqpn,
                theirs: None,
                consumer,
                producer: None,
                shared: false,
                stopped: false,
                told: 0,
                offers: 1,
                their_offers: 0,
                received: 0,
            });
        }
    }

    /// Pairs a stream, as the peer's OPEN or its answer to this end's does.
    fn pair(&mut self, n: u8, theirs: u8) {
        let theirs = Vqpn(if theirs == 255 { u32::MAX } else { theirs.into() });
        let is_used = |s: &Stream| s.theirs == Some(theirs);
        let shared = self.streams.iter().any(is_used);
        let Some(n) = usize::from(n).checked_rem(self.streams.len()) else {
            return;
        };
        if self.streams[n].theirs.is_some() {
            return;
        }
        let Some(producer) = self.end.producer(theirs) else {
            return;
        };
        self.streams
            .iter_mut()
            .filter(|s| is_used(s))
            .for_each(|s| s.shared = true);
        let stream = &mut self.streams[n];
        stream.shared = shared;
        stream.theirs = Some(theirs);
        stream.producer = Some(producer);
        let mine = stream.mine;
        // Every other peer offers no usable first ring, and may offer any later.
        let page = if theirs.0.is_multiple_of(2) { 0 } else { u32::MAX };
        let first = Region::new(page, 12).expect("a size that a ring may have");
        if page == 0 {
            use_pages(&mut self.mirror, 0, 12);
        }
        self.end.pair(mine, theirs, first);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Open(log2) => self.open(*log2),
            Op::Pair(n, theirs) => self.pair(*n, *theirs),
            Op::Write(n, bytes) => self.write(*n, (*bytes).into()),
            Op::Read(n, bytes) => self.read(*n, (*bytes).into()),
            Op::Grow(n, log2) => self.grow(*n, 12 + log2 % 4),
            Op::Lend(n, log2) => self.lend(*n, Some(12 + log2 % 4)),
            Op::TakeBack(n) => self.lend(*n, None),
            Op::EndSending(n, fin) => {
                let mark = if *fin {
                    ring::EndMark::Fin
                } else {
                    ring::EndMark::Demote
                };
                if let Some(s) = self.stream(*n)
                    && let Some(Ok(wake)) = s.producer.as_mut().map(|p| p.end(mark))
                {
                    self.notify(*n, wake);
                }
            }
            Op::Stop(n) => {
                if let Some(s) = self.stream(*n)
                    && let Ok(wake) = s.consumer.stop()
                {
                    s.stopped = true;
                    self.notify(*n, wake);
                    if let Some(theirs) = self.stream(*n).and_then(|s| s.theirs) {
                        self.end.touch(theirs);
                    }
                }
            }
            Op::Freeze(n, limit) => {
                if let Some(s) = self.stream(*n) {
                    s.consumer.freeze((*limit).into()).expect("the engine checks");
                }
            }
            Op::Shut(n) => {
                if let Some(s) = self.stream(*n) {
                    let wake = s.consumer.set_flags(RxFlags::RX_CLOSED);
                    self.notify(*n, wake);
                }
            }
            Op::Close(n) | Op::CloseUnanswered(n) => {
                if let Some(n) = usize::from(*n).checked_rem(self.streams.len()) {
                    let s = self.streams.swap_remove(n);
                    if matches!(op, Op::Close(_)) || s.theirs.is_some() {
                        self.end.close(s.mine, s.theirs, Some(s.consumer));
                    } else {
                        self.end.close_unanswered(s.mine, Some(s.consumer));
                    }
                }
            }
            Op::Unconfirmed(n) => {
                if let Some(theirs) = self.stream(*n).and_then(|s| s.theirs) {
                    let _ = self.end.unconfirmed(theirs);
                    let _ = self.end.confirmed(theirs);
                }
            }
            Op::Arm(n) => {
                let _ = self.end.arm();
                let bits = WaiterId(2).queue_bits();
                if let Some(s) = self.stream(*n) {
                    let armed = s.consumer.arm_data(bits).expect("the engine checks");
                    if let Some(p) = s.producer.as_mut() {
                        let _ = p.arm_space(bits);
                    }
                    self.notify(*n, armed.wake);
                }
            }
            Op::Touch(theirs) => self.end.touch(Vqpn(*theirs)),
            Op::Message => {
                let _ = self.end.send(&Message::OpenRefuse {
                    yours: Vqpn(1),
                    reason: Reason::Limit,
                });
            }
            Op::Sleep(waiter) => {
                if let Some(flag) = self.end.local().flag(WaiterId((*waiter).into())) {
                    flag.begin();
                }
            }
            Op::Drain(waiter) => {
                let waiter = WaiterId((*waiter).into());
                self.end.drain_ready(waiter, |_| {});
                let _ = self.end.has_ready(waiter);
            }
            Op::Settle => self.end.settle(),
            Op::Doubt => self.end.doubt(),
            Op::Tick(seconds) => {
                self.now += u64::from(*seconds) * 1_000_000_000;
                self.end.tick(self.now);
            }
            Op::Silent(is_silent) => self.end.qp().set_silent(*is_silent),
            Op::Full(is_full) => self.end.qp().set_full(*is_full),
            Op::Down => self.end.qp().cut(),
            Op::SetDown => {
                self.end.set_down();
            }
        }
    }

    fn hear(&mut self, said: &Said<'_>) {
        let event = said.event(&mut self.streams, &mut self.mirror, self.end.qp());
        self.end.qp().arrive(event);
    }

    /// Does the work of the service thread.
    fn look(&mut self) {
        let _ = self.end.progress();
        while let Some(message) = self.end.take_message() {
            assert_eq!(message.fds(), 0);
            if let Message::Closed { yours } = message {
                self.end.on_closed(yours);
            }
        }
    }

    fn notify(&mut self, n: u8, wake: Wake) {
        if let Some(theirs) = self.stream(n).and_then(|s| s.theirs) {
            self.end.notify(wake, theirs);
        }
    }

    fn write(&mut self, n: u8, bytes: usize) {
        let Some(s) = self.stream(n) else { return };
        let shared = s.shared;
        let Some(p) = s.producer.as_mut() else { return };
        let spans = match p.spans(bytes) {
            Ok(spans) => spans,
            Err(error) => {
                assert!(shared, "{error}");
                return;
            }
        };
        let data = vec![0x5a; bytes.min(spans.len())];
        // SAFETY: the data is readable, and does not overlap the ring.
        let copied = unsafe { spans.copy_in(0, data.as_ptr(), data.len()) };
        let wake = p.commit(copied);
        self.notify(n, wake);
    }

    fn read(&mut self, n: u8, bytes: usize) {
        let Some(s) = self.stream(n) else { return };
        let mut data = vec![0; bytes];
        let spans = s.consumer.spans(bytes).expect("the engine checks");
        // SAFETY: the data is writable, and does not overlap the ring.
        let copied = unsafe { spans.copy_out(0, data.as_mut_ptr(), data.len()) };
        let wake = s.consumer.consume(copied);
        let retired = s.consumer.take_retired().expect("the engine checks");
        if !s.stopped {
            s.consumer.end().expect("the engine checks");
        }
        if let Some(region) = retired {
            self.end.free(region);
        }
        self.notify(n, wake);
    }

    fn grow(&mut self, n: u8, log2: u8) {
        if self.stream(n).is_none_or(|s| s.consumer.is_switching()) {
            return;
        }
        if let Some(region) = self.end.allocate(log2)
            && let Some(s) = self.stream(n)
        {
            let wake = s.consumer.offer(region).expect("nothing is pending");
            s.offers += 1;
            use_pages(&mut self.mine, region.page(), region.log2());
            self.notify(n, wake);
        }
    }

    /// Lends a producer a send buffer; with `None` takes it back.
    fn lend(&mut self, n: u8, log2: Option<u8>) {
        let Some(n) = usize::from(n).checked_rem(self.streams.len()) else {
            return;
        };
        let s = &mut self.streams[n];
        if let (Some(theirs), Some(p), false) = (s.theirs, s.producer.as_mut(), s.shared) {
            match log2 {
                Some(log2) => self.end.lend(theirs, p, log2),
                None => self.end.take_back(theirs, p),
            };
        }
    }

    fn check(&mut self) {
        let failed = self.end.fault().is_some();
        for s in &mut self.streams {
            // The count is final once the link is down. It never decreases.
            if let Some(received) = self.end.received(s.mine) {
                assert!(received >= s.received);
                assert!(!self.failed || received == s.received, "applied after a fault");
                s.received = received;
            }
            let available = s.consumer.available().expect("the engine checks");
            assert!(s.consumer.position() + available <= s.received);
            if let Some(p) = s.producer.as_mut() {
                assert!(p.has_space().is_ok() || s.shared);
            }
        }
        if failed {
            self.failed = true;
            self.end.qp().forbid();
        }
    }

    /// Checks that only pages of offered rings were written to.
    fn check_memory(&self) {
        let sides = [(&self.mine, PAGES), (&self.mirror, PAGES + BUFFER_PAGES)];
        for (at, (used, pages)) in self.at.iter().zip(sides) {
            let data = DATA_OFFSET;
            let unused = (0..PAGES).filter(|n| !used[*n]).map(|n| data + n * PAGE);
            let behind = [data + pages * PAGE, data + pages * PAGE + PAGE];
            for page in unused.chain(behind) {
                // SAFETY: within the mapping, which the end keeps; no thread writes to it now.
                let bytes = unsafe { std::slice::from_raw_parts(at.add(page), PAGE) };
                // Compared as a whole, because the fuzzer tracks each comparison here.
                assert!(bytes == [0; PAGE], "page {page:#x} was written to");
            }
        }
    }
}

fn use_pages(pages: &mut [bool; PAGES], page: u32, log2: u8) {
    let Some(region) = Region::new(page, log2) else {
        return;
    };
    let pages = pages.iter_mut().skip(page as usize);
    pages.take(region.len() / PAGE).for_each(|p| *p = true);
}
