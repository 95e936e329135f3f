use super::*;

const RING: u64 = 4 << 20;

/// A stream over a link on which each way takes so many ns for a KiB, and a ring hides what a way costs until it is
/// full.
struct World {
    costs: [f64; 4],
    noise: u64,
    seed: u64,
    now: u64,
    went: [u64; 4],
}

impl World {
    fn new(costs: [f64; 4]) -> Self {
        Self {
            costs,
            noise: 0,
            seed: 7,
            now: 1,
            went: [0; 4],
        }
    }

    fn random(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.seed >> 33
    }

    /// Sends so much by calls of `len` bytes.
    fn run(&mut self, contest: &mut Contest, known: &Known, bytes: u64, len: usize, can_wait: bool) {
        let (mut position, mut fill) = (contest.position, 0u64);
        let until = position + bytes;
        while position < until {
            let send = Send {
                now: self.now,
                position,
                len,
                ring: RING,
                can_wait,
                can_lend: true,
                goes_on: false,
            };
            let best = contest.best(known, send);
            let (way, _) = contest.way(known, send, best);
            assert!(can_wait || !matches!(way, Way::Direct | Way::Lent));
            let took = match way {
                Way::Direct | Way::Lent => {
                    // It waits for what is in the ring.
                    let rest = std::mem::take(&mut fill);
                    (len as u64 + rest) as f64 * self.costs[way as usize]
                }
                _ if fill + (len as u64) < RING => {
                    fill += len as u64;
                    1.0
                }
                way => len as f64 * self.costs[way as usize],
            };
            let noise = if self.noise > 0 { self.random() % self.noise } else { 0 };
            self.now += (took / 1024.0) as u64 + noise;
            self.went[way as usize] += len as u64;
            position += len as u64;
        }
    }

    fn share(&self, way: Way) -> f64 {
        self.went[way as usize] as f64 / self.went.iter().sum::<u64>() as f64
    }
}

const GIB: u64 = 1 << 30;

#[test]
fn the_cheapest_way_is_found_whatever_was_guessed() {
    for len in [16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 128 << 20] {
        for best in Way::ALL {
            let mut costs = [400.0; 4];
            costs[best as usize] = 250.0;
            let (known, mut contest) = (Known::default(), Contest::default());
            let mut world = World::new(costs);
            world.run(&mut contest, &known, 6 * GIB, len, true);
            world.went = [0; 4];
            world.run(&mut contest, &known, 16 * GIB, len, true);
            assert!(world.share(best) > 0.9, "{len} {best:?}: {:?}", world.went);
        }
    }
}

#[test]
fn trials_of_worse_ways_cost_little_and_less_and_less() {
    let (known, mut contest) = (Known::default(), Contest::default());
    let mut world = World::new([300.0, 500.0, 900.0, 900.0]);
    world.run(&mut contest, &known, 20 * GIB, 64 << 10, true);
    let first = world.share(Way::Rings);
    world.went = [0; 4];
    world.run(&mut contest, &known, 200 * GIB, 64 << 10, true);
    assert!(
        first > 0.95 && world.share(Way::Rings) > 0.99,
        "{first} {:?}",
        world.went
    );
}

#[test]
fn noise_that_hits_all_alike_does_not_hide_a_difference() {
    let (known, mut contest) = (Known::default(), Contest::default());
    let mut world = World::new([300.0, 400.0, 240.0, 900.0]);
    // A call takes 19 µs by rings.
    world.noise = 20_000;
    world.run(&mut contest, &known, 64 * GIB, 64 << 10, true);
    world.went = [0; 4];
    world.run(&mut contest, &known, 64 * GIB, 64 << 10, true);
    assert!(world.share(Way::Direct) > 0.9, "{:?}", world.went);
}

#[test]
fn what_costs_the_same_is_as_it_was_guessed() {
    for seed in 0..50 {
        let (known, mut contest) = (Known::default(), Contest::default());
        let mut world = World::new([300.0; 4]);
        world.seed = seed;
        world.noise = 10_000;
        world.run(&mut contest, &known, 16 * GIB, FIRST_GUESS, true);
        assert!(world.share(Way::Direct) > 0.9, "{seed}: {:?}", world.went);
    }
}

#[test]
fn what_has_become_better_later_is_found() {
    let (known, mut contest) = (Known::default(), Contest::default());
    let mut world = World::new([250.0, 400.0, 400.0, 900.0]);
    world.run(&mut contest, &known, 4 * GIB, 1 << 20, true);
    world.costs = [400.0, 400.0, 250.0, 400.0];
    world.run(&mut contest, &known, 60 * GIB, 1 << 20, true);
    world.went = [0; 4];
    world.run(&mut contest, &known, 10 * GIB, 1 << 20, true);
    assert!(world.share(Way::Direct) > 0.9, "{:?}", world.went);
}

