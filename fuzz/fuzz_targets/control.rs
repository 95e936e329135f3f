//! The control port (P60–P65): datagrams of any sender, with and without a secret; stamps; limits and memories that
//! keep their size and their strictness.
#![no_main]

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;

use libfuzzer_sys::arbitrary::Arbitrary;
use libfuzzer_sys::{arbitrary, fuzz_target};
use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::rendezvous::control::{
    Body, DATAGRAM, Datagram, Key, Limiter, Memory, QueryId, Rate, Refused, Stamp, Stamper,
};
use rdmasock_core::wire::Reason;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Bytes(&'a [u8], bool),
    Made(Made, Vec<(u8, u8)>),
    Guarded(Vec<Arrival>),
}

#[derive(Arbitrary, Debug)]
struct Made {
    kind: u8,
    query: [u8; 16],
    stamp: [u8; 16],
    nonce: [u8; 16],
    instance: [u8; 16],
    from: SocketAddr,
    to: SocketAddr,
    request: u64,
    reason: u16,
}

/// A query, and the time since the one before.
#[derive(Arbitrary, Debug)]
struct Arrival {
    after: u32,
    host: u8,
    port: bool,
    query: u8,
    /// The index of the host whose last stamp the query carries; a made-up stamp for `None`.
    stamp: Option<u8>,
    made_up: [u8; 16],
}

struct Fixed {
    key: Key,
    other: Key,
    stamper: Stamper,
}

static FIXED: LazyLock<Fixed> = LazyLock::new(|| Fixed {
    key: Key::new(&[1; 16]).expect("long enough"),
    other: Key::new(&[2; 16]).expect("long enough"),
    stamper: Stamper::random().expect("getrandom"),
});

fuzz_target!(|input: Input<'_>| match input {
    Input::Bytes(bytes, has_key) => {
        let key = has_key.then_some(&FIXED.key);
        if let Ok(datagram) = Datagram::decode(bytes, key) {
            again(&datagram, key);
        }
    }
    Input::Made(made, changes) => forged(&made, &changes),
    Input::Guarded(arrivals) => guarded(&arrivals),
});

/// Checks that a decoded datagram encodes to bytes with the same meaning; returns them.
fn again(datagram: &Datagram, key: Option<&Key>) -> [u8; DATAGRAM] {
    let bytes = datagram.encode(key);
    assert_eq!(Datagram::decode(&bytes, key).as_ref(), Ok(datagram));
    bytes
}

/// Checks that a sender without the key cannot make or change a datagram that is accepted.
fn forged(made: &Made, changes: &[(u8, u8)]) {
    let Fixed { key, other, .. } = &*FIXED;
    let nonce = Nonce::from_bytes(made.nonce);
    let instance = InstanceId::from_bytes(made.instance);
    let request = made.request;
    let body = match made.kind % 6 {
        0 => Body::Ask {
            request,
            tuple: Tuple::new(made.from, made.to),
            nonce_c: nonce,
            instance_c: instance,
        },
        1 => Body::Cancel {
            nonce_s: nonce,
            instance_s: instance,
        },
        2 => Body::Got,
        3 => Body::Stamp,
        4 => Body::Yes {
            request,
            nonce_s: nonce,
            instance_s: instance,
        },
        _ => Body::No {
            request,
            reason: Reason::from_code(made.reason),
        },
    };
    let datagram = Datagram {
        query: QueryId::from_bytes(made.query),
        stamp: Stamp::from_bytes(made.stamp),
        body,
    };
    let plain = again(&datagram, None);
    let signed = again(&datagram, Some(key));
    assert_eq!(Datagram::decode(&signed, None), Err(Refused::Mac));
    assert_eq!(Datagram::decode(&plain, Some(key)), Err(Refused::Mac));
    assert_eq!(Datagram::decode(&signed, Some(other)), Err(Refused::Mac));
    for length in [0, 5, DATAGRAM - 1] {
        assert_eq!(Datagram::decode(&plain[..length], None), Err(Refused::Length));
    }
    let (mut changed, mut open) = (signed, plain);
    for (at, to) in changes {
        changed[usize::from(*at) % DATAGRAM] = *to;
        open[usize::from(*at) % DATAGRAM] = *to;
    }
    assert!(changed == signed || Datagram::decode(&changed, Some(key)).is_err());
    if let Ok(datagram) = Datagram::decode(&open, None) {
        again(&datagram, None);
    }
}

const SECOND: u64 = 1_000_000_000;
const TOTAL: Rate = Rate {
    per_second: 5,
    burst: 20,
};
const EACH: Rate = Rate {
    per_second: 1,
    burst: 3,
};
const SOURCES: usize = 4;
const QUERIES: usize = 8;
const LIFE: u64 = Stamper::LIFE + SECOND;

/// Runs a small version of the library's answerer: no query is accepted twice, even if it is repeated.
fn guarded(arrivals: &[Arrival]) {
    let stamper = &FIXED.stamper;
    let mut limiter = Limiter::new(TOTAL, EACH, SOURCES, 0);
    let mut memory: Memory<u8, u64> = Memory::new(QUERIES, LIFE);
    // The key is host and port; the value is the stamp and the time of its issue.
    let mut stamps: HashMap<(u8, bool), (Stamp, u64)> = HashMap::new();
    let mut taken: HashMap<u8, u64> = HashMap::new();
    let (mut now, mut let_in) = (0_u64, 0_u64);
    for arrival in arrivals {
        now += u64::from(arrival.after) * 64;
        let from = address(arrival.host, arrival.port);
        let owner = arrival.stamp.map(|host| (host, arrival.port));
        let (stamp, given) = match owner.and_then(|owner| stamps.get(&owner)) {
            Some((stamp, at)) => (*stamp, owner.map(|o| (o, *at))),
            None => (Stamp::from_bytes(arrival.made_up), None),
        };
        let is_good = stamper.is_good(&stamp, from, now);
        let (oldest, newest) = (Stamper::LIFE, Stamper::LIFE / 2);
        match given {
            Some((owner, at)) if owner == (arrival.host, arrival.port) => {
                let age = now - at;
                assert!(is_good || age >= newest, "a good stamp is refused");
                assert!(!is_good || age < oldest, "an old stamp is taken");
            }
            _ => assert!(!is_good, "another's stamp is taken"),
        }
        for (query, _) in memory.expire(now) {
            let at = taken.get(&query).copied();
            assert!(at.is_some_and(|at| now - at >= LIFE), "forgotten early");
        }
        let is_held = |at: &&u64| now - **at < LIFE;
        assert!(taken.values().filter(is_held).count() <= QUERIES);
        if !limiter.take(from.ip(), now) {
            continue;
        }
        let_in += 1;
        assert!(let_in <= 20 + now / (SECOND / 5) + 1, "more than the rate");
        if !is_good {
            let stamp = stamper.stamp(from, now);
            stamps.insert((arrival.host, arrival.port), (stamp, now));
        } else if memory.get(&arrival.query).is_none()
            && memory.insert(arrival.query, now, now)
            && let Some(before) = taken.insert(arrival.query, now)
        {
            assert!(now - before >= LIFE, "taken twice");
        }
    }
}

fn address(host: u8, port: bool) -> SocketAddr {
    let ip = if host < 128 {
        IpAddr::from([10, 0, 0, host])
    } else {
        IpAddr::from([0x2001, 0xdb8, 0, u16::from(host), 0, 0, 0, 1])
    };
    SocketAddr::new(ip, 4000 + u16::from(port))
}
