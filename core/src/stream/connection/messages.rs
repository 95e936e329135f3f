//! What the peer says on the link about a stream (docs/protocol.md, P20–P29). What does not concern a stream, and to
//! whom a number belongs, is for the owner of the link to know.

use super::attempt::{end_attempt, feed};
use super::io::{ControlOf, SocketIo, StreamLink, Task};
use super::leave::leave;
use super::resume;
use super::sending::resend;
use crate::fabric::link::NoProducer;
use crate::ids::{Nonce, Vqpn};
use crate::stats::Reason;
use crate::stream::handshake::Handshake;
use crate::wire::{self, Message, RingOffer};

/// The peer breaks the protocol: the link is to be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer breaks the protocol of the link")]
pub struct Broken;

/// OPEN, for the attempt of `socket` that `nonce_yours` stands for, if there is one. True if it is followed; else it
/// is refused.
pub fn on_open<S: SocketIo>(
    socket: Option<&S>,
    link: &S::Link,
    nonces: OpenNonces,
    theirs: Vqpn,
    first: RingOffer,
) -> Result<bool, Broken> {
    let opened = socket.and_then(|socket| {
        let mut control = socket.control.lock()?;
        // P25: the nonces of this attempt, from the instance that the TCP connection leads to.
        let matches = control
            .handshake
            .as_ref()
            .is_some_and(|h| h.is_opening() && h.mine() == nonces.yours && h.theirs() == Some(nonces.mine));
        (matches && control.greeted_by == Some(link.peer())).then(|| opened(socket, &mut control, link, theirs, first))
    });
    match opened {
        Some(Ok(())) => Ok(true),
        Some(Err(NoProducer::NoSuch)) => Err(Broken),
        Some(Err(NoProducer::Limits)) | None => {
            link.send(&Message::OpenRefuse {
                yours: theirs,
                reason: wire::Reason::Cancelled,
            });
            Ok(false)
        }
    }
}

/// The nonces that OPEN carries, as the peer sees them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenNonces {
    /// What markers to the peer start with.
    pub mine: Nonce,
    /// What markers to us start with.
    pub yours: Nonce,
}

/// OPEN-ACK for our stream `mine`, which is `socket`'s, if it is anybody's.
pub fn on_open_ack<S: SocketIo>(
    socket: Option<&S>,
    link: &S::Link,
    mine: Vqpn,
    theirs: Vqpn,
    first: RingOffer,
) -> Result<(), Broken> {
    let control = socket.and_then(|socket| Some((socket, socket.control.lock()?)));
    let awaited = control.filter(|(_, control)| {
        let opened = control.opened.as_ref();
        control.peer.is_none() && opened.is_some_and(|o| o.asked && o.mine == mine && o.link == *link)
    });
    let Some((socket, mut control)) = awaited else {
        // We have left since: the peer's number is free once it has heard so.
        link.send(&Message::Closed { yours: theirs });
        return Ok(());
    };
    match opened(socket, &mut control, link, theirs, first) {
        Ok(()) => Ok(()),
        Err(NoProducer::NoSuch) => Err(Broken),
        Err(NoProducer::Limits) => {
            // As if we had left before the answer came.
            link.send(&Message::Closed { yours: theirs });
            end_attempt(socket, &mut control);
            Ok(())
        }
    }
}

/// OPEN-REFUSE for our stream `mine` of the socket. False if the socket could not be told.
pub fn on_open_refused<S: SocketIo>(socket: &S, mine: Vqpn) -> bool {
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    if let Some(opened) = control.opened.as_mut().filter(|o| o.mine == mine) {
        opened.asked = false;
    }
    end_attempt(socket, &mut control);
    true
}

/// DEMOTE-REQUEST: our sending direction is to go back to TCP, with what follows `resend_from` if that is said.
pub fn on_demote_request<S: SocketIo>(socket: &S, link: &S::Link, resend_from: Option<u64>) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    if link.is_remote() {
        return resume::on_asked(socket, &mut control);
    }
    if resend_from.is_some() {
        resend(socket);
    }
    // An end that has left by itself keeps its own reason.
    let reason = control.leave.unwrap_or(Reason::PeerAsked);
    leave(socket, &mut control, reason);
}

/// The peer's stream `theirs`, which has this ring to begin with, is the other end of the attempt.
fn opened<S: SocketIo>(
    socket: &S,
    control: &mut ControlOf<S>,
    link: &S::Link,
    theirs: Vqpn,
    first: RingOffer,
) -> Result<(), NoProducer> {
    let producer = link.producer(theirs)?;
    control.peer = Some(theirs);
    // First: the other may have switched before this was read, and then a reader takes what comes as soon as the two
    // are a pair. What it tells of that is about this number. (Within a host it may have come before: who has sent it
    // looks again when it reads our SWITCH.)
    socket.set_peer(theirs);
    socket.set_link(Some(link));
    match control.opened.as_mut() {
        Some(opened) => {
            opened.asked = false;
            link.pair(opened.mine, theirs, first);
        }
        None => control.first = Some(first),
    }
    if let Some(mut tx) = socket.tx.lock() {
        tx.producer = Some(producer);
    }
    feed(socket, control, Handshake::on_open);
    // Arms for those who are interested now that there is a link.
    socket.later(Task::Settle);
    Ok(())
}
