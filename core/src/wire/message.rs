//! Out-of-band messages: one a datagram, framed by a checked header. See docs/protocol.md, P10–P29.
//!
//! File descriptors travel beside a message (SCM_RIGHTS); how many belong to a kind is said by
//! [`Message::fds`], moving them is `os::channel`'s business.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::codec::{VERSION, WireError, Writer, read, read_prefix};
use super::geometry::{Geometry, RingOffer};
use super::reason::Reason;
use crate::ids::{Cookie, InstanceId, Nonce, Tuple, Vqpn, WireTuple};

/// How many instances a REDIRECT may name.
pub const MAX_REDIRECT: usize = 64;

/// The longest message, in bytes; fits one Ethernet frame.
pub const MAX_MESSAGE: usize = size_of::<Header>() + size_of::<RedirectHead>() + MAX_REDIRECT * size_of::<InstanceId>();

const MAGIC: [u8; 4] = *b"rsok";

/// What precedes every message (P10).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    /// Bytes that follow this header, exactly.
    length: U16,
}

/// An out-of-band message. Units, order and meaning are in docs/protocol.md.
///
/// | field | what |
/// |---|---|
/// | `request` | the question's number, which the asker has chosen and the answer repeats (P11) |
/// | `tuple` | the connection, as both ends see it (P12) |
/// | `nonce_c`, `nonce_s` | what markers to C, and to S, start with (P31) |
/// | `nonce_mine`, `nonce_yours` | the same, of the message's sender and of its receiver |
/// | `instance_c`, `instance_s`, `pid` | who speaks, and its process as it sees that itself |
/// | `geometry`, `ring` | the sizes of the sender's memory; a ring in it |
/// | `yours`, `mine`, `vqpn` | the number that the receiver, and the sender, gave to the stream (P26) |
/// | `id` | a waiter (P27) |
#[derive(Debug, Clone)]
#[allow(
    missing_docs,
    reason = "the fields mean the same in every message, and are in the table"
)]
pub enum Message {
    /// "I am the connecting end of `tuple`; do you hold the other end, and do you want it moved?"
    Ask {
        request: u64,
        tuple: Tuple,
        nonce_c: Nonce,
        instance_c: InstanceId,
    },
    /// "I hold it and want it moved; your markers to me start with `nonce_s`."
    Yes {
        request: u64,
        nonce_s: Nonce,
        instance_s: InstanceId,
    },
    /// "It stays on TCP."
    No { request: u64, reason: Reason },
    /// "I do not hold it; one of these, which listen on the same socket, may." At most [`MAX_REDIRECT`].
    Redirect { request: u64, instances: Vec<InstanceId> },
    /// The connector gives up after YES, and has not written its HELLO and never will.
    Cancel {
        request: u64,
        nonce_c: Nonce,
        nonce_s: Nonce,
    },
    /// First on a new link, with the arena and waiter memfds: proves that C has read S's HELLO.
    Link {
        cookie: Cookie,
        instance_c: InstanceId,
        pid: u32,
        geometry: Geometry,
    },
    /// The link stands; with S's arena and waiter memfds.
    LinkAccept {
        instance_s: InstanceId,
        pid: u32,
        geometry: Geometry,
    },
    /// The link does not come about; the sender closes the channel.
    LinkRefuse { reason: Reason },
    /// "Write this stream's data to `ring`, under `vqpn`." The nonces say which stream.
    Open {
        nonce_mine: Nonce,
        nonce_yours: Nonce,
        vqpn: Vqpn,
        ring: RingOffer,
    },
    /// The other half of OPEN: `yours` is the opener's number, `mine` and `ring` the sender's.
    OpenAck { yours: Vqpn, mine: Vqpn, ring: RingOffer },
    /// The stream that the opener called `yours` stays on TCP.
    OpenRefuse { yours: Vqpn, reason: Reason },
    /// With the button of the doorbell on which waiter `id` of the sender sleeps.
    Waiter { id: u32 },
    /// The button of the receiver's waiter `id` is not kept.
    WaiterGone { id: u32 },
    /// "Move your sending direction of stream `yours` back to TCP"; from byte `resend_from` of that
    /// direction if the link failed, else after the last byte on the link.
    DemoteRequest { yours: Vqpn, resend_from: Option<u64> },
    /// "Move your sending direction of stream `yours` to the ring that is on offer."
    Adopt { yours: Vqpn },
    /// "What is in this file you have sent in TCP, and it can be given to its reader there only: send it there again,
    /// before all that is in the ring of stream `yours`, of which nothing was read."
    TakeBack { yours: Vqpn, bytes: u32 },
    /// TAKE-BACK is carried out: stream `yours` is at its end in that direction.
    TakenBack { yours: Vqpn },
    /// The sender will not touch stream `yours` again; its own number for it is free.
    Closed { yours: Vqpn },
    /// "Wake your waiter `id`": where its sender cannot.
    Ring { id: u32 },
    /// "Connect a bulk queue pair beside this link's, and introduce it with this cookie." From who has accepted the
    /// link to who has [direct transfers](super::Introduction::is_direct).
    Bulk { cookie: Cookie },
    /// "Ask me for a bulk queue pair." The other way.
    BulkWanted,
    /// The sender's end of the bulk queue pair is given up. Once from each end.
    BulkGone,
}

