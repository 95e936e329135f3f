//! Memory of the program that a link's device reaches for as long as a call waits: registered for that, or before
//! (`ahead.rs`).

use std::sync::Arc;

use rdmasock_core::fabric::remote::qp::{Key, QueuePair, Region, Role};
use rdmasock_core::os::thread;
use rdmasock_core::stats::Event;

use crate::ahead::{Known, Range};
use crate::budget;
use crate::library::Library;
use crate::link::Remote;

/// What a registration is.
enum Kind {
    /// Of the call, which ends it; with what it takes of the budget.
    Own(Region, u64),
    /// Of the range, which stays as long as this; and how many bulk queue pairs the link had lost before.
    Ahead(Arc<Range>, u64),
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
        let stats = &Library::get().stats;
        if let Some(pinned) = Self::ahead(remote, memory, len, role) {
            stats.count(Event::DirectAhead);
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
        let budget = &Library::get().pinned;
        let (len, cost) = budget.take(len, least, budget::limit())?;
        // SAFETY: by the contract.
        let Ok(region) = (unsafe { remote.end().qp().register(memory, len, role) }) else {
            budget.give_back(cost);
            return None;
        };
        Some(Self {
            remote,
            kind: Kind::Own(region, cost),
            key: region.key,
            len,
            thread: thread::current().tid(),
        })
    }

    fn ahead(remote: &'static Remote, memory: *mut u8, len: usize, role: Role) -> Option<Self> {
        if role == Role::Offered {
            // The peer could read what the program has there later, and has not sent.
            return None;
        }
        let range = Library::get().ahead.covering(memory.addr(), len, role)?;
        let lost = remote.end().direct_counts().lost;
        let known = range.key(remote, role);
        let key = known.or_else(|| tell_device(remote, &range, role))?;
        Some(Self {
            remote,
            kind: Kind::Ahead(range, lost),
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
        match &self.kind {
            Kind::Own(region, cost) => {
                self.remote.end().qp().deregister(*region);
                Library::get().pinned.give_back(*cost);
            }
            // Without a bulk queue pair nobody has said that nothing is under way any more, and what comes late is to
            // find the memory out of reach. Others who use it go on by rings.
            Kind::Ahead(range, lost) => {
                let remote = self.remote;
                if remote.is_down() || remote.end().direct_counts().lost != *lost {
                    let registrations = range.take_of(remote);
                    Library::get().pinned.give_back(Known::end_all(registrations));
                }
            }
        }
    }
}

/// The device hears of all of the range, which is as good as registered: without room in the budget for it, or where
/// the device refuses, each call registers its own part.
#[cold]
fn tell_device(remote: &'static Remote, range: &Range, role: Role) -> Option<Key> {
    let library = Library::get();
    let (memory, len) = range.memory();
    // So that the link's end comes after what is kept, and finds it.
    remote.with_pair(|pair| {
        let (_, cost) = library.pinned.take(len, len, budget::limit())?;
        // SAFETY: the program has said that it is there until it says otherwise, which it cannot while a call has it.
        let told = unsafe { pair.register(memory, len, role) };
        let kept = told.map(|region| (region, range.keep(remote, role, region, cost)));
        match kept {
            Ok((region, Ok(()))) => {
                library.stats.count(Event::DirectRegistered);
                Some(region.key)
            }
            Ok((region, Err(other))) => {
                pair.deregister(region);
                library.pinned.give_back(cost);
                other
            }
            Err(_) => {
                library.pinned.give_back(cost);
                None
            }
        }
    })?
}
