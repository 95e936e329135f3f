//! Records which of several processes holds a connection.
//!
//! The processes that share a listening socket after a fork also share a page of holders. If one of them is asked about
//! a connection that another one holds, it answers with the holder's instance (REDIRECT, P14).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;

use crate::ids::{InstanceId, Tuple};
use crate::os::memfd::Mapping;

/// Connections that a page has room for.
const ENTRIES: usize = BUCKETS * BUCKET;
const BUCKETS: usize = 4096;
/// Entries of a bucket. The hash of a connection decides which bucket its entry is in.
const BUCKET: usize = 4;

/// An entry: the hash of a connection, and the id of its holder. Processes write it without a lock, and may die between
/// two stores. `check` is a hash of the other words, so a reader can detect an entry that is half written.
#[derive(Debug)]
#[repr(C)]
struct Noted {
    connection: AtomicU64,
    holder: [AtomicU64; 2],
    check: AtomicU64,
}

/// The MAP_SHARED page on which the processes that share one service name note the connections that they hold.
///
/// The page is only a hint. A wrong or old entry costs one question to the wrong instance, so entries are never
/// removed: new entries overwrite old ones. A connection whose entry was overwritten stays on TCP.
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
        // to the mapping is handed out. Every bit pattern is a valid atomic, and atomics may be shared with other
        // processes.
        let all = unsafe { &*self.map.as_ptr().cast::<[Noted; ENTRIES]>() };
        let first = connection as usize % BUCKETS * BUCKET;
        all.get(first..first + BUCKET).unwrap_or_default()
    }

    /// Notes that `instance` holds the connection `tuple`.
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
        entry.check.store(hash((connection, words)), Relaxed);
    }

    /// Returns the instance that was last entered as the holder of the connection `tuple`. `None` if the page has no
    /// entry for the connection, or if the entry is half written.
    pub fn holder(&self, tuple: &Tuple) -> Option<InstanceId> {
        let connection = name_of(tuple);
        let mut bucket = self.bucket(connection).iter();
        let entry = bucket.find(|e| e.connection.load(Relaxed) == connection)?;
        let [low, high] = &entry.holder;
        let words = [low.load(Relaxed), high.load(Relaxed)];
        (entry.check.load(Relaxed) == hash((connection, words))).then(|| InstanceId::from_words(words))
    }
}

/// Returns a hash of the connection's addresses, never 0.
fn name_of(tuple: &Tuple) -> u64 {
    hash((tuple.connector(), tuple.acceptor())).max(1)
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
