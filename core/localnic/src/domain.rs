//! The memory that this process has registered, in a table that its peers map. Peers may access the memory in the table
//! and no other. A user of an entry counts itself in, so that no peer accesses memory after its deregistration.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::{Errno, Hidden, Result};
use rdmasock_core::fabric::remote::qp::Role;
use rdmasock_core::lock::Lock;

use crate::pair::Shared;
use crate::pins;

/// The number of entries; the lower 16 bits of a key are the index of its entry.
const ENTRIES: usize = 1 << 16;
/// Bit of an entry's state: the registration is ending.
const CLOSING: u64 = 1 << 31;
/// Bits of an entry's state: the count of its users.
const USERS: u64 = CLOSING - 1;
/// Bits of an entry's roles.
const SOURCE: u64 = 1;
const TARGET: u64 = 2;
const OFFERED: u64 = 4;
const SINK: u64 = 8;
/// Bit of a key: it is the peer's key.
const REMOTE: u32 = 1 << 31;
/// The longest time that an access takes. A user that is still counted after it has died in the access; that entry is
/// never used again.
const ACCESS: Duration = Duration::from_secs(1);

/// A registration. All zeroes: none.
#[repr(C)]
#[derive(Debug)]
struct Entry {
    /// The key without its highest bit in the upper half, 0 if free; below it [`CLOSING`] and the count of users.
    state: AtomicU64,
    start: AtomicU64,
    len: AtomicU64,
    /// A set of [`SOURCE`], [`TARGET`], [`OFFERED`] and [`SINK`].
    roles: AtomicU64,
    /// The hash of the page frames at the registration (`pins`); 0 if it is not checked.
    pages: AtomicU64,
}

/// The size of a table in bytes.
pub const BYTES: usize = ENTRIES * size_of::<Entry>();

/// The table of this process, or of a peer.
#[derive(Debug)]
pub struct Table(Shared);

impl Table {
    /// Makes a table over shared memory; EPROTO if that has fewer than [`BYTES`].
    pub fn new(memory: Shared) -> Result<Self> {
        if memory.len() < BYTES {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Self(memory))
    }

    fn entry(&self, key: u32) -> Option<&Entry> {
        let index = (key & 0xffff) as usize;
        // SAFETY: within the memory, and aligned: the mapping is aligned to a page, and an entry's size is a multiple
        // of 8 bytes. The entry consists of atomics.
        (index < ENTRIES).then(|| unsafe { &*self.0.at().cast::<Entry>().add(index) })
    }

    /// Holds the memory that the peer may write to by this key, as long as the value lives. `None` if the registration
    /// does not contain `len` bytes at `at`.
    pub fn reach(&self, key: u32, at: u64, len: u64) -> Option<InUse<'_>> {
        let is_theirs = key & REMOTE != 0;
        is_theirs.then(|| self.hold(key & !REMOTE, at, len, TARGET)).flatten()
    }

    /// Holds memory as [`reach`](Self::reach) does, by this end's key, as the source of a WRITE.
    pub fn source(&self, key: u32, at: u64, len: u64) -> Option<InUse<'_>> {
        (key & REMOTE == 0).then(|| self.hold(key, at, len, SOURCE)).flatten()
    }

    /// Holds memory as [`reach`](Self::reach) does, for a READ by the peer.
    pub fn offered(&self, key: u32, at: u64, len: u64) -> Option<InUse<'_>> {
        let is_theirs = key & REMOTE != 0;
        is_theirs.then(|| self.hold(key & !REMOTE, at, len, OFFERED)).flatten()
    }

    /// Holds memory as [`source`](Self::source) does, for a READ by this end into it.
    pub fn sink(&self, key: u32, at: u64, len: u64) -> Option<InUse<'_>> {
        (key & REMOTE == 0).then(|| self.hold(key, at, len, SINK)).flatten()
    }

    fn hold(&self, key: u32, at: u64, len: u64, role: u64) -> Option<InUse<'_>> {
        let entry = self.entry(key)?;
        let is_open = |state: u64| state >> 32 == u64::from(key) && key != 0 && state & CLOSING == 0;
        let counted = entry
            .state
            .fetch_update(SeqCst, SeqCst, |state| is_open(state).then(|| state + 1));
        counted.ok()?;
        let held = InUse(entry);
        let (start, bytes) = (entry.start.load(Acquire), entry.len.load(Acquire));
        let end = at.checked_add(len)?;
        let is_for_it = entry.roles.load(Acquire) & role != 0;
        (is_for_it && at >= start && end <= start.checked_add(bytes)?).then_some(held)
    }
}

