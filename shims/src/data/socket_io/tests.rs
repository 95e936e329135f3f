//! Tests of a connection on kernel sockets: markers behind data that the program has not read, and markers on a
//! connection that was reset.

use std::ffi::c_int;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

use rdmasock_core::ids::Nonce;
use rdmasock_core::stream::connection::stay::Stay;
use rdmasock_core::stream::connection::{
    Behind, Farewell, Task, flush, read_ahead, shut, shut_receiving, start_scan, stay, stop_scan,
};
use rdmasock_core::stream::handshake::Closing;
use rdmasock_core::stream::resume::Resume;
use rdmasock_core::wire::{MAX_MARKER, Marker};

use crate::data::socket_io::*;
use crate::notify::table;
use crate::notify::table::Entry;
use crate::objects::socket::{Mode, Move};
use crate::service::tests::{connected, left_to_do, without_thread};

const MINE: Nonce = Nonce::from_bytes([0xc0; 16]);
const THEIRS: Nonce = Nonce::from_bytes([0xc1; 16]);
const DATA: usize = 50_000;

/// Returns a socket whose sending direction is on the link, though the peer has ended the handshake by ABORT. The next
/// bytes that the peer writes to TCP are data, then RESUME. Also returns both TCP streams.
fn suspended() -> (&'static Socket, TcpStream, TcpStream) {
    let (socket, ours, theirs) = unanswered(Closing::Switch);
    let mut control = socket.control.lock().unwrap();
    stay::feed(socket, &mut control, |r| r.on_got(Closing::Abort));
    drop(control);
    (socket, ours, theirs)
}

/// Returns a socket on TCP, and both TCP streams of its connection.
fn accepted() -> (&'static Socket, TcpStream, TcpStream) {
    // No service thread runs, so commands to it stay in the queue.
    without_thread();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    let socket = Socket::allocate(ours.as_raw_fd(), true).unwrap();
    table::insert(ours.as_raw_fd(), Entry::Socket(socket));
    (socket, ours, theirs)
}

/// Returns a socket that has ended the handshake on its side by the marker `closing`, and has not got the peer's
/// closing marker. Also returns both TCP streams.
fn unanswered(closing: Closing) -> (&'static Socket, TcpStream, TcpStream) {
    let (socket, ours, theirs) = accepted();
    let mut resume = Resume::default();
    assert!(resume.on_sent(closing).is_empty());
    {
        let mut rx = socket.rx.lock().unwrap();
        rx.scan = Some(MINE);
        rx.behind = Behind::Link;
    }
    socket.rx_mode.go(Move::Expected);
    if closing == Closing::Switch {
        socket.tx_mode.go(Move::Announced);
        socket.tx_mode.go(Move::Switched);
    }
    let mut control = socket.control.lock().unwrap();
    control.stay = Some(Stay {
        resume,
        mine: MINE,
        theirs: THEIRS,
        returns: false,
    });
    drop(control);
    (socket, ours, theirs)
}

fn resume() -> Vec<u8> {
    let marker = Marker::Resume { received: 0, sent: 0 };
    let mut buf = [0; MAX_MARKER];
    marker.encode(&MINE, &mut buf).unwrap().to_vec()
}

fn is_suspended(socket: &Socket) -> bool {
    socket.tx.lock().unwrap().then.waits()
}

