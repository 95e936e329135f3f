//! The memory that this process has registered, in a table that its peers map: what they may reach is in there, and
//! nothing else. Who uses an entry counts itself in, so that nobody reaches memory after it was given up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::errno::{Errno, Result};
use rdmasock_core::fabric::plugin::host::Hidden;
use rdmasock_core::fabric::remote::qp::Role;
use rdmasock_core::lock::Lock;

use crate::pair::Shared;
use crate::pins;

/// Entries; a key names one in its lower 16 bits.
const ENTRIES: usize = 1 << 16;
/// In an entry's state: it is being given up.
const CLOSING: u64 = 1 << 31;
/// In an entry's state: those who use it.
const USERS: u64 = CLOSING - 1;
/// In an entry's roles.
const SOURCE: u64 = 1;
const TARGET: u64 = 2;
const OFFERED: u64 = 4;
const SINK: u64 = 8;
/// In a key: it is for the peer.
const REMOTE: u32 = 1 << 31;
/// Longest time that an access takes: who has not left by then has died in it, and the entry is never used again.
const ACCESS: Duration = Duration::from_secs(1);

/// One registration. All zeroes: none.
#[repr(C)]
#[derive(Debug)]
struct Entry {
    /// Key without its highest bit in the upper half, 0 if free; then [`CLOSING`] and the users.
    state: AtomicU64,
    start: AtomicU64,
    len: AtomicU64,
    /// Of [`SOURCE`], [`TARGET`], [`OFFERED`] and [`SINK`].
    roles: AtomicU64,
    /// What tells its pages from others (`pins`); 0: nothing does.
    pages: AtomicU64,
}

/// Bytes of a table.
pub const BYTES: usize = ENTRIES * size_of::<Entry>();

/// A table: this process's, or a peer's.
#[derive(Debug)]
pub struct Table(Shared);

impl Table {
    /// Over memory of [`BYTES`].
    pub fn new(memory: Shared) -> Result<Self> {
        if memory.len() < BYTES {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Self(memory))
    }

    fn entry(&self, key: u32) -> Option<&Entry> {
        let index = (key & 0xffff) as usize;
        // SAFETY: within the memory, aligned (the mapping is to a page, an entry a multiple of 8 bytes), and atomics
        // only.
        (index < ENTRIES).then(|| unsafe { &*self.0.at().cast::<Entry>().add(index) })
    }

    /// Holds the memory that the peer may reach by this key for as long as the value lives, if `len` bytes at `at` are
    /// in it.
    pub fn reach(&self, key: u32, at: u64, len: u64) -> Option<InUse<'_>> {
        let is_theirs = key & REMOTE != 0;
        is_theirs.then(|| self.hold(key & !REMOTE, at, len, TARGET)).flatten()
    }

    /// As [`reach`](Self::reach), by the key of this end.
    pub fn source(&self, key: u32, at: u64, len: u64) -> Option<InUse<'_>> {
        (key & REMOTE == 0).then(|| self.hold(key, at, len, SOURCE)).flatten()
    }

    /// As [`reach`](Self::reach), for what the peer reads there.
    pub fn offered(&self, key: u32, at: u64, len: u64) -> Option<InUse<'_>> {
        let is_theirs = key & REMOTE != 0;
        is_theirs.then(|| self.hold(key & !REMOTE, at, len, OFFERED)).flatten()
    }

    /// As [`source`](Self::source), for what this end reads into it.
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

/// Somebody reaches the memory of an entry.
#[derive(Debug)]
pub struct InUse<'a>(&'a Entry);

impl InUse<'_> {
    /// Whether it is still the memory that was registered, in the process `pid` or in this one.
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

/// This process's table, and which of its entries are free.
pub struct Domain {
    table: Table,
    file: Hidden,
    free: Lock<Free>,
}

#[derive(Debug, Default)]
struct Free {
    given_back: Vec<u16>,
    /// From here on none was ever used. The first is not used, so that no key is 0.
    next: usize,
    generation: u32,
}

impl Domain {
    /// A new one, without registrations.
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

    /// The table as this process has it.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// What peers map.
    pub fn file(&self) -> &Hidden {
        &self.file
    }

    /// Registers `len` bytes from `start` for as long as the value lives; `pages` is what [`pins::pin`] gives, or 0.
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
        // The index fits, and is not 0.
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

/// Registered memory; when it is dropped, nobody reaches it any more.
pub struct Registration {
    domain: Arc<Domain>,
    key: u32,
}

impl Registration {
    /// Key of this end's work requests.
    pub fn local_key(&self) -> u32 {
        self.key
    }

    /// Key of the peer's.
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

/// The one of this process.
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

/// In a fork child: what the parent has registered is the parent's.
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
