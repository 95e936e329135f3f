//! The programs that tests execute: `scenario helper <what> <number> …`.

use std::process::ExitCode;
use std::time::Duration;

use crate::sys::Addr;
use crate::{dialogue, sys};

/// Runs one of the programs. Each succeeds if all went as it should.
///
/// - `echo FD` sends all received bytes back until EOF; `bare FD` does so if it does not have the library;
///   `say FD TEXT` sends a text; `gone FD` expects the fd not to be open.
/// - `serve PORT CONNECTIONS` and `dial PORT CONNECTIONS` hold the conversation of `dialogue`.
///   The server prints its port once it listens.
/// - `squat PORT HOW` listens on the library's service names of PORT, as uid 65534 if it can,
///   and answers `nothing`, `garbage`, `yes` or `close`, until stdin ends.
/// - `remote …`: see `remote::main`; `guest …`: see `guest::main`; `stall …`: see `stall::main`; `hostile …`: see
///   `hostile::main`; `within …`: see `environment::launch`.
pub fn main(words: &[String]) -> ExitCode {
    let number = |i: usize| words.get(i).and_then(|w| w.parse().ok());
    let fd: i32 = number(1).unwrap_or(-1);
    let port = fd as u16;
    let good = match words.first().map(String::as_str) {
        Some("echo") => echo(fd),
        Some("bare") => !has_library() && echo(fd),
        Some("say") => words
            .get(2)
            .is_some_and(|text| !sys::send_all(fd, text.as_bytes()).failed()),
        Some("gone") => call!(libc::fcntl(fd, libc::F_GETFD)).is(libc::EBADF),
        Some("serve") => serve(port, number(2).unwrap_or(1)),
        Some("dial") => dial(port, number(2).unwrap_or(1)),
        Some("guest") => crate::guest::main(&words[1..]),
        Some("hostile") => crate::hostile::main(&words[1..]),
        Some("within") => crate::environment::launch(&words[1..]),
        Some("remote") => crate::remote::main(&words[1..]),
        Some("stall") => crate::stall::main(&words[1..]),
        Some("squat") => squat(port, words.get(2).map_or("", String::as_str)),
        _ => false,
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Echoes with read and write, as `cat` would. True if the peer has ended the connection.
pub fn echo(fd: i32) -> bool {
    let mut buf = [0; 5000];
    loop {
        let r = sys::read(fd, &mut buf);
        match usize::try_from(r.value) {
            Ok(0) => return true,
            Ok(n) => {
                let mut sent = 0;
                while sent < n {
                    match usize::try_from(sys::write(fd, &buf[sent..n]).value) {
                        Ok(more) => sent += more,
                        Err(_) => return false,
                    }
                }
            }
            Err(_) => return false,
        }
    }
}

/// Returns whether this process has the library.
pub fn has_library() -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("/librdmasock"))
}

fn serve(port: u16, connections: i32) -> bool {
    let (listener, port) = sys::listener(&Addr::v4(port), 16);
    println!("{port}");
    for _ in 0..connections {
        let fd = sys::accept4(listener, 0).ok();
        for round in 0..dialogue::ROUNDS {
            let want = dialogue::request(round);
            assert!(sys::recv_exact(fd, want.len()) == want, "request {round}");
            sys::send_all(fd, &dialogue::response(round)).ok();
        }
        let (end, rest) = sys::recv_to_end(fd);
        assert!(end.value == 0 && rest.is_empty(), "{end}, {} bytes", rest.len());
        sys::send_all(fd, &dialogue::farewell()).ok();
        sys::close(fd).ok();
    }
    true
}

fn dial(port: u16, connections: i32) -> bool {
    for _ in 0..connections {
        let fd = sys::connected(&Addr::v4(port));
        for round in 0..dialogue::ROUNDS {
            sys::send_all(fd, &dialogue::request(round)).ok();
            let want = dialogue::response(round);
            assert!(sys::recv_exact(fd, want.len()) == want, "response {round}");
            // The pause gives time for a false answer, so that the library acts on it in mid-connection.
            std::thread::sleep(Duration::from_millis(5));
        }
        call!(libc::shutdown(fd, libc::SHUT_WR)).ok();
        let (end, rest) = sys::recv_to_end(fd);
        assert!(end.value == 0 && rest == dialogue::farewell(), "{end}");
        sys::close(fd).ok();
    }
    true
}

/// How many service names of a port the squatter takes.
const SQUATTED: usize = 4;

fn squat(port: u16, how: &str) -> bool {
    if call!(libc::geteuid()).value == 0 {
        call!(libc::setgid(65_534)).ok();
        call!(libc::setuid(65_534)).ok();
    }
    let listeners: Vec<i32> = (0..SQUATTED)
        .map(|k| {
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
            let fd = call!(libc::socket(libc::AF_UNIX, kind, 0)).ok();
            let name = format!("\0rdmasock/2/tcp/{port}/{k}");
            sys::bind(fd, &Addr::unix(name.as_bytes())).ok();
            call!(libc::listen(fd, 16)).ok();
            fd
        })
        .collect();
    println!("squatting");
    let mut guests: Vec<i32> = Vec::new();
    loop {
        let mut p: Vec<_> = [0]
            .iter()
            .chain(&listeners)
            .chain(&guests)
            .map(|fd| libc::pollfd {
                fd: *fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        call!(libc::poll(p.as_mut_ptr(), p.len() as libc::nfds_t, -1)).ok();
        if p[0].revents != 0 {
            return true;
        }
        for ready in p.iter().filter(|p| p.revents != 0) {
            if listeners.contains(&ready.fd) {
                let guest = sys::accept4(ready.fd, libc::SOCK_CLOEXEC).ok();
                if how == "close" {
                    sys::close(guest);
                } else {
                    guests.push(guest);
                }
            } else if !reply(ready.fd, how) {
                guests.retain(|fd| *fd != ready.fd);
                sys::close(ready.fd);
            }
        }
    }
}

/// Answers one message. False once the guest has left.
fn reply(fd: i32, how: &str) -> bool {
    let mut message = [0; 2048];
    let n = sys::recv(fd, &mut message, 0).value;
    if n <= 0 {
        return false;
    }
    let send = |bytes: &[u8]| {
        sys::send(fd, bytes, libc::MSG_NOSIGNAL);
    };
    match how {
        "garbage" => {
            send(&message[..n as usize]);
            send(&[0xff; 300]);
            send(b"YES");
            send(b"rsok");
        }
        // A well-formed YES: header (magic, version, kind 2, length), the request's number as
        // it came, a nonce and an instance.
        "yes" if n >= 16 => {
            let mut yes = b"rsok\x02\x02\x28\x00".to_vec();
            yes.extend(&message[8..16]);
            yes.extend([0x5a; 16]);
            yes.extend([0xa5; 16]);
            send(&yes);
        }
        _ => {}
    }
    true
}
