//! Tests of the scanner: it finds all data and every marker, wherever TCP cuts them.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::ids::{Cookie, InstanceId};
use crate::wire::marker::*;
use crate::wire::{Hello, LinkAddress, LinkOffer, MAX_MARKER, Reason};

fn encoded(marker: &Marker, nonce: &Nonce) -> Vec<u8> {
    marker.encode(nonce, &mut [0; MAX_MARKER]).unwrap().to_vec()
}

fn hello() -> Marker {
    Marker::Hello(Hello {
        instance: InstanceId::from_bytes([7; 16]),
        link: Some(LinkOffer {
            address: LinkAddress::Shm,
            cookie: Cookie::from_bytes([9; 16]),
        }),
    })
}

/// Scans `wire` in pieces that end at `cuts`, as a reader does. Returns the data up to the first marker, and that
/// marker.
fn read_in_pieces(nonce: &Nonce, wire: &[u8], cuts: &[usize]) -> (Vec<u8>, Option<Marker>) {
    let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (wire.len() + 1)).collect();
    cuts.sort_unstable();
    cuts.push(wire.len());
    let (mut data, mut from) = (Vec::new(), 0);
    for cut in cuts {
        let scan = scan(nonce, &wire[from..cut]);
        data.extend(&wire[from..from + scan.payload]);
        from += scan.payload;
        match scan.what {
            Found::Payload => assert_eq!(from, cut),
            Found::PartialMarker { have } => {
                assert!((1..MAX_MARKER).contains(&have));
                assert_eq!(from + have, cut);
            }
            Found::Marker { marker, len } => {
                assert!((MIN_MARKER..=MAX_MARKER).contains(&len));
                return (data, Some(marker.unwrap()));
            }
        }
    }
    (data, None)
}

/// Returns random nonces, nonces of few different bytes, and nonces that contain their own beginning.
fn nonces() -> impl Strategy<Value = Nonce> {
    let small = vec(0u8..2, 16).prop_map(|v| v.try_into().unwrap());
    prop_oneof![any::<[u8; 16]>(), small, Just([0xFF; 16])].prop_map(Nonce::from_bytes)
}

/// Returns data with pieces of the nonce between other bytes. A whole nonce can result, from one piece or from several
/// that meet; each test skips data for which that matters.
fn teasing(nonce: Nonce) -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        (0usize..16).prop_map(move |n| nonce.as_bytes()[..n].to_vec()),
        (0usize..16).prop_map(move |n| nonce.as_bytes()[n..].to_vec()),
        vec(0u8..2, 0..20),
        vec(any::<u8>(), 0..20),
    ];
    vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

fn contains(data: &[u8], pattern: &[u8]) -> bool {
    data.windows(pattern.len()).any(|w| w == pattern)
}

