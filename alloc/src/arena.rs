//! One arena: addresses that stay ours for good, blocks in them, and the pieces of a huge page each in which memory
//! comes and goes. Not which arena serves a request, nor when memory is given back (`arenas.rs`).

use core::sync::atomic::{
    AtomicU32, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

use rdmasock_core::allocator::{LOST, NEXT, WHOLE};

use crate::memory;
use crate::runs::Runs;

/// Bytes of an arena, which is aligned to as many. A block is shorter than that.
pub const ARENA: usize = 1 << 30;
/// Bytes of a piece: a huge page, so that what is registered with a block takes no more memory than such pages do.
pub const PIECE: usize = 2 << 20;
/// Bytes of a grain: blocks are whole grains.
pub const GRAIN: usize = 16 << 10;

const GRAINS: usize = ARENA / GRAIN;
const PIECES: usize = ARENA / PIECE;
const GRAINS_OF_PIECE: usize = PIECE / GRAIN;

/// In the state of a piece: there is memory.
const COMMITTED: u32 = 1;
/// Blocks in it were freed since, so that not all that is free is zeroes.
const USED: u32 = 2;

/// See the module. All zeroes: an arena without memory and blocks.
#[repr(C)]
pub struct Arena {
    /// Where it begins.
    start: AtomicUsize,
    /// Grains that are taken.
    taken: AtomicUsize,
    /// Pieces with memory.
    committed: AtomicUsize,
    grains: [AtomicU64; GRAINS / 64],
    /// Grains of the block that begins with a grain; 0 for none.
    blocks: [AtomicU32; GRAINS],
    pieces: [PieceState; PIECES],
}

#[repr(C)]
struct PieceState {
    /// As `rdmasock_core::allocator` has it.
    epoch: AtomicU64,
    state: AtomicU32,
}

/// What became of a wish to give a piece's memory back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Given {
    Back,
    /// It has blocks, or no memory, or devices know it and use it.
    Not,
}

