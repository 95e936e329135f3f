//! Markers: the library writes them inside a TCP stream (docs/protocol.md, P30–P39).
//!
//! This file encodes and decodes markers, and finds a marker among data ([`scan`]). `stream` decides when to write a
//! marker and when to scan.

use std::net::{Ipv6Addr, SocketAddr};

use crate::ids::{Cookie, ID_BYTES, InstanceId, Nonce, mapped};
use crate::wire::codec::{Field, Head, WireError, Writer, kinds, put_frame, structs, take, take_frame};
use crate::wire::message::Reason;

/// Bytes of an IP address. IPv4 addresses are in the IPv4-mapped form.
const IP_BYTES: usize = 16;
/// Bytes of an address on the verbs fabric: IP address and port.
const VERBS_BYTES: usize = IP_BYTES + 2;

/// The longest body of a marker, in bytes.
const MAX_BODY: usize = 2 * ID_BYTES + 2 + VERBS_BYTES;

/// The shortest marker, in bytes: the nonce that the reader of the direction chose, and a head (P30).
pub const MIN_MARKER: usize = ID_BYTES + size_of::<Head>();

/// The longest marker, in bytes.
pub const MAX_MARKER: usize = MIN_MARKER + MAX_BODY;

const FABRIC_SHM: u8 = 1;
const FABRIC_VERBS: u8 = 2;

/// Where a link can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkAddress {
    /// On the shm fabric, at the name of the instance that the HELLO names (P6).
    Shm,
    /// On the verbs fabric, by rdma_cm at this address.
    Verbs(SocketAddr),
}

/// How to make a link to the writer of a HELLO.
#[derive(Debug, Clone, Copy)]
pub struct LinkOffer {
    /// The address to connect to.
    pub address: LinkAddress,
    /// The cookie that the connecting end sends there, once.
    pub cookie: Cookie,
}

/// The body of a HELLO.
#[derive(Debug, Clone, Copy)]
pub struct Hello {
    /// The instance that writes the HELLO.
    pub instance: InstanceId,
    /// An offer of a link. Only in the HELLO of the acceptor, and only if the two instances may have no link yet.
    pub link: Option<LinkOffer>,
}

structs! {
    Hello { instance, link }
}

kinds! {
    /// A marker: a message of the library inside a direction of TCP.
    #[derive(Debug, Clone, Copy)]
    #[allow(missing_docs, reason = "the fields of RESUME are said there")]
    pub enum Marker {
        /// The writer is an end of this TCP connection and knows the reader's nonce (P32).
        1 = Hello(hello: Hello);
        /// The next byte of this direction is on the link (P37).
        2 = Switch;
        /// The attempt to promote has ended, and this direction stays on TCP (P36).
        3 = Abort(reason: Reason);
        /// The stream leaves a link between hosts: the writer receives no more from it (P70). `received` is the
        /// position up to which the writer has received the other direction. `sent` is the position up to which it gave
        /// its own direction to the link. Positions count bytes from the SWITCH of their direction on.
        4 = Resume { received: u64, sent: u64 };
    }
}

/// The bytes that follow the payload of a scan.
#[derive(Debug, Clone, Copy)]
pub enum Found {
    /// No bytes: all bytes scanned are data.
    Payload,
    /// The last `have` bytes (1 to `MAX_MARKER` − 1) may be the beginning of a marker. Later bytes decide.
    PartialMarker {
        /// The number of bytes to hold back. They are the last of the bytes scanned.
        have: usize,
    },
    /// `len` bytes that start with the reader's nonce, so they are not the program's data. The bytes behind them have
    /// not been scanned.
    Marker {
        /// The marker. An error if this version cannot decode it. Then the bytes are to be dropped, and the attempt to
        /// promote has failed.
        marker: Result<Marker, WireError>,
        /// The length of the marker in bytes, by its head. If no marker can be that long, the length of nonce and head
        /// alone.
        len: usize,
    },
}

/// The result of [`scan`].
#[derive(Debug, Clone, Copy)]
pub struct Scan {
    /// The number of bytes at the front that are the program's data.
    pub payload: usize,
    /// The bytes behind the payload.
    pub what: Found,
}

impl Marker {
    /// Writes the marker to the front of `buf`, for the reader that chose `reader_nonce`. Returns the marker's bytes.
    ///
    /// Fails with [`WireError::Buffer`] if `buf` is too short; [`MAX_MARKER`] bytes always suffice.
    pub fn encode<'b>(&self, reader_nonce: &Nonce, buf: &'b mut [u8]) -> Result<&'b [u8], WireError> {
        put_frame(reader_nonce.as_bytes(), buf, |body| self.put_body(body))
    }

    /// Decodes `bytes`, which have to be exactly one marker. Accepts any bytes without a panic.
    ///
    /// Does not compare the nonce, which [`scan`] does.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let frame = bytes.get(ID_BYTES..).ok_or(WireError::Length)?;
        take_frame(frame, Self::take_body)
    }
}