/// A use of an entry's memory, counted in the entry until dropped.
#[derive(Debug)]
pub struct InUse<'a>(&'a Entry);

impl InUse<'_> {
    /// Returns whether it is still the memory that was registered, in the process `pid` or in this one.
    pub fn is_as_registered(&self, pid: Option<i32>) -> bool {
        let Entry { start, len, pages, .. } = self.0;
        match pages.load(Acquire) {
            0 => true,
            then => pins::pages(pid, start.load(Acquire), len.load(Acquire)) == Some(then),
        }
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, SeqCst);
    }
}

/// This process's table, and its free entries.
pub struct Domain {
    table: Table,
    file: Hidden,
    free: Lock<Free>,
}

#[derive(Debug, Default)]
struct Free {
    given_back: Vec<u16>,
    /// Entries from here on were never used. Entry 0 is not used, so that no key is 0.
    next: usize,
    generation: u32,
}

impl Domain {
    /// Makes a table without registrations.
    pub fn new() -> Result<Self> {
        let (memory, file) = Shared::create(BYTES)?;
        Ok(Self {
            table: Table::new(memory)?,
            file,
            free: Lock::new(Free {
                next: 1,
                ..Free::default()
            }),
        })
    }

    /// Returns the table as this process maps it.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the file that peers map.
    pub fn file(&self) -> &Hidden {
        &self.file
    }

    /// Registers `len` bytes from `start` as long as the value lives; `pages` is the result of [`pins::pin`], or 0.
    /// ENOMEM without a free entry.
    pub fn register(self: &Arc<Self>, start: u64, len: u64, role: Role, pages: u64) -> Result<Registration> {
        let (index, generation) = {
            let mut free = self.free.lock().ok_or(Errno(libc::EDEADLK))?;
            let index = match free.given_back.pop() {
                Some(index) => usize::from(index),
                None if free.next < ENTRIES => {
                    free.next += 1;
                    free.next - 1
                }
                None => return Err(Errno(libc::ENOMEM)),
            };
            free.generation = free.generation.wrapping_add(1) & 0x7fff;
            (index, free.generation)
        };
        // The index fits in 16 bits, and is not 0.
        let key = generation << 16 | index as u32;
        let entry = self.table.entry(key).ok_or(Errno(libc::EINVAL))?;
        entry.start.store(start, Relaxed);
        entry.len.store(len, Relaxed);
        let roles = match role {
            Role::Both => SOURCE | TARGET | SINK,
            Role::Source => SOURCE,
            Role::Target => TARGET | SINK,
            Role::Offered => OFFERED,
        };
        entry.roles.store(roles, Relaxed);
        entry.pages.store(pages, Relaxed);
        entry.state.store(u64::from(key) << 32, Release);
        Ok(Registration {
            domain: Arc::clone(self),
            key,
        })
    }
}

/// Registered memory. Dropping it waits for the current users; afterwards no peer accesses the memory.
pub struct Registration {
    domain: Arc<Domain>,
    key: u32,
}

impl Registration {
    /// Returns the key for this end's work requests.
    pub fn local_key(&self) -> u32 {
        self.key
    }

