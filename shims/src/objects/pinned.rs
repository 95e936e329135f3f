//! Memory of the program that a link's device reaches for as long as a call waits: registered for that, or kept
//! registered because it is the registered allocator's (`arenas.rs`).

use std::sync::Arc;

use rdmasock_core::fabric::remote::qp::{Key, QueuePair, Region, Role};
use rdmasock_core::os::thread;
use rdmasock_core::stats::Event;

use crate::config::arenas::{self, Kept, Known};
use crate::objects::library::Library;
use crate::objects::link::Remote;
use crate::sys::budget::{self, Budget};
use crate::sys::time::now_ns;

/// What a registration is.
enum Kind {
    /// Of the call, which ends it; with what it takes of the budget.
    Own(Region, u64),
    /// Of the piece that it lies in, which stays as long as this; and how many bulk queue pairs the link had lost
    /// before.
    Kept(Option<Arc<Kept>>, u64),
}

/// See the module. It is over when this is dropped.
pub struct Pinned {
    remote: &'static Remote,
    kind: Kind,
    key: Key,
    len: usize,
    thread: u32,
}

impl Pinned {
    /// As much as may be, from the beginning of `len` bytes of memory, but at least `least` bytes. `None` if that is
    /// not to be had: the bytes go by the rings, as is counted.
    ///
    /// # Safety
    /// Until this is dropped the memory is the program's to give to the device, in this role.
    pub unsafe fn new(remote: &'static Remote, memory: *mut u8, len: usize, least: usize, role: Role) -> Option<Self> {
        // Until it is dropped: what the device is told then is of this link, and not of one that its object becomes.
        if !remote.hold_pair() {
            return None;
        }
        // SAFETY: by the contract.
        let pinned = unsafe { Self::of_any_kind(remote, memory, len, least, role) };
        if pinned.is_none() {
            remote.let_pair_go();
        }
        pinned
    }

    /// # Safety
    /// As [`Self::new`].
    unsafe fn of_any_kind(
        remote: &'static Remote,
        memory: *mut u8,
        len: usize,
        least: usize,
        role: Role,
    ) -> Option<Self> {
        let stats = &Library::get().stats;
        if let Some(pinned) = Self::kept(remote, memory, len, least, role) {
            return Some(pinned);
        }
        // SAFETY: by the contract.
        let pinned = unsafe { Self::own(remote, memory, len, least, role) };
        let is_there = pinned.is_some();
        stats.count(if is_there {
            Event::DirectRegistered
        } else {
            Event::DirectUnpinned
        });
        pinned
    }

    /// # Safety
    /// As [`Self::new`].
    unsafe fn own(remote: &'static Remote, memory: *mut u8, len: usize, least: usize, role: Role) -> Option<Self> {
        let (len, cost) = take_or_make_room(|budget| budget.take(len, least, budget::limit()), len)?;
        let begun = now_ns();
        // SAFETY: by the contract.
        let Ok(region) = (unsafe { remote.end().qp().register(memory, len, role) }) else {
            Library::get().pinned.give_back(cost);
            return None;
        };
        remote.costs.on_registered(len, now_ns() - begun);
        Some(Self {
            remote,
            kind: Kind::Own(region, cost),
            key: region.key,
            len,
            thread: thread::current().tid(),
        })
    }

    /// As much of it as lies in the piece of the registered allocator in which it begins. Only where it is this end's
    /// device that reads: a peer that does not keep to the protocol could write to a piece, or read it, after the call.
    fn kept(remote: &'static Remote, memory: *mut u8, len: usize, least: usize, role: Role) -> Option<Self> {
        if role != Role::Source {
            return None;
        }
        let library = Library::get();
        let (kept, len, free) = library.arenas.covering(memory.addr(), len)?;
        library.free_kept(free);
        let lost = remote.end().direct_counts().lost;
        let key = (len >= least).then(|| key_of(remote, &kept)).flatten();
        let Some(key) = key else {
            let_go(kept);
            return None;
        };
        Some(Self {
            remote,
            kind: Kind::Kept(Some(kept), lost),
            key,
            len,
            thread: thread::current().tid(),
        })
    }