/// Finds the first marker for the reader that chose `nonce` in `bytes`, the next bytes of TCP (P33–P36).
///
/// `bytes` must begin at the byte after the data that was delivered so far. So bytes that an earlier scan held back are
/// scanned again. The scan never reports a tail as data that may still become a marker. To scan beyond a partial
/// marker, the caller needs a buffer for the `MAX_MARKER` bytes of a whole marker.
pub fn scan(nonce: &Nonce, bytes: &[u8]) -> Scan {
    let pattern = nonce.as_bytes();
    let [first, ..] = pattern;
    let mut payload = 0;
    // Finds the first place from which on all bytes agree with the nonce, up to the end of the nonce or of `bytes`. The
    // loop tries every place in order, so it also handles a nonce that contains its own beginning.
    while let Some(skip) = bytes
        .get(payload..)
        .and_then(|rest| rest.iter().position(|b| b == first))
    {
        payload += skip;
        let tail = bytes.get(payload..).unwrap_or_default();
        if tail.iter().zip(pattern).all(|(a, b)| a == b) {
            return Scan {
                payload,
                what: read_marker(tail),
            };
        }
        payload += 1;
    }
    Scan {
        payload: bytes.len(),
        what: Found::Payload,
    }
}

/// Returns how many of `bytes` are the program's data, whether there are markers among them or not. `bytes` are
/// successive bytes of TCP, from the byte on at which an earlier scan ended.
pub fn payload_in(nonce: &Nonce, bytes: &[u8]) -> usize {
    let (mut payload, mut rest) = (0, bytes);
    loop {
        let seen = scan(nonce, rest);
        payload += seen.payload;
        match seen.what {
            Found::Payload | Found::PartialMarker { .. } => return payload,
            Found::Marker { len, .. } => {
                rest = rest.get(seen.payload + len..).unwrap_or_default();
            }
        }
    }
}

/// Reads the marker at the front of `tail`. The caller has compared `tail` with the reader's nonce, as far as it
/// reaches.
fn read_marker(tail: &[u8]) -> Found {
    let partial = Found::PartialMarker { have: tail.len() };
    let Some(Ok(head)) = tail.get(ID_BYTES..).map(|mut rest| take::<Head>(&mut rest)) else {
        return partial;
    };
    let length = usize::from(head.length.get());
    if length > MAX_BODY {
        let (marker, len) = (Err(WireError::Length), MIN_MARKER);
        return Found::Marker { marker, len };
    }
    let len = MIN_MARKER + length;
    let Some(whole) = tail.get(..len) else {
        return partial;
    };
    let marker = Marker::decode(whole);
    Found::Marker { marker, len }
}

/// On the wire: no byte, or the offer. Only for the last field of a structure, because any rest of the bytes is read as
/// an offer.
impl Field<'_> for Option<LinkOffer> {
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        self.iter().try_for_each(|offer| offer.put(out))
    }

    fn take(from: &mut &[u8]) -> Result<Self, WireError> {
        (!from.is_empty()).then(|| Field::take(from)).transpose()
    }
}

/// On the wire: the cookie, the fabric, the length of the address, then the address, which ends the marker.
impl Field<'_> for LinkOffer {
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        self.cookie.put(out)?;
        match self.address {
            LinkAddress::Shm => out.put(&[FABRIC_SHM, 0]),
            LinkAddress::Verbs(at) => {
                out.put(&[FABRIC_VERBS, VERBS_BYTES as u8])?;
                out.put(&mapped(at.ip()).octets())?;
                out.put(&at.port().to_le_bytes())
            }
        }
    }

    fn take(from: &mut &[u8]) -> Result<Self, WireError> {
        let cookie = Field::take(from)?;
        let (fabric, length): (u8, u8) = (Field::take(from)?, Field::take(from)?);
        let place = std::mem::take(from);
        if usize::from(length) != place.len() {
            return Err(WireError::Length);
        }
        let address = match fabric {
            FABRIC_SHM => place.is_empty().then_some(LinkAddress::Shm),
            FABRIC_VERBS => verbs_address(place).map(LinkAddress::Verbs),
            _ => return Err(WireError::Field("fabric")),
        };
        let address = address.ok_or(WireError::Field("link address"))?;
        Ok(Self { address, cookie })
    }
}

/// Decodes an IP address and a port. `None` if no listener can have this address: port 0, multicast, or unspecified.
fn verbs_address(bytes: &[u8]) -> Option<SocketAddr> {
    let (ip, port) = bytes.split_first_chunk::<IP_BYTES>()?;
    let ip = Ipv6Addr::from(*ip).to_canonical();
    let port = u16::from_le_bytes(port.try_into().ok()?);
    (port != 0 && !ip.is_multicast() && !ip.is_unspecified()).then(|| SocketAddr::new(ip, port))
}

#[cfg(test)]
mod scan_tests;
#[cfg(test)]
mod tests;
