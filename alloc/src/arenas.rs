//! The list of all arenas. Chooses the arena for a request, finds the arena of an address, and gives memory without
//! blocks back to the kernel. `calls.rs` has the functions that make requests.

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32};

use rdmasock_core::allocator::End;

use crate::arena::{ARENA, Arena, PIECE};
use crate::memory;

/// The size in bytes of the smallest request that arenas serve. The next allocator serves smaller requests.
pub(crate) const LARGE: usize = 64 << 10;
/// The most bytes that all arenas together keep for later blocks: bytes that have memory and lie in no block.
const KEPT: usize = 128 << 20;
/// The most arenas. If they are full, the next allocator serves further requests.
const MOST: usize = 64;
/// The number of arenas that would fit into the addresses of a process (47 bits).
const PLACES: usize = (1 << 47) / ARENA;

/// The arenas by their start address. By one load from this table a call finds out that an address is in no arena,
/// which is the usual case.
static PLACE: [AtomicPtr<Arena>; PLACES] = [const { AtomicPtr::new(null_mut()) }; PLACES];
/// The arenas in the order in which they were made.
static ALL: [AtomicPtr<Arena>; MOST] = [const { AtomicPtr::new(null_mut()) }; MOST];
/// The main library's function that deregisters memory, an [`End`]; null without the main library.
static END: AtomicPtr<()> = AtomicPtr::new(null_mut());
/// The pid of the process in which a thread is in `give_back`; 0 if there is none. So other threads do not enter it,
/// nor does a free that `give_back` itself leads to.
static GIVING: AtomicU32 = AtomicU32::new(0);

fn seen(place: &AtomicPtr<Arena>) -> Option<&'static Arena> {
    // SAFETY: the pointer is null, or points to an arena that stays mapped. Acquire: pairs with the Release of `grow`.
    unsafe { place.load(Acquire).as_ref() }
}

/// Returns the arena in which the address `at` lies; `None` if it lies in no arena.
#[inline]
pub(crate) fn of(at: usize) -> Option<&'static Arena> {
    seen(PLACE.get(at / ARENA)?)
}

fn all() -> impl DoubleEndedIterator<Item = &'static Arena> {
    ALL.iter().filter_map(seen)
}

/// Takes a block from an arena. Returns its address and its arena; `None` if the next allocator has to serve the
/// request.
pub(crate) fn take(size: usize, align: usize) -> Option<(usize, &'static Arena)> {
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

/// The result of `grow`, which makes one more arena.
enum Grown {
    /// There is a new arena. The requested block was taken from it.
    By(usize, &'static Arena),
    /// Another thread has made an arena at the same time, so the request is tried again.
    ByOthers,
    Not,
}

#[cold]
fn grow(size: usize, align: usize) -> Grown {
    let Some(slot) = ALL.iter().find(|slot| slot.load(Relaxed).is_null()) else {
        return Grown::Not;
    };
    // If there is a limit on addresses, an arena could use it up.
    if memory::is_limited() {
        return Grown::Not;
    }
    let Some(arena) = Arena::new() else {
        return Grown::Not;
    };
    // The block is taken before the arena is listed. If there is no memory for the block, the arena is of no use.
    let Some(at) = arena.take(size, align) else {
        // SAFETY: no other thread has a reference to the new arena.
        unsafe { arena.discard() };
        return Grown::Not;
    };
    let pointer = core::ptr::from_ref(arena).cast_mut();
    let show = |what| {
        if let Some(place) = PLACE.get(arena.start() / ARENA) {
            // Release: pairs with the Acquire of `seen`.
            place.store(what, Release);
        }
    };
    // The table gets the arena before the list does, because a thread that finds the arena in the list may take and
    // free a block of it at once.
    show(pointer);
    // AcqRel: the Release pairs with the Acquire of `seen`. A fork child goes on with its copy of the list.
    if slot.compare_exchange(null_mut(), pointer, AcqRel, Acquire).is_ok() {
        return Grown::By(at, arena);
    }
    show(null_mut());
    // SAFETY: the arena was never listed, so no other thread knows an address in it.
    unsafe { arena.discard() };
    Grown::ByOthers
}

/// Frees the block at `at`, if one begins there. Then gives memory back to the kernel, if the program has changed a
/// piece of the block, or if the arenas keep more than `KEPT`.
pub(crate) fn free(arena: &'static Arena, at: usize) {
    // A piece that the program has changed is not whole until it has no blocks, is given back, and gets new memory.
    let is_changed = |number| arena.is_changed(number) && arena.is_idle(number);
    if let Some(mut pieces) = arena.free(at)
        && (pieces.any(is_changed) || excess() > 0)
    {
        give_back();
    }
}

/// Changes the size of the block at `at` to `size` bytes in place. Returns false if that is not possible.
pub(crate) fn resize(arena: &'static Arena, at: usize, size: usize) -> bool {
    let is_done = arena.resize(at, size);
    if is_done && excess() > 0 {
        give_back();
    }
    is_done
}

/// Returns by how many bytes the arenas exceed [`KEPT`]. The bytes that count are committed (they have memory from the
/// kernel) and lie in no block.
fn excess() -> usize {
    let (taken, committed) = all()
        .map(Arena::bytes)
        .fold((0, 0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
    committed.saturating_sub(taken).saturating_sub(KEPT)
}

/// Gives the memory of pieces without blocks back to the kernel, one piece after the other, until the arenas keep at
/// most `KEPT` bytes. Also gives back each piece without blocks that the program has changed, so that it can become
/// whole again. Begins with the last pieces, because new blocks are taken from the first ones. A piece stays if a
/// device still uses it.
#[cold]
fn give_back() {
    let me = rustix::process::getpid().as_raw_nonzero().get() as u32;
    let now = GIVING.load(Relaxed);
    // If `now` is another pid, this is a fork child, and its parent was in `give_back` when it forked. The child
    // replaces that pid.
    if now == me || GIVING.compare_exchange(now, me, Acquire, Relaxed).is_err() {
        return;
    }
    for arena in all().rev() {
        for number in Arena::numbers().rev() {
            if arena.is_idle(number) && (arena.is_changed(number) || excess() > 0) {
                arena.give_back(number, |at, len| end(at, len, false));
            }
        }
    }
    let _ = GIVING.compare_exchange(me, 0, Acquire, Relaxed);
}

/// Changes the epochs of the pieces in this range and deregisters them, before a call of the program changes the range
/// ([`Arena::change`]).
pub(crate) fn change(at: usize, len: usize, lost: bool) {
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

/// Changes the epochs of all pieces of all arenas and deregisters them.
pub(crate) fn change_all() {
    for arena in all() {
        arena.change(arena.start(), arena.start() + ARENA, false);
        end(arena.start(), ARENA, true);
    }
}

/// Calls the main library to deregister this memory. Returns false if a call still uses a registration of it.
fn end(at: usize, len: usize, force: bool) -> bool {
    let function = END.load(Acquire);
    if function.is_null() {
        return true;
    }
    // SAFETY: `attach` has stored an `End` of the main library, which stays loaded.
    unsafe {
        let function = core::mem::transmute::<*mut (), End>(function);
        function(at, len, force.into()) != 0
    }
}

/// Stores the main library's function that deregisters memory. Afterwards devices may have registrations of pieces.
pub(crate) fn attach(end: End) {
    END.store(end as *mut (), Release);
}

#[cfg(test)]
pub(crate) mod tests;
