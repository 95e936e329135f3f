//! `librdmasock.so`: the hooks, exported symbols that the program finds before libc's symbols of the same names. A hook
//! passes its arguments and libc's own function to `rdmasock_shims::hooks` and returns the result. It has no logic of
//! its own. `exports.txt` lists the symbols, and `scripts/check-exports` compares the list with the library.

#![warn(unreachable_pub)]

mod api;
mod dlopen;
mod hooks;
mod jump;
mod syscall;
mod variadic;
mod vfork;

/// The library's own allocator. A hook cannot use the program's `malloc`: the hook may run in a signal handler that has
/// interrupted `malloc`, and the program may have replaced `malloc`.
#[global_allocator]
static HEAP: rdmasock_core::os::heap::Heap = rdmasock_core::os::heap::Heap::new();

/// The constructor, which the dynamic linker calls (ELF gABI, "Initialization and Termination Functions").
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = rdmasock_shims::hooks::on_load;
