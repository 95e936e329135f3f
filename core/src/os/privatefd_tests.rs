//! Tests of the hidden fds. The bitmap and the limits belong to the process, so what changes the
//! limits runs in a forked child.

use proptest::prelude::*;
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::process::setrlimit;

use super::*;
use crate::os::forked::in_child;

fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe().unwrap()
}

fn limits(soft: u64, hard: u64) {
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(soft),
            maximum: Some(hard),
        },
    )
    .unwrap();
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: only asks whether the number is in use.
    fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok()
}

#[test]
fn a_private_fd_is_high_hidden_and_gone_when_dropped() {
    in_child(|| {
        let (reader, writer) = pipe();
        let low = reader.as_raw_fd();
        let private = PrivateFd::place(reader).unwrap();
        let high = private.as_raw_fd();
        assert!(high > low && !is_open(low));
        assert!(is_private(high) && !is_private(writer.as_raw_fd()));
        assert!(fcntl_getfd(&private).unwrap().contains(FdFlags::CLOEXEC));
        let second = private.try_clone().unwrap();
        assert_ne!(second.as_raw_fd(), high);
        drop((private, second));
        assert!(!is_private(high) && !is_open(high));
        assert_eq!(rustix::io::write(&writer, b"x"), Err(Errno::PIPE));
    });
}

#[test]
fn no_private_fd_is_seen_at_odd_numbers() {
    for fd in [
        -1,
        0,
        1,
        2,
        RawFd::MIN,
        RawFd::MAX,
        END as RawFd,
        END as RawFd - 1,
    ] {
        assert!(!is_private(fd), "{fd}");
    }
    assert_eq!(next_private(0, 2), None);
    assert_eq!(next_private(END, u32::MAX), None);
}

#[test]
fn the_program_can_not_reach_a_number_beyond_its_limit() {
    in_child(|| {
        let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 20);
        if hard <= 4096 {
            return;
        }
        limits(256, hard);
        let private = PrivateFd::place(pipe().0).unwrap();
        assert!(
            private.as_raw_fd()
                >= if hard > FLOOR.into() {
                    FLOOR as RawFd
                } else {
                    256
                }
        );
        assert_eq!(getrlimit(Resource::Nofile).current, Some(256));
        assert!(fcntl_getfd(&private).is_ok());

        // Under a hard limit below FLOOR, from the soft limit up.
        limits(256, 1024);
        let private = PrivateFd::place(pipe().0).unwrap();
        assert!((256..1024).contains(&private.as_raw_fd()));

        // Where the hard limit gives no room, the highest number, one after the other.
        limits(200, 200);
        let first = PrivateFd::place(pipe().0).unwrap();
        let second = PrivateFd::place(pipe().0).unwrap();
        assert_eq!((first.as_raw_fd(), second.as_raw_fd()), (199, 198));
        drop(first);
        assert_eq!(PrivateFd::place(pipe().0).unwrap().as_raw_fd(), 199);
    });
}

#[test]
fn no_number_left_is_an_error_that_leaks_nothing() {
    in_child(|| {
        limits(64, 64);
        let (reader, writer) = pipe();
        let mut taken = Vec::new();
        while let Ok(fd) = rustix::io::dup(&writer) {
            taken.push(fd);
        }
        assert_eq!(PrivateFd::place(reader).unwrap_err(), Errno::MFILE);
        taken.clear();
        assert_eq!(rustix::io::write(&writer, b"x"), Err(Errno::PIPE));
    });
}

#[test]
fn a_fork_child_keeps_only_what_it_is_told_to() {
    let kept = PrivateFd::place(pipe().0).unwrap();
    let closed = PrivateFd::place(pipe().0).unwrap();
    let (kept, closed) = (kept.as_raw_fd(), closed.as_raw_fd());
    // Raw numbers from here on; the child's copies of the owners are forgotten by _exit.
    let (keep_alive, close_alive) = (kept, closed);
    in_child(move || {
        // SAFETY: the child uses no owner of a private fd afterwards.
        unsafe { reset_in_fork_child(|fd| fd == keep_alive) };
        assert!(!is_private(close_alive) && !is_open(close_alive));
        assert_eq!(
            next_private(0, u32::MAX),
            is_private(keep_alive).then_some(keep_alive as u32)
        );
    });
}

#[test]
fn a_fork_child_gets_back_the_limit_that_a_thread_of_the_parent_had_raised() {
    in_child(|| {
        let hard = getrlimit(Resource::Nofile).maximum.unwrap();
        limits(hard, hard);
        TURN_TAKEN.store(true, Ordering::Relaxed);
        SOFT_BEFORE.store(100, Ordering::Relaxed);
        // SAFETY: the child uses no owner of a private fd afterwards.
        unsafe { reset_in_fork_child(|_| true) };
        assert_eq!(getrlimit(Resource::Nofile).current, Some(100));
        assert!(!TURN_TAKEN.load(Ordering::Relaxed));
    });
}

#[test]
fn the_pieces_between_private_fds_cover_all_else() {
    in_child(|| {
        // SAFETY: the child uses no owner of a private fd afterwards.
        unsafe { reset_in_fork_child(|_| false) };
        for n in [5, 6, 9, 64, 127, 128] {
            register(n);
        }
        let pieces = |first, last| ranges_without_private(first, last).collect::<Vec<_>>();
        assert_eq!(
            pieces(0, u32::MAX),
            [(0, 4), (7, 8), (10, 63), (65, 126), (129, u32::MAX)]
        );
        assert_eq!(pieces(5, 6), []);
        assert_eq!(pieces(6, 9), [(7, 8)]);
        assert_eq!(pieces(7, 8), [(7, 8)]);
        assert_eq!(pieces(9, 3), []);
    });
}

proptest! {
    #[test]
    fn a_plan_keeps_to_the_limits(soft in 0u64..2_000_000, more in 0u64..2_000_000) {
        let hard = soft + more;
        match plan(soft, hard) {
            Plan::Within(n) => prop_assert!(u64::from(n) < soft && n == CEILING),
            Plan::Beyond(n) => prop_assert!((soft..hard).contains(&n.into()) && n <= CEILING),
            Plan::HighestBelow(n) => prop_assert!(soft == hard && u64::from(n) == soft),
        }
    }
}

#[test]
fn an_unlimited_program_has_a_plan_too() {
    assert_eq!(plan(u64::MAX, u64::MAX), Plan::Within(CEILING));
    assert_eq!(plan(1024, u64::MAX), Plan::Beyond(FLOOR));
    assert_eq!(plan(1024, 1024), Plan::HighestBelow(1024));
    assert_eq!(plan(20_000, 20_000), Plan::HighestBelow(20_000));
    assert_eq!(plan(1024, 4096), Plan::Beyond(1024));
    assert_eq!(plan(20_000, 524_288), Plan::Beyond(20_000));
}
