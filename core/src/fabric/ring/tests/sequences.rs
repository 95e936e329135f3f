//! Tests that the bytes received are the bytes sent, over sequences of operations and between threads.

use std::sync::{Arc, Condvar, Mutex};

use proptest::prelude::*;

use crate::fabric::arena::Arena;
use crate::fabric::ring::tests::*;

fn pattern(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

#[test]
fn a_zero_block_is_a_direction_without_a_ring() {
    let m = Memory::new(1 << 14);
    let (mut p, mut c) = (m.producer(), m.consumer());
    assert_eq!(send(&mut p, b"x"), Ok((0, Wake::NONE)));
    assert_eq!(p.arm_space(4), Ok(false));
    assert_eq!(
        c.arm_data(8),
        Ok(Armed {
            ready: false,
            wake: Wake::NONE
        })
    );
    // The producer waits for the first offer.
    assert_eq!(c.offer(Region::new(0, 12).unwrap()), Ok(Wake(4)));
    assert_eq!(p.has_space(), Ok(true));
    assert_eq!(send(&mut p, b"hello"), Ok((5, Wake(8))));
    assert_eq!(send(&mut p, b"!"), Ok((1, Wake::NONE)));
    let mut buf = [0; 16];
    assert_eq!(recv(&mut c, &mut buf), Ok((6, Wake::NONE)));
    assert_eq!(&buf[..6], b"hello!");
    assert_eq!(c.take_retired(), Ok(None));
    assert_eq!(c.into_regions()[0], Region::new(0, 12));
}

#[test]
fn a_full_ring_wakes_the_producer_after_a_quarter() {
    let m = Memory::new(1 << 14);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    assert_eq!(send(&mut p, &[1; 5000]).unwrap().0, 4096);
    assert!(c.producer_limited() && c.heed_limit() && !c.producer_limited());
    assert_eq!(p.arm_space(1), Ok(false));
    let mut buf = [0; 1023];
    assert_eq!(recv(&mut c, &mut buf), Ok((1023, Wake::NONE)));
    assert_eq!(p.used(), Ok(4096));
    assert_eq!(recv(&mut c, &mut buf[..1]), Ok((1, Wake(1))));
    assert_eq!(p.free(), Ok(1024));
    assert_eq!(p.has_space(), Ok(true));
    // Arming for data publishes the exact head.
    assert_eq!(recv(&mut c, &mut buf[..3]), Ok((3, Wake::NONE)));
    assert!(c.arm_data(1).unwrap().ready);
    assert_eq!(p.used(), Ok(4096 - 1027));
    c.disarm_data(1);
    assert_eq!(send(&mut p, b"x"), Ok((1, Wake::NONE)));
}

#[test]
fn the_end_comes_after_the_last_byte() {
    let m = Memory::new(1 << 12);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    assert_eq!(send(&mut p, b"last"), Ok((4, Wake::NONE)));
    assert_eq!(c.end(), Ok(None));
    assert!(!c.arm_data(2).is_ok_and(|a| !a.ready));
    assert_eq!(p.end(EndMark::Demote), Ok(Wake(2)));
    assert_eq!(p.end(EndMark::Fin), Ok(Wake::NONE));
    assert_eq!(send(&mut p, b"more"), Ok((0, Wake::NONE)));
    assert_eq!(c.end(), Ok(None));
    let mut buf = [0; 8];
    assert_eq!(recv(&mut c, &mut buf).unwrap().0, 4);
    assert_eq!(c.end(), Ok(Some(EndMark::Demote)));
    assert!(c.arm_data(2).unwrap().ready);
}

#[test]
fn flags_wake_a_producer_that_waits_for_space() {
    let m = Memory::new(1 << 12);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    assert_eq!(send(&mut p, &[0; 4096]).unwrap().0, 4096);
    assert_eq!(p.arm_space(5), Ok(false));
    assert_eq!(c.set_flags(RxFlags::RX_CLOSED), Wake(5));
    assert_eq!(p.has_space(), Ok(true));
    assert_eq!(p.consumer_flags(), RxFlags::RX_CLOSED);
    assert_eq!(p.has_space(), Ok(false));
}

#[test]
fn peeking_crosses_a_switch() {
    let m = Memory::new(1 << 14);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    assert_eq!(send(&mut p, &pattern(0, 100)).unwrap().0, 100);
    assert_eq!(c.available(), Ok(100));
    let _ = c.offer(Region::new(2, 13).unwrap()).unwrap();
    assert_eq!(c.offer(Region::new(1, 12).unwrap()), Err(OfferError::Pending));
    // The commit notices the offer, so the next send goes into the new ring.
    assert_eq!(send(&mut p, &pattern(100, 10)).unwrap().0, 10);
    assert_eq!(send(&mut p, &pattern(110, 8000)).unwrap().0, 8000);
    assert_eq!(c.available(), Ok(8110));
    let mut all = vec![0; 8110];
    let mut at = 0;
    loop {
        let spans = c.peek(at, 9000).unwrap();
        // SAFETY: the rest of `all` is writable.
        let n = unsafe { spans.copy_out(0, all[at..].as_mut_ptr(), all.len() - at) };
        if n == 0 {
            break;
        }
        at += n;
    }
    assert_eq!(all, pattern(0, 8110));
    let mut buf = vec![0; 110];
    assert_eq!(recv(&mut c, &mut buf).unwrap().0, 110);
    assert_eq!(c.take_retired(), Ok(Region::new(0, 12)));
    assert_eq!(recv(&mut c, &mut all).unwrap().0, 8000);
    assert_eq!(&all[..8000], pattern(110, 8000));
}

#[test]
fn an_idle_direction_shrinks() {
    let m = Memory::new(1 << 16);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 15).unwrap()).unwrap();
    assert_eq!(p.adopt(), Ok(true));
    assert_eq!(c.take_retired(), Ok(None));
    let _ = c.offer(Region::new(8, 12).unwrap()).unwrap();
    assert_eq!(p.adopt(), Ok(true));
    assert_eq!(p.adopt(), Ok(false));
    assert_eq!(c.take_retired(), Ok(Region::new(0, 15)));
    assert!(!c.is_switching());
    assert_eq!(send(&mut p, &pattern(0, 9000)).unwrap().0, 4096);
}

