//! Identities on the wire: instances, nonces, cookies, vQPNs and the 4-tuple of a TCP connection.
//!
//! Each type is a plain value with a fixed byte form. docs/protocol.md defines which process may use which identity,
//! and for what purpose.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The length of an instance id, a nonce and a cookie in bytes.
pub const ID_BYTES: usize = 16;

/// Returns `ID_BYTES` random bytes from the kernel's generator.
///
/// Fails only on a kernel without getrandom(2).
fn random_bytes() -> Result<[u8; ID_BYTES], Errno> {
    let mut bytes = [0u8; ID_BYTES];
    // Once the kernel's random pool is ready, one call of getrandom(2) returns all of up to 256 bytes. Before that a
    // signal may interrupt the call, so the call is repeated.
    while retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))? < ID_BYTES {}
    Ok(bytes)
}

/// Declares id types of [`ID_BYTES`] bytes.
macro_rules! ids {
    ($($(#[$about:meta])* pub struct $Id:ident;)*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(transparent)]
        pub struct $Id([u8; ID_BYTES]);

        impl $Id {
            /// Returns the id that consists of these bytes, which come from shared memory or the wire.
            pub const fn from_bytes(bytes: [u8; ID_BYTES]) -> Self {
                Self(bytes)
            }

            /// Returns the bytes of the value.
            pub const fn as_bytes(&self) -> &[u8; ID_BYTES] {
                &self.0
            }
        }
    )*};
}
pub(crate) use ids;

ids! {
    /// Identifies a process image with the library loaded; a fork child draws a new id.
    #[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct InstanceId;

    /// The random bytes by which the reader of a TCP direction recognises a marker.
    ///
    /// The first byte never occurs in UTF-8 text. While a reader waits for its nonce, it must hold back any tail of the
    /// data that could be the beginning of the nonce, and must not report that tail as readable. With this first byte
    /// text protocols never contain such a tail, and binary protocols rarely do. The choice costs 4 of the 128 random
    /// bits.
    #[derive(PartialEq, Eq, Hash)]
    pub struct Nonce;

    /// The one-time secret that proves to the acceptor of a link that the connecting process has read the acceptor's
    /// HELLO.
    ///
    /// The type is not `PartialEq`. Cookies are compared by [`Cookie::matches`], which takes the same time wherever the
    /// first difference is.
    pub struct Cookie;
}

impl InstanceId {
    /// Returns a fresh id. Fails only without getrandom(2).
    pub fn random() -> Result<Self, Errno> {
        random_bytes().map(Self)
    }

    /// Returns the id as two words, the first eight bytes first. The page that forked processes share
    /// (`rendezvous::peers`) stores an id in two atomic words.
    pub const fn to_words(&self) -> [u64; 2] {
        let bits = u128::from_le_bytes(self.0);
        [bits as u64, (bits >> 64) as u64]
    }

    /// Returns the id from its two words, which [`Self::to_words`] has returned.
    pub const fn from_words([low, high]: [u64; 2]) -> Self {
        Self((low as u128 | (high as u128) << 64).to_le_bytes())
    }
}

impl fmt::Display for InstanceId {
    /// Writes 32 lower-case hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The bytes that no UTF-8 text contains (RFC 3629, section 1). A nonce starts with one of them.
const NEVER_IN_UTF8: [u8; 13] = [
    0xC0, 0xC1, 0xF5, 0xF6, 0xF7, 0xF8, 0xF9, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF,
];

impl Nonce {
    /// Returns a fresh nonce. Fails only without getrandom(2).
    pub fn random() -> Result<Self, Errno> {
        let mut bytes = random_bytes()?;
        let [first, ..] = &mut bytes;
        let pick = usize::from(*first) % NEVER_IN_UTF8.len();
        *first = NEVER_IN_UTF8.get(pick).copied().unwrap_or(0xFF);
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Nonce {
    /// Writes the first four bytes. They are enough to follow a nonce in a log, and too few to forge a marker.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}{d:02x}…")
    }
}

impl Cookie {
    /// Returns a fresh cookie. Fails only without getrandom(2).
    pub fn random() -> Result<Self, Errno> {
        random_bytes().map(Self)
    }

    /// Compares both cookies in constant time. Returns true if they are the same.
    pub fn matches(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |diff, (a, b)| diff | (a ^ b)) == 0
    }
}

impl fmt::Debug for Cookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cookie(secret)")
    }
}

