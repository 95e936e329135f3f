//! This end's stream on the link: it leaves the link, and is given back.

use std::sync::atomic::Ordering::Acquire;

use super::io::{ControlOf, SocketIo, StreamLink};
use super::object::Opened;
use super::sending::demote_tx;
use super::stay;
use crate::ids::Vqpn;
use crate::stats::Reason;
use crate::stream::mode::Mode;
use crate::stream::resume::Resume;
use crate::wire::Message;

/// Takes the socket back to TCP: the sending direction now, the receiving one when the peer follows this end's request.
/// No handshake is under way. The caller holds the control lock.
pub fn leave_link<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    socket.set_why(reason.into());
    if stay::is_staying(control) {
        socket.pin();
        control.returns = false;
        return stay::feed(socket, control, Resume::leave);
    }
    demote_tx(socket);
    if let Some(opened) = control.opened.clone()
        && socket.rx_mode.load(Acquire) == Mode::Link
        && !control.asked_back
    {
        control.asked_back = true;
        if let Some(yours) = control.peer {
            ask_back(&opened.link, yours, None);
        }
    }
    socket.pin();
}

/// Asks the peer to take its sending direction back to TCP. With `resend_from`, a position in the bytes that the peer
/// has sent, the peer sends the bytes from there on again.
pub fn ask_back(link: &impl StreamLink, yours: Vqpn, resend_from: Option<u64>) {
    link.send(&Message::DemoteRequest { yours, resend_from });
}

/// Gives this end's stream on the link back. Both directions are on TCP, or the socket is being closed.
pub fn close_stream<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    let consumer = socket.rx.lock().and_then(|mut rx| {
        rx.stays = false;
        rx.consumer.take()
    });
    control.resume = None;
    if let Some(mut tx) = socket.tx.lock() {
        tx.producer = None;
        tx.is_suspended = false;
    }
    let peer = control.peer.take();
    match control.opened.take() {
        Some(Opened {
            link,
            mine,
            asked: true,
        }) => link.close_unanswered(mine, consumer),
        Some(Opened { link, mine, .. }) => link.close(mine, peer, consumer),
        None => {
            if let (Some(link), Some(peer)) = (socket.link(), peer) {
                link.done_with(peer);
            }
        }
    }
    socket.set_link(None);
    control.asked_back = false;
    socket.show_link(None);
}
