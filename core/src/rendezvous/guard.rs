//! Limits on the load of a control port: rate limits, and the memory of questions that were taken (docs/protocol.md,
//! P64, P65). The clock (ns) is an argument; all tables are bounded.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::net::IpAddr;

const SECOND: u64 = 1_000_000_000;

/// A limit on datagrams or questions.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// How many may come in a second, on average.
    pub per_second: u32,
    /// How many may come at once.
    pub burst: u32,
}

/// A token bucket, counted in time: a token is the interval between two events at the rate.
#[derive(Debug, Clone, Copy)]
pub struct Bucket {
    rate: Rate,
    /// Saved tokens, ns, at most a burst.
    saved: u64,
    at: u64,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(rate: Rate, now: u64) -> Self {
        let mut bucket = Self {
            rate,
            saved: 0,
            at: now,
        };
        bucket.saved = bucket.full();
        bucket
    }

    fn interval(&self) -> u64 {
        SECOND / u64::from(self.rate.per_second.max(1))
    }

    fn full(&self) -> u64 {
        self.interval().saturating_mul(u64::from(self.rate.burst.max(1)))
    }

    /// Returns whether an event may come at `now`. A clock that goes back adds no tokens.
    pub fn is_open(&mut self, now: u64) -> bool {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        self.saved = self.saved.saturating_add(passed).min(self.full());
        self.saved >= self.interval()
    }

    /// Takes a token. Returns false if there is none.
    pub fn take(&mut self, now: u64) -> bool {
        let open = self.is_open(now);
        if open {
            self.saved -= self.interval();
        }
        open
    }
}

/// Limits in total and for each source. An IPv6 source counts by its network (/64).
#[derive(Debug)]
pub struct Limiter {
    total: Bucket,
    each: Rate,
    sources: HashMap<IpAddr, Bucket>,
    capacity: usize,
}

impl Limiter {
    /// Creates a limiter that remembers at most `capacity` sources (at least one). A new source replaces the one whose
    /// last event is the oldest.
    pub fn new(total: Rate, each: Rate, capacity: usize, now: u64) -> Self {
        Self {
            total: Bucket::new(total, now),
            each,
            sources: HashMap::new(),
            capacity: capacity.max(1),
        }
    }

    /// Takes a token for `source`. Returns false if either limit has none. If the source's limit has none, the total
    /// keeps its token.
    pub fn take(&mut self, source: IpAddr, now: u64) -> bool {
        // The total is checked first, so that a flood does not even reach the table.
        if !self.total.is_open(now) {
            return false;
        }
        let source = network(source);
        if !self.sources.contains_key(&source) && self.sources.len() >= self.capacity {
            let oldest = self.sources.iter().min_by_key(|(_, b)| b.at);
            if let Some(oldest) = oldest.map(|(ip, _)| *ip) {
                self.sources.remove(&oldest);
            }
        }
        let bucket = self
            .sources
            .entry(source)
            .or_insert_with(|| Bucket::new(self.each, now));
        bucket.take(now) && self.total.take(now)
    }
}

fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
        v4 => v4,
    }
}

/// Remembers values by key for a fixed time. It never forgets one earlier: a full memory takes no new value.
#[derive(Debug)]
pub struct Memory<K, V> {
    entries: HashMap<K, V>,
    /// When each entry ends, in the order of insertion.
    ends: VecDeque<(u64, K)>,
    life: u64,
    capacity: usize,
}

impl<K: Copy + Eq + Hash, V> Memory<K, V> {
    /// Creates an empty memory of at most `capacity` entries, each for `life` ns.
    pub fn new(capacity: usize, life: u64) -> Self {
        Self {
            entries: HashMap::new(),
            ends: VecDeque::new(),
            life,
            capacity,
        }
    }

    /// Returns the value under `key`.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }

    /// Returns the value under `key`, for a change.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key)
    }

    /// Remembers `value`. Returns false if there is no room, or the key is known.
    pub fn insert(&mut self, key: K, value: V, now: u64) -> bool {
        if self.entries.len() >= self.capacity || self.entries.contains_key(&key) {
            return false;
        }
        self.entries.insert(key, value);
        self.ends.push_back((now.saturating_add(self.life), key));
        true
    }

    /// Removes and returns the entries whose time has ended.
    pub fn expire(&mut self, now: u64) -> Vec<(K, V)> {
        let mut over = Vec::new();
        while let Some((_, key)) = self.ends.front().copied().filter(|(end, _)| *end <= now) {
            self.ends.pop_front();
            if let Some(value) = self.entries.remove(&key) {
                over.push((key, value));
            }
        }
        over
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests;
