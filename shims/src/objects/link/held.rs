//! Guards that keep a link object the same link. [`Pin`] keeps the object alone. [`Held`] also keeps the rings of a
//! stream of this end. The rings stay mapped, and no other stream gets them, even after both ends have left the stream.
//! Neither guard reads or writes the rings.

use rdmasock_core::ids::Vqpn;

use super::Link;

/// A pin of a link: its object does not become another link until this is dropped.
pub struct Pin(&'static Link);

impl Pin {
    /// Pins the link; `None` if the link is over.
    pub fn new(link: &'static Link) -> Option<Self> {
        link.pin().then_some(Self(link))
    }

    /// Returns the link.
    pub fn link(&self) -> &'static Link {
        self.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

/// A hold on the rings of a stream, which ends when this is dropped.
pub struct Held {
    pin: Pin,
    mine: Vqpn,
}

impl Held {
    /// Holds the rings of this end's stream `mine`, which this end has not closed. `None` if the link is over.
    pub fn new(link: &'static Link, mine: Vqpn) -> Option<Self> {
        let pin = Pin::new(link)?;
        link.hold(mine);
        Some(Self { pin, mine })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.pin.link().let_go(self.mine);
    }
}
