//! The hooks that are ordinary functions. They are generated from the table in `shims/src/sys/hooked.rs`. The other
//! files of this folder have the hooks that redhook cannot declare.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{
    FILE, aiocb, c_char, c_int, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t,
    pid_t, pollfd, posix_spawn_file_actions_t, posix_spawnattr_t, sigevent, sighandler_t, sigset_t, size_t, sockaddr,
    socklen_t, ssize_t, timespec, timeval,
};
use rdmasock_shims::config::environment;
use rdmasock_shims::hooks::{fd, io, process, ready, socket};
use rdmasock_shims::process::sigaction as signals;
use rdmasock_shims::sys::real;

/// Defines the hooks of the table. Each symbol in a row becomes a hook: an exported function with the arguments and the
/// result of the row. The hook calls the row's function, which is in the module `$module`. It passes libc's function of
/// the symbol's name first, from `real` or `environment` (`$libc`), then its own arguments.
macro_rules! hooks {
    ($($module:ident with $libc:ident {$(
        $function:ident $arguments:tt -> $result:ty: $($symbol:ident),* $(| $way:ident $number:ident)*;
    )*})*) => {
        $($($(hooks!(@hook $symbol $arguments -> $result, $module $function $libc);)*)*)*
    };
    (@hook $symbol:ident ($($argument:ident: $type:ty),*) -> $result:ty, $module:ident $function:ident $libc:ident) => {
        // For each hook, redhook defines items with fixed names. So each hook has a scope of its own, `const _`. In
        // that scope redhook also defines a type with the symbol's name, which can equal the module's name (`socket`).
        // With `self::` the path leads to the module.
        const _: () = {
            redhook::hook! {
                unsafe fn $symbol($($argument: $type),*) -> $result => hook {
                    self::$module::$function(hooks!(@libc $libc $symbol) $(, $argument)*)
                }
            }
        };
    };
    (@libc real $symbol:ident) => { real::$symbol() };
    (@libc environment $symbol:ident) => { environment::$symbol };
}

rdmasock_shims::hooked! { hooks }
