//! A link that fails: no byte is lost or repeated if each end sends again from the position up to which the other end
//! has received.

use crate::fabric::SendError;
use crate::fabric::remote::tests::*;

/// Cuts the connection, and polls both ends so that they know that the link is down.
fn until_down(world: &World) {
    world.ends[0].qp().cut();
    for end in &world.ends {
        assert!(end.progress().is_err());
        assert!(matches!(end.fault(), Some(Fault::Down(_))));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_was_received_and_what_is_sent_again_are_the_whole(
        immediate in any::<bool>(),
        is_tiny in any::<bool>(),
        streams in 1usize..4,
        lives in 0u64..200,
        loses in 0usize..4,
        ops in proptest::collection::vec(op(), 1..200),
    ) {
        let (mut config, mut tuning) = tiny(immediate);
        if !is_tiny {
            config = Config::default();
            config.limits.immediate = immediate;
            tuning = Tuning::default();
        }
        let mut world = World::new(config, tuning, streams);
        world.ends[0].qp().die_after(lives, loses);
        let mut sent = [0, 0];
        for op in &ops {
            world.apply(op, &mut sent);
        }
        until_down(&world);
        for d in &mut world.directions {
            let received = world.ends[d.reader].received(d.number).unwrap();
            prop_assert!(d.got <= received && received <= d.sent);
            prop_assert!(world.ends[1 - d.reader].confirmed(d.number).unwrap() <= received);
            // The reader drains its ring, and the writer sends the rest again.
            d.read(&world.ends, usize::MAX);
            prop_assert_eq!(d.got, received);
            let again = d.producer.rest(received).ok();
            prop_assert_eq!(again, Some(bytes(d.seed, received, d.sent)));
            prop_assert_eq!(d.producer.rest(d.sent + 1).ok(), None);
        }
    }
}

#[test]
fn cursors_of_a_link_that_was_taken_down_do_no_harm() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    assert!(world.ends[0].set_down() && !world.ends[0].set_down());
    assert_eq!(world.ends[0].progress(), Err(Fault::Closed));
    assert_eq!(world.ends[0].unconfirmed(Vqpn(0)), None);
    let message = crate::wire::Message::Ring { id: 1 };
    assert_eq!(world.ends[0].send(&message), Err(SendError::Down));
    let World { directions, ends, .. } = &mut world;
    for d in directions {
        d.read(ends, 10);
        let _ = d.producer.spans(10);
        ends[0].notify(ENGINE, d.number);
        ends[0].settle();
    }
}

#[test]
fn a_released_end_gives_its_memory_back_and_carries_another_link() {
    let mut world = World::new(Config::default(), Tuning::default(), 3);
    for again in 0..3 {
        for d in &mut world.directions {
            d.write(&world.ends, 3000);
        }
        world.ends[0].notify(crate::fabric::ring::Wake(WaiterId(5).queue_bits()), Vqpn(1));
        world.drain();
        assert!(
            world.directions.iter().all(|d| d.got == d.sent && d.sent > 0),
            "{again}"
        );
        world.directions.clear();
        for end in &world.ends {
            end.set_down();
            // Stands for a thread that finishes its work after releasing the lock. It keeps the queue pair and the
            // memory in use.
            end.users.enter();
            // SAFETY: no cursor is left, and the device accesses no memory unless an end polls.
            assert!(!unsafe { end.release() } && !end.renew(|_| ()));
            assert!(end.take_pair(|_| ()).is_none());
            end.users.leave();
            assert!(end.take_pair(|_| ()).is_some());
            // SAFETY: as above.
            assert!(unsafe { end.release() });
            assert!(end.arm().is_err() && end.users.is_empty());
            assert!(end.sides().iter().all(|side| side.data_len() == 0));
            // These calls stand for threads that come late.
            end.notify(ENGINE, Vqpn(2));
            end.notify(crate::fabric::ring::Wake(WaiterId(0).queue_bits()), Vqpn(0));
            assert!(end.has_ready(WaiterId(5)).eq(&false) && end.progress().is_err());
        }
        for end in &world.ends {
            for (side, bytes) in end.sides().into_iter().zip([DATA, DATA + BUFFERS]) {
                side.map_data(&Layout::for_data(bytes).unwrap()).unwrap();
            }
            assert!(end.renew(|_| ()) && end.numbers() == 0 && end.fault().is_none());
        }
        (0..3).for_each(|_| world.open());
        world.settle();
    }
}

#[test]
fn a_message_that_is_on_its_way_when_the_link_fails_is_not_said_to_be_unsent() {
    let world = World::new(Config::default(), Tuning::default(), 1);
    let message = crate::wire::Message::Ring { id: 1 };
    world.ends[1].qp().cut();
    assert_eq!(world.ends[0].send(&message), Ok(()));
    assert!(world.ends[0].fault().is_some());
    assert_eq!(world.ends[0].send(&message), Err(SendError::Down));
}

#[test]
fn the_service_is_told_of_a_fault_once() {
    let world = World::new(Config::default(), Tuning::default(), 1);
    world.ends[1].qp().cut();
    assert!(world.ends[0].progress().is_err());
    assert_eq!(world.ends[0].local().bells[0].load(Ordering::SeqCst), 1);
    assert!(world.ends[0].has_ready(WaiterId(0)));
    assert!(world.ends[0].fault().is_some());
    assert!(!world.ends[0].has_ready(WaiterId(0)));
}

#[test]
fn the_first_fault_stays_and_reads_back() {
    let faults = Breach::ALL.iter().copied().map(Fault::Violation).chain([
        Fault::Down(Down(-5)),
        Fault::Down(Down(0)),
        Fault::Closed,
        Fault::Silent,
    ]);
    for fault in faults {
        let cell = FaultCell::default();
        assert_eq!(cell.get(), None);
        assert!(cell.set(fault) && !cell.set(Fault::Closed));
        assert_eq!(cell.get(), Some(fault));
    }
}
