//! The C interface between the library and the registered allocator (`alloc/`, `librdmasock_alloc.so`), which are two
//! libraries of one process: where memory of the allocator's lies, and whether it is still what it was. Both sides are
//! built from this file; not here is what they do.
//!
//! Memory of the allocator's comes in pieces. Each has an *epoch*: a number that changes before anything is done to its
//! pages or addresses, by the allocator or by a call of the program's. What was learned of a piece, such as
//! how a device knows it, is true as long as its epoch is what it was before that was learned. No epoch comes twice.

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Version of the table; changes with any change to this file.
pub const ABI: u32 = 1;

/// The allocator's symbol, an [`Entry`].
pub const ENTRY: &std::ffi::CStr = c"rdmasock_allocator";

/// Gives the allocator's table, which lives as long as the process; null to a library of another version.
pub type Entry = unsafe extern "C" fn(abi: u32) -> *const Table;

/// Has the library end what devices know of this memory, which is about to be other memory. With `force` no later call
/// will use it, and what a call uses now ends with that call; without, nothing happens while a call uses any of
/// it. Gives 1 if no device knows any of it when this returns, else 0.
pub type End = unsafe extern "C" fn(start: usize, len: usize, force: c_int) -> c_int;

/// In an epoch: the piece is whole, all of it is memory that can be read and written.
pub const WHOLE: u64 = 1;
/// In an epoch: the program has done something to the piece's addresses; it is never whole again.
pub const LOST: u64 = 2;
/// What is added to an epoch for another one.
pub const NEXT: u64 = 4;

/// A piece.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Where it begins.
    pub start: usize,
    /// Its bytes, whole pages.
    pub len: usize,
    /// Its epoch, which lives as long as the process.
    pub epoch: *const AtomicU64,
}

impl Piece {
    /// Its epoch now.
    pub fn now(&self) -> u64 {
        // SAFETY: by what the field promises; null is none. Its place is never given back.
        // SeqCst: pairs with the changes of the epoch, which precede those of the memory.
        unsafe { self.epoch.as_ref() }.map_or(0, |epoch| epoch.load(SeqCst))
    }
}

/// What the allocator gives to the library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// [`ABI`].
    pub abi: u32,
    /// Bytes of this table.
    pub size: u32,
    /// The piece in which an address lies: 1, or 0 if it lies in none.
    pub piece: unsafe extern "C" fn(at: usize, out: *mut Piece) -> c_int,
    /// A system call is about to be made for the program, with these arguments.
    pub before: unsafe extern "C" fn(number: c_long, arguments: *const [usize; 6]),
    /// Takes the library's function.
    pub attach: unsafe extern "C" fn(end: End),
}
