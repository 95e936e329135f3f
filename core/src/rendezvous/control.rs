//! The datagrams of the control port (docs/protocol.md, P60–P65): their format, and the limits on the load that they
//! cause. The HMAC of a datagram proves that its sender has the secret. The stamp in a question proves that its sender
//! can receive at the address that it gives. There are rate limits, and a memory of the questions that were accepted.
//!
//! This file does no I/O, and the time is an argument. All tables are bounded. `os::datagram` has the sockets. The
//! service thread in shims acts on the decoded datagrams.
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use hmac::{Hmac, Mac};
use rustix::fs::FileType;
use rustix::io::Errno;
use sha2::Sha256;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ids::{Cookie, ID_BYTES, InstanceId, Nonce, Tuple, ids, mapped};
use crate::os::dir;
use crate::wire;
use crate::wire::VERSION;
use crate::wire::codec::{Writer, kinds};

/// The length of every datagram in bytes. All have the same length, so that no answer is longer than its question.
pub const DATAGRAM: usize = size_of::<Frame>();

/// Bytes of an HMAC-SHA256.
const MAC: usize = 32;
/// Bytes of the field for the body. The longest body, ASK's, has 88.
const ROOM: usize = 120;

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

const MAGIC: [u8; 4] = *b"rsku";
/// Bit of `Frame::flags`: `Frame::mac` holds a MAC.
const SIGNED: u8 = 1;

/// A datagram as it is sent. Plain bytes, no padding, any alignment.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Frame {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    flags: u8,
    reserved: u8,
    query: QueryId,
    stamp: Stamp,
    /// Padded with zeroes.
    body: [u8; ROOM],
    mac: [u8; MAC],
}

ids! {
    /// The random number of a question. Answers repeat the number of their question.
    #[derive(PartialEq, Eq, Hash)]
    pub struct QueryId;

    /// A MAC that an answerer sends to an asker's address (`Stamper`). A later question from that address has to
    /// contain it. Zero while the asker has none.
    #[derive(PartialEq, Eq)]
    pub struct Stamp;
}

impl QueryId {
    /// Returns a random id. Fails only without getrandom(2).
    pub fn random() -> Result<Self, Errno> {
        InstanceId::random().map(|id| Self(*id.as_bytes()))
    }
}

impl fmt::Debug for QueryId {
    /// Writes the first four bytes, enough to follow a question in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}{d:02x}…")
    }
}

impl Stamp {
    /// The stamp of a question that was sent before any answer came.
    pub const NONE: Self = Self([0; ID_BYTES]);
}

impl fmt::Debug for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::NONE { "none" } else { "Stamp(secret)" })
    }
}

/// A decoded datagram.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Datagram {
    /// The question that the datagram asks, answers or withdraws.
    pub query: QueryId,
    /// In a datagram of the asker, the last stamp that the answerer sent. In a datagram of the answerer, a new stamp.
    pub stamp: Stamp,
    /// The contents.
    pub body: Body,
}

kinds! {
    /// The contents of a datagram. [`Message`](crate::wire::Message) has the same fields. The kinds of answers are
    /// numbered from 16.
    #[derive(Debug, Clone, Copy, PartialEq)]
    #[allow(missing_docs, reason = "the fields mean the same as in a message")]
    pub enum Body {
        /// "I am the connecting end of `tuple`; do you hold the other end, and do you want it moved?"
        1 = Ask { request: u64, tuple: Tuple, nonce_c: Nonce, instance_c: InstanceId };
        /// The asker gives up the attempt after a YES from the instance `instance_s`.
        2 = Cancel { nonce_s: Nonce, instance_s: InstanceId };
        /// The asker has received YES, so the answerer stops repeating it.
        3 = Got;
        /// "Ask again with this stamp."
        16 = Stamp;
        /// "I hold the connection and want it moved; your markers to me start with `nonce_s`."
        17 = Yes { request: u64, nonce_s: Nonce, instance_s: InstanceId };
        /// "The connection stays on TCP."
        18 = No { request: u64, reason: wire::Reason };
    }
}

/// The lowest number of an answer's kind.
const ANSWERS: u8 = 16;

/// Why a datagram is refused. The sender gets no reply, because a reply would help an attacker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not [`DATAGRAM`] bytes long.
    #[error("wrong length")]
    Length,
    /// Another version of the protocol.
    #[error("protocol version {0}")]
    Version(u8),
    /// Not a datagram of this protocol, or of an unknown kind, or with contents that do not fit its kind.
    #[error("not understood")]
    Kind,
    /// This end has a secret, and the MAC is missing or wrong. Or this end has no secret, and there is a MAC.
    #[error("wrong or missing HMAC")]
    Mac,
}

