//! Tests of memory that is mapped in segments: the addresses and memory that it takes, and releases. The file also has
//! the tests of `Numbers`.

use std::os::fd::AsFd;

use crate::fabric::side::*;
use crate::os::memfd;

const UNIT: usize = 8192;
const OFFSET: u64 = 4096;

fn file(total: usize) -> crate::os::privatefd::PrivateFd {
    memfd::create_file("rdmasock-test", OFFSET + total as u64).unwrap()
}

/// Returns the size of this process's address space, in pages.
fn pages() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn two_ends_that_map_by_themselves_see_the_same_bytes() {
    let total = 21 * UNIT + 4096;
    let fd = file(total);
    let ends = [Segments::<UNIT>::default(), Segments::<UNIT>::default()];
    for end in &ends {
        end.show(fd.as_fd(), OFFSET, total).unwrap();
    }
    drop(fd);
    let [a, b] = &ends;
    for (n, offset) in [0, UNIT - 1, UNIT, 2 * UNIT, 16 * UNIT - 1, total - 1]
        .into_iter()
        .enumerate()
    {
        a.reach(offset).unwrap();
        b.reach(offset).unwrap();
        let (a, b) = (a.at(offset).unwrap(), b.at(offset).unwrap());
        // SAFETY: the address is mapped, and no other code uses the file.
        unsafe {
            a.write(n as u8 + 1);
            assert_eq!(b.read(), n as u8 + 1, "{offset}");
        }
    }
    assert_eq!(a.reach(total), Err(Errno::INVAL));
    // SAFETY: no pointer into the segments is used any more.
    ends.iter().for_each(|end| unsafe { end.unmap() });
}

#[test]
fn what_is_not_used_takes_no_addresses() {
    let total = 1 << 30;
    let fd = file(total);
    let before = pages();
    let end = Segments::<UNIT>::default();
    end.show(fd.as_fd(), OFFSET, total).unwrap();
    end.reach(100 * UNIT).unwrap();
    // The segments have 128 units, and a page in front of each but the first. The bound is far above that, since other
    // tests run at the same time, and map and unmap memory too.
    let taken = pages().saturating_sub(before);
    assert!(taken < 64 * 1024, "{taken}");
    assert!(end.at(100 * UNIT).is_some() && end.at(128 * UNIT).is_none());
    // SAFETY: no pointer into the segments is used any more.
    unsafe { end.unmap() };
    assert!(end.at(0).is_none());
}

#[test]
fn addresses_outlive_the_file_and_serve_the_next() {
    let end = Segments::<UNIT>::default();
    let mut stale: Option<[NonNull<u8>; 2]> = None;
    for life in 1..4u8 {
        assert!(end.at(0).is_none());
        end.show(file(8 * UNIT).as_fd(), OFFSET, 8 * UNIT).unwrap();
        assert!(end.at(UNIT).is_none());
        end.reach(5 * UNIT).unwrap();
        let now = [end.at(0).unwrap(), end.at(5 * UNIT).unwrap()];
        assert_eq!(*stale.get_or_insert(now), now);
        for at in now {
            // SAFETY: the address is mapped.
            unsafe {
                assert_eq!(at.read(), 0);
                at.write(life);
            }
        }
        end.neutralise();
        for at in now {
            // SAFETY: the addresses are kept.
            unsafe {
                assert_eq!(at.read(), 0);
                at.write(life);
            }
        }
    }
    // SAFETY: no pointer into the segments is used any more.
    unsafe { end.unmap() };
}

#[test]
fn a_fork_child_does_not_wait_for_a_thread_that_was_growing() {
    let end = Segments::<UNIT>::default();
    end.show(file(8 * UNIT).as_fd(), OFFSET, 8 * UNIT).unwrap();
    let growing = end.growing.lock().unwrap();
    crate::os::forked::in_child(|| {
        end.after_fork();
        // After this call the child's thread id differs from the lock holder's, so to the child another thread holds
        // the lock.
        crate::os::thread::current().forget_tid();
        assert_eq!(end.reach(5 * UNIT), Err(Errno::INVAL));
    });
    drop(growing);
    // SAFETY: no pointer into the segments is used any more.
    unsafe { end.unmap() };
}

