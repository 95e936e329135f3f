//! Sets with connections to many processes of which one speaks at a time, so that it has to be told among many links on
//! which nothing happens.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use libc::{EPOLL_CTL_ADD, c_int};

use super::epoll::{IN, create, ctl, wait};
use crate::ctx::Ctx;
use crate::sys;

/// Client processes: more than the library looks at in any case.
const PEERS: usize = 24;
/// Messages of each before those that are looked at: the connection leaves TCP.
const WARM: usize = 12;
const ROUNDS: usize = 20;
const AT_MOST_MS: c_int = 20_000;

/// Says something on the connection that it is asked on, whenever it is.
fn one_peer(port: u16, connections: usize) -> i32 {
    let fds: Vec<c_int> = (0..connections).map(|_| sys::connected(&sys::Addr::v4(port))).collect();
    for _ in 0..WARM {
        for fd in &fds {
            sys::send_all(*fd, b"?").ok();
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

/// At the server: of each peer, its connections, which are promoted. `None` at the client, when all is over.
fn peers(c: &Ctx, connections: usize) -> Option<Vec<c_int>> {
    let (listener, port) = c.listener((PEERS * connections) as c_int);
    let Some(listener) = listener else {
        let children: Vec<_> = (0..PEERS)
            .map(|_| sys::fork_child(|| one_peer(port, connections)))
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
    for _ in 0..WARM * all.len() {
        let (_, events) = wait(set, 1, AT_MOST_MS);
        let fd = events.first().expect("all speak").0 as c_int;
        assert_eq!(sys::recv_exact(fd, 1), b"?");
        sys::send_all(fd, b"!").ok();
    }
    sys::close(set).ok();
    Some(all)
}

fn set_of(fds: &[c_int]) -> c_int {
    let set = create();
    for fd in fds {
        ctl(set, EPOLL_CTL_ADD, *fd, IN, *fd as u64).ok();
    }
    set
}

fn end(c: &Ctx, all: Vec<c_int>) {
    for fd in all {
        sys::send_all(fd, b".").ok();
        c.close(fd);
    }
}

/// The only one of `set` that speaks is told by `look`, and no other.
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

/// By each kind of wait, after sleeps in which nobody spoke and without.
pub fn one_speaks(c: &Ctx) {
    let Some(all) = peers(c, 1) else { return };
    let set = set_of(&all);
    let sleeps = |set| wait(set, 8, AT_MOST_MS).1;
    let takes_one = |set| wait(set, 1, AT_MOST_MS).1;
    let looks = |set| again_and_again(|| wait(set, 8, 0).1);
    let polls = |set| {
        assert_eq!(sys::poll_one(set, libc::POLLIN, AT_MOST_MS), libc::POLLIN);
        wait(set, 8, 0).1
    };
    let kinds: [&dyn Fn(c_int) -> Vec<(u64, u32)>; 4] = [&sleeps, &takes_one, &looks, &polls];
    for (at, look) in kinds.into_iter().enumerate() {
        for (round, fd) in (0..ROUNDS).zip(all.iter().cycle().skip(at)) {
            if round % 2 == 0 {
                assert_eq!(wait(set, 8, 2).1, []);
            }
            hears(set, *fd, look);
        }
    }
    end(c, all);
}

/// Two threads with a set each, and connections of the same peers in both: while the one that was woken does something
/// else, the other hears of what is its own.
pub fn two_sets(c: &Ctx) {
    let Some(all) = peers(c, 2) else { return };
    // Those of one peer were accepted in any order, so each set gets some peers twice, and of others one.
    let (busy, waiting) = all.split_at(PEERS);
    let sets = [set_of(busy), set_of(waiting)];
    let heard = AtomicUsize::new(0);
    for round in 0..ROUNDS {
        let (first, second) = (busy[round % PEERS], waiting[round * 5 % PEERS]);
        std::thread::scope(|scope| {
            let (ids, sleepers) = std::sync::mpsc::channel();
            let of_busy = ids.clone();
            let heard = &heard;
            scope.spawn(move || {
                of_busy.send(sys::thread_id()).ok();
                assert_eq!(wait(sets[0], 8, AT_MOST_MS).1, [(first as u64, IN)]);
                assert_eq!(sys::recv_exact(first, 1), b"x");
                sys::send_all(second, b"s").ok();
                // It does not wait for anything again before the other has heard.
                let end = Instant::now() + Duration::from_millis(AT_MOST_MS as u64);
                while heard.load(SeqCst) == round {
                    assert!(Instant::now() < end, "the other sleeps on");
                    std::thread::yield_now();
                }
            });
            scope.spawn(move || {
                ids.send(sys::thread_id()).ok();
                assert_eq!(wait(sets[1], 8, 2 * AT_MOST_MS).1, [(second as u64, IN)]);
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
