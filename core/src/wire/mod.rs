//! The wire: the bytes that two instances send each other (docs/protocol.md has the rules).
//!
//! There are two kinds. A [`Message`] goes out of band, one a datagram, on a service name, a link's side channel or the
//! control port. A [`Marker`] goes inside the TCP stream, where [`marker::scan`] finds it. All integers are
//! little-endian. Decoding is total, checks every length and never panics. This module does no I/O, and does not know
//! what a message leads to.

#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

pub(crate) mod codec;
mod introduction;
pub mod marker;
mod message;

pub use crate::wire::codec::{Geometry, VERSION, WireError};
pub use crate::wire::introduction::{INTRODUCTION, Introduction};
pub use crate::wire::marker::{Hello, LinkAddress, LinkOffer, MAX_MARKER, MIN_MARKER, Marker};
pub use crate::wire::message::{MAX_MESSAGE, Message, Reason};
