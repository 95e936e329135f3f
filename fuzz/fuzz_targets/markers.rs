//! Markers inside TCP (P30–P36). However the bytes are divided, the reader gets the same data and the same markers, and
//! a decoded marker encodes to the same bytes.
#![no_main]

use libfuzzer_sys::arbitrary::Arbitrary;
use libfuzzer_sys::{arbitrary, fuzz_target};
use rdmasock_core::ids::Nonce;
use rdmasock_core::wire::marker::{Found, scan};
use rdmasock_core::wire::{MAX_MARKER, MIN_MARKER, Marker, VERSION};

#[derive(Arbitrary, Debug)]
enum Part<'a> {
    Bytes(&'a [u8]),
    /// The first bytes of the reader's nonce.
    Nonce(u8),
    /// The nonce, a header, and a body whose length may differ from the header's.
    Marker {
        kind: u8,
        length: Option<u16>,
        body: &'a [u8],
    },
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    nonce: [u8; 16],
    /// Whether the nonce contains its own beginning.
    repeats: bool,
    cuts: Vec<u8>,
    parts: Vec<Part<'a>>,
}

/// An event of a reader.
#[derive(Debug, PartialEq)]
enum Event {
    Data(Vec<u8>),
    Marker(Vec<u8>),
    Bad(String, usize),
}

fuzz_target!(|input: Input<'_>| {
    let mut nonce = input.nonce;
    if input.repeats {
        nonce = std::array::from_fn(|i| input.nonce[i % 3]);
    }
    let mut wire = Vec::new();
    for part in &input.parts {
        match part {
            Part::Bytes(bytes) => wire.extend_from_slice(bytes),
            Part::Nonce(n) => wire.extend_from_slice(&nonce[..usize::from(*n) % 17]),
            Part::Marker { kind, length, body } => {
                wire.extend_from_slice(&nonce);
                wire.extend_from_slice(&[VERSION, *kind]);
                let length = length.unwrap_or(body.len() as u16);
                wire.extend_from_slice(&length.to_le_bytes());
                wire.extend_from_slice(body);
            }
        }
    }
    let nonce = Nonce::from_bytes(nonce);
    let whole = read(&nonce, &wire, &[]);
    let cut = read(&nonce, &wire, &input.cuts);
    assert_eq!(whole, cut);
    let bytewise = read(&nonce, &wire, &[1]);
    assert_eq!(whole, bytewise);
});

/// Returns all events of a reader of `wire`, which arrives in pieces of the lengths `cuts`, repeated cyclically.
fn read(nonce: &Nonce, wire: &[u8], cuts: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    let (mut from, mut to) = (0, 0);
    let mut cuts = cuts.iter().cycle();
    loop {
        let more = cuts.next().map_or(wire.len(), |n| usize::from(*n).max(1));
        to = (to + more).min(wire.len());
        loop {
            let scan = scan(nonce, &wire[from..to]);
            if scan.payload > 0 {
                let data = &wire[from..from + scan.payload];
                match events.last_mut() {
                    Some(Event::Data(before)) => before.extend_from_slice(data),
                    _ => events.push(Event::Data(data.to_vec())),
                }
                from += scan.payload;
            }
            match scan.what {
                Found::Payload => {
                    assert_eq!(from, to);
                    break;
                }
                Found::PartialMarker { have } => {
                    assert!((1..MAX_MARKER).contains(&have));
                    assert_eq!(from + have, to);
                    break;
                }
                Found::Marker {
                    marker: Ok(marker),
                    len,
                } => {
                    assert!((MIN_MARKER..=MAX_MARKER).contains(&len));
                    let bytes = &wire[from..from + len];
                    let mut buf = [0; MAX_MARKER];
                    assert_eq!(marker.encode(nonce, &mut buf), Ok(bytes));
                    assert!(Marker::decode(&bytes[..len - 1]).is_err());
                    events.push(Event::Marker(bytes.to_vec()));
                    from += len;
                }
                Found::Marker {
                    marker: Err(error),
                    len,
                } => {
                    assert!((MIN_MARKER..=MAX_MARKER).contains(&len) && len <= to - from);
                    events.push(Event::Bad(error.to_string(), len));
                    from += len;
                }
            }
        }
        if to == wire.len() {
            return events;
        }
    }
}
