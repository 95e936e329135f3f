//! Connections that are handed to another process while their promotion is under way and data waits unread: in front of
//! the library's markers, between them and behind them. The new owner reads each byte once, and nothing else.

use libc::c_int;

use super::process::{pass_fd, take_fd};
use crate::ctx::Ctx;
use crate::{data, sys};

/// Connections one after the other, and the µs by which each is handed over later than the one before.
const CONNECTIONS: usize = 20;
const STEP_US: u64 = 60;
/// Bytes of a stream that the first owner reads, and bytes of each piece that the peer sends.
const FIRST: usize = 64;
const PIECE: usize = 1400;

/// Returns the bytes of a connection's stream. The unread bytes are less than one scan of TCP reads, more than that, or
/// more than TCP takes.
fn total(connection: usize) -> usize {
    [FIRST + PIECE, 60_000, 900_000][connection % 3]
}

/// One end sends its stream at once and reads the answer. The other end, which `hands` each connection over, does so
/// when it has read the beginning.
fn hand(c: &Ctx, hands: bool, mut over: impl FnMut(usize, c_int)) {
    let (listener, port) = c.listener(16);
    for connection in 0..CONNECTIONS {
        let fd = match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&sys::Addr::v4(port)),
        };
        if hands {
            let first = sys::recv_exact(fd, FIRST);
            data::verify(connection as u64, 0, &first);
            pause_us(STEP_US * connection as u64);
            over(connection, fd);
        } else {
            for piece in data::pattern(connection as u64, 0, total(connection)).chunks(PIECE) {
                assert_eq!(sys::send_all(fd, piece).ok() as usize, piece.len());
            }
            let answer = sys::recv_to_end(fd);
            c.log(format_args!("{connection}: {answer:?}"));
            sys::close(fd).ok();
        }
    }
}

fn pause_us(us: u64) {
    std::thread::sleep(std::time::Duration::from_micros(us));
}

/// Reads the rest of the stream at the new owner, and answers.
fn take_over(connection: usize, fd: c_int) {
    let rest = sys::recv_exact(fd, total(connection) - FIRST);
    data::verify(connection as u64, FIRST as u64, &rest);
    sys::send_all(fd, b"all of it").ok();
}

/// The new owner is a child that is forked for the connection; the parent closes.
pub fn forked(c: &Ctx) {
    hand_to_children(c, c.is_server());
}

/// As [`forked`], by the end that has connected.
pub fn forked_by_the_client(c: &Ctx) {
    hand_to_children(c, !c.is_server());
}

fn hand_to_children(c: &Ctx, hands: bool) {
    hand(c, hands, |connection, fd| {
        let child = sys::fork_child(|| {
            take_over(connection, fd);
            0
        });
        sys::close(fd).ok();
        c.log(format_args!("child {}", sys::wait_child(child)));
    });
}

/// The new owner is a child that is forked for the connection; the parent keeps its fd for a while.
pub fn forked_and_kept(c: &Ctx) {
    hand(c, c.is_server(), |connection, fd| {
        let child = sys::fork_child(|| {
            take_over(connection, fd);
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        sys::close(fd).ok();
    });
}

/// The new owner is a worker that was forked before.
pub fn passed(c: &Ctx) {
    let [ours, theirs] = super::process::socketpair();
    let worker = c.is_server().then(|| {
        sys::fork_child(|| {
            for connection in 0..CONNECTIONS {
                let fd = take_fd(theirs);
                take_over(connection, fd);
                sys::close(fd).ok();
            }
            0
        })
    });
    hand(c, c.is_server(), |_, fd| {
        pass_fd(ours, fd).ok();
        sys::close(fd).ok();
    });
    if let Some(worker) = worker {
        c.log(format_args!("worker {}", sys::wait_child(worker)));
    }
}
