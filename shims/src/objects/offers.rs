//! Links that others may ask for: one-time offers, which calls write down and the service thread redeems, and where
//! other hosts can present them.

use std::net::{IpAddr, SocketAddr};

use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::lock::Lock;

use crate::sys::time::now_ns;

struct Offer {
    cookie: Cookie,
    /// For whom the offer is.
    peer: InstanceId,
    /// Until when the offer holds, monotonic ns.
    until: u64,
}

/// See the module. There are as many as links are being made.
pub struct Offers {
    made: Lock<Vec<Offer>>,
    /// Where links to other hosts can be made.
    pub places: Lock<Vec<SocketAddr>>,
}

impl Offers {
    /// None yet.
    pub const fn new() -> Self {
        Self {
            made: Lock::new(Vec::new()),
            places: Lock::new(Vec::new()),
        }
    }

    /// A new one; `None` in a signal handler above another use.
    pub fn make(&self, peer: InstanceId, life: u64) -> Option<Cookie> {
        let cookie = Cookie::random().ok()?;
        let until = now_ns() + life;
        self.made.lock()?.push(Offer { cookie, peer, until });
        Some(cookie)
    }

    /// Whether the cookie is good: once, for whom it was made, in time.
    pub fn has(&self, cookie: &Cookie, peer: &InstanceId) -> bool {
        self.position(cookie, peer, |_, _| ())
    }

    /// Spends a cookie. False if it is not good.
    pub fn redeem(&self, cookie: &Cookie, peer: &InstanceId) -> bool {
        self.position(cookie, peer, |offers, at| {
            offers.swap_remove(at);
        })
    }

    /// Where links can be made at this local address.
    pub fn place_at(&self, local: IpAddr) -> Option<SocketAddr> {
        let places = self.places.lock()?;
        places.iter().find(|a| a.ip() == local).copied()
    }

    fn position(&self, cookie: &Cookie, peer: &InstanceId, found: impl FnOnce(&mut Vec<Offer>, usize)) -> bool {
        let Some(mut offers) = self.made.lock() else {
            return false;
        };
        let now = now_ns();
        offers.retain(|o| o.until > now);
        let at = offers.iter().position(|o| o.peer == *peer && o.cookie.matches(cookie));
        at.map(|at| found(&mut offers, at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_good_once_for_whom_it_was_made_in_time() {
        let offers = Offers::new();
        let [mine, other] = [1, 2].map(|n| InstanceId::from_bytes([n; 16]));
        let cookie = offers.make(mine, u64::MAX / 2).unwrap();
        let late = offers.make(mine, 0).unwrap();
        assert!(!offers.has(&late, &mine) && !offers.redeem(&late, &mine));
        assert!(!offers.has(&cookie, &other) && !offers.redeem(&cookie, &other));
        assert!(offers.has(&cookie, &mine) && offers.redeem(&cookie, &mine));
        assert!(!offers.has(&cookie, &mine) && !offers.redeem(&cookie, &mine));
    }
}
