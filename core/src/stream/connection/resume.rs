//! Events that make a stream leave a link between hosts, and what they lead to (P70–P79). An attempt that is not closed
//! is given up first.
//!
//! The caller of each function holds the control lock, and neither `rx` nor `tx`.

use super::attempt::{end_attempt, look_for_resume};
use super::io::{ControlOf, SocketIo, Task};
pub use super::stay::{feed, is_staying};
use crate::stream::resume::Resume;

/// Handles a failure of this end of the link.
pub fn link_failed<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    end_attempt(socket, control);
    let is_marked = is_staying(control) && is_marked(socket);
    if is_marked {
        // The peer may have got the confirmation of its mark, and have ended TCP before it left the link. That end of
        // TCP comes first: the kernel would answer a RESUME by a reset.
        look_for_resume(socket, control);
    }
    feed(socket, control, |r| r.on_link_failed(is_marked));
}

/// Returns whether all of the peer's direction has come over the link, with its end mark. This end may have confirmed
/// that. A mark that comes from now on is not taken, and not confirmed.
fn is_marked<S: SocketIo>(socket: &S) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    rx.consumer
        .as_mut()
        .is_some_and(|c| c.freeze(u64::MAX).is_ok() && c.has_mark())
}

/// Handles the peer's request on the link to leave it (P75).
pub fn on_asked<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    control.returns = false;
    end_attempt(socket, control);
    feed(socket, control, Resume::on_asked);
}

/// Handles the peer's confirmation: it has all bytes that this end has given to the link, and the end mark.
pub fn confirmed<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    feed(socket, control, Resume::on_confirmed);
}

/// Leaves the link for a new holder, which reads the kernel alone: unread bytes come through the kernel again. The
/// socket can be handed over once [`is_staying`] returns false.
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

/// Shuts the sending direction. Returns true if the kernel's shutdown() follows by itself; false if the stream is not
/// on a link between hosts.
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

/// Handles the program's close().
pub fn close<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    control.returns = false;
    end_attempt(socket, control);
    feed(socket, control, Resume::close);
}

/// Handles the end of the process as a close of a stream that is on a link between hosts.
pub fn end<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    if is_staying(control) {
        close(socket, control);
        socket.later(Task::Settle);
    }
}
