//! The shape of hooks that are one function: it acts before libc's function, or on its result. Calls that are served on
//! a connection have another shape (`io/shape.rs`).

/// Defines hooks that go on to libc's function, with unchanged arguments:
///
/// ```text
/// hooks! {
///     pub fn NAME(TYPE OF LIBC'S, ARGUMENT: TYPE, …) -> RESULT;
///     |plain| EXPRESSION
/// }
/// ```
///
/// The expression calls libc's function by `plain()`: as the last thing that it does, or where the call cannot block.
/// With `|blocking plain|` the call is a cancellation point, and may be made anywhere.
macro_rules! hooks {
    ($(
        $(#[$what:meta])*
        pub fn $name:ident($real:ty $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;
        |$($word:ident)+| $body:expr
    )*) => {$(
        $(#[$what])*
        #[inline]
        pub unsafe extern "C" fn $name(real: $real $(, $argument: $type)*) $(-> $result)? {
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
