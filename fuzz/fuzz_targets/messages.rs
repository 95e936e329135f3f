//! Messages of the side channel (P10), and introductions on new queue pairs. Any bytes are decoded or refused, and a
//! decoded message encodes to the same bytes.
#![no_main]

use libfuzzer_sys::arbitrary::Arbitrary;
use libfuzzer_sys::{arbitrary, fuzz_target};
use rdmasock_core::wire::{INTRODUCTION, Introduction, MAX_MESSAGE, Message, VERSION};

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Bytes(&'a [u8]),
    /// A body in a valid frame, as most random frames are refused.
    Framed(u8, &'a [u8]),
}

fuzz_target!(|input: Input<'_>| {
    match input {
        Input::Bytes(bytes) => {
            message(bytes);
            introduction(bytes);
        }
        Input::Framed(kind, body) => {
            // Each kind has one valid length, or few.
            for n in 0..=body.len().min(MAX_MESSAGE) {
                let length = (n as u16).to_le_bytes();
                message(&[b"rsok", &[VERSION, kind][..], &length, &body[..n]].concat());
            }
            introduction(&[b"rsok", &[VERSION][..], body].concat());
        }
    }
});

fn message(bytes: &[u8]) {
    let Ok(message) = Message::decode(bytes) else {
        return;
    };
    let mut buf = [0; MAX_MESSAGE];
    let again = message.encode(&mut buf).expect("what is decoded fits");
    match message {
        // Without its flag the position has no meaning.
        Message::DemoteRequest { resend_from: None, .. } => assert_eq!(again.len(), bytes.len()),
        // Several encodings of an address are accepted, but one is written.
        Message::Ask { .. } => {
            let other = Message::decode(again).expect("what is encoded is decoded");
            assert_eq!(format!("{message:?}"), format!("{other:?}"));
        }
        _ => assert_eq!(again, bytes),
    }
    assert!(message.fds() <= 2);
}

fn introduction(bytes: &[u8]) {
    match Introduction::decode(bytes) {
        Ok(introduction) => {
            let again = introduction.encode();
            // Reserved bytes are not compared.
            assert_eq!(again[8..44], bytes[8..44]);
        }
        Err(_) => assert!(bytes.len() < INTRODUCTION || bytes[..5] != *b"rsok\x02"),
    }
}
