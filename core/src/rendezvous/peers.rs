//! The instances behind a name, and what earlier connections to a destination have shown.
//!
//! [`PeerPage`] and [`HolderPage`] are shared by a listener and its forked workers. The first has one slot a live
//! instance. A worker that is asked for a connection which another one holds answers with this list (REDIRECT, P14), or
//! with the holder alone, if the second page has noted it. [`Absent`] is in the connector, so that a server without the
//! library costs one question per lifetime of an entry, not per connection. None of them asks or answers by itself.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::ids::{InstanceId, Tuple};
use crate::os::memfd::Mapping;
use crate::wire::MAX_REDIRECT;

/// Instances that a page holds, at most.
pub const SLOTS: usize = MAX_REDIRECT;

/// Connections that a page of holders remembers, at most.
const ENTRIES: usize = BUCKETS * BUCKET;
const BUCKETS: usize = 1024;
/// Entries of a bucket. The hash of a connection names the bucket that its entry is in.
const BUCKET: usize = 4;

/// The slot of an instance. All zeroes: free and never used.
#[derive(Debug)]
#[repr(C)]
struct Slot {
    /// pid << 32 | generation << 1 | live. The process whose compare-and-swap changes this word owns the slot. With a
    /// pid and without `live`, the owner is writing the id (or died doing so). With `live`, the id can be read.
    owner: AtomicU64,
    id: [AtomicU64; 2],
}

const LIVE: u64 = 1;

const fn pid_of(owner: u64) -> u32 {
    (owner >> 32) as u32
}

/// Returns the word for a new owner. Its generation makes it differ from all recent ones of the slot, so that a reader
/// which is overtaken notices.
const fn next_owner(old: u64, pid: u32) -> u64 {
    (pid as u64) << 32 | (old as u32 as u64).wrapping_add(2) & 0xFFFF_FFFE
}

/// The MAP_SHARED page of the live instances behind one listening name. Workers inherit it by fork.
///
/// A process that dies at any instruction leaves at worst a slot that is taken over once its pid is gone. A hostile
/// worker may write any bytes into the page; the others only read wrong ids then.
#[derive(Debug)]
pub struct PeerPage {
    map: Mapping,
}

impl PeerPage {
    /// Creates a page of free slots. Fails with ENOMEM and the like.
    pub fn new() -> Result<Self, Errno> {
        Mapping::anonymous(size_of::<[Slot; SLOTS]>()).map(|map| Self { map })
    }

    fn slots(&self) -> &[Slot; SLOTS] {
        // SAFETY: the mapping is as large as the array, aligned to a page and lives as long as `self`. No other pointer
        // to it is handed out. Zeroes and all other bits are valid atomics, and atomics may be shared with other
        // processes.
        unsafe { &*self.map.as_ptr().cast::<[Slot; SLOTS]>() }
    }

    /// Enters instance `id` of process `pid` (the caller's). Returns false if all slots belong to live processes.
    pub fn register(&self, pid: u32, id: &InstanceId) -> bool {
        // Free slots first: a process in a pid namespace of its own looks dead to the others.
        self.claim(pid, id, |owner| pid_of(owner) == 0) || self.claim(pid, id, |owner| !is_alive(pid_of(owner)))
    }

    fn claim(&self, pid: u32, id: &InstanceId, free: impl Fn(u64) -> bool) -> bool {
        self.slots().iter().any(|slot| {
            let old = slot.owner.load(Relaxed);
            let mine = next_owner(old, pid);
            // Acquire orders the writes to `id` after the claim; see the fence for the reader's side.
            if !free(old) || slot.owner.compare_exchange(old, mine, Acquire, Relaxed).is_err() {
                return false;
            }
            // Pairs with the reader's fence: a reader that sees a word of this id sees the claim too.
            fence(Release);
            for (word, value) in slot.id.iter().zip(id.to_words()) {
                word.store(value, Relaxed);
            }
            // Pairs with the Acquire load in `read`.
            slot.owner.store(mine | LIVE, Release);
            true
        })
    }

    /// Returns the instances whose processes exist, in no order. At most [`SLOTS`].
    pub fn list(&self) -> Vec<InstanceId> {
        let entries = self.slots().iter().filter_map(read);
        entries.filter(|(pid, _)| is_alive(*pid)).map(|(_, id)| id).collect()
    }
}

/// Returns the pid and id in a slot. `None` if it is not live, or changes while it is read.
fn read(slot: &Slot) -> Option<(u32, InstanceId)> {
    // Pairs with the Release store in `claim`.
    let before = slot.owner.load(Acquire);
    if before & LIVE == 0 {
        return None;
    }
    let [low, high] = &slot.id;
    let id = InstanceId::from_words([low.load(Relaxed), high.load(Relaxed)]);
    // Pairs with the Release fence in `claim`.
    fence(Acquire);
    (slot.owner.load(Relaxed) == before).then_some((pid_of(before), id))
}

