//! The wire: what two instances say to each other, byte by byte (docs/protocol.md has the rules).
//!
//! Two kinds of things are said. A [`Message`] goes out of band, one a datagram, on a service name,
//! a link's side channel or the control port. A [`Marker`] goes inside the TCP stream, where
//! [`scan`] finds it. All integers are little-endian; decoding is total, checks every length and
//! never panics. Nothing here does I/O or knows what a message leads to.

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
