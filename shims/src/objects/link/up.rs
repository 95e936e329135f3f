//! The links that are up, and what it takes to get one more.

use std::net::IpAddr;

use rdmasock_core::ids::InstanceId;
use rdmasock_core::lock::Lock;
use rdmasock_core::wire::{LinkAddress, LinkOffer};

use super::Link;
use crate::objects::library::Library;

/// How long a cookie of ours may be presented, ns.
const COOKIE_LIFE: u64 = 40_000_000_000;

static UP: Lock<Vec<&'static Link>> = Lock::new(Vec::new());

/// From now on it is one of them.
pub fn add(link: &'static Link) {
    if let Some(mut up) = UP.lock() {
        up.push(link);
    }
}

/// It is none of them any more.
pub fn remove(link: &'static Link) {
    if let Some(mut up) = UP.lock() {
        up.retain(|l| !std::ptr::eq(*l, link));
    }
}

/// All of them.
pub fn all() -> Vec<&'static Link> {
    UP.lock().map(|up| up.clone()).unwrap_or_default()
}

/// The one to this instance.
pub fn to(peer: &InstanceId) -> Option<&'static Link> {
    let up = UP.lock()?;
    up.iter().copied().find(|l| l.peer() == *peer && l.is_alive())
}

/// A one-time offer of a link for the instance `peer`, which is on another host if `local` is
/// given, the address that it has reached us at; `None` if there is a link.
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

/// In a fork child: the links are the parent's.
///
/// # Safety
/// The only thread.
pub(super) unsafe fn after_fork() {
    // SAFETY: by the contract; what a thread of the parent was changing is leaked.
    unsafe {
        std::mem::forget(std::mem::take(UP.get_unlocked()));
        UP.reset();
    }
}
