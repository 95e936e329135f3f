//! Direct transfers (see `direct`) with the registered allocator (`RDMASOCK_ALLOC=registered`), which keeps large
//! blocks registered with devices. Here are blocks whose memory is replaced between two calls, by all calls that can do
//! that, and blocks that come and go while other threads allocate. The scenarios of the other direct modules are played
//! with it too. A device goes on using the pages that were there at the registration.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use libc::c_int;

use super::direct::{FILL, Flow, LARGE, assert_filled};
use super::direct_memory::{CHANGES, Calls, Change, Place, transfer};
use super::{Mode, Scenario, direct, direct_memory, direct_more, direct_send, lent};
use crate::ctx::Ctx;
use crate::data::Rng;
use crate::sys;

/// A scenario.
type Run = fn(&Ctx);

const PAGE: usize = 4096;
/// `SHM_REMAP` of bits/shm.h.
const SHM_REMAP: c_int = 0o40000;

/// A change of the pages within a block.
#[derive(Clone, Copy, Debug)]
enum How {
    As(Change),
    /// Advice that may drop the pages, now or in a child.
    Advice(c_int),
    /// The pages are dropped by process_madvise(2), where the kernel does that.
    DropByProcess,
    /// A segment of System V is attached in their place.
    Segment,
}

const ALL: [How; CHANGES.len() + 5] = {
    let mut all = [How::Segment; CHANGES.len() + 5];
    let mut i = 0;
    while i < CHANGES.len() {
        all[i] = How::As(CHANGES[i]);
        i += 1;
    }
    all[i] = How::Advice(libc::MADV_FREE);
    all[i + 1] = How::Advice(libc::MADV_WIPEONFORK);
    all[i + 2] = How::Advice(libc::MADV_DONTFORK);
    all[i + 3] = How::DropByProcess;
    all
};

fn advise(place: &Place, advice: c_int, is_raw: bool) {
    let (at, len) = place.span();
    if is_raw {
        call!(libc::syscall(libc::SYS_madvise, at, len, i64::from(advice))).ok();
    } else {
        call!(libc::madvise(at.cast(), len, advice)).ok();
    }
}

unsafe extern "C" {
    fn process_madvise(process: c_int, places: *const libc::iovec, count: usize, advice: c_int, flags: u32) -> isize;
}

fn drop_by_process(place: &Place, is_raw: bool) {
    let me = call!(libc::syscall(
        libc::SYS_pidfd_open,
        i64::from(std::process::id()),
        0_i64
    ))
    .ok();
    let (at, len) = place.span();
    let places = libc::iovec {
        iov_base: at.cast(),
        iov_len: len,
    };
    // Before Linux 6.13 the call is refused.
    if is_raw {
        let (number, advice) = (libc::SYS_process_madvise, i64::from(libc::MADV_DONTNEED));
        call!(libc::syscall(number, i64::from(me), &places, 1_i64, advice, 0_i64));
    } else {
        call!(process_madvise(me, &places, 1, libc::MADV_DONTNEED, 0));
    }
    sys::close(me).ok();
}

/// Attaches a segment in the place. Returns another view of the segment.
fn attach(place: &Place, is_raw: bool) -> Place {
    let (at, len) = place.span();
    let id = call!(libc::shmget(libc::IPC_PRIVATE, len, libc::IPC_CREAT | 0o600)).ok();
    let there = if is_raw {
        call!(libc::syscall(libc::SYS_shmat, i64::from(id), at, i64::from(SHM_REMAP)))
    } else {
        call!(libc::shmat(id, at.cast(), SHM_REMAP))
    };
    assert_eq!(there.value as usize, at.addr(), "{there}");
    let seen = call!(libc::shmat(id, std::ptr::null(), 0));
    assert!(!seen.failed(), "{seen}");
    call!(libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut())).ok();
    Place::at(std::ptr::with_exposed_provenance_mut(seen.value as usize), len)
}

/// Allocates a block by malloc, which also owns its first page.
fn block(len: usize) -> &'static mut [u8] {
    // SAFETY: malloc returned `len` bytes, and no other reference leads there.
    unsafe {
        let at = libc::malloc(len).cast::<u8>();
        assert!(!at.is_null());
        at.write_bytes(FILL, len);
        std::slice::from_raw_parts_mut(at, len)
    }
}

fn free(block: &'static mut [u8]) {
    // SAFETY: the block comes from `block`, and is freed once.
    unsafe { libc::free(block.as_mut_ptr().cast()) };
}

/// Returns the pages within a block.
fn within(block: &[u8]) -> Place {
    let at = block.as_ptr().expose_provenance();
    let from = (at + PAGE).next_multiple_of(PAGE);
    // Half of the pages have to be whole pages too.
    let len = (at + block.len() - from) / (2 * PAGE) * (2 * PAGE);
    Place::at(std::ptr::with_exposed_provenance_mut(from), len)
}

