//! What keeps a control port from being a burden: rate limits, and the memory of questions that were
//! taken (docs/protocol.md, P64, P65). The clock (ns) is an argument; all tables are bounded.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::net::IpAddr;

const SECOND: u64 = 1_000_000_000;

/// How much may come.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// In the long run.
    pub per_second: u32,
    /// At once.
    pub burst: u32,
}

/// A token bucket, counted in time: a token is the interval between two of the rate.
#[derive(Debug, Clone, Copy)]
pub struct Bucket {
    rate: Rate,
    /// What has been saved up, ns, at most a burst.
    saved: u64,
    at: u64,
}

impl Bucket {
    /// A full one.
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

    /// Whether one may come at `now`. A clock that goes back gives nothing.
    pub fn is_open(&mut self, now: u64) -> bool {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        self.saved = self.saved.saturating_add(passed).min(self.full());
        self.saved >= self.interval()
    }

    /// Takes one if one may come.
    pub fn take(&mut self, now: u64) -> bool {
        let open = self.is_open(now);
        if open {
            self.saved -= self.interval();
        }
        open
    }
}

/// Limits in total and for each source; of an IPv6 source the network (/64) counts.
#[derive(Debug)]
pub struct Limiter {
    total: Bucket,
    each: Rate,
    sources: HashMap<IpAddr, Bucket>,
    capacity: usize,
}

impl Limiter {
    /// Remembers at most `capacity` sources (at least one); the one that was heard last longest ago goes first.
    pub fn new(total: Rate, each: Rate, capacity: usize, now: u64) -> Self {
        Self {
            total: Bucket::new(total, now),
            each,
            sources: HashMap::new(),
            capacity: capacity.max(1),
        }
    }

    /// Whether one from `source` may come; takes it from both limits or from none.
    pub fn take(&mut self, source: IpAddr, now: u64) -> bool {
        // First, so that a flood does not even get at the table.
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

/// Remembers something under a key for a fixed time. Never forgets earlier: a full one takes nothing new.
#[derive(Debug)]
pub struct Memory<K, V> {
    entries: HashMap<K, V>,
    /// When each ends, in the order of their coming.
    ends: VecDeque<(u64, K)>,
    life: u64,
    capacity: usize,
}

impl<K: Copy + Eq + Hash, V> Memory<K, V> {
    /// An empty one of at most `capacity` entries, each for `life` ns.
    pub fn new(capacity: usize, life: u64) -> Self {
        Self {
            entries: HashMap::new(),
            ends: VecDeque::new(),
            life,
            capacity,
        }
    }

    /// What is remembered under `key`.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }

    /// What is remembered under `key`, to be changed.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key)
    }

    /// Remembers `value`. False if there is no room, or the key is known.
    pub fn insert(&mut self, key: K, value: V, now: u64) -> bool {
        if self.entries.len() >= self.capacity || self.entries.contains_key(&key) {
            return false;
        }
        self.entries.insert(key, value);
        self.ends.push_back((now.saturating_add(self.life), key));
        true
    }

    /// Forgets what has been there for its time; gives it.
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

    /// How much is remembered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests;