/// The numbers of the kinds. Numbers are never used again for something else.
mod kind {
    pub const ASK: u8 = 1;
    pub const YES: u8 = 2;
    pub const NO: u8 = 3;
    pub const REDIRECT: u8 = 4;
    pub const CANCEL: u8 = 5;
    pub const LINK: u8 = 16;
    pub const LINK_ACCEPT: u8 = 17;
    pub const LINK_REFUSE: u8 = 18;
    pub const OPEN: u8 = 32;
    pub const OPEN_ACK: u8 = 33;
    pub const OPEN_REFUSE: u8 = 34;
    pub const WAITER: u8 = 35;
    pub const WAITER_GONE: u8 = 36;
    pub const DEMOTE_REQUEST: u8 = 37;
    pub const ADOPT: u8 = 38;
    pub const CLOSED: u8 = 39;
    pub const RING: u8 = 40;
    pub const TAKE_BACK: u8 = 41;
    pub const TAKEN_BACK: u8 = 42;
    pub const BULK: u8 = 43;
    pub const BULK_WANTED: u8 = 44;
    pub const BULK_GONE: u8 = 45;
}

/// Declares the body structs: plain bytes, no padding, any alignment.
macro_rules! bodies {
    ($($name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        struct $name { $($field: $type),* }
    )*};
}

bodies! {
    Ask { request: U64, tuple: WireTuple, nonce_c: Nonce, instance_c: InstanceId }
    Yes { request: U64, nonce_s: Nonce, instance_s: InstanceId }
    No { request: U64, reason: U16 }
    RedirectHead { request: U64, count: U16 }
    Cancel { request: U64, nonce_c: Nonce, nonce_s: Nonce }
    Link { cookie: Cookie, instance: InstanceId, pid: U32, geometry: Sizes }
    LinkAccept { instance: InstanceId, pid: U32, geometry: Sizes }
    LinkRefuse { reason: U16 }
    Sizes { arena_bytes: U64, waiter_bytes: U64, queue_entries: U32, max_waiters: U32, max_ring: U64 }
    Ring { page: U32, log2: u8 }
    Open { nonce_mine: Nonce, nonce_yours: Nonce, vqpn: U32, ring: Ring }
    OpenAck { yours: U32, mine: U32, ring: Ring }
    OpenRefuse { yours: U32, reason: U16 }
    Waiter { id: U32 }
    DemoteRequest { yours: U32, resend: u8, from: U64 }
    Stream { yours: U32 }
    TakeBack { yours: U32, bytes: U32 }
    Bulk { cookie: Cookie }
}

impl From<&Geometry> for Sizes {
    fn from(g: &Geometry) -> Self {
        Self {
            arena_bytes: g.arena_bytes.into(),
            waiter_bytes: g.waiter_bytes.into(),
            queue_entries: g.queue_entries.into(),
            max_waiters: g.max_waiters.into(),
            max_ring: g.max_ring.into(),
        }
    }
}

impl From<&Sizes> for Geometry {
    fn from(s: &Sizes) -> Self {
        Self {
            arena_bytes: s.arena_bytes.get(),
            waiter_bytes: s.waiter_bytes.get(),
            queue_entries: s.queue_entries.get(),
            max_waiters: s.max_waiters.get(),
            max_ring: s.max_ring.get(),
        }
    }
}