/// Two transfers from each block, between which its pages are replaced.
pub fn changes(c: &Ctx) {
    // Without the allocator large blocks are mappings of their own, whose pages can be replaced.
    call!(libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10));
    let mut flow = Flow::begin(c);
    let mut lens = Rng::new(47);
    flow.play(|flow| {
        for n in 0..2 * ALL.len() {
            let (how, is_raw) = (ALL[n / 2], n % 2 == 1);
            let calls = Calls { is_raw };
            let block = block((LARGE >> lens.below(3)) - lens.below(5000) as usize);
            transfer(flow, block);
            block.fill(FILL);
            let mut place = within(block);
            let before = place.span();
            let elsewhere = match how {
                How::As(change) => place.change(change, calls),
                How::Advice(advice) => {
                    advise(&place, advice, is_raw);
                    None
                }
                How::DropByProcess => {
                    drop_by_process(&place, is_raw);
                    None
                }
                How::Segment => Some(attach(&place, is_raw)),
            };
            assert_eq!(
                place.span(),
                before,
                "{how:?}: other memory was to come to the same place"
            );
            // The compiler does not know that the memory has been replaced.
            let block = std::hint::black_box(block);
            transfer(flow, block);
            if let Some(mut other) = elsewhere {
                if matches!(how, How::As(Change::MoveAway)) {
                    assert_filled(other.bytes());
                } else {
                    assert!(
                        place.bytes() == other.bytes(),
                        "{how:?}: the other view has what the call has left"
                    );
                }
                let (at, len) = other.span();
                if matches!(how, How::Segment) {
                    call!(libc::shmdt(at.cast())).ok();
                } else {
                    calls.unmap(at, len);
                }
            }
            free(block);
        }
    });
    flow.end();
}

/// Blocks that come and go, here and in other threads, so that addresses and memory are used again, and returned to
/// the kernel.
pub fn others(c: &Ctx) {
    let mut flow = Flow::begin(c);
    let mut lens = Rng::new(53);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for seed in 0..2 {
            let is_over = &is_over;
            scope.spawn(move || churn(seed, is_over));
        }
        flow.play(|flow| {
            for _ in 0..160 {
                let block = block((LARGE >> lens.below(4)) - lens.below(5000) as usize);
                transfer(flow, block);
                free(block);
            }
        });
        is_over.store(true, SeqCst);
    });
    flow.end();
}

/// Blocks at the same place, whose memory returns to the kernel between them.
pub fn given_back(c: &Ctx) {
    /// More bytes than the allocator keeps of free memory.
    const MUCH: usize = 300 << 20;
    let mut flow = Flow::begin(c);
    flow.play(|flow| {
        for _ in 0..60 {
            // No byte is written there, so the block takes next to no memory.
            // SAFETY: the pointer is not followed.
            let before = std::hint::black_box(unsafe { libc::malloc(MUCH) });
            // These blocks lie behind it, where arenas return memory first; other threads fill the free memory in
            // front.
            let mut blocks: Vec<_> = (0..8).map(|_| block(LARGE)).collect();
            blocks.sort_by_key(|block| block.as_ptr());
            blocks.last_mut().into_iter().for_each(|block| transfer(flow, block));
            blocks.into_iter().for_each(free);
            // SAFETY: allocated above, and freed once.
            unsafe { libc::free(before) };
        }
    });
    flow.end();
}

/// Allocates, and checks that no other code changes its blocks.
fn churn(seed: u64, is_over: &AtomicBool) {
    let mut rng = Rng::new(59 + seed);
    let mut held: Vec<(Vec<u8>, u8)> = Vec::new();
    let mark = |block: &mut [u8], tag: u8| block.iter_mut().step_by(PAGE / 2).for_each(|byte| *byte = tag);
    while !is_over.load(SeqCst) {
        let len = (64 << 10) + rng.below(6 << 20) as usize;
        let tag = rng.below(256) as u8;
        let mut block = vec![0; len];
        assert!(
            block.iter().step_by(PAGE / 4).all(|byte| *byte == 0),
            "calloc gives zeroes"
        );
        mark(&mut block, tag);
        held.push((block, tag));
        // Now and then many blocks are freed at once, so that free memory returns to the kernel.
        if held.len() > 60 {
            held.clear();
        }
        if !held.is_empty() && rng.below(8) == 0 {
            let (mut block, tag) = held.swap_remove(rng.below(held.len() as u64) as usize);
            let is_mine = |block: &[u8]| block.iter().step_by(PAGE / 2).all(|byte| *byte == tag);
            assert!(is_mine(&block), "somebody else's block is here too");
            block.reserve_exact(rng.below(2 << 20) as usize);
            assert!(is_mine(&block), "what was moved is another");
        }
    }
}

/// Adds the scenarios of this module, and those of others that are played with the allocator too.
pub fn add_to(all: &mut Vec<Scenario>) {
    let played: [(&str, Run, bool); 15] = [
        ("changes", changes, true),
        ("others", others, true),
        ("given_back", given_back, true),
        ("heap", direct_memory::heap, true),
        ("same_place", direct_memory::same_place, true),
        ("sizes", direct::sizes, false),
        ("vectors", direct::vectors, false),
        ("times_out", direct_send::times_out, false),
        ("interrupted", direct_send::interrupted, false),
        ("interrupted_often", direct_more::interrupted_often, false),
        ("cancel", direct_more::cancel, false),
        ("unmapped", direct_more::unmapped, false),
        ("forks", direct_more::forks, false),
        ("both_first", direct_send::both_first, false),
        ("lent_forks", lent::forks, false),
    ];
    for (name, run, has_pins) in played {
        let mut scenario = Scenario::new(&format!("direct_alloc_{name}"), run, true);
        scenario.modes = &[Mode::Kernel, Mode::Both];
        scenario.device = if has_pins { "pins" } else { "" };
        all.push(scenario.with_env("RDMASOCK_ALLOC", "registered"));
    }
}
