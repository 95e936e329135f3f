//! Which way a stream's large sends go between hosts, where that is to be learned (`RDMASOCK_ZCOPY_MIN=auto`): by what
//! the ways have cost lately, in time for a byte, for sends of this size over this link.
//!
//! A stream goes the way that is known as the best one for its size. Now and then it puts another on trial: the two
//! take turns, each long enough that what the turn before has left in the rings is gone when its time is taken. A turn
//! is compared with the one before it, and what counts is which was better, by how much hardly: whatever else happens
//! in a program hits both alike. So a clear difference is seen after a few turns, and a small one is none. At first,
//! and when another way has become the best, each of the others is tried soon; then the rarer the more often the best
//! way has won. What one stream has found out holds for the next ones of the link. Pure: time and positions are given.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A way from the program's memory to the peer's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// Copied into a ring, and out of it.
    #[default]
    Rings,
    /// Copied into the mirror, from where the device puts it into a buffer that the reader waits with.
    Staged,
    /// From memory to memory by the device; the sender waits for a reader, and then for the device.
    Direct,
    /// From the program's memory into a ring by the reader's device, for which the sender waits, and copied out of it.
    Lent,
}

impl Way {
    pub const ALL: [Self; 4] = [Self::Rings, Self::Staged, Self::Direct, Self::Lent];

    /// The next one to try after `self` and beside `best`, of those that the send can go.
    fn next(self, best: Self, send: Send) -> Self {
        self.others(best, send).next().unwrap_or_default()
    }

    /// Those that the send can go beside `best`, in the order in which they are tried after `self`.
    fn others(self, best: Self, send: Send) -> impl Iterator<Item = Self> {
        let others = (1..=4).map(move |n| Self::from_bits((self as u64 + n) % 4));
        others.filter(move |way| *way != best && way.is_open_to(send))
    }

    fn is_open_to(self, send: Send) -> bool {
        match self {
            Self::Rings | Self::Staged => true,
            Self::Direct => send.can_wait,
            Self::Lent => send.can_wait && send.can_lend,
        }
    }

    fn from_bits(bits: u64) -> Self {
        Self::ALL.get(bits as usize).copied().unwrap_or_default()
    }
}

/// Sends of so many bytes are thought to be worth a direct transfer, until it is known.
pub const FIRST_GUESS: usize = 128 * 1024;
/// Less is not worth learning about: rings.
pub const LEAST: usize = 16 * 1024;

/// A trial is won by so many turns ahead, and lost by so many behind.
const WINS: i8 = 4;
const LOSES: i8 = -3;
/// It is nobody's after so many turns; after half of them, if the challenger is not ahead by then.
const TURNS: u8 = 16;
/// Better by half counts twice.
const CLEARLY: (u64, u64) = (3, 2);
/// A difference of less than such a part is none: where all ways cost the same, as the sender's own work takes most of
/// the time, chance is to decide nothing.
const HARDLY: u64 = 20;
/// From one trial to the next there are as many bytes as in so many turns; while there are ways that the best one has
/// not been compared with since it is the best, fewer. After each other trial that it has not lost twice as many, up to
/// so many doublings.
const TURNS_BETWEEN: u64 = 128;
const TURNS_AT_FIRST: u64 = 8;
const MOST_DOUBLINGS: u64 = 6;
/// More trials in a row need not be counted.
const MOST_KEPT: u64 = MOST_DOUBLINGS + Way::ALL.len() as u64 - 1;

/// Sizes by their powers of two: 16 KiB, and so on; the last is all that is larger.
const CLASSES: usize = 12;
/// A stream's sends are of another kind after so many in a row that were not of the one before.
const ODD_CALLS: u8 = 16;
/// Bytes of a turn whose time is taken: not less than so much.
const LEAST_OF_A_TURN: u64 = 256 * 1024;
/// Longer calls than that count as so many, lest it takes too long to learn something.
const MOST_OF_A_TURN: u64 = 16 << 20;

/// What is known of one size.
#[derive(Clone, Copy)]
struct Verdict {
    /// `None`: nothing yet.
    best: Option<Way>,
    /// What was tried last.
    tried: Way,
    /// How many trials in a row it has not lost.
    kept: u64,
    /// Bytes until the next trial.
    rest: u64,
}

