//! When a reader's head is sent: along with messages in the other direction, and in a message of its own only if there
//! are none.

use crate::fabric::remote::tests::*;

fn sends(world: &World) -> [u64; 2] {
    [0, 1].map(|at| world.ends[at].counts().sends)
}

/// Carries 64 bytes in a direction. The thread that reads them then arms for the next bytes, as it does before a sleep.
fn carry(world: &mut World, direction: usize) {
    let World {
        directions,
        ends,
        clock,
        ..
    } = world;
    let d = &mut directions[direction];
    d.write(ends, 64);
    clock.advance(1_000_000);
    while ends[d.reader].progress().unwrap() {}
    assert_eq!(d.read(ends, 64), 64);
    let armed = d.consumer.arm_data(WaiterId(5).queue_bits()).unwrap();
    ends[d.reader].notify(armed.wake, d.back);
}

/// Carries a request and its answer.
fn ask(world: &mut World) {
    carry(world, 0);
    carry(world, 1);
}

#[test]
fn heads_go_with_answers() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    ask(&mut world);
    let before = sends(&world);
    for _ in 0..10 {
        ask(&mut world);
        // The ends call `settle` as often as requests come.
        world.ends.iter().for_each(TestEnd::settle);
    }
    assert_eq!(sends(&world), before.map(|sends| sends + 10));
    // The end that sends the requests was the last to read, so its head is still to be sent.
    world.settle();
    assert_eq!(sends(&world), [before[0] + 10, before[1] + 11]);
}

#[test]
fn a_stream_in_use_does_not_keep_others_from_telling() {
    let mut world = World::new(Config::default(), Tuning::default(), 2);
    let room = |world: &mut World| world.directions[2].producer.spans(1 << 20).unwrap().len();
    let all = room(&mut world);
    carry(&mut world, 2);
    for _ in 0..3 {
        assert_eq!(room(&mut world), all - 64);
        ask(&mut world);
        world.ends.iter().for_each(TestEnd::settle);
        world.clock.advance(1_000_000);
        for end in &world.ends {
            end.progress().unwrap();
        }
        if room(&mut world) == all {
            return;
        }
    }
    panic!("not told");
}

#[test]
fn who_asks_what_has_arrived_hears_what_was_read() {
    let mut world = World::new(Config::default(), Tuning::default(), 1);
    let number = world.directions[0].number;
    carry(&mut world, 0);
    let untaken = |world: &World| world.ends[1].untaken(number, 64);
    let look = |world: &World| {
        for end in [0, 1, 0, 1] {
            while world.ends[end].progress().unwrap() {}
        }
    };
    look(&world);
    assert_eq!(untaken(&world), 64, "nothing is said of so little");
    assert_eq!(world.ends[1].unconfirmed(number), Some(64));
    look(&world);
    assert_eq!(untaken(&world), 0, "with what is said of the stream");
}
