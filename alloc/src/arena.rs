//! An arena: 1 GiB of addresses that are never unmapped. It is divided in two ways. A *block*, the memory of one
//! malloc, consists of whole *grains* of 16 KiB. Memory is allocated and given back in *pieces* of one huge page (2
//! MiB). Each piece has an *epoch*, a number that changes when its pages may have changed. `arenas.rs` chooses the
//! arena of a request, and the time to give memory back.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use rdmasock_core::allocator::{LOST, NEXT, WHOLE};

use crate::memory;
use crate::runs::Runs;

/// The size of an arena in bytes, and its alignment. Every block is shorter.
pub(crate) const ARENA: usize = 1 << 30;
/// The size of a piece in bytes. A piece is one huge page. So the registration of a block pins no memory beyond the
/// block's huge pages.
pub(crate) const PIECE: usize = 2 << 20;
/// The size of a grain in bytes. A block has a whole number of grains.
pub(crate) const GRAIN: usize = 16 << 10;

const GRAINS: usize = ARENA / GRAIN;
const PIECES: usize = ARENA / PIECE;
const GRAINS_OF_PIECE: usize = PIECE / GRAIN;

/// Flag in the state of a piece: the piece has memory.
const COMMITTED: u32 = 1;
/// Flag in the state of a piece: blocks in the piece were freed since it got its memory, so its free bytes may not be
/// zero.
const USED: u32 = 2;

/// An arena. If all bytes of this value are zero, the arena has no memory and no blocks.
#[repr(C)]
pub(crate) struct Arena {
    /// The first address.
    start: AtomicUsize,
    /// The number of taken grains.
    taken: AtomicUsize,
    /// The number of pieces with memory.
    committed: AtomicUsize,
    grains: [AtomicU64; GRAINS / 64],
    /// For each grain, the length in grains of the block that begins there; 0 if none begins there.
    blocks: [AtomicU32; GRAINS],
    pieces: [PieceState; PIECES],
}

#[repr(C)]
struct PieceState {
    /// The epoch with its flags, as `rdmasock_core::allocator` defines it.
    epoch: AtomicU64,
    state: AtomicU32,
}

