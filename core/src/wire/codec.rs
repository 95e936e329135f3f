//! The common parts of the encodings of messages, markers, introductions and records: the version, the errors, and
//! functions that read and append fields. Also the sizes of an end's memory, which LINK and LINK-ACCEPT carry. The
//! layout of an arena is in `fabric/layout.rs`.

use std::net::{Ipv6Addr, SocketAddr};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::ids::{Cookie, InstanceId, Nonce, Tuple, Vqpn, mapped};
use crate::region::Region;
use crate::wire::message::Reason;

/// The version of the whole protocol, part of every service name, message and marker (P1).
pub const VERSION: u8 = 2;

/// Why bytes are not a message or a marker of this protocol.
///
/// If decoding fails, the writer of the bytes is at fault. If encoding fails, the caller is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The bytes are shorter or longer than their head says, or than their kind requires.
    #[error("wrong length")]
    Length,
    /// The bytes do not begin as a message of this protocol.
    #[error("not an rdmasock message")]
    Magic,
    /// Another version of the protocol.
    #[error("protocol version {0}")]
    Version(u8),
    /// A kind that this version does not know.
    #[error("unknown kind {0}")]
    Kind(u8),
    /// A field has a value outside its range.
    #[error("{0} out of range")]
    Field(&'static str),
    /// The buffer to encode into is too small. The caller is at fault, not the peer.
    #[error("buffer too small")]
    Buffer,
}

/// The sizes of the memory that an end shares with the peer. The fds of the memory come with the same message (P24).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the arena memfd, which holds the ready queues and the rings.
    pub arena_bytes: u64,
    /// Bytes of the largest ring that the end writes into.
    pub max_ring: u64,
}

/// Appends values to a buffer of the caller. `put` fails if the buffer has no room for the value.
pub(crate) struct Writer<'a> {
    buf: &'a mut [u8],
    /// The number of bytes appended.
    pub len: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, len: 0 }
    }

    pub(crate) fn put<T: IntoBytes + Immutable + ?Sized>(&mut self, value: &T) -> Result<(), WireError> {
        let bytes = value.as_bytes();
        let end = self.len.checked_add(bytes.len()).ok_or(WireError::Buffer)?;
        self.buf
            .get_mut(self.len..end)
            .ok_or(WireError::Buffer)?
            .copy_from_slice(bytes);
        self.len = end;
        Ok(())
    }
}

/// The head of a message (P10), behind its magic bytes, and of a marker (P30), behind its nonce.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Head {
    version: u8,
    kind: u8,
    /// The exact number of bytes that follow the head.
    pub length: U16,
}

/// Writes `front`, a head and a body to the beginning of `buf`. Returns all bytes written. `put_body` writes the body
/// and returns the kind. Fails with [`WireError::Buffer`] if `buf` is too short.
pub(super) fn put_frame<'b>(
    front: &[u8],
    buf: &'b mut [u8],
    put_body: impl FnOnce(&mut Writer<'_>) -> Result<u8, WireError>,
) -> Result<&'b [u8], WireError> {
    let start = front.len() + size_of::<Head>();
    let (head, rest) = buf.split_at_mut_checked(start).ok_or(WireError::Buffer)?;
    let mut body = Writer::new(rest);
    let kind = put_body(&mut body)?;
    let length = body.len;
    let mut head = Writer::new(head);
    head.put(front)?;
    head.put(&Head {
        version: VERSION,
        kind,
        length: u16::try_from(length).map_err(|_| WireError::Buffer)?.into(),
    })?;
    buf.get(..start + length).ok_or(WireError::Buffer)
}

/// Decodes `bytes`, which are a head and a body. `take_body` gets the kind and reads the body.
pub(super) fn take_frame<T>(
    bytes: &[u8],
    take_body: impl FnOnce(u8, &mut &[u8]) -> Result<T, WireError>,
) -> Result<T, WireError> {
    let mut body = bytes;
    let head: Head = take(&mut body)?;
    if head.version != VERSION {
        return Err(WireError::Version(head.version));
    }
    if usize::from(head.length.get()) != body.len() {
        return Err(WireError::Length);
    }
    let value = take_body(head.kind, &mut body)?;
    body.is_empty().then_some(value).ok_or(WireError::Length)
}

/// A field of a message or a record. Integers are little-endian, and no byte lies between two fields.
pub(crate) trait Field<'a>: Sized {
    /// Appends the field.
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError>;

    /// Reads the field off the front of `from`, and removes it there.
    fn take(from: &mut &'a [u8]) -> Result<Self, WireError>;
}

/// Reads a value off the front of `from`, and removes it there. [`WireError::Length`] if `from` is too short.
pub(super) fn take<T: FromBytes>(from: &mut &[u8]) -> Result<T, WireError> {
    let (value, rest) = T::read_from_prefix(from).map_err(|_| WireError::Length)?;
    *from = rest;
    Ok(value)
}

/// Implements [`Field`] for each type by its type on the wire, and the conversions to and from that type.
macro_rules! fields {
    ($($type:ty as $wire:ty: |$value:ident| $put:expr, |$read:ident| $take:expr;)*) => {$(
        impl Field<'_> for $type {
            fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
                let $value = self;
                out.put::<$wire>(&$put)
            }

            fn take(from: &mut &[u8]) -> Result<Self, WireError> {
                let $read: $wire = take(from)?;
                $take
            }
        }
    )*};
}

