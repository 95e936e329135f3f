//! A peer that sends any bytes: the end goes on, or ends the link with a reason. In both cases the words that its
//! cursors read are valid.

use crate::fabric::remote::tests::mem::pair_beside;
use crate::fabric::remote::tests::qp::{Completed, Key, QueuePair};
use crate::fabric::remote::tests::record::{Builder, Memory, Record, Withdrawal};
use crate::fabric::remote::tests::*;

/// An action of the peer, or of the local program.
#[derive(Clone, Debug)]
enum Sent {
    Bytes(Vec<u8>),
    Records(Vec<Fields>, u16, Option<(prop::sample::Index, u8)>),
    /// Records on the bulk queue pair.
    Bulk(Vec<Fields>, Option<(prop::sample::Index, u8)>),
    /// No message: the local program waits with a buffer.
    Wait,
    /// No message: the local program lends memory.
    Lend,
}

/// A kind, a stream, two values and a payload.
type Fields = (u8, u32, u64, u32, Vec<u8>);

fn sent() -> impl Strategy<Value = Sent> {
    let small = prop_oneof![0u64..5, Just(4096u64), 0u64..9000, any::<u64>()];
    // A quarter of the values are the word of an offer.
    let value = prop_oneof![
        3 => small,
        1 => (0u64..3, 11u64..15, 0u64..300).prop_map(|(g, log2, page)| g << 40 | log2 << 32 | page)
    ];
    let fields = (
        0u8..18,
        prop_oneof![4 => 0u32..3, 1 => any::<u32>()],
        value,
        prop_oneof![3 => 0u32..4, 1 => any::<u32>()],
        proptest::collection::vec(any::<u8>(), 0..40),
    );
    let mutation = || proptest::option::weighted(0.1, (any::<prop::sample::Index>(), any::<u8>()));
    let placed = (Just(15u8), 0u32..3, 0u64..9000, 0u32..4, Just(Vec::new()));
    prop_oneof![
        2 => (proptest::collection::vec(placed, 0..3), mutation()).prop_map(|(f, m)| Sent::Bulk(f, m)),
        2 => Just(Sent::Wait),
        2 => Just(Sent::Lend),
        1 => proptest::collection::vec(any::<u8>(), 0..80).prop_map(Sent::Bytes),
        12 => (
            proptest::collection::vec(fields, 1..4),
            prop_oneof![8 => Just(0u16), 1 => any::<u16>()],
            mutation(),
        ).prop_map(|(f, g, m)| Sent::Records(f, g, m)),
    ]
}

fn record<'a>((kind, theirs, position, word, payload): &'a Fields) -> Record<'a> {
    let (theirs, position, word) = (*theirs, *position, *word);
    match kind {
        0 => Record::Data {
            theirs,
            tail: position,
            payload,
        },
        1 => Record::Switch {
            theirs,
            generation: word,
            position,
        },
        2 => Record::End {
            theirs,
            end: word as u8,
            tail: position,
        },
        3 => Record::Limited { theirs, count: word },
        4 => Record::Head { theirs, head: position },
        5 => Record::Offer { theirs, word: position },
        6 => Record::Flags { theirs, flags: word },
        7 => Record::Stop { theirs },
        8 => Record::Chunk {
            index: word,
            rkey: theirs,
            base: position,
        },
        9 => Record::Message { bytes: payload },
        10 => Record::Confirm { theirs },
        11 => Record::Ack { theirs, tail: position },
        12 => Record::Tell { theirs, word },
        13 => Record::Advert {
            theirs,
            memory: Memory {
                serial: word,
                position,
                address: position.rotate_left(word),
                length: word << 10,
                rkey: theirs,
            },
        },
        14 => Record::Withdraw {
            theirs,
            withdrawal: Withdrawal {
                serial: word,
                position,
                is_final: payload.len() % 2 == 1,
            },
        },
        16 => Record::Source {
            theirs,
            memory: Memory {
                serial: word,
                position,
                address: position.rotate_left(word),
                length: word << 9,
                rkey: theirs,
            },
        },
        17 => Record::Taken {
            theirs,
            serial: word,
            tail: position,
        },
        _ => Record::Placed {
            theirs,
            serial: word,
            tail: position,
        },
    }
}

