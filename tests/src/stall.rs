//! Two ends of a connection that carry out commands from their standard input, so that a test can have each of them
//! stand still in any call. `scenario helper stall server` prints its port; `scenario helper stall client PORT`
//! connects.

use libc::c_int;

use crate::scenarios::epoll;
use crate::sys::Addr;
use crate::{data, sys};

/// Bytes of a message.
const MESSAGE: usize = 64;
/// Bytes of a large piece.
pub const PIECE: usize = 256 * 1024;

/// Runs one of the ends. True if all went well.
pub fn main(words: &[String]) -> bool {
    let port = words.get(1).and_then(|port| port.parse().ok());
    let fd = match (words.first().map(String::as_str), port) {
        (Some("server"), _) => {
            let (listener, port) = sys::listener(&Addr::v4(0), 16);
            say(&port.to_string());
            sys::accept4(listener, 0).ok()
        }
        (Some("client"), Some(port)) => sys::connected(&Addr::v4(port)),
        _ => return false,
    };
    say("connected");
    let mut piece = vec![0; PIECE];
    while let Some(word) = command() {
        let (what, n) = word.split_once(' ').unwrap_or((&word, "0"));
        act(fd, what, n.parse().unwrap_or(0), &mut piece);
        say("done");
    }
    true
}

fn act(fd: c_int, what: &str, n: usize, piece: &mut [u8]) {
    let message = data::pattern(1, 0, MESSAGE);
    match what {
        // Sends `n` messages, and receives their answers.
        "ask" => (0..n).for_each(|_| {
            sys::send_all(fd, &message).ok();
            assert!(sys::recv_exact(fd, MESSAGE) == message);
        }),
        "answer" => (0..n).for_each(|_| {
            assert!(sys::recv_exact(fd, MESSAGE) == message);
            sys::send_all(fd, &message).ok();
        }),
        "send" => {
            sys::send_all(fd, &data::pattern(2, 0, n)).ok();
        }
        "receive" => {
            sys::recv_exact(fd, n);
        }
        // Sends large pieces, whose reader wants each in one call.
        "send-pieces" => {
            piece.copy_from_slice(&data::pattern(3, 0, PIECE));
            for at in 0..n {
                piece[..8].copy_from_slice(&at.to_le_bytes());
                assert_eq!(sys::send_all(fd, piece).count(), PIECE);
                piece[..8].fill(0xA5);
                // The pause gives the reader time to be back in its next call.
                sys::pause_ms(1);
            }
        }
        "receive-pieces" => {
            let mut want = data::pattern(3, 0, PIECE);
            for at in 0..n {
                want[..8].copy_from_slice(&at.to_le_bytes());
                assert_eq!(sys::recv(fd, piece, libc::MSG_WAITALL).count(), PIECE);
                assert!(piece == want, "piece {at}");
            }
        }
        // Receives the same by epoll_wait and receives that do not wait.
        "receive-by-epoll" => receive_by_epoll(fd, n, piece),
        "poll" => {
            sys::poll_one(fd, libc::POLLIN, -1);
        }
        "epoll" => {
            let set = epoll::create();
            epoll::ctl(set, libc::EPOLL_CTL_ADD, fd, epoll::IN, 1).ok();
            epoll::wait(set, 1, -1);
            sys::close(set).ok();
        }
        // Moves bytes in both directions at once, each by a thread of its own.
        "both" => {
            let thread = std::thread::spawn(move || sys::recv_exact(fd, 1));
            sys::send_all(fd, &data::pattern(2, 0, n)).ok();
            thread.join().unwrap();
        }
        _ => panic!("no such word: {what}"),
    }
}

fn receive_by_epoll(fd: c_int, n: usize, piece: &mut [u8]) {
    let mut want = data::pattern(3, 0, PIECE);
    let set = epoll::create();
    epoll::ctl(set, libc::EPOLL_CTL_ADD, fd, epoll::IN, 1).ok();
    for at in 0..n {
        want[..8].copy_from_slice(&at.to_le_bytes());
        let mut got = 0;
        while got < PIECE {
            let r = sys::recv(fd, &mut piece[got..], libc::MSG_DONTWAIT);
            if r.is(libc::EAGAIN) {
                epoll::wait(set, 1, -1);
            } else {
                got += r.count();
            }
        }
        assert!(piece == want, "piece {at}");
    }
    sys::close(set).ok();
}

/// Prints a line for the test.
fn say(line: &str) {
    let line = format!("{line}\n");
    sys::write(1, line.as_bytes());
}

/// Returns the next line from the test.
fn command() -> Option<String> {
    let mut line = [0; 200];
    let n = usize::try_from(sys::read(0, &mut line).value).ok()?;
    let text = String::from_utf8_lossy(&line[..n]);
    (n > 0).then(|| text.trim().to_owned())
}
