//! The library's own memory: an allocator that never enters the program's `malloc`.
//!
//! Hooks run at any instruction of the program: in a signal handler that has interrupted `malloc` or this allocator, in
//! a child that was forked while another thread was in the middle of either, and inside a `malloc` that the program
//! brings along. So this allocator has no locks, and no operation leaves a half-done state:
//!
//! - A small request is rounded up to one of `SIZES` sizes. The free blocks of a size form a stack, and one
//!   compare-and-swap of 16 bytes pushes or pops a block. The 16 bytes are the address of the top block and a count of
//!   the stack's changes. A thread may be interrupted between its load and its swap. If the stack changes in between,
//!   the swap finds another count and fails, even if the same block is on top again (Treiber, "Systems programming:
//!   coping with parallelism", 1986; the count is IBM's).
//! - If no block of the size is free, one such swap cuts a new block from a piece of memory that is mapped for small
//!   requests.
//! - A large request gets a mapping of its own, which is unmapped when the block is freed.
//! - If the kernel refuses a mapping (RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory=2, vm.max_map_count), memory comes
//!   from a reserve of 1 MiB.
//!
//! The reserve lets the allocations between two calls of [`can_serve`] succeed. Code calls `can_serve` before it begins
//! something that needs memory for longer than a call: a socket's object, a promotion, a link, a channel. If that
//! returns `false`, the connection stays on TCP. So the reserve has to cover only the operations in progress when the
//! kernel refuses for the first time. These are some KiB for each thread of the program, and one link at most, since
//! one thread makes the links. Buffers that can be longer than 512 KiB are allocated by `try_reserve`. If that fails,
//! the call that needs the buffer fails.
//!
//! Memory for small requests is never unmapped, so a thread may still read a block that another thread has popped. A
//! fork child loses the blocks that threads of its parent were pushing or popping at the fork: at most one for each
//! thread. Between an allocation and its use the allocator holds no reference to the block, so a `longjmp` loses that
//! block alone.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap, munlock, munmap};

/// The greatest size of a block, in bytes. A longer request is a mapping of its own.
const LARGE: usize = 32 * 1024;
/// The number of block sizes: 16, 24, 32, 48, 64, 96 … bytes up to 32 KiB.
const SIZES: usize = 23;
/// The bytes that are mapped at a time for small requests. Fewer in the tests that refuse one mapping after the other
/// (feature `points`), so that they have more mappings to refuse.
const PIECE: usize = if cfg!(feature = "points") { LARGE } else { 128 * 1024 };
const PAGE: usize = 4096;
/// The bytes of the reserve, for when the kernel refuses a mapping: 8 pieces. Each piece serves the calls of some 20
/// threads.
const RESERVE: usize = 1 << 20;
/// The longest request that the reserve serves, in bytes: half of the reserve, so that one growing table leaves the
/// other half.
const MOST: usize = 1 << 19;

/// The start and the end of the unused part of the reserve. All heaps share it.
static KEPT: Pair = Pair::new();

/// The memory of the first reserve, which serves until `renew` maps another. So the library can start in a program that
/// has no memory left.
#[repr(C, align(4096))]
struct First(UnsafeCell<[u8; 2 * PIECE]>);

// SAFETY: `obtain` divides the bytes into ranges of pages, and returns each range to one caller.
unsafe impl Sync for First {}

static FIRST: First = First(UnsafeCell::new([0; 2 * PIECE]));

/// Returns whether the reserve is whole; maps a new reserve if it is not. Returns `false` if the kernel refuses that
/// mapping: then no operation that needs memory may begin.
#[inline]
pub fn can_serve() -> bool {
    let kept = KEPT.load();
    kept.second.wrapping_sub(kept.first) == RESERVE || renew(kept)
}

#[cold]
fn renew(kept: Two) -> bool {
    let fresh = map(RESERVE);
    if fresh.is_null() {
        return false;
    }
    // In a program that locks its memory the new mapping is locked too. The reserve need not stay locked.
    // SAFETY: exactly the new mapping.
    let _ = unsafe { munlock(fresh.cast(), RESERVE) };
    let whole = Two::range(fresh, RESERVE);
    match KEPT.swap(kept, whole) {
        // Unmaps the remainder of the old reserve. A thread that was about to cut from it finds that the pair has
        // changed.
        Ok(()) if kept.first < kept.second => unmap(kept.first as *mut u8, kept.second - kept.first),
        Ok(()) => {}
        Err(_) => unmap(fresh, RESERVE),
    }
    true
}

