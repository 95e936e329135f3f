//! The two ends of a connection that goes on until the test ends it, for tests of what a process is in or has done: each
//! is a `scenario helper guest …` whose messages are checked, and which the test can question meanwhile.

use crate::data;
use crate::sys::{self, Addr, Ret};

/// Bytes of a message.
const MESSAGE: usize = 64;

/// `server WHAT…` listens, prints its port, does each WHAT that follows (`before-accept` ones first), and sends back what
/// comes over one connection; `client PORT WHAT…` says one thing after the other until its standard input ends, and
/// does what a line there says. True if all went well.
pub fn main(words: &[String]) -> bool {
    match words.first().map(String::as_str) {
        Some("server") => server(&words[1..]),
        Some("client") => words
            .get(1)
            .and_then(|port| port.parse().ok())
            .is_some_and(client),
        _ => false,
    }
}

fn server(what: &[String]) -> bool {
    let (listener, port) = sys::listener(&Addr::v4(0), 16);
    say(&port.to_string());
    for word in what {
        say(&act(word));
    }
    let fd = sys::accept4(listener, 0).ok();
    let mut message = [0; MESSAGE];
    loop {
        match sys::read(fd, &mut message).value {
            0 => return true,
            n @ 1.. => {
                if sys::write(fd, &message[..n as usize]).value != n {
                    return false;
                }
            }
            _ => return false,
        }
        while let Some(word) = command() {
            say(&act(&word));
        }
    }
}

fn client(port: u16) -> bool {
    let fd = sys::connected(&Addr::v4(port));
    for round in 0.. {
        let message = data::pattern(round, 0, MESSAGE);
        sys::send_all(fd, &message).ok();
        if sys::recv_exact(fd, MESSAGE) != message {
            return false;
        }
        match command().as_deref() {
            Some("end") => break,
            Some(word) => say(&act(word)),
            None => sys::pause_ms(1),
        }
    }
    call!(libc::shutdown(fd, libc::SHUT_WR)).ok();
    let (end, rest) = sys::recv_to_end(fd);
    end.value == 0 && rest.is_empty()
}

/// A line to the test.
fn say(line: &str) {
    let line = format!("{line}\n");
    sys::write(1, line.as_bytes());
}

/// A line from the test, if there is one.
fn command() -> Option<String> {
    if sys::poll_one(0, libc::POLLIN, 0) & libc::POLLIN == 0 {
        return None;
    }
    let mut line = [0; 200];
    let n = usize::try_from(sys::read(0, &mut line).value).ok()?;
    let text = String::from_utf8_lossy(&line[..n]);
    (n > 0).then(|| text.trim().to_owned())
}

/// Does one thing, and says what it gave.
fn act(word: &str) -> String {
    match word {
        "io_uring" => {
            let mut parameters = [0u64; 32];
            let ring = call!(libc::syscall(
                libc::SYS_io_uring_setup,
                4,
                parameters.as_mut_ptr()
            ));
            outcome(ring)
        }
        "nothing" => "nothing".into(),
        _ => format!("{word}: unknown"),
    }
}

fn outcome(of: Ret) -> String {
    if of.failed() {
        of.to_string()
    } else {
        "done".into()
    }
}