    /// Returns the key for the peer's work requests.
    pub fn remote_key(&self) -> u32 {
        self.key | REMOTE
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(entry) = self.domain.table.entry(self.key) else {
            return;
        };
        entry.state.fetch_or(CLOSING, SeqCst);
        let begun = Instant::now();
        while entry.state.load(SeqCst) & USERS != 0 {
            if begun.elapsed() > ACCESS {
                return;
            }
            std::thread::yield_now();
        }
        entry.state.store(0, SeqCst);
        if let Some(mut free) = self.domain.free.lock() {
            free.given_back.push((self.key & 0xffff) as u16);
        }
    }
}

static DOMAIN: Lock<Option<Arc<Domain>>> = Lock::new(None);

/// Returns this process's domain; makes it first if needed.
pub fn of_process() -> Result<Arc<Domain>> {
    let mut domain = DOMAIN.lock().ok_or(Errno(libc::EDEADLK))?;
    match &*domain {
        Some(domain) => Ok(Arc::clone(domain)),
        None => {
            let new = Arc::new(Domain::new()?);
            *domain = Some(Arc::clone(&new));
            Ok(new)
        }
    }
}

/// Forgets the domain in a fork child: the registrations are the parent's.
///
/// # Safety
/// No other thread exists.
pub unsafe fn forget() {
    // SAFETY: by this function's contract.
    unsafe {
        std::mem::forget(DOMAIN.get_unlocked().take());
        DOMAIN.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reaches_what_was_registered_by_its_own_side_and_no_longer() {
        let domain = Arc::new(Domain::new().unwrap());
        let table = domain.table();
        let memory = domain.register(1000, 100, Role::Both, 0).unwrap();
        let (local, remote) = (memory.local_key(), memory.remote_key());
        assert!(table.reach(remote, 1000, 100).is_some() && table.reach(remote, 1099, 1).is_some());
        assert!(table.source(local, 1000, 100).is_some());
        for (at, len) in [(999, 1), (1000, 101), (1100, 1), (u64::MAX, 2)] {
            assert!(table.reach(remote, at, len).is_none(), "{at} {len}");
        }
        assert!(table.reach(local, 1000, 1).is_none() && table.source(remote, 1000, 1).is_none());
        drop(memory);
        assert!(table.reach(remote, 1000, 1).is_none());
        let again = domain.register(1000, 100, Role::Both, 0).unwrap();
        assert!(table.reach(remote, 1000, 1).is_none(), "a stale key");
        assert!(table.reach(again.remote_key(), 1000, 1).is_some());
        assert!(table.reach(0, 0, 0).is_none() && table.reach(u32::MAX, 0, 0).is_none());
    }

    #[test]
    fn memory_is_reached_in_the_roles_that_it_was_registered_for() {
        let domain = Arc::new(Domain::new().unwrap());
        let table = domain.table();
        for (role, is_source, is_target, is_offered, is_sink) in [
            (Role::Both, true, true, false, true),
            (Role::Source, true, false, false, false),
            (Role::Target, false, true, false, true),
            (Role::Offered, false, false, true, false),
        ] {
            let memory = domain.register(1000, 100, role, 0).unwrap();
            assert_eq!(
                table.source(memory.local_key(), 1000, 1).is_some(),
                is_source,
                "{role:?}"
            );
            assert_eq!(
                table.reach(memory.remote_key(), 1000, 1).is_some(),
                is_target,
                "{role:?}"
            );
            assert_eq!(table.sink(memory.local_key(), 1000, 1).is_some(), is_sink, "{role:?}");
            assert_eq!(
                table.offered(memory.remote_key(), 1000, 1).is_some(),
                is_offered,
                "{role:?}"
            );
        }
    }

    #[test]
    fn who_gives_memory_up_waits_for_who_is_in_it() {
        let domain = Arc::new(Domain::new().unwrap());
        let memory = domain.register(1000, 100, Role::Target, 0).unwrap();
        let held = domain.table().reach(memory.remote_key(), 1000, 1).unwrap();
        std::thread::scope(|scope| {
            let giving_up = scope.spawn(move || drop(memory));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!giving_up.is_finished());
            drop(held);
            giving_up.join().unwrap();
        });
    }
}