impl Datagram {
    /// Returns the datagram's bytes, with a MAC if there is a key.
    pub fn encode(&self, key: Option<&Key>) -> [u8; DATAGRAM] {
        let mut body = [0; ROOM];
        // The buffer has room for the longest body, so this does not fail. Kind 0 would be refused by the receiver.
        let kind = self.body.put_body(&mut Writer::new(&mut body)).unwrap_or_default();
        let mut frame = Frame {
            magic: MAGIC,
            version: VERSION,
            kind,
            flags: if key.is_some() { SIGNED } else { 0 },
            reserved: 0,
            query: self.query,
            stamp: self.stamp,
            body,
            mac: [0; MAC],
        };
        if let Some(key) = key {
            frame.mac = key.mac(&frame).finalize().into_bytes().into();
        }
        zerocopy::transmute!(frame)
    }

    /// Decodes a datagram. Accepts any bytes without a panic.
    ///
    /// If there is a key, the datagram must have a right MAC; without a key it must have no MAC.
    ///
    /// # Errors
    /// The reason why the datagram is refused. With a key, the body is decoded only if the MAC is right.
    pub fn decode(bytes: &[u8], key: Option<&Key>) -> Result<Self, Refused> {
        // The version is checked before the length: a later version may have another length.
        if let [a, b, c, d, version, ..] = *bytes
            && [a, b, c, d] == MAGIC
            && version != VERSION
        {
            return Err(Refused::Version(version));
        }
        let frame = Frame::ref_from_bytes(bytes).map_err(|_| Refused::Length)?;
        if frame.magic != MAGIC || frame.flags & !SIGNED != 0 {
            return Err(Refused::Kind);
        }
        match (key, frame.flags & SIGNED != 0) {
            (None, false) => {}
            (Some(key), true) => key
                .mac(frame)
                // The comparison takes the same time wherever the first difference is.
                .verify_slice(&frame.mac)
                .map_err(|_| Refused::Mac)?,
            _ => return Err(Refused::Mac),
        }
        let body = Body::take_body(frame.kind, &mut &frame.body[..]).map_err(|_| Refused::Kind)?;
        Ok(Self {
            query: frame.query,
            stamp: frame.stamp,
            body,
        })
    }
}

/// The secret of a group of hosts that may move connections to each other. Its bytes are read from a file.
#[derive(Clone)]
pub struct Key(Hmac<Sha256>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(secret)")
    }
}

impl Key {
    /// How many bytes a secret may have.
    pub const BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

    /// Creates the key from a secret's bytes. `None` if there are too few or too many.
    pub fn new(secret: &[u8]) -> Option<Self> {
        if !Self::BYTES.contains(&secret.len()) {
            return None;
        }
        Hmac::new_from_slice(secret).ok().map(Self)
    }

    /// Loads the key from the file at `path`. All bytes of the file are the secret.
    ///
    /// # Errors
    /// A text that says what is wrong with the file. It has to be a regular file with a length within [`Self::BYTES`]
    /// and without permissions for others.
    pub fn load(path: &Path) -> Result<Self, String> {
        let failed = |errno: Errno| std::io::Error::from(errno).to_string();
        let file = dir::open(path).map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err("it is not a regular file".to_owned());
        }
        if stat.st_mode & 0o007 != 0 {
            return Err("it is accessible to other users (chmod o= it)".to_owned());
        }
        let (secret, _) = dir::read(&file, *Self::BYTES.end() + 1).map_err(failed)?;
        Self::new(&secret).ok_or_else(|| format!("it must have {} to {} bytes", Self::BYTES.start(), Self::BYTES.end()))
    }

    /// Returns the MAC over a text that names the datagram's direction, then over all its bytes except the MAC itself.
    fn mac(&self, frame: &Frame) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(if frame.kind < ANSWERS {
            b"rdmasock control port: asker to answerer\0"
        } else {
            b"rdmasock control port: answerer to asker\0"
        });
        let bytes = frame.as_bytes();
        mac.update(bytes.get(..bytes.len() - MAC).unwrap_or_default());
        mac
    }
}

/// Creates and checks the stamps of one instance.
///
/// A stamp is a MAC, under a key that only this instance has, over an address and the current minute. A sender that
/// returns the stamp can receive at that address, and received it there less than two minutes ago. Only this instance's
/// clock counts, so no two clocks need agree. Other instances do not accept the stamp.
pub struct Stamper(Hmac<Sha256>);

impl Stamper {
    /// The length of a slot in ns. A stamp is valid until the end of the slot after its own: for one to two slots.
    const SLOT: u64 = 60_000_000_000;
    /// The time in ns after which no stamp is valid.
    pub const LIFE: u64 = 2 * Self::SLOT;