/// Returns a mapping of `size` bytes, or whole pages of the reserve, which can be unmapped as a mapping can. If the
/// kernel refuses the mapping, and the reserve has too few bytes left or `size` is more than `MOST`, returns null.
fn obtain(size: usize) -> *mut u8 {
    let fresh = map(size);
    if !fresh.is_null() || size > MOST {
        return fresh;
    }
    let mut kept = KEPT.load();
    loop {
        let now = match kept.first {
            0 => Two::range(FIRST.0.get().cast(), 2 * PIECE),
            _ => kept,
        };
        let end = now.first + size.next_multiple_of(PAGE);
        if end > now.second {
            return null_mut();
        }
        match KEPT.swap(kept, Two { first: end, ..now }) {
            Ok(()) => return now.first as *mut u8,
            Err(now) => kept = now,
        }
    }
}

/// A lock-free allocator; the module's description says how it works. The preloaded library has one as its
/// `#[global_allocator]`.
pub struct Heap {
    free: [Pair; SIZES],
    /// The start and the end of the unused part of the piece from which blocks are cut.
    rest: Pair,
}

impl Heap {
    /// Returns a heap without memory.
    pub const fn new() -> Self {
        Self {
            free: [const { Pair::new() }; SIZES],
            rest: Pair::new(),
        }
    }

    fn take(&self, class: Class) -> *mut u8 {
        let Some(free) = self.free.get(class.index) else {
            return null_mut();
        };
        let mut seen = free.load();
        while seen.first != 0 {
            // Another thread may have popped the block since the load, and may be writing to it. Then the count has
            // changed, the swap fails, and the word that is read here is not used.
            // SAFETY: a block that was on a stack stays mapped, and is aligned for a word.
            let next = unsafe { &*(seen.first as *const AtomicUsize) }.load(Relaxed);
            match free.swap(seen, seen.followed_by(next)) {
                Ok(()) => return seen.first as *mut u8,
                Err(now) => seen = now,
            }
        }
        self.cut(class)
    }

    fn put(&self, class: Class, block: *mut u8) {
        let Some(free) = self.free.get(class.index) else {
            return;
        };
        // SAFETY: the caller owns the block until it is on the stack; it is aligned for a word.
        let next = unsafe { &*block.cast::<AtomicUsize>() };
        let mut seen = free.load();
        loop {
            next.store(seen.first, Relaxed);
            match free.swap(seen, seen.followed_by(block as usize)) {
                Ok(()) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Returns a block that was never used, cut from the current piece or from a new one; null if there is no memory.
    fn cut(&self, class: Class) -> *mut u8 {
        let mut seen = self.rest.load();
        loop {
            let at = seen.first.next_multiple_of(class.alignment());
            let end = at + class.size;
            if end <= seen.second {
                let cut = Two { first: end, ..seen };
                match self.rest.swap(seen, cut) {
                    Ok(()) => return at as *mut u8,
                    Err(now) => seen = now,
                }
                continue;
            }
            let fresh = obtain(PIECE);
            if fresh.is_null() {
                return null_mut();
            }
            let piece = Two::range(fresh, PIECE);
            // The remainder of the old piece is lost. A piece that this pair has held is never unmapped, so no later
            // piece has its addresses, and no value of the pair is ever repeated.
            match self.rest.swap(seen, piece) {
                Ok(()) => seen = piece,
                Err(now) => {
                    unmap(fresh, PIECE);
                    seen = now;
                }
            }
        }
    }
}

impl Default for Heap {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: a block belongs to one caller at a time. The thread that pops a block, or cuts it, has succeeded in a
// compare-and-swap, and no other thread can succeed with the same count or the same start. The block has the size and
// the alignment of its class, which are not less than the layout's; or it is a mapping of its own. No function unwinds.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match Class::of(layout) {
            Some(class) => self.take(class),
            None if layout.align() <= PAGE => obtain(layout.size()),
            None => null_mut(),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match Class::of(layout) {
            Some(class) => self.put(class, block),
            None => unmap(block, layout.size()),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by this function's contract.
        let block = unsafe { self.alloc(layout) };
        // The kernel has zeroed a new mapping already.
        if Class::of(layout).is_some() && !block.is_null() {
            // SAFETY: the block has the layout's size.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees that the new size makes a valid layout.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (Class::of(layout), Class::of(new)) {
            (Some(old), Some(new)) if old == new => return block,
            (None, None) => {
                // SAFETY: both layouts are too large for a class, so the block is a mapping of that length, which the
                // caller owns.
                let moved = unsafe {
                    let old = layout.size().next_multiple_of(PAGE);
                    mremap(block.cast(), old, size, MremapFlags::MAYMOVE)
                };
                if let Ok(moved) = moved {
                    return moved.cast();
                }
            }
            _ => {}
        }
        // SAFETY: the caller owns both blocks, and each is at least as long as the shorter of the two layouts.
        unsafe {
            let moved = self.alloc(new);
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(block, layout.size().min(size));
                self.dealloc(block, layout);
            }
            moved
        }
    }
}

/// A block size and the index of its stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Class {
    index: usize,
    size: usize,
}

impl Class {
    /// Returns the smallest class that fits the layout; `None` if the request is a mapping of its own.
    fn of(layout: Layout) -> Option<Self> {
        let (size, align) = (layout.size(), layout.align());
        if size > LARGE || align > PAGE {
            return None;
        }
        let whole = size.max(align).max(16).next_power_of_two();
        let index = 2 * (whole.trailing_zeros() as usize - 4);
        let less = whole / 4 * 3;
        // Blocks of 24 bytes are aligned to 8, and blocks of 48 bytes to 16.
        if size <= less && align <= less / 3 && whole > 16 {
            return Some(Self {
                index: index - 1,
                size: less,
            });
        }
        Some(Self { index, size: whole })
    }

