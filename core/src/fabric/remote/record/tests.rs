//! Tests of the records: a written record reads back, and malformed records are refused.

use proptest::prelude::*;

use crate::fabric::remote::record::*;

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
            memory: Memory {
                serial: 26,
                position: 27,
                address: 28,
                length: 29,
                rkey: 30,
            },
        },
        Record::Withdraw {
            theirs: 31,
            withdrawal: Withdrawal {
                serial: 32,
                position: 33,
                is_final: true,
            },
        },
        Record::Placed {
            theirs: 34,
            serial: 35,
            tail: 36,
        },
        Record::Source {
            theirs: 39,
            memory: Memory {
                serial: 40,
                position: 41,
                address: 42,
                length: 43,
                rkey: 44,
            },
        },
        Record::Taken {
            theirs: 45,
            serial: 46,
            tail: 47,
        },
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
fn a_header_is_four_bytes_and_the_longest_record_is_an_advert() {
    assert_eq!(HEADER_BYTES, 4);
    for record in all() {
        let mut builder = Builder::new(1024);
        builder.push(&record);
        let payload = match record {
            Record::Data { payload, .. } => payload.len(),
            Record::Message { bytes } => bytes.len(),
            _ => 0,
        };
        let bytes = builder.len - HEADER_BYTES - payload;
        match record {
            Record::Data { .. } => assert_eq!(bytes, DATA_BYTES),
            Record::Message { .. } => assert_eq!(bytes, MESSAGE_BYTES),
            Record::Advert { .. } | Record::Source { .. } => assert_eq!(bytes, LONGEST),
            _ => assert!(bytes < LONGEST, "{record:?}"),
        }
    }
}

/// Checks the bytes of each record against P50.
#[test]
fn records_are_the_bytes_of_the_protocol() {
    let le = |parts: &[(u64, usize)]| -> Vec<u8> {
        let bytes = parts
            .iter()
            .flat_map(|(value, n)| value.to_le_bytes().into_iter().take(*n));
        bytes.collect()
    };
    let want = [
        [le(&[(1, 1), (1, 4), (2, 8), (3, 2)]), b"abc".to_vec()].concat(),
        le(&[(1, 1), (9, 4), (u64::MAX, 8), (0, 2)]),
        le(&[(2, 1), (3, 4), (4, 4), (5, 8)]),
        le(&[(3, 1), (6, 4), (1, 1), (7, 8)]),
        le(&[(4, 1), (8, 4), (9, 4)]),
        le(&[(5, 1), (10, 4), (11, 8)]),
        le(&[(6, 1), (12, 4), (13, 8)]),
        le(&[(7, 1), (14, 4), (15, 4)]),
        le(&[(8, 1), (16, 4)]),
        le(&[(9, 1), (17, 4), (18, 4), (19, 8)]),
        [le(&[(10, 1), (7, 2)]), b"message".to_vec()].concat(),
        le(&[(11, 1), (20, 4)]),
        le(&[(12, 1), (21, 4), (22, 8)]),
        le(&[(13, 1), (23, 4), (24, 4)]),
        le(&[(14, 1), (25, 4), (26, 4), (27, 8), (28, 8), (29, 4), (30, 4)]),
        le(&[(15, 1), (31, 4), (32, 4), (33, 8), (1, 1)]),
        le(&[(16, 1), (34, 4), (35, 4), (36, 8)]),
        le(&[(17, 1), (39, 4), (40, 4), (41, 8), (42, 8), (43, 4), (44, 4)]),
        le(&[(18, 1), (45, 4), (46, 4), (47, 8)]),
    ];
    for (record, want) in all().iter().zip(&want) {
        let mut builder = Builder::new(1024);
        assert!(builder.push(record));
        assert_eq!(builder.finish(0)[HEADER_BYTES..], want[..], "{record:?}");
    }
    assert_eq!(all().len(), want.len());
    let mut builder = Builder::new(1024);
    assert!(builder.push_data(1, 2, 3, |to| {
        to.copy_from_slice(b"abc");
        true
    }));
    assert_eq!(builder.finish(0)[HEADER_BYTES..], want[0][..]);
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
        // Reads the same bytes behind a valid header.
        let n = bytes.len() as u16;
        let mut framed = vec![0, 0, n as u8, (n >> 8) as u8];
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