const REST_BITS: u32 = 48;

impl Verdict {
    fn from_word(word: u64) -> Self {
        Self {
            best: (word >> 62 & 1 != 0).then(|| Way::from_bits(word >> 60 & 3)),
            tried: Way::from_bits(word >> 58 & 3),
            kept: word >> 52 & 0xf,
            rest: word & ((1 << REST_BITS) - 1),
        }
    }

    fn word(self) -> u64 {
        let best = self.best.map_or(0, |way| 1 << 62 | (way as u64) << 60);
        best | (self.tried as u64) << 58 | (self.kept & 0xf) << 52 | self.rest.min((1 << REST_BITS) - 1)
    }
}

/// Sends of which something can be known together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kind {
    class: usize,
    can_wait: bool,
}

impl Kind {
    fn of(send: Send) -> Self {
        let power = send.len.max(LEAST).ilog2() - LEAST.ilog2();
        Self {
            class: (power as usize).min(CLASSES - 1),
            can_wait: send.can_wait,
        }
    }
}

/// What the streams of a link have found out, by size, of sends that may wait and of others. Only ever a hint: that two
/// who write at once lose one's word is no harm.
#[derive(Default)]
pub struct Known([[AtomicU64; CLASSES]; 2]);

impl Known {
    /// For another peer: nothing is known.
    pub fn reset(&self) {
        self.0.as_flattened().iter().for_each(|word| word.store(0, Relaxed));
    }

    fn of(&self, kind: Kind) -> &AtomicU64 {
        &self.0[usize::from(kind.can_wait)][kind.class]
    }

    fn look(&self, kind: Kind) -> Verdict {
        Verdict::from_word(self.of(kind).load(Relaxed))
    }

    fn put(&self, kind: Kind, verdict: Verdict) {
        self.of(kind).store(verdict.word(), Relaxed);
    }

    /// So many bytes have gone the best way. True if a trial is due, which is the caller's then.
    fn spend(&self, kind: Kind, bytes: u64, turn: u64) -> bool {
        let mut verdict = self.look(kind);
        let is_due = verdict.rest <= bytes;
        verdict.rest = if is_due {
            TURNS_BETWEEN * turn
        } else {
            verdict.rest - bytes
        };
        self.put(kind, verdict);
        is_due
    }

    /// A trial is over, of one of so many other ways.
    fn settle(&self, kind: Kind, best: Way, tried: Way, has_changed: bool, (others, turn): (u64, u64)) {
        let kept = self.look(kind).kept;
        // It has won against the one that it was compared with.
        let kept = if has_changed { 1 } else { (kept + 1).min(MOST_KEPT) };
        let rest = match kept.checked_sub(others) {
            None => TURNS_AT_FIRST * turn,
            Some(kept) => (TURNS_BETWEEN * turn) << kept.min(MOST_DOUBLINGS),
        };
        let verdict = Verdict {
            best: Some(best),
            tried,
            kept,
            rest,
        };
        self.put(kind, verdict);
    }
}

/// A send of a stream is about to be made, or to go on.
#[derive(Clone, Copy, Debug)]
pub struct Send {
    /// Monotonic ns.
    pub now: u64,
    /// Bytes that the stream has sent before.
    pub position: u64,
    /// Bytes of the program's call.
    pub len: usize,
    /// Bytes of the ring.
    pub ring: u64,
    /// The call may wait.
    pub can_wait: bool,
    /// The peer's device reads what is lent to it.
    pub can_lend: bool,
    /// It goes on, with the rest of the call.
    pub goes_on: bool,
}

/// The turn of one way.
#[derive(Clone, Copy, Debug)]
struct Turn {
    is_challengers: bool,
    /// Its first position.
    from: u64,
    /// From where and when on its time is taken.
    mark: Option<(u64, u64)>,
}