#[test]
fn every_small_length_and_offset_is_copied() {
    let m = Memory::new(1 << 12);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    let mut at = 0;
    for round in 0..40usize {
        for len in 0..=40usize {
            let data = pattern(at, len);
            assert_eq!(send(&mut p, &data).unwrap().0, len);
            at += len as u64;
            let mut buf = vec![0; len + round % 3];
            assert_eq!(recv(&mut c, &mut buf).unwrap().0, len);
            assert_eq!(buf[..len], data);
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Send(usize),
    Recv(usize),
    Offer(u8),
    Adopt,
    Retire,
    Reserve(u8),
    TakeReserve,
    Bound(u64),
    ArmData,
    ArmSpace,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => prop_oneof![0usize..40, 0usize..9000].prop_map(Op::Send),
        4 => prop_oneof![0usize..40, 0usize..9000].prop_map(Op::Recv),
        1 => (12u8..15).prop_map(Op::Offer),
        1 => Just(Op::Adopt),
        2 => Just(Op::Retire),
        1 => (13u8..16).prop_map(Op::Reserve),
        2 => Just(Op::TakeReserve),
        1 => prop_oneof![0u64..10, 0u64..40_000].prop_map(Op::Bound),
        1 => Just(Op::ArmData),
        1 => Just(Op::ArmSpace),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, ..ProptestConfig::default() })]
    #[test]
    fn what_arrives_is_what_was_sent(ops in proptest::collection::vec(op(), 1..if cfg!(miri) { 40 } else { 200 })) {
        let m = Memory::new(1 << 17);
        let mut arena = Arena::new(1 << 17);
        let (mut p, mut c) = (m.producer(), m.consumer());
        let _ = c.offer(arena.alloc(12).unwrap()).unwrap();
        let (mut sent, mut received) = (0u64, 0u64);
        // Whether each side sleeps: its word is set, and its check afterwards has found nothing.
        let (mut data_asleep, mut space_asleep) = (false, false);
        for op in ops {
            let (mut to_consumer, mut to_producer) = (Wake::NONE, Wake::NONE);
            match op {
                Op::Send(n) => {
                    let (done, wake) = send(&mut p, &pattern(sent, n))?;
                    sent += done as u64;
                    to_consumer = wake;
                    prop_assert!(done == n || p.free()? == 0 || p.could_have_room()?);
                }
                Op::Recv(n) => {
                    let mut buf = vec![0; n];
                    let (done, wake) = recv(&mut c, &mut buf)?;
                    to_producer = wake;
                    prop_assert_eq!(done as u64, (sent - received).min(n as u64));
                    prop_assert_eq!(&buf[..done], pattern(received, done));
                    received += done as u64;
                }
                Op::Offer(log2) => if !c.is_switching() && let Some(r) = arena.alloc(log2) {
                    to_producer = c.offer(r).unwrap();
                },
                Op::Adopt => { p.adopt()?; }
                Op::Reserve(log2) => if let Some(r) = arena.alloc(log2)
                    && c.offer_reserve(r).is_err()
                {
                    arena.free(r);
                },
                // A producer that has adopted the reserve does not sleep.
                Op::TakeReserve => space_asleep &= !p.make_room(|_| true)?,
                Op::Bound(bytes) => p.set_bound(bytes),
                Op::Retire => if let Some(r) = c.take_retired()? { arena.free(r); },
                Op::ArmData => {
                    let armed = c.arm_data(1)?;
                    prop_assert_eq!(armed.ready, sent != received);
                    data_asleep = !armed.ready;
                    to_producer = armed.wake;
                }
                Op::ArmSpace => space_asleep = !p.arm_space(1)?,
            }
            data_asleep &= to_consumer.is_none();
            space_asleep &= to_producer.is_none();
            prop_assert!(!(data_asleep && sent != received), "the consumer sleeps on data");
            prop_assert!(!(data_asleep && space_asleep), "both sleep");
            prop_assert!(!(space_asleep && sent == received), "the producer sleeps, the ring is empty");
        }
        for r in c.into_regions().into_iter().flatten() {
            arena.free(r);
        }
        prop_assert_eq!(arena.bytes_in_use(), 0);
    }
}

