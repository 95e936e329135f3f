//! `librdmasock.so`: the symbols that precede libc's. Each hook passes its arguments and libc's own function to
//! `rdmasock_shims::hooks` and returns the result. The hooks have no logic. `exports.txt` lists the symbols, and
//! `scripts/check-exports` compares the list with the library.

mod api;
mod bypass;
mod dlopen;
mod fd;
mod heap;
mod io;
mod jump;
mod load;
mod numbers;
mod process;
mod ready;
mod signals;
mod socket;
mod syscall;
mod variadic;
mod vfork;
