//! Which instance holds a connection.
//!
//! [`HolderPage`] is shared by a listener and its forked workers. A worker that is asked for a connection which another
//! one holds answers with the holder (REDIRECT, P14).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;

use crate::ids::{InstanceId, Tuple};
use crate::os::memfd::Mapping;

/// Connections that a page of holders remembers, at most.
const ENTRIES: usize = BUCKETS * BUCKET;
const BUCKETS: usize = 4096;
/// Entries of a bucket. The hash of a connection names the bucket that its entry is in.
const BUCKET: usize = 4;

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
/// that is asked on the name for another's connection redirects to its holder (REDIRECT, P14).
///
/// The page is only a hint. A wrong or old entry costs a question in vain, so no entry is ever removed: new entries
/// overwrite old ones. A connection whose entry was overwritten stays on TCP.
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
        entry.check.store(hash((connection, words)), Relaxed);
    }

    /// Returns the instance that has noted last that it holds the connection. `None` if no entry says so, or if the
    /// entry is half written.
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