    /// Creates a stamper with a fresh key. Fails only without getrandom(2).
    pub fn random() -> Result<Self, Errno> {
        let key = [Cookie::random()?, Cookie::random()?];
        Hmac::new_from_slice(key.as_bytes()).map(Self).map_err(|_| Errno::INVAL)
    }

    fn mac(&self, to: SocketAddr, slot: u64) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(&mapped(to.ip()).octets());
        mac.update(&to.port().to_le_bytes());
        mac.update(&slot.to_le_bytes());
        mac
    }

    /// Returns the stamp for the address `to` at `now` (ns).
    pub fn stamp(&self, to: SocketAddr, now: u64) -> Stamp {
        let full: [u8; MAC] = self.mac(to, now / Self::SLOT).finalize().into_bytes().into();
        full.first_chunk().map_or(Stamp::NONE, |first| Stamp(*first))
    }

    /// Returns whether this instance made `stamp` for the address `from`, in the slot of `now` (ns) or the slot before.
    pub fn is_good(&self, stamp: &Stamp, from: SocketAddr, now: u64) -> bool {
        let slot = now / Self::SLOT;
        [Some(slot), slot.checked_sub(1)].into_iter().flatten().any(|slot| {
            let mac = self.mac(from, slot);
            mac.verify_truncated_left(&stamp.0).is_ok()
        })
    }
}

/// A limit on datagrams or questions.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Events a second, on average.
    pub per_second: u32,
    /// Events at the same time.
    pub burst: u32,
}

impl Rate {
    /// Returns a limit of `per_second` events on average, and `burst` events at once.
    pub const fn new(per_second: u32, burst: u32) -> Self {
        Self { per_second, burst }
    }
}

/// A token bucket. Its tokens are counted in nanoseconds: one token is the interval between two events at the rate.
#[derive(Debug, Clone, Copy)]
pub struct Bucket {
    rate: Rate,
    /// The saved tokens, as a time in ns.
    saved: u64,
    at: u64,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(rate: Rate, now: u64) -> Self {
        // `is_open` cuts this down to a burst.
        let saved = u64::MAX;
        Self { rate, saved, at: now }
    }

    fn interval(&self) -> u64 {
        SECOND / u64::from(self.rate.per_second.max(1))
    }

    /// Returns whether there is a token at `now` (ns). A clock that goes back adds no tokens.
    pub fn is_open(&mut self, now: u64) -> bool {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        let full = self.interval().saturating_mul(u64::from(self.rate.burst.max(1)));
        self.saved = self.saved.saturating_add(passed).min(full);
        self.saved >= self.interval()
    }

    /// Takes a token at `now` (ns). Returns false if there is none.
    pub fn take(&mut self, now: u64) -> bool {
        let open = self.is_open(now);
        if open {
            self.saved -= self.interval();
        }
        open
    }
}

/// Limits the events of all sources together, and of each source. All IPv6 addresses of a /64 network are one source.
#[derive(Debug)]
pub struct Limiter {
    total: Bucket,
    each: Rate,
    sources: HashMap<IpAddr, Bucket>,
    capacity: usize,
}

impl Limiter {
    /// Creates a limiter that remembers at most `capacity` sources (at least one). If all places are taken, a new
    /// source replaces the source whose last event is the oldest.
    pub fn new(total: Rate, each: Rate, capacity: usize, now: u64) -> Self {
        Self {
            total: Bucket::new(total, now),
            each,
            sources: HashMap::new(),
            capacity: capacity.max(1),
        }
    }

    /// Takes a token of `source` and one of the total. Returns false if either has none. If the source has none, the
    /// total keeps its token.
    pub fn take(&mut self, source: IpAddr, now: u64) -> bool {
        // The total is checked first, so that a flood beyond it adds no sources to the table.
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
        let fresh = Bucket::new(self.each, now);
        self.sources.entry(source).or_insert(fresh).take(now) && self.total.take(now)
    }
}

fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
        v4 => v4,
    }
}

/// Remembers values by key for a fixed time, never for less. If the memory is full, it accepts no new value.
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

    /// Returns a mutable reference to the value under `key`.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key)
    }

    /// Remembers `value` from `now` (ns) on. Returns false if there is no room, or if the key has a value already.
    pub fn insert(&mut self, key: K, value: V, now: u64) -> bool {
        if self.entries.len() >= self.capacity || self.entries.contains_key(&key) {
            return false;
        }
        self.entries.insert(key, value);
        self.ends.push_back((now.saturating_add(self.life), key));
        true
    }

    /// Removes and returns the entries whose time has ended at `now` (ns).
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
}

#[cfg(test)]
mod tests;
