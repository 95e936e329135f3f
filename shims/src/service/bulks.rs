//! Where the bulk queue pairs of links are on their way (docs/protocol.md, P90). What is done about them is `bulk.rs`.

use std::collections::HashMap;

use rdmasock_core::ids::Cookie;
use rdmasock_core::wire::Introduction;

use crate::objects::link::{Link, up};

/// Time from the loss of one to the next, ns; each time twice as long.
const AGAIN_AFTER: u64 = 1_000_000_000;
const DOUBLINGS: u32 = 6;

/// Where a link's is on its way.
pub enum Stage {
    /// There is none, and none is wanted before this time, monotonic ns.
    None { before: u64 },
    /// The other end was asked for a cookie; until then.
    Asked { until: u64 },
    /// The other end was given a cookie; until then.
    Offered { until: u64 },
    /// It is being connected.
    Connecting,
    /// Both ends have it, as far as this one knows.
    Up,
    /// It is lost. Who has said so: this end, the other.
    Lost { here: bool, there: bool },
}

/// A link's.
pub struct Bulk {
    pub stage: Stage,
    /// What the other end was given last. A request may be repeated, as one for a link.
    pub cookie: Option<Cookie>,
    /// How many were lost.
    lost: u32,
    /// The other end has lost it before this one has it.
    pub is_lost_there: bool,
}

impl Bulk {
    fn new() -> Self {
        Self {
            stage: Stage::None { before: 0 },
            cookie: None,
            lost: 0,
            is_lost_there: false,
        }
    }

    /// Nothing is on its way, and something may be.
    pub fn may_begin(&self, now: u64) -> bool {
        match self.stage {
            Stage::None { before } => now >= before,
            Stage::Asked { until } | Stage::Offered { until } => now >= until,
            Stage::Connecting | Stage::Up | Stage::Lost { .. } => false,
        }
    }

    /// What the other end is given: the same as before if it may be about to use that, for both ends may want a queue
    /// pair at the same moment, and what they say of it crosses.
    pub fn to_offer(&self, now: u64, fresh: Cookie) -> Cookie {
        match self.stage {
            Stage::Offered { until } if now < until => self.cookie.unwrap_or(fresh),
            _ => fresh,
        }
    }

    /// It was given that, to be used until then.
    pub fn on_offered(&mut self, cookie: Cookie, until: u64) {
        self.cookie = Some(cookie);
        self.stage = Stage::Offered { until };
    }

    /// It has come to nothing, or is over.
    pub fn end(&mut self, now: u64) {
        let after = AGAIN_AFTER << self.lost.min(DOUBLINGS);
        self.lost = self.lost.saturating_add(1);
        self.cookie = None;
        self.is_lost_there = false;
        self.stage = Stage::None { before: now + after };
    }

    /// One of the ends has said that it has lost it.
    pub fn on_lost(&mut self, now: u64, is_here: bool) {
        let (here, there) = match self.stage {
            Stage::Lost { here, there } => (here || is_here, there || !is_here),
            _ => (is_here, !is_here),
        };
        if here && there {
            self.end(now);
        } else {
            self.stage = Stage::Lost { here, there };
        }
    }
}

/// By the link's slot.
#[derive(Default)]
pub struct Bulks(HashMap<u32, Bulk>);

impl Bulks {
    /// The link's.
    pub fn of(&mut self, link: &Link) -> &mut Bulk {
        self.0.entry(link.slot()).or_insert_with(Bulk::new)
    }

    /// The link is down.
    pub fn forget(&mut self, link: &Link) {
        self.0.remove(&link.slot());
    }

    /// The link for which this cookie was given out.
    pub fn offered(&self, introduction: &Introduction) -> Option<&'static Link> {
        let is_it = |link: &&'static Link| {
            let cookie = self.0.get(&link.slot()).and_then(|bulk| bulk.cookie.as_ref());
            cookie.is_some_and(|cookie| cookie.matches(&introduction.cookie)) && link.peer() == introduction.instance
        };
        up::all().into_iter().find(is_it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_while_an_offer_is_on_its_way_is_offered_the_same() {
        let [first, second] = [1, 2].map(|n| Cookie::from_bytes([n; 16]));
        let mut bulk = Bulk::new();
        let given = bulk.to_offer(0, first);
        bulk.on_offered(given, 100);
        assert!(bulk.to_offer(50, second).matches(&first));
        // Nobody has come for it.
        assert!(bulk.to_offer(100, second).matches(&second));
        bulk.end(60);
        assert!(bulk.to_offer(70, second).matches(&second));
    }
}