fields! {
    u8 as u8: |n| *n, |n| Ok(n);
    bool as u8: |is| u8::from(*is), |n| match n {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(WireError::Field("flag")),
    };
    u16 as U16: |n| (*n).into(), |n| Ok(n.get());
    u32 as U32: |n| (*n).into(), |n| Ok(n.get());
    u64 as U64: |n| (*n).into(), |n| Ok(n.get());
    Nonce as Nonce: |nonce| *nonce, |nonce| Ok(nonce);
    InstanceId as InstanceId: |id| *id, |id| Ok(id);
    Cookie as Cookie: |cookie| *cookie, |cookie| Ok(cookie);
    Vqpn as U32: |vqpn| vqpn.0.into(), |n| Ok(Self(n.get()));
    Reason as U16: |reason| reason.code().into(), |code| Ok(Self::from_code(code.get()));
}

impl Field<'_> for Region {
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        self.page().put(out)?;
        self.log2().put(out)
    }

    fn take(from: &mut &[u8]) -> Result<Self, WireError> {
        let (page, log2) = (Field::take(from)?, Field::take(from)?);
        Self::new(page, log2).ok_or(WireError::Field("ring size"))
    }
}

/// Implements `Field` for structures. Their fields have this order on the wire.
macro_rules! structs {
    ($($Struct:ident { $($field:ident),* })*) => {$(
        impl $crate::wire::codec::Field<'_> for $Struct {
            fn put(&self, out: &mut $crate::wire::codec::Writer<'_>) -> Result<(), $crate::wire::codec::WireError> {
                $($crate::wire::codec::Field::put(&self.$field, out)?;)*
                Ok(())
            }

            fn take(from: &mut &[u8]) -> Result<Self, $crate::wire::codec::WireError> {
                Ok(Self { $($field: $crate::wire::codec::Field::take(from)?),* })
            }
        }
    )*};
}
pub(crate) use structs;

structs! {
    Geometry { arena_bytes, max_ring }
}

/// On the wire: both IP addresses (IPv4 addresses in the IPv4-mapped form), both ports, the namespace, the interface.
/// Any bytes of this length are a tuple.
impl Field<'_> for Tuple {
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        let ends = [self.connector(), self.acceptor()];
        ends.iter().try_for_each(|end| out.put(&mapped(end.ip()).octets()))?;
        ends.iter().try_for_each(|end| end.port().put(out))?;
        self.namespace().put(out)?;
        self.device().put(out)
    }

    fn take(from: &mut &[u8]) -> Result<Self, WireError> {
        let ips: [[u8; 16]; 2] = take(from)?;
        let [connector, acceptor] = ips.map(Ipv6Addr::from);
        let mut end = |ip: Ipv6Addr| Ok(SocketAddr::new(ip.into(), Field::take(from)?));
        let tuple = Self::new(end(connector)?, end(acceptor)?);
        Ok(tuple.at(Field::take(from)?, Field::take(from)?))
    }
}

/// On the wire: the number of bytes, then the bytes.
impl<'a> Field<'a> for &'a [u8] {
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        let length = u16::try_from(self.len()).map_err(|_| WireError::Buffer)?;
        out.put(&U16::new(length))?;
        out.put(*self)
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, WireError> {
        let length = take::<U16>(from)?.get();
        let (bytes, rest) = from.split_at_checked(length.into()).ok_or(WireError::Length)?;
        *from = rest;
        Ok(bytes)
    }
}

/// On the wire: one byte, 1 if there is a value and 0 if not, then the value, or 0.
impl Field<'_> for Option<u64> {
    fn put(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        self.is_some().put(out)?;
        self.unwrap_or(0).put(out)
    }

    fn take(from: &mut &[u8]) -> Result<Self, WireError> {
        let (is_there, value): (bool, u64) = (Field::take(from)?, Field::take(from)?);
        Ok(is_there.then_some(value))
    }
}

/// Declares an enum by the number (the kind) and name of each variant. The fields of a variant are given in their order
/// on the wire. A variant may have one field without a name. A number is never reused for another variant.
macro_rules! kinds {
    (
        $(#[$about:meta])*
        pub enum $Enum:ident $(<$life:lifetime>)? {
            $($(#[$doc:meta])* $kind:literal = $name:ident $({ $($field:ident: $type:ty),* })? $(($only:ident: $alone:ty))?;)*
        }
    ) => {
        $(#[$about])*
        pub enum $Enum $(<$life>)? {
            $($(#[$doc])* $name $({ $($field: $type),* })? $(($alone))?),*
        }

        impl $(<$life>)? $Enum $(<$life>)? {
            /// Writes the fields. Returns the kind.
            #[inline(always)]
            fn put_body(&self, out: &mut $crate::wire::codec::Writer<'_>) -> Result<u8, $crate::wire::codec::WireError> {
                match self {$(
                    Self::$name $({ $($field),* })? $(($only))? => {
                        $($($crate::wire::codec::Field::put($field, out)?;)*)?
                        $($crate::wire::codec::Field::put($only, out)?;)?
                        Ok($kind)
                    }
                )*}
            }

            /// Reads the fields of this kind off the front of `body`.
            fn take_body(kind: u8, body: &mut & $($life)? [u8]) -> Result<Self, $crate::wire::codec::WireError> {
                Ok(match kind {
                    $($kind => Self::$name
                        $({ $($field: $crate::wire::codec::Field::take(body)?),* })?
                        $((<$alone as $crate::wire::codec::Field<'_>>::take(body)?))?,)*
                    unknown => return Err($crate::wire::codec::WireError::Kind(unknown)),
                })
            }
        }
    };
}
pub(crate) use kinds;
