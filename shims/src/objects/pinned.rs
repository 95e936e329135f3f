//! Memory of the program that a link's device accesses while a call waits. The memory is registered for that call, or
//! stays registered because it belongs to the registered allocator (`config::arenas`).

use std::sync::Arc;

use rdmasock_core::fabric::remote::qp::{Key, QueuePair, Region, Role};
use rdmasock_core::os::thread;
use rdmasock_core::stats::Event;

use crate::config::arenas::{self, Budget, Kept, Known};
use crate::objects::library::Library;
use crate::objects::link::Remote;
use crate::sys::time::now_ns;

/// How long a registration lasts.
enum Kind {
    /// For one call, which ends the registration. The number is what the registration takes of the budget, bytes.
    Own(Region, u64),
    /// For as long as the allocator does not change its piece of memory. The reference keeps the piece in use. The
    /// number is how many bulk queue pairs, which carry direct transfers, the link had lost when the call began.
    Kept(Option<Arc<Kept>>, u64),
}

/// A call's use of a registration, which ends when the value is dropped.
pub(crate) struct Pinned {
    remote: &'static Remote,
    kind: Kind,
    /// The key by which the device knows the memory.
    pub key: Key,
    /// Bytes that are registered.
    pub len: usize,
    thread: u32,
}

impl Pinned {
    /// Registers up to `len` bytes from the beginning of `memory`, at least `least`. `None` if that is not possible:
    /// then the bytes go through the rings. A failed registration is counted ([`Event::DirectUnpinned`]).
    ///
    /// # Safety
    /// Until the value is dropped, the memory is the program's, and the device may access it in this role.
    pub(crate) unsafe fn new(
        remote: &'static Remote,
        memory: *mut u8,
        len: usize,
        least: usize,
        role: Role,
    ) -> Option<Self> {
        // The queue pair is held until the value is dropped. Otherwise the object could become another link meanwhile,
        // with another device.
        if !remote.hold_pair() {
            return None;
        }
        let registered = kept(remote, memory, len, least, role).or_else(|| {
            // SAFETY: the contract of `own` is the contract of this function, and the queue pair is held.
            let own = unsafe { own(remote, memory, len, least, role) };
            Library::get().stats.count(match own {
                Some(_) => Event::DirectRegistered,
                None => Event::DirectUnpinned,
            });
            own
        });
        let Some((kind, key, len)) = registered else {
            remote.let_pair_go();
            return None;
        };
        Some(Self {
            remote,
            kind,
            key,
            len,
            thread: thread::current().tid(),
        })
    }

    /// Returns whether this is a fork child that goes on with its parent's call. The child has neither the link nor the
    /// registration.
    pub(crate) fn is_of_a_parent(&self) -> bool {
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
            // If the link is down, or has lost its bulk queue pair since the call began, no completion says that the
            // device has finished with the memory. So all registrations of the piece with this device end, and a late
            // access fails. Other calls that use these registrations go on through the rings.
            Kind::Kept(kept, lost) => {
                if let Some(kept) = kept.take() {
                    if self.remote.is_down() || self.remote.end().counts().lost != *lost {
                        let registrations = kept.take_of(self.remote);
                        Library::get().free_kept(Known::end_all(registrations));
                    }
                    // If the allocator has changed the piece meanwhile, the last call that leaves it ends its
                    // registrations.
                    Library::get().free_kept(arenas::leave(kept));
                }
            }
        }
        self.remote.let_pair_go();
    }
}

/// Registers memory for one call. Returns the registration with its key and its bytes.
///
/// # Safety
/// The contract of [`Pinned::new`], and the caller holds the queue pair.
unsafe fn own(
    remote: &'static Remote,
    memory: *mut u8,
    len: usize,
    least: usize,
    role: Role,
) -> Option<(Kind, Key, usize)> {
    let (len, cost) = take_or_make_room(|budget| budget.take(len, least, arenas::limit()), len)?;
    let begun = now_ns();
    // SAFETY: by the contract, the memory is the program's until the value is dropped, which ends the registration.
    let Ok(region) = (unsafe { remote.end().qp().register(memory, len, role) }) else {
        Library::get().pinned.give_back(cost);
        return None;
    };
    remote.costs.on_registered(len, now_ns() - begun);
    Some((Kind::Own(region, cost), region.key, len))
}

/// Uses the registration of the allocator's piece in which the memory begins, for the part of the memory that lies in
/// the piece. Only for memory that this end's device reads: if the peer's device had access, a peer that breaks the
/// protocol could read or write the piece after the call. `None` if there is no such registration, or if that part has
/// fewer than `least` bytes.
fn kept(remote: &'static Remote, memory: *mut u8, len: usize, least: usize, role: Role) -> Option<(Kind, Key, usize)> {
    if role != Role::Source {
        return None;
    }
    let library = Library::get();
    let (kept, len, free) = library.arenas.covering(memory.addr(), len)?;
    library.free_kept(free);
    let lost = remote.end().counts().lost;
    let key = (len >= least).then(|| key_of(remote, &kept)).flatten();
    let Some(key) = key else {
        library.free_kept(arenas::leave(kept));
        return None;
    };
    Some((Kind::Kept(Some(kept), lost), key, len))
}

/// Returns the key by which the device knows a piece, and registers the piece if need be. `None` if that is not
/// possible.
fn key_of(remote: &'static Remote, kept: &Kept) -> Option<Key> {
    let stats = &Library::get().stats;
    if let Some(key) = kept.key(remote) {
        stats.count(Event::AllocHit);
        return Some(key);
    }
    stats.count(Event::AllocMiss);
    let (_, bytes) = kept.memory();
    let cost = take_or_make_room(|budget| budget.take_pages(bytes as u64, arenas::limit()), bytes)?;
    let (key, is_new) = tell_device(remote, kept, cost)?;
    stats.count_many(Event::AllocKept, if is_new { cost } else { 0 });
    Some(key)
}

/// Takes bytes of the budget by `take`, and returns its result. If they are not left, ends registrations of pieces that
/// have not been used for long, and tries once more.
fn take_or_make_room<T>(take: impl Fn(&Budget) -> Option<T>, bytes: usize) -> Option<T> {
    let library = Library::get();
    take(&library.pinned).or_else(|| {
        let free = library.arenas.make_room(bytes as u64 + 2 * arenas::PAGE);
        library.free_kept(free);
        if free > 0 { take(&library.pinned) } else { None }
    })
}

/// Registers the whole piece with the device. Returns the key, and whether the registration is new: false if another
/// call has registered the piece meanwhile. `None` if the device refuses: each call then registers its own part. The
/// budget gets `cost` back unless the registration is new and kept.
#[cold]
fn tell_device(remote: &'static Remote, kept: &Kept, cost: u64) -> Option<(Key, bool)> {
    let library = Library::get();
    let (memory, len) = kept.memory();
    // The caller holds the queue pair. So the link ends only after `keep`, and its end also ends this registration.
    let pair = remote.end().qp();
    // SAFETY: the piece is memory of the registered allocator, which never unmaps its arenas.
    let told = unsafe { pair.register(memory, len, Role::Source) };
    let told = told.ok().and_then(|region| match kept.keep(remote, region, cost) {
        Ok(()) => {
            library.stats.count(Event::DirectRegistered);
            Some((region.key, true))
        }
        Err(other) => {
            pair.deregister(region);
            other.map(|key| (key, false))
        }
    });
    if !told.is_some_and(|(_, is_new)| is_new) {
        library.pinned.give_back(cost);
    }
    told
}
