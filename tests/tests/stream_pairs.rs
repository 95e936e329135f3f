//! Both ends of a connection in one test, under a virtual clock. Under all operations of the applications, the
//! policy and the media, the received bytes are those sent, and no application waits for the library.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::collection::vec;
use proptest::prelude::*;
use rdmasock_core::fabric::mem::Fate;
use rdmasock_core::wire::MAX_MARKER;
use rdmasock_tests::pair::endpoint::Outcome;
use rdmasock_tests::pair::tcp::Shape;
use rdmasock_tests::pair::{ACCEPTOR, CONNECTOR, Weather, World};

/// An operation, and the end that it happens at.
#[derive(Clone, Debug)]
enum Op {
    Write(usize, usize),
    Read(usize, usize),
    /// A read that blocks inside the kernel.
    EnterRead(usize),
    Promote,
    GiveUp(usize),
    Leave(usize),
    ReturnToTcp(usize),
    Shut(usize),
    /// The link between the hosts fails at one end, which has got this many of the bytes unread there. Messages on
    /// the way are lost too, or not.
    Fail(usize, u64, bool),
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let end = 0..2usize;
    prop_oneof![
        6 => (end.clone(), prop_oneof![1..20usize, 1..6000usize]).prop_map(|(e, n)| Op::Write(e, n)),
        6 => (end.clone(), prop_oneof![1..20usize, 1..6000usize]).prop_map(|(e, n)| Op::Read(e, n)),
        1 => end.clone().prop_map(Op::EnterRead),
        4 => Just(Op::Promote),
        1 => end.clone().prop_map(Op::GiveUp),
        1 => end.clone().prop_map(Op::Leave),
        1 => end.clone().prop_map(Op::ReturnToTcp),
        1 => end.prop_map(Op::Shut),
        8 => prop_oneof![0..50u64, 0..3000u64].prop_map(Op::Pass),
    ]
}

/// As [`op`], on links that fail.
fn op_between_hosts() -> impl Strategy<Value = Op> {
    let keep = prop_oneof![Just(0), Just(u64::MAX), 0..3000u64];
    let fail = (0..2usize, keep, any::<bool>());
    prop_oneof![
        9 => op(),
        1 => fail.prop_map(|(end, keep, flight)| Op::Fail(end, keep, flight)),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => (0..200u64).prop_map(Fate::Arrive),
        1 => Just(Fate::Lose),
        1 => (0..200u64, 0..4000u64).prop_map(|(a, b)| Fate::Twice(a, b)),
        1 => (0..4000u64).prop_map(Fate::Arrive),
    ]
}

fn shape() -> impl Strategy<Value = Shape> {
    // A reader takes a marker only as a whole, so TCP must hold at least a marker; every kernel's does.
    (
        prop_oneof![MAX_MARKER..300usize, Just(5000)],
        vec(1..80usize, 1..6),
        prop_oneof![Just(0), 0..300u64],
    )
        .prop_map(|(capacity, segments, latency)| Shape {
            capacity,
            segments,
            latency,
        })
}

prop_compose! {
    fn weather()(
        tcp in [shape(), shape()],
        oob in [vec(fate(), 0..8), vec(fate(), 0..8)],
        side in [vec((0..600u64).prop_map(Fate::Arrive), 0..20), vec((0..600u64).prop_map(Fate::Arrive), 0..20)],
        link in prop_oneof![3 => Just(Some(0)), 1 => (0..2500u64).prop_map(Some), 1 => Just(None)],
    ) -> Weather {
        Weather { tcp, oob, side, link, remote: false }
    }
}

