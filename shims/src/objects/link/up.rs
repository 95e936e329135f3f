//! The list of links that are up, and the offers by which a further link is made.

use std::net::IpAddr;

use rdmasock_core::ids::InstanceId;
use rdmasock_core::lock::Lock;
use rdmasock_core::wire::{LinkAddress, LinkOffer};

use super::Link;
use crate::objects::library::Library;

/// How long a cookie of this instance may be presented, ns.
const COOKIE_LIFE: u64 = 40_000_000_000;

static UP: Lock<Vec<&'static Link>> = Lock::new(Vec::new());

/// Adds the link to the list.
pub fn add(link: &'static Link) {
    if let Some(mut up) = UP.lock() {
        up.push(link);
    }
}

/// Removes the link from the list.
pub fn remove(link: &'static Link) {
    if let Some(mut up) = UP.lock() {
        up.retain(|l| !std::ptr::eq(*l, link));
    }
}

/// Returns all links that are up.
pub fn all() -> Vec<&'static Link> {
    UP.lock().map(|up| up.clone()).unwrap_or_default()
}

/// Returns the live link to this instance; `None` if there is none.
pub fn to(peer: &InstanceId) -> Option<&'static Link> {
    let up = UP.lock()?;
    up.iter().copied().find(|l| l.peer() == *peer && l.is_alive())
}

/// Makes a one-time offer of a link for the instance `peer`. `local` is given if the peer is on another host: the
/// address by which it has reached this host. `None` if there is a link already, or none can be offered.
pub fn offer(peer: InstanceId, local: Option<IpAddr>) -> Option<LinkOffer> {
    if to(&peer).is_some() {
        return None;
    }
    let library = Library::get();
    let address = match local {
        Some(local) => LinkAddress::Verbs(library.offers.place_at(local)?),
        None => LinkAddress::Shm,
    };
    let cookie = library.offers.make(peer, COOKIE_LIFE)?;
    Some(LinkOffer { address, cookie })
}

/// Empties the list in a fork child: the links are the parent's.
///
/// # Safety
/// The caller is the only thread.
pub(super) unsafe fn after_fork() {
    // SAFETY: by the contract, no other thread uses the lock. The vector is leaked and not read, since a thread of the
    // parent may have been changing it.
    unsafe {
        std::mem::forget(std::mem::take(UP.get_unlocked()));
        UP.reset();
    }
}
