//! The program that exec scenarios execute: `scenario helper <what> <fd>`.

use std::process::ExitCode;

use crate::sys;

/// Runs it: `echo FD` sends back all that comes until EOF, `say FD TEXT` sends a text,
/// `gone FD` succeeds if the fd is not open.
pub fn main(words: &[String]) -> ExitCode {
    let fd: i32 = words.get(1).and_then(|w| w.parse().ok()).unwrap_or(-1);
    let good = match words.first().map(String::as_str) {
        Some("echo") => echo(fd),
        Some("say") => words
            .get(2)
            .is_some_and(|text| !sys::send_all(fd, text.as_bytes()).failed()),
        Some("gone") => call!(libc::fcntl(fd, libc::F_GETFD)).is(libc::EBADF),
        _ => false,
    };
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// With read and write, as `cat` would.
fn echo(fd: i32) -> bool {
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
