//! Markers: what the library writes inside a TCP stream. See docs/protocol.md, P30–P39.
//!
//! Encoding and decoding only. Finding a marker among data is [`super::scan`]'s business, deciding
//! when to write one the stream's.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::codec::{VERSION, WireError, Writer, read, read_prefix};
use super::reason::Reason;
use crate::ids::{Cookie, InstanceId, Nonce};

/// The longest body of a marker, in bytes.
const MAX_BODY: usize = size_of::<HelloBody>() + size_of::<OfferBody>() + VERBS_BYTES;

/// The shortest marker, in bytes: a header without a body.
pub const MIN_MARKER: usize = size_of::<MarkerHeader>();

/// The longest marker, in bytes.
pub const MAX_MARKER: usize = MIN_MARKER + MAX_BODY;

/// What a marker starts with (P30).
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

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HelloBody {
    instance: InstanceId,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OfferBody {
    cookie: Cookie,
    fabric: u8,
    length: u8,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct AbortBody {
    reason: U16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ResumeBody {
    received: U64,
    sent: U64,
}

mod kind {
    pub const HELLO: u8 = 1;
    pub const SWITCH: u8 = 2;
    pub const ABORT: u8 = 3;
    pub const RESUME: u8 = 4;
}

const FABRIC_SHM: u8 = 1;
const FABRIC_VERBS: u8 = 2;

/// Where a link can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkAddress {
    /// On the shm fabric: at the name of the HELLO's instance (P6).
    Shm,
    /// On the verbs fabric: by rdma_cm, at this address.
    Verbs(SocketAddr),
}

/// How to make a link to the writer of a HELLO.
#[derive(Debug, Clone, Copy)]
pub struct LinkOffer {
    /// Where to connect.
    pub address: LinkAddress,
    /// What to present there, once.
    pub cookie: Cookie,
}

/// The body of a HELLO.
#[derive(Debug, Clone, Copy)]
pub struct Hello {
    /// The writer.
    pub instance: InstanceId,
    /// In S's HELLO only, and there only where the two instances may have no link yet.
    pub link: Option<LinkOffer>,
}

/// Something the library says inside a TCP direction.
#[derive(Debug, Clone, Copy)]
pub enum Marker {
    /// The writer is an end of this TCP connection and knows the reader's nonce (steps 3 and 4).
    Hello(Hello),
    /// The next byte of this direction is on the link (step 7).
    Switch,
    /// The attempt to promote is over, this direction stays on TCP.
    Abort(Reason),
    /// The stream leaves a link between hosts: the writer takes nothing more from it (P70).
    Resume {
        /// The position, in bytes since SWITCH, up to which the writer has the reader's direction.
        received: u64,
        /// The position up to which the writer has given its own direction to the link.
        sent: u64,
    },
}

impl Marker {
    /// Writes the marker for the reader that chose `reader_nonce` to the front of `buf`; gives its bytes.
    ///
    /// Fails with [`WireError::Buffer`] if `buf` is too short; [`MAX_MARKER`] bytes always suffice.
    pub fn encode<'b>(&self, reader_nonce: &Nonce, buf: &'b mut [u8]) -> Result<&'b [u8], WireError> {
        let (head, rest) = buf.split_at_mut_checked(MIN_MARKER).ok_or(WireError::Buffer)?;
        let mut body = Writer::new(rest);
        let kind = match self {
            Self::Hello(hello) => {
                encode_hello(hello, &mut body)?;
                kind::HELLO
            }
            Self::Switch => kind::SWITCH,
            Self::Abort(reason) => {
                body.put(&AbortBody {
                    reason: reason.code().into(),
                })?;
                kind::ABORT
            }
            Self::Resume { received, sent } => {
                body.put(&ResumeBody {
                    received: (*received).into(),
                    sent: (*sent).into(),
                })?;
                kind::RESUME
            }
        };
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
    /// The nonce is the caller's to compare; [`super::scan::scan`] does.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (header, body) = read_prefix::<MarkerHeader>(bytes)?;
        if header.version != VERSION {
            return Err(WireError::Version(header.version));
        }
        if usize::from(header.length.get()) != body.len() {
            return Err(WireError::Length);
        }
        match header.kind {
            kind::HELLO => decode_hello(body).map(Self::Hello),
            kind::SWITCH if body.is_empty() => Ok(Self::Switch),
            kind::SWITCH => Err(WireError::Length),
            kind::ABORT => {
                let abort: &AbortBody = read(body)?;
                Ok(Self::Abort(Reason::from_code(abort.reason.get())))
            }
            kind::RESUME => {
                let resume: &ResumeBody = read(body)?;
                Ok(Self::Resume {
                    received: resume.received.get(),
                    sent: resume.sent.get(),
                })
            }
            unknown => Err(WireError::Kind(unknown)),
        }
    }

    /// The length of the marker that starts with `bytes`, as its header says; `None` while the header
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

fn encode_hello(hello: &Hello, out: &mut Writer<'_>) -> Result<(), WireError> {
    out.put(&HelloBody {
        instance: hello.instance,
    })?;
    if let Some(LinkOffer { address, cookie }) = &hello.link {
        let mut place = [0u8; VERBS_BYTES];
        let (fabric, bytes) = match address {
            LinkAddress::Shm => (FABRIC_SHM, &place[..0]),
            LinkAddress::Verbs(at) => {
                let (ip, port) = place.split_at_mut(IP_BYTES);
                ip.copy_from_slice(&mapped(at.ip()).octets());
                port.copy_from_slice(&at.port().to_le_bytes());
                (FABRIC_VERBS, &place[..])
            }
        };
        out.put(&OfferBody {
            cookie: *cookie,
            fabric,
            // At most VERBS_BYTES.
            length: bytes.len() as u8,
        })?;
        out.put(bytes)?;
    }
    Ok(())
}

fn decode_hello(body: &[u8]) -> Result<Hello, WireError> {
    let (hello, rest) = read_prefix::<HelloBody>(body)?;
    let link = if rest.is_empty() {
        None
    } else {
        Some(decode_offer(rest)?)
    };
    Ok(Hello {
        instance: hello.instance,
        link,
    })
}

fn decode_offer(bytes: &[u8]) -> Result<LinkOffer, WireError> {
    let (offer, place) = read_prefix::<OfferBody>(bytes)?;
    if usize::from(offer.length) != place.len() {
        return Err(WireError::Length);
    }
    let address = match offer.fabric {
        FABRIC_SHM => place.is_empty().then_some(LinkAddress::Shm),
        FABRIC_VERBS => verbs_address(place).map(LinkAddress::Verbs),
        _ => return Err(WireError::Field("fabric")),
    };
    let address = address.ok_or(WireError::Field("link address"))?;
    Ok(LinkOffer {
        address,
        cookie: offer.cookie,
    })
}

/// Bytes of an IP address, IPv4 mapped.
const IP_BYTES: usize = 16;
/// Bytes of an address on the verbs fabric: IP, port.
const VERBS_BYTES: usize = IP_BYTES + 2;

fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

/// `None` unless somebody can be there: no port 0, no multicast, no unspecified address.
fn verbs_address(bytes: &[u8]) -> Option<SocketAddr> {
    let (ip, port) = bytes.split_first_chunk::<IP_BYTES>()?;
    let ip = Ipv6Addr::from(*ip).to_canonical();
    let port = u16::from_le_bytes(port.try_into().ok()?);
    (port != 0 && !ip.is_multicast() && !ip.is_unspecified()).then(|| SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests;
