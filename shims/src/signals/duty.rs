//! Work that a thread does for others while it sleeps. A signal handler of the program's may wait for any time. So
//! while a handler runs above the sleep, other threads have to do that work.

use rdmasock_core::os::thread;

type HandOver<'a> = &'a dyn Fn();

/// Runs `sleep`, a call that blocks. If a signal handler runs meanwhile, calls `hand_over` before it, once. `hand_over`
/// is async-signal-safe.
pub fn on_duty<R>(hand_over: HandOver<'_>, sleep: impl FnOnce() -> R) -> R {
    let _duty = Duty::begin(&hand_over);
    sleep()
}

/// Keeps the thread's `hand_over` until it is dropped, also if the thread is cancelled.
struct Duty {
    /// The `hand_over` of the call that a signal handler has interrupted, or null.
    before: *const (),
}

impl Duty {
    fn begin(hand_over: &HandOver<'_>) -> Self {
        let before = thread::current().duty().replace(std::ptr::from_ref(hand_over).cast());
        Self { before }
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        thread::current().duty().set(self.before);
    }
}

/// Hands the thread's work over. For a signal handler that is about to run while the thread has no critical section
/// open.
#[inline]
pub fn on_handler() {
    let duty = thread::current().duty().replace(std::ptr::null());
    if !duty.is_null() {
        hand_over(duty);
    }
}

#[cold]
fn hand_over(duty: *const ()) {
    // SAFETY: `begin` has stored this address, of a value in the frame of a call in which this thread still is.
    (unsafe { *duty.cast::<HandOver<'_>>() })();
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn it_is_handed_over_once_and_the_call_beneath_has_its_own() {
        let (outer, inner) = (Cell::new(0), Cell::new(0));
        on_handler();
        on_duty(&|| outer.set(outer.get() + 1), || {
            on_duty(&|| inner.set(inner.get() + 1), || {
                on_handler();
                on_handler();
            });
            on_handler();
        });
        on_handler();
        assert_eq!((outer.get(), inner.get()), (1, 1));
    }
}
