//! Markers behind data that the program does not read. It may read nothing before it has sent all that it has to say, as
//! it may on TCP, and its sending direction may wait for such a marker (`stream::resume`): then what TCP has is
//! taken into the carry, where the program finds it when it reads, until the marker is there.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::stream::handshake::Closing;
use rdmasock_core::stream::resume::Ahead;
use rdmasock_core::wire::Marker;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::resume;
use super::scan::{self, AtMark, look_ahead};
use crate::library::Library;
use crate::rx::carry::Carry;
use crate::scratch::Scratch;
use crate::service::Command;
use crate::socket::{Control, Mode, Rx, Socket};

/// No more than this is taken, nor more than all connections may (`rx::carry`). Kernel TCP would not hold as much between two
/// programs of which neither reads.
const MOST: usize = 16 * 1024 * 1024;
/// Bytes taken at a time.
const PIECE: usize = 16 * 1024;
/// Pieces that are dropped before others have their turn.
const DROPS: usize = 64;

/// Does what the markers behind unread data allow for the sending direction, if that waits for one. `is_pressed`: it finds
/// no room on the link, and the reader does not move. True if the kernel has less than before: those who wait
/// for something to read are to be told.
pub fn read_ahead(socket: &'static Socket, is_pressed: bool) -> bool {
    let mut took = false;
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    while waits(&control, is_pressed) {
        let ahead = {
            let Some(mut rx) = socket.rx.lock() else {
                break;
            };
            match next(socket, &mut rx, &mut took) {
                Some(ahead) => ahead,
                None => break,
            }
        };
        match ahead {
            Seen::Marker(Marker::Switch) => {
                on_ahead(socket, &mut control, Ahead::Closing(Closing::Switch))
            }
            Seen::Marker(Marker::Abort(_)) => {
                on_ahead(socket, &mut control, Ahead::Closing(Closing::Abort))
            }
            Seen::Marker(Marker::Resume { received, sent }) => {
                on_ahead(socket, &mut control, Ahead::Resume { received, sent });
            }
            // It has its turn only when the program has read up to it.
            Seen::Marker(Marker::Hello(_)) => {}
            Seen::End => {
                on_ahead(socket, &mut control, Ahead::End);
                break;
            }
        }
    }
    took
}

fn waits(control: &Control, is_pressed: bool) -> bool {
    let resume = control.resume.as_ref();
    resume.is_some_and(|r| r.looks_ahead() || is_pressed && r.is_unanswered())
}

fn on_ahead(socket: &'static Socket, control: &mut Control, ahead: Ahead) {
    tracing::trace!(target: "rdmasock::promote", slot = socket.slot, ?ahead, "before its turn");
    match control.resume.as_mut().map(|r| r.on_ahead(ahead)) {
        // As before: nothing is to be told to anybody.
        Some(Ok(steps)) if steps.is_empty() => {}
        Some(Ok(steps)) => resume::carry_out(socket, control, steps),
        _ => resume::violation(socket, "a marker out of turn"),
    }
}

enum Seen {
    Marker(Marker),
    End,
}

