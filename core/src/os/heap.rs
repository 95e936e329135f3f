//! The library's own memory: an allocator that never enters the program's `malloc`.
//!
//! Hooks run at any instruction of the program: in a signal handler above `malloc` or above this allocator itself, in a
//! child forked by another thread in the middle of either, inside the program's own `malloc` that is not glibc's. So
//! nothing here is locked, and nothing is left half done:
//!
//! - A small request is rounded up to one of some sizes. What is free of a size is a stack in which one
//!   compare-and-swap of 16 bytes puts or takes a block: its top and a count of all changes, which tells whoever was
//!   interrupted between the look and the swap that others were there meanwhile, even if the same block is on
//!   top again (Treiber, "Systems programming: coping with parallelism", 1986; the count is IBM's).
//! - What no free block serves is cut from a piece of memory that is mapped for it, again by one such swap.
//! - A large request is a mapping of its own, and is unmapped when it is freed.
//! - Where the kernel refuses a mapping (RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory=2, vm.max_map_count), memory
//!   comes from a reserve of 1 MiB.
//!
//! No allocation fails between two looks at the reserve. Whatever begins something that needs memory for longer than a
//! call (a socket's object, a promotion, a link, a channel) asks [`can_serve`] first, and the connection stays on TCP
//! unless that is true. So the reserve has to cover only what is under way when the kernel refuses for the first time:
//! some KiB for each thread of the program, and one link at most, since one thread makes them. What can be longer than
//! 512 KiB is reserved by `try_reserve`, and its failure is the call's.
//!
//! Memory for small requests is never unmapped, so a block may be read by whoever has looked at it too late. What a
//! thread of the parent was about to put or take at fork is lost to the child, a block at most. Between an
//! allocation and its use nothing refers to the allocator, so a `longjmp` loses the block alone.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed},
};

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap, munlock, munmap};

/// From here on a request is a mapping of its own, bytes.
const LARGE: usize = 32 * 1024;
/// 16, 24, 32, 48, 64, 96 … 32 KiB.
const SIZES: usize = 23;
/// What is mapped at a time for small requests, bytes. Less where a test refuses one after the other.
const PIECE: usize = if cfg!(feature = "points") { LARGE } else { 128 * 1024 };
const PAGE: usize = 4096;
/// What is mapped for when the kernel refuses, bytes: 8 pieces, and each serves the calls of some 20 threads.
const RESERVE: usize = 1 << 20;
/// The longest request that the reserve serves, bytes: so one table that grows leaves half of it.
const MOST: usize = 1 << 19;

/// Where the rest of the reserve begins, and where it ends. One for all heaps.
static KEPT: Pair = Pair::new();

/// What the reserve is until there is another: a program that starts without memory starts.
#[repr(C, align(4096))]
struct First(UnsafeCell<[u8; 2 * PIECE]>);

// SAFETY: its bytes are blocks, and each is one caller's (`obtain`).
unsafe impl Sync for First {}

static FIRST: First = First(UnsafeCell::new([0; 2 * PIECE]));

/// Whether the reserve is whole; maps another one if it is not. False where the kernel refuses that: then nothing may
/// begin that needs memory.
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
    // Memory that the program locks is filled at once, else.
    // SAFETY: exactly the new mapping.
    let _ = unsafe { munlock(fresh.cast(), RESERVE) };
    let whole = Two {
        first: fresh as usize,
        second: fresh as usize + RESERVE,
    };
    match KEPT.swap(kept, whole) {
        // What is left of the old one. Whoever was about to cut from it finds another pair.
        Ok(()) if kept.first < kept.second => unmap(kept.first as *mut u8, kept.second - kept.first),
        Ok(()) => {}
        Err(_) => unmap(fresh, RESERVE),
    }
    true
}

