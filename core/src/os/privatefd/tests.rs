//! Tests of the hidden fds. The bitmap and the limits belong to the process, so tests that change the limits run in a
//! forked child.

use rustix::io::{FdFlags, fcntl_getfd};
use rustix::process::{Rlimit, setrlimit};

use crate::os::forked::in_child;
use crate::os::privatefd::*;

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

/// Runs a test in a child with the standard fds alone. Other tests at the same time have fds open, and the process that
/// started the tests may have left some open.
fn in_bare_child(test: impl FnOnce()) {
    in_child(|| {
        // SAFETY: the child uses no owner of a private fd that it has inherited.
        unsafe { reset_in_fork_child(|_| false) };
        // SAFETY: the child uses no other inherited fd either.
        assert_eq!(unsafe { libc::close_range(3, libc::c_uint::MAX, 0) }, 0);
        test();
    });
}

/// The count of numbers that the reserve takes: the numbers set aside, and the number of the eventfd.
const SET_ASIDE: usize = RESERVED + 1;

fn is_open(fd: RawFd) -> bool {
    // SAFETY: the borrowed fd is used only to check whether the number is in use.
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
        let second = PrivateFd::duplicate(private.as_fd()).unwrap();
        assert_ne!(second.as_raw_fd(), high);
        drop((private, second));
        assert!(!is_private(high) && !is_open(high));
        assert_eq!(rustix::io::write(&writer, b"x"), Err(Errno::PIPE));
    });
}

#[test]
fn no_private_fd_is_seen_at_odd_numbers() {
    for fd in [-1, 0, 1, 2, RawFd::MIN, RawFd::MAX, END as RawFd, END as RawFd - 1] {
        assert!(!is_private(fd), "{fd}");
    }
    assert_eq!(next_private(0, 2), None);
    assert_eq!(next_private(END, u32::MAX), None);
}

#[test]
fn numbers_are_within_the_limit_which_stays_as_it_is() {
    in_bare_child(|| {
        let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 20);
        let place = || PrivateFd::place(pipe().0).unwrap();
        limits(256, hard);
        let (first, second) = (place(), place());
        let set_aside = SET_ASIDE as RawFd;
        assert_eq!((first.as_raw_fd(), second.as_raw_fd()), (255, 254 - set_aside));
        drop(first);
        assert_eq!(place().as_raw_fd(), 255);
        if hard >= 4096 {
            limits(4096, hard);
            assert_eq!(place().as_raw_fd(), USUAL as RawFd - 1);
            assert_eq!(getrlimit(Resource::Nofile).current, Some(4096));
        }
    });
}

#[test]
fn what_is_set_aside_comes_within_a_lower_limit() {
    in_bare_child(|| {
        let reader = pipe().0;
        let duplicate = || PrivateFd::duplicate(reader.as_fd()).unwrap();
        limits(1024, 1024);
        let mut private = vec![duplicate()];
        assert_eq!(private[0].as_raw_fd(), USUAL as RawFd - 1);
        limits(64, 64);
        private.push(duplicate());
        let _taken = fill(&reader);
        for _ in 0..2 * RESERVED {
            assert!(PrivateFd::duplicate_closing(reader.as_fd()).is_ok());
        }
    });
}

#[test]
fn most_numbers_are_the_programs() {
    in_bare_child(|| {
        let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 20);
        if hard < 2048 {
            return;
        }
        let reader = pipe().0;
        let all = || std::iter::from_fn(|| PrivateFd::duplicate(reader.as_fd()).ok()).collect::<Vec<_>>();
        // Numbers are taken below `USUAL` (960) first. When those are used up, more are taken just below the limit.
        limits(2048, hard);
        let many = all();
        let count = |range: std::ops::Range<RawFd>| many.iter().filter(|fd| range.contains(&fd.as_raw_fd())).count();
        assert_eq!(count(0..960) + count(1500..2048), 2048 / 4 + 8 - SET_ASIDE);
        assert_eq!(count(0..960), 960 / 4 + 8 - SET_ASIDE);
        drop(many);
        limits(64, hard);
        assert_eq!(all().len(), 64 / 4 + 8 - SET_ASIDE);
    });
}

