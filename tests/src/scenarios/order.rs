//! The order in which a set reports several connections whose peers have sent one after the other.

use libc::{EPOLL_CTL_ADD, c_int};

use super::epoll::{ET, IN, create, ctl, wait};
use crate::ctx::Ctx;
use crate::sys;
use crate::sys::{Addr, Ret};

const CONNECTIONS: usize = 6;
const ROUNDS: usize = 60;

/// The `round`th of some permutations of the connections.
fn permutation(round: usize) -> Vec<usize> {
    let mut rest: Vec<usize> = (0..CONNECTIONS).collect();
    let mut seed = round * 7919 + 13;
    (0..CONNECTIONS)
        .map(|_| {
            seed = seed * 31 % 65_521;
            rest.remove(seed % rest.len())
        })
        .collect()
}

/// Calls epoll_wait(), and returns the data in the order of the kernel's list.
fn listed(ep: c_int) -> Vec<usize> {
    let mut evs = [libc::epoll_event { events: 0, u64: 0 }; 2 * CONNECTIONS];
    let max = evs.len() as c_int;
    let mut n: Ret;
    loop {
        n = call!(libc::epoll_wait(ep, evs.as_mut_ptr(), max, sys::SOON));
        if !n.is(libc::EINTR) {
            break;
        }
    }
    let n = usize::try_from(n.value).unwrap_or(0);
    evs[..n].iter().map(|e| e.u64 as usize).collect()
}

/// A set that was quiet lists connections in the order in which they were sent on.
pub fn of_arrival(c: &Ctx) {
    let fds: Vec<c_int> = (0..CONNECTIONS).map(|_| c.pair()).collect();
    for (name, flags) in [("level", IN), ("edge", IN | ET)] {
        let ep = create();
        for (at, fd) in fds.iter().enumerate().filter(|_| c.is_server()) {
            ctl(ep, EPOLL_CTL_ADD, *fd, flags, at as u64).ok();
        }
        let mut in_order = 0;
        for round in 0..ROUNDS {
            if c.is_server() {
                // This wait takes earlier reports off the list.
                wait(ep, CONNECTIONS, 0);
                c.sync("go");
                c.sync("sent");
                fds.iter().for_each(|fd| sys::wait_readable_bytes(*fd, 1));
                in_order += usize::from(listed(ep) == permutation(round));
                for fd in &fds {
                    sys::recv_exact(*fd, 1);
                }
            } else {
                c.sync("go");
                for at in permutation(round) {
                    sys::send_all(fds[at], b"x").ok();
                }
                c.sync("sent");
            }
        }
        if c.is_server() {
            // The kernel's list can be another where the sender goes from one processor to another.
            c.log(format_args!("{name}: in order: {}", in_order * 10 > ROUNDS * 9));
        }
        sys::close(ep).ok();
    }
    c.sync("done");
}

/// A message on a connection that stays on TCP, and then one on an older connection: a later wait on the set reports
/// both.
pub fn young_first(c: &Ctx) {
    let (old, young) = (c.pair(), c.cold_pair());
    // A socket with this option stays on TCP.
    sys::set_int(young, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 4).ok();
    c.sync("connected");
    let ep = create();
    if c.is_server() {
        ctl(ep, EPOLL_CTL_ADD, old, IN, 1).ok();
        ctl(ep, EPOLL_CTL_ADD, young, IN, 0).ok();
        wait(ep, 2, 0);
    }
    let mut in_order = 0;
    for _ in 0..ROUNDS {
        c.sync("go");
        if c.is_server() {
            c.sync("sent");
            sys::wait_readable_bytes(young, 4);
            sys::wait_readable_bytes(old, 4);
            in_order += usize::from(listed(ep) == [0, 1]);
            for fd in [young, old] {
                sys::recv_exact(fd, 4);
                sys::send_all(fd, b"okay").ok();
            }
            // This wait takes earlier reports off the list.
            wait(ep, 2, 0);
        } else {
            sys::send_all(young, b"last").ok();
            sys::send_all(old, b"more").ok();
            c.sync("sent");
            for fd in [young, old] {
                sys::recv_exact(fd, 4);
            }
        }
    }
    if c.is_server() {
        // The kernel's list can be another where the sender goes from one processor to another.
        c.log(format_args!("in order: {}", in_order * 10 > ROUNDS * 9));
    }
    sys::close(ep).ok();
    c.sync("done");
}