/// A counter of wake-ups, on which a thread sleeps. A wait resets the counter to 0.
#[derive(Default)]
struct Bell(Mutex<u32>, Condvar);

impl Bell {
    fn ring(&self, wake: Wake) {
        if !wake.is_none() {
            *self.0.lock().unwrap() += 1;
            self.1.notify_one();
        }
    }
    fn wait(&self) {
        let mut n = self.0.lock().unwrap();
        while *n == 0 {
            n = self.1.wait(n).unwrap();
        }
        *n = 0;
    }
}

#[test]
fn two_threads_exchange_while_rings_change() {
    let total: u64 = if cfg!(miri) { 30_000 } else { 20_000_000 };
    let m = Arc::new(Memory::new(1 << 17));
    let bells = Arc::new((Bell::default(), Bell::default()));
    let (mut p, mut c) = (m.producer(), m.consumer());
    let sender = {
        let (_m, bells) = (m.clone(), bells.clone());
        std::thread::spawn(move || {
            let (mut sent, mut step) = (0u64, 1usize);
            while sent < total {
                step = (step * 7 + 3) % 3001;
                let n = step.min((total - sent) as usize);
                let (done, wake) = send(&mut p, &pattern(sent, n)).unwrap();
                bells.1.ring(wake);
                sent += done as u64;
                if done < n && !p.arm_space(1).unwrap() {
                    bells.0.wait();
                }
            }
            bells.1.ring(p.end(EndMark::Fin).unwrap());
        })
    };
    let mut arena = Arena::new(1 << 17);
    bells.0.ring(c.offer(arena.alloc(12).unwrap()).unwrap());
    let (mut received, mut step, mut buf) = (0u64, 5usize, vec![0; 4000]);
    loop {
        step = (step * 5 + 1) % 4000;
        let (done, wake) = recv(&mut c, &mut buf[..step]).unwrap();
        bells.0.ring(wake);
        assert_eq!(&buf[..done], pattern(received, done));
        received += done as u64;
        if let Some(r) = c.take_retired().unwrap() {
            arena.free(r);
        }
        if !c.is_switching() && c.heed_limit() {
            let log2 = 12 + (step % 4) as u8;
            bells.0.ring(c.offer(arena.alloc(log2).unwrap()).unwrap());
        }
        if done == 0 && step > 0 {
            if c.end().unwrap() == Some(EndMark::Fin) {
                break;
            }
            let armed = c.arm_data(1).unwrap();
            bells.0.ring(armed.wake);
            if !armed.ready {
                bells.1.wait();
            }
        }
    }
    assert_eq!(received, total);
    sender.join().unwrap();
}

#[test]
fn a_consumer_that_is_frozen_has_what_came_before_and_the_producer_the_rest() {
    for (limit, reached) in [(0, 4), (9, 9), (u64::MAX, 4096 + 6)] {
        let m = Memory::new(1 << 15);
        let (mut p, mut c) = (m.producer(), m.consumer());
        let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
        let sent = pattern(0, 4096 + 6);
        assert_eq!(send(&mut p, &sent[..4096]).unwrap().0, 4096);
        let mut buf = [0; 8192];
        assert_eq!(recv(&mut c, &mut buf[..4]).unwrap().0, 4);
        let _ = c.offer(Region::new(2, 13).unwrap()).unwrap();
        assert_eq!(send(&mut p, &sent[4096..]).unwrap().0, 6);

        assert_eq!(c.freeze(limit), Ok(reached));
        assert_eq!(c.freeze(u64::MAX), Ok(reached), "once");
        let _ = send(&mut p, b"too late").unwrap();
        let (n, _) = recv(&mut c, &mut buf[4..]).unwrap();
        assert_eq!((4 + n as u64, c.has_data()), (reached, Ok(false)));
        assert_eq!(c.end(), Ok(None));
        let mut all = buf[..reached as usize].to_vec();
        all.extend(p.rest(reached).unwrap());
        assert_eq!(all, [&sent[..], b"too late"].concat());
        assert!(p.rest(p.position() + 1).is_err(), "never sent");
        let _ = c.publish();
        assert!(p.rest(c.position() - 1).is_err(), "no longer held");
        assert_eq!(p.end(EndMark::Fin), Err(Stopped), "not confirmed from now on");
    }
}

#[test]
fn a_consumer_that_is_frozen_behind_the_end_mark_has_everything() {
    let m = Memory::new(1 << 14);
    let (mut p, mut c) = (m.producer(), m.consumer());
    let _ = c.offer(Region::new(0, 12).unwrap()).unwrap();
    assert_eq!(send(&mut p, b"all").unwrap().0, 3);
    let _ = p.end(EndMark::Fin).unwrap();
    assert_eq!(c.freeze(0), Ok(3));
    let mut buf = [0; 8];
    assert_eq!(recv(&mut c, &mut buf).unwrap().0, 3);
    assert_eq!(c.end(), Ok(Some(EndMark::Fin)));
}
