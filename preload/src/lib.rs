//! `librdmasock.so`: the libc symbols that it puts in front of libc's. Each hook hands its arguments and
//! libc's own function to `rdmasock_shims::calls` and returns what comes back; there is no logic
//! here. `exports.txt` lists the symbols, `scripts/check-exports` compares.

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
