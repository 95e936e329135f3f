//! `librdmasock_alloc.so`: malloc and its kin in front of libc's, for programs whose large blocks devices are to know
//! for longer than a call (`RDMASOCK_ALLOC=registered`, docs/design/allocator.md). Small blocks are the next
//! allocator's; large ones lie in arenas, which are never unmapped. The library asks where they lie
//! (`rdmasock_core::allocator`); without it this is an allocator and no more.
//!
//! The files, lowest first; none knows one that comes later.
//!
//! | file | what |
//! |---|---|
//! | `memory` | the system calls |
//! | `runs` | which grains of an arena are taken |
//! | `arena` | one arena: blocks, and the pieces that they lie in |
//! | `arenas` | all of them; which memory is given back to the kernel |
//! | `next` | the next allocator, and what there is before it is found |
//! | `calls` | malloc and its kin |
//! | `changes` | calls that change what memory is |
//! | `table` | what the library asks |
//! | `exports` | the symbols |
//!
//! Nothing here is locked, and nothing is left half done: every step is one atomic change, after which all is as it
//! should be, but that some memory may be nobody's. So a child that is forked in the middle of another thread's call,
//! a handler's jump out of one, and a thread that ends there cost that memory at most.

#![warn(missing_docs)]
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

/// What little this library needs for itself is not from the allocator that it is.
#[cfg(all(not(test), target_arch = "x86_64"))]
#[global_allocator]
static HEAP: rdmasock_core::os::heap::Heap = rdmasock_core::os::heap::Heap::new();
