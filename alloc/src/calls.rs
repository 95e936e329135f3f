//! malloc and its related functions. Each function serves a request from an arena, or passes it to the next allocator.
//! Results and errno equal glibc's.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use libc::size_t;

use crate::arena::Arena;
use crate::arenas::LARGE;
use crate::{arenas, next};

const PAGE: usize = 4096;

fn errno() -> *mut c_int {
    // SAFETY: the function has no precondition.
    unsafe { libc::__errno_location() }
}

/// Sets errno to ENOMEM and returns null.
fn no_memory() -> *mut c_void {
    // SAFETY: errno is the calling thread's own.
    unsafe { *errno() = libc::ENOMEM };
    null_mut()
}

/// Runs `what` and restores errno. System calls of the allocator may change errno, but glibc's functions leave it
/// unchanged if they succeed.
fn keeping_errno<R>(what: impl FnOnce() -> R) -> R {
    // SAFETY: errno is the calling thread's own.
    let before = unsafe { *errno() };
    let result = what();
    // SAFETY: as above.
    unsafe { *errno() = before };
    result
}

fn pointer(at: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(at)
}

/// Takes a block from an arena, if the request is large. `None` if the next allocator has to serve the request.
fn large(size: usize, align: usize) -> Option<(*mut c_void, &'static Arena)> {
    if size < LARGE {
        return None;
    }
    arenas::take(size, align).map(|(at, arena)| (pointer(at), arena))
}

/// Returns a block from the next allocator, by `of`. As long as that allocator is not known, returns early memory. Null
/// with ENOMEM if neither has memory.
fn next_or_early(of: impl FnOnce() -> Option<*mut c_void>, size: usize, align: usize) -> *mut c_void {
    if next::is_known() {
        return of().unwrap_or_else(no_memory);
    }
    let block = next::early(size, align);
    if block.is_null() { no_memory() } else { block }
}

/// Returns a block from an arena if the request is large, else the result of [`next_or_early`].
#[inline]
fn block(of: impl FnOnce() -> Option<*mut c_void>, size: usize, align: usize) -> *mut c_void {
    match large(size, align) {
        Some((block, _)) => block,
        None => next_or_early(of, size, align),
    }
}

/// malloc(3).
///
/// # Safety
/// As for the function of this name in C. The same holds for all functions below.
#[inline]
pub(crate) unsafe fn malloc(size: size_t) -> *mut c_void {
    // SAFETY: by the contract.
    block(|| unsafe { next::malloc(size) }, size, 1)
}

/// calloc(3).
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn calloc(count: size_t, size: size_t) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else {
        return no_memory();
    };
    if let Some((block, arena)) = large(bytes, 1) {
        arena.clear(block.addr(), bytes);
        return block;
    }
    // SAFETY: by the contract.
    next_or_early(|| unsafe { next::calloc(count, size) }, bytes, 1)
}

/// free(3).
///
/// # Safety
/// As [`malloc`].
#[inline]
pub(crate) unsafe fn free(at: *mut c_void) {
    if let Some(arena) = arenas::of(at.addr()) {
        keeping_errno(|| arenas::free(arena, at.addr()));
    } else if next::early_size(at).is_none() && !at.is_null() && next::is_known() {
        // SAFETY: by the contract.
        let _ = unsafe { next::free(at) };
    }
}

/// realloc(3).
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn realloc(at: *mut c_void, size: size_t) -> *mut c_void {
    if at.is_null() {
        // SAFETY: by the contract.
        return unsafe { malloc(size) };
    }
    if let Some(arena) = arenas::of(at.addr()) {
        // SAFETY: by the contract.
        return unsafe { of_arena(arena, at, size) };
    }
    if let Some(before) = next::early_size(at) {
        // SAFETY: the block has `before` bytes.
        return unsafe { moved(at, before, size) };
    }
    if size >= LARGE {
        // SAFETY: by the contract.
        let before = unsafe { malloc_usable_size(at) };
        if let Some((block, _)) = large(size, 1) {
            // SAFETY: both blocks have at least the copied bytes. The caller gives up the old block by this call.
            unsafe {
                block.copy_from_nonoverlapping(at, before.min(size));
                keeping_errno(|| next::free(at));
            }
            return block;
        }
    }
    // SAFETY: by the contract.
    unsafe { next::realloc(at, size) }.unwrap_or_else(no_memory)
}

