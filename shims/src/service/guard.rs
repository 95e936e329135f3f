//! Catches panics of the service thread. A panic is a defect of the library; neither the program nor its other
//! connections are to suffer from it.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The first pause; each is twice as long as the one before, up to `LAST_PAUSE`. So a panic that repeats costs little.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether this thread's panics are caught here. Has no destructor, so it may be read at any time.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `round` until it breaks. A panic ends the one round; the next begins after a `pause`.
///
/// The command or event that the round was about is lost. Its connection may stay on TCP, or wait until its promotion's
/// time is up. The next round handles the others. Locks are released as their guards unwind.
pub fn rounds(mut round: impl FnMut() -> ControlFlow<()>, mut pause: impl FnMut(Duration)) {
    log_caught_panics();
    let mut rest = FIRST_PAUSE;
    loop {
        match catch_unwind(AssertUnwindSafe(&mut round)) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => return,
            Err(_) => {
                pause(rest);
                rest = (rest * 2).min(LAST_PAUSE);
            }
        }
    }
}

/// Logs a panic that this thread's [`rounds`] will catch. The standard library would write it to fd 2, which is the
/// program's. Any other panic ends the process, and is reported as usual. That standard library is linked into this
/// one: a program in Rust has its own, with its own hook.
fn log_caught_panics() {
    IS_GUARDED.set(true);
    // No `Once`: a fork child must not wait for a thread that it does not have.
    static IS_SET: AtomicBool = AtomicBool::new(false);
    if IS_SET.swap(true, Relaxed) {
        return;
    }
    let others = take_hook();
    set_hook(Box::new(move |panic| {
        if IS_GUARDED.get() {
            tracing::error!(target: "rdmasock", %panic, "a defect of the library; please report it");
        } else {
            others(panic);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round that panics is not the last, and pauses grow up to their bound.
    #[test]
    fn a_panic_costs_one_round() {
        let (mut done, mut pauses) = (0, Vec::new());
        let round = || {
            done += 1;
            assert!(done % 2 == 0, "round {done}");
            if done < 40 {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        };
        rounds(round, |pause| pauses.push(pause));
        assert_eq!((done, pauses.len()), (40, 20));
        assert_eq!(pauses.first(), Some(&FIRST_PAUSE));
        assert_eq!(pauses.last(), Some(&LAST_PAUSE));
        assert!(pauses.is_sorted());
    }
}
