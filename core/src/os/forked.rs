//! For tests: runs a piece of a test in a forked child.
//!
//! If the child changes its limits or uids, other tests are not affected. Threads of other tests do not exist in the
//! child, so none of them can fork there and keep the child's fds open.

/// The number of seconds after which a child is ended. A child whose test panics can hang: the panic message takes a
/// lock that another test's thread may have held at the fork.
const LIMIT: u32 = 60;

/// Runs `f` in a forked child. A panic, or a child that is still running after `LIMIT` seconds, fails the test.
pub(crate) fn in_child(f: impl FnOnce()) {
    in_child_within(LIMIT, f);
}

fn in_child_within(seconds: u32, f: impl FnOnce()) {
    // SAFETY: the child runs `f` and ends by _exit. The tests' other threads do not exist in the child. The only lock
    // that `f` takes and that they may have held is the allocator's, which glibc makes usable after fork.
    match unsafe { libc::fork() } {
        -1 => panic!("fork failed"),
        0 => {
            // SAFETY: the call only sets a timer. When the timer expires, SIGALRM ends the child, unless the test
            // handles it.
            unsafe { libc::alarm(seconds) };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            // SAFETY: ends the child at once, without the parent's exit handlers.
            unsafe { libc::_exit(i32::from(result.is_err())) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the process is a child of this one; `status` is valid for writes.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert_eq!(status, 0, "the child failed");
        }
    }
}

/// Returns a TCP port without a listener. Another process could bind it later.
pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

#[test]
#[should_panic(expected = "the child failed")]
fn a_child_that_does_not_end_fails() {
    in_child_within(1, || {
        loop {
            // SAFETY: pause() only waits for a signal.
            unsafe { libc::pause() };
        }
    });
}