impl Arena {
    /// A new one; `None` without addresses or memory for it.
    pub fn new() -> Option<&'static Self> {
        // The part that is aligned stays.
        let around = memory::reserve(2 * ARENA)?;
        let start = around.next_multiple_of(ARENA);
        // SAFETY: reserved just now.
        unsafe {
            memory::release(around, start - around);
            memory::release(start + ARENA, around + ARENA - start);
        }
        let Some(about) = memory::zeroes(size_of::<Self>()) else {
            // SAFETY: as above.
            unsafe { memory::release(start, ARENA) };
            return None;
        };
        // SAFETY: zeroes, of its size, aligned to a page, and there for good unless `discard` takes it.
        let arena = unsafe { &*core::ptr::with_exposed_provenance::<Self>(about) };
        arena.start.store(start, Release);
        Some(arena)
    }

    /// Nobody will use it.
    ///
    /// # Safety
    /// Nobody has seen it.
    pub unsafe fn discard(&'static self) {
        // SAFETY: by the contract.
        unsafe {
            memory::release(self.start(), ARENA);
            memory::release(core::ptr::from_ref(self).expose_provenance(), size_of::<Self>());
        }
    }

    pub fn start(&self) -> usize {
        self.start.load(Acquire)
    }

    fn runs(&self) -> Runs<'_> {
        Runs(&self.grains)
    }

    /// Bytes of blocks, and of memory.
    pub fn bytes(&self) -> (usize, usize) {
        (self.taken.load(Relaxed) * GRAIN, self.committed.load(Relaxed) * PIECE)
    }

    /// A block of so many bytes, with memory, at a multiple of `align`, a power of two of up to [`PIECE`]. `None`: not
    /// here, or not any more.
    pub fn take(&self, size: usize, align: usize) -> Option<usize> {
        let n = size.div_ceil(GRAIN);
        loop {
            if self.taken.load(Relaxed) + n > GRAINS {
                return None;
            }
            let first = self.runs().take(n, (align / GRAIN).max(1))?;
            self.taken.fetch_add(n, Relaxed);
            if self.has_lost(first, n) {
                // What the program has taken away stays taken.
                self.give(first, n);
                continue;
            }
            if !self.commit(first, n) {
                self.give(first, n);
                return None;
            }
            self.blocks.get(first)?.store(n as u32, Relaxed);
            return Some(self.start() + first * GRAIN);
        }
    }

    /// The block that begins there: its first grain, and how many it has.
    fn block(&self, at: usize) -> Option<(usize, usize)> {
        let offset = at.wrapping_sub(self.start());
        let first = offset.is_multiple_of(GRAIN).then_some(offset / GRAIN)?;
        let n = self.blocks.get(first)?.load(Relaxed) as usize;
        (n > 0).then_some((first, n))
    }

    /// Bytes of the block that begins there; `None` if none does.
    pub fn size(&self, at: usize) -> Option<usize> {
        self.block(at).map(|(_, n)| n * GRAIN)
    }

    /// Frees a block. False if none begins there. Gives the pieces that it lay in by their numbers.
    pub fn free(&self, at: usize) -> Option<core::ops::Range<usize>> {
        let (first, n) = self.block(at)?;
        // Who frees it twice finds nothing the second time.
        let n = match self.blocks.get(first)?.swap(0, Relaxed) as usize {
            0 => return None,
            now => now.min(n),
        };
        self.leave(first, n);
        Some(pieces_of(first, n))
    }

    /// Has the block that begins there have so many bytes, where it is. False if that cannot be.
    pub fn resize(&self, at: usize, size: usize) -> bool {
        let Some((first, n)) = self.block(at) else {
            return false;
        };
        let wanted = size.div_ceil(GRAIN).max(1);
        let Some(count) = self.blocks.get(first) else {
            return false;
        };
        if wanted <= n {
            // First: who frees the block frees what it has then.
            count.store(wanted as u32, Relaxed);
            if wanted < n {
                self.leave(first + wanted, n - wanted);
            }
            return true;
        }
        let (more, missing) = (first + n, wanted - n);
        if !self.runs().take_at(more, missing) {
            return false;
        }
        self.taken.fetch_add(missing, Relaxed);
        if self.has_lost(more, missing) || !self.commit(more, missing) {
            self.give(more, missing);
            return false;
        }
        count.store(wanted as u32, Relaxed);
        true
    }

    /// Fills the first `size` bytes of a new block with zeroes where they may not be.
    pub fn clear(&self, at: usize, size: usize) {
        let (offset, end) = (at - self.start(), at - self.start() + size);
        for (number, piece) in self.pieces_from(pieces_of(offset / GRAIN, size.div_ceil(GRAIN))) {
            // Acquire: pairs with the Release of `leave`, as the grains' do.
            if piece.state.load(Acquire) & USED == 0 {
                continue;
            }
            let (from, to) = (offset.max(number * PIECE), end.min((number + 1) * PIECE));
            let place = core::ptr::with_exposed_provenance_mut::<u8>(self.start() + from);
            // SAFETY: within the block, which is the caller's and has memory.
            unsafe { place.write_bytes(0, to - from) };
        }
    }

    fn pieces_from(&self, numbers: core::ops::Range<usize>) -> impl Iterator<Item = (usize, &PieceState)> {
        numbers.filter_map(|number| Some((number, self.pieces.get(number)?)))
    }

    /// These grains are not the block's any more.
    fn leave(&self, first: usize, n: usize) {
        for (_, piece) in self.pieces_from(pieces_of(first, n)) {
            piece.state.fetch_or(USED, Release);
        }
        self.give(first, n);
    }

    /// Gives grains back but for those that are lost.
    fn give(&self, first: usize, n: usize) {
        let mut given = 0;
        for (number, piece) in self.pieces_from(pieces_of(first, n)) {
            if piece.epoch.load(SeqCst) & LOST == 0 {
                let from = first.max(number * GRAINS_OF_PIECE);
                let to = (first + n).min((number + 1) * GRAINS_OF_PIECE);
                // First, so that the count is never below what is taken by more than what is on its way.
                given += to - from;
                self.runs().give(from, to - from);
            }
        }
        self.taken.fetch_sub(given, Relaxed);
    }

    fn has_lost(&self, first: usize, n: usize) -> bool {
        let mut pieces = self.pieces_from(pieces_of(first, n));
        pieces.any(|(_, piece)| piece.epoch.load(SeqCst) & LOST != 0)
    }

    /// Sees to it that there is memory for these grains, which are the caller's.
    fn commit(&self, first: usize, n: usize) -> bool {
        let numbers = pieces_of(first, n);
        let is_committed = |number: usize| {
            let piece = self.pieces.get(number);
            piece.is_none_or(|piece| piece.state.load(Acquire) & COMMITTED != 0)
        };
        let mut number = numbers.start;
        while number < numbers.end {
            if is_committed(number) {
                number += 1;
                continue;
            }
            let end = (number..numbers.end).find(|n| is_committed(*n)).unwrap_or(numbers.end);
            // SAFETY: of this arena. Whoever has other grains of the first and the last piece may do the same.
            if !unsafe { memory::commit(self.start() + number * PIECE, (end - number) * PIECE) } {
                return false;
            }
            for (_, piece) in self.pieces_from(number..end) {
                // Who sets it first; Release: pairs with `is_committed`.
                if piece.state.fetch_or(COMMITTED, Release) & COMMITTED == 0 {
                    self.committed.fetch_add(1, Relaxed);
                    let opened = |now: u64| (now & LOST == 0).then_some((now & !WHOLE) + NEXT + WHOLE);
                    let _ = piece.epoch.fetch_update(SeqCst, SeqCst, opened);
                }
            }
            number = end;
        }
        true
    }

    /// The piece in which an address lies: where it begins, and its epoch.
    pub fn piece(&self, at: usize) -> Option<(usize, &AtomicU64)> {
        let number = at.checked_sub(self.start())? / PIECE;
        let piece = self.pieces.get(number)?;
        Some((self.start() + number * PIECE, &piece.epoch))
    }

    /// The program is about to do something to this memory: devices are not to know it under its epoch any more. With
    /// `lost` the addresses may be somebody else's from then on.
    pub fn change(&self, from: usize, to: usize, lost: bool) {
        let (from, to) = (from.max(self.start()), to.min(self.start() + ARENA));
        if from >= to {
            return;
        }
        let numbers = (from - self.start()) / PIECE..(to - self.start()).div_ceil(PIECE);
        for (_, piece) in self.pieces_from(numbers) {
            let changed = |now: u64| {
                let flags = now & LOST | if lost { LOST } else { 0 };
                Some(((now & !(WHOLE | LOST)) + NEXT) | flags)
            };
            let _ = piece.epoch.fetch_update(SeqCst, SeqCst, changed);
        }
    }

    /// Whether a piece has memory and no blocks, as it looks now.
    pub fn is_idle(&self, number: usize) -> bool {
        let has_memory = |piece: &PieceState| piece.state.load(Relaxed) & COMMITTED != 0;
        self.pieces.get(number).is_some_and(has_memory)
            && self.runs().is_free(number * GRAINS_OF_PIECE, GRAINS_OF_PIECE)
    }

    /// Whether a piece has memory that devices are not to know, after something that the program has done to it.
    pub fn is_changed(&self, number: usize) -> bool {
        let is_whole = |piece: &PieceState| piece.epoch.load(SeqCst) & WHOLE != 0;
        self.pieces.get(number).is_some_and(|piece| !is_whole(piece))
    }

    /// Gives the memory of a piece without blocks back to the kernel, once `end` has seen to it that no device knows
    /// it.
    pub fn give_back(&self, number: usize, end: impl FnOnce(usize, usize) -> bool) -> Given {
        let Some(piece) = self.pieces.get(number) else {
            return Given::Not;
        };
        let first = number * GRAINS_OF_PIECE;
        // With all of its grains nobody else comes here.
        if !self.runs().take_at(first, GRAINS_OF_PIECE) {
            return Given::Not;
        }
        self.taken.fetch_add(GRAINS_OF_PIECE, Relaxed);
        let given = if piece.state.load(Acquire) & COMMITTED != 0 {
            self.empty(number, piece, end)
        } else {
            Given::Not
        };
        self.give(first, GRAINS_OF_PIECE);
        given
    }

    fn empty(&self, number: usize, piece: &PieceState, end: impl FnOnce(usize, usize) -> bool) -> Given {
        let at = self.start() + number * PIECE;
        // No call begins to use what devices know of it.
        let closed = |now: u64| (now & LOST == 0).then_some(now & !WHOLE);
        let Ok(before) = piece.epoch.fetch_update(SeqCst, SeqCst, closed) else {
            return Given::Not;
        };
        // SAFETY: of this arena, without blocks, and no device uses it.
        if end(at, PIECE) && unsafe { memory::decommit(at, PIECE) } {
            piece.state.store(0, Release);
            self.committed.fetch_sub(1, Relaxed);
            return Given::Back;
        }
        // It is what it was; unless the program has done something to it meanwhile.
        let _ = piece.epoch.compare_exchange(before & !WHOLE, before, SeqCst, SeqCst);
        Given::Not
    }

    /// Pieces of an arena.
    pub fn numbers() -> core::ops::Range<usize> {
        0..PIECES
    }
}

/// The pieces in which these grains lie.
fn pieces_of(first: usize, n: usize) -> core::ops::Range<usize> {
    first / GRAINS_OF_PIECE..(first + n).div_ceil(GRAINS_OF_PIECE)
}

#[cfg(test)]
mod tests;
