//! Sends between hosts whose bytes the reader's device reads from the sender's memory, because the reader does not
//! wait in a receive. Programs see no difference, and the memory of accepted bytes is the program's again when the call
//! returns. The run-ups and comparisons are those in `direct`, but the reader waits in epoll_wait.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

use libc::c_int;

use super::direct::{Flow, LARGE};
use super::zerocopy::prefer_tcp;
use super::{Scenario, direct_send};
use crate::ctx::Ctx;
use crate::data::Rng;
use crate::{data, sys};

/// Sends of all sizes, from memory that is overwritten as soon as the call has accepted the bytes.
pub fn sizes(c: &Ctx) {
    const SIZES: [usize; 12] = [
        4096,
        4097,
        8191,
        65_537,
        131_071,
        300_001,
        LARGE - 1,
        LARGE + 1,
        1_500_000,
        1,
        4095,
        20_000,
    ];
    let mut flow = Flow::lent(c);
    flow.play(|flow| {
        for len in [SIZES; 4].concat() {
            flow.pass(len, Duration::ZERO);
        }
    });
    flow.end();
}

/// Sends of several pieces; the first is large, or not.
pub fn vectors(c: &Ctx) {
    const PIECES: [&[usize]; 5] = [
        &[65_536, 10, 7000],
        &[100, 65_536, 20_000],
        &[8192, 8192, 8192, 8192],
        &[0, 500_000],
        &[4096, 0, 1, 300_000],
    ];
    let mut flow = Flow::lent(c);
    flow.play(|flow| {
        for round in 0..60 {
            let lens = PIECES[round % 5];
            if flow.reads {
                flow.receive_all(lens.iter().sum());
            } else {
                flow.send_pieces(lens, round % 2 == 0);
            }
        }
    });
    flow.end();
}

/// As `direct_send::times_out`.
pub fn times_out(c: &Ctx) {
    direct_send::time_outs(Flow::lent(c));
}

/// As `direct_send::interrupted`.
pub fn interrupted(c: &Ctx) {
    direct_send::interruptions(Flow::lent(c));
}

/// As `direct_send::to_a_stopped_reader`: neither end of it answers.
pub fn to_a_stopped_reader(c: &Ctx) {
    direct_send::stops(c, Flow::lent(c));
}

/// As `direct_send::both_first`.
pub fn both_first(c: &Ctx) {
    let back = Flow::lent(c);
    let flow = Flow::of(c, back.fd, !back.reads).lending();
    direct_send::both_send(c, flow, back);
}

/// Processes are forked off at both ends all the time.
pub fn forks(c: &Ctx) {
    let mut flow = Flow::lent(c);
    let mut rng = Rng::new(29);
    flow.play(|flow| {
        let is_over = AtomicBool::new(false);
        thread::scope(|s| {
            s.spawn(|| {
                while !is_over.load(SeqCst) {
                    sys::pause_ms(7);
                    assert_eq!(sys::wait_child(sys::fork_child(|| 0)), 0);
                }
            });
            for _ in 0..60 {
                flow.pass(4096 + rng.below(600_000) as usize, Duration::ZERO);
            }
            is_over.store(true, SeqCst);
        });
    });
    flow.end();
}

/// Connections; bytes of a send; sends on each; ms between two sends; ms until the first connection goes back to
/// TCP; and the ms by which each later one follows.
const BACK: usize = 16;
const SEND: usize = 256 * 1024;
const SENDS: usize = 40;
const SEND_EVERY_MS: u64 = 10;
const FIRST_BACK_MS: u64 = 100;
const BACK_EVERY_MS: u64 = 11;

