//! `librdmasock.so`: the symbols that precede libc's. Each hook passes its arguments and libc's own function to
//! `rdmasock_shims::hooks` and returns the result. The hooks have no logic. `exports.txt` lists the symbols, and
//! `scripts/check-exports` compares the list with the library.

mod api;
mod dlopen;
mod heap;
mod hooks;
mod jump;
mod load;
mod syscall;
mod variadic;
mod vfork;
