//! The state of each link's bulk queue pair (docs/protocol.md, P90). `bulk.rs` acts on it.

use std::collections::HashMap;

use rdmasock_core::ids::Cookie;
use rdmasock_core::wire::Introduction;

use crate::objects::link::{Link, up};

/// Time from the loss of one bulk queue pair to the next, ns. It doubles with each loss, at most `DOUBLINGS` times.
const AGAIN_AFTER: u64 = 1_000_000_000;
const DOUBLINGS: u32 = 6;

/// The state of a link's bulk queue pair.
pub enum Stage {
    /// No queue pair exists, and none is made before this time, monotonic ns.
    None { before: u64 },
    /// The other end was asked for a cookie, which counts until then, monotonic ns.
    Asked { until: u64 },
    /// The other end was given a cookie, which counts until then, monotonic ns.
    Offered { until: u64 },
    /// The queue pair is being connected.
    Connecting,
    /// Both ends have it, as far as this end knows.
    Up,
    /// The queue pair is lost. `here`: this end has reported that; `there`: the other end has.
    Lost { here: bool, there: bool },
}

/// The bulk queue pair of one link.
pub struct Bulk {
    pub stage: Stage,
    /// The cookie that the other end was given last. A request with it may be repeated, as for a link.
    pub cookie: Option<Cookie>,
    /// How many were lost, or failed to come up.
    lost: u32,
    /// The other end has lost the queue pair before this end has it.
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

    /// Returns whether a queue pair may be made now: none is there, or being made.
    pub fn may_begin(&self, now: u64) -> bool {
        match self.stage {
            Stage::None { before } => now >= before,
            Stage::Asked { until } | Stage::Offered { until } => now >= until,
            Stage::Connecting | Stage::Up | Stage::Lost { .. } => false,
        }
    }

    /// Returns the cookie for the other end: the same as before if the other end may be about to use that one. Both
    /// ends may want a queue pair at the same moment, and their messages cross.
    pub fn to_offer(&self, now: u64, fresh: Cookie) -> Cookie {
        match self.stage {
            Stage::Offered { until } if now < until => self.cookie.unwrap_or(fresh),
            _ => fresh,
        }
    }

    /// Notes the cookie that the other end was given, and until when it counts, monotonic ns.
    pub fn on_offered(&mut self, cookie: Cookie, until: u64) {
        self.cookie = Some(cookie);
        self.stage = Stage::Offered { until };
    }

    /// Ends an attempt that has failed, or a queue pair that is over. The next may begin after a pause.
    pub fn end(&mut self, now: u64) {
        let after = AGAIN_AFTER << self.lost.min(DOUBLINGS);
        self.lost = self.lost.saturating_add(1);
        self.cookie = None;
        self.is_lost_there = false;
        self.stage = Stage::None { before: now + after };
    }

    /// Notes that an end has reported the loss. Once both have, the next queue pair may begin after a pause.
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

/// The states, by the slot of the link.
#[derive(Default)]
pub struct Bulks(HashMap<u32, Bulk>);

impl Bulks {
    /// Returns the state of the link's bulk queue pair.
    pub fn of(&mut self, link: &Link) -> &mut Bulk {
        self.0.entry(link.slot()).or_insert_with(Bulk::new)
    }

    /// Removes the state of a link that is down.
    pub fn forget(&mut self, link: &Link) {
        self.0.remove(&link.slot());
    }

    /// Returns the link for which this cookie was given out; `None` if there is none.
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
        // No request has come with the first cookie.
        assert!(bulk.to_offer(100, second).matches(&second));
        bulk.end(60);
        assert!(bulk.to_offer(70, second).matches(&second));
    }
}