/// Returns whether the process exists, as far as can be told. A zombie does.
fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

/// A connection and its holder. Written without a lock, by processes that may die between two stores: `check` proves
/// that the words belong together.
#[derive(Debug)]
#[repr(C)]
struct Noted {
    connection: AtomicU64,
    holder: [AtomicU64; 2],
    check: AtomicU64,
}

/// The MAP_SHARED page on which the processes behind one listening name note the connections that they hold. A process
/// that is asked on the name for another's connection redirects to its holder, instead of to all processes (REDIRECT,
/// P14). Otherwise a server that forks for each connection would be asked as often as the square of their number.
///
/// The page is only a hint. A wrong or old entry costs a question in vain, so no entry is ever removed: new entries
/// overwrite old ones.
#[derive(Debug)]
pub struct HolderPage {
    map: Mapping,
}

impl HolderPage {
    /// Creates an empty page. Fails with ENOMEM and the like.
    pub fn new() -> Result<Self, Errno> {
        Mapping::anonymous(size_of::<[Noted; ENTRIES]>()).map(|map| Self { map })
    }

    fn bucket(&self, connection: u64) -> &[Noted] {
        // SAFETY: the mapping is as large as the array, aligned to a page and lives as long as `self`. No other pointer
        // to it is handed out. Zeroes and all other bits are valid atomics, and atomics may be shared with other
        // processes.
        let all = unsafe { &*self.map.as_ptr().cast::<[Noted; ENTRIES]>() };
        let first = connection as usize % BUCKETS * BUCKET;
        all.get(first..first + BUCKET).unwrap_or_default()
    }

    /// Notes that the instance holds the connection.
    pub fn enter(&self, tuple: &Tuple, instance: &InstanceId) {
        let connection = name_of(tuple);
        let bucket = self.bucket(connection);
        let is_its = |e: &&Noted| [0, connection].contains(&e.connection.load(Relaxed));
        let any = bucket.get((connection >> 60) as usize % BUCKET);
        let Some(entry) = bucket.iter().find(is_its).or(any) else {
            return;
        };
        let words = instance.to_words();
        entry.connection.store(connection, Relaxed);
        for (word, value) in entry.holder.iter().zip(words) {
            word.store(value, Relaxed);
        }
        entry.check.store(check(connection, words), Relaxed);
    }

    /// Returns the instance that has noted last that it holds the connection. `None` if no entry says so, or if the
    /// entry is half written.
    pub fn holder(&self, tuple: &Tuple) -> Option<InstanceId> {
        let connection = name_of(tuple);
        let mut bucket = self.bucket(connection).iter();
        let entry = bucket.find(|e| e.connection.load(Relaxed) == connection)?;
        let [low, high] = &entry.holder;
        let words = [low.load(Relaxed), high.load(Relaxed)];
        (entry.check.load(Relaxed) == check(connection, words)).then(|| InstanceId::from_words(words))
    }
}

/// Returns a hash of the connection's addresses, never 0.
fn name_of(tuple: &Tuple) -> u64 {
    let mut hasher = DefaultHasher::new();
    (tuple.connector(), tuple.acceptor()).hash(&mut hasher);
    hasher.finish().max(1)
}

fn check(connection: u64, words: [u64; 2]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (connection, words).hash(&mut hasher);
    hasher.finish()
}

/// Destinations where no program with the library answers, or none that is trusted. Each is remembered for a limited
/// time. Bounded. The caller locks it and passes the time in.
#[derive(Debug)]
pub struct Absent {
    until: HashMap<SocketAddr, Instant>,
    capacity: usize,
}

impl Absent {
    /// Remembers no destination yet, and at most `capacity` (at least one).
    pub fn new(capacity: usize) -> Self {
        Self {
            until: HashMap::new(),
            capacity: capacity.max(1),
        }
    }

    /// Returns whether `destination` is remembered at `now`.
    pub fn has(&self, destination: &SocketAddr, now: Instant) -> bool {
        self.until.get(destination).is_some_and(|until| now < *until)
    }

    /// Remembers `destination` from `now` for `lifetime`. With no room left, first forgets those whose time is over,
    /// then the one whose time would be over next.
    pub fn insert(&mut self, destination: SocketAddr, now: Instant, lifetime: Duration) {
        // A lifetime beyond the range of the clock is not remembered.
        let Some(until) = now.checked_add(lifetime) else {
            return;
        };
        if !self.until.contains_key(&destination) && self.until.len() >= self.capacity {
            self.make_room(now);
        }
        self.until.insert(destination, until);
    }

    fn make_room(&mut self, now: Instant) {
        self.until.retain(|_, until| now < *until);
        if self.until.len() >= self.capacity
            && let Some(next) = self.until.iter().min_by_key(|(_, at)| **at).map(|(addr, _)| *addr)
        {
            self.until.remove(&next);
        }
    }
}

#[cfg(test)]
mod tests;
