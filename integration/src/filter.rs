//! The filter of system calls that a service manager gives a service by `SystemCallFilter=@system-service`, with
//! `SystemCallErrorNumber=kill`. It is in force before the program begins. Any other system call ends the process.

#[path = "../../tests/src/filters/system_service.rs"]
mod system_service;

use std::io;

use libc::{sock_filter, sock_fprog};

/// The kernel's actions for a filter's result (linux/seccomp.h).
const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;

/// A filter, as a program for the kernel.
#[derive(Debug)]
pub struct Filter(Vec<Step>);

/// A `sock_filter` with `Debug`.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
struct Step(#[allow(dead_code, reason = "the kernel reads it")] sock_filter);

const fn step(code: u16, jt: u8, jf: u8, k: u32) -> Step {
    Step(sock_filter { code, jt, jf, k })
}

impl Filter {
    /// Returns the filter that allows the system calls of `@system-service` and kills the process for any other.
    pub fn system_service() -> Self {
        // The program loads the number of the call. Then each number has a comparison and an answer.
        let mut steps = vec![step(0x20, 0, 0, 0)];
        for number in system_service::SYSTEM_SERVICE {
            steps.push(step(0x15, 0, 1, *number as u32));
            steps.push(step(0x06, 0, 0, ALLOW));
        }
        steps.push(step(0x06, 0, 0, KILL_PROCESS));
        Self(steps)
    }

    /// Loads the filter for the calling thread. The filter stays in force across exec and in children.
    /// Async-signal-safe.
    ///
    /// # Errors
    /// If prctl(2) fails.
    pub fn load(&self) -> io::Result<()> {
        let program = sock_fprog {
            len: self.0.len() as u16,
            filter: self.0.as_ptr().cast_mut().cast(),
        };
        // SAFETY: the kernel reads `len` steps of the program, which exist, and writes nothing.
        let failed = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
        };
        if failed {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}
