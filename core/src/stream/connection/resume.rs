//! What makes a stream leave a link between hosts, and what that leads to (P70–P79). An attempt that is not closed is
//! given up first.
//!
//! The caller of each function holds the control lock, and neither `rx` nor `tx`.

use super::attempt::{end_attempt, look_for_resume};
use super::io::{ControlOf, SocketIo, Task};
use crate::stream::resume::Resume;

pub use super::stay::{feed, is_staying};

/// Our end of the link has failed.
pub fn link_failed<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    end_attempt(socket, control);
    let is_marked = is_staying(control) && is_marked(socket);
    if is_marked {
        // Its sender has been told so, and may have ended TCP before it let go of the link. That end comes first: a
        // RESUME would be answered by a reset.
        look_for_resume(socket, control);
    }
    feed(socket, control, |r| r.on_link_failed(is_marked));
}

/// Whether all of the peer's direction has come over the link, and its end mark: it may have been told so. A mark that
/// comes from now on is not taken, and not confirmed.
fn is_marked<S: SocketIo>(socket: &S) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    rx.consumer
        .as_mut()
        .is_some_and(|c| c.freeze(u64::MAX).is_ok() && c.has_mark())
}

/// The peer asks on the link to leave it (P75).
pub fn on_asked<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    control.returns = false;
    end_attempt(socket, control);
    feed(socket, control, Resume::on_asked);
}

/// The peer has all that we have given to the link, and the end mark.
pub fn confirmed<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    feed(socket, control, Resume::on_confirmed);
}

/// For a new holder, who reads the kernel alone: what the program has not read comes through it
/// again. The socket can be handed over once [`is_staying`] says no.
pub fn hand_over<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    control.returns = false;
    end_attempt(socket, control);
    if let Some(mut rx) = socket.rx.lock()
        && let Some(consumer) = rx.consumer.as_mut()
    {
        // An error is met again when RESUME is written.
        let _ = consumer.freeze(0);
    }
    feed(socket, control, Resume::hand_over);
}

/// shutdown() of the sending direction. True: the kernel's follows by itself.
pub fn shut<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) -> bool {
    if !is_staying(control) {
        return false;
    }
    end_attempt(socket, control);
    let stays = is_staying(control);
    control.returns = false;
    feed(socket, control, Resume::shut);
    stays
}

/// The program has closed the socket.
pub fn close<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    control.returns = false;
    end_attempt(socket, control);
    feed(socket, control, Resume::close);
}

/// The process is about to end: as a close of a stream that is on a link between hosts.
pub fn end<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    if is_staying(control) {
        close(socket, control);
        socket.later(Task::Settle);
    }
}
