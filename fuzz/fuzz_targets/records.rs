//! Messages on the queue pair of a link between hosts (P50). Any bytes are decoded or refused, and a decoded message is
//! written as the same bytes.
#![no_main]

use libfuzzer_sys::arbitrary::Arbitrary;
use libfuzzer_sys::{arbitrary, fuzz_target};
use rdmasock_core::fabric::remote::record::{Builder, HEADER_BYTES, decode};

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Bytes(&'a [u8]),
    /// Records in a valid frame.
    Framed(u16, &'a [u8]),
}

fuzz_target!(|input: Input<'_>| {
    match input {
        Input::Bytes(bytes) => message(bytes),
        Input::Framed(grant, records) => {
            let length = (records.len() as u16).to_le_bytes();
            message(&[&grant.to_le_bytes()[..], &length, records].concat());
        }
    }
});

fn message(bytes: &[u8]) {
    let Ok(received) = decode(bytes) else {
        return;
    };
    let mut builder = Builder::new(bytes.len());
    let mut whole = true;
    for record in received.records {
        match record {
            Ok(record) => assert!(whole && builder.push(&record), "{record:?}"),
            Err(_) => whole = false,
        }
    }
    if whole {
        assert_eq!(builder.finish(received.grant), bytes);
    } else {
        // The records before a bad one were decoded.
        let read = builder.finish(received.grant);
        assert_eq!(read[HEADER_BYTES..], bytes[HEADER_BYTES..read.len()]);
    }
}
