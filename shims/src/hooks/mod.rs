//! The functions behind the hooked libc calls, one for each call. A function serves the call on an accelerated stream,
//! or hands it to libc's own function, which is its first argument.
//!
//! The shape of a function here, and why:
//!
//! ```text
//! pub unsafe extern "C" fn recv(real: real::recv, fd: c_int, …) -> ssize_t {
//!     match table::lookup(fd) {
//!         None => unsafe { real(fd, …) },   // last thing done: becomes a jump
//!         Some(socket) => recv_slow(real, socket, …), // #[inline(never)] extern "C" fn
//!     }
//! }
//! ```
//!
//! - It is `extern "C"`, so nothing unwinds from it, and redhook's `catch_unwind` around it vanishes in every optimised
//!   build (`opt-level` 1 is enough). With the `catch_unwind`, the forced unwind of a cancelled thread would abort the
//!   process, and after a panic libc's function would be called a second time. On the other hand a panic aborts, so no
//!   code here may panic.
//! - It holds no value with a destructor, and calls no function that may unwind. So it needs no landing pads, and the
//!   compiler turns the call of `real` into a jump (see [`crate::sys::real`]).
//! - A blocking call within `recv_slow` goes through [`Cancellable`](real::Cancellable). A value with a destructor that
//!   lives during such a call belongs in an `#[inline(never)]` function of Rust's own ABI, which `recv_slow` calls.
//!   There the forced unwind of a cancelled thread runs the destructor (measured, x86-64). In an `extern "C"` function
//!   it aborts the process if it meets one.
//!
//! The macro `call!` of [`io`] defines both functions for a call that moves bytes. The macro `hooks!` defines a hook
//! that is a single function and goes on to libc's.
#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of each function is that of the libc function it is named after, and that `real` is that function"
)]

use crate::sys::{real, vfork};

pub mod dlopen;
pub mod fd;
pub mod io;
mod memory;
pub mod process;
pub mod ready;
mod report;
pub mod socket;
pub mod syscall;

/// Runs when the library is loaded, before `main`. A hook may have run earlier, because another library's constructor
/// may have made a hooked call.
pub extern "C" fn on_load() {
    real::resolve_all();
    syscall::resolve();
    vfork::remember_process();
    crate::signals::ending::watch_main_thread(crate::service::wake);
    crate::objects::library::remember_program();
    crate::config::environment::remember();
    memory::find_allocator();
}

/// Defines hooks of a single function, which acts before libc's function or on its result. They go on to libc's
/// function, with unchanged arguments:
///
/// ```text
/// hooks! {
///     pub fn NAME(ARGUMENT: TYPE, …) -> RESULT;
///     |plain| EXPRESSION
/// }
/// ```
///
/// The expression calls libc's function by `plain()`. It has to be the last action of the expression, or a call that
/// cannot block. With `|blocking plain|` the call may block at any place, and is a cancellation point.
macro_rules! hooks {
    ($(
        $(#[$what:meta])*
        pub fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;
        |$($word:ident)+| $body:expr
    )*) => {$(
        $(#[$what])*
        #[inline]
        pub unsafe extern "C" fn $name(real: $crate::sys::real::$name $(, $argument: $type)*) $(-> $result)? {
            hooks!(@bind real ($($argument),*) $($word)+);
            $body
        }
    )*};
    (@bind $real:ident ($($argument:ident),*) blocking $plain:ident) => {
        // SAFETY: the caller's arguments are passed on unchanged.
        let $plain = move || unsafe { $crate::sys::real::Cancellable::cancellable($real)($($argument),*) };
    };
    (@bind $real:ident ($($argument:ident),*) $plain:ident) => {
        // SAFETY: the caller's arguments are passed on unchanged.
        let $plain = move || unsafe { $real($($argument),*) };
    };
}
pub(super) use hooks;
