//! The first ring of a stream. The end that answers OPEN knows it before the peer has offered it.

use crate::fabric::remote::tests::qp::QueuePair;
use crate::fabric::remote::tests::record::{Builder, Record};
use crate::fabric::remote::tests::*;

#[test]
fn who_answers_an_open_need_not_wait_for_the_first_ring() {
    let (clock, tuning) = (Clock::default(), Tuning::default());
    let [a, b] = pair(Config::default(), &clock).map(|qp| end(qp, tuning));
    // `b` answers the OPEN of `a`: `b` knows both numbers, and `a` does not know the number of `b` yet.
    let (mut asks, answers) = (a.open(12).unwrap(), b.open(12).unwrap());
    b.pair(answers.vqpn, asks.vqpn, asks.ring);
    let mut producer = b.producer(asks.vqpn).unwrap();
    let all: Vec<u8> = (0..1u64 << asks.ring.log2()).map(|n| n as u8).collect();
    for half in all.chunks(all.len() / 2) {
        let spans = producer.spans(half.len()).unwrap();
        assert!(spans.len() >= half.len());
        // SAFETY: the half is readable, and the spans have room for it.
        unsafe { spans.copy_in(0, half.as_ptr(), half.len()) };
        b.notify(producer.commit(half.len()), asks.vqpn);
    }
    assert!(
        !b.lend(asks.vqpn, &mut producer, 14),
        "of a ring that is not on offer yet"
    );
    let settle = || {
        while a.progress().unwrap() | b.progress().unwrap() {
            clock.advance(1_000_000);
        }
    };
    settle();
    assert_eq!(
        asks.consumer.has_data(),
        Ok(false),
        "it is not told of what it cannot know"
    );
    a.pair(asks.vqpn, answers.vqpn, answers.ring);
    settle();
    let spans = asks.consumer.spans(all.len()).unwrap();
    let mut got = vec![0; all.len()];
    assert_eq!(spans.len(), got.len());
    // SAFETY: `got` is writable, and as long as the spans.
    unsafe { spans.copy_out(0, got.as_mut_ptr(), got.len()) };
    assert!(got == all);
}

#[test]
fn a_first_offer_of_another_ring_than_was_named_ends_the_link() {
    let [qp, peer] = pair(Config::default(), &Clock::default());
    let e = end(qp, Tuning::default());
    let opened = e.open(12).unwrap();
    e.pair(opened.vqpn, Vqpn(7), Region::new(1, 12).unwrap());
    let mut records = Builder::new(1000);
    records.push(&Record::Offer {
        theirs: 0,
        word: 1 << 40 | 12 << 32,
    });
    peer.send(records.finish(0)).unwrap();
    let _ = e.progress();
    assert!(e.fault().is_some());
}