impl Turn {
    fn new(is_challengers: bool, from: u64) -> Self {
        Self {
            is_challengers,
            from,
            mark: None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    challenger: Way,
    turn: Turn,
    /// What the turn before took, ns for a MiB.
    before: Option<u64>,
    turns: u8,
    /// Turns by which the challenger is ahead.
    lead: i8,
}

/// What one stream does about it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Contest {
    /// Of its sends, but for the odd one.
    kind: Kind,
    /// Calls in a row that were not of the kind.
    odd_calls: u8,
    best: Option<Way>,
    trial: Option<Trial>,
    /// Where the last send began.
    position: u64,
}

impl Contest {
    /// The way that is known as the best for a send, which is about to go that way or another.
    pub fn best(&mut self, known: &Known, send: Send) -> Way {
        self.follow(Kind::of(send));
        let guess = match self.kind.can_wait {
            _ if send.len < FIRST_GUESS => Way::Rings,
            true => Way::Direct,
            false => Way::Staged,
        };
        let verdict = known.look(self.kind);
        *self.best.get_or_insert(verdict.best.unwrap_or(guess))
    }

    /// It goes another way, for another reason: that says nothing of the ways that are compared.
    pub fn pause(&mut self, send: Send) {
        self.trial = None;
        self.position = send.position;
    }

    /// The way that a send goes for which that one is the best; and if a trial is over with that, whether it has
    /// changed the best way.
    pub fn way(&mut self, known: &Known, send: Send, best: Way) -> (Way, Option<bool>) {
        let went = send
            .position
            .saturating_sub(std::mem::replace(&mut self.position, send.position));
        // Bytes of a turn: the ring's in which the last one ends, and twice as many whose time is taken; or whole
        // calls.
        let part = send
            .ring
            .max(LEAST_OF_A_TURN / 2)
            .max((send.len as u64).min(MOST_OF_A_TURN));
        let turn = 3 * part;
        let Some(trial) = &mut self.trial else {
            if went > 0 && !send.goes_on && known.spend(self.kind, went, turn) {
                let challenger = known.look(self.kind).tried.next(best, send);
                self.trial = Some(Trial {
                    challenger,
                    turn: Turn::new(false, send.position),
                    before: None,
                    turns: 0,
                    lead: 0,
                });
            }
            return (best, None);
        };
        if send.position < trial.turn.from {
            // Another stream.
            self.trial = None;
            return (best, None);
        }
        match trial.turn.mark {
            // A call goes one way: its reader is at another place in the middle.
            _ if send.goes_on => {}
            None if send.position - trial.turn.from >= part => trial.turn.mark = Some((send.position, send.now)),
            Some((from, since)) if send.position - from >= 2 * part => {
                let cost = (send.now.saturating_sub(since) << 20) / (send.position - from);
                trial.on_turn(cost, send.position);
            }
            _ => {}
        }
        let (lead, challenger) = (trial.lead, trial.challenger);
        let way = if trial.turn.is_challengers { challenger } else { best };
        let most = if lead > 0 { TURNS } else { TURNS / 2 };
        if lead < WINS && lead > LOSES && trial.turns < most {
            return (way, None);
        }
        let has_changed = lead >= WINS;
        let best = if has_changed { challenger } else { best };
        let others = challenger.others(best, send).count() as u64;
        known.settle(self.kind, best, challenger, has_changed, (others, turn));
        self.best = Some(best);
        self.trial = None;
        (best, Some(has_changed))
    }

    /// Sends of another kind, if they are not the odd one, are another contest.
    fn follow(&mut self, kind: Kind) {
        self.odd_calls = if kind == self.kind { 0 } else { self.odd_calls + 1 };
        if self.best.is_none() || self.odd_calls == ODD_CALLS {
            *self = Self {
                kind,
                position: self.position,
                ..Self::default()
            };
        }
    }
}

impl Trial {
    fn on_turn(&mut self, cost: u64, position: u64) {
        if let Some(before) = self.before {
            let (better, worse) = (before.min(cost), before.max(cost));
            let is_clear = worse.saturating_mul(CLEARLY.1) > better.saturating_mul(CLEARLY.0);
            let by = match worse - better {
                less if less <= worse / HARDLY => 0,
                _ if is_clear => 2,
                _ => 1,
            };
            let is_challengers = (cost < before) == self.turn.is_challengers;
            self.lead += if is_challengers { by } else { -by };
        }
        self.before = Some(cost);
        self.turns += 1;
        self.turn = Turn::new(!self.turn.is_challengers, position);
    }
}

#[cfg(test)]
mod tests;
