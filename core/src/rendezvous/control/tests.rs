//! Tests of the control port's datagrams, of the rate limits, and of the memory of questions.

use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use crate::rendezvous::control::*;

fn key() -> Key {
    Key::new(b"sixteen bytes...").unwrap()
}

fn bodies() -> impl Strategy<Value = Body> {
    let nonce = any::<[u8; 16]>().prop_map(Nonce::from_bytes);
    let id = any::<[u8; 16]>().prop_map(InstanceId::from_bytes);
    prop_oneof![
        (
            any::<u64>(),
            any::<(SocketAddr, SocketAddr)>(),
            nonce.clone(),
            id.clone()
        )
            .prop_map(|(request, (a, b), nonce_c, instance_c)| Body::Ask {
                request,
                tuple: Tuple::new(a, b),
                nonce_c,
                instance_c
            }),
        (nonce.clone(), id.clone()).prop_map(|(nonce_s, instance_s)| Body::Cancel { nonce_s, instance_s }),
        Just(Body::Got),
        Just(Body::Stamp),
        (any::<u64>(), nonce, id).prop_map(|(request, nonce_s, instance_s)| Body::Yes {
            request,
            nonce_s,
            instance_s
        }),
        (any::<u64>(), any::<u16>()).prop_map(|(request, code)| Body::No {
            request,
            reason: wire::Reason::from_code(code)
        }),
    ]
}

fn datagrams() -> impl Strategy<Value = Datagram> {
    (any::<[u8; 16]>(), any::<[u8; 16]>(), bodies()).prop_map(|(query, stamp, body)| Datagram {
        query: QueryId(query),
        stamp: Stamp(stamp),
        body,
    })
}

proptest! {
    #[test]
    fn a_datagram_survives_the_wire(datagram in datagrams(), signed: bool) {
        let key = signed.then(key);
        let bytes = datagram.encode(key.as_ref());
        prop_assert_eq!(Datagram::decode(&bytes, key.as_ref()), Ok(datagram));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400), signed: bool) {
        let key = signed.then(key);
        let _ = Datagram::decode(&bytes, key.as_ref());
        let mut framed = [0; DATAGRAM];
        framed.iter_mut().zip(&bytes).for_each(|(to, from)| *to = *from);
        framed[..5].copy_from_slice(b"rsku\x02");
        framed[6] &= 1;
        let _ = Datagram::decode(&framed, key.as_ref());
    }

    #[test]
    fn a_changed_bit_is_noticed(datagram in datagrams(), at in 0..DATAGRAM, bit in 0_u32..8) {
        let mut bytes = datagram.encode(Some(&key()));
        bytes[at] ^= 1_u8 << bit;
        prop_assert!(Datagram::decode(&bytes, Some(&key())).is_err());
    }

    #[test]
    fn only_the_right_secret_opens_it(datagram in datagrams(), other in prop::collection::vec(any::<u8>(), 16..100)) {
        let other = Key::new(&other).unwrap();
        let bytes = datagram.encode(Some(&key()));
        prop_assert_eq!(Datagram::decode(&bytes, Some(&other)), Err(Refused::Mac));
        prop_assert_eq!(Datagram::decode(&bytes, None), Err(Refused::Mac));
        let plain = datagram.encode(None);
        prop_assert_eq!(Datagram::decode(&plain, Some(&key())), Err(Refused::Mac));
    }
}

fn got() -> Datagram {
    Datagram {
        query: QueryId([7; 16]),
        stamp: Stamp::NONE,
        body: Body::Got,
    }
}

#[test]
fn each_fault_has_its_reason() {
    let good = got().encode(None);
    assert_eq!(DATAGRAM, 192);
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let cases: [(Change<'_>, Refused); 8] = [
        (&|b| b.truncate(191), Refused::Length),
        (&|b| b.push(0), Refused::Length),
        (&Vec::clear, Refused::Length),
        (&|b| b[4] = 3, Refused::Version(3)),
        // A later version may be longer.
        (
            &|b| {
                b[4] = 9;
                b.extend([0; 50]);
            },
            Refused::Version(9),
        ),
        (&|b| b[0] = b'x', Refused::Kind),
        (&|b| b[5] = 99, Refused::Kind),
        (&|b| b[6] = 1, Refused::Mac),
    ];
    for (change, reason) in cases {
        let mut bytes = good.to_vec();
        change(&mut bytes);
        assert_eq!(Datagram::decode(&bytes, None), Err(reason));
    }
    for kind in 0..=255 {
        let mut bytes = good;
        bytes[5] = kind;
        let understood = Datagram::decode(&bytes, None).is_ok();
        assert_eq!(understood, [1, 2, 3, 16, 17, 18].contains(&kind));
    }
}

#[test]
fn a_question_does_not_pass_for_an_answer_under_the_same_mac() {
    let key = key();
    let mut bytes = got().encode(Some(&key));
    bytes[5] = ANSWERS;
    assert_eq!(Datagram::decode(&bytes, Some(&key)), Err(Refused::Mac));
}

#[test]
fn a_stamp_is_good_for_its_address_for_a_while_and_at_one_instance() {
    let (a, b) = (Stamper::random().unwrap(), Stamper::random().unwrap());
    let here: SocketAddr = "10.0.0.1:5".parse().unwrap();
    for now in [0, 59, 60, 1000, 86_400].map(|s| s * 1_000_000_000) {
        let stamp = a.stamp(here, now);
        assert!(a.is_good(&stamp, here, now));
        assert!(a.is_good(&stamp, here, now + Stamper::LIFE / 2));
        assert!(!a.is_good(&stamp, here, now + Stamper::LIFE));
        assert!(!b.is_good(&stamp, here, now));
        for elsewhere in ["10.0.0.1:6", "10.0.0.2:5", "[::1]:5"] {
            assert!(!a.is_good(&stamp, elsewhere.parse().unwrap(), now));
        }
        assert!(!a.is_good(&Stamp::NONE, here, now));
    }
    let mapped = "[::ffff:10.0.0.1]:5".parse().unwrap();
    assert!(a.is_good(&a.stamp(mapped, 0), here, 0));
}

#[test]
fn a_secret_file_has_to_be_secret() {
    let dir = std::env::temp_dir().join(format!("rdmasock-secret-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("secret");
    let load = |bytes: &[u8], mode| {
        let _ = std::fs::remove_file(&file);
        std::fs::write(&file, bytes).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        Key::load(&file)
    };
    let results = [
        load(&[1; 16], 0o600).is_ok(),
        load(&[1; 4096], 0o640).is_ok(),
        load(&[1; 15], 0o600).is_err(),
        load(&[1; 4097], 0o600).is_err(),
        load(&[1; 16], 0o604).is_err(),
        load(&[1; 16], 0o602).is_err(),
        Key::load(&dir).is_err(),
        Key::load(&dir.join("none")).is_err(),
        Key::load(Path::new("/dev/zero")).is_err(),
    ];
    std::fs::remove_dir_all(&dir).unwrap();
    assert_eq!(results, [true; 9]);
}

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
    assert_eq!((memory.entries.len(), memory.get(&'b')), (2, Some(&2)));
    assert_eq!(memory.expire(1000).len(), 2);
    assert!(memory.entries.is_empty());
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