#[test]
fn no_number_left_is_an_error_that_leaks_nothing() {
    in_bare_child(|| {
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
fn the_last_numbers_are_left_to_the_program() {
    in_bare_child(|| {
        limits(64, 64);
        let (reader, _writer) = pipe();
        let mut taken = Vec::new();
        while let Ok(fd) = rustix::io::dup(&reader) {
            taken.push(fd);
        }
        // The free numbers are low and few. The library takes none of them, except for an fd that is being closed.
        for free in 1..=SPARE {
            drop(taken.remove(0));
            assert_eq!(PrivateFd::duplicate(reader.as_fd()).unwrap_err(), Errno::MFILE);
            assert!(PrivateFd::duplicate_closing(reader.as_fd()).is_ok());
            let all: Vec<_> = std::iter::from_fn(|| rustix::io::dup(&reader).ok()).collect();
            assert_eq!(all.len(), free);
        }
        // If many numbers are free, but all of them are low, the library takes none either.
        drop(taken.drain(..SPARE + 4));
        assert_eq!(PrivateFd::duplicate(reader.as_fd()).unwrap_err(), Errno::MFILE);
        drop(taken.pop());
        let private = PrivateFd::duplicate(reader.as_fd()).unwrap();
        assert_eq!(private.as_raw_fd(), 63);
    });
}

/// Takes all numbers that are free.
fn fill(with: &OwnedFd) -> Vec<OwnedFd> {
    std::iter::from_fn(|| rustix::io::dup(with).ok()).collect()
}

#[test]
fn what_is_being_closed_has_a_number_where_the_program_has_all() {
    in_bare_child(|| {
        limits(64, 64);
        let (reader, writer) = pipe();
        let private = PrivateFd::duplicate(reader.as_fd()).unwrap();
        let taken = fill(&reader);
        let closing = || PrivateFd::duplicate_closing(writer.as_fd());
        for _ in 0..100 {
            let copy = closing().unwrap();
            assert!(is_private(copy.as_raw_fd()) && copy.as_raw_fd() >= 40);
            assert_eq!(rustix::io::write(&copy, b"x"), Ok(1));
            assert!(fcntl_getfd(&copy).unwrap().contains(FdFlags::CLOEXEC));
        }
        let all: Vec<_> = std::iter::from_fn(|| closing().ok()).collect();
        assert_eq!(all.len(), RESERVED);
        assert_eq!(closing().unwrap_err(), Errno::MFILE);
        drop(all);
        assert!(closing().is_ok());
        assert!(fill(&reader).is_empty(), "the program has no number of these");
        // A number that is set aside keeps no file of the program open.
        drop((taken, private, reader));
        assert_eq!(rustix::io::write(&writer, b"x"), Err(Errno::PIPE));
    });
}

#[test]
fn what_is_being_closed_has_no_low_number_but_where_many_are() {
    in_bare_child(|| {
        limits(64, 64);
        let reader = pipe().0;
        let _private = PrivateFd::duplicate(reader.as_fd()).unwrap();
        let mut taken = fill(&reader);
        taken.retain(|fd| fd.as_raw_fd() >= 40);
        let closing = || {
            let copy = PrivateFd::duplicate_closing(reader.as_fd());
            copy.map(PrivateFd::release).unwrap()
        };
        for _ in 0..RESERVED {
            assert!(closing() >= 40);
        }
        assert_eq!(closing(), 39);
        let high = taken.pop().unwrap().into_raw_fd();
        // SAFETY: `into_raw_fd` has taken the fd out of its owner.
        unsafe { rustix::io::close(high) };
        assert_eq!(closing(), high);
        // A low number is not set aside.
        drop(PrivateFd::adopt(39));
        assert!(!is_open(39));
    });
}

#[test]
fn nothing_is_set_aside_once_that_is_given_up() {
    in_bare_child(|| {
        limits(64, 64);
        let reader = pipe().0;
        let private = PrivateFd::duplicate(reader.as_fd()).unwrap();
        dismiss_reserve();
        // `private` and the eventfd of the reserve are left.
        assert_eq!(COUNT.load(Relaxed), 2);
        let closing = PrivateFd::duplicate_closing(reader.as_fd()).unwrap();
        let numbers = [private.as_raw_fd(), closing.as_raw_fd()];
        drop((private, closing));
        assert!(!numbers.into_iter().any(is_open));
    });
}

#[test]
fn a_fork_child_has_nothing_set_aside_until_it_has_room() {
    in_bare_child(|| {
        limits(64, 64);
        let reader = pipe().0;
        let _private = PrivateFd::duplicate(reader.as_fd()).unwrap();
        // SAFETY: the process uses no owner of a private fd afterwards.
        unsafe { reset_in_fork_child(|_| false) };
        assert_eq!(next_private(0, u32::MAX), None);
        let mut taken = fill(&reader);
        assert_eq!(PrivateFd::duplicate_closing(reader.as_fd()).unwrap_err(), Errno::MFILE);
        taken.retain(|fd| fd.as_raw_fd() < 30);
        std::mem::forget(PrivateFd::duplicate(reader.as_fd()));
        taken.extend(fill(&reader));
        assert!(PrivateFd::duplicate_closing(reader.as_fd()).is_ok());
    });
}

#[test]
fn a_fork_child_keeps_only_what_it_is_told_to() {
    let kept = PrivateFd::place(pipe().0).unwrap();
    let closed = PrivateFd::place(pipe().0).unwrap();
    let (kept, closed) = (kept.as_raw_fd(), closed.as_raw_fd());
    // From here on `kept` and `closed` are raw numbers. The `PrivateFd`s that own them are never dropped in the child,
    // since it ends by _exit.
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
fn the_pieces_between_private_fds_cover_all_else() {
    in_bare_child(|| {
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

#[test]
fn places_keep_to_any_limit() {
    for soft in [0, 1, 64, 1023, 1024, 20_000, 524_288, u64::MAX] {
        for place in places(soft) {
            assert!(u64::from(place.end) <= soft && place.end <= CEILING);
            assert!(place.most <= place.end / 4 + 8);
        }
    }
}

const SHORT: u32 = 20;

fn counts(sides: &Sides) -> u64 {
    sides.0.load(Relaxed) & mask(FD | SETTLED)
}

/// Waits until the counts are as expected.
fn await_counts(sides: &Sides, expected: u64) {
    while counts(sides) != expected {
        std::thread::yield_now();
    }
}

/// Waits for a moment in which a mistake would show, and checks that the counts stay the same.
fn nothing_changes(sides: &Sides) {
    let before = counts(sides);
    std::thread::sleep(std::time::Duration::from_millis(2));
    assert_eq!(counts(sides), before);
}

#[test]
fn who_wants_fds_settled_waits_for_those_under_way_and_comes_before_others() {
    let sides = Sides(AtomicU64::new(0));
    sides.enter_fd(false, SHORT);
    sides.enter_fd(false, SHORT);
    sides.leave(FD);
    std::thread::scope(|s| {
        let settled = s.spawn(|| {
            sides.enter_settled(u32::MAX);
            assert_eq!(counts(&sides) & mask(FD), 0);
        });
        await_counts(&sides, FD + SETTLED);
        let next = s.spawn(|| sides.enter_fd(false, u32::MAX));
        nothing_changes(&sides);
        // An fd that is part of a transit in progress (first argument `true`) does not wait, although `settled` does.
        sides.enter_fd(true, SHORT);
        sides.leave(FD);
        assert!(!settled.is_finished());
        sides.leave(FD);
        assert!(settled.join().is_ok());
        nothing_changes(&sides);
        // Two callers need fds settled at the same time.
        sides.enter_settled(SHORT);
        sides.leave(SETTLED);
        nothing_changes(&sides);
        sides.leave(SETTLED);
        assert!(next.join().is_ok());
    });
    assert_eq!(counts(&sides), FD);
}

#[test]
fn who_would_wait_for_itself_goes_on() {
    let sides = Sides(AtomicU64::new(0));
    sides.enter_fd(false, SHORT);
    sides.enter_settled(SHORT);
    sides.enter_fd(false, SHORT);
    assert_eq!(counts(&sides), 2 * FD + SETTLED);
    sides.leave(FD);
    sides.leave(SETTLED);
    sides.leave(FD);
    // The counts are 0 by now. A fork child, whose counts begin at 0, may call `leave` like this.
    sides.leave(FD);
    sides.leave(SETTLED);
    assert_eq!(counts(&sides), 0);
}

#[test]
fn a_call_is_disturbed_by_what_was_under_way_at_any_time_of_it() {
    let sides = Sides(AtomicU64::new(u64::MAX - mask(FD | SETTLED)));
    let look = || sides.0.load(Relaxed);
    let quiet = look();
    sides.enter_settled(SHORT);
    assert!(!is_disturbed(quiet, look()));
    sides.leave(SETTLED);
    assert!(!is_disturbed(quiet, look()));
    // The upper half, which counts the transits that have begun, wraps here.
    sides.enter_fd(false, SHORT);
    let amid = look();
    assert!(is_disturbed(quiet, look()));
    sides.leave(FD);
    assert!(is_disturbed(quiet, look()), "it began and ended meanwhile");
    assert!(is_disturbed(amid, look()), "it had begun before");
    assert!(!is_disturbed(look(), look()));
}

#[test]
fn nobody_waits_for_what_its_own_thread_has() {
    let thread = thread::current();
    let own = || (turns(&thread.transits), turns(&thread.settles));
    assert_eq!(own(), (TURNS, TURNS));
    let outer = Transit::begin();
    drop(Transit::begin());
    assert_eq!(own(), (0, TURNS));
    drop(outer);
    Settled::begin().hold();
    assert_eq!(own(), (TURNS, 0));
    assert_eq!(thread.depth(), 1, "signal handlers wait");
    Settled::end();
    assert_eq!(own(), (TURNS, TURNS));
    assert_eq!(thread.depth(), 0);
}
