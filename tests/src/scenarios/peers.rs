//! An epoll set with connections to many processes, so with a link for each.

use std::collections::{BTreeMap, BTreeSet};

use libc::{EPOLL_CTL_ADD, c_int};

use super::epoll::{IN, create, ctl, look_until_reported, wait};
use crate::ctx::Ctx;
use crate::sys;

/// Client processes, with one connection each.
const PEERS: usize = 40;
/// Messages of each before those that are tested: the connection leaves TCP.
const WARM: usize = 12;
/// Messages of each peer, where all send all the time.
const TURNS: usize = 12;
const AT_MOST_MS: c_int = 20_000;

fn one_peer(port: u16) -> i32 {
    let fd = sys::connected(&sys::Addr::v4(port));
    for _ in 0..WARM {
        sys::send_all(fd, b"?").ok();
        assert_eq!(sys::recv_exact(fd, 1), b"!");
    }
    // The peer sends one byte for each request.
    while sys::recv_exact(fd, 1) == b"s" {
        sys::send_all(fd, b"x").ok();
    }
    0
}

/// A peer that is answered sends the next byte at once. No peer keeps others out.
fn talk_all_the_time(set: c_int, peers: &[c_int]) {
    let mut turns = BTreeMap::new();
    for fd in peers {
        sys::send_all(*fd, b"s").ok();
        sys::wait_readable_bytes(*fd, 1);
        turns.insert(*fd, 0);
    }
    for _ in 0..TURNS * PEERS {
        let (_, events) = wait(set, 1, AT_MOST_MS);
        let fd = events.first().expect("all have something to say").0 as c_int;
        assert_eq!(sys::recv_exact(fd, 1), b"x");
        *turns.entry(fd).or_insert(0) += 1;
        sys::send_all(fd, b"s").ok();
        sys::wait_readable_bytes(fd, 1);
    }
    let least = turns.values().min();
    assert!(least.is_some_and(|least| *least >= TURNS / 4), "{turns:?}");
    for fd in peers {
        assert_eq!(sys::recv_exact(*fd, 1), b"x");
    }
}

/// Most peers have sent. The set is read 1, 3 and 64 events at a time: each peer that has sent is reported once, and no
/// silent peer is.
pub fn in_one_set(c: &Ctx) {
    let (listener, port) = c.listener(PEERS as c_int);
    let Some(listener) = listener else {
        let children: Vec<_> = (0..PEERS).map(|_| sys::fork_child(|| one_peer(port))).collect();
        for child in children {
            c.log(format_args!("peer ended with {}", sys::wait_child(child)));
        }
        return;
    };
    let set = create();
    let peers: Vec<c_int> = (0..PEERS).map(|_| sys::accept4(listener, 0).ok()).collect();
    for fd in &peers {
        ctl(set, EPOLL_CTL_ADD, *fd, IN, *fd as u64).ok();
    }
    for _ in 0..WARM * PEERS {
        let (_, events) = wait(set, 1, AT_MOST_MS);
        let fd = events.first().expect("nobody is left out").0 as c_int;
        assert_eq!(sys::recv_exact(fd, 1), b"?");
        sys::send_all(fd, b"!").ok();
    }
    for most in [1, 3, 64] {
        // These peers send nothing.
        let silent = peers.iter().step_by(7);
        let silent: BTreeSet<c_int> = silent.copied().collect();
        let speak = peers.iter().filter(|fd| !silent.contains(fd));
        for fd in speak.clone() {
            sys::send_all(*fd, b"s").ok();
        }
        for fd in speak.clone() {
            sys::wait_readable_bytes(*fd, 1);
        }
        let mut heard = Vec::new();
        while heard.len() < speak.clone().count() {
            let events = look_until_reported(set, most);
            assert!(
                !events.is_empty(),
                "{} of {most} were not reported",
                PEERS - heard.len()
            );
            for (data, _) in events {
                let fd = data as c_int;
                assert_eq!(sys::recv_exact(fd, 1), b"x");
                heard.push(fd);
            }
        }
        c.log(format_args!("then {} more", wait(set, most, 0).1.len()));
        heard.sort_unstable();
        assert!(heard.iter().eq(speak), "each once");
    }
    talk_all_the_time(set, &peers);
    for fd in peers {
        sys::send_all(fd, b".").ok();
        c.close(fd);
    }
}