/// A mapping, or whole pages of the reserve, which can be unmapped as one; null where neither is to be had.
fn obtain(size: usize) -> *mut u8 {
    let fresh = map(size);
    if !fresh.is_null() || size > MOST {
        return fresh;
    }
    let mut kept = KEPT.load();
    loop {
        let now = match kept.first {
            0 => Two {
                first: FIRST.0.get() as usize,
                second: FIRST.0.get() as usize + 2 * PIECE,
            },
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

/// See the module. The one in use is the preloaded library's `#[global_allocator]`.
#[derive(Debug)]
pub struct Heap {
    free: [Pair; SIZES],
    /// Where the rest of the piece begins that blocks are cut from, and where it ends.
    rest: Pair,
}

impl Heap {
    /// Without any memory yet.
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
            // Another thread may have taken the block since, and be writing to it: then the count has changed, and what
            // is read here is not used.
            // SAFETY: what was on a stack stays mapped, and is aligned for a word.
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
        // SAFETY: the block is the caller's until it is on the stack, and aligned for a word.
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

    /// A block that was never used, from the piece at hand or a new one.
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
            let piece = Two {
                first: fresh as usize,
                second: fresh as usize + PIECE,
            };
            // What is left of the old piece is given up: addresses of pieces never come again, so a value of this
            // pair never does either.
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

// SAFETY: a block is given out to one caller at a time: who takes it off a stack, or cuts it from a piece, has won a
// compare-and-swap that nobody else can have won with the same count or the same beginning. It has the size
// and the alignment of its class, which are at least those asked for, or is a mapping of its own. Nothing unwinds.
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
        // A new mapping is zero already.
        if Class::of(layout).is_some() && !block.is_null() {
            // SAFETY: the block has the layout's size.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller says that the new size makes a layout.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (Class::of(layout), Class::of(new)) {
            (Some(old), Some(new)) if old == new => return block,
            (None, None) => {
                // SAFETY: a mapping of our own, of that length, which is the caller's.
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
        // SAFETY: both blocks are the caller's, and as long as the shorter of the two layouts.
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

/// One of the sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Class {
    index: usize,
    size: usize,
}

impl Class {
    /// The smallest that serves; `None`: a mapping.
    fn of(layout: Layout) -> Option<Self> {
        let (size, align) = (layout.size(), layout.align());
        if size > LARGE || align > PAGE {
            return None;
        }
        let whole = size.max(align).max(16).next_power_of_two();
        let index = 2 * (whole.trailing_zeros() as usize - 4);
        let less = whole / 4 * 3;
        // A block of 24 bytes is at a multiple of 8, one of 48 at one of 16.
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
    // SAFETY: a fresh private mapping.
    let mapped = unsafe { mmap_anonymous(null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
    mapped.map_or(null_mut(), |at| at.cast())
}

fn unmap(at: *mut u8, size: usize) {
    // SAFETY: a mapping of our own, which nobody uses any more.
    let _ = unsafe { munmap(at.cast(), size) };
}

/// Two words that change together.
#[repr(C, align(16))]
struct Pair {
    first: UnsafeCell<u64>,
    second: UnsafeCell<u64>,
}

/// What they were at one time, if the swap says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Two {
    first: usize,
    second: usize,
}

impl Two {
    /// The next state of a stack, with the count of its changes in the second word.
    fn followed_by(self, top: usize) -> Self {
        Self {
            first: top,
            second: self.second.wrapping_add(1),
        }
    }
}

// SAFETY: the words are only touched by atomic instructions.
unsafe impl Sync for Pair {}

impl core::fmt::Debug for Pair {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.load().fmt(f)
    }
}

impl Pair {
    const fn new() -> Self {
        Self {
            first: UnsafeCell::new(0),
            second: UnsafeCell::new(0),
        }
    }

    /// The two words, not necessarily of one time; a swap against such a mixture fails. The second first: if a swap
    /// finds that count again, nothing has changed since, and the first word and what was read by it are of its time.
    fn load(&self) -> Two {
        // SAFETY: the words live as long as `self`, and nobody touches them but atomically.
        let [first, second] = [&self.first, &self.second].map(|word| unsafe { AtomicU64::from_ptr(word.get()) });
        // Both Acquire: pair with `swap`, a full barrier.
        let second = second.load(Acquire) as usize;
        Two {
            first: first.load(Acquire) as usize,
            second,
        }
    }

    /// Replaces `old` by `new`; the error is what was there instead. Not `core::arch`'s function, which becomes a call
    /// of libatomic where the compiler does not expect the instruction; every x86-64 processor since 2006 has it.
    fn swap(&self, old: Two, new: Two) -> Result<(), Two> {
        let (mut first, mut second) = (old.first, old.second);
        // SAFETY: 16 bytes, aligned to 16, that only atomic instructions touch. rbx, which the compiler does not give
        // out by name, is as before at the end; it may be `low` itself.
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

/// Mappings that a test has refused (`tests/tests/no_memory.rs`): the one with the number `HEAP_REFUSES`, and all
/// after it if that ends with a plus.
#[cfg(feature = "points")]
mod refused {
    use core::ffi::CStr;
    use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    pub fn is_next() -> bool {
        static MAPPINGS: AtomicUsize = AtomicUsize::new(0);
        let this = MAPPINGS.fetch_add(1, Relaxed) + 1;
        // SAFETY: a name that ends; null, or a text that stays while the environment is not changed.
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