/// The next marker or the end, as far as TCP has brought it.
fn next(socket: &'static Socket, rx: &mut Rx, took: &mut bool) -> Option<Seen> {
    loop {
        // A call that was in the kernel before the scan began has the first turn.
        if socket.rx_mode.load(Acquire) != Mode::Marked || socket.rx_inside.load(SeqCst) > 0 {
            return None;
        }
        let nonce = rx.scan?;
        if let Some(marker) = rx.carry.next_marker(&nonce) {
            return Some(Seen::Marker(marker));
        }
        if rx.carry.len() >= MOST || !rx.carry.charge(PIECE) {
            return None;
        }
        match fetch(socket.anchor_fd()?, &mut rx.carry) {
            Ok(0) => return Some(Seen::End),
            Ok(_) => *took = true,
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

fn fetch(fd: BorrowedFd<'_>, carry: &mut Carry) -> rustix::io::Result<usize> {
    // Not where nothing is: that would take an error from the socket, of which others are to tell.
    if rustix::io::ioctl_fionread(fd)? == 0 {
        let has_ended = crate::ready::has_peer_ended(fd) && rustix::io::ioctl_fionread(fd)? == 0;
        return if has_ended { Ok(0) } else { Err(Errno::AGAIN) };
    }
    if crate::sockopt::is_at_mark(fd) {
        return Err(Errno::AGAIN);
    }
    let mut piece = Scratch::new(PIECE).ok_or(Errno::NOMEM)?;
    let (_, n) = rustix::net::recv(fd, &mut piece[..], RecvFlags::DONTWAIT)?;
    carry.push(piece.get(..n).unwrap_or_default());
    Ok(n)
}

/// The program has closed the socket, which lives on until the peer has all of it: what comes in front of the
/// markers that this waits for is nobody's (P79).
pub fn drop_unread(socket: &'static Socket) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    // Not for ever: a peer that goes on sending is not to keep the service thread.
    for _ in 0..DROPS {
        let Some(rx) = socket.rx.lock() else {
            return;
        };
        match look_ahead(socket, &mut control, rx, AtMark::GoOn, || socket.rx.lock()) {
            Some((scan::Ahead::Payload { carry, kernel }, mut rx)) => {
                let Some(fd) = socket.anchor_fd() else {
                    return;
                };
                rx.scanned = 0;
                if !scan::take(&mut rx, fd, carry + kernel) {
                    return;
                }
            }
            _ => return,
        }
    }
    drop(control);
    Library::get().service.submit(Command::settle(socket));
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd};

    use rdmasock_core::ids::Nonce;
    use rdmasock_core::stream::resume::Resume;
    use rdmasock_core::wire::MAX_MARKER;

    use super::*;
    use crate::socket::{Receiving, Sending};
    use crate::table::{self, Entry};

    const MINE: Nonce = Nonce::from_bytes([0xc0; 16]);
    const THEIRS: Nonce = Nonce::from_bytes([0xc1; 16]);
    const DATA: usize = 50_000;

    /// A socket that has switched, and whose peer has given up: the next that TCP brings is data, then RESUME.
    fn held() -> (&'static Socket, TcpStream, TcpStream) {
        let (socket, ours, theirs) = unanswered(Closing::Switch);
        let mut control = socket.control.lock().unwrap();
        resume::feed(socket, &mut control, |r| r.on_got(Closing::Abort));
        drop(control);
        (socket, ours, theirs)
    }

    /// A socket that has closed its part of the handshake so, and does not know of the peer's.
    fn unanswered(closing: Closing) -> (&'static Socket, TcpStream, TcpStream) {
        // Its commands stay in the queue.
        crate::service::tests::without_thread();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        let socket = Socket::allocate(ours.as_raw_fd(), true).unwrap();
        table::insert(ours.as_raw_fd(), Entry::Socket(socket));
        let mut resume = Resume::new();
        assert!(resume.on_sent(closing).is_empty());
        {
            let mut rx = socket.rx.lock().unwrap();
            rx.scan = Some(MINE);
            rx.stays = true;
        }
        socket.rx_mode.go(Receiving::Expected);
        if closing == Closing::Switch {
            socket.tx_mode.go(Sending::Announced);
            socket.tx_mode.go(Sending::Switched);
        }
        let mut control = socket.control.lock().unwrap();
        control.nonces = Some([MINE, THEIRS]);
        control.resume = Some(resume);
        drop(control);
        (socket, ours, theirs)
    }

    fn resume() -> Vec<u8> {
        let marker = Marker::Resume {
            received: 0,
            sent: 0,
        };
        let mut buf = [0; MAX_MARKER];
        marker.encode(&MINE, &mut buf).unwrap().to_vec()
    }

    fn is_held(socket: &Socket) -> bool {
        socket.tx.lock().unwrap().is_held
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn who_has_not_read_what_precedes_resume_can_send_and_then_reads_all_of_it() {
        let (socket, ours, mut theirs) = held();
        let data: Vec<u8> = (0..DATA).map(|i| (i % 251) as u8).collect();
        theirs.write_all(&data).unwrap();
        let waits = || rustix::io::ioctl_fionread(&ours).unwrap() as usize;
        until(|| waits() == DATA);
        assert!(read_ahead(socket, false));
        assert!(is_held(socket) && waits() == 0, "RESUME has not come");
        let resume = resume();
        let (first, second) = resume.split_at(9);
        theirs.write_all(first).unwrap();
        until(|| waits() == 9);
        read_ahead(socket, false);
        assert!(is_held(socket));
        theirs.write_all(second).unwrap();
        theirs.write_all(b"later").unwrap();
        until(|| waits() == second.len() + 5);
        read_ahead(socket, false);
        assert!(!is_held(socket) && socket.tx_mode.load(SeqCst) == Mode::Tcp);
        assert!(!read_ahead(socket, false), "nothing more is awaited");

        let mut got = vec![0u8; DATA + 5];
        let mut at = 0;
        while at < got.len() {
            let to = got.get_mut(at..).unwrap();
            let mut iov = crate::iov::Iov::one(to.as_mut_ptr().cast(), to.len().min(7_001));
            let fd = ours.as_raw_fd();
            // SAFETY: a piece of the vector.
            let n = unsafe { crate::rx::recv(socket, fd, &mut iov, 0, &|_| 0) };
            at += usize::try_from(n).unwrap();
        }
        assert_eq!(got, [&data[..], b"later"].concat());
        assert!(
            socket
                .control
                .lock()
                .unwrap()
                .resume
                .as_ref()
                .unwrap()
                .is_over()
        );
        table::put(ours.as_raw_fd(), Entry::None);
        let mut marker = [0; 64];
        let n = theirs.read(&mut marker).unwrap();
        assert_eq!(marker.get(..16), Some(THEIRS.as_bytes().as_slice()), "{n}");
    }

    #[test]
    fn a_call_that_leaves_the_kernel_is_told_to_look_for_what_nobody_could() {
        let (socket, _ours, mut theirs) = held();
        socket.rx_mode.go(Receiving::Settled);
        assert!(socket.enter_rx());
        socket.rx_mode.go(Receiving::Expected);
        theirs.write_all(&resume()).unwrap();
        until(|| {
            socket
                .anchor_fd()
                .is_some_and(|fd| rustix::io::ioctl_fionread(fd).unwrap() > 0)
        });
        read_ahead(socket, false);
        assert!(is_held(socket), "the call has the first turn");
        assert!(socket.leave_rx());
        until(|| {
            read_ahead(socket, false);
            !is_held(socket)
        });
    }

    #[test]
    fn an_end_that_changes_nothing_is_not_looked_for_again_and_again() {
        let (socket, ours, mut theirs) = unanswered(Closing::Abort);
        theirs.write_all(b"data").unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        until(|| crate::ready::has_peer_ended(ours.as_fd()));
        let before = crate::service::tests::reads_ahead(socket);
        for _ in 0..3 {
            read_ahead(socket, false);
        }
        assert!(waits(&socket.control.lock().unwrap(), false));
        assert_eq!(crate::service::tests::reads_ahead(socket), before);
    }

    #[test]
    fn the_end_of_our_receiving_direction_is_not_the_peers() {
        let (socket, ours, mut theirs) = held();
        ours.shutdown(std::net::Shutdown::Read).unwrap();
        read_ahead(socket, false);
        assert!(is_held(socket), "RESUME may come");
        theirs.write_all(&resume()).unwrap();
        until(|| {
            read_ahead(socket, false);
            !is_held(socket)
        });
    }

    #[test]
    fn the_end_of_tcp_behind_unread_data_lets_the_kernel_answer() {
        let (socket, _ours, mut theirs) = held();
        theirs.write_all(b"data").unwrap();
        drop(theirs);
        until(|| {
            read_ahead(socket, false);
            !is_held(socket)
        });
        assert_eq!(socket.tx_mode.load(SeqCst), Mode::Tcp);
    }
}
