//! Tests of the out-of-band messages: every encoded message is decoded again, and other bytes are refused.

use std::net::SocketAddr;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::region::{MAX_RING_LOG2, MIN_RING_LOG2};
use crate::wire::codec::{Field, VERSION, Writer};
use crate::wire::message::*;

fn ids() -> impl Strategy<Value = [u8; 16]> {
    any::<[u8; 16]>()
}

fn ring() -> impl Strategy<Value = Region> {
    (any::<u32>(), MIN_RING_LOG2..=MAX_RING_LOG2).prop_map(|(page, log2)| Region::new(page, log2).unwrap())
}

fn geometry() -> impl Strategy<Value = Geometry> {
    any::<(u64, u64)>().prop_map(|(arena_bytes, max_ring)| Geometry { arena_bytes, max_ring })
}

fn message() -> impl Strategy<Value = Message> {
    let reason = any::<u16>().prop_map(Reason::from_code);
    let nonce = || ids().prop_map(Nonce::from_bytes);
    let instance = || ids().prop_map(InstanceId::from_bytes);
    let vqpn = || any::<u32>().prop_map(Vqpn);
    prop_oneof![
        (
            any::<u64>(),
            any::<std::net::SocketAddr>(),
            any::<std::net::SocketAddr>(),
            nonce(),
            instance()
        )
            .prop_map(|(request, c, s, nonce_c, instance_c)| Message::Ask {
                request,
                tuple: Tuple::new(c, s),
                nonce_c,
                instance_c
            }),
        (any::<u64>(), nonce(), instance()).prop_map(|(request, nonce_s, instance_s)| {
            Message::Yes {
                request,
                nonce_s,
                instance_s,
            }
        }),
        (any::<u64>(), reason.clone()).prop_map(|(request, reason)| Message::No { request, reason }),
        (any::<u64>(), instance()).prop_map(|(request, instance)| Message::Redirect { request, instance }),
        nonce().prop_map(|nonce_s| Message::Cancel { nonce_s }),
        (ids(), instance(), any::<u32>(), geometry()).prop_map(|(cookie, instance_c, pid, geometry)| {
            Message::Link {
                cookie: Cookie::from_bytes(cookie),
                instance_c,
                pid,
                geometry,
            }
        }),
        (instance(), any::<u32>(), geometry()).prop_map(|(instance_s, pid, geometry)| {
            Message::LinkAccept {
                instance_s,
                pid,
                geometry,
            }
        }),
        (nonce(), nonce(), vqpn(), ring()).prop_map(|(nonce_mine, nonce_yours, vqpn, ring)| {
            Message::Open {
                nonce_mine,
                nonce_yours,
                vqpn,
                ring,
            }
        }),
        (vqpn(), vqpn(), ring()).prop_map(|(yours, mine, ring)| Message::OpenAck { yours, mine, ring }),
        (vqpn(), reason).prop_map(|(yours, reason)| Message::OpenRefuse { yours, reason }),
        any::<u32>().prop_map(|id| Message::Waiter { id }),
        any::<u32>().prop_map(|id| Message::Ring { id }),
        (vqpn(), any::<Option<u64>>()).prop_map(|(yours, resend_from)| Message::DemoteRequest { yours, resend_from }),
        vqpn().prop_map(|yours| Message::Adopt { yours }),
        (vqpn(), any::<u32>()).prop_map(|(yours, bytes)| Message::TakeBack { yours, bytes }),
        vqpn().prop_map(|yours| Message::TakenBack { yours }),
        vqpn().prop_map(|yours| Message::Closed { yours }),
        ids().prop_map(|cookie| Message::Bulk {
            cookie: Cookie::from_bytes(cookie)
        }),
        Just(Message::BulkWanted),
        Just(Message::BulkGone),
    ]
}

/// Returns all fields as text, except the bytes of a cookie. The tests compare this text, because `Message` is not
/// `PartialEq`: cookies are not.
fn text(message: &Message) -> String {
    format!("{message:?}")
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(message in message()) {
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).unwrap();
        let decoded = Message::decode(bytes).unwrap();
        prop_assert_eq!(text(&decoded), text(&message));
        let mut again = [0u8; MAX_MESSAGE];
        prop_assert_eq!(decoded.encode(&mut again).unwrap(), bytes);
    }

    #[test]
    fn a_message_cut_short_or_drawn_out_is_refused(message in message(), extra in vec(any::<u8>(), 1..40)) {
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).unwrap().to_vec();
        for len in 0..bytes.len() {
            prop_assert_eq!(Message::decode(&bytes[..len]).unwrap_err(), WireError::Length);
        }
        let longer = [bytes, extra].concat();
        prop_assert_eq!(Message::decode(&longer).unwrap_err(), WireError::Length);
    }

    #[test]
    fn a_buffer_too_small_is_refused(message in message()) {
        let mut buf = [0u8; MAX_MESSAGE];
        let len = message.encode(&mut buf).unwrap().len();
        prop_assert_eq!(message.encode(&mut buf[..len - 1]).unwrap_err(), WireError::Buffer);
    }

    #[test]
    fn any_bytes_are_decoded_without_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = Message::decode(&bytes);
    }

    #[test]
    fn any_body_is_decoded_without_panic(kind in 0u8..48, body in vec(any::<u8>(), 0..200)) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([VERSION, kind, body.len() as u8, 0]);
        bytes.extend(&body);
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert!(message.encode(&mut [0; MAX_MESSAGE]).unwrap().len() == bytes.len());
        }
    }
}

