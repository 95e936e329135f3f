//! A page on which the processes behind one listening name note the connections that they hold. A process that is asked
//! on the name for another's connection redirects to its holder, instead of to all processes (REDIRECT, P14). Otherwise
//! a server that forks for each connection would be asked as often as the square of their number.
//!
//! The page is only a hint. A wrong or old entry costs a question in vain, so no entry is ever removed: new entries
//! overwrite old ones.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;

use crate::ids::{InstanceId, Tuple};
use crate::os::memfd::Mapping;

/// Connections that a page remembers, at most.
const ENTRIES: usize = BUCKETS * BUCKET;
const BUCKETS: usize = 1024;
/// Entries of a bucket. The hash of a connection names the bucket that its entry is in.
const BUCKET: usize = 4;

/// A connection and its holder. Written without a lock, by processes that may die between two stores: `check` proves
/// that the words belong together.
#[derive(Debug)]
#[repr(C)]
struct Entry {
    connection: AtomicU64,
    holder: [AtomicU64; 2],
    check: AtomicU64,
}

/// Memory that a listener shares with its forked workers.
#[derive(Debug)]
pub struct HolderPage {
    map: Mapping,
}

impl HolderPage {
    /// Creates an empty page. Fails with ENOMEM and the like.
    pub fn new() -> Result<Self, Errno> {
        Mapping::anonymous(size_of::<[Entry; ENTRIES]>()).map(|map| Self { map })
    }

    fn bucket(&self, connection: u64) -> &[Entry] {
        // SAFETY: the mapping is as large as the array, aligned to a page and lives as long as `self`. No other pointer
        // to it is handed out. Zeroes and all other bits are valid atomics, and atomics may be shared with other
        // processes.
        let all = unsafe { &*self.map.as_ptr().cast::<[Entry; ENTRIES]>() };
        let first = connection as usize % BUCKETS * BUCKET;
        all.get(first..first + BUCKET).unwrap_or_default()
    }

    /// Notes that the instance holds the connection.
    pub fn enter(&self, tuple: &Tuple, instance: &InstanceId) {
        let connection = name_of(tuple);
        let bucket = self.bucket(connection);
        let is_its = |e: &&Entry| [0, connection].contains(&e.connection.load(Relaxed));
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn tuple(port: u16) -> Tuple {
        let client = SocketAddr::from(([127, 0, 0, 1], port));
        Tuple::new(client, SocketAddr::from(([127, 0, 0, 1], 5432)))
    }

    fn id(n: u16) -> InstanceId {
        InstanceId::from_words([n.into(), 7])
    }

    #[test]
    fn the_last_who_said_so_holds_a_connection() {
        let page = HolderPage::new().unwrap();
        assert_eq!(page.holder(&tuple(1)), None);
        page.enter(&tuple(1), &id(1));
        page.enter(&tuple(2), &id(2));
        page.enter(&tuple(1), &id(3));
        assert_eq!(page.holder(&tuple(1)), Some(id(3)));
        assert_eq!(page.holder(&tuple(2)), Some(id(2)));
        assert_eq!(page.holder(&tuple(3)), None);
    }

    #[test]
    fn many_connections_are_remembered_and_more_are_never_taken_for_others() {
        let page = HolderPage::new().unwrap();
        (1..=1000).for_each(|n| page.enter(&tuple(n), &id(n)));
        let found = (1..=1000).filter(|n| page.holder(&tuple(*n)) == Some(id(*n)));
        assert!(found.count() > 980);
        (1..=50_000).for_each(|n| page.enter(&tuple(n), &id(n)));
        let wrong = (1..=50_000).filter(|n| page.holder(&tuple(*n)).is_some_and(|h| h != id(*n)));
        assert_eq!(wrong.count(), 0);
        let found = (1..=50_000).filter(|n| page.holder(&tuple(*n)).is_some());
        assert!(found.count() > BUCKETS);
    }

    #[test]
    fn what_was_half_written_is_not_believed() {
        let page = HolderPage::new().unwrap();
        page.enter(&tuple(1), &id(1));
        let connection = name_of(&tuple(1));
        let bucket = page.bucket(connection);
        let entry = bucket.iter().find(|e| e.connection.load(Relaxed) == connection);
        entry.unwrap().holder[0].store(99, Relaxed);
        assert_eq!(page.holder(&tuple(1)), None);
    }
}