fn until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn who_has_not_read_what_precedes_resume_can_send_and_then_reads_all_of_it() {
    let (socket, ours, mut theirs) = suspended();
    let data: Vec<u8> = (0..DATA).map(|i| (i % 251) as u8).collect();
    theirs.write_all(&data).unwrap();
    let waits = || rustix::io::ioctl_fionread(&ours).unwrap() as usize;
    until(|| waits() == DATA);
    assert!(read_ahead(socket, false));
    assert!(is_suspended(socket) && waits() == 0, "RESUME has not come");
    let resume = resume();
    let (first, second) = resume.split_at(9);
    theirs.write_all(first).unwrap();
    until(|| waits() == 9);
    read_ahead(socket, false);
    assert!(is_suspended(socket));
    theirs.write_all(second).unwrap();
    theirs.write_all(b"later").unwrap();
    until(|| waits() == second.len() + 5);
    read_ahead(socket, false);
    assert!(!is_suspended(socket) && socket.tx_mode.look() == Mode::Tcp);
    assert!(!read_ahead(socket, false), "nothing more is awaited");

    let mut got = vec![0u8; DATA + 5];
    let mut at = 0;
    while at < got.len() {
        let to = got.get_mut(at..).unwrap();
        let mut iov = crate::sys::iov::Iov::one(to.as_mut_ptr().cast(), to.len().min(7_001));
        let fd = ours.as_raw_fd();
        // SAFETY: `iov` is a part of the vector, which is writable.
        let n = unsafe { crate::data::rx::recv(socket, fd, &mut iov, 0, &|_| 0) };
        at += usize::try_from(n).unwrap();
    }
    assert_eq!(got, [&data[..], b"later"].concat());
    assert!(socket.control.lock().unwrap().stay.as_ref().unwrap().resume.is_over());
    table::put(ours.as_raw_fd(), Entry::None);
    let mut marker = [0; 64];
    let n = theirs.read(&mut marker).unwrap();
    assert_eq!(marker.get(..16), Some(THEIRS.as_bytes().as_slice()), "{n}");
}

#[test]
fn discard_takes_what_it_was_asked_for() {
    let (socket, ours, mut theirs) = suspended();
    let data: Vec<u8> = (0..40).collect();
    let waits = || rustix::io::ioctl_fionread(&ours).unwrap();
    theirs.write_all(&data[..20]).unwrap();
    until(|| waits() == 20);
    assert!(read_ahead(socket, false));
    theirs.write_all(&data[20..]).unwrap();
    until(|| waits() == 20);
    let mut got = [0u8; 25];
    let mut recv = |len, flags| {
        let mut iov = crate::sys::iov::Iov::one(got.as_mut_ptr().cast(), len);
        // SAFETY: `iov` is a part of the array, which is writable.
        let n = unsafe { crate::data::rx::recv(socket, ours.as_raw_fd(), &mut iov, flags, &|_| 0) };
        (n, got[0])
    };
    assert_eq!(recv(25, libc::MSG_TRUNC), (25, 0));
    assert_eq!(recv(1, 0), (1, 25));
    table::put(ours.as_raw_fd(), Entry::None);
}

#[test]
fn a_call_that_leaves_the_kernel_is_told_to_look_for_what_nobody_could() {
    let (socket, _ours, mut theirs) = suspended();
    socket.rx_mode.go(Move::Settled);
    assert!(socket.enter_rx());
    socket.rx_mode.go(Move::Expected);
    theirs.write_all(&resume()).unwrap();
    until(|| {
        socket
            .numbers
            .anchor_fd()
            .is_some_and(|fd| rustix::io::ioctl_fionread(fd).unwrap() > 0)
    });
    read_ahead(socket, false);
    assert!(is_suspended(socket), "the call has the first turn");
    assert!(socket.leave_rx());
    until(|| {
        read_ahead(socket, false);
        !is_suspended(socket)
    });
}

#[test]
fn receive_that_led_to_the_link_looks_for_resume() {
    let (socket, _ours, _theirs) = suspended();
    socket.rx_mode.go(Move::Settled);
    assert!(socket.enter_rx());
    // The call has received SWITCH, and RESUME behind it.
    socket.rx_mode.go(Move::Expected);
    socket.rx_mode.go(Move::Switched);
    assert!(socket.leave_rx());
}

#[test]
fn an_end_that_changes_nothing_is_not_looked_for_again_and_again() {
    let (socket, ours, mut theirs) = unanswered(Closing::Abort);
    theirs.write_all(b"data").unwrap();
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    until(|| crate::notify::ready::has_peer_ended(ours.as_fd()));
    let before = left_to_do(socket, Task::ReadAhead);
    for _ in 0..3 {
        read_ahead(socket, false);
    }
    let looks_ahead = |stay: &Stay| stay.resume.looks_ahead();
    assert!(socket.control.lock().unwrap().stay.as_ref().is_some_and(looks_ahead));
    assert_eq!(left_to_do(socket, Task::ReadAhead), before);
}

#[test]
fn the_end_of_our_receiving_direction_is_not_the_peers() {
    let (socket, ours, mut theirs) = suspended();
    ours.shutdown(std::net::Shutdown::Read).unwrap();
    read_ahead(socket, false);
    assert!(is_suspended(socket), "RESUME may come");
    theirs.write_all(&resume()).unwrap();
    until(|| {
        read_ahead(socket, false);
        !is_suspended(socket)
    });
}

