//! Markers: the library writes them inside a TCP stream (docs/protocol.md, P30–P39).
//!
//! This file encodes and decodes them, and finds a marker among data ([`scan`]). `stream` decides when to write one and
//! when to scan.

use std::net::{Ipv6Addr, SocketAddr};

use crate::ids::{Cookie, ID_BYTES, InstanceId, Nonce, mapped};
use crate::wire::codec::{Field, Head, WireError, Writer, kinds, put_frame, structs, take, take_frame};
use crate::wire::message::Reason;

/// Bytes of an IP address, IPv4 mapped.
const IP_BYTES: usize = 16;
/// Bytes of an address on the verbs fabric: IP, port.
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
    /// On the shm fabric: by the name of the HELLO's instance (P6).
    Shm,
    /// On the verbs fabric: by rdma_cm, at this address.
    Verbs(SocketAddr),
}

/// How to make a link to the writer of a HELLO.
#[derive(Debug, Clone, Copy)]
pub struct LinkOffer {
    /// The address to connect to.
    pub address: LinkAddress,
    /// The cookie to present there, once.
    pub cookie: Cookie,
}

/// The body of a HELLO.
#[derive(Debug, Clone, Copy)]
pub struct Hello {
    /// The instance that writes the HELLO.
    pub instance: InstanceId,
    /// Only in S's HELLO, and only if the two instances may have no link yet.
    pub link: Option<LinkOffer>,
}

structs! {
    Hello { instance, link }
}

kinds! {
    /// A marker: the library's message inside a direction of TCP.
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
        /// position up to which the writer has the reader's direction. `sent` is the position up to which its own was
        /// given to the link. Both are in bytes since SWITCH.
        4 = Resume { received: u64, sent: u64 };
    }
}

/// The bytes that follow the payload.
#[derive(Debug, Clone, Copy)]
pub enum Found {
    /// No byte: all bytes scanned are data.
    Payload,
    /// The possible beginning of a marker: `have` bytes (1 to `MAX_MARKER` − 1) that are neither data nor a marker yet.
    PartialMarker {
        /// Number of bytes to hold back, up to the end of those scanned.
        have: usize,
    },
    /// Bytes that start with the reader's nonce, so they are not the application's data. The bytes behind them have not
    /// been scanned.
    Marker {
        /// The marker. The error: it is none that this version can read, so the bytes are to be dropped, and the
        /// attempt to promote has ended.
        marker: Result<Marker, WireError>,
        /// Its length in bytes: as the header says, or the bare header if no marker is that long.
        len: usize,
    },
}

/// The result of [`scan`].
#[derive(Debug, Clone, Copy)]
pub struct Scan {
    /// Number of bytes at the front that are the application's data.
    pub payload: usize,
    /// The bytes behind them.
    pub what: Found,
}

impl Marker {
    /// Writes the marker for the reader that chose `reader_nonce` to the front of `buf`. Returns its bytes.
    ///
    /// Fails with [`WireError::Buffer`] if `buf` is too short; [`MAX_MARKER`] bytes always suffice.
    pub fn encode<'b>(&self, reader_nonce: &Nonce, buf: &'b mut [u8]) -> Result<&'b [u8], WireError> {
        put_frame(reader_nonce.as_bytes(), buf, |body| self.put_body(body))
    }

    /// Reads the one marker that `bytes` consists of. Total: any bytes give a marker or an error.
    ///
    /// Does not compare the nonce; [`scan`] does.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let frame = bytes.get(ID_BYTES..).ok_or(WireError::Length)?;
        take_frame(frame, Self::take_body)
    }
}

/// Finds the first marker for the reader that chose `nonce` in `bytes`, the next bytes of TCP (P33–P36).
///
/// `bytes` must begin where an earlier scan left off: at the byte after the data delivered, so that a tail held back is
/// scanned again. A tail that can still become a marker is never called data. To get past a partial marker, a caller
/// needs room for the `MAX_MARKER` bytes of a whole one.
pub fn scan(nonce: &Nonce, bytes: &[u8]) -> Scan {
    let pattern = nonce.as_bytes();
    let [first, ..] = pattern;
    let mut payload = 0;
    // Finds the first place where all bytes there agree with the nonce; they may run out early only at the end of
    // `bytes`. Trying every place in order also handles a nonce that contains its own beginning.
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

/// Returns how many of `bytes` are the application's data, with markers among them or not. `bytes` follow each other in
/// TCP from where an earlier scan left off.
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

/// Reads the marker at the front of `tail`, which agrees with the reader's nonce as far as it reaches.
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

/// On the wire: no byte, or the offer. This is the last field of the structure that it is in.
impl Field<'_> for Option<LinkOffer> {
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        self.iter().try_for_each(|offer| offer.put(out))
    }

    fn take(from: &mut &[u8]) -> Result<Self, WireError> {
        (!from.is_empty()).then(|| Field::take(from)).transpose()
    }
}

/// On the wire: the cookie, the fabric, then the address with its length, up to the marker's end.
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

/// Returns the address. `None` if no listener can have it: port 0, multicast, or unspecified.
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
