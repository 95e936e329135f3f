//! Tests of the limits on requests from the network: rates, and the memory of sources and questions.

use proptest::prelude::*;

use crate::rendezvous::control::*;

const RATE: Rate = Rate {
    per_second: 10,
    burst: 5,
};

fn ip(n: u32) -> IpAddr {
    IpAddr::V4(n.into())
}

#[test]
fn a_burst_then_the_rate() {
    let mut bucket = Bucket::new(RATE, 7);
    assert_eq!((0..20).filter(|_| bucket.take(7)).count(), 5);
    assert!(!bucket.take(7 + SECOND / 10 - 1));
    assert!(bucket.take(7 + SECOND / 10));
    assert!(!bucket.take(0), "a clock that goes back gives nothing");
    assert_eq!((0..20).filter(|_| bucket.take(100 * SECOND)).count(), 5);
}

#[test]
fn one_source_does_not_use_up_what_others_may_send() {
    let total = Rate {
        per_second: 1000,
        burst: 1000,
    };
    let mut limiter = Limiter::new(total, RATE, 4, 0);
    assert_eq!((0..100).filter(|_| limiter.take(ip(1), 0)).count(), 5);
    assert!(limiter.take(ip(2), 0));
    for n in 10..1000 {
        limiter.take(ip(n), 0);
        assert!(limiter.sources.len() <= 4);
    }
}

#[test]
fn many_sources_meet_the_total() {
    let mut limiter = Limiter::new(RATE, RATE, 4, 0);
    assert_eq!((0..100).filter(|n| limiter.take(ip(*n), 0)).count(), 5);
    let before = limiter.sources.clone().len();
    assert!(!limiter.take(ip(1000), 0));
    assert_eq!(limiter.sources.len(), before, "a flood leaves the table alone");
}

#[test]
fn the_source_that_was_quiet_longest_is_forgotten_first() {
    let total = Rate {
        per_second: 1000,
        burst: 1000,
    };
    let mut limiter = Limiter::new(total, RATE, 2, 0);
    for at in 0..5 {
        limiter.take(ip(1), at);
    }
    limiter.take(ip(2), 10);
    assert!(!limiter.take(ip(1), 11));
    limiter.take(ip(3), 12);
    assert!(!limiter.take(ip(1), 13), "remembered, and empty");
}

#[test]
fn ipv6_sources_of_one_network_are_one() {
    let a = "2001:db8::1".parse().unwrap();
    let b: IpAddr = "2001:db8::ffff".parse().unwrap();
    assert_eq!(network(a), network(b));
    assert_ne!(network(a), network("2001:db8:0:1::1".parse().unwrap()));
    assert_eq!(network("::ffff:1.2.3.4".parse().unwrap()), ip(0x0102_0304));
}

#[test]
fn what_is_remembered_stays_for_its_time_and_no_longer() {
    let mut memory = Memory::new(2, 100);
    assert!(memory.insert('a', 1, 0) && memory.insert('b', 2, 50));
    assert!(!memory.insert('c', 3, 60), "full: nothing is forgotten early");
    assert!(!memory.insert('a', 9, 60));
    assert_eq!(memory.expire(99), []);
    assert_eq!(memory.expire(100), [('a', 1)]);
    assert!(memory.insert('c', 3, 100));
    assert_eq!((memory.len(), memory.get(&'b')), (2, Some(&2)));
    assert_eq!(memory.expire(1000).len(), 2);
    assert!(memory.is_empty());
}

proptest! {
    #[test]
    fn never_more_than_the_rate(steps in prop::collection::vec(0_u64..SECOND, 1..200)) {
        let mut bucket = Bucket::new(RATE, 0);
        let (mut now, mut taken) = (0, 0_u64);
        for step in steps {
            now += step;
            taken += u64::from(bucket.take(now));
        }
        prop_assert!(taken <= 5 + now / (SECOND / 10) + 1);
    }
}
