//! Watches the TCP sockets of connections that are being promoted or are on a link. Puts them back into the kernel's
//! epoll sets when both directions are on TCP again.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::stream::connection;
use rustix::event::{PollFlags, epoll as kernel};

use super::state::{Watched, Worker};
use crate::data::tx;
use crate::notify::{anchor, ready};
use crate::objects::mailbox::Ref;
use crate::objects::socket::{self, ERROR_QUEUE, Mode, Socket};
use crate::polling::served;
use crate::sys::points::point;

impl Worker {
    /// Begins to watch the TCP socket; from now on the library reports the socket's readiness.
    pub(super) fn watch(&mut self, socket: &'static Socket) -> Watched {
        if ready::is_watched(socket) {
            // An attempt that ended before its scan began has left the socket watched.
            return Watched::Done;
        }
        {
            let Some(_control) = socket.control.lock() else {
                return Watched::Impossible;
            };
            let Some(fd) = socket.numbers.anchor_fd() else {
                return Watched::Impossible;
            };
            if !anchor::watch(socket, fd) {
                return Watched::Impossible;
            }
            // Events from before, which possibly no later event reports.
            note_anchor(socket);
            socket.wakes.watched.publish(true);
        }
        point!("watch: the socket is ours, and nobody knows");
        ready::tell_onlookers(socket);
        point!("watch: pollers have been told");
        let members = socket.wakes.members();
        if members.iter().all(|m| m.epoll.take_over(m.item, socket)) {
            return Watched::Done;
        }
        self.unwatch(socket);
        Watched::AfterMod
    }

    fn unwatch(&mut self, socket: &'static Socket) {
        {
            let Some(_control) = socket.control.lock() else {
                return;
            };
            if !socket.wakes.watched.publish(false) {
                return;
            }
            if let Some(fd) = socket.numbers.anchor_fd() {
                let _ = kernel::delete(&self.service.epoll, fd);
            }
            socket.wakes.anchor.store(0, SeqCst);
        }
        point!("unwatch: the socket is the kernel's, and nobody knows");
        ready::hand_back(socket);
        point!("unwatch: sets have been told");
        // Threads that sleep on the library's doorbells sleep on the kernel's object from now on.
        ready::notify_local(socket);
    }

    pub(super) fn on_anchor(&mut self, id: u64) {
        let Some(socket) = socket::by_slot((id >> 32) as u32) else {
            return;
        };
        if socket.generation.load(Acquire) & 0xffff_ffff != id & 0xffff_ffff {
            return;
        }
        note_anchor(socket);
        if self.ends.has_dying() && socket.wakes.anchor.load(Acquire) & ready::ENDED != 0 {
            self.leave_dying(0);
        }
        if socket.tx_mode.load(Acquire) == Mode::Marked {
            connection::flush(socket);
        }
        if socket.rx_mode.load(Acquire) == Mode::Marked {
            // Finds markers even if the program does not read now.
            ready::among_markers(socket);
            if !socket.numbers.left_behind.load(Acquire) {
                connection::read_ahead(socket, tx::is_full(socket));
            }
        }
        if socket.rx_mode.load(Acquire) == Mode::Link
            && let Some(mut control) = socket.control.lock()
        {
            connection::look_for_resume(socket, &mut control);
        }
        if socket.wakes.anchor.load(Acquire) & libc::EPOLLRDHUP as u32 != 0 {
            self.ends.on_end_of_tcp(socket);
        }
        ready::notify_local(socket);
        if socket.numbers.left_behind.load(Acquire) {
            self.settle(Ref::new(socket));
        }
    }

    /// Puts a socket where its directions require it: into the kernel's epoll sets, or under the library's watch. Goes
    /// on with the end of a connection that the program has closed.
    pub(super) fn settle(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        if let Some(link) = socket.link() {
            served::look_for_confirmation(socket, link);
        }
        if socket.numbers.left_behind.load(Acquire) {
            if socket.rx_mode.load(Acquire) == Mode::Marked {
                connection::drop_unread(socket);
            }
            if crate::process::close::finish(socket) {
                self.free_dead_links();
            }
            return;
        }
        if !self.close_if_over(socket) {
            ready::change_interest(socket, |_| {});
            ready::notify_local(socket);
        }
    }

    /// Gives a connection back to the kernel's epoll sets if both directions are on TCP and no handshake is under way.
    /// Returns false if that is not so.
    pub(super) fn close_if_over(&mut self, socket: &'static Socket) -> bool {
        {
            let Some(mut control) = socket.control.lock() else {
                return true;
            };
            let Some(returns) = connection::close_if_over(socket, &mut control) else {
                return false;
            };
            if returns {
                socket.promotion.retry_later();
            }
            if let Some(fd) = socket.numbers.anchor_fd() {
                socket.keepalive.end(fd);
            }
        }
        crate::data::rx::view::settle(socket);
        self.forget_asks(socket);
        self.unwatch(socket);
        socket.promotion.holders.on_returned();
        true
    }
}

/// Stores the kernel's events of the TCP socket that readiness has to report.
fn note_anchor(socket: &Socket) {
    let Some(_rx) = socket.rx.lock() else { return };
    let now = ready::kernel(socket, PollFlags::IN | PollFlags::RDHUP | PollFlags::PRI);
    let told = ready::ENDED | libc::EPOLLPRI as u32;
    let events = ready::without_queue(now);
    let queue = if events == now { 0 } else { ERROR_QUEUE };
    socket.wakes.anchor.fetch_or(events & told | queue, SeqCst);
}
