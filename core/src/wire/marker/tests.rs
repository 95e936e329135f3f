//! Tests of the markers: every encoded marker is decoded again, and other bytes are refused.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::wire::VERSION;
use crate::wire::marker::*;

pub(crate) fn marker() -> impl Strategy<Value = Marker> {
    let offer = any::<[u8; 16]>().prop_map(|cookie| LinkOffer {
        address: LinkAddress::Shm,
        cookie: Cookie::from_bytes(cookie),
    });
    let hello = (any::<[u8; 16]>(), proptest::option::of(offer)).prop_map(|(id, link)| {
        Marker::Hello(Hello {
            instance: InstanceId::from_bytes(id),
            link,
        })
    });
    prop_oneof![
        hello,
        Just(Marker::Switch),
        any::<u16>().prop_map(|code| Marker::Abort(Reason::from_code(code))),
        any::<(u64, u64)>().prop_map(|(received, sent)| Marker::Resume { received, sent }),
    ]
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(marker in marker(), nonce: [u8; 16]) {
        let nonce = Nonce::from_bytes(nonce);
        let (mut buf, mut again) = ([0; MAX_MARKER], [0; MAX_MARKER]);
        let bytes = marker.encode(&nonce, &mut buf).unwrap();
        prop_assert!(bytes.starts_with(nonce.as_bytes()));
        let decoded = Marker::decode(bytes).unwrap();
        prop_assert_eq!(format!("{decoded:?}"), format!("{marker:?}"));
        prop_assert_eq!(decoded.encode(&nonce, &mut again).unwrap(), bytes);
    }

    #[test]
    fn a_marker_cut_short_is_refused(marker in marker()) {
        let mut buf = [0; MAX_MARKER];
        let bytes = marker.encode(&Nonce::from_bytes([1; 16]), &mut buf).unwrap();
        for len in 0..bytes.len() {
            prop_assert_eq!(Marker::decode(&bytes[..len]).unwrap_err(), WireError::Length);
        }
    }

    #[test]
    fn any_bytes_are_decoded_without_panic(kind in 0u8..6, body in vec(any::<u8>(), 0..=MAX_BODY)) {
        let mut bytes = vec![0; 16];
        bytes.extend([VERSION, kind, body.len() as u8, 0]);
        bytes.extend(&body);
        let _ = Marker::decode(&bytes);
        let _ = Marker::decode(&body);
    }
}

#[test]
fn the_longest_marker_fits() {
    let link = LinkOffer {
        address: LinkAddress::Verbs("[fd00::1]:7".parse().unwrap()),
        cookie: Cookie::from_bytes([2; 16]),
    };
    let hello = Hello {
        instance: InstanceId::from_bytes([3; 16]),
        link: Some(link),
    };
    let mut buf = [0; MAX_MARKER];
    let marker = Marker::Hello(hello);
    assert_eq!(
        marker.encode(&Nonce::from_bytes([1; 16]), &mut buf).unwrap().len(),
        MAX_MARKER
    );
    assert!(marker.encode(&Nonce::from_bytes([1; 16]), &mut buf[1..]).is_err());
}

#[test]
fn a_resume_has_its_positions_behind_the_header_and_nothing_else() {
    let mut buf = [0; MAX_MARKER];
    let marker = Marker::Resume {
        received: 0x0102_0304_0506_0708,
        sent: 1,
    };
    let bytes = marker.encode(&Nonce::from_bytes([9; 16]), &mut buf).unwrap();
    let body = [8, 7, 6, 5, 4, 3, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0];
    let expected = [&[9; 16][..], &[2, 4, 16, 0], &body].concat();
    assert_eq!(bytes, expected);
    let longer = [&expected[..18], &[17, 0], &expected[20..], &[0]].concat();
    assert_eq!(Marker::decode(&longer).unwrap_err(), WireError::Length);
}

#[test]
fn a_link_within_the_host_has_no_other_name() {
    let hello = Hello {
        instance: InstanceId::from_bytes([3; 16]),
        link: Some(LinkOffer {
            address: LinkAddress::Shm,
            cookie: Cookie::from_bytes([2; 16]),
        }),
    };
    let mut buf = [0; MAX_MARKER];
    let mut bytes = Marker::Hello(hello)
        .encode(&Nonce::from_bytes([1; 16]), &mut buf)
        .unwrap()
        .to_vec();
    assert!(Marker::decode(&bytes).is_ok());
    // A HELLO on the shm fabric may not have an address, so that it cannot lead to another socket.
    let [.., length] = bytes.as_mut_slice() else { return };
    *length = 3;
    bytes.extend(b"a/b");
    bytes[18] += 3;
    assert_eq!(Marker::decode(&bytes).unwrap_err(), WireError::Field("link address"));
}

#[test]
fn an_address_between_hosts_reads_back_and_nowhere_is_refused() {
    let offer = |at: &str| LinkOffer {
        address: LinkAddress::Verbs(at.parse().unwrap()),
        cookie: Cookie::from_bytes([7; 16]),
    };
    let sent = |at: &str| {
        let hello = Hello {
            instance: InstanceId::from_bytes([1; 16]),
            link: Some(offer(at)),
        };
        let mut buf = [0; MAX_MARKER];
        let nonce = Nonce::from_bytes([2; 16]);
        let bytes = Marker::Hello(hello).encode(&nonce, &mut buf).unwrap();
        Marker::decode(bytes).map(|m| match m {
            Marker::Hello(hello) => hello.link.map(|l| l.address),
            _ => None,
        })
    };
    for at in ["10.0.0.1:5000", "[fd00::1]:65535"] {
        assert_eq!(sent(at), Ok(Some(offer(at).address)));
    }
    for at in ["10.0.0.1:0", "0.0.0.0:1", "[::]:1", "[ff02::1]:1", "224.0.0.1:9"] {
        assert_eq!(sent(at), Err(WireError::Field("link address")), "{at}");
    }
}
