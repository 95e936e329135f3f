//! Shared memory that a hostile peer writes to at any time: the words of a direction block under both cursors, an
//! arena's header, a ready queue. The code never accesses memory outside the ring, never loops without end, and never
//! overflows.
#![no_main]

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use libfuzzer_sys::arbitrary::Arbitrary;
use libfuzzer_sys::{arbitrary, fuzz_target};
use rdmasock_core::fabric::layout::{GROUPS, Layout, MAX_STREAMS, Region};
use rdmasock_core::fabric::ready::{ReadyCursor, ReadyLine, ReadyQueue};
use rdmasock_core::fabric::ring::{Consumer, DataArea, DirectionBlock, EndMark, Producer, RxFlags, Spans};

const AREA: usize = 8 * 1024;
const GUARD: usize = 4096;
const FILL: u8 = 0xa5;

#[derive(Arbitrary, Debug)]
enum Input {
    Block(Vec<Op>),
    Length(u64),
    Ready(Vec<(u16, u64)>, Vec<u32>),
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Word {
    Tail,
    End,
    WantSpace,
    Limited,
    Generation,
    SwitchPos,
    ReservePos,
    Head,
    WantData,
    Flags,
    Offer,
    Reserve,
    Consumed,
}

#[derive(Arbitrary, Debug)]
enum Value {
    Any(u64),
    /// The current value plus this number.
    Near(i16),
    /// An offer of a ring.
    Ring {
        generation: u8,
        log2: u8,
        page: u8,
    },
}

/// An operation of the peer (`Set`) or of this end.
#[derive(Arbitrary, Debug)]
enum Op {
    Set(Word, Value),
    Send(u16),
    SendQuietly(u16),
    EndSending(bool),
    Adopt,
    Bound(u16),
    TakeReserve,
    ArmSpace,
    Unread,
    Rest(u16),
    Receive(u16),
    Peek(u16, u16),
    Offer(u8, u8),
    OfferReserve(u8, u8),
    TakeRetired,
    ArmData,
    Publish,
    Stop,
    Freeze(u16),
    Flags,
}

fuzz_target!(|input: Input| match input {
    Input::Block(ops) => block(&ops),
    Input::Length(length) => {
        if let Some(layout) = Layout::of_file(length) {
            assert_eq!(layout.file_len(), length);
        }
    }
    Input::Ready(words, streams) => ready(&words, &streams),
});

/// A direction block as the peer sees it: plain words.
#[repr(C, align(128))]
struct Shared([AtomicU64; size_of::<DirectionBlock>() / 8]);

impl Shared {
    fn set(&self, word: Word, value: &Value) {
        let (at, is_wide) = match word {
            Word::Tail => (0, true),
            Word::End => (8, false),
            Word::WantSpace => (12, false),
            Word::Limited => (16, false),
            Word::Generation => (20, false),
            Word::SwitchPos => (24, true),
            Word::ReservePos => (40, true),
            Word::Head => (64, true),
            Word::WantData => (72, false),
            Word::Flags => (76, false),
            Word::Offer => (80, true),
            Word::Reserve => (88, true),
            Word::Consumed => (128, true),
        };
        let new = |old: u64| match *value {
            Value::Any(value) => value,
            Value::Near(by) => old.wrapping_add_signed(by.into()),
            Value::Ring { generation, log2, page } => {
                u64::from(generation % 8) << 40 | u64::from(11 + log2 % 4) << 32 | u64::from(page % 3)
            }
        };
        let place = self.0.as_ptr().cast::<u8>().wrapping_add(at);
        if is_wide {
            // SAFETY: an aligned word of the block, which consists of atomics.
            let word = unsafe { AtomicU64::from_ptr(place.cast_mut().cast()) };
            word.store(new(word.load(Relaxed)), Relaxed);
        } else {
            // SAFETY: as above.
            let word = unsafe { AtomicU32::from_ptr(place.cast_mut().cast()) };
            word.store(new(word.load(Relaxed).into()) as u32, Relaxed);
        }
    }
}

fn block(ops: &[Op]) {
    let shared = Box::new(Shared(std::array::from_fn(|_| AtomicU64::new(0))));
    let memory: Vec<AtomicU64> = (0..(AREA + 2 * GUARD) / 8)
        .map(|_| AtomicU64::new(u64::from_ne_bytes([FILL; 8])))
        .collect();
    let base = memory.as_ptr().cast::<u8>().cast_mut().wrapping_add(GUARD);
    let at = NonNull::from(&*shared).cast();
    // SAFETY: within `memory`, which outlives the cursors and is interior-mutable.
    let area = unsafe { DataArea::new(base, AREA) };
    // SAFETY: the block outlives the cursors, of which there is one of each kind.
    let (mut p, mut c) = unsafe { (Producer::new(at, area), Consumer::new(at, area)) };
    let _ = c.offer(Region::new(0, 12).expect("a ring"));
    let range = base as usize..base as usize + AREA;
    let inside = |spans: &Spans<'_>| {
        let pieces = spans.pieces();
        assert!(
            pieces
                .iter()
                .all(|(at, n)| { *n == 0 || range.contains(&(*at as usize)) && *at as usize + n <= range.end })
        );
        spans.len()
    };
    let mut buf = vec![0u8; 1 << 16];
    for op in ops {
        match op {
            Op::Set(word, value) => shared.set(*word, value),
            Op::Send(n) | Op::SendQuietly(n) => {
                let n = usize::from(*n);
                if let Ok(spans) = p.spans(n) {
                    let n = n.min(inside(&spans));
                    // SAFETY: the buffer is readable, and does not overlap the ring.
                    let copied = unsafe { spans.copy_in(0, buf.as_ptr(), n) };
                    assert_eq!(copied, n);
                    if matches!(op, Op::Send(_)) {
                        let _ = p.commit(n);
                    } else {
                        p.commit_quietly(n);
                        let _ = p.wake();
                    }
                }
            }
            Op::EndSending(fin) => {
                let _ = p.end(if *fin { EndMark::Fin } else { EndMark::Demote });
            }
            Op::Adopt => {
                let _ = p.adopt();
            }
            Op::Bound(bytes) => p.set_bound((*bytes).into()),
            Op::TakeReserve => {
                let _ = p.make_room(|_| true);
            }
            Op::ArmSpace => {
                let _ = p.arm_space(1);
                p.disarm_space(1);
            }
            // The content of two rings is the most that is returned.
            Op::Unread => assert!(p.unread().map_or(true, |b| b.len() <= 2 * AREA)),
            Op::Rest(back) => {
                let from = p.position().saturating_sub((*back).into());
                assert!(p.rest(from).map_or(true, |b| b.len() <= 2 * AREA));
            }
            Op::Receive(n) => {
                let n = usize::from(*n);
                if let Ok(spans) = c.spans(n) {
                    let n = n.min(inside(&spans));
                    // SAFETY: the buffer is writable, and does not overlap the ring.
                    let copied = unsafe { spans.copy_out(0, buf.as_mut_ptr(), n) };
                    assert_eq!(copied, n);
                    let _ = c.consume(n);
                }
            }
            Op::Peek(skip, n) => {
                if let Ok(spans) = c.peek((*skip).into(), (*n).into()) {
                    inside(&spans);
                }
            }
            Op::Offer(page, log2) => {
                if let Some(region) = Region::new(u32::from(page % 3), 11 + log2 % 4) {
                    let _ = c.offer(region);
                }
            }
            Op::OfferReserve(page, log2) => {
                if let Some(region) = Region::new(u32::from(page % 3), 11 + log2 % 4) {
                    let _ = c.offer_reserve(region);
                }
            }
            Op::TakeRetired => {
                let _ = c.take_retired();
            }
            Op::ArmData => {
                let _ = c.arm_data(1);
                c.disarm_data(1);
            }
            Op::Publish => {
                let _ = c.publish();
            }
            Op::Stop => {
                let _ = c.stop();
            }
            Op::Freeze(limit) => {
                let position = c.position();
                if let Ok(reached) = c.freeze((*limit).into()) {
                    assert!(reached >= position);
                }
            }
            Op::Flags => {
                let _ = (c.set_flags(RxFlags::RX_CLOSED), p.consumer_flags());
            }
        }
        let _ = (p.has_space(), p.used(), p.free(), p.is_unread());
        let _ = (c.has_data(), c.available(), c.end(), c.heed_limit());
    }
    let guards = memory[..GUARD / 8].iter().chain(&memory[(GUARD + AREA) / 8..]);
    let fill = u64::from_ne_bytes([FILL; 8]);
    let changed = guards.fold(0, |changed, word| changed | (word.load(Relaxed) ^ fill));
    assert_eq!(changed, 0, "written outside the area");
}