    fn alignment(self) -> usize {
        (1 << self.size.trailing_zeros()).min(PAGE)
    }
}

fn map(size: usize) -> *mut u8 {
    #[cfg(feature = "points")]
    if refused::is_next() {
        return null_mut();
    }
    // SAFETY: a new private mapping at an address that the kernel chooses replaces no other.
    let mapped = unsafe { mmap_anonymous(null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
    mapped.map_or(null_mut(), |at| at.cast())
}

fn unmap(at: *mut u8, size: usize) {
    // SAFETY: the range is a mapping of this allocator, which no thread uses any more.
    let _ = unsafe { munmap(at.cast(), size) };
}

/// Two words that change together.
#[repr(C, align(16))]
struct Pair {
    first: AtomicUsize,
    second: AtomicUsize,
}

/// The values of the two words. They are of one point in time if a swap that expects them succeeds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Two {
    first: usize,
    second: usize,
}

impl Two {
    /// Returns the start and the end of the `size` bytes at `start`.
    fn range(start: *mut u8, size: usize) -> Self {
        let first = start as usize;
        Self {
            first,
            second: first + size,
        }
    }

    /// Returns the next state of a stack: the new top, and the count of changes increased by one.
    fn followed_by(self, top: usize) -> Self {
        Self {
            first: top,
            second: self.second.wrapping_add(1),
        }
    }
}

impl Pair {
    const fn new() -> Self {
        Self {
            first: AtomicUsize::new(0),
            second: AtomicUsize::new(0),
        }
    }

    /// Returns the two words, which need not be of one point in time. A swap fails if it expects two words that the
    /// pair does not hold together. `second`, a stack's count of changes, is loaded first. If a swap then finds the
    /// same count, the stack has not changed since that load. So the top, and the word that was read through the top,
    /// belong to that count.
    fn load(&self) -> Two {
        // Both loads are Acquire: they pair with `swap`, which is a full barrier.
        let second = self.second.load(Acquire);
        let first = self.first.load(Acquire);
        Two { first, second }
    }

    /// Replaces `old` by `new`. On failure, returns the value that it found instead. `core::arch`'s function for this
    /// is not used, since it becomes a call of libatomic unless the compiler may assume the instruction. Every x86-64
    /// processor since 2006 has the instruction.
    fn swap(&self, old: Two, new: Two) -> Result<(), Two> {
        let (mut first, mut second) = (old.first, old.second);
        // SAFETY: the pair has 16 bytes, aligned to 16, which only atomic instructions access. The compiler does not
        // accept rbx as an operand, so the code saves rbx in `low` and restores it. `low` may be rbx itself.
        unsafe {
            core::arch::asm!(
                "xchg {low}, rbx",
                "lock cmpxchg16b [rdi]",
                "mov rbx, {low}",
                in("rdi") core::ptr::from_ref(self),
                low = inout(reg) new.first => _,
                in("rcx") new.second,
                inout("rax") first,
                inout("rdx") second,
                options(nostack),
            );
        }
        let found = Two { first, second };
        if found == old { Ok(()) } else { Err(found) }
    }
}

/// Mappings that a test makes fail (`tests/tests/no_memory.rs`). The environment variable `HEAP_REFUSES` is the number
/// of the mapping that fails, counted from 1. If a plus follows the number, all later mappings fail too.
#[cfg(feature = "points")]
mod refused {
    use core::ffi::CStr;
    use core::sync::atomic::AtomicUsize;
    use core::sync::atomic::Ordering::Relaxed;

    pub(crate) fn is_next() -> bool {
        static MAPPINGS: AtomicUsize = AtomicUsize::new(0);
        let this = MAPPINGS.fetch_add(1, Relaxed) + 1;
        // SAFETY: the name is terminated. The result is null, or a terminated text that lives until the environment is
        // changed.
        let value = unsafe {
            let value = libc::getenv(c"HEAP_REFUSES".as_ptr());
            if value.is_null() { c"" } else { CStr::from_ptr(value) }
        };
        let text = value.to_str().unwrap_or_default();
        let first = text.trim_end_matches('+').parse().unwrap_or(usize::MAX);
        this == first || this > first && text.ends_with('+')
    }
}

#[cfg(test)]
mod tests;
