//! What was set aside in front of a marker (P85; `hand_over`): the peer, which has sent it, is asked to take it back.
//!
//! Within a host. Between hosts, and to a peer that cannot, such a connection is reset: a gap in the data would be
//! worse than its end.

use super::io::{ControlOf, RxOf, SocketIo, StreamLink};
use crate::stream::mode::Receiving;
use crate::wire::Message;

/// No more is set aside, or taken back.
pub const MOST: usize = 16 * 1024 * 1024;

/// SWITCH has been read, and something is set aside: the peer is asked to take it back. The caller holds the control
/// lock.
pub fn give_back<S: SocketIo>(socket: &S, control: &ControlOf<S>) {
    if ask_peer(socket, control).is_none() {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), "the peer cannot take back what was not read: reset");
        socket.reset();
        if let Some(mut rx) = socket.rx.lock() {
            end(socket, &mut rx, Receiving::Abandoned);
        }
    }
}

fn ask_peer<S: SocketIo>(socket: &S, control: &ControlOf<S>) -> Option<()> {
    let opened = control.opened.as_ref().filter(|o| !o.link.is_remote())?;
    let yours = control.peer?;
    let rx = socket.rx.lock()?;
    let bytes = u32::try_from(rx.aside.len()).ok()?;
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), bytes, "to be taken back");
    let message = Message::TakeBack { yours, bytes };
    opened.link.send_with(&message, &rx.aside).then_some(())
}

/// Nothing is set aside any more.
pub fn end<S: SocketIo>(socket: &S, rx: &mut RxOf<S>, event: Receiving) {
    rx.aside = Vec::new();
    socket.rx_mode.go(event);
}
