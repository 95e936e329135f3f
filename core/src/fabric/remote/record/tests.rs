//! Tests of the records: what is written reads back, and what a peer makes of one is refused.

use proptest::prelude::*;

use super::*;

fn all() -> Vec<Record<'static>> {
    vec![
        Record::Data {
            theirs: 1,
            tail: 2,
            payload: b"abc",
        },
        Record::Data {
            theirs: 9,
            tail: u64::MAX,
            payload: b"",
        },
        Record::Switch {
            theirs: 3,
            generation: 4,
            position: 5,
        },
        Record::End {
            theirs: 6,
            end: 1,
            tail: 7,
        },
        Record::Limited { theirs: 8, count: 9 },
        Record::Head { theirs: 10, head: 11 },
        Record::Offer { theirs: 12, word: 13 },
        Record::Flags { theirs: 14, flags: 15 },
        Record::Stop { theirs: 16 },
        Record::Chunk {
            index: 17,
            rkey: 18,
            base: 19,
        },
        Record::Message { bytes: b"message" },
        Record::Confirm { theirs: 20 },
        Record::Ack { theirs: 21, tail: 22 },
        Record::Tell { theirs: 23, word: 24 },
        Record::Advert {
            theirs: 25,
            serial: 26,
            position: 27,
            address: 28,
            length: 29,
            rkey: 30,
        },
        Record::Withdraw {
            theirs: 31,
            serial: 32,
            position: 33,
            is_final: true,
        },
        Record::Placed {
            theirs: 34,
            serial: 35,
            tail: 36,
        },
        Record::Source {
            theirs: 39,
            serial: 40,
            position: 41,
            address: 42,
            length: 43,
            rkey: 44,
        },
        Record::Taken {
            theirs: 45,
            serial: 46,
            tail: 47,
        },
        Record::Recall { theirs: 48, serial: 49 },
    ]
}

fn message() -> Vec<u8> {
    let mut builder = Builder::new(1024);
    assert!(all().iter().all(|r| builder.push(r)));
    builder.finish(77).to_vec()
}

#[test]
fn what_is_written_reads_back() {
    let bytes = message();
    let received = decode(&bytes).unwrap();
    assert_eq!(received.grant, 77);
    let read: Vec<_> = received.records.map(Result::unwrap).collect();
    assert_eq!(read, all());
}

#[test]
fn a_header_is_six_bytes_and_the_longest_record_is_a_chunk() {
    assert_eq!(HEADER_BYTES, 6);
    for record in all() {
        let mut builder = Builder::new(1024);
        builder.push(&record);
        let payload = match record {
            Record::Data { payload, .. } => payload.len(),
            Record::Message { bytes } => bytes.len(),
            _ => 0,
        };
        assert!(builder.len - HEADER_BYTES - payload <= LONGEST, "{record:?}");
    }
}

#[test]
fn a_record_without_room_is_not_added_in_part() {
    for size in HEADER_BYTES..200 {
        let mut builder = Builder::new(size);
        let kept: Vec<_> = all().into_iter().filter(|r| builder.push(r)).collect();
        let bytes = builder.finish(0).to_vec();
        let read: Vec<_> = decode(&bytes).unwrap().records.map(Result::unwrap).collect();
        assert_eq!(read, kept);
    }
}

#[test]
fn payload_that_cannot_be_had_is_not_added() {
    let mut builder = Builder::new(64);
    assert!(!builder.push_data(1, 4, 4, |_| false));
    assert!(builder.is_empty());
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(received) = decode(&bytes) {
            received.records.for_each(drop);
        }
        // Past the header, too.
        let n = bytes.len() as u16;
        let mut framed = vec![MAGIC, VERSION, 0, 0, n as u8, (n >> 8) as u8];
        framed.extend(&bytes);
        let read: Vec<_> = decode(&framed).unwrap().records.collect();
        prop_assert!(read.iter().rev().skip(1).all(Result::is_ok));
    }

    #[test]
    fn a_damaged_message_is_read_without_a_panic(at in any::<prop::sample::Index>(), to in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut bytes = message();
        let i = at.index(bytes.len());
        bytes[i] = to;
        bytes.truncate(cut.index(bytes.len() + 1));
        if let Ok(received) = decode(&bytes) {
            received.records.for_each(drop);
        }
    }
}
