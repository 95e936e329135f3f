//! Forks that the kernel refuses, by a filter whose loading no library has seen: the connections go on as without it.

use libc::{c_int, c_long, sock_filter, sock_fprog};
use rdmasock_core::os::kernel;

use crate::ctx::Ctx;
use crate::sys::Ret;
use crate::{data, sys};

const LOAD: u16 = 0x20;
const EQUAL: u16 = 0x15;
const ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const FAIL_WITH: u32 = 0x0005_0000;

/// Offsets in `struct seccomp_data` of the number, and of the low half of an argument.
const NUMBER: u32 = 0;
const fn argument(n: u32) -> u32 {
    16 + 8 * n
}

/// Loads a filter into this thread alone, by system calls in line.
fn load(steps: &mut [sock_filter]) {
    let program = sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    let in_line = |number: c_long, arguments: [usize; 3]| {
        let [a, b, c] = arguments;
        // SAFETY: prctl and seccomp of a filter that lives on until they are back.
        unsafe { kernel::call(number, [a, b, c, 0, 0, 0]) }.unwrap();
    };
    let no_new_privileges = libc::PR_SET_NO_NEW_PRIVS as usize;
    in_line(libc::SYS_prctl, [no_new_privileges, 1, 0]);
    let mode = libc::SECCOMP_SET_MODE_FILTER as usize;
    let program = kernel::address(&raw const program);
    in_line(libc::SYS_seccomp, [mode, 0, program]);
}

fn step(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// Refuses forks; threads can be made.
fn refuse_forks() {
    load(&mut [
        step(LOAD, 0, 0, NUMBER),
        step(EQUAL, 2, 0, libc::SYS_fork as u32),
        step(EQUAL, 0, 3, libc::SYS_clone as u32),
        step(LOAD, 0, 0, argument(0)),
        step(ANY_BIT, 1, 0, libc::CLONE_VM as u32),
        step(RETURN, 0, 0, FAIL_WITH | libc::EAGAIN as u32),
        step(RETURN, 0, 0, ALLOW),
    ]);
}

fn fork() -> Ret {
    let forked = call!(libc::fork());
    if forked.value == 0 {
        sys::leave_at_once(1);
    }
    forked
}

/// A fork that fails, at either end, leaves a connection as it was: held by one process, which may have it promoted.
pub fn fork_before(c: &Ctx) {
    let fd = c.cold_pair();
    refuse_forks();
    for _ in 0..3 {
        c.log(fork());
    }
    c.warm_up(fd);
    end_unread(c, fd);
}

/// As [`fork_before`], on a link; a close with unread data still resets the connection.
pub fn fork_on_a_link(c: &Ctx) {
    let fd = c.pair();
    refuse_forks();
    c.log(fork());
    c.warm_up(fd);
    end_unread(c, fd);
}

fn end_unread(c: &Ctx, fd: c_int) {
    if c.is_server() {
        sys::wait_readable_bytes(fd, 100);
        sys::close(fd).ok();
        c.sync("closed");
    } else {
        sys::send_all(fd, &data::pattern(1, 0, 100)).ok();
        c.sync("closed");
        let mut buf = [0; 8];
        c.log(sys::recv(fd, &mut buf, 0));
    }
}
