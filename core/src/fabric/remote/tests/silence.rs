//! A peer whose device does not answer any more, and a peer that does not answer although its device does.

use crate::fabric::remote::tests::*;

const SECOND: u64 = 1_000_000_000;

/// Ticks at end `at`, once a second from `second` on, until the watch stops. Returns the second in which it has
/// stopped.
fn ticks(world: &World, at: usize, mut second: u64) -> u64 {
    let end = &world.ends[at];
    while end.is_watched() && end.fault().is_none() {
        world.clock.advance(1_000_000);
        end.tick(second * SECOND);
        second += 1;
        assert!(second < 1000, "it comes to an end");
    }
    second
}

/// Returns a world in which no work request is under way and no watch is on.
fn quiet(config: Config, tuning: Tuning) -> World {
    let world = World::new(config, tuning, 1);
    for _ in 0..3 {
        for at in [0, 1] {
            ticks(&world, at, 1);
        }
        world.settle();
    }
    assert!(world.ends.iter().all(|end| !end.is_watched()));
    world
}

#[test]
fn a_link_on_which_nothing_is_posted_is_not_watched_and_what_is_posted_tells_the_service_once() {
    let mut world = quiet(Config::default(), Tuning::default());
    let bells = || world.ends[1].local().bells[0].load(Ordering::SeqCst);
    let before = bells();
    assert!(!world.ends[1].has_ready(WaiterId(0)));
    world.ends[1].local().flags[0].begin();
    world.directions[0].write(&world.ends, 10);
    world.directions[0].write(&world.ends, 10);
    assert_eq!(bells(), before + 1);
    assert!(world.ends[1].has_ready(WaiterId(0)));
    assert!(world.ends[1].is_watched());
    assert!(!world.ends[1].has_ready(WaiterId(0)));
    world.settle();
    let probes = world.ends[1].counts().probes;
    // Three ticks are enough: for the probe, for its answer, and for the end of the watch.
    assert!(ticks(&world, 1, 10) <= 13);
    assert_eq!(world.ends[1].counts().probes, probes + 1);
    assert_eq!(world.ends[1].fault(), None);
}

#[test]
fn silence_takes_the_link_down_and_nothing_is_lost() {
    let mut world = quiet(Config::default(), Tuning::default());
    world.ends[0].qp().mute(true);
    world.directions[0].write(&world.ends, 1000);
    world.settle();
    ticks(&world, 1, 10);
    let writer = &world.ends[1];
    assert_eq!(writer.fault(), Some(Fault::Silent));
    assert_eq!(writer.progress(), Err(Fault::Silent));
    writer.tick(1000 * SECOND);
    // The other end has posted no work request, and has no fault.
    assert_eq!(world.ends[0].fault(), None);
    let d = &mut world.directions[0];
    let received = world.ends[0].received(d.number).unwrap();
    assert_eq!(d.producer.rest(received).ok(), Some(bytes(d.seed, 0, 1000)));
}

#[test]
fn what_arrives_after_a_while_ends_the_silence() {
    let mut world = quiet(Config::default(), Tuning::default());
    world.ends[0].qp().mute(true);
    world.directions[0].write(&world.ends, 1000);
    for second in 10..13 {
        world.ends[1].tick(second * SECOND);
    }
    world.ends[0].qp().mute(false);
    ticks(&world, 1, 13);
    assert_eq!(world.ends[1].fault(), None);
    world.settle();
    assert_eq!(world.directions[0].read(&world.ends, usize::MAX), 1000);
}

#[test]
fn a_peer_that_is_stopped_is_not_a_dead_one() {
    for (config, tuning) in [tiny(false), tiny(true), (Config::default(), Tuning::default())] {
        let mut world = quiet(config, tuning);
        for second in 10..100 {
            // Writes until all credits are used up. Of the other end only the device takes part.
            world.directions[0].write(&world.ends, 300);
            world.clock.advance(1_000_000);
            world.ends[1].tick(second * SECOND);
        }
        assert_eq!(world.ends[1].fault(), None);
        let rest = ticks(&world, 1, 100);
        assert!(rest < 110, "what is proven is not asked for again");
        world.settle();
    }
}

#[test]
fn a_doubt_is_looked_into_though_nothing_is_posted() {
    let world = quiet(Config::default(), Tuning::default());
    world.ends[0].doubt();
    ticks(&world, 0, 10);
    assert_eq!(world.ends[0].fault(), None);
    world.ends[1].qp().mute(true);
    world.ends[0].doubt();
    ticks(&world, 0, 20);
    assert_eq!(world.ends[0].fault(), Some(Fault::Silent));
}

#[test]
fn a_full_queue_is_watched_too() {
    let (config, tuning) = tiny(false);
    let mut world = quiet(config, tuning);
    world.ends[0].qp().mute(true);
    for _ in 0..20 {
        world.directions[0].write(&world.ends, 700);
    }
    assert_eq!(world.ends[1].with(|engine| engine.means.sender.is_short()), Some(true));
    ticks(&world, 1, 10);
    assert_eq!(world.ends[1].fault(), Some(Fault::Silent));
}
