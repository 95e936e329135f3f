//! Links that other instances may ask for. Calls of the program write down one-time offers, and the service thread
//! redeems them. Also the addresses at which other hosts can present their offers.

use std::net::{IpAddr, SocketAddr};

use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::lock::Lock;

use crate::sys::time::now_ns;

struct Offer {
    cookie: Cookie,
    /// The instance that may present the offer.
    peer: InstanceId,
    /// When the offer expires, monotonic ns.
    until: u64,
}

/// The open offers and the addresses for them. There are as many offers as links are being made.
pub struct Offers {
    made: Lock<Vec<Offer>>,
    /// Addresses at which other hosts can make links to this one.
    pub places: Lock<Vec<SocketAddr>>,
}

impl Offers {
    /// Returns an empty list.
    pub const fn new() -> Self {
        Self {
            made: Lock::new(Vec::new()),
            places: Lock::new(Vec::new()),
        }
    }

    /// Makes an offer for `peer` that expires after `life` ns, and returns its cookie. `None` if the kernel gives no
    /// random bytes, or in a signal handler that has interrupted another use of the list.
    pub fn make(&self, peer: InstanceId, life: u64) -> Option<Cookie> {
        let cookie = Cookie::random().ok()?;
        let until = now_ns() + life;
        self.made.lock()?.push(Offer { cookie, peer, until });
        Some(cookie)
    }

    /// Returns whether `cookie` is valid: made for `peer`, not expired, not yet redeemed.
    pub fn has(&self, cookie: &Cookie, peer: &InstanceId) -> bool {
        self.position(cookie, peer, |_, _| ())
    }

    /// Redeems a cookie, which is then no longer valid. False if it was not valid.
    pub fn redeem(&self, cookie: &Cookie, peer: &InstanceId) -> bool {
        self.position(cookie, peer, |offers, at| {
            offers.swap_remove(at);
        })
    }

    /// Returns the address and port at which links can be made at the local address `local`; `None` if there is none.
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