/// On a slow device, where a sender waits for the reader's end again and again, connections go back to TCP meanwhile.
pub fn goes_back(c: &Ctx) {
    let all = c.connections(BACK);
    all.iter().for_each(|fd| c.warm_up(*fd));
    let bytes = data::pattern(41, 0, SEND);
    thread::scope(|s| {
        for (n, fd) in all.into_iter().enumerate() {
            let bytes = &bytes;
            if c.is_server() {
                s.spawn(move || (0..SENDS).for_each(|_| receive(fd, bytes)));
                continue;
            }
            s.spawn(move || {
                for _ in 0..SENDS {
                    sys::pause_ms(SEND_EVERY_MS);
                    assert_eq!(sys::send_all(fd, bytes).count(), SEND);
                }
            });
            s.spawn(move || {
                sys::pause_ms(FIRST_BACK_MS + n as u64 * BACK_EVERY_MS);
                prefer_tcp(fd);
            });
        }
    });
}

/// Receives without waiting in a receive.
fn receive(fd: c_int, want: &[u8]) {
    let mut got = vec![0; want.len()];
    let mut at = 0;
    while at < got.len() {
        let r = sys::recv(fd, &mut got[at..], libc::MSG_DONTWAIT);
        if r.is(libc::EAGAIN) {
            sys::poll_one(fd, libc::POLLIN, -1);
        } else {
            at += r.count();
        }
    }
    assert!(got == want, "not the bytes that were sent");
}

/// The events that end a connection while one end sends without a pause.
const WAYS: [&str; 8] = [
    "sender_closes",
    "sender_shuts",
    "sender_exits",
    "sender_resets",
    "sender_shuts_in_another_thread",
    "reader_closes",
    "reader_exits",
    "reader_is_killed",
];

/// Adds the ends to the table.
pub fn add_to(all: &mut Vec<Scenario>) {
    for n in 0..WAYS.len() as u32 {
        let base = format!("lent_ends_as_{}", WAYS[n as usize]);
        all.push(Scenario::numbered(&base, n, ends, true));
    }
}

fn ends(c: &Ctx) {
    let way = WAYS[c.param as usize];
    let mut flow = Flow::lent(c);
    let fd = flow.fd;
    c.sync("begins");
    if flow.reads {
        flow.receive_all(2 * LARGE);
        // A reset may discard the unread bytes.
        c.sync("part");
        match way {
            "reader_closes" => {
                c.close(fd);
                c.sync("over");
            }
            "reader_exits" => sys::leave(0),
            "reader_is_killed" => {
                call!(libc::raise(libc::SIGKILL)).ok();
            }
            _ => {
                // All bytes are right, up to the end.
                let (got, last) = flow.receive_to_end();
                let is_all = got == LARGE;
                match way {
                    "sender_resets" => c.log(last.failed() || last.value == 0),
                    "sender_shuts_in_another_thread" => c.log(format_args!("the end: {last}")),
                    _ => c.log(format_args!("all: {is_all}, the end: {last}")),
                }
                if way != "sender_exits" {
                    c.sync("over");
                }
            }
        }
        return;
    }
    flow.send(2 * LARGE);
    c.sync("part");
    match way {
        "sender_closes" | "sender_shuts" | "sender_exits" | "sender_resets" => {
            flow.send(LARGE);
            match way {
                "sender_closes" => c.close(fd),
                "sender_shuts" => c.shutdown(fd, libc::SHUT_WR),
                "sender_exits" => sys::leave(0),
                _ => {
                    let linger = libc::linger {
                        l_onoff: 1,
                        l_linger: 0,
                    };
                    let (value, len) = ((&raw const linger).cast(), size_of::<libc::linger>() as libc::socklen_t);
                    call!(libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, value, len)).ok();
                    c.close(fd)
                }
            };
        }
        "sender_shuts_in_another_thread" => {
            thread::scope(|s| {
                s.spawn(move || {
                    sys::pause_ms(20);
                    call!(libc::shutdown(fd, libc::SHUT_WR)).ok();
                });
                c.log(format_args!("sends until {}", flow.send_until_it_fails()));
            });
        }
        _ => {
            // The send fails at the reset or after it.
            let error = flow.send_until_it_fails();
            c.log(format_args!(
                "over: {}",
                error.is(libc::EPIPE) || error.is(libc::ECONNRESET)
            ));
        }
    }
    if way == "reader_closes" || !way.starts_with("reader") && way != "sender_exits" {
        c.sync("over");
    }
}
