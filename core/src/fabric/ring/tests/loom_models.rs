//! Loom models: every interleaving, with at most two or three preemptions, of small exchanges over rings of 4 and 8
//! bytes. A lost wake-up shows as a deadlock, an unordered access to payload as a failure of the modelled byte.

use loom::sync::Arc;
use loom::thread;

use crate::fabric::ring::tests::*;
use crate::sync::loom_models::Doorbell;

fn ring(bell: &Doorbell, wake: Wake) {
    if !wake.is_none() {
        bell.ring();
    }
}

struct Model {
    memory: Memory,
    for_producer: Doorbell,
    for_consumer: Doorbell,
}

fn check(preemptions: usize, rings: &'static [u8], total: u8, piece: usize) {
    check_with_reserve(preemptions, rings, None, total, piece);
}

/// As `check`, with a ring of `1 << log2` bytes in reserve, and a bound for the producer: `reserve` is (`log2`, bound).
fn check_with_reserve(preemptions: usize, rings: &'static [u8], reserve: Option<(u8, u64)>, total: u8, piece: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let model = Arc::new(Model {
            memory: Memory::new(32),
            for_producer: Doorbell::new(),
            for_consumer: Doorbell::new(),
        });
        let (mut p, mut c) = (model.memory.producer(), model.memory.consumer());
        if let Some((log2, bound)) = reserve {
            c.offer_reserve(Region::new(4, log2).unwrap()).unwrap();
            p.set_bound(bound);
        }
        let producer = {
            let model = model.clone();
            thread::spawn(move || produce(&model, &mut p, total, piece))
        };
        consume(&model, &mut c, rings, total, piece);
        producer.join().unwrap();
    });
}

fn produce(model: &Model, p: &mut Producer, total: u8, piece: usize) {
    let data: Vec<u8> = (1..=total).collect();
    let mut sent = 0;
    while sent < data.len() {
        let end = data.len().min(sent + piece);
        let (n, wake) = send(p, &data[sent..end]).unwrap();
        ring(&model.for_consumer, wake);
        sent += n;
        if n == 0 && !p.make_room(|_| true).unwrap() && !p.arm_space(1).unwrap() {
            model.for_producer.wait();
        }
    }
    ring(&model.for_consumer, p.end(EndMark::Fin).unwrap());
}

/// Receives `total` bytes. Offers the rings (log2 of bytes) one after the other, each as soon as it may be offered.
fn consume(model: &Model, c: &mut Consumer, rings: &[u8], total: u8, piece: usize) {
    let mut offers = rings.iter().enumerate();
    let mut next = offers.next();
    let mut received = Vec::new();
    loop {
        if let Some((i, &log2)) = next
            && !c.is_switching()
        {
            // The rings do not overlap: they begin 8 bytes apart.
            let region = Region::new(i as u32 * 2, log2).unwrap();
            ring(&model.for_producer, c.offer(region).unwrap());
            next = offers.next();
        }
        let mut buf = [0; 8];
        let (n, wake) = recv(c, &mut buf[..piece]).unwrap();
        ring(&model.for_producer, wake);
        received.extend_from_slice(&buf[..n]);
        while c.take_retired().unwrap().is_some() {}
        if n == 0 {
            if c.end().unwrap() == Some(EndMark::Fin) {
                break;
            }
            let armed = c.arm_data(1).unwrap();
            ring(&model.for_producer, armed.wake);
            if !armed.ready {
                model.for_consumer.wait();
            }
        }
    }
    let expected: Vec<u8> = (1..=total).collect();
    assert_eq!(received, expected);
}

#[test]
fn loom_ring_wraps_and_nobody_sleeps_on() {
    check(3, &[2], 6, 3);
}

#[test]
fn loom_ring_that_holds_back_its_head_wakes_the_producer() {
    check(3, &[3], 11, 5);
}

#[test]
fn loom_ring_grows_in_mid_stream() {
    check(3, &[2, 3], 7, 3);
}

#[test]
fn loom_ring_shrinks_in_mid_stream() {
    check(3, &[3, 2], 7, 4);
}

#[test]
fn loom_ring_moves_on_to_the_reserve() {
    check_with_reserve(3, &[2], Some((3, 8)), 7, 4);
}

#[test]
fn loom_ring_moves_on_to_a_part_of_the_reserve_beside_an_offer() {
    check_with_reserve(2, &[2, 3], Some((4, 6)), 9, 5);
}
