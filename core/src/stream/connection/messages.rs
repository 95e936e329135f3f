//! Handles the peer's messages on a link that are about a stream (docs/protocol.md, P20–P29). The caller, which owns
//! the link, handles all other messages. It also finds the socket of the stream's number.

use crate::fabric::NoProducer;
use crate::ids::{Nonce, Vqpn};
use crate::region::Region;
use crate::stats::Reason;
use crate::stream::connection::attempt::{end_attempt, feed};
use crate::stream::connection::directions::resend;
use crate::stream::connection::io::{ControlOf, SocketIo, StreamLink, Task};
use crate::stream::connection::stay::leave;
use crate::stream::connection::{Theirs, stay};
use crate::stream::handshake::Handshake;
use crate::stream::resume::Resume;
use crate::wire;
use crate::wire::Message;

/// The peer has broken the protocol. The caller closes the link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer breaks the protocol of the link")]
pub struct Broken;

/// Handles OPEN. `socket` is the socket whose attempt has these nonces; `None` if there is none. The nonces are named
/// as in the message, from the peer's view: markers to the peer start with `mine`. `theirs` is the peer's stream, and
/// `first` its first ring. Returns true if the attempt continues, false if the OPEN is refused.
pub fn on_open<S: SocketIo>(
    socket: Option<&S>,
    link: &S::Link,
    (mine, yours): (Nonce, Nonce),
    theirs: Vqpn,
    first: Region,
) -> Result<bool, Broken> {
    let opened = socket.and_then(|socket| {
        let mut control = socket.control.lock()?;
        // P25: the nonces have to be this attempt's, and the link has to lead to the instance of the peer's HELLO.
        let matches = control
            .handshake
            .as_ref()
            .is_some_and(|h| h.is_opening() && h.mine == yours && h.theirs == Some(mine));
        let is_from = control.hello.is_some_and(|hello| hello.instance == link.peer());
        (matches && is_from).then(|| opened(socket, &mut control, link, theirs, first))
    });
    match opened {
        Some(Ok(())) => Ok(true),
        Some(Err(NoProducer::NoSuch)) => Err(Broken),
        Some(Err(NoProducer::Limits)) | None => {
            let _ = link.send(&Message::OpenRefuse {
                yours: theirs,
                reason: wire::Reason::Cancelled,
            });
            Ok(false)
        }
    }
}

/// Handles OPEN-ACK for this end's stream `mine`. `socket` is the stream's socket, `None` if the stream has no socket
/// any more. `theirs` is the peer's stream, and `first` its first ring.
pub fn on_open_ack<S: SocketIo>(
    socket: Option<&S>,
    link: &S::Link,
    mine: Vqpn,
    theirs: Vqpn,
    first: Region,
) -> Result<(), Broken> {
    let control = socket.and_then(|socket| Some((socket, socket.control.lock()?)));
    let awaited = control.filter(|(_, control)| {
        let opened = control.opened.as_ref();
        opened.is_some_and(|o| o.theirs == Theirs::Awaited && o.mine == mine && o.link == *link)
    });
    let Some((socket, mut control)) = awaited else {
        // This end has given the stream up since it sent OPEN. The peer's number becomes free when the peer receives
        // CLOSED.
        let _ = link.send(&Message::Closed { yours: theirs });
        return Ok(());
    };
    match opened(socket, &mut control, link, theirs, first) {
        Ok(()) => Ok(()),
        Err(NoProducer::NoSuch) => Err(Broken),
        Err(NoProducer::Limits) => {
            // This end acts as if it had given the stream up before the OPEN-ACK came.
            let _ = link.send(&Message::Closed { yours: theirs });
            end_attempt(socket, &mut control);
            Ok(())
        }
    }
}

/// Error: the caller is a signal handler that has interrupted this thread's own use of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the connection is in use")]
pub struct Interrupted;

/// Handles OPEN-REFUSE for the socket's stream `mine`.
pub fn on_open_refused<S: SocketIo>(socket: &S, mine: Vqpn) -> Result<(), Interrupted> {
    let mut control = socket.control.lock().ok_or(Interrupted)?;
    if let Some(opened) = control.opened.as_mut()
        && opened.mine == mine
        && opened.theirs == Theirs::Awaited
    {
        opened.theirs = Theirs::None;
    }
    end_attempt(socket, &mut control);
    Ok(())
}

/// Handles DEMOTE-REQUEST: the sending direction goes back to TCP. With `resend_from` the peer has stopped reading the
/// ring at that position, and the bytes from there on are sent again.
pub fn on_demote_request<S: SocketIo>(socket: &S, link: &S::Link, resend_from: Option<u64>) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    if link.is_remote() {
        // P75: between hosts both directions leave by RESUME.
        return stay::end_by(socket, &mut control, Resume::leave_at_once);
    }
    if resend_from.is_some() {
        resend(socket);
    }
    // If this end has begun to leave before the request, it keeps its own reason.
    let reason = control.leave.unwrap_or(Reason::PeerAsked);
    leave(socket, &mut control, reason);
}

/// Continues the attempt with the peer's stream `theirs`, whose first ring is `first`.
fn opened<S: SocketIo>(
    socket: &S,
    control: &mut ControlOf<S>,
    link: &S::Link,
    theirs: Vqpn,
    first: Region,
) -> Result<(), NoProducer> {
    let producer = link.producer(theirs)?;
    // The peer's number is set before the two streams are a pair. The peer may have written SWITCH before this end
    // handles its OPEN or OPEN-ACK. Then a reader at this end takes bytes out of the ring as soon as the streams are a
    // pair, and notifies the peer by this number. (Within a host a reader may even take bytes before that. So the peer
    // checks again when it reads this end's SWITCH.)
    socket.set_peer(theirs);
    socket.set_link(Some(link));
    match control.opened.as_mut() {
        Some(opened) => {
            opened.theirs = Theirs::Open(theirs);
            link.pair(opened.mine, theirs, first);
        }
        None => control.offered = Some((theirs, first)),
    }
    if let Some(mut tx) = socket.tx.lock() {
        tx.producer = Some(producer);
    }
    feed(socket, control, Handshake::on_open);
    // There is a link from now on. So the service thread sets the wake-up words of the stream's rings for the threads
    // that wait on the socket.
    socket.later(Task::Settle);
    Ok(())
}
