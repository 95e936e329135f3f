//! A hold on the rings of one of our streams: they stay mapped, and nobody else gets them, also after both ends have
//! left the stream. Not for reading or writing them.

use rdmasock_core::ids::Vqpn;

use super::Link;

/// See the module. What it holds it lets go of when it is dropped.
pub struct Held {
    link: &'static Link,
    mine: Vqpn,
}

impl Held {
    /// Holds the rings of our stream `mine`, which has not been closed here. `None`: the link is over.
    pub fn new(link: &'static Link, mine: Vqpn) -> Option<Self> {
        if !link.pin() {
            return None;
        }
        link.hold(mine);
        Some(Self { link, mine })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.link.let_go(self.mine);
        self.link.unpin();
    }
}