/// A message on a connection that is promoted now, and then one on an older connection: a reader of both gets the two
/// in this order.
pub fn in_promotions(c: &Ctx) {
    const ROUNDS: u8 = 200;
    let (hello, first, second) = (b'h', b'1', b'2');
    let old = c.pair();
    let (listener, port) = c.listener(16);
    if let Some(listener) = listener {
        let ep = create();
        for fd in [listener, old] {
            ctl(ep, EPOLL_CTL_ADD, fd, IN, fd as u64).ok();
        }
        let (mut seen, mut in_order, mut rounds) = (None, 0, 0);
        while rounds < ROUNDS {
            for fd in listed(ep) {
                let fd = fd as c_int;
                if fd == listener {
                    let young = sys::accept4(listener, 0).ok();
                    ctl(ep, EPOLL_CTL_ADD, young, IN, young as u64).ok();
                    continue;
                }
                let mut message = [0; 2];
                if sys::recv(fd, &mut message, 0).ok() == 0 {
                    sys::close(fd).ok();
                    continue;
                }
                let [kind, round] = message;
                if kind == first {
                    seen = Some(round);
                } else if kind == second {
                    in_order += u8::from(seen == Some(round));
                    rounds += 1;
                }
                sys::send_all(fd, &message).ok();
            }
        }
        // The kernel's list can be another where the sender goes from one processor to another.
        c.log(format_args!("nearly always in order: {}", in_order > ROUNDS - 4));
        sys::close(ep).ok();
    } else {
        for round in 0..ROUNDS {
            let young = sys::connected(&Addr::v4(port));
            for kind in [hello, first] {
                sys::send_all(young, &[kind, round]).ok();
                if kind == hello {
                    sys::recv_exact(young, 2);
                }
            }
            sys::send_all(old, &[second, round]).ok();
            for fd in [young, old] {
                sys::recv_exact(fd, 2);
            }
            sys::close(young).ok();
        }
    }
    c.sync("done");
}

/// One result lists a connection once, even if bytes come for it during the call: a program may close
/// it at the first entry.
pub fn listed_once(c: &Ctx) {
    const MESSAGES: usize = 40_000;
    let mut fds: Vec<c_int> = (1..CONNECTIONS).map(|_| c.pair()).collect();
    fds.push(c.cold_pair());
    // A socket with this option stays on TCP.
    sys::set_int(fds[CONNECTIONS - 1], libc::SOL_SOCKET, libc::SO_RCVLOWAT, 4).ok();
    c.sync("connected");
    if c.is_server() {
        let ep = create();
        for (at, fd) in fds.iter().enumerate() {
            sys::set_nonblocking(*fd, true);
            ctl(ep, EPOLL_CTL_ADD, *fd, IN | ET, at as u64).ok();
        }
        let (mut got, mut twice) = (0, 0);
        while got < 4 * MESSAGES {
            let now = listed(ep);
            assert!(!now.is_empty(), "no event after {got} bytes");
            let mut distinct = now.clone();
            distinct.sort_unstable();
            distinct.dedup();
            twice += now.len() - distinct.len();
            let mut bytes = [0; 4096];
            for at in distinct {
                loop {
                    let r = sys::recv(fds[at], &mut bytes, 0);
                    if r.is(libc::EAGAIN) {
                        break;
                    }
                    got += r.count();
                }
            }
        }
        c.log(format_args!("listed twice: {twice}"));
        sys::close(ep).ok();
    } else {
        for message in 0..MESSAGES {
            sys::send_all(fds[message % CONNECTIONS], b"word").ok();
        }
    }
    c.sync("done");
}