impl Arena {
    /// Makes an arena without blocks. `None` if the kernel has no addresses or no memory for it.
    pub(crate) fn new() -> Option<&'static Self> {
        // Reserves twice the size, and releases the addresses in front of and behind the aligned part.
        let around = memory::reserve(2 * ARENA)?;
        let start = around.next_multiple_of(ARENA);
        // SAFETY: both ranges are parts of the fresh reservation, and no other code knows them.
        unsafe {
            memory::release(around, start - around);
            memory::release(start + ARENA, around + ARENA - start);
        }
        let Some(about) = memory::zeroes(size_of::<Self>()) else {
            // SAFETY: the range is the rest of the fresh reservation, and no other code knows it.
            unsafe { memory::release(start, ARENA) };
            return None;
        };
        // SAFETY: the mapping has the size of `Self`, is zeroed and page-aligned. It stays mapped unless `discard`
        // unmaps it.
        let arena = unsafe { &*core::ptr::with_exposed_provenance::<Self>(about) };
        arena.start.store(start, Release);
        Some(arena)
    }

    /// Unmaps the arena.
    ///
    /// # Safety
    /// No other thread has a reference to the arena, and no block of it is in use.
    pub(crate) unsafe fn discard(&'static self) {
        // SAFETY: by the contract neither the addresses nor the `Arena` value are in use.
        unsafe {
            memory::release(self.start(), ARENA);
            memory::release(core::ptr::from_ref(self).expose_provenance(), size_of::<Self>());
        }
    }

    pub(crate) fn start(&self) -> usize {
        self.start.load(Acquire)
    }

    fn runs(&self) -> Runs<'_> {
        Runs(&self.grains)
    }

    /// Returns the number of bytes in blocks, and the number of bytes of memory that the arena has.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        (self.taken.load(Relaxed) * GRAIN, self.committed.load(Relaxed) * PIECE)
    }

    /// Takes a block of `size` bytes with memory. Its address is a multiple of `align`, a power of two of at most
    /// [`PIECE`]. Returns the address. `None` if the arena has no free run of enough grains, or if the kernel has no
    /// memory.
    pub(crate) fn take(&self, size: usize, align: usize) -> Option<usize> {
        let n = size.div_ceil(GRAIN);
        loop {
            if self.taken.load(Relaxed) + n > GRAINS {
                return None;
            }
            let first = self.runs().take(n, (align / GRAIN).max(1))?;
            self.taken.fetch_add(n, Relaxed);
            if self.has_lost(first, n) {
                // The run touches a piece that the program has unmapped. `give` leaves the piece's grains taken, so
                // that the search does not find them again.
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

    /// Returns the first grain of the block at `at` and its number of grains; `None` if no block begins there.
    fn block(&self, at: usize) -> Option<(usize, usize)> {
        let offset = at.wrapping_sub(self.start());
        let first = offset.is_multiple_of(GRAIN).then_some(offset / GRAIN)?;
        let n = self.blocks.get(first)?.load(Relaxed) as usize;
        (n > 0).then_some((first, n))
    }

    /// Returns the size in bytes of the block at `at`; `None` if no block begins there.
    pub(crate) fn size(&self, at: usize) -> Option<usize> {
        self.block(at).map(|(_, n)| n * GRAIN)
    }

    /// Frees the block at `at`. Returns the numbers of its pieces; `None` if no block begins there.
    pub(crate) fn free(&self, at: usize) -> Option<core::ops::Range<usize>> {
        let (first, n) = self.block(at)?;
        // A second free of the same block, also a concurrent one, finds 0 here.
        let n = match self.blocks.get(first)?.swap(0, Relaxed) as usize {
            0 => return None,
            now => now.min(n),
        };
        self.leave(first, n);
        Some(pieces_of(first, n))
    }

    /// Changes the size of the block at `at` to `size` bytes, in place. Returns false if there is no such block, or no
    /// room behind it.
    pub(crate) fn resize(&self, at: usize, size: usize) -> bool {
        let Some((first, n)) = self.block(at) else {
            return false;
        };
        let wanted = size.div_ceil(GRAIN).max(1);
        let Some(count) = self.blocks.get(first) else {
            return false;
        };
        if wanted <= n {
            // The new length is stored before the other grains are given back. So if the block is freed in between,
            // that frees only the shorter block.
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

    /// Sets the first `size` bytes of a new block to 0. Skips pieces whose free bytes are 0 already.
    pub(crate) fn clear(&self, at: usize, size: usize) {
        let (offset, end) = (at - self.start(), at - self.start() + size);
        for (number, piece) in self.pieces_from(pieces_of(offset / GRAIN, size.div_ceil(GRAIN))) {
            // Acquire: pairs with the Release of `leave`.
            if piece.state.load(Acquire) & USED == 0 {
                continue;
            }
            let (from, to) = (offset.max(number * PIECE), end.min((number + 1) * PIECE));
            let place = core::ptr::with_exposed_provenance_mut::<u8>(self.start() + from);
            // SAFETY: the range lies in the new block, which the caller owns and which has memory.
            unsafe { place.write_bytes(0, to - from) };
        }
    }

    fn pieces_from(&self, numbers: core::ops::Range<usize>) -> impl Iterator<Item = (usize, &PieceState)> {
        numbers.filter_map(|number| Some((number, self.pieces.get(number)?)))
    }

    /// Marks the pieces of these `n` grains as used, and gives the grains back.
    fn leave(&self, first: usize, n: usize) {
        for (_, piece) in self.pieces_from(pieces_of(first, n)) {
            piece.state.fetch_or(USED, Release);
        }
        self.give(first, n);
    }

    /// Marks these `n` grains as free, except in pieces that the program has unmapped.
    fn give(&self, first: usize, n: usize) {
        let mut given = 0;
        for (number, piece) in self.pieces_from(pieces_of(first, n)) {
            if piece.epoch.load(SeqCst) & LOST == 0 {
                let from = first.max(number * GRAINS_OF_PIECE);
                let to = (first + n).min((number + 1) * GRAINS_OF_PIECE);
                // The bits are cleared before `taken` is lowered, so for a moment `taken` may be too high, but never
                // too low.
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

    /// Makes sure that the pieces of these grains, which the caller has taken, have memory. Returns false if the kernel
    /// has none.
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
            // SAFETY: the range lies in this arena. Another thread may commit the first or the last piece at the same
            // time. A second commit does not change the memory.
            if !unsafe { memory::commit(self.start() + number * PIECE, (end - number) * PIECE) } {
                return false;
            }
            for (_, piece) in self.pieces_from(number..end) {
                // Only the thread that sets the flag counts the piece and begins its epoch. Release: pairs with the
                // Acquire of `is_committed`.
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

    /// Returns the start and the epoch of the piece in which the address `at` lies; `None` if the address is not in
    /// this arena.
    pub(crate) fn piece(&self, at: usize) -> Option<(usize, &AtomicU64)> {
        let number = at.checked_sub(self.start())? / PIECE;
        let piece = self.pieces.get(number)?;
        Some((self.start() + number * PIECE, &piece.epoch))
    }

    /// Changes the epochs of the pieces in the range `from..to`, before a call of the program changes the pages there.
    /// `lost`: the call takes the addresses away, so the allocator does not use these pieces again.
    pub(crate) fn change(&self, from: usize, to: usize, lost: bool) {
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

    /// Returns true if the piece has memory, and no blocks at this moment.
    pub(crate) fn is_idle(&self, number: usize) -> bool {
        let has_memory = |piece: &PieceState| piece.state.load(Relaxed) & COMMITTED != 0;
        self.pieces.get(number).is_some_and(has_memory)
            && self.runs().is_free(number * GRAINS_OF_PIECE, GRAINS_OF_PIECE)
    }

    /// Returns true if the piece lacks the flag WHOLE, because a call of the program has changed it or because it has
    /// no memory.
    pub(crate) fn is_changed(&self, number: usize) -> bool {
        let is_whole = |piece: &PieceState| piece.epoch.load(SeqCst) & WHOLE != 0;
        self.pieces.get(number).is_some_and(|piece| !is_whole(piece))
    }

    /// Gives the memory of a piece without blocks back to the kernel. First calls `end` with the start and the length
    /// of the piece, to deregister it; `end` returns false if a device still uses the piece. Returns false if the piece
    /// keeps its memory, or had none.
    pub(crate) fn give_back(&self, number: usize, end: impl FnOnce(usize, usize) -> bool) -> bool {
        let Some(piece) = self.pieces.get(number) else {
            return false;
        };
        let first = number * GRAINS_OF_PIECE;
        // This thread takes all grains of the piece, so that no other thread uses it.
        if !self.runs().take_at(first, GRAINS_OF_PIECE) {
            return false;
        }
        self.taken.fetch_add(GRAINS_OF_PIECE, Relaxed);
        let given = piece.state.load(Acquire) & COMMITTED != 0 && self.empty(number, piece, end);
        self.give(first, GRAINS_OF_PIECE);
        given
    }

    fn empty(&self, number: usize, piece: &PieceState, end: impl FnOnce(usize, usize) -> bool) -> bool {
        let at = self.start() + number * PIECE;
        // Clears WHOLE. From then on no call begins to use a registration of the piece.
        let closed = |now: u64| (now & LOST == 0).then_some(now & !WHOLE);
        let Ok(before) = piece.epoch.fetch_update(SeqCst, SeqCst, closed) else {
            return false;
        };
        // SAFETY: the piece lies in this arena. This thread has taken all its grains, and by `end` no device uses it.
        if end(at, PIECE) && unsafe { memory::decommit(at, PIECE) } {
            piece.state.store(0, Release);
            self.committed.fetch_sub(1, Relaxed);
            return true;
        }
        // Restores the epoch, unless a call of the program has changed it meanwhile.
        let _ = piece.epoch.compare_exchange(before & !WHOLE, before, SeqCst, SeqCst);
        false
    }

    /// Returns the numbers of all pieces of an arena.
    pub(crate) fn numbers() -> core::ops::Range<usize> {
        0..PIECES
    }
}

/// Returns the numbers of the pieces in which the `n` grains from `first` on lie.
fn pieces_of(first: usize, n: usize) -> core::ops::Range<usize> {
    first / GRAINS_OF_PIECE..(first + n).div_ceil(GRAINS_OF_PIECE)
}

#[cfg(test)]
mod tests;