proptest! {
    #[test]
    fn data_and_marker_come_out_however_they_are_cut(
        (nonce, data) in nonces().prop_flat_map(|n| (Just(n), teasing(n))),
        which in 0..3,
        after in vec(any::<u8>(), 0..30),
        cuts in vec(any::<usize>(), 0..20),
    ) {
        let marker = [hello(), Marker::Switch, Marker::Abort(Reason::Timeout)][which as usize];
        let bytes = encoded(&marker, &nonce);
        // The end of the data and the beginning of the marker could form an earlier nonce by chance. Such cases are
        // skipped.
        prop_assume!(!contains(&[&data, &bytes[..15]].concat(), nonce.as_bytes()));
        let wire = [&data[..], &bytes, &after].concat();
        let (got, found) = read_in_pieces(&nonce, &wire, &cuts);
        prop_assert_eq!(got, data);
        prop_assert_eq!(format!("{:?}", found.unwrap()), format!("{marker:?}"));
    }

    #[test]
    fn data_among_markers_is_counted(
        (nonce, pieces) in nonces().prop_flat_map(|n| (Just(n), vec(teasing(n), 1..5))),
    ) {
        let wire = pieces.join(&encoded(&hello(), &nonce)[..]);
        // Data and marker could form another nonce by chance. Such cases are skipped.
        let markers = wire.windows(16).filter(|w| *w == nonce.as_bytes()).count();
        prop_assume!(markers + 1 == pieces.len());
        let data: usize = pieces.iter().map(Vec::len).sum();
        let last = pieces.last().unwrap();
        let held = last.len() - scan(&nonce, last).payload;
        prop_assert_eq!(payload_in(&nonce, &wire), data - held);
    }

    #[test]
    fn only_a_beginning_of_the_nonce_is_held_back(
        (nonce, data) in nonces().prop_flat_map(|n| (Just(n), teasing(n))),
    ) {
        prop_assume!(!contains(&data, nonce.as_bytes()));
        let scan = scan(&nonce, &data);
        let held = &data[scan.payload..];
        prop_assert!(held.len() < 16 && nonce.as_bytes().starts_with(held));
        // No tail of the data that is longer than `held` is the beginning of a nonce.
        for start in 0..scan.payload {
            prop_assert!(!nonce.as_bytes().starts_with(&data[start..]));
        }
    }

    #[test]
    fn any_bytes_after_a_nonce_are_handled(nonce in nonces(), rest in vec(any::<u8>(), 0..300)) {
        let wire = [&nonce.as_bytes()[..], &rest].concat();
        let scan = scan(&nonce, &wire);
        prop_assert_eq!(scan.payload, 0);
        match scan.what {
            Found::PartialMarker { have } => prop_assert_eq!(have, wire.len()),
            Found::Marker { len, .. } => prop_assert!(len <= wire.len()),
            Found::Payload => prop_assert!(false, "a nonce is never data"),
        }
    }
}

#[test]
fn a_marker_split_at_every_byte_is_found() {
    let nonce = Nonce::from_bytes(*b"\xFFabcdefghijklmn\xFF");
    let wire = [&b"data\xFFabc\xFF"[..], &encoded(&hello(), &nonce), b"more"].concat();
    for cut in 0..wire.len() {
        let (data, marker) = read_in_pieces(&nonce, &wire, &[cut]);
        assert_eq!(data, b"data\xFFabc\xFF", "cut at {cut}");
        assert!(matches!(marker, Some(Marker::Hello(_))), "cut at {cut}");
    }
    let every: Vec<usize> = (0..wire.len()).collect();
    assert!(read_in_pieces(&nonce, &wire, &every).1.is_some());
}

#[test]
fn two_markers_in_a_row_are_found_one_after_the_other() {
    let nonce = Nonce::from_bytes([0xC0; 16]);
    let wire = [encoded(&hello(), &nonce), encoded(&Marker::Switch, &nonce)].concat();
    let Found::Marker {
        marker: Ok(Marker::Hello(_)),
        len,
    } = scan(&nonce, &wire).what
    else {
        panic!()
    };
    let second = scan(&nonce, &wire[len..]);
    assert!(matches!(
        second,
        Scan {
            payload: 0,
            what: Found::Marker {
                marker: Ok(Marker::Switch),
                ..
            }
        }
    ));
}

#[test]
fn a_marker_that_cannot_be_read_is_dropped_whole() {
    let nonce = Nonce::from_bytes([0xC1; 16]);
    let mut wire = encoded(&Marker::Abort(Reason::Rule), &nonce);
    wire[17] = 77;
    wire.extend(b"data");
    let Found::Marker {
        marker: Err(error),
        len,
    } = scan(&nonce, &wire).what
    else {
        panic!()
    };
    assert_eq!((error, &wire[len..]), (WireError::Kind(77), &b"data"[..]));

    wire[18..20].copy_from_slice(&60_000u16.to_le_bytes());
    let Found::Marker {
        marker: Err(error),
        len,
    } = scan(&nonce, &wire).what
    else {
        panic!()
    };
    assert_eq!((error, len), (WireError::Length, MIN_MARKER));
}

#[test]
fn nothing_is_held_back_from_text() {
    let nonce = Nonce::random().unwrap();
    let text = "GET / HTTP/1.1\r\nHost: ünïcödé\r\n\r\n".as_bytes();
    for end in 0..text.len() {
        assert_eq!(scan(&nonce, &text[..end]).payload, end);
    }
}
