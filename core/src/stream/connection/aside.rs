//! The end of data that was set aside in front of a marker (P85; `hand_over`): this end asks the peer, which has sent
//! the data, to take it back.
//!
//! This works within a host only. Otherwise, and if the peer cannot take the data back, the connection is reset. A gap
//! in the data would be worse than the end of the connection.

use super::io::{ControlOf, RxOf, SocketIo, StreamLink};
use crate::stream::mode::Receiving;
use crate::wire::Message;

/// Bytes that are set aside, or taken back, at most (P85).
pub const MOST: usize = 16 * 1024 * 1024;

/// Asks the peer to take the data back that is set aside, once SWITCH has been read. Resets the connection if that
/// cannot be asked. The caller holds the control lock.
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

/// Drops the data that is set aside, and moves the direction by `event`.
pub fn end<S: SocketIo>(socket: &S, rx: &mut RxOf<S>, event: Receiving) {
    rx.aside = Vec::new();
    socket.rx_mode.go(event);
}
