//! Who is behind a name, and what earlier connections to a destination have taught.
//!
//! [`PeerPage`]: shared by a listener and its forked workers, one slot a live instance; a worker that
//! is asked for a connection that another one holds answers with this list (REDIRECT, P14).
//! [`DestinationCache`]: in the connector, so that a server without the library costs one question per
//! lifetime, not per connection. Neither does more than remember.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::ids::InstanceId;
use crate::os::memfd::Mapping;
use crate::wire::MAX_REDIRECT;

/// How many instances a page holds.
pub const SLOTS: usize = MAX_REDIRECT;

/// One instance. All zeroes: free and never used.
#[derive(Debug)]
#[repr(C)]
struct Slot {
    /// pid << 32 | generation << 1 | live. Who changes it from what it was owns the slot: with a pid
    /// and not live, its owner is writing the id (or died doing so); live, the id can be read.
    owner: AtomicU64,
    id: [AtomicU64; 2],
}

const LIVE: u64 = 1;

const fn pid_of(owner: u64) -> u32 {
    (owner >> 32) as u32
}

/// The word for a new owner: the generation makes it differ from all recent ones of the slot, so that
/// a reader which is overtaken notices.
const fn next_owner(old: u64, pid: u32) -> u64 {
    (pid as u64) << 32 | (old as u32 as u64).wrapping_add(2) & 0xFFFF_FFFE
}

/// The MAP_SHARED page of the live instances behind one listening name. Workers inherit it by fork.
///
/// A process that dies at any instruction leaves at worst a slot that is taken over once its pid is gone.
/// Whatever a hostile worker writes into it, the others only read wrong ids.
#[derive(Debug)]
pub struct PeerPage {
    map: Mapping,
}

impl PeerPage {
    /// A page of free slots. ENOMEM and the like.
    pub fn new() -> Result<Self, Errno> {
        Mapping::anonymous(size_of::<[Slot; SLOTS]>()).map(|map| Self { map })
    }

    fn slots(&self) -> &[Slot; SLOTS] {
        // SAFETY: the mapping is as large as the array, aligned to a page, lives as long as `self`, and
        // is never handed out otherwise; zeroes and all other bits are valid atomics, and atomics may
        // be shared with other processes.
        unsafe { &*self.map.as_ptr().cast::<[Slot; SLOTS]>() }
    }

    /// Enters instance `id` of process `pid` (the caller's). False if all slots belong to live processes.
    pub fn register(&self, pid: u32, id: &InstanceId) -> bool {
        // Free slots first: a process in a pid namespace of its own looks dead to the others.
        self.claim(pid, id, |owner| pid_of(owner) == 0) || self.claim(pid, id, |owner| !is_alive(pid_of(owner)))
    }

    fn claim(&self, pid: u32, id: &InstanceId, free: impl Fn(u64) -> bool) -> bool {
        self.slots().iter().any(|slot| {
            let old = slot.owner.load(Ordering::Relaxed);
            let mine = next_owner(old, pid);
            // Acquire orders the writes to `id` after the claim; see the fence for the reader's side.
            if !free(old)
                || slot
                    .owner
                    .compare_exchange(old, mine, Ordering::Acquire, Ordering::Relaxed)
                    .is_err()
            {
                return false;
            }
            // Pairs with the reader's fence: a reader that sees a word of this id sees the claim too.
            fence(Ordering::Release);
            for (word, value) in slot.id.iter().zip(id.to_words()) {
                word.store(value, Ordering::Relaxed);
            }
            // Pairs with the Acquire load in `read`.
            slot.owner.store(mine | LIVE, Ordering::Release);
            true
        })
    }

    /// The instances whose processes exist, in no order. At most [`SLOTS`].
    pub fn list(&self) -> Vec<InstanceId> {
        let entries = self.slots().iter().filter_map(read);
        entries.filter(|(pid, _)| is_alive(*pid)).map(|(_, id)| id).collect()
    }
}

/// The pid and id in a slot, if it is live and stays so while it is read.
fn read(slot: &Slot) -> Option<(u32, InstanceId)> {
    // Pairs with the Release store in `claim`.
    let before = slot.owner.load(Ordering::Acquire);
    if before & LIVE == 0 {
        return None;
    }
    let [low, high] = &slot.id;
    let id = InstanceId::from_words([low.load(Ordering::Relaxed), high.load(Ordering::Relaxed)]);
    // Pairs with the Release fence in `claim`.
    fence(Ordering::Acquire);
    (slot.owner.load(Ordering::Relaxed) == before).then_some((pid_of(before), id))
}

/// Does the process exist, as far as can be told? A zombie does.
fn is_alive(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw) else {
        return false;
    };
    test_kill_process(pid) != Err(Errno::SRCH)
}

/// What is known about a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// These instances answer for it; the one to ask first comes first.
    Present(Vec<InstanceId>),
    /// No program with the library listens there, or none that is trusted.
    Absent,
}

#[derive(Debug)]
struct Entry {
    answer: Answer,
    expires: Instant,
}

/// What connections to a destination have taught, each fact for a limited time. Bounded; the caller
/// locks and passes the time in.
#[derive(Debug)]
pub struct DestinationCache {
    entries: HashMap<SocketAddr, Entry>,
    capacity: usize,
}

impl DestinationCache {
    /// An empty cache of at most `capacity` destinations (at least one).
    pub fn new(capacity: usize) -> Self {
        Self {
            entries: HashMap::new(),
            capacity: capacity.max(1),
        }
    }

    /// What is known about `destination` at `now`, if anything.
    pub fn get(&self, destination: &SocketAddr, now: Instant) -> Option<&Answer> {
        self.entries
            .get(destination)
            .filter(|entry| now < entry.expires)
            .map(|entry| &entry.answer)
    }

    /// Remembers `answer` from `now` for `lifetime`. When full, what has expired goes first, then what
    /// would expire next.
    pub fn insert(&mut self, destination: SocketAddr, answer: Answer, now: Instant, lifetime: Duration) {
        // A lifetime beyond the end of time is not worth remembering.
        let Some(expires) = now.checked_add(lifetime) else {
            return;
        };
        if !self.entries.contains_key(&destination) && self.entries.len() >= self.capacity {
            self.make_room(now);
        }
        self.entries.insert(destination, Entry { answer, expires });
    }

    /// Forgets everything, as a fork child in another place may want to.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    fn make_room(&mut self, now: Instant) {
        self.entries.retain(|_, entry| now < entry.expires);
        if self.entries.len() >= self.capacity
            && let Some(next) = self
                .entries
                .iter()
                .min_by_key(|(_, e)| e.expires)
                .map(|(addr, _)| *addr)
        {
            self.entries.remove(&next);
        }
    }
}

#[cfg(test)]
mod tests;
