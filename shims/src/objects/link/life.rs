//! The life of link objects: an object becomes a link, and becomes another one when nothing of the first is left. The
//! other files have a link's work in between.

use std::net::{IpAddr, SocketAddr};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

use crossbeam_utils::CachePadded;
use rdmasock_core::fabric::shm::{self, Memory};
use rdmasock_core::ids::InstanceId;
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::sparse::Sparse;
use rdmasock_core::stats::LinkStats;
use rdmasock_core::wire::Introduction;

use super::remote::Terms;
use super::{AnyEnd, Link, LocalPeer, OVER, Remote, up};
use crate::config::verbs::Pair;
use crate::objects::library::Library;

/// The link object that was made last; the objects form a list.
static LAST: AtomicPtr<Link> = AtomicPtr::new(null_mut());

/// Objects that are no link now, for reuse.
static FREE: Lock<Vec<&'static Link>> = Lock::new(Vec::new());

/// The identity of a link.
pub struct Identity {
    /// The index in the library's list and in the statistics.
    pub slot: u32,
    /// The instance at the other end.
    pub peer: InstanceId,
    /// Its counters.
    pub stats: Option<&'static LinkStats>,
}

impl Link {
    /// Makes a link within the host, over the memory from the handshake, still without a side channel. `None` if the
    /// memory cannot be mapped, by this process's limits or because of what the peer has sent.
    pub fn new(identity: Identity, memory: &Memory<'_>) -> Option<&'static Self> {
        let recycled = take_free(|link| !link.is_remote());
        let link = match recycled {
            Some(link) => link,
            None => Self::blank()?,
        };
        let AnyEnd::Shm(end) = &link.end else {
            return None;
        };
        if let Err(error) = end.show(memory) {
            tracing::debug!(target: "rdmasock::link", %error, "no memory for a link");
            if end.is_usable() {
                put_free(link);
            }
            return None;
        }
        link.begin(identity);
        Some(link)
    }

    /// Sets the side channel, before any other thread has the link.
    pub fn attach(&self, channel: Channel) {
        if let Some(local_peer) = self.local_peer() {
            local_peer.begin(self.slot(), channel);
        }
    }

    /// Makes a link to another host, over a connected queue pair. `None` without memory for it. `other` is the other
    /// end's introduction. `dialled` has the addresses from which and to which this end has connected, if it has.
    pub fn between_hosts(
        identity: Identity,
        pair: Pair,
        arena_bytes: u64,
        other: &Introduction,
        dialled: Option<(IpAddr, SocketAddr)>,
    ) -> Option<&'static Self> {
        let info = pair.info().ok()?;
        let terms = Terms::of(&pair, arena_bytes, other);
        let link = match take_free(|link| link.remote().is_some_and(|remote| remote.fits(&terms))) {
            Some(link) if link.remote()?.renew(&pair) => link,
            Some(link) => {
                put_free(link);
                return None;
            }
            None => Self::leak(AnyEnd::Verbs(Box::new(Remote::new(pair, terms)?))),
        };
        link.remote()?.begin(&info, dialled);
        link.begin(identity);
        Some(link)
    }

