//! Sets with connections to many processes, of which one sends at a time. The library has to find it among many links
//! on which nothing happens.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use libc::{EPOLL_CTL_ADD, c_int};

use super::epoll::{IN, create, ctl, wait};
use crate::ctx::Ctx;
use crate::sys;

/// Client processes: more links than the library checks in any case.
const PEERS: usize = 24;
/// Messages of each before those that are tested: the connection leaves TCP.
const WARM: usize = 12;
const ROUNDS: usize = 20;
const AT_MOST_MS: c_int = 20_000;

/// Sends a byte on the connection that asks for it, each time.
fn one_peer(port: u16, number: u8, connections: usize) -> i32 {
    let fds: Vec<c_int> = (0..connections).map(|_| sys::connected(&sys::Addr::v4(port))).collect();
    for _ in 0..WARM {
        for fd in &fds {
            sys::send_all(*fd, &[number]).ok();
            assert_eq!(sys::recv_exact(*fd, 1), b"!");
        }
    }
    let set = create();
    for fd in &fds {
        ctl(set, EPOLL_CTL_ADD, *fd, IN, *fd as u64).ok();
    }
    loop {
        for (fd, _) in wait(set, 8, -1).1 {
            if sys::recv_exact(fd as c_int, 1) != b"s" {
                return 0;
            }
            sys::send_all(fd as c_int, b"x").ok();
        }
    }
}

/// Returns, at the server, the connections of each peer, which are promoted. `None` at the client, when all have ended.
fn peers(c: &Ctx, connections: usize) -> Option<Vec<Vec<c_int>>> {
    let (listener, port) = c.listener((PEERS * connections) as c_int);
    let Some(listener) = listener else {
        let children: Vec<_> = (0..PEERS)
            .map(|number| sys::fork_child(|| one_peer(port, number as u8, connections)))
            .collect();
        for child in children {
            c.log(format_args!("peer ended with {}", sys::wait_child(child)));
        }
        return None;
    };
    let set = create();
    let all: Vec<c_int> = (0..PEERS * connections)
        .map(|_| sys::accept4(listener, 0).ok())
        .collect();
    for fd in &all {
        ctl(set, EPOLL_CTL_ADD, *fd, IN, *fd as u64).ok();
    }
    let mut peers = vec![Vec::new(); PEERS];
    for _ in 0..WARM * all.len() {
        let (_, events) = wait(set, 1, AT_MOST_MS);
        let fd = events.first().expect("all speak").0 as c_int;
        let number = usize::from(sys::recv_exact(fd, 1)[0]);
        if !peers[number].contains(&fd) {
            peers[number].push(fd);
        }
        sys::send_all(fd, b"!").ok();
    }
    sys::close(set).ok();
    Some(peers)
}

/// Returns a set with the connection `at` of each peer.
fn set_of(peers: &[Vec<c_int>], at: usize) -> c_int {
    let set = create();
    for fd in peers.iter().map(|fds| fds[at]) {
        ctl(set, EPOLL_CTL_ADD, fd, IN, fd as u64).ok();
    }
    set
}

fn end(c: &Ctx, peers: Vec<Vec<c_int>>) {
    for fd in peers.into_iter().flatten() {
        sys::send_all(fd, b".").ok();
        c.close(fd);
    }
}

/// Checks that `look` reports the only connection of `set` that has data, and no other.
fn hears(set: c_int, fd: c_int, look: &dyn Fn(c_int) -> Vec<(u64, u32)>) {
    sys::send_all(fd, b"s").ok();
    assert_eq!(look(set), [(fd as u64, IN)]);
    assert_eq!(sys::recv_exact(fd, 1), b"x");
    assert_eq!(wait(set, 8, 0).1, []);
}

fn again_and_again(look: impl Fn() -> Vec<(u64, u32)>) -> Vec<(u64, u32)> {
    let end = Instant::now() + Duration::from_millis(AT_MOST_MS as u64);
    loop {
        let events = look();
        if !events.is_empty() || Instant::now() > end {
            return events;
        }
    }
}

/// Each kind of wait, after sleeps in which no peer sent and without.
pub fn one_speaks(c: &Ctx) {
    let Some(all) = peers(c, 1) else { return };
    let set = set_of(&all, 0);
    let sleeps = |set| wait(set, 8, AT_MOST_MS).1;
    let takes_one = |set| wait(set, 1, AT_MOST_MS).1;
    let looks = |set| again_and_again(|| wait(set, 8, 0).1);
    let polls = |set| {
        assert_eq!(sys::poll_one(set, libc::POLLIN, AT_MOST_MS), libc::POLLIN);
        wait(set, 8, 0).1
    };
    let kinds: [&dyn Fn(c_int) -> Vec<(u64, u32)>; 4] = [&sleeps, &takes_one, &looks, &polls];
    for (at, look) in kinds.into_iter().enumerate() {
        for (round, fd) in (0..ROUNDS).zip(all.iter().flatten().cycle().skip(at)) {
            if round % 2 == 0 {
                assert_eq!(wait(set, 8, 2).1, []);
            }
            hears(set, *fd, look);
        }
    }
    end(c, all);
}

/// Two threads with a set each, and connections of the same peers in both: while the first thread to wake is busy,
/// the other wakes for its own connection.
pub fn two_sets(c: &Ctx) {
    let Some(all) = peers(c, 2) else { return };
    let sets = [0, 1].map(|at| set_of(&all, at));
    let heard = AtomicUsize::new(0);
    for round in 0..ROUNDS {
        let peer = &all[round % PEERS];
        // The kernel chooses which of the two it wakes for the other's message, and always chooses the same.
        let (busy, other) = (round % 2, 1 - round % 2);
        let (first, second) = (peer[busy], peer[other]);
        std::thread::scope(|scope| {
            let (ids, sleepers) = std::sync::mpsc::channel();
            let of_busy = ids.clone();
            let heard = &heard;
            scope.spawn(move || {
                of_busy.send(sys::thread_id()).ok();
                assert_eq!(wait(sets[busy], 8, AT_MOST_MS).1, [(first as u64, IN)]);
                assert_eq!(sys::recv_exact(first, 1), b"x");
                sys::send_all(second, b"s").ok();
                // This thread waits for nothing again before the other has woken.
                let end = Instant::now() + Duration::from_millis(AT_MOST_MS as u64);
                while heard.load(SeqCst) == round {
                    assert!(Instant::now() < end, "the other sleeps on");
                    std::thread::yield_now();
                }
            });
            scope.spawn(move || {
                ids.send(sys::thread_id()).ok();
                assert_eq!(wait(sets[other], 8, 2 * AT_MOST_MS).1, [(second as u64, IN)]);
                assert_eq!(sys::recv_exact(second, 1), b"x");
                heard.store(round + 1, SeqCst);
            });
            for id in sleepers.iter().take(2) {
                sys::wait_asleep(id);
            }
            sys::send_all(first, b"s").ok();
        });
    }
    end(c, all);
}
