//! `librdmasock_alloc.so`: malloc and its related functions, which precede libc's. Large blocks of a program stay
//! registered with devices for longer than a call (`RDMASOCK_ALLOC=registered`, docs/design/allocator.md). They lie in
//! arenas, which are never unmapped. The next allocator serves small blocks. The main library finds the piece of an
//! address by `rdmasock_core::allocator`. Without the main library this is a plain allocator.
//!
//! The files, lowest first:
//!
//! | file | what |
//! |---|---|
//! | `memory` | the system calls |
//! | `runs` | the bits of taken grains of an arena |
//! | `arena` | an arena: its blocks and pieces |
//! | `arenas` | all arenas; memory that goes back to the kernel |
//! | `next` | the next allocator, and early memory until it is found |
//! | `calls` | malloc and its related functions |
//! | `changes` | system calls that change pages or addresses |
//! | `table` | the functions for the main library |
//! | `exports` | the symbols |
//!
//! The allocator has no locks. Every step is one atomic change, after which all data is consistent, except that some
//! memory may belong to no block. So a child forked in the middle of another thread's call, a handler's jump out of a
//! call, or a thread that ends in one costs that memory at most.

#![warn(missing_docs, unreachable_pub)]
#![cfg_attr(
    test,
    allow(dead_code, reason = "tests have no symbols of this library, which would be theirs")
)]

mod arena;
mod arenas;
mod calls;
mod changes;
#[cfg(not(test))]
mod exports;
mod memory;
mod next;
mod runs;
mod table;

/// The library's own allocations, which are few, do not come from the allocator that it exports.
#[cfg(not(test))]
#[global_allocator]
static HEAP: rdmasock_core::os::heap::Heap = rdmasock_core::os::heap::Heap::new();