#[test]
fn the_next_stream_begins_with_what_is_known() {
    let known = Known::default();
    let mut world = World::new([400.0, 300.0, 200.0, 900.0]);
    world.run(&mut Contest::default(), &known, 8 * GIB, 32 << 10, true);
    world.went = [0; 4];
    world.run(&mut Contest::default(), &known, GIB / 8, 32 << 10, true);
    assert!(world.share(Way::Direct) > 0.99, "{:?}", world.went);
    // Of other sizes, and of sends that do not wait, nothing is known.
    world.went = [0; 4];
    world.run(&mut Contest::default(), &known, 1 << 20, 1 << 19, false);
    assert!(world.share(Way::Staged) > 0.99, "{:?}", world.went);
    world.went = [0; 4];
    world.run(&mut Contest::default(), &known, 64 << 10, 32 << 10, false);
    assert!(world.share(Way::Rings) > 0.99, "{:?}", world.went);
}

#[test]
fn a_stream_that_changes_its_size_begins_anew_and_the_odd_one_changes_nothing() {
    let known = Known::default();
    let mut contest = Contest::default();
    let mut world = World::new([200.0, 300.0, 400.0, 900.0]);
    world.run(&mut contest, &known, 8 * GIB, 32 << 10, true);
    let kind = contest.kind;
    world.run(&mut contest, &known, 8 << 20, 1 << 20, true);
    assert_eq!(contest.kind, kind);
    world.run(&mut contest, &known, 1 << 20, 32 << 10, false);
    assert_ne!(contest.kind, kind);
    world.run(&mut contest, &known, 64 << 20, 1 << 20, true);
    assert_eq!(
        contest.kind,
        Kind {
            class: 6,
            can_wait: true
        }
    );
}

#[test]
fn a_stream_that_takes_the_place_of_another_ends_its_trial() {
    let (known, mut contest) = (Known::default(), Contest::default());
    let mut world = World::new([200.0; 4]);
    world.run(&mut contest, &known, 8 << 20, 64 << 10, true);
    assert!(contest.trial.is_some());
    let send = Send {
        now: world.now,
        position: 0,
        len: 64 << 10,
        ring: RING,
        can_wait: true,
        can_lend: true,
        goes_on: false,
    };
    let best = contest.best(&known, send);
    contest.way(&known, send, best);
    assert!(contest.trial.is_none());
}

#[test]
fn the_next_way_to_try_is_another_than_the_best_and_all_have_their_turn() {
    let send = |can_wait, can_lend| Send {
        now: 0,
        position: 0,
        len: 0,
        ring: RING,
        can_wait,
        can_lend,
        goes_on: false,
    };
    for best in Way::ALL {
        for (can_wait, can_lend) in [(true, true), (true, false), (false, true), (false, false)] {
            let open = |way: &Way| match way {
                Way::Rings | Way::Staged => true,
                Way::Direct => can_wait,
                Way::Lent => can_wait && can_lend,
            };
            let others = Way::ALL.into_iter().filter(|way| open(way) && *way != best);
            let mut tried = Way::Rings;
            let mut turns: Vec<_> = std::iter::repeat_with(|| {
                tried = tried.next(best, send(can_wait, can_lend));
                tried
            })
            .take(others.clone().count())
            .collect();
            turns.sort_by_key(|way| *way as u64);
            assert_eq!(turns, others.collect::<Vec<_>>(), "{best:?} {can_wait} {can_lend}");
        }
    }
}

#[test]
fn what_is_known_fits_a_word() {
    for best in [None].into_iter().chain(Way::ALL.map(Some)) {
        for tried in Way::ALL {
            let verdict = Verdict {
                best,
                tried,
                kept: MOST_KEPT,
                rest: (1 << REST_BITS) - 5,
            };
            let back = Verdict::from_word(verdict.word());
            assert_eq!(
                (back.best, back.tried, back.kept, back.rest),
                (best, tried, MOST_KEPT, verdict.rest)
            );
        }
    }
    assert!(Verdict::from_word(0).best.is_none());
}

#[test]
fn a_call_that_is_longer_than_a_turn_goes_one_way() {
    const LEN: usize = 16 << 20;
    let (known, mut contest) = (Known::default(), Contest::default());
    let (mut ways, mut now) = (Vec::new(), 0);
    for call in 0..400_u64 {
        let mut of_call = Vec::new();
        for piece in 0..16_u64 {
            let send = Send {
                now,
                position: (call * 16 + piece) << 20,
                len: LEN,
                ring: RING,
                can_wait: true,
                can_lend: true,
                goes_on: piece > 0,
            };
            let best = contest.best(&known, send);
            let (way, _) = contest.way(&known, send, best);
            now += 1_000_000;
            of_call.push(way);
        }
        assert!(of_call.iter().all(|way| *way == of_call[0]), "{call}: {of_call:?}");
        ways.push(of_call[0]);
    }
    // There were trials.
    assert!(ways.iter().any(|way| *way != ways[0]));
}
