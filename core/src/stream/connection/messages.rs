//! The peer's messages on the link about a stream (docs/protocol.md, P20–P29). The owner of the link handles all other
//! messages, and finds the connection that a number belongs to.

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

/// The peer breaks the protocol: the caller closes the link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer breaks the protocol of the link")]
pub struct Broken;

/// Handles OPEN, for the attempt of `socket` with the nonces `mine` and `yours`, if there is one. They are named as the
/// peer sees them: markers to the peer start with `mine`. Returns true if the attempt continues, false if the OPEN is
/// refused.
pub fn on_open<S: SocketIo>(
    socket: Option<&S>,
    link: &S::Link,
    (mine, yours): (Nonce, Nonce),
    theirs: Vqpn,
    first: Region,
) -> Result<bool, Broken> {
    let opened = socket.and_then(|socket| {
        let mut control = socket.control.lock()?;
        // P25: the nonces are this attempt's, from the instance that the TCP connection leads to.
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

/// Handles OPEN-ACK for this end's stream `mine`. `socket` is the stream's socket, `None` if it has none.
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
            // As if this end had left before the answer came.
            let _ = link.send(&Message::Closed { yours: theirs });
            end_attempt(socket, &mut control);
            Ok(())
        }
    }
}

/// The caller is in a signal handler that has interrupted its own thread's use of the connection.
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

/// Handles DEMOTE-REQUEST: the sending direction goes back to TCP. With `resend_from` the bytes from that position on
/// are sent again.
pub fn on_demote_request<S: SocketIo>(socket: &S, link: &S::Link, resend_from: Option<u64>) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    if link.is_remote() {
        // P75.
        return stay::end_by(socket, &mut control, Resume::leave_at_once);
    }
    if resend_from.is_some() {
        resend(socket);
    }
    // An end that has left of its own accord keeps its own reason.
    let reason = control.leave.unwrap_or(Reason::PeerAsked);
    leave(socket, &mut control, reason);
}

/// Makes the peer's stream `theirs`, whose first ring is `first`, the other end of the attempt.
fn opened<S: SocketIo>(
    socket: &S,
    control: &mut ControlOf<S>,
    link: &S::Link,
    theirs: Vqpn,
    first: Region,
) -> Result<(), NoProducer> {
    let producer = link.producer(theirs)?;
    // Set first, because the peer may have switched before this message was read. Then a reader takes bytes as soon as
    // the two streams are a pair, and notifies the peer by this number. (Within a host the bytes may have come before:
    // the peer checks again when it reads this end's SWITCH.)
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
    // Arms the stream for the threads that wait on the socket, now that there is a link.
    socket.later(Task::Settle);
    Ok(())
}