fn encoded(message: &Message) -> Vec<u8> {
    message.encode(&mut [0; MAX_MESSAGE]).unwrap().to_vec()
}

#[test]
fn a_bad_header_says_what_is_wrong() {
    let good = encoded(&Message::Adopt { yours: Vqpn(7) });
    let with = |at: usize, value| {
        let mut bytes = good.clone();
        bytes[at] = value;
        Message::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(0, b'X'), WireError::Magic);
    assert_eq!(with(4, 9), WireError::Version(9));
    assert_eq!(with(5, 99), WireError::Kind(99));
    assert_eq!(with(6, 3), WireError::Length);
}

#[test]
fn fields_out_of_range_are_refused() {
    let ring = Region::new(1, 12).unwrap();
    let mut ack = encoded(&Message::OpenAck {
        yours: Vqpn(1),
        mine: Vqpn(2),
        ring,
    });
    for log2 in [0, 11, 27, 255] {
        *ack.last_mut().unwrap() = log2;
        assert_eq!(Message::decode(&ack).unwrap_err(), WireError::Field("ring size"));
    }
    let mut demote = encoded(&Message::DemoteRequest {
        yours: Vqpn(1),
        resend_from: None,
    });
    demote[8 + 4] = 2;
    assert_eq!(Message::decode(&demote).unwrap_err(), WireError::Field("flag"));
}

fn tuple_bytes(tuple: &Tuple) -> [u8; 48] {
    let mut bytes = [0; 48];
    let mut out = Writer::new(&mut bytes);
    tuple.put(&mut out).unwrap();
    assert_eq!(out.len, 48);
    bytes
}

proptest! {
    #[test]
    fn a_tuple_survives_the_wire(a: SocketAddr, b: SocketAddr, namespace: u64, device: u32) {
        let tuple = Tuple::new(a, b).at(namespace, device);
        prop_assert_eq!(Tuple::take(&mut &tuple_bytes(&tuple)[..]).unwrap(), tuple);
    }

    #[test]
    fn any_bytes_are_a_tuple(bytes in vec(any::<u8>(), 48)) {
        let tuple = Tuple::take(&mut &bytes[..]).unwrap();
        prop_assert_eq!(Tuple::take(&mut &tuple_bytes(&tuple)[..]).unwrap(), tuple);
    }
}

#[test]
fn the_bytes_of_a_tuple_are_fixed() {
    let tuple = Tuple::new("10.0.0.1:258".parse().unwrap(), "[::1]:772".parse().unwrap()).at(5, 6);
    let mut expected = [[0; 10].as_slice(), &[0xFF, 0xFF, 10, 0, 0, 1], &[0; 15], &[1]].concat();
    expected.extend([2, 1, 4, 3, 5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0]);
    assert_eq!(tuple_bytes(&tuple)[..], expected[..]);
}

#[test]
fn the_bytes_of_a_message_are_fixed() {
    let ring = Region::new(0x0102_0304, 16).unwrap();
    let open = Message::Open {
        nonce_mine: Nonce::from_bytes([0xAA; 16]),
        nonce_yours: Nonce::from_bytes([0xBB; 16]),
        vqpn: Vqpn(0x0A0B_0C0D),
        ring,
    };
    let mut expected = b"rsok\x02\x20\x29\x00".to_vec();
    expected.extend([0xAA; 16]);
    expected.extend([0xBB; 16]);
    expected.extend([0x0D, 0x0C, 0x0B, 0x0A, 4, 3, 2, 1, 16]);
    assert_eq!(encoded(&open), expected);
}

#[test]
fn every_reason_has_a_number_and_a_text() {
    for code in 0..=u16::MAX {
        assert_eq!(Reason::from_code(code).code(), code);
    }
    assert_eq!(Reason::Rule.to_string(), "a rule leaves it on TCP");
    assert_eq!(Reason::Other(999).to_string(), "reason 999");
}

#[test]
fn the_longest_message_is_as_documented() {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
    let longest = Message::Ask {
        request: 1,
        tuple: Tuple::new(address, address),
        nonce_c: Nonce::from_bytes([1; 16]),
        instance_c: InstanceId::from_bytes([1; 16]),
    };
    // docs/protocol.md has these lengths in P10 and P30.
    assert_eq!(
        (encoded(&longest).len(), MAX_MESSAGE, crate::wire::MAX_MARKER),
        (96, 96, 72)
    );
}