#[test]
fn a_piece_lies_in_one_segment() {
    let end = Segments::<UNIT>::default();
    end.show(file(8 * UNIT).as_fd(), OFFSET, 8 * UNIT).unwrap();
    assert!(end.is_piece(0, UNIT) && !end.is_piece(0, 2 * UNIT));
    assert!(end.is_piece(4 * UNIT, 4 * UNIT) && !end.is_piece(4 * UNIT, 4 * UNIT + 1));
    assert!(!end.is_piece(usize::MAX, 2) && !end.is_piece(8 * UNIT, 1));
    // SAFETY: no pointer into the segments is used any more.
    unsafe { end.unmap() };
}

#[test]
fn what_is_held_takes_no_memory_and_can_be_reached_when_nothing_else_can() {
    crate::os::forked::in_child(|| {
        let total = 64 << 20;
        let fd = file(total);
        let end = Segments::<UNIT>::default();
        end.show(fd.as_fd(), OFFSET, total).unwrap();
        // SAFETY: the call concerns this child's mappings only.
        let locks = |what| unsafe { libc::mlockall(what) } == 0;
        let is_locked = locks(libc::MCL_CURRENT | libc::MCL_FUTURE);
        end.hold(total / 4).unwrap();
        assert!(end.at(total / 4).is_none());
        assert!(!is_locked || locks(libc::MCL_CURRENT));
        let blocks = || rustix::fs::fstat(&fd).unwrap().st_blocks;
        assert!(blocks() <= 2 * UNIT as i64 / 512, "{}", blocks());
        // From here on the process can have no more addresses and no more locked pages.
        for resource in [rustix::process::Resource::As, rustix::process::Resource::Memlock] {
            let limit = rustix::process::Rlimit {
                current: Some(0),
                maximum: Some(0),
            };
            rustix::process::setrlimit(resource, limit).unwrap();
        }
        end.reach(total / 4).unwrap();
        let at = end.at(total / 4).unwrap();
        // SAFETY: the address is mapped, and no other code uses the file.
        unsafe { at.write(7) };
        assert!(end.reach(total - 1).is_err());
    });
}

#[test]
fn no_more_is_held_than_a_process_may_have() {
    crate::os::forked::in_child(|| {
        let total = 4 << 30;
        let ends: Vec<_> = (0..4).map(|_| Segments::<UNIT>::default()).collect();
        let held = |end: &Segments<UNIT>| {
            end.show(file(total).as_fd(), OFFSET, total).unwrap();
            end.hold(total - 1)
        };
        let first: Vec<bool> = ends.iter().map(|end| held(end).is_ok()).collect();
        assert_eq!(first, [true, true, false, false]);
        ends.iter().take(2).for_each(Segments::neutralise);
        assert!(ends.iter().skip(2).all(|end| end.hold(total - 1).is_ok()));
        ends.iter().skip(2).for_each(Segments::after_fork);
        assert_eq!(HELD.load(Acquire), 0);
    });
}

#[test]
fn memory_is_backed_and_given_back() {
    let fd = file(8 * UNIT);
    let end = Segments::<UNIT>::default();
    end.show(fd.as_fd(), OFFSET, 8 * UNIT).unwrap();
    end.reach(3 * UNIT).unwrap();
    let blocks = || rustix::fs::fstat(&fd).unwrap().st_blocks;
    end.back(2 * UNIT, UNIT).unwrap();
    assert_eq!(blocks(), UNIT as i64 / 512);
    end.punch_hole(2 * UNIT, UNIT).unwrap();
    assert_eq!(blocks(), 0);
    assert_eq!(end.back(4 * UNIT, 1), Err(Errno::INVAL));
    // SAFETY: no pointer into the segments is used any more.
    unsafe { end.unmap() };
}

#[test]
fn rings_that_are_held_are_given_back_when_they_are_let_go_of() {
    let numbers = Numbers::new(1 << 20);
    let (number, _) = numbers.take(12).unwrap();
    numbers.hold(number);
    assert!(numbers.mark(number, done::LOCAL).is_none());
    assert!(numbers.mark(number, done::PEER).is_none());
    let (other, _) = numbers.take(12).unwrap();
    assert_ne!(other, number);
    assert_eq!(numbers.mark(number, done::USERS).unwrap().number, number);
    assert!(numbers.mark(number, done::USERS).is_none() && numbers.mark(number, done::LOCAL).is_none());
}

#[test]
fn what_is_let_go_of_first_is_given_back_when_both_ends_are_done() {
    let numbers = Numbers::new(1 << 20);
    let (number, _) = numbers.take(12).unwrap();
    numbers.hold(number);
    assert!(numbers.mark(number, done::PEER).is_none());
    assert!(numbers.mark(number, done::USERS).is_none());
    assert_eq!(numbers.mark(number, done::LOCAL).unwrap().number, number);
}
