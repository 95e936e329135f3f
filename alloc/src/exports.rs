//! The exported symbols of `librdmasock_alloc.so`: malloc and its related functions, hooks of the calls that change
//! pages or addresses, and the function that the main library looks up. `exports.txt` lists the symbols, and
//! `scripts/check-exports` compares the list with the library.

#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of each function is that of the one with its name in C"
)]

use core::ffi::{c_int, c_void};
use core::ptr::null;

use libc::{off_t, size_t, ssize_t};
use rdmasock_core::allocator::{ABI, Table};

use crate::table::TABLE;
use crate::{calls, changes, next};

/// `exported!(NAME(ARGUMENTS) -> RESULT)`: exports a function NAME, which calls the function of the same name in
/// `calls`.
macro_rules! exported {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                // SAFETY: by the contract.
                unsafe { calls::$name($($arg),*) }
            }
        )*
    };
}

exported! {
    /// malloc(3).
    malloc(size: size_t) -> *mut c_void;
    /// calloc(3).
    calloc(count: size_t, size: size_t) -> *mut c_void;
    /// realloc(3).
    realloc(at: *mut c_void, size: size_t) -> *mut c_void;
    /// reallocarray(3).
    reallocarray(at: *mut c_void, count: size_t, size: size_t) -> *mut c_void;
    /// free(3).
    free(at: *mut c_void) -> ();
    /// memalign(3).
    memalign(align: size_t, size: size_t) -> *mut c_void;
    /// posix_memalign(3).
    posix_memalign(to: *mut *mut c_void, align: size_t, size: size_t) -> c_int;
    /// aligned_alloc(3).
    aligned_alloc(align: size_t, size: size_t) -> *mut c_void;
    /// valloc(3).
    valloc(size: size_t) -> *mut c_void;
    /// pvalloc(3).
    pvalloc(size: size_t) -> *mut c_void;
    /// malloc_usable_size(3).
    malloc_usable_size(at: *mut c_void) -> size_t;
}

/// `looked_at!(NAME = TEXT, NUMBER, (ARGUMENTS) -> RESULT, FAILURE)`: exports a function NAME. It passes the system
/// call's NUMBER and the arguments to `changes`, then calls libc's function NAME. If libc has no such function, it
/// returns FAILURE with errno ENOSYS.
macro_rules! looked_at {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $number:ident, ($($arg:ident: $type:ty),*) -> $result:ty, $failure:expr;)*) => {
        mod behind {
            use super::*;

            $crate::next::next! {
                $($(#[$doc])* $name: fn($($arg: $type),*) -> $result = $text;)*
            }
        }

        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                let mut words = [0; 6];
                for (word, argument) in words.iter_mut().zip([$($arg as usize),*]) {
                    *word = argument;
                }
                changes::before(libc::$number, &words);
                // SAFETY: by the contract.
                unsafe { behind::$name($($arg),*) }.unwrap_or_else(|| {
                    // SAFETY: errno is the calling thread's own.
                    unsafe { *libc::__errno_location() = libc::ENOSYS };
                    $failure
                })
            }
        )*
    };
}

looked_at! {
    /// mmap(2).
    mmap = c"mmap", SYS_mmap,
        (at: *mut c_void, len: size_t, access: c_int, how: c_int, fd: c_int, offset: off_t) -> *mut c_void, libc::MAP_FAILED;
    /// mmap(2).
    mmap64 = c"mmap64", SYS_mmap,
        (at: *mut c_void, len: size_t, access: c_int, how: c_int, fd: c_int, offset: off_t) -> *mut c_void, libc::MAP_FAILED;
    /// munmap(2).
    munmap = c"munmap", SYS_munmap, (at: *mut c_void, len: size_t) -> c_int, -1;
    /// mremap(2). Its last argument is valid only with MREMAP_FIXED.
    mremap = c"mremap", SYS_mremap,
        (at: *mut c_void, len: size_t, now: size_t, how: c_int, to: *mut c_void) -> *mut c_void, libc::MAP_FAILED;
    /// mprotect(2).
    mprotect = c"mprotect", SYS_mprotect, (at: *mut c_void, len: size_t, access: c_int) -> c_int, -1;
    /// pkey_mprotect(2).
    pkey_mprotect = c"pkey_mprotect", SYS_pkey_mprotect,
        (at: *mut c_void, len: size_t, access: c_int, key: c_int) -> c_int, -1;
    /// madvise(2).
    madvise = c"madvise", SYS_madvise, (at: *mut c_void, len: size_t, advice: c_int) -> c_int, -1;
    /// process_madvise(2), since glibc 2.36.
    process_madvise = c"process_madvise", SYS_process_madvise,
        (process: c_int, places: *const libc::iovec, count: size_t, advice: c_int, flags: u32) -> ssize_t, -1;
    /// shmat(2).
    shmat = c"shmat", SYS_shmat, (id: c_int, at: *const c_void, how: c_int) -> *mut c_void, libc::MAP_FAILED;
}

/// Returns the table of functions for the main library. Null if the main library has another version of the table
/// ([`rdmasock_core::allocator::Entry`]).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdmasock_allocator(abi: u32) -> *const Table {
    if abi == ABI { &raw const TABLE } else { null() }
}

/// The constructor, which the dynamic linker calls. It looks all functions up, because `dlsym` is not allowed later in
/// a signal handler or in a fork child.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

extern "C" fn on_load() {
    next::is_known();
    behind::find_all();
}
