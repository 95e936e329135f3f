//! Memory of the program that a link's device accesses in a direct transfer, while a call waits. To *register* the
//! memory gives the device access to it, and returns a key. The registration ends with the call, or lasts beyond it if
//! the memory comes from the *registered allocator* (librdmasock_alloc.so, see `config::arenas`). That allocator's
//! memory consists of *pieces*, each of which is registered as a whole. The *budget* bounds how many bytes are
//! registered at a time. A *bulk queue pair* is a link's second queue pair, which carries its direct transfers.

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
    /// It ends with the call. The number is what it takes of the budget, bytes.
    Own(Region, u64),
    /// It is the registration of a piece, and lasts beyond the call. The reference keeps the piece in use during the
    /// call. The number is how many bulk queue pairs the link had lost when the call began.
    Kept(Option<Arc<Kept>>, u64),
}

/// The use of a registration by one call. The use ends when the value is dropped.
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
    /// Registers the first bytes of `memory` for `role`: at most `len` bytes, at least `least`. `None` if that is not
    /// possible: the bytes then go through the rings. A failed registration is counted ([`Event::DirectUnpinned`]).
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
        // The queue pair is held until the value is dropped. Otherwise `remote` could become the end of another link
        // meanwhile, with another device.
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

    /// Returns whether the calling thread is in a fork child, in which the parent's call goes on. The child has neither
    /// the link nor the registration.
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

/// Registers memory for one call: up to `len` bytes, as far as the budget goes. Returns the registration, its key and
/// the number of bytes. `None` if the budget has fewer than `least` bytes left, or the device refuses.
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
    // SAFETY: by the contract, the memory is the program's until the `Pinned` is dropped, which ends the registration.
    let Ok(region) = (unsafe { remote.end().qp().register(memory, len, role) }) else {
        Library::get().pinned.give_back(cost);
        return None;
    };
    remote.costs.on_registered(len, now_ns() - begun);
    Some((Kind::Own(region, cost), region.key, len))
}

/// Uses the registration of the piece in which the memory begins, and makes it first if need be. Returns it, its key,
/// and how many of the `len` bytes lie in the piece. `None` if the memory lies in no piece, if fewer than `least` of
/// its bytes do, or if the piece cannot be registered. Also `None` if the peer's device is to access the memory, which
/// every role but `Source` allows. A peer that breaks the protocol could then read or write the piece after the call.
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

/// Returns the key by which the device knows a piece. Registers the piece first if the device does not know it. `None`
/// if the piece cannot be registered.
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

/// Returns the result of `take`, which takes bytes of the budget, or returns `None` if too few are left. In that case
/// ends the registrations of the pieces that were unused for longest, for `bytes` bytes and a little more. If that
/// frees any bytes, calls `take` once more.
fn take_or_make_room<T>(take: impl Fn(&Budget) -> Option<T>, bytes: usize) -> Option<T> {
    let library = Library::get();
    take(&library.pinned).or_else(|| {
        let free = library.arenas.make_room(bytes as u64 + 2 * arenas::PAGE);
        library.free_kept(free);
        if free > 0 { take(&library.pinned) } else { None }
    })
}

/// Registers the whole piece with the device. Returns the key, and whether the registration is new: false if another
/// call has registered the piece meanwhile. `None` if the device refuses: each call then registers only its own memory.
/// Gives `cost` back to the budget unless the result is a new registration.
#[cold]
fn tell_device(remote: &'static Remote, kept: &Kept, cost: u64) -> Option<(Key, bool)> {
    let library = Library::get();
    let (memory, len) = kept.memory();
    // The caller holds the queue pair. So the link ends only after `keep` has recorded the registration. The link's end
    // also ends the recorded registrations.
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
