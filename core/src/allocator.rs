//! The C interface between the library and the registered allocator (`alloc/`, `librdmasock_alloc.so`), which are two
//! libraries of one process. By it the library finds the piece of the allocator's memory that contains an address, and
//! whether that piece has changed. Both sides are built from this file; their code is elsewhere.
//!
//! The allocator's memory consists of pieces. Each has an *epoch*: a number that changes before the allocator, or a
//! call of the program's, does anything to its pages or addresses. Facts about a piece, such as the registration at a
//! device, hold as long as the epoch is the same as before they were learned. No epoch is used twice.

use std::ffi::{c_int, c_long};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// The version of the table; changes with any change to this file.
pub const ABI: u32 = 1;

/// The name of the allocator's symbol, which is an [`Entry`].
pub const ENTRY: &std::ffi::CStr = c"rdmasock_allocator";

/// Returns the allocator's table, which lives as long as the process; null to a library of another version.
pub type Entry = unsafe extern "C" fn(abi: u32) -> *const Table;

/// Makes the library end the registrations of this memory at all devices, since the memory is about to be replaced.
/// With `force` no later call uses the registrations, and the uses of a current call end with that call. Without
/// `force` nothing happens while a call uses any of the memory. Returns 1 if no device has any of it registered when
/// this returns, otherwise 0.
pub type End = unsafe extern "C" fn(start: usize, len: usize, force: c_int) -> c_int;

/// In an epoch: the piece is whole; all of it can be read and written.
pub const WHOLE: u64 = 1;
/// In an epoch: the program has changed the mappings of the piece; it is never whole again.
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
    /// The epoch of the piece; the word lives as long as the process.
    pub epoch: *const AtomicU64,
}

impl Piece {
    /// Returns the current epoch; 0 without one.
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
    /// Announces that a system call is about to be made for the program, with these arguments.
    pub before: unsafe extern "C" fn(number: c_long, arguments: *const [usize; 6]),
    /// Stores the library's function.
    pub attach: unsafe extern "C" fn(end: End),
}
