//! Carries out the commands that calls of the program leave to the service thread.

use std::os::fd::AsFd;

use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::stream::connection::{self, Task};

use super::linger;
use super::state::Worker;
use crate::notify::ready;
use crate::objects::link::{Link, up};
use crate::objects::listener::Listener;
use crate::objects::mailbox::{Command, Ref, kind, tag};

/// How long the wake-up for bytes that more is to follow is held back, ns: as long as TCP_CORK holds data (tcp(7)).
const DELAYED_FOR: u64 = 200_000_000;

impl Worker {
    pub(super) fn on_command(&mut self, command: Command) {
        match command {
            Command::Promote(r) => self.ask_in_turn(r),
            Command::Do(r, task) => self.do_for(r, task),
            Command::Used(r) => self.answer_deferred(r),
            Command::Hold(r) => self.hold(r),
            Command::NeedLink(r, peer, offer) => self.need_link(r, peer, offer),
            Command::Dialled(peer, dialled) => self.on_dialled(peer, dialled),
            Command::WantBulk(slot) => self.want_bulk(slot),
            Command::BulkDialled(serial, dialled) => self.on_bulk_dialled(serial, dialled),
            // The slot may belong to another link by now, or to none.
            Command::AwaitRoom(slot) => {
                if let Some(link) = link_at(slot).filter(|l| l.has_outbox()) {
                    self.await_room(link, true);
                }
            }
            Command::Overfull(slot) => {
                if let Some(link) = link_at(slot).filter(|l| l.is_overfull()) {
                    self.break_off(link);
                }
            }
            Command::Violation(r) => {
                let link = r
                    .get()
                    .and_then(|socket| Some(socket.control.lock()?.opened.as_ref()?.link));
                if let Some(link) = link {
                    self.library.stats.count(Event::LinkViolation);
                    self.link_down(link, Reason::Violation);
                }
            }
            Command::FreeLinks => self.free_dead_links(),
            Command::Vain(slot) => {
                if let Some(link) = link_at(slot) {
                    self.look_for_noise(link);
                }
            }
            Command::Linger(remains) => {
                let id = self.new_conn();
                if self.add(remains.fd.as_fd(), tag(kind::LINGER, id), linger::EVENTS) {
                    self.lingering.begin(id, remains);
                }
            }
            Command::Listen => Listener::all().for_each(|listener| self.listen(listener)),
            Command::Blocked(r) => self.rings.on_blocked(r),
            Command::Standing(r) => self.standstill.on_standing(r),
            Command::Lost(r) => {
                if let Some(socket) = r.get() {
                    crate::notify::closing::look_at_anchor(socket);
                }
            }
            Command::DelayedWakes => self.alarms.wake.set(crate::sys::time::now_ns() + DELAYED_FOR),
            Command::Grown => self.rings.on_grown(),
            Command::Maintain => self
                .alarms
                .maintain
                .set(crate::sys::time::now_ns() + self.maintain_after()),
        }
    }

    /// Does a task for a connection, unless the socket object has become another connection since.
    fn do_for(&mut self, r: Ref, task: Task) {
        let Some(socket) = r.get() else { return };
        let has_changed = match task {
            Task::Notify => true,
            Task::Flush => connection::flush(socket),
            Task::ReadAhead => connection::read_ahead(socket, false),
            Task::Settle => {
                self.settle(r);
                false
            }
            Task::Drained => {
                // Sends no notification: an edge-triggered set would report again what it has reported.
                self.close_if_over(socket);
                false
            }
        };
        if has_changed {
            ready::notify_local(socket);
        }
    }
}

/// Returns the live link with this slot; `None` if there is none.
fn link_at(slot: u32) -> Option<&'static Link> {
    up::all().into_iter().find(|link| link.slot() == slot)
}
