//! The wire: the bytes that two instances send each other (docs/protocol.md has the rules).
//!
//! There are two kinds. A [`Message`] goes outside TCP: over the abstract Unix name of a listening port or of an
//! instance (`rendezvous::names`), or over a link's side channel. A [`Marker`] goes inside the TCP stream, where
//! [`marker::scan`] finds it. All integers are little-endian. Decoding may be given any bytes. It checks every length,
//! returns an error for bytes that are wrong, and never panics. This module does no I/O, and other folders act on the
//! messages.

#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

pub(crate) mod codec;
mod introduction;
pub mod marker;
mod message;

pub use crate::wire::codec::{Geometry, VERSION, WireError};
pub use crate::wire::introduction::{INTRODUCTION, Introduction};
pub use crate::wire::marker::{Hello, LinkAddress, LinkOffer, MAX_MARKER, MIN_MARKER, Marker};
pub use crate::wire::message::{MAX_MESSAGE, Message, Reason};
