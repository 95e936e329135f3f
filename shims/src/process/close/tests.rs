//! Tests of a close in a signal handler that has interrupted its own thread in a use of the connection.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use crate::notify::table::Entry;
use crate::process::close::*;
use crate::service::tests::without_thread;

/// Returns the object of a connection, the connection's own end, and its other end, which does not block.
fn known() -> (&'static Socket, TcpStream, TcpStream) {
    without_thread();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    theirs.set_nonblocking(true).unwrap();
    let fd = ours.as_raw_fd();
    let socket = Socket::allocate(fd, false).unwrap();
    table::insert(fd, Entry::Socket(socket));
    (socket, ours, theirs)
}

fn is_open_to(theirs: &mut TcpStream) -> bool {
    match theirs.read(&mut [0]) {
        Ok(0) => false,
        Ok(_) => panic!("nothing was sent"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            true
        }
    }
}

/// Calls `end_orphans`, which carries out the closes that signal handlers have left to the service thread, until
/// `is_over` returns true. One call is not enough: a test that runs at the same time may have taken this test's
/// connection, and not have ended it yet.
fn end_orphans_until(is_over: impl Fn() -> bool) {
    while !is_over() {
        end_orphans();
        std::thread::yield_now();
    }
}

/// Closes a socket while this thread holds the lock that `lock` returns, as a signal handler would. Checks that the
/// connection stays until the lock is released, and that `end_orphans` ends it.
fn closed_under<T>(lock: impl FnOnce(&'static Socket) -> T) {
    let (socket, ours, mut theirs) = known();
    let generation = socket.generation.load(Acquire);
    let held = lock(socket);
    crate::startup::lifecycle::before_close(ours.as_raw_fd());
    drop(ours);
    // Gives the fd to another file at once.
    let _other = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(socket.generation.load(Acquire), generation);
    assert!(is_open_to(&mut theirs));
    let anchor = socket.numbers.anchor_fd().unwrap();
    assert_eq!(rustix::io::write(anchor, b"said"), Ok(4));
    drop(held);
    end_orphans_until(|| socket.generation.load(Acquire) != generation);
    let mut said = [0; 8];
    assert_eq!(theirs.read(&mut said).unwrap(), 4);
    assert!(!is_open_to(&mut theirs));
    let _ = theirs.write(b"x");
}

#[test]
fn a_close_under_a_lock_of_its_own_thread_is_the_service_threads() {
    closed_under(|s| s.control.lock().unwrap());
    closed_under(|s| s.wakes.interest.lock().unwrap());
    closed_under(|s| s.rx.lock().unwrap());
    closed_under(|s| s.tx.lock().unwrap());
}

#[test]
fn a_number_of_several_is_closed_under_a_lock() {
    let (socket, ours, mut theirs) = known();
    let copy = ours.try_clone().unwrap();
    crate::startup::lifecycle::on_dup(ours.as_raw_fd(), copy.as_raw_fd());
    let held = socket.control.lock().unwrap();
    crate::startup::lifecycle::before_close(ours.as_raw_fd());
    drop(ours);
    drop(held);
    end_orphans_until(|| socket.numbers.fd.load(Acquire) == copy.as_raw_fd());
    assert!(is_open_to(&mut theirs));
    crate::startup::lifecycle::before_close(copy.as_raw_fd());
    drop(copy);
    assert!(!is_open_to(&mut theirs));
}

/// A new connection's fd is checked by a system call when it is added to the table. So the next use of the connection
/// needs no check.
#[test]
fn a_connection_that_has_just_become_known_is_not_looked_at_again() {
    let is_due = || {
        let (socket, ours, _theirs) = known();
        let is_due = socket.numbers.seen.is_due(ours.as_raw_fd());
        crate::startup::lifecycle::before_close(ours.as_raw_fd());
        is_due
    };
    // The check is due only if the clock has ticked in between.
    assert!((0..1_000).any(|_| !is_due()));
}

/// A check at a tick counts for both directions, and only if it has found that the fd stands for the socket.
#[test]
fn a_look_counts_when_it_has_been_answered() {
    let (socket, ours, _theirs) = known();
    let fd = ours.as_raw_fd();
    let held = ours.try_clone().unwrap();
    let other = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: both fds are this test's own.
    let stands_for = |file: std::os::fd::RawFd| assert_eq!(unsafe { libc::dup2(file, fd) }, fd);
    assert!(socket.numbers.is_seen(fd, 8_000_000));
    stands_for(other.as_raw_fd());
    assert!(socket.numbers.is_seen(fd, 8_000_000), "not asked again");
    assert!(!socket.numbers.is_seen(fd, 12_000_000));
    assert!(!socket.numbers.is_seen(fd, 12_000_000), "asked again");
    stands_for(held.as_raw_fd());
    assert!(socket.numbers.is_seen(fd, 12_000_000));
    crate::startup::lifecycle::before_close(fd);
}