#[test]
fn the_end_of_tcp_behind_unread_data_lets_the_kernel_answer() {
    let (socket, _ours, mut theirs) = suspended();
    theirs.write_all(b"data").unwrap();
    drop(theirs);
    until(|| {
        read_ahead(socket, false);
        !is_suspended(socket)
    });
    assert_eq!(socket.tx_mode.look(), Mode::Tcp);
}

/// A marker that can no longer be sent leaves the error in the TCP socket: SO_ERROR, poll and each call of the program
/// still report it.
#[test]
fn a_marker_leaves_the_error_of_a_reset_where_it_is() {
    without_thread();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    let socket = Socket::allocate(ours.as_raw_fd(), false).unwrap();
    table::insert(ours.as_raw_fd(), Entry::Socket(socket));
    // The peer closes without reading this, so the connection is reset.
    ours.write_all(b"unread").unwrap();
    drop(theirs);
    let is_reset = || ready::anchor(ours.as_fd(), PollFlags::empty()) & libc::EPOLLERR as u32 != 0;
    while !is_reset() {
        std::thread::yield_now();
    }
    socket.tx.lock().unwrap().marker.extend_from_slice(b"marker");
    socket.tx_mode.go(Move::Announced);
    assert!(flush(socket));
    assert!(is_reset());
    assert_eq!(
        rustix::net::sockopt::socket_error(&ours),
        Ok(Err(rustix::io::Errno::CONNRESET))
    );
    crate::startup::lifecycle::before_close(ours.as_raw_fd());
}

/// The reset may come between the library's check for an error and its send of the marker. The send then takes the
/// error from the socket (in some 80 of these 500 rounds). The library keeps the error, and reports it once.
#[test]
fn a_reset_that_comes_as_a_marker_is_sent_is_told() {
    without_thread();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for _ in 0..500 {
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        let socket = Socket::allocate(ours.as_raw_fd(), false).unwrap();
        table::insert(ours.as_raw_fd(), Entry::Socket(socket));
        ours.write_all(b"unread").unwrap();
        let closes = std::thread::spawn(move || drop(theirs));
        while !socket.tcp().unwrap().has_peer_ended() {
            for _ in 0..20 {
                socket.tx.lock().unwrap().marker.extend_from_slice(b"marker");
                socket.tx_mode.go(Move::Announced);
                assert!(flush(socket));
            }
        }
        closes.join().unwrap();
        assert_eq!([error_of(&ours), error_of(&ours)], [libc::ECONNRESET, 0]);
        crate::startup::lifecycle::before_close(ours.as_raw_fd());
    }
}

/// Returns SO_ERROR as the program gets it.
fn error_of(stream: &TcpStream) -> c_int {
    let (mut error, mut len) = (-1, size_of::<c_int>() as libc::socklen_t);
    let (level, name, value) = (libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut error).cast());
    // SAFETY: `error` has room for the value, and `len` says so.
    let result = unsafe {
        crate::hooks::socket::getsockopt(libc::getsockopt, stream.as_raw_fd(), level, name, value, &raw mut len)
    };
    assert_eq!(result, 0);
    error
}

/// A process whose connections all stay on TCP has no second thread, even after a shutdown.
#[test]
fn a_shutdown_of_what_was_on_no_link_leaves_the_service_thread_nothing_to_do() {
    without_thread();
    let (socket, _stream) = connected();
    let mut farewell = Farewell::NONE;
    assert!(!shut(socket, true, &mut farewell), "the kernel's call follows");
    assert_eq!(left_to_do(socket, Task::Drained), 0);
}

/// Returns whether the FIN of the library's end has come to the peer. False if nothing has come yet.
fn has_ended(theirs: &TcpStream) -> bool {
    match rustix::net::recv(theirs, &mut [0u8; 1][..], RecvFlags::DONTWAIT) {
        Ok((_, n)) => n == 0,
        Err(error) => {
            assert_eq!(error, Errno::AGAIN);
            false
        }
    }
}