    /// By what the device knows it.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Bytes that the device reaches.
    pub fn len(&self) -> usize {
        self.len
    }

    /// A fork child goes on with the call: it has neither the link nor the registration.
    pub fn is_of_a_parent(&self) -> bool {
        self.thread != thread::current().tid()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.is_of_a_parent() {
            return;
        }
        match &mut self.kind {
            Kind::Own(region, cost) => {
                self.remote.end().qp().deregister(*region);
                Library::get().pinned.give_back(*cost);
            }
            // Without a bulk queue pair nobody has said that nothing is under way any more, and what comes late is to
            // find the memory out of reach. Others who use it go on by rings.
            Kind::Kept(kept, lost) => {
                if let Some(kept) = kept.take() {
                    if has_lost(self.remote, *lost) {
                        let registrations = kept.take_of(self.remote);
                        Library::get().free_kept(Known::end_all(registrations));
                    }
                    let_go(kept);
                }
            }
        }
        self.remote.let_pair_go();
    }
}

/// Whether the link has lost its bulk queue pair since that count, or is down.
fn has_lost(remote: &Remote, before: u64) -> bool {
    remote.is_down() || remote.end().direct_counts().lost != before
}

/// A call has a piece no more. If the piece has become another meanwhile, what devices know of it ends now.
fn let_go(kept: Arc<Kept>) {
    Library::get().free_kept(arenas::leave(kept));
}

/// By what the device knows a piece, which it is told of if need be.
fn key_of(remote: &'static Remote, kept: &Kept) -> Option<Key> {
    let stats = &Library::get().stats;
    let known = kept.key(remote);
    let event = if known.is_some() {
        Event::AllocHit
    } else {
        Event::AllocMiss
    };
    stats.count(event);
    known.or_else(|| {
        let (_, bytes) = kept.memory();
        let cost = take_or_make_room(|budget| budget.take_pages(bytes as u64, budget::limit()), bytes)?;
        let (key, is_new) = tell_device(remote, kept, cost)?;
        stats.count_many(Event::AllocKept, if is_new { cost } else { 0 });
        Some(key)
    })
}

/// Takes something of the budget, for which registrations of pieces that have not been used for long may have to go.
fn take_or_make_room<T>(take: impl Fn(&Budget) -> Option<T>, bytes: usize) -> Option<T> {
    let library = Library::get();
    take(&library.pinned).or_else(|| {
        let free = library.arenas.make_room(bytes as u64 + 2 * budget::PAGE);
        library.free_kept(free);
        if free > 0 { take(&library.pinned) } else { None }
    })
}

/// The device hears of all of the piece, which is as good as registered: without room in the budget for it, or where
/// the device refuses, each call registers its own part. Gives whether it is known for what was taken of the budget.
#[cold]
fn tell_device(remote: &'static Remote, kept: &Kept, cost: u64) -> Option<(Key, bool)> {
    let library = Library::get();
    let (memory, len) = kept.memory();
    // So that the link's end comes after what is kept, and finds it.
    let told = remote.with_pair(|pair| {
        // SAFETY: it is the allocator's, whose arenas are never unmapped.
        let told = unsafe { pair.register(memory, len, Role::Source) };
        match told.map(|region| (region, kept.keep(remote, region, cost))) {
            Ok((region, Ok(()))) => {
                library.stats.count(Event::DirectRegistered);
                Some((region.key, true))
            }
            Ok((region, Err(other))) => {
                pair.deregister(region);
                other.map(|key| (key, false))
            }
            Err(_) => None,
        }
    });
    let told = told.flatten();
    if !told.is_some_and(|(_, is_new)| is_new) {
        library.pinned.give_back(cost);
    }
    told
}
