//! What a thread does for others while it sleeps. A signal handler of the program's may wait for any time, so while one
//! runs above the sleep others are to do it.

use rdmasock_core::os::thread;

type HandOver<'a> = &'a dyn Fn();

/// Runs `sleep`, a call that blocks. Should a signal handler run meanwhile, `hand_over` is called first, once: it is
/// async-signal-safe.
pub fn on_duty<R>(hand_over: HandOver<'_>, sleep: impl FnOnce() -> R) -> R {
    let _duty = Duty::begin(&hand_over);
    sleep()
}

/// Until it is dropped, as it is too where the thread is cancelled.
struct Duty {
    /// That of the call that a signal handler has interrupted.
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

/// A signal handler is about to run on this thread, which is in the middle of nothing.
#[inline]
pub fn on_handler() {
    let duty = thread::current().duty().replace(std::ptr::null());
    if !duty.is_null() {
        hand_over(duty);
    }
}

#[cold]
fn hand_over(duty: *const ()) {
    // SAFETY: what `begin` was given, in the frame of a call that this thread is in the middle of.
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
