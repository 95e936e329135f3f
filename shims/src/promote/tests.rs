//! Markers and connections that are reset.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

use super::*;
use crate::service::tests::without_thread;
use crate::socket::Sending;
use crate::table::{self, Entry};

/// A marker that can no longer be sent does not take the error from the socket: SO_ERROR, poll and each call of the program's tell of it.
#[test]
fn a_marker_leaves_the_error_of_a_reset_where_it_is() {
    without_thread();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    let socket = Socket::allocate(ours.as_raw_fd(), false).unwrap();
    table::insert(ours.as_raw_fd(), Entry::Socket(socket));
    // Closed with this unread, it is reset.
    ours.write_all(b"unread").unwrap();
    drop(theirs);
    let is_reset = || ready::anchor(ours.as_fd(), PollFlags::empty()) & libc::EPOLLERR as u32 != 0;
    while !is_reset() {
        std::thread::yield_now();
    }
    socket
        .tx
        .lock()
        .unwrap()
        .marker
        .extend_from_slice(b"marker");
    socket.tx_mode.go(Sending::Announced);
    assert!(flush(socket));
    assert!(is_reset());
    assert_eq!(
        rustix::net::sockopt::socket_error(&ours),
        Ok(Err(rustix::io::Errno::CONNRESET))
    );
    crate::lifecycle::before_close(ours.as_raw_fd());
}
