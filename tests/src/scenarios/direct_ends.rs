//! Events that end a direct transfer (see `direct`) while a thread waits with a buffer: the connection's end, by either
//! of its ends, or its return to TCP.

use std::thread;

use super::Scenario;
use super::direct::{Flow, Kept, LARGE, rest};
use crate::ctx::Ctx;
use crate::sys;

const MUCH: usize = 100_000;

/// Makes a further connection, whose transfers are direct as the first one's are.
fn another(c: &Ctx, is_lent: bool) -> Flow<'_> {
    let mut flow = Flow::of(c, c.cold_pair(), c.is_server());
    flow.is_lent = is_lent;
    c.warm_up(flow.fd);
    flow.run_up();
    flow
}

/// The connection leaves the link while a thread waits with a buffer. A child that has the connection too runs another
/// program, or one of the ends asks for urgent data.
pub fn on_tcp(c: &Ctx) {
    leaves_the_link(c, false);
}

/// As [`on_tcp`], while memory is lent.
pub fn on_tcp_lent(c: &Ctx) {
    leaves_the_link(c, true);
}

fn leaves_the_link(c: &Ctx, is_lent: bool) {
    c.close(c.pair());
    for round in 0..9 {
        let (how, by_reader, has_part) = (round % 3, round % 2 == 1, round > 4);
        let mut flow = another(c, is_lent);
        let fd = flow.fd;
        let leave = move || {
            let program = || {
                let words = [c"sleep".as_ptr(), c"0.05".as_ptr(), std::ptr::null()];
                call!(libc::execv(c"/bin/sleep".as_ptr(), words.as_ptr()));
                1
            };
            match how {
                0 => assert_eq!(sys::wait_child(sys::fork_child(program)), 0),
                1 => assert!(sys::recv(fd, &mut [0], libc::MSG_OOB).is(libc::EINVAL)),
                _ => {
                    let child = sys::fork_child(program);
                    thread::spawn(move || assert_eq!(sys::wait_child(child), 0));
                }
            }
        };
        c.sync("waits");
        if flow.reads {
            thread::scope(|s| {
                s.spawn(move || {
                    rest();
                    c.sync("part");
                    if by_reader {
                        leave();
                    }
                    c.sync("left");
                });
                flow.receive_all(LARGE);
            });
        } else {
            let part = if has_part { MUCH } else { 0 };
            c.sync("part");
            flow.send(part);
            if !by_reader {
                leave();
            }
            if round % 4 == 0 {
                flow.send(LARGE - part);
                c.sync("left");
            } else {
                c.sync("left");
                flow.send(LARGE - part);
            }
        }
        flow.end();
    }
}

/// The events that end the wait.
const WAYS: [&str; 8] = [
    "write_shut",
    "close",
    "exit",
    "exit_at_once",
    "reset",
    "own_read_shut",
    "own_shut",
    "own_close",
];

/// Adds the ends to the table: each way, with no byte before it (even) and with some.
pub fn add_to(all: &mut Vec<Scenario>) {
    for n in 0..2 * WAYS.len() as u32 {
        let base = format!("direct_ends_by_{}", WAYS[n as usize / 2]);
        all.push(Scenario::numbered(&base, n, ends, true));
    }
}

/// A thread waits with a buffer when its connection ends, by the peer or by another thread.
fn ends(c: &Ctx) {
    let (way, has_part) = (WAYS[c.param as usize / 2], c.param % 2 == 1);
    let mut flow = Flow::begin(c);
    let fd = flow.fd;
    c.sync("waits");
    if !flow.reads {
        if has_part {
            rest();
            flow.send(MUCH);
        }
        sys::pause_ms(40);
        match way {
            "write_shut" => c.shutdown(fd, libc::SHUT_WR),
            "close" => c.close(fd),
            "exit" => sys::leave(3),
            "exit_at_once" => sys::leave_at_once(4),
            "reset" => {
                let linger = libc::linger {
                    l_onoff: 1,
                    l_linger: 0,
                };
                let (value, len) = ((&raw const linger).cast(), size_of::<libc::linger>() as libc::socklen_t);
                call!(libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, value, len)).ok();
                c.close(fd)
            }
            _ => {
                c.sync("ended");
                if way == "own_close" {
                    // The peer sends no more than is read. Unread bytes are a reason for a reset, which may come before
                    // the send returns.
                    flow.send(LARGE - if has_part { MUCH } else { 0 });
                }
                c.sync("seen");
                return;
            }
        };
        c.sync("seen");
        return;
    }
    let id = sys::thread_id();
    let mut kept = Kept::default();
    let (r, ended) = thread::scope(|s| {
        let ended = way.starts_with("own").then(|| {
            s.spawn(move || {
                sys::pause_ms(40);
                sys::wait_asleep(id);
                let ended = match way {
                    "own_read_shut" => call!(libc::shutdown(fd, libc::SHUT_RD)),
                    "own_shut" => call!(libc::shutdown(fd, libc::SHUT_RDWR)),
                    _ => sys::close(fd),
                };
                c.sync("ended");
                ended
            })
        });
        let (r, buf) = flow.receive_into(vec![0; LARGE], libc::MSG_WAITALL);
        kept.keep(buf);
        (r, ended.map(|ended| ended.join().unwrap()))
    });
    c.ret("recv", r);
    if let Some(ended) = ended {
        c.ret(way, ended);
    }
    let (r, buf) = flow.receive_into(vec![0; LARGE], 0);
    if way == "own_close" {
        c.log(r.is(libc::EBADF));
    } else {
        c.ret("recv", r);
    }
    kept.keep(buf);
    c.poll(fd, libc::POLLIN | libc::POLLRDHUP, 0);
    if !way.starts_with("exit") {
        c.sync("seen");
    }
    kept.check();
}