#[test]
fn where_both_directions_are_shut_the_end_follows_the_last_marker() {
    let (socket, ours, theirs) = accepted();
    start_scan(socket, MINE).unwrap();
    let mut farewell = Farewell::NONE;
    assert!(shut(socket, true, &mut farewell), "the kernel's call follows by itself");
    assert!(!flush(socket));
    assert!(!has_ended(&theirs));
    assert_eq!(left_to_do(socket, Task::Flush), 0);
    stop_scan(socket);
    assert_eq!(
        left_to_do(socket, Task::Flush),
        1,
        "the service thread goes on from here"
    );
    assert!(flush(socket));
    until(|| has_ended(&theirs));
    assert!(start_scan(socket, MINE).is_err(), "no marker is to come to it");
    crate::startup::lifecycle::before_close(ours.as_raw_fd());
}

#[test]
fn a_direction_that_is_shut_behind_an_end_is_the_kernels_to_shut_when_the_last_marker_has_come() {
    let (socket, ours, theirs) = accepted();
    start_scan(socket, MINE).unwrap();
    let mut farewell = Farewell::NONE;
    assert!(!shut(socket, false, &mut farewell), "the other direction does not wait");
    let anchor = socket.numbers.anchor_fd().unwrap();
    rustix::net::shutdown(anchor, Shutdown::Write).unwrap();
    until(|| has_ended(&theirs));
    assert!(shut_receiving(socket));
    let is_shut = || ready::anchor(anchor, PollFlags::RDHUP) & libc::EPOLLRDHUP as u32 != 0;
    assert!(!is_shut());
    assert_eq!(
        ready::among_markers(socket).unwrap_or(0) & libc::EPOLLRDHUP as u32,
        libc::EPOLLRDHUP as u32,
        "to the program it is"
    );
    stop_scan(socket);
    assert!(is_shut());
    crate::startup::lifecycle::before_close(ours.as_raw_fd());
}

/// Receives 64 bytes with `flags` into an array of `pieces` buffers. While the call is in the kernel, a scan begins and
/// `stream` arrives: 64 bytes of payload with markers among them. Returns what the call has received.
fn received_as_a_scan_begins(stream: &[u8], pieces: usize, flags: c_int) -> Vec<u8> {
    let (socket, ours, theirs) = accepted();
    let mut got = [0u8; 64];
    let pieces: Vec<_> = got
        .chunks_mut(64 / pieces)
        .map(|piece| libc::iovec {
            iov_base: piece.as_mut_ptr().cast(),
            iov_len: piece.len(),
        })
        .collect();
    // SAFETY: the pieces are parts of the array.
    let mut iov = unsafe { crate::sys::iov::Iov::many(pieces.as_ptr(), pieces.len()) }.unwrap();
    let kernel = |fd| {
        if socket.rx_mode.look() == Mode::Tcp {
            start_scan(socket, MINE).unwrap();
            (&theirs).write_all(stream).unwrap();
            until(|| rustix::io::ioctl_fionread(&ours).unwrap() as usize == stream.len());
        }
        // SAFETY: the pieces are parts of the array, which is writable.
        unsafe { libc::readv(fd, pieces.as_ptr(), pieces.len() as c_int) }
    };
    // SAFETY: the pieces are parts of the array, which is writable.
    let n = unsafe { crate::data::rx::recv(socket, ours.as_raw_fd(), &mut iov, flags, &kernel) };
    crate::startup::lifecycle::before_close(ours.as_raw_fd());
    got[..usize::try_from(n).unwrap()].to_vec()
}

#[test]
fn receive_across_markers_returns_all_payload() {
    let data: Vec<u8> = (0..64).collect();
    let mut buf = [0; MAX_MARKER];
    let abort = Marker::Abort(rdmasock_core::wire::Reason::Cancelled);
    let marker = abort.encode(&MINE, &mut buf).unwrap();
    let one = |at: usize| [&data[..at], marker, &data[at..]].concat();
    let two = [marker, &data[..24], marker, &data[24..]].concat();
    // At 50 the program's buffer ends within the marker.
    for stream in [one(0), one(24), one(50), one(63), two] {
        for (pieces, flags) in [(1, 0), (4, 0), (1, libc::MSG_DONTWAIT), (1, libc::MSG_WAITALL)] {
            let got = received_as_a_scan_begins(&stream, pieces, flags);
            assert_eq!(got, data, "{} bytes, {pieces} pieces, flags {flags}", stream.len());
        }
    }
}
