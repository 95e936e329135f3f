//! All arenas: which serves a request, in which an address lies, and when memory without blocks goes back to the
//! kernel. Not what a request is (`calls.rs`).

use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use rdmasock_core::allocator::End;

use crate::arena::{ARENA, Arena, Given, PIECE};
use crate::memory;

/// Requests of fewer bytes are the next allocator's.
pub const LARGE: usize = 64 << 10;
/// Memory without blocks that is kept for the next ones, bytes.
const KEPT: usize = 128 << 20;
/// Arenas at most: what does not fit is the next allocator's.
const MOST: usize = 64;
/// Addresses of a process (47 bits), in arenas.
const PLACES: usize = (1 << 47) / ARENA;

/// By where they begin: most calls ask whether an address is of an arena, and most are not.
static PLACE: [AtomicPtr<Arena>; PLACES] = [const { AtomicPtr::new(null_mut()) }; PLACES];
/// In the order in which they were made.
static ALL: [AtomicPtr<Arena>; MOST] = [const { AtomicPtr::new(null_mut()) }; MOST];
/// What ends that devices know memory, an [`End`]; null without the library.
static END: AtomicPtr<()> = AtomicPtr::new(null_mut());
/// The process that is giving memory back, 0 for none: one thread does it at a time, and not within itself.
static GIVING: AtomicU32 = AtomicU32::new(0);

fn seen(place: &AtomicPtr<Arena>) -> Option<&'static Arena> {
    // SAFETY: null, or an arena, which is for good. Acquire: pairs with `grow`.
    unsafe { place.load(Acquire).as_ref() }
}

/// The arena in which an address lies.
#[inline]
pub fn of(at: usize) -> Option<&'static Arena> {
    seen(PLACE.get(at / ARENA)?)
}

fn all() -> impl DoubleEndedIterator<Item = &'static Arena> {
    ALL.iter().filter_map(seen)
}

/// A block, and its arena. `None` for what the next allocator is to serve.
pub fn take(size: usize, align: usize) -> Option<(usize, &'static Arena)> {
    if !(LARGE..ARENA).contains(&size) || align > PIECE {
        return None;
    }
    loop {
        for arena in all() {
            if let Some(at) = arena.take(size, align) {
                return Some((at, arena));
            }
        }
        match grow(size, align) {
            Grown::By(at, arena) => return Some((at, arena)),
            Grown::ByOthers => {}
            Grown::Not => return None,
        }
    }
}

/// What became of a wish for one more arena.
enum Grown {
    /// It is there, with the block that was asked for.
    By(usize, &'static Arena),
    /// Another thread was faster; its arena will do for both.
    ByOthers,
    Not,
}

#[cold]
fn grow(size: usize, align: usize) -> Grown {
    let Some(slot) = ALL.iter().find(|slot| slot.load(Relaxed).is_null()) else {
        return Grown::Not;
    };
    // Where there is a limit on addresses the program is to get as far as without this.
    if memory::is_limited() {
        return Grown::Not;
    }
    let Some(arena) = Arena::new() else {
        return Grown::Not;
    };
    // The block comes first: without memory for it there is no use for an arena.
    let Some(at) = arena.take(size, align) else {
        // SAFETY: nobody has seen it.
        unsafe { arena.discard() };
        return Grown::Not;
    };
    let pointer = core::ptr::from_ref(arena).cast_mut();
    let show = |what| {
        if let Some(place) = PLACE.get(arena.start() / ARENA) {
            // Release: pairs with `seen`.
            place.store(what, Release);
        }
    };
    // First: who sees it in the list may free a block of it at once.
    show(pointer);
    // AcqRel: as `show`, and a fork's child goes on from here.
    if slot.compare_exchange(null_mut(), pointer, AcqRel, Acquire).is_ok() {
        return Grown::By(at, arena);
    }
    show(null_mut());
    // SAFETY: only this thread knows an address in it.
    unsafe { arena.discard() };
    Grown::ByOthers
}

/// Frees the block that begins there.
pub fn free(arena: &'static Arena, at: usize) {
    let Some(pieces) = arena.free(at) else {
        return;
    };
    after_free(arena, pieces);
}

/// Has the block that begins there have so many bytes, where it is. False if that cannot be.
pub fn resize(arena: &'static Arena, at: usize, size: usize) -> bool {
    let is_done = arena.resize(at, size);
    if is_done && excess() > 0 {
        give_back();
    }
    is_done
}

/// Blocks in these pieces have become fewer.
fn after_free(arena: &'static Arena, pieces: core::ops::Range<usize>) {
    // What the program has changed becomes whole again by this.
    let has_changed = pieces
        .into_iter()
        .any(|number| arena.is_changed(number) && arena.is_idle(number));
    if has_changed || excess() > 0 {
        give_back();
    }
}

/// By how many bytes there is more memory without blocks than is kept.
fn excess() -> usize {
    let (taken, committed) = all()
        .map(Arena::bytes)
        .fold((0, 0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
    committed.saturating_sub(taken).saturating_sub(KEPT)
}

/// Gives memory back, of the last pieces first: blocks are taken from the first.
#[cold]
fn give_back() {
    let me = rustix::process::getpid().as_raw_nonzero().get() as u32;
    let now = GIVING.load(Relaxed);
    // What a fork's child finds here is its parent's.
    if now == me || GIVING.compare_exchange(now, me, Acquire, Relaxed).is_err() {
        return;
    }
    for arena in all().rev() {
        for number in Arena::numbers().rev() {
            if arena.is_idle(number) && (arena.is_changed(number) || excess() > 0) {
                let _: Given = arena.give_back(number, |at, len| end(at, len, false));
            }
        }
    }
    let _ = GIVING.compare_exchange(me, 0, Acquire, Relaxed);
}

/// The program is about to change this memory, see [`Arena::change`].
pub fn change(at: usize, len: usize, lost: bool) {
    const PAGE: usize = 4096;
    let (from, to) = (
        at / PAGE * PAGE,
        at.saturating_add(len).saturating_add(PAGE - 1) / PAGE * PAGE,
    );
    if len == 0 || !all().any(|arena| from < arena.start() + ARENA && to > arena.start()) {
        return;
    }
    all().for_each(|arena| arena.change(from, to, lost));
    end(from, to - from, true);
}

/// The same of all arenas.
pub fn change_all() {
    for arena in all() {
        arena.change(arena.start(), arena.start() + ARENA, false);
        end(arena.start(), ARENA, true);
    }
}

/// Has devices know nothing of this memory any more. False if a call uses what they know.
fn end(at: usize, len: usize, force: bool) -> bool {
    let function = END.load(Acquire);
    if function.is_null() {
        return true;
    }
    // SAFETY: an `End` of the library's, which stays loaded.
    unsafe {
        let function = core::mem::transmute::<*mut (), End>(function);
        function(at, len, force.into()) != 0
    }
}

/// From now on devices may know pieces, of which this is told.
pub fn attach(end: End) {
    END.store(end as *mut (), Release);
}

#[cfg(test)]
pub mod tests;