/// The number of a stream within its link. Each end numbers the stream itself, and messages other than OPEN name it by
/// the number that their receiver chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vqpn(pub u32);

/// The 4-tuple of a TCP connection as both ends see it.
///
/// Addresses are normalised: an IPv4-mapped IPv6 address becomes the IPv4 address, and flow label and scope id are
/// dropped. Within a host, several connections may have the same addresses and ports. [`Tuple::at`] adds the network
/// namespace and the interface that distinguish them. Between hosts both are 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tuple {
    connector: SocketAddr,
    acceptor: SocketAddr,
    namespace: u64,
    device: u32,
}

impl Tuple {
    /// Returns the tuple of the connection that `connector` made to `acceptor`.
    pub fn new(connector: SocketAddr, acceptor: SocketAddr) -> Self {
        Self {
            connector: normalise(connector),
            acceptor: normalise(acceptor),
            namespace: 0,
            device: 0,
        }
    }

    /// Returns this tuple with the connection's network namespace and interface. `namespace` is the cookie of the
    /// namespace (SO_NETNS_COOKIE; 0 if the kernel has none). `device` is the index of the interface that the sockets
    /// are bound to (SO_BINDTOIFINDEX; 0 if they are not bound).
    ///
    /// The kernel itself binds a socket to an interface if the socket has a link-local address, or belongs to a VRF.
    pub const fn at(self, namespace: u64, device: u32) -> Self {
        Self {
            namespace,
            device,
            ..self
        }
    }

    /// Returns the cookie of the network namespace; 0 if it is not known.
    pub const fn namespace(&self) -> u64 {
        self.namespace
    }

    /// Returns the index of the interface that both ends are bound to; 0 if they are not bound.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Returns the address of the end that called connect().
    pub const fn connector(&self) -> SocketAddr {
        self.connector
    }

    /// Returns the address of the end that called accept().
    pub const fn acceptor(&self) -> SocketAddr {
        self.acceptor
    }
}

impl fmt::Debug for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.connector, self.acceptor)
    }
}

/// Returns the address in the form that both ends write: see [`Tuple`].
pub fn normalise(addr: SocketAddr) -> SocketAddr {
    // `SocketAddr::new` leaves flow label and scope id at 0.
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

/// Returns the address as an IPv6 address. An IPv4 address gets its IPv4-mapped form.
pub(crate) fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddrV6;

    use super::*;

    #[test]
    fn instance_ids_differ_and_have_32_digits() {
        let (a, b) = (InstanceId::random().unwrap(), InstanceId::random().unwrap());
        assert_ne!(a, b);
        let id = InstanceId::from_bytes(std::array::from_fn(|i| i as u8));
        assert_eq!(id.to_string(), "000102030405060708090a0b0c0d0e0f");
    }

    #[test]
    fn a_nonce_starts_with_a_byte_that_no_text_contains() {
        for _ in 0..500 {
            let nonce = Nonce::random().unwrap();
            assert!(NEVER_IN_UTF8.contains(&nonce.as_bytes()[0]));
        }
    }

    #[test]
    fn debug_output_keeps_secrets() {
        let cookie = Cookie::from_bytes([0xAB; 16]);
        assert!(!format!("{cookie:?}").contains("ab"));
        assert_eq!(format!("{:?}", Nonce::from_bytes([0xAB; 16])), "abababab…");
    }

    #[test]
    fn cookies_match_only_themselves() {
        let cookie = Cookie::random().unwrap();
        assert!(cookie.matches(&cookie));
        for i in 0..16 {
            let mut bytes = cookie.0;
            bytes[i] ^= 1;
            assert!(!cookie.matches(&Cookie::from_bytes(bytes)));
        }
    }

    #[test]
    fn both_ends_see_one_tuple() {
        let v4: SocketAddr = "10.0.0.1:80".parse().unwrap();
        let mapped: SocketAddr = "[::ffff:10.0.0.1]:80".parse().unwrap();
        let connector: SocketAddr = "10.0.0.2:4000".parse().unwrap();
        assert_eq!(Tuple::new(connector, v4), Tuple::new(connector, mapped));

        let scoped = |scope| SocketAddr::V6(SocketAddrV6::new("fe80::1".parse().unwrap(), 5, 9, scope));
        let tuple = Tuple::new(scoped(2), scoped(2));
        assert_eq!(tuple, Tuple::new(scoped(7), scoped(0)));
        for (namespace, device) in [(1, 0), (0, 1)] {
            assert_ne!(tuple, tuple.at(namespace, device));
        }
    }
}
