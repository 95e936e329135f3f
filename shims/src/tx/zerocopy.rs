//! MSG_ZEROCOPY: sends are numbered, and complete when the memory that they were made from is the program's again. A
//! link copies, so a send on one is complete when it returns, and the program is told so.

use std::sync::atomic::Ordering::SeqCst;

use rdmasock_core::stream::connection::{SocketIo as _, Task};
use rdmasock_core::sync::store_load_fence;

use crate::errno;
use crate::holders;
use crate::jump::within;
use crate::ready;
use crate::socket::{OUR_ERRORS, Socket};
use crate::sockopt;

/// Whether a link may take the next send: its number is known, and there is room for what the program is to be told.
#[cold]
pub fn is_served(socket: &'static Socket) -> bool {
    within(|| {
        if !is_heeded(socket) {
            return true;
        }
        let is_uncounted = socket.completions.is_uncounted();
        let has_room = socket.completions.change(|kept| {
            let ids = kept.ids();
            ids.has_room() && (!is_uncounted || ids.is_in_stay())
        });
        has_room == Some(true)
    })
}

/// TCP has taken something of a send.
#[cold]
pub fn on_sent_by_tcp(socket: &'static Socket) {
    within(|| {
        if is_heeded(socket) && socket.completions.change(|kept| kept.ids().on_sent_by_tcp()).is_none() {
            socket.completions.set_uncounted();
        }
    });
}

/// A link has.
#[cold]
pub fn on_sent_by_link(socket: &'static Socket) {
    let errno = errno::get();
    within(|| {
        if !is_heeded(socket) {
            return;
        }
        socket.completions.on_sent_by_link();
        socket.wakes.anchor.fetch_or(OUR_ERRORS, SeqCst);
        // The service thread says that the socket is not watched, and then looks whether something is unread; we the
        // other way round. So one of the two sees the other.
        store_load_fence();
        if ready::is_watched(socket) {
            ready::notify_local(socket);
        } else {
            // It has left the link meanwhile.
            socket.later(Task::Settle);
        }
    });
    errno::set(errno);
}

/// SO_ZEROCOPY: without it the flag means nothing.
fn is_heeded(socket: &'static Socket) -> bool {
    // First these: what is changed while the kernel is asked is asked for again next time.
    let now = (holders::epoch(), socket.completions.sets());
    let is_shared = socket.promotion.holders.may_be_several();
    let known = socket.completions.change(|kept| kept.known);
    if let Some(Some((epoch, sets, is_on))) = known
        && !is_shared
        && (epoch, sets) == now
    {
        return is_on;
    }
    let is_on = {
        // Keeps close() out.
        let _control = socket.control.lock();
        let asked = socket
            .numbers
            .anchor_fd()
            .and_then(|fd| sockopt::get(fd, sockopt::ZEROCOPY));
        asked.is_some_and(|value| value != 0)
    };
    socket
        .completions
        .change(|kept| kept.known = Some((now.0, now.1, is_on)));
    is_on
}
