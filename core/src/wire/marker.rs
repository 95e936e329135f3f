//! Markers: the library writes them inside a TCP stream (docs/protocol.md, P30–P39).
//!
//! This module encodes and decodes them. [`super::scan`] finds a marker among data, and `stream` decides when to write
//! one.

use std::net::{Ipv6Addr, SocketAddr};

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::codec::{Field, VERSION, WireError, Writer, kinds, read_prefix, structs};
use super::reason::Reason;
use crate::ids::{Cookie, ID_BYTES, InstanceId, Nonce, mapped};

/// The longest body of a marker, in bytes.
const MAX_BODY: usize = 2 * ID_BYTES + 2 + VERBS_BYTES;

/// The shortest marker, in bytes: a header without a body.
pub const MIN_MARKER: usize = size_of::<MarkerHeader>();

/// The longest marker, in bytes.
pub const MAX_MARKER: usize = MIN_MARKER + MAX_BODY;

/// The header of a marker (P30).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct MarkerHeader {
    /// The nonce that the reader of this direction chose.
    nonce: Nonce,
    version: u8,
    kind: u8,
    /// Bytes that follow this header.
    length: U16,
}

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

impl Marker {
    /// Writes the marker for the reader that chose `reader_nonce` to the front of `buf`. Returns its bytes.
    ///
    /// Fails with [`WireError::Buffer`] if `buf` is too short; [`MAX_MARKER`] bytes always suffice.
    pub fn encode<'b>(&self, reader_nonce: &Nonce, buf: &'b mut [u8]) -> Result<&'b [u8], WireError> {
        let (head, rest) = buf.split_at_mut_checked(MIN_MARKER).ok_or(WireError::Buffer)?;
        let mut body = Writer::new(rest);
        let kind = self.put_body(&mut body)?;
        let length = body.len;
        let header = MarkerHeader {
            nonce: *reader_nonce,
            version: VERSION,
            kind,
            length: u16::try_from(length).map_err(|_| WireError::Buffer)?.into(),
        };
        Writer::new(head).put(&header)?;
        buf.get(..MIN_MARKER + length).ok_or(WireError::Buffer)
    }

    /// Reads the one marker that `bytes` consists of. Total: any bytes give a marker or an error.
    ///
    /// Does not compare the nonce; [`super::scan::scan`] does.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (header, mut body) = read_prefix::<MarkerHeader>(bytes)?;
        if header.version != VERSION {
            return Err(WireError::Version(header.version));
        }
        if usize::from(header.length.get()) != body.len() {
            return Err(WireError::Length);
        }
        let marker = Self::take_body(header.kind, &mut body)?;
        if body.is_empty() {
            Ok(marker)
        } else {
            Err(WireError::Length)
        }
    }

    /// Returns the length in bytes of the marker that starts with `bytes`, as its header says. `None` while the header
    /// is not complete, an error if no marker is that long.
    pub(super) fn total_length(bytes: &[u8]) -> Result<Option<usize>, WireError> {
        let Ok((header, _)) = read_prefix::<MarkerHeader>(bytes) else {
            return Ok(None);
        };
        let length = usize::from(header.length.get());
        if length > MAX_BODY {
            Err(WireError::Length)
        } else {
            Ok(Some(MIN_MARKER + length))
        }
    }
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

/// Bytes of an IP address, IPv4 mapped.
const IP_BYTES: usize = 16;
/// Bytes of an address on the verbs fabric: IP, port.
const VERBS_BYTES: usize = IP_BYTES + 2;

/// Returns the address. `None` if no listener can have it: port 0, multicast, or unspecified.
fn verbs_address(bytes: &[u8]) -> Option<SocketAddr> {
    let (ip, port) = bytes.split_first_chunk::<IP_BYTES>()?;
    let ip = Ipv6Addr::from(*ip).to_canonical();
    let port = u16::from_le_bytes(port.try_into().ok()?);
    (port != 0 && !ip.is_multicast() && !ip.is_unspecified()).then(|| SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests;