/// Checks that a sweep ends and returns only valid stream numbers, for any bits in the lines.
fn ready(words: &[(u16, u64)], streams: &[u32]) {
    let lines: Box<[ReadyLine]> = (0..GROUPS).map(|_| ReadyLine::default()).collect();
    let queue = Lines(&lines);
    let all = size_of_val(&*lines) / 8;
    let mut cursor = ReadyCursor::default();
    for stream in streams {
        queue.push(*stream);
    }
    for (at, value) in words {
        let place = lines.as_ptr().cast::<u64>().cast_mut();
        let place = place.wrapping_add(usize::from(*at) % all);
        // SAFETY: an aligned word of a line, which consists of atomics: lines have no padding.
        unsafe { AtomicU64::from_ptr(place) }.store(*value, Relaxed);
        cursor.begin(&queue);
        // The sweep stops early, so that sweeps and changes mix.
        for _ in 0..at % 80 {
            if cursor.pop(&queue).is_some_and(|n| n >= MAX_STREAMS) {
                panic!("no stream has that number");
            }
        }
    }
    cursor.begin(&queue);
    let mut count = 0;
    while let Some(number) = cursor.pop(&queue) {
        assert!(number < MAX_STREAMS);
        count += 1;
        assert!(count <= 2 * MAX_STREAMS);
    }
}

/// A ready queue whose lines lie side by side.
struct Lines<'a>(&'a [ReadyLine]);

impl ReadyQueue for Lines<'_> {
    fn line(&self, group: usize) -> Option<&ReadyLine> {
        self.0.get(group)
    }
}