/// A reader that sees the second of two messages on two connections has seen the first: both on links, or one on TCP.
pub fn none_alone(c: &Ctx) {
    const PAIRS: usize = 4000;
    let mut fds: Vec<c_int> = (1..CONNECTIONS).map(|_| c.pair()).collect();
    fds.push(c.cold_pair());
    let last = CONNECTIONS - 1;
    // A socket with this option stays on TCP.
    sys::set_int(fds[last], libc::SOL_SOCKET, libc::SO_RCVLOWAT, 4).ok();
    c.sync("connected");
    if c.is_server() {
        let ep = create();
        for (at, fd) in fds.iter().enumerate() {
            ctl(ep, EPOLL_CTL_ADD, *fd, IN, at as u64).ok();
        }
        let mut heard = vec![false; 2 * PAIRS];
        let mut alone = 0;
        for _ in 0..PAIRS {
            let mut left = 2;
            while left > 0 {
                let mut batch = Vec::new();
                for at in listed(ep) {
                    let message = sys::recv_exact(fds[at], 4);
                    let id = u32::from_le_bytes(message[..].try_into().unwrap()) as usize;
                    heard[id] = true;
                    batch.push((at, id));
                }
                let is_alone = |(_, id): &&(usize, usize)| id % 2 == 1 && !heard[id - 1];
                alone += batch.iter().filter(is_alone).count();
                left -= batch.len();
                for (at, _) in batch {
                    sys::send_all(fds[at], b"okay").ok();
                }
            }
        }
        c.log(format_args!("hardly ever alone: {}", alone * 50 < PAIRS));
        sys::close(ep).ok();
    } else {
        for pair in 0..PAIRS {
            let order = permutation(pair);
            let links = order.iter().copied().filter(|at| *at != last);
            let two: Vec<usize> = match pair % 4 {
                0 => links.take(1).chain([last]).collect(),
                1 => [last].into_iter().chain(links).take(2).collect(),
                _ => links.take(2).collect(),
            };
            for (at, id) in two.iter().zip(2 * pair as u32..) {
                sys::send_all(fds[*at], &id.to_le_bytes()).ok();
            }
            for at in two {
                sys::recv_exact(fds[at], 4);
            }
        }
    }
    c.sync("done");
}

/// A close, or a shutdown, of one connection, then a message on another: a reader that sees the message has seen
/// the end. All ends are in one thread, which makes no call in between that would let others run.
pub fn end_first(c: &Ctx) {
    const ENDS: usize = 60;
    const WARM: usize = 24;
    let (listener, port) = c.listener(16);
    if let Some(listener) = listener {
        let pair = || {
            let ours = sys::connected(&Addr::v4(port));
            (ours, sys::accept4(listener, 0).ok())
        };
        let ep = create();
        let mut in_order = 0;
        for end in 0..ENDS {
            let pairs = [pair(), pair()];
            for message in 0..WARM {
                for (ours, theirs) in pairs {
                    sys::send_all(ours, &[message as u8]).ok();
                    sys::recv_exact(theirs, 1);
                    sys::send_all(theirs, &[message as u8]).ok();
                    sys::recv_exact(ours, 1);
                }
                // Promotions take place.
                sys::pause_ms(u64::from(message < 4) * 3);
            }
            for (at, (_, theirs)) in pairs.iter().enumerate() {
                ctl(ep, EPOLL_CTL_ADD, *theirs, IN, at as u64).ok();
            }
            wait(ep, 2, 0);
            let [(ending, _), (other, _)] = pairs;
            let shuts = end % 2 == 1;
            if shuts {
                call!(libc::shutdown(ending, libc::SHUT_WR)).ok();
            } else {
                sys::close(ending).ok();
            }
            sys::send_all(other, b"more").ok();
            in_order += usize::from(listed(ep) == [0, 1]);
            if shuts {
                sys::close(ending).ok();
            }
            for fd in [pairs[0].1, other, pairs[1].1] {
                sys::close(fd).ok();
            }
        }
        c.log(format_args!("in order: {}", in_order * 10 > ENDS * 9));
    }
    c.sync("done");
}
