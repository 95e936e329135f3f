//! The C interface between librdmasock.so, *the library*, and librdmasock_alloc.so (`alloc/`), *the allocator*: a
//! malloc whose large blocks stay registered with RDMA devices. Both may be loaded into one process. Through this
//! interface the library asks which piece of the allocator's memory contains an address, and reads whether that piece
//! has changed. Both are built from this file. Their own code is elsewhere.
//!
//! The allocator's memory consists of pieces. Each piece has an *epoch*: a number that changes before the allocator, or
//! a system call of the program, changes the piece's pages or addresses. The library reads the epoch before it finds
//! out a fact about the piece, such as its registration with a device. The fact holds while the epoch is still that
//! number. After such a change no earlier epoch of the piece comes back.

use std::ffi::{c_int, c_long};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// The version of this interface. Each change to this file also changes the version.
pub const ABI: u32 = 1;

/// The name of the symbol that the allocator exports: a function of type [`Entry`].
pub const ENTRY: &std::ffi::CStr = c"rdmasock_allocator";

/// Returns the allocator's table, which lives as long as the process. Returns null if `abi`, the caller's version of
/// the interface, is not the allocator's version.
pub type Entry = unsafe extern "C" fn(abi: u32) -> *const Table;

/// A function of the library, which the allocator calls before it, or the program, replaces the `len` bytes at `start`.
/// The function ends the registrations of these bytes with all devices. With `force`, no later call of the program uses
/// the registrations. If a call is using a registration, that registration ends with the call. Without `force`, the
/// function does nothing while a call uses any of the bytes. Returns 1 if all registrations of the bytes have ended,
/// except registrations that a call is using; otherwise 0.
pub type End = unsafe extern "C" fn(start: usize, len: usize, force: c_int) -> c_int;

/// A flag in an epoch: the piece is whole, so all of it can be read and written.
pub const WHOLE: u64 = 1;
/// A flag in an epoch: the program has taken addresses of the piece away, for example by munmap(2). Such a piece is
/// never whole again.
pub const LOST: u64 = 2;
/// The difference between an epoch and the next one. The lower bits are the flags.
pub const NEXT: u64 = 4;

/// A piece of the allocator's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The address of the first byte.
    pub start: usize,
    /// The length in bytes, whole pages.
    pub len: usize,
    /// Points to the epoch of the piece, a word that lives as long as the process. Null only in a value that the
    /// allocator has not filled in.
    pub epoch: *const AtomicU64,
}

impl Piece {
    /// Returns the current epoch; 0 if the pointer to it is null.
    pub fn now(&self) -> u64 {
        // SAFETY: as the field promises, the pointer is null or points to a word that is never freed. SeqCst: pairs
        // with the allocator's changes of the epoch, which precede its changes of the memory.
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
    /// Finds the piece that contains the address `at`, and writes it to `out`. Returns 1, or 0 if no piece contains the
    /// address.
    pub piece: unsafe extern "C" fn(at: usize, out: *mut Piece) -> c_int,
    /// The library calls this before it makes the system call `number` with these arguments for the program. The
    /// allocator then changes the epochs of the pieces that the system call would change.
    pub before: unsafe extern "C" fn(number: c_long, arguments: *const [usize; 6]),
    /// Passes the library's function `end` to the allocator, which calls it from then on to end registrations.
    pub attach: unsafe extern "C" fn(end: End),
}