impl From<&RingOffer> for Ring {
    fn from(r: &RingOffer) -> Self {
        Self {
            page: r.page().into(),
            log2: r.log2(),
        }
    }
}

impl Ring {
    fn offer(&self) -> Result<RingOffer, WireError> {
        RingOffer::new(self.page.get(), self.log2).ok_or(WireError::Field("ring size"))
    }
}

impl Message {
    /// The stream that it is about, by the number that its receiver chose (P26).
    pub const fn yours(&self) -> Option<Vqpn> {
        match self {
            Self::OpenAck { yours, .. }
            | Self::OpenRefuse { yours, .. }
            | Self::DemoteRequest { yours, .. }
            | Self::Adopt { yours }
            | Self::TakeBack { yours, .. }
            | Self::TakenBack { yours }
            | Self::Closed { yours } => Some(*yours),
            _ => None,
        }
    }

    /// How many file descriptors must travel beside this message.
    pub const fn fds(&self) -> usize {
        match self {
            Self::Link { .. } | Self::LinkAccept { .. } => 2,
            Self::Waiter { .. } | Self::TakeBack { .. } => 1,
            _ => 0,
        }
    }

    /// Writes the message to the front of `buf`; gives its bytes.
    ///
    /// Fails with [`WireError::Buffer`] if `buf` is shorter than the message ([`MAX_MESSAGE`] always
    /// suffices), and with [`WireError::Field`] if a REDIRECT names too many instances.
    pub fn encode<'b>(&self, buf: &'b mut [u8]) -> Result<&'b [u8], WireError> {
        let (head, rest) = buf.split_at_mut_checked(size_of::<Header>()).ok_or(WireError::Buffer)?;
        let mut body = Writer::new(rest);
        let kind = self.encode_body(&mut body)?;
        let length = body.len;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            kind,
            length: u16::try_from(length).map_err(|_| WireError::Buffer)?.into(),
        };
        Writer::new(head).put(&header)?;
        buf.get(..size_of::<Header>() + length).ok_or(WireError::Buffer)
    }

    /// Writes the body; gives the kind.
    fn encode_body(&self, out: &mut Writer<'_>) -> Result<u8, WireError> {
        let (kind, put) = match *self {
            Self::Ask {
                request,
                ref tuple,
                nonce_c,
                instance_c,
            } => {
                let tuple = tuple.to_wire();
                (
                    kind::ASK,
                    out.put(&Ask {
                        request: request.into(),
                        tuple,
                        nonce_c,
                        instance_c,
                    }),
                )
            }
            Self::Yes {
                request,
                nonce_s,
                instance_s,
            } => (
                kind::YES,
                out.put(&Yes {
                    request: request.into(),
                    nonce_s,
                    instance_s,
                }),
            ),
            Self::No { request, reason } => (
                kind::NO,
                out.put(&No {
                    request: request.into(),
                    reason: reason.code().into(),
                }),
            ),
            Self::Redirect { request, ref instances } => {
                if instances.len() > MAX_REDIRECT {
                    return Err(WireError::Field("instance count"));
                }
                let count = U16::new(instances.len() as u16);
                out.put(&RedirectHead {
                    request: request.into(),
                    count,
                })?;
                (kind::REDIRECT, out.put(instances.as_slice()))
            }
            Self::Cancel {
                request,
                nonce_c,
                nonce_s,
            } => (
                kind::CANCEL,
                out.put(&Cancel {
                    request: request.into(),
                    nonce_c,
                    nonce_s,
                }),
            ),
            Self::Link {
                cookie,
                instance_c: instance,
                pid,
                ref geometry,
            } => {
                let geometry = geometry.into();
                (
                    kind::LINK,
                    out.put(&Link {
                        cookie,
                        instance,
                        pid: pid.into(),
                        geometry,
                    }),
                )
            }
            Self::LinkAccept {
                instance_s: instance,
                pid,
                ref geometry,
            } => {
                let geometry = geometry.into();
                (
                    kind::LINK_ACCEPT,
                    out.put(&LinkAccept {
                        instance,
                        pid: pid.into(),
                        geometry,
                    }),
                )
            }
            Self::LinkRefuse { reason } => (
                kind::LINK_REFUSE,
                out.put(&LinkRefuse {
                    reason: reason.code().into(),
                }),
            ),
            Self::Open {
                nonce_mine,
                nonce_yours,
                vqpn,
                ref ring,
            } => {
                let (vqpn, ring) = (vqpn.0.into(), ring.into());
                (
                    kind::OPEN,
                    out.put(&Open {
                        nonce_mine,
                        nonce_yours,
                        vqpn,
                        ring,
                    }),
                )
            }
            Self::OpenAck { yours, mine, ref ring } => {
                let ring = ring.into();
                (
                    kind::OPEN_ACK,
                    out.put(&OpenAck {
                        yours: yours.0.into(),
                        mine: mine.0.into(),
                        ring,
                    }),
                )
            }
            Self::OpenRefuse { yours, reason } => {
                let reason = reason.code().into();
                (
                    kind::OPEN_REFUSE,
                    out.put(&OpenRefuse {
                        yours: yours.0.into(),
                        reason,
                    }),
                )
            }
            Self::Waiter { id } => (kind::WAITER, out.put(&Waiter { id: id.into() })),
            Self::WaiterGone { id } => (kind::WAITER_GONE, out.put(&Waiter { id: id.into() })),
            Self::Ring { id } => (kind::RING, out.put(&Waiter { id: id.into() })),
            Self::DemoteRequest { yours, resend_from } => {
                let resend = u8::from(resend_from.is_some());
                let from = resend_from.unwrap_or(0).into();
                let body = DemoteRequest {
                    yours: yours.0.into(),
                    resend,
                    from,
                };
                (kind::DEMOTE_REQUEST, out.put(&body))
            }
            Self::TakeBack { yours, bytes } => {
                let (yours, bytes) = (yours.0.into(), bytes.into());
                (kind::TAKE_BACK, out.put(&TakeBack { yours, bytes }))
            }
            Self::TakenBack { yours } => (kind::TAKEN_BACK, out.put(&Stream { yours: yours.0.into() })),
            Self::Adopt { yours } => (kind::ADOPT, out.put(&Stream { yours: yours.0.into() })),
            Self::Closed { yours } => (kind::CLOSED, out.put(&Stream { yours: yours.0.into() })),
            Self::Bulk { cookie } => (kind::BULK, out.put(&Bulk { cookie })),
            Self::BulkWanted => (kind::BULK_WANTED, Ok(())),
            Self::BulkGone => (kind::BULK_GONE, Ok(())),
        };
        put.map(|()| kind)
    }

    /// Reads the one message that `datagram` consists of. Total: any bytes give a message or an error.
    pub fn decode(datagram: &[u8]) -> Result<Self, WireError> {
        let (header, body) = read_prefix::<Header>(datagram)?;
        if header.magic != MAGIC {
            return Err(WireError::Magic);
        }
        if header.version != VERSION {
            return Err(WireError::Version(header.version));
        }
        if usize::from(header.length.get()) != body.len() {
            return Err(WireError::Length);
        }
        Self::decode_body(header.kind, body)
    }

    fn decode_body(kind: u8, body: &[u8]) -> Result<Self, WireError> {
        Ok(match kind {
            kind::ASK => {
                let b: &Ask = read(body)?;
                let tuple = Tuple::from_wire(&b.tuple);
                let (nonce_c, instance_c) = (b.nonce_c, b.instance_c);
                Self::Ask {
                    request: b.request.get(),
                    tuple,
                    nonce_c,
                    instance_c,
                }
            }
            kind::YES => {
                let b: &Yes = read(body)?;
                Self::Yes {
                    request: b.request.get(),
                    nonce_s: b.nonce_s,
                    instance_s: b.instance_s,
                }
            }
            kind::NO => {
                let b: &No = read(body)?;
                Self::No {
                    request: b.request.get(),
                    reason: Reason::from_code(b.reason.get()),
                }
            }
            kind::REDIRECT => {
                let (head, list) = read_prefix::<RedirectHead>(body)?;
                let list: &[InstanceId] = read_list(list)?;
                let count = usize::from(head.count.get());
                if count > MAX_REDIRECT {
                    return Err(WireError::Field("instance count"));
                }
                if count != list.len() {
                    return Err(WireError::Length);
                }
                Self::Redirect {
                    request: head.request.get(),
                    instances: list.to_vec(),
                }
            }
            kind::CANCEL => {
                let b: &Cancel = read(body)?;
                Self::Cancel {
                    request: b.request.get(),
                    nonce_c: b.nonce_c,
                    nonce_s: b.nonce_s,
                }
            }
            kind::LINK => {
                let b: &Link = read(body)?;
                let (cookie, instance_c, pid) = (b.cookie, b.instance, b.pid.get());
                Self::Link {
                    cookie,
                    instance_c,
                    pid,
                    geometry: (&b.geometry).into(),
                }
            }
            kind::LINK_ACCEPT => {
                let b: &LinkAccept = read(body)?;
                let (instance_s, pid) = (b.instance, b.pid.get());
                Self::LinkAccept {
                    instance_s,
                    pid,
                    geometry: (&b.geometry).into(),
                }
            }
            kind::LINK_REFUSE => {
                let b: &LinkRefuse = read(body)?;
                Self::LinkRefuse {
                    reason: Reason::from_code(b.reason.get()),
                }
            }
            kind::OPEN => {
                let b: &Open = read(body)?;
                let (nonce_mine, nonce_yours) = (b.nonce_mine, b.nonce_yours);
                let (vqpn, ring) = (Vqpn(b.vqpn.get()), b.ring.offer()?);
                Self::Open {
                    nonce_mine,
                    nonce_yours,
                    vqpn,
                    ring,
                }
            }
            kind::OPEN_ACK => {
                let b: &OpenAck = read(body)?;
                let (yours, mine) = (Vqpn(b.yours.get()), Vqpn(b.mine.get()));
                Self::OpenAck {
                    yours,
                    mine,
                    ring: b.ring.offer()?,
                }
            }
            kind::OPEN_REFUSE => {
                let b: &OpenRefuse = read(body)?;
                let reason = Reason::from_code(b.reason.get());
                Self::OpenRefuse {
                    yours: Vqpn(b.yours.get()),
                    reason,
                }
            }
            kind::WAITER => Self::Waiter {
                id: read::<Waiter>(body)?.id.get(),
            },
            kind::WAITER_GONE => Self::WaiterGone {
                id: read::<Waiter>(body)?.id.get(),
            },
            kind::RING => Self::Ring {
                id: read::<Waiter>(body)?.id.get(),
            },
            kind::DEMOTE_REQUEST => {
                let b: &DemoteRequest = read(body)?;
                let resend_from = match b.resend {
                    0 => None,
                    1 => Some(b.from.get()),
                    _ => return Err(WireError::Field("resend flag")),
                };
                Self::DemoteRequest {
                    yours: Vqpn(b.yours.get()),
                    resend_from,
                }
            }
            kind::BULK => Self::Bulk {
                cookie: read::<Bulk>(body)?.cookie,
            },
            kind::BULK_WANTED => empty(body, Self::BulkWanted)?,
            kind::BULK_GONE => empty(body, Self::BulkGone)?,
            kind::ADOPT => Self::Adopt { yours: stream(body)? },
            kind::TAKE_BACK => {
                let b: &TakeBack = read(body)?;
                Self::TakeBack {
                    yours: Vqpn(b.yours.get()),
                    bytes: b.bytes.get(),
                }
            }
            kind::TAKEN_BACK => Self::TakenBack { yours: stream(body)? },
            kind::CLOSED => Self::Closed { yours: stream(body)? },
            unknown => return Err(WireError::Kind(unknown)),
        })
    }
}

/// A message without a body.
fn empty(body: &[u8], message: Message) -> Result<Message, WireError> {
    if body.is_empty() {
        Ok(message)
    } else {
        Err(WireError::Length)
    }
}

fn stream(body: &[u8]) -> Result<Vqpn, WireError> {
    Ok(Vqpn(read::<Stream>(body)?.yours.get()))
}

fn read_list(bytes: &[u8]) -> Result<&[InstanceId], WireError> {
    <[InstanceId]>::ref_from_bytes(bytes).map_err(|_| WireError::Length)
}

#[cfg(test)]
mod tests;