fn encoded(fields: &[Fields], grant: u16, mutation: Option<(prop::sample::Index, u8)>) -> Vec<u8> {
    let mut builder = Builder::new(1000);
    for f in fields {
        builder.push(&record(f));
    }
    let mut bytes = builder.finish(grant).to_vec();
    if let Some((at, to)) = mutation {
        let at = at.index(bytes.len());
        bytes[at] = to;
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn whatever_the_peer_sends_the_cursors_stay_sound(
        immediate in any::<bool>(),
        all in proptest::collection::vec(sent(), 1..30),
    ) {
        let clock = Clock::default();
        let mut config = Config::default();
        config.limits.immediate = immediate;
        let [qp, peer] = pair(config, &clock);
        let tuning = Tuning { direct_min: 100, ..Tuning::default() };
        let e = end(qp, tuning);
        let [bulk, bulk_peer] = pair_beside(config, &clock, Some(e.qp()));
        prop_assert!(e.attach_bulk(bulk).is_none());
        // The first stream is paired, the second is not.
        let mut opened = [e.open(12).unwrap(), e.open(12).unwrap()];
        e.pair(opened[0].vqpn, Vqpn(7), first_ring());
        let mut producer = e.producer(Vqpn(7)).unwrap();
        let lent = [0u8; 100];
        // The peer switches to the ring that this end has offered, and offers a ring of its own. So both may get bytes.
        let mut ready = Builder::new(1000);
        ready.push(&Record::Switch { theirs: 0, generation: 1, position: 0 });
        ready.push(&Record::Offer { theirs: 0, word: 1 << 40 | 12 << 32 });
        peer.send(ready.finish(0)).unwrap();
        prop_assert_eq!(e.progress(), Ok(true));
        for message in &all {
            let posted = match message {
                Sent::Bytes(bytes) => peer.send(bytes),
                Sent::Records(fields, grant, mutation) => peer.send(&encoded(fields, *grant, *mutation)),
                Sent::Bulk(fields, mutation) => {
                    // The bulk queue pair may have ended, and the link goes on.
                    let _ = bulk_peer.send(&encoded(fields, 0, *mutation));
                    Ok(())
                }
                Sent::Wait => {
                    let buffer = Buffer {
                        address: 1 << 20,
                        length: 4096,
                        key: Key { local: 4, remote: 5 },
                    };
                    e.advertise(opened[0].vqpn, buffer);
                    Ok(())
                }
                Sent::Lend => {
                    let n = producer.spans(100).unwrap().len().min(100);
                    let position = producer.position();
                    let address = lent.as_ptr().expose_provenance();
                    if e.offer_source(Vqpn(7), position, address, n as u64, 9) {
                        e.notify(producer.commit(n), Vqpn(7));
                    }
                    Ok(())
                }
            };
            let _ = bulk_peer.poll(&mut |_: Completed<'_>| {});
            prop_assert!(posted.is_ok() || e.fault().is_some());
            let _ = peer.poll(&mut |_: Completed<'_>| {});
            let result = e.progress();
            for o in &mut opened {
                let n = o.consumer.available();
                prop_assert!(n.is_ok(), "{:?}", n);
                let n = o.consumer.spans(10).unwrap().len();
                e.notify(o.consumer.consume(n / 2), Vqpn(7));
                prop_assert!(o.consumer.end().is_ok());
            }
            prop_assert!(producer.has_space().is_ok());
            let n = producer.spans(100).map(|s| s.len().min(50));
            prop_assert!(n.is_ok(), "{:?}", n);
            e.notify(producer.commit(n.unwrap()), Vqpn(7));
            while e.take_message().is_some() {}
            match (result, e.fault()) {
                (Ok(_), None) => {}
                (_, Some(Fault::Violation(_))) => break,
                // The peer made up a key, and the device refused it.
                (_, Some(Fault::Down(_))) => {
                    prop_assert!(peer.why().contains("key"), "{}", peer.why());
                    break;
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}

/// Returns the fault that these records cause.
fn verdict(records: &[Record<'_>]) -> Option<Fault> {
    let [qp, peer] = pair(Config::default(), &Clock::default());
    let e = end(qp, Tuning::default());
    let opened = e.open(12).unwrap();
    e.pair(opened.vqpn, Vqpn(7), first_ring());
    let mut builder = Builder::new(1000);
    assert!(records.iter().all(|r| builder.push(r)));
    peer.send(builder.finish(0)).unwrap();
    let _ = e.progress();
    e.fault()
}

#[test]
fn each_breach_has_its_name() {
    let switch = Record::Switch {
        theirs: 0,
        generation: 1,
        position: 0,
    };
    let data = |tail| Record::Data {
        theirs: 0,
        tail,
        payload: b"ab",
    };
    let end_at = |tail, end| Record::End { theirs: 0, end, tail };
    let offer = |word| Record::Offer { theirs: 0, word };
    let cases: &[(&[Record<'_>], Option<Breach>)] = &[
        (&[switch, data(2), data(4096), end_at(4096, 1)], None),
        (&[data(2)], Some(Breach::Tail)),
        (
            &[Record::Placed {
                theirs: 0,
                serial: 1,
                tail: 1,
            }],
            Some(Breach::Advert),
        ),
        (&[switch, data(1)], Some(Breach::Tail)),
        (&[switch, data(4), data(4)], Some(Breach::Tail)),
        (&[switch, data(4097)], Some(Breach::Tail)),
        (&[switch, switch], Some(Breach::Switch)),
        (&[switch, end_at(1, 1)], Some(Breach::End)),
        (&[switch, end_at(0, 3)], Some(Breach::End)),
        (&[switch, end_at(0, 1), data(2)], Some(Breach::End)),
        (&[Record::Head { theirs: 0, head: 1 }], Some(Breach::Head)),
        (&[offer(1 << 40 | 12 << 32)], None),
        (&[offer(2 << 40 | 12 << 32)], Some(Breach::Offer)),
        (&[offer(1 << 40 | 21 << 32)], Some(Breach::Offer)),
        (&[offer(1 << 40 | 12 << 32 | 256)], Some(Breach::Offer)),
        // This ring lies in the part of the mirror that has this end's buffers.
        (&[offer(1 << 40 | 12 << 32 | 300)], Some(Breach::Offer)),
        (&[Record::Stop { theirs: 1 }], Some(Breach::Stream)),
        (&[Record::Ack { theirs: 0, tail: 1 }], Some(Breach::Ack)),
        (&[Record::Message { bytes: b"?" }], Some(Breach::Message)),
        (
            &[Record::Chunk {
                index: 1,
                rkey: 0,
                base: 0,
            }],
            Some(Breach::Chunk),
        ),
    ];
    for (records, want) in cases {
        assert_eq!(verdict(records), want.map(Fault::Violation), "{records:?}");
    }
}

#[test]
fn answers_that_the_peer_does_not_take_are_not_kept_for_ever() {
    let clock = Clock::default();
    let [qp, peer] = pair(Config::default(), &clock);
    let e = end(qp, Tuning::default());
    let [bulk, bulk_peer] = pair_beside(Config::default(), &clock, Some(e.qp()));
    assert!(e.attach_bulk(bulk).is_none());
    let opened = e.open(12).unwrap();
    e.pair(opened.vqpn, Vqpn(7), first_ring());
    bulk_peer.mute(true);
    for serial in 0..5000 {
        let mut builder = Builder::new(1000);
        builder.push(&Record::Withdraw {
            theirs: opened.vqpn.0,
            withdrawal: Withdrawal {
                serial,
                position: 0,
                is_final: false,
            },
        });
        peer.send(builder.finish(0)).unwrap();
        assert_eq!(e.progress(), Ok(true));
        let _ = peer.poll(&mut |_: Completed<'_>| {});
    }
    assert_eq!((e.counts().lost, e.has_bulk(), e.fault()), (1, false, None));
}
