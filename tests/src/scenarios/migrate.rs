//! Promotion and demotion at every byte offset of a small exchange.

use super::Scenario;
use super::process::{pass_fd, socketpair, take_fd};
use crate::ctx::Ctx;
use crate::data::Rng;
use crate::{data, sys};

/// The largest offset that is tried; the smallest is 1.
const OFFSETS: u32 = 64;
const LEN: usize = 400;

/// Adds the two families to the table.
pub fn add_to(all: &mut Vec<Scenario>) {
    for n in 1..=OFFSETS {
        all.push(
            Scenario::numbered("promote_at", n, promote_at, false).with_env("RDMASOCK_PROMOTE_AFTER", n.to_string()),
        );
    }
    for n in 0..=OFFSETS {
        all.push(Scenario::numbered("demote_at", n, demote_at, true));
    }
    all.push(Scenario::new("promote_at_once", promote_at, false).with_env("RDMASOCK_PROMOTE_AFTER", "0"));
}

/// `LEN` bytes each way in odd pieces that depend on `param`, several times over. The promotion falls into the middle
/// of a piece, of a request, or between.
fn promote_at(c: &Ctx) {
    let fd = c.cold_pair();
    let mut rng = Rng::new(u64::from(c.param) * 7919 + 13);
    for round in 0..12 {
        let mut at = 0;
        while at < LEN {
            let n = (1 + rng.below(37) as usize).min(LEN - at);
            let (there, back) = (data::pattern(1, at as u64, n), data::pattern(2, at as u64, n));
            // Odd rounds stream first and read later; even rounds go back and forth.
            let lockstep = round % 2 == 0;
            if c.is_server() {
                assert!(sys::recv_exact(fd, n) == there, "round {round} at {at}");
                sys::send_all(fd, &back).ok();
            } else {
                sys::send_all(fd, &there).ok();
                if lockstep {
                    assert!(sys::recv_exact(fd, n) == back, "round {round} at {at}");
                }
            }
            at += n;
        }
        if !c.is_server() && round % 2 == 1 {
            data::verify(2, 0, &sys::recv_exact(fd, LEN));
        }
    }
    c.log("all equal");
    c.shutdown(fd, libc::SHUT_WR);
    c.recv_to_end(fd);
    c.close(fd);
}

/// After `param` of `LEN` bytes in each direction the server's fd (odd: the client's) is passed by SCM_RIGHTS, which
/// demotes the connection. The stream goes on byte-exactly on either fd.
fn demote_at(c: &Ctx) {
    let mut fd = c.pair();
    let n = c.param as usize;
    let out = data::pattern(1 + c.side as u64, 0, LEN);
    let incoming = 2 - c.side as u64;
    sys::send_all(fd, &out[..n]).ok();
    // Half of `n` bytes are read before the fd is passed, the rest after.
    let before = n / 2;
    data::verify(incoming, 0, &sys::recv_exact(fd, before));
    if n.is_multiple_of(2) == c.is_server() {
        let [a, b] = socketpair();
        c.ret("pass", pass_fd(a, fd));
        let other = take_fd(b);
        let (keep, drop) = if n % 4 < 2 { (other, fd) } else { (fd, other) };
        c.close(drop);
        fd = keep;
    }
    for piece in out[n..].chunks(33) {
        sys::send_all(fd, piece).ok();
    }
    data::verify(incoming, before as u64, &sys::recv_exact(fd, LEN - before));
    for round in 0..5 {
        if c.is_server() {
            c.recv_all(fd, 5000);
            sys::send_all(fd, &data::pattern(9, round, 5000)).ok();
        } else {
            sys::send_all(fd, &data::pattern(8, round, 5000)).ok();
            c.recv_all(fd, 5000);
        }
    }
    c.shutdown(fd, libc::SHUT_WR);
    c.recv_to_end(fd);
    c.close(fd);
}
