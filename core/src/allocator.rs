//! The C interface between the library and the registered allocator (`alloc/`, `librdmasock_alloc.so`), which are two
//! libraries of one process. By this interface the library finds the piece of the allocator's memory that contains an
//! address, and whether that piece has changed. Both libraries are built from this file; their code is elsewhere.
//!
//! The allocator's memory consists of pieces. Each piece has an *epoch*: a number that changes before the allocator, or
//! a system call of the program, changes the piece's pages or addresses. The library keeps facts about a piece, such as
//! its registration at a device, with the epoch that it has read before. A fact holds while the epoch is still the
//! same. No epoch is used twice.

use std::ffi::{c_int, c_long};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// The version of this interface; changes with any change to this file.
pub const ABI: u32 = 1;

/// The name of the allocator's symbol, a function of type [`Entry`].
pub const ENTRY: &std::ffi::CStr = c"rdmasock_allocator";

/// Returns the allocator's table, which lives as long as the process; null if the caller's version `abi` is another.
pub type Entry = unsafe extern "C" fn(abi: u32) -> *const Table;

/// Makes the library end the registrations of the `len` bytes at `start` at all devices, since the memory is about to
/// be replaced. With `force` no later call uses the registrations; a current call that uses them goes on until it ends.
/// Without `force` nothing happens while a call uses any of the memory. Returns 1 if, apart from such a current call,
/// no device has any of the memory registered; otherwise 0.
pub type End = unsafe extern "C" fn(start: usize, len: usize, force: c_int) -> c_int;

/// A bit of an epoch: the piece is whole, so all of it can be read and written.
pub const WHOLE: u64 = 1;
/// A bit of an epoch: the program has changed the mappings of the piece, which is never whole again.
pub const LOST: u64 = 2;
/// The difference between an epoch and the next one.
pub const NEXT: u64 = 4;

/// A piece of the allocator's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The address of the first byte.
    pub start: usize,
    /// The length in bytes, whole pages.
    pub len: usize,
    /// Points to the epoch of the piece, a word that lives as long as the process.
    pub epoch: *const AtomicU64,
}

impl Piece {
    /// Returns the current epoch; 0 if the pointer to it is null.
    pub fn now(&self) -> u64 {
        // SAFETY: null, or a word that lives as long as the process, as the field promises; it is never freed. SeqCst:
        // pairs with the allocator's changes of the epoch, which precede its changes of the memory.
        unsafe { self.epoch.as_ref() }.map_or(0, |epoch| epoch.load(SeqCst))
    }
}

/// The functions that the allocator offers to the library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// The version of the table, [`ABI`].
    pub abi: u32,
    /// The size of this table in bytes.
    pub size: u32,
    /// Finds the piece that contains an address. Returns 1, or 0 if no piece contains it.
    pub piece: unsafe extern "C" fn(at: usize, out: *mut Piece) -> c_int,
    /// Announces the system call `number` with these arguments, before it is made for the program.
    pub before: unsafe extern "C" fn(number: c_long, arguments: *const [usize; 6]),
    /// Stores the library's function, which the allocator calls from then on to end registrations.
    pub attach: unsafe extern "C" fn(end: End),
}
