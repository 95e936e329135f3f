//! Threads that use one link at the same time: work that a thread leaves to the holder of the engine's lock is done.

use std::sync::atomic::AtomicUsize;
use std::thread::{scope, yield_now};

use crate::fabric::remote::tests::*;

#[test]
fn four_threads_on_each_end_move_what_they_send() {
    const BYTES: u64 = 300_000;
    for immediate in [false, true] {
        let mut config = Config::default();
        config.limits.immediate = immediate;
        config.send_queue = 8;
        config.limits.receive_buffers = 6;
        let mut world = World::new(config, Tuning::default(), 2);
        let World { directions, ends, .. } = &mut world;
        let ends = &*ends;
        for d in directions.iter_mut() {
            d.offer(ends, 14);
        }
        let open = AtomicUsize::new(directions.len());
        scope(|s| {
            for d in directions.iter_mut() {
                let Direction {
                    seed,
                    producer,
                    consumer,
                    reader,
                    number,
                    back,
                    ..
                } = d;
                let (seed, reader, number, back) = (*seed, *reader, *number, *back);
                let open = &open;
                s.spawn(move || {
                    let mut sent = 0;
                    while sent < BYTES {
                        let want = (1 + sent * 7 % 5000).min(BYTES - sent);
                        let data = bytes(seed, sent, sent + want);
                        let spans = producer.spans(data.len()).unwrap();
                        // SAFETY: the source is readable, and apart from the ring.
                        let n = unsafe { spans.copy_in(0, data.as_ptr(), data.len()) };
                        let wake = producer.commit(n);
                        ends[1 - reader].notify(wake, number);
                        sent += n as u64;
                        if n == 0 {
                            ends[1 - reader].progress().unwrap();
                            yield_now();
                        }
                    }
                    // Bytes that could not be sent at once are sent by a thread that polls.
                    while open.load(Ordering::SeqCst) > 0 {
                        ends[1 - reader].progress().unwrap();
                        yield_now();
                    }
                });
                s.spawn(move || {
                    let mut got = 0;
                    while got < BYTES {
                        let spans = consumer.spans(1).unwrap();
                        let mut data = vec![0; spans.len()];
                        // SAFETY: the target is writable, and apart from the ring.
                        unsafe { spans.copy_out(0, data.as_mut_ptr(), data.len()) };
                        assert_eq!(data, bytes(seed, got, got + data.len() as u64));
                        got += data.len() as u64;
                        let wake = consumer.consume(data.len());
                        ends[reader].notify(wake, back);
                        if let Ok(Some(old)) = consumer.take_retired() {
                            ends[reader].free(old);
                        }
                        if data.is_empty() {
                            ends[reader].progress().unwrap();
                            yield_now();
                        }
                    }
                    open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(ends[0].qp().why(), "");
    }
}

#[test]
fn a_signal_handler_that_interrupts_the_engine_leaves_its_work() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let World { directions, ends, .. } = &mut world;
    let message = crate::wire::Message::Ring { id: 0 };
    ends[1].while_in_use(|| {
        assert_eq!(directions[0].write(ends, 100), 100);
        assert_eq!(ends[1].send(&message), Ok(()));
        assert_eq!(ends[1].progress(), Ok(false));
        assert_eq!(ends[1].arm(), Ok(false));
        assert_eq!(ends[1].received(Vqpn(0)), None);
        assert_eq!(ends[1].unconfirmed(directions[0].number), None);
        assert!(ends[1].take_message().is_none());
        assert_eq!(ends[1].open(12).err(), Some(crate::fabric::OpenError::Busy));
    });
    world.settle();
    assert_eq!(world.directions[0].read(&world.ends, 200), 100);
    world.takes(0, 1);
    assert_eq!(world.ends[1].open(12).unwrap().vqpn, Vqpn(1));
}