/// Resizes a block of an arena, in place if possible. Returns the block, which may have moved, or null with ENOMEM.
unsafe fn of_arena(arena: &'static Arena, at: *mut c_void, size: usize) -> *mut c_void {
    if size == 0 {
        // glibc frees the block for a size of 0.
        // SAFETY: by the contract.
        unsafe { free(at) };
        return null_mut();
    }
    let Some(before) = arena.size(at.addr()) else {
        return no_memory();
    };
    if size >= LARGE && keeping_errno(|| arenas::resize(arena, at.addr(), size)) {
        return at;
    }
    // SAFETY: the caller owns the block, which has `before` bytes.
    let block = unsafe { moved(at, before, size) };
    if block.is_null() && size <= before {
        // There is no new block, but the smaller size fits into the old block.
        return at;
    }
    block
}

/// Copies a block to a new block of `size` bytes, and frees the old block. Returns the new block. If there is no
/// memory, returns null and keeps the old block.
unsafe fn moved(at: *mut c_void, before: usize, size: usize) -> *mut c_void {
    // SAFETY: the caller owns the block, which has `before` bytes, and may free it.
    unsafe {
        let block = malloc(size);
        if !block.is_null() {
            block.copy_from_nonoverlapping(at, before.min(size));
            free(at);
        }
        block
    }
}

/// reallocarray(3).
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn reallocarray(at: *mut c_void, count: size_t, size: size_t) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: by the contract.
        Some(bytes) => unsafe { realloc(at, bytes) },
        None => no_memory(),
    }
}

/// memalign(3). An alignment that is no power of two counts as the next power of two.
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn memalign(align: size_t, size: size_t) -> *mut c_void {
    let block = align.checked_next_power_of_two().and_then(|align| large(size, align));
    if let Some((block, _)) = block {
        return block;
    }
    // SAFETY: by the contract.
    next_or_early(|| unsafe { next::memalign(align, size) }, size, align)
}

/// aligned_alloc(3).
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn aligned_alloc(align: size_t, size: size_t) -> *mut c_void {
    if align.is_power_of_two()
        && let Some((block, _)) = large(size, align)
    {
        return block;
    }
    // SAFETY: by the contract.
    next_or_early(|| unsafe { next::aligned_alloc(align, size) }, size, align)
}

/// posix_memalign(3). Returns an error number, and does not change errno.
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn posix_memalign(to: *mut *mut c_void, align: size_t, size: size_t) -> c_int {
    let is_good = align.is_power_of_two() && align.is_multiple_of(size_of::<*mut c_void>());
    let block = match large(size, align) {
        Some((block, _)) if is_good => block,
        Some((block, _)) => {
            // SAFETY: the block was taken just now, and no other code knows its address.
            unsafe { free(block) };
            return libc::EINVAL;
        }
        None if next::is_known() => {
            // SAFETY: by the contract.
            return unsafe { next::posix_memalign(to, align, size) }.unwrap_or(libc::ENOMEM);
        }
        None if !is_good => return libc::EINVAL,
        None => next::early(size, align),
    };
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: by the contract.
    unsafe { to.write(block) };
    0
}

/// valloc(3).
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn valloc(size: size_t) -> *mut c_void {
    // SAFETY: by the contract.
    block(|| unsafe { next::valloc(size) }, size, PAGE)
}

/// pvalloc(3). Rounds the size up to whole pages.
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn pvalloc(size: size_t) -> *mut c_void {
    let Some(pages) = size.checked_next_multiple_of(PAGE) else {
        return no_memory();
    };
    // SAFETY: by the contract.
    block(|| unsafe { next::pvalloc(size) }, pages, PAGE)
}

/// malloc_usable_size(3).
///
/// # Safety
/// As [`malloc`].
pub(crate) unsafe fn malloc_usable_size(at: *mut c_void) -> size_t {
    if at.is_null() {
        return 0;
    }
    if let Some(arena) = arenas::of(at.addr()) {
        return arena.size(at.addr()).unwrap_or(0);
    }
    if let Some(size) = next::early_size(at) {
        return size;
    }
    // SAFETY: by the contract.
    unsafe { next::malloc_usable_size(at) }.unwrap_or(0)
}

#[cfg(test)]
mod tests;
