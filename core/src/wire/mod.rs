//! The wire: the bytes that two instances send each other (docs/protocol.md has the rules).
//!
//! There are two kinds. A [`Message`] goes out of band, one a datagram, on a service name, a link's side channel or the
//! control port. A [`Marker`] goes inside the TCP stream, where [`scan`] finds it. All integers are little-endian.
//! Decoding is total, checks every length and never panics. This module does no I/O, and does not know what a message
//! leads to.

#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

pub(crate) mod codec;
mod geometry;
mod introduction;
mod marker;
mod message;
mod reason;
pub mod scan;

pub use codec::{MAX_REDIRECT, VERSION, WireError};
pub use geometry::{Geometry, RingOffer};
pub use introduction::{INTRODUCTION, Introduction};
pub use marker::{Hello, LinkAddress, LinkOffer, MAX_MARKER, MIN_MARKER, Marker};
pub use message::{MAX_MESSAGE, Message};
pub use reason::Reason;
