//! What keeps a link object what it is: a hold on the object alone ([`Pin`]), or on the rings of one of our streams too
//! ([`Held`]), which stay mapped, and nobody else gets them, also after both ends have left the stream. Not for reading
//! or writing them.

use rdmasock_core::ids::Vqpn;

use super::Link;

/// A hold on a link: its object does not become another link until this is dropped.
pub struct Pin(&'static Link);

impl Pin {
    /// `None`: the link is over.
    pub fn new(link: &'static Link) -> Option<Self> {
        link.pin().then_some(Self(link))
    }

    /// The link.
    pub fn link(&self) -> &'static Link {
        self.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

/// See the module. What it holds it lets go of when it is dropped.
pub struct Held {
    pin: Pin,
    mine: Vqpn,
}

impl Held {
    /// Holds the rings of our stream `mine`, which has not been closed here. `None`: the link is over.
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