    /// Returns a new object for links within the host, which is no link yet.
    fn blank() -> Option<&'static Self> {
        // SAFETY: the object and its end are leaked below, so no cursor outlives the end. `Link::producer` gives out
        // one producer at a time for each vQPN of the peer.
        let end = unsafe { shm::End::blank(LocalPeer::new()) }.ok()?;
        Some(Self::leak(AnyEnd::Shm(end)))
    }

    fn leak(end: AnyEnd) -> &'static Self {
        let link: &'static Self = Box::leak(Box::new(Self {
            slot: AtomicU32::new(0),
            peer: [const { AtomicU64::new(0) }; 2],
            serial: AtomicU64::new(0),
            end,
            alive: AtomicBool::new(false),
            pins: AtomicU32::new(OVER),
            announced: Lock::new(Vec::new()),
            has_bell: AtomicU64::new(0),
            peers_max_ring: AtomicU64::new(u64::MAX),
            touched: Lock::new(None),
            looks: CachePadded::default(),
            is_left: AtomicBool::new(false),
            sockets: Sparse::new(),
            taken: Sparse::new(),
            count: AtomicU32::new(0),
            stats: AtomicPtr::new(null_mut()),
            next: AtomicPtr::new(null_mut()),
        }));
        let me = std::ptr::from_ref(link).cast_mut();
        let mut last = LAST.load(Acquire);
        loop {
            link.next.store(last, Relaxed);
            match LAST.compare_exchange(last, me, AcqRel, Acquire) {
                Ok(_) => return link,
                Err(other) => last = other,
            }
        }
    }

    /// Turns the object into the link `identity`. No thread has pinned the object, and what a thread does with a stale
    /// pointer without a pin is harmless.
    fn begin(&self, identity: Identity) {
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        self.serial.store(SERIALS.fetch_add(1, Relaxed), Release);
        self.slot.store(identity.slot, Release);
        let halves = identity.peer.as_bytes().as_chunks().0;
        for (word, half) in self.peer.iter().zip(halves) {
            word.store(u64::from_ne_bytes(*half), Release);
        }
        // The peer's value follows by `on_geometry`.
        self.peers_max_ring.store(u64::MAX, Relaxed);
        self.looks.reset();
        self.is_left.store(false, Relaxed);
        let stats = identity.stats.map_or(null_mut(), |s| std::ptr::from_ref(s).cast_mut());
        self.stats.store(stats, Release);
        self.alive.store(true, SeqCst);
        self.pins.store(0, SeqCst);
    }

    /// Gives up a link that is down, whose channel is [closed](Self::close_channel) and that no stream uses any more:
    /// its memory and the object. False if that is not possible yet.
    pub fn release(&'static self) -> bool {
        match self.pins.compare_exchange(0, OVER, AcqRel, Acquire) {
            Ok(_) => {}
            // The last try failed because a thread was about to leave the link.
            Err(OVER) if self.is_remote() => {}
            Err(_) => return false,
        }
        if self
            .remote()
            .is_some_and(|remote| !remote.retire() || !remote.release())
        {
            return false;
        }
        let slot = self.slot();
        let had_stats = !self.stats.swap(null_mut(), AcqRel).is_null();
        match &self.end {
            AnyEnd::Verbs(_) => put_free(self),
            AnyEnd::Shm(end) => {
                if let Some(mut touched) = self.touched.lock() {
                    *touched = None;
                }
                // SAFETY: no cursor is left. Streams and producers pin the link until they have given up their cursors,
                // and the exchange above has found no pin.
                unsafe { end.release() };
                if end.is_usable() {
                    put_free(self);
                }
            }
        }
        if had_stats {
            Library::get().stats.close_link(slot);
        }
        true
    }
}

/// Takes an object for which `fits` holds from those that are no link now; `None` if there is none.
fn take_free(fits: impl Fn(&Link) -> bool) -> Option<&'static Link> {
    let mut free = FREE.lock()?;
    let at = free.iter().position(|link| fits(link))?;
    Some(free.swap_remove(at))
}

/// Keeps an object that is no link now for reuse.
fn put_free(link: &'static Link) {
    if let Some(mut free) = FREE.lock() {
        free.push(link);
    }
}

/// Gives up all links in a fork child: they are the parent's, and their memory is not mapped.
///
/// # Safety
/// The caller is the only thread.
pub unsafe fn after_fork() {
    let mut next = LAST.swap(null_mut(), AcqRel);
    // SAFETY: null, or an object that is never freed.
    while let Some(link) = unsafe { next.as_ref() } {
        // A signal handler may have forked in the middle of a call, which then goes on in the child.
        if let AnyEnd::Shm(end) = &link.end {
            end.after_fork();
            end.outside().after_fork();
        }
        next = link.next.load(Acquire);
    }
    // SAFETY: by the contract, no other thread uses the lock. The vector is leaked and not read, since a thread of the
    // parent may have been changing it.
    unsafe {
        up::after_fork();
        std::mem::forget(std::mem::take(FREE.get_unlocked()));
        FREE.reset();
    }
}
