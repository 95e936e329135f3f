//! The functions behind the hooked libc calls, one for each. A function serves its call from an accelerated stream, or
//! hands it to libc's own function, which is its first argument.
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
//! - It is `extern "C"`, from which nothing unwinds, so redhook's `catch_unwind` around it vanishes in every optimised
//!   build (`opt-level` 1 is enough). If it stayed, the forced unwind of a cancelled thread would abort the process,
//!   and a panic would lead to a second real call. The price is that a panic aborts: no code here may panic.
//! - It holds no value with a destructor and calls no function that may unwind. So it needs no landing pads, and the
//!   compiler makes the real call a jump (see [`crate::sys::real`]).
//! - A blocking call behind `recv_slow` goes through [`Cancellable`](real::Cancellable). A destructor that is alive
//!   meanwhile belongs in an `#[inline(never)]` function of Rust's own ABI below `recv_slow`. There the forced unwind
//!   runs it (measured, x86-64); in an `extern "C"` function itself the forced unwind aborts if it meets one.
//!
//! For the calls that move bytes the macro `call!` of [`io`] makes both functions. For other calls that go on to libc's
//! function the macro `hooks!` makes the one.
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

/// Runs when the library is loaded, before `main`, but perhaps after the first hook: another library's constructor may
/// have made a hooked call.
pub extern "C" fn on_load() {
    real::resolve_all();
    syscall::resolve();
    vfork::remember_process();
    crate::signals::ending::watch_main_thread(crate::service::wake);
    crate::objects::library::remember_program();
    crate::config::environment::remember();
    memory::find_allocator();
}

/// Defines hooks that are one function, which acts before libc's function or on its result. They go on to libc's
/// function, with unchanged arguments:
///
/// ```text
/// hooks! {
///     pub fn NAME(ARGUMENT: TYPE, …) -> RESULT;
///     |plain| EXPRESSION
/// }
/// ```
///
/// The expression calls libc's function by `plain()`: as the last thing that it does, or where the call cannot block.
/// With `|blocking plain|` the call is a cancellation point, and may be made anywhere.
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
        // SAFETY: the caller's arguments, as they are.
        let $plain = move || unsafe { $crate::sys::real::Cancellable::cancellable($real)($($argument),*) };
    };
    (@bind $real:ident ($($argument:ident),*) $plain:ident) => {
        // SAFETY: the caller's arguments, as they are.
        let $plain = move || unsafe { $real($($argument),*) };
    };
}
pub(super) use hooks;