fn play(world: &mut World, op: &Op) {
    match *op {
        Op::Write(end, n) => {
            world.write(end, n);
        }
        Op::Read(end, n) => {
            world.read(end, n);
        }
        Op::EnterRead(end) => {
            world.ends[end].enter_read();
        }
        Op::Promote => world.promote(),
        Op::GiveUp(end) => world.ends[end].give_up(),
        Op::Leave(end) => world.ends[end].leave(),
        Op::ReturnToTcp(end) => world.return_to_tcp(end),
        Op::Shut(end) => world.shut(end),
        Op::Fail(end, keep, flight) => world.fail(end, keep, flight),
        Op::Pass(us) => world.pass(us),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_arrives_is_what_was_sent_whatever_happens(weather in weather(), ops in vec(op(), 1..80)) {
        let mut world = World::new(weather);
        for op in &ops {
            play(&mut world, op);
        }
        world.finish();
    }

    #[test]
    fn what_arrives_is_what_was_sent_though_links_between_hosts_fail(
        weather in weather(),
        ops in vec(op_between_hosts(), 1..80),
    ) {
        let mut world = World::new(Weather { remote: true, ..weather });
        for op in &ops {
            play(&mut world, op);
        }
        world.finish();
    }

    #[test]
    fn a_handshake_in_fair_weather_promotes_both_ends(
        tcp in [shape(), shape()],
        link in 0..1500u64,
        ops in vec(op().prop_filter("applications only", |o| matches!(o, Op::Write(..) | Op::Read(..) | Op::Pass(_))), 0..60),
    ) {
        let mut world = World::new(Weather { tcp, link: Some(link), ..Weather::fair() });
        world.promote();
        ops.iter().for_each(|op| play(&mut world, op));
        world.finish();
        prop_assert_eq!(world.outcomes(), [Some(Outcome::Promoted); 2]);
        for end in [CONNECTOR, ACCEPTOR] {
            let before = world.in_tcp(end);
            prop_assert!(world.write(end, 100) > 0);
            prop_assert_eq!(world.in_tcp(end), before, "it is on the link");
        }
        world.finish();
    }

    #[test]
    fn a_connection_without_a_yes_carries_the_applications_bytes_only(
        tcp in [shape(), shape()],
        silent in 0..2usize,
        ops in vec(op().prop_filter("no library", |o| !matches!(o, Op::ReturnToTcp(_))), 1..60),
    ) {
        let mut weather = Weather { tcp, ..Weather::fair() };
        weather.oob[silent] = vec![Fate::Lose; 100];
        let mut world = World::new(weather);
        ops.iter().for_each(|op| play(&mut world, op));
        // The end of the stream shows that data which looks like the beginning of a marker is not one.
        world.shut(CONNECTOR);
        world.shut(ACCEPTOR);
        world.finish();
        for end in [CONNECTOR, ACCEPTOR] {
            prop_assert_eq!(world.in_tcp(end), world.sent[end]);
        }
    }
}

/// A connection with data before, between and after the markers.
fn busy(weather: Weather, give_up: Option<usize>) -> World {
    let mut world = World::new(weather);
    world.promote();
    for round in 0..400 {
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 3);
            world.read(end, 2);
        }
        if Some(round) == give_up {
            world.ends[round % 2].give_up();
        }
        world.pass(1);
    }
    world.finish();
    world
}

#[test]
fn markers_may_be_cut_at_every_byte() {
    for cut in 1..120 {
        let shape = Shape {
            capacity: 4096,
            segments: vec![cut, usize::MAX],
            latency: 0,
        };
        let world = busy(
            Weather {
                tcp: [shape.clone(), shape],
                ..Weather::fair()
            },
            None,
        );
        assert_eq!(world.outcomes(), [Some(Outcome::Promoted); 2], "cut at {cut}");
    }
}

#[test]
fn markers_may_be_taken_in_parts_of_every_size() {
    for capacity in MAX_MARKER..MAX_MARKER + 100 {
        let shape = Shape {
            capacity,
            segments: vec![1, 2, 3, 5, 7],
            latency: 3,
        };
        let mut world = World::new(Weather {
            tcp: [shape.clone(), shape],
            ..Weather::fair()
        });
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, capacity - capacity % 37);
        }
        world.promote();
        world.finish();
        assert_eq!(world.outcomes(), [Some(Outcome::Promoted); 2], "capacity {capacity}");
    }
}

#[test]
fn giving_up_at_any_moment_loses_nothing() {
    for moment in 0..150 {
        let shape = Shape {
            capacity: 180,
            segments: vec![4],
            latency: 5,
        };
        let mut weather = Weather {
            tcp: [shape.clone(), shape],
            ..Weather::fair()
        };
        weather.side = [vec![Fate::Arrive(11); 9], vec![Fate::Arrive(17); 9]];
        let world = busy(weather, Some(moment));
        let [c, s] = world.outcomes();
        assert_eq!(
            c == Some(Outcome::Promoted),
            s == Some(Outcome::Promoted),
            "at {moment}"
        );
    }
}

#[test]
fn shutting_down_both_ends_at_any_moment_gives_the_rings_back() {
    for moment in 0..300 {
        for (first, segment) in [(CONNECTOR, 1), (ACCEPTOR, 1), (CONNECTOR, 4), (ACCEPTOR, 4)] {
            let shape = |segment| Shape {
                capacity: 165,
                segments: vec![segment],
                latency: 0,
            };
            let mut world = World::new(Weather {
                tcp: [shape(segment), shape(5 - segment)],
                ..Weather::fair()
            });
            world.promote();
            // Neither end reads: TCP has no room for all markers.
            for step in 0..moment {
                if step == moment / 2 {
                    world.write(1 - first, 151);
                }
                world.pass(1);
            }
            world.shut(first);
            world.shut(1 - first);
            world.finish();
        }
    }
}

#[test]
fn a_lost_yes_leaves_both_ends_on_tcp_and_another_attempt_to_other_nonces() {
    let mut weather = Weather::fair();
    weather.oob[ACCEPTOR] = vec![Fate::Arrive(3000)];
    let mut world = World::new(weather);
    world.promote();
    world.write(CONNECTOR, 1000);
    world.pass(2500);
    assert_eq!(world.outcomes()[CONNECTOR], Some(Outcome::Abandoned));
    // The YES comes too late and is answered by CANCEL.
    world.pass(1000);
    world.pass(1);
    assert_eq!(world.outcomes(), [Some(Outcome::Abandoned); 2]);
    assert_eq!(world.in_tcp(CONNECTOR), 1000);
    world.promote();
    world.finish();
    assert_eq!(world.outcomes(), [Some(Outcome::Promoted); 2]);
}

