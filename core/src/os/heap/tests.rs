//! Tests of the allocator: no two live blocks overlap, even if threads, signal handlers or forks interrupt it.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};

use proptest::prelude::*;

use crate::os::forked::in_child;
use crate::os::heap::*;

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// A block whose bytes all hold its owner's tag, from its allocation until it is freed.
struct Owned<'a> {
    heap: &'a Heap,
    at: *mut u8,
    layout: Layout,
    tag: u8,
}

impl<'a> Owned<'a> {
    fn new(heap: &'a Heap, layout: Layout, tag: u8) -> Self {
        // SAFETY: the layout is not empty.
        let at = unsafe { heap.alloc(layout) };
        assert!(!at.is_null());
        assert_eq!(at as usize % layout.align(), 0);
        // SAFETY: the block has that size.
        unsafe { at.write_bytes(tag, layout.size()) };
        Self { heap, at, layout, tag }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the block has that size, and was written.
        unsafe { std::slice::from_raw_parts(self.at, self.layout.size()) }
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        assert!(self.bytes().iter().all(|b| *b == self.tag));
        // SAFETY: allocated with this layout.
        unsafe { self.heap.dealloc(self.at, self.layout) };
    }
}

#[test]
fn every_layout_is_served_at_its_alignment_with_little_waste() {
    let mut seen = HashSet::new();
    for align in (0..=12).map(|bit| 1 << bit) {
        for size in 1..=LARGE {
            let Some(class) = Class::of(layout(size, align)) else {
                panic!("{size} {align}");
            };
            assert!(class.size >= size && class.alignment() >= align);
            assert!(class.size <= (2 * size).max(align).max(16));
            seen.insert((class.index, class.size));
        }
    }
    // Each index has one size.
    assert_eq!(seen.len(), SIZES);
    let indices: HashSet<_> = seen.iter().map(|(index, _)| *index).collect();
    assert_eq!(indices, (0..SIZES).collect());
    assert_eq!(Class::of(layout(LARGE + 1, 1)), None);
}

proptest! {
    #[test]
    fn blocks_keep_what_is_in_them(
        steps in proptest::collection::vec((0usize..3, 1usize..100_000, 0u32..8, 0usize..64), 1..300)
    ) {
        let heap = Heap::new();
        let mut live: Vec<Owned<'_>> = Vec::new();
        for (i, (what, size, align, which)) in steps.into_iter().enumerate() {
            // Makes most sizes small.
            let size = if size < 90_000 { size % 700 + 1 } else { size };
            match what {
                0 if !live.is_empty() => drop(live.swap_remove(which % live.len())),
                1 if !live.is_empty() => {
                    let at = which % live.len();
                    let owned = &mut live[at];
                    // SAFETY: allocated with this layout; the new size is not 0.
                    let moved = unsafe { heap.realloc(owned.at, owned.layout, size) };
                    prop_assert!(!moved.is_null());
                    let kept = owned.layout.size().min(size);
                    owned.at = moved;
                    owned.layout = layout(size, owned.layout.align());
                    prop_assert!(owned.bytes()[..kept].iter().all(|b| *b == owned.tag));
                    // SAFETY: the block has that size.
                    unsafe { moved.write_bytes(owned.tag, size) };
                }
                _ => live.push(Owned::new(&heap, layout(size, 1 << align), i as u8)),
            }
        }
    }
}

#[test]
fn zeroed_memory_is_zero_also_the_second_time() {
    let heap = Heap::new();
    for size in [1, 24, 100, LARGE, LARGE + 1] {
        let layout = layout(size, 8);
        drop(Owned::new(&heap, layout, 0xff));
        // SAFETY: not empty; freed with the layout that it was allocated with.
        unsafe {
            let at = heap.alloc_zeroed(layout);
            assert!(std::slice::from_raw_parts(at, size).iter().all(|b| *b == 0));
            heap.dealloc(at, layout);
        }
    }
}

#[test]
fn memory_is_used_again() {
    let heap = Heap::new();
    let begin = heap.rest.load();
    for round in 0..10_000usize {
        drop(Owned::new(&heap, layout(1000, 8), round as u8));
    }
    let used = heap.rest.load();
    assert_eq!(begin.first, 0);
    assert_eq!(used.second - used.first, PIECE - 1024);
}

static HEAP: Heap = Heap::new();

/// Allocates and frees some blocks of two sizes, so that all threads use the same stacks.
fn churn(seed: u64) {
    const SEVERAL: usize = 8;
    let mut live: [Option<Owned<'static>>; SEVERAL] = [const { None }; SEVERAL];
    let mut state = seed | 1;
    for _ in 0..64 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = (state >> 33) as usize % SEVERAL;
        live[at] = match live[at].take() {
            Some(_) => None,
            None => Some(Owned::new(&HEAP, layout(24 << (state >> 40 & 1), 8), state as u8)),
        };
    }
}

thread_local! {
    static IN_HANDLER: Cell<u64> = const { Cell::new(1) };
}

extern "C" fn in_handler(_: libc::c_int) {
    IN_HANDLER.with(|n| {
        n.set(n.get() + 1);
        churn(n.get());
    });
}

#[test]
fn threads_handlers_above_them_and_forked_children_share_it() {
    static STOP: AtomicBool = AtomicBool::new(false);
    static ROUNDS: AtomicU64 = AtomicU64::new(0);
    in_child(|| {
        // SAFETY: plain structs, and a handler that only allocates, for the life of this child.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = in_handler as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
            let every = libc::timeval {
                tv_sec: 0,
                tv_usec: 200,
            };
            let timer = libc::itimerval {
                it_interval: every,
                it_value: every,
            };
            libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut());
        }
        std::thread::scope(|s| {
            for thread in 0..3u64 {
                s.spawn(move || {
                    while !STOP.load(SeqCst) {
                        churn(thread + ROUNDS.fetch_add(1, SeqCst));
                    }
                });
            }
            for child in 0..200u64 {
                in_child(|| (0..50).for_each(|i| churn(child + i)));
            }
            STOP.store(true, SeqCst);
        });
        let none = libc::itimerval {
            it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
            it_value: libc::timeval { tv_sec: 0, tv_usec: 0 },
        };
        // SAFETY: disarms the timer.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &none, std::ptr::null_mut()) };
        assert!(ROUNDS.load(SeqCst) > 0);
    });
}
