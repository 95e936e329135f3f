//! `librdmasock_alloc.so`: malloc and its related functions, which the program finds before libc's. Large blocks of a
//! program can stay registered with RDMA devices for longer than a call (`RDMASOCK_ALLOC=registered`,
//! docs/design/allocator.md). They lie in *arenas*. An arena of this library is a range of addresses that is never
//! unmapped; in other crates the word means the memory of a link. It is divided into *grains*, of which blocks consist,
//! and into *pieces*, which get memory from the kernel and give it back. The *next allocator*, usually libc's, serves
//! small blocks. The main library, librdmasock.so, asks by the interface `rdmasock_core::allocator` in which piece an
//! address lies. Without the main library this is a plain allocator.
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
//! memory may belong to no block. A call may never finish: a signal handler may jump out of it, or its thread may end.
//! In a fork child the calls of the parent's other threads stay unfinished. In each case at most that memory is lost.

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

/// The allocator for the library's own few allocations. They do not come from the malloc that it exports.
#[cfg(not(test))]
#[global_allocator]
static HEAP: rdmasock_core::os::heap::Heap = rdmasock_core::os::heap::Heap::new();