#[test]
fn a_link_that_never_comes_leaves_both_ends_on_tcp() {
    let world = busy(
        Weather {
            link: None,
            ..Weather::fair()
        },
        None,
    );
    assert_eq!(world.outcomes(), [Some(Outcome::Abandoned); 2]);
}

#[test]
fn a_connection_can_be_demoted_and_promoted_again_and_again() {
    let mut world = World::new(Weather::fair());
    for round in 0..20 {
        world.promote();
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 500 + round);
        }
        world.finish();
        assert_eq!(world.outcomes(), [Some(Outcome::Promoted); 2], "round {round}");
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 700);
        }
        world.ends[round % 2].leave();
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 300);
        }
        world.finish();
        assert!(world.ends.iter().all(|e| e.is_plain()), "round {round}");
    }
}

/// A connection between hosts that is busy both ways. Its link fails after `moment` µs at one end, and `later` at
/// the other.
fn failing(moment: u64, later: u64, keep: u64, cut: usize) -> World {
    let shape = Shape {
        capacity: 400,
        segments: vec![cut, 7, 300],
        latency: 5,
    };
    let mut weather = Weather {
        tcp: [shape.clone(), shape],
        ..Weather::fair_between_hosts()
    };
    weather.side = [vec![Fate::Arrive(11); 9], vec![Fate::Arrive(17); 9]];
    let mut world = World::new(weather);
    world.promote();
    for now in 0..400 {
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 5);
            world.read(end, 4);
        }
        let first = moment as usize % 2;
        if now == moment {
            world.fail(first, keep, true);
        }
        if now == moment + later {
            world.fail(1 - first, keep / 2, true);
        }
        world.pass(1);
    }
    world.finish();
    world
}

#[test]
fn a_link_that_fails_at_any_moment_loses_nothing() {
    let variants = [(0, 0), (0, 9), (3, 1), (150, u64::MAX), (20, 4)];
    for (moment, (later, keep)) in (0..200).zip(variants.into_iter().cycle()) {
        let world = failing(moment, later, keep, 4);
        assert!(world.ends.iter().all(|e| e.is_plain()), "at {moment}");
    }
}

#[test]
fn resume_may_be_cut_at_every_byte() {
    for cut in (1..40).chain([77, 200]) {
        failing(120, 20, 3, cut);
    }
}

#[test]
fn after_a_failure_the_connection_is_promoted_again_on_a_new_link() {
    let mut world = World::new(Weather::fair_between_hosts());
    for round in 0..20 {
        world.promote();
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 500 + round);
        }
        world.finish();
        assert_eq!(world.outcomes(), [Some(Outcome::Promoted); 2], "round {round}");
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 700);
        }
        match round % 3 {
            0 => world.ends[round % 2].leave(),
            1 => world.return_to_tcp(round % 2),
            _ => world.fail(round % 2, 100, false),
        }
        for end in [CONNECTOR, ACCEPTOR] {
            world.write(end, 300);
        }
        world.finish();
        assert!(world.ends.iter().all(|e| e.is_plain()), "round {round}");
    }
}

#[test]
fn shutdown_between_hosts_ends_the_direction_behind_its_last_byte() {
    for fails in [None, Some(0), Some(1)] {
        let mut world = World::new(Weather::fair_between_hosts());
        world.promote();
        world.finish();
        world.write(CONNECTOR, 900);
        world.shut(CONNECTOR);
        if let Some(end) = fails {
            world.fail(end, 10, true);
        }
        world.write(ACCEPTOR, 2000);
        world.finish();
        assert!(world.ends[ACCEPTOR].has_read_end() && !world.ends[CONNECTOR].has_read_end());
        world.write(ACCEPTOR, 100);
        world.shut(ACCEPTOR);
        world.finish();
    }
}

/// TCP has room for the end of RESUME only when all other steps of the way back are done.
#[test]
fn a_stream_that_was_not_answered_is_given_back_when_the_last_marker_is_out() {
    let shape = |segment| Shape {
        capacity: 165,
        segments: vec![segment],
        latency: 0,
    };
    let mut world = World::new(Weather {
        tcp: [shape(8), shape(36)],
        oob: [vec![Fate::Arrive(0), Fate::Arrive(0)], vec![]],
        link: Some(0),
        side: [vec![], vec![]],
        remote: true,
    });
    world.promote();
    world.pass(1251);
    world.pass(1);
    assert_eq!(world.write(CONNECTOR, 108), 108);
    for end in [ACCEPTOR, CONNECTOR] {
        world.fail(end, 0, false);
    }
    world.pass(0);
    world.finish();
}
