//! Computes for epoll, poll and select what a socket is ready for now.
//!
//! For a direction on the link the ring decides, and for a direction on TCP the kernel. While a direction is scanned
//! for markers, only payload counts as readable, not all that the kernel reports.
//!
//! To *arm* a direction is to write into a word of its ring which waiter the peer has to notify. If several sets or
//! threads of this process wait on a socket, the word names the service thread, which then notifies all of them
//! ([`tell`]).

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::stream::connection::{self, Behind};
use rdmasock_core::{ids::Vqpn, lock::Lock};
use rustix::event::PollFlags;

use crate::data::{rx, tx};
use crate::notify::ready::{ENDED, ERR, HUP, RDHUP, among_markers, arm_data, is_reader_gone, kernel, progress};
use crate::notify::{call, ready};
use crate::objects::socket::{self, ERROR_QUEUE, Mode, Socket};
use crate::objects::{link::Link, waiters::SERVICE};
use crate::sys::points::point;

const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const WRBAND: u32 = libc::EPOLLWRBAND as u32;

/// Whether a check also arms the direction, so that the peer sends a wake-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arm {
    /// Checks only.
    No,
    /// Arms the direction if it is not ready now (level-triggered).
    IfNotReady,
    /// Arms the direction in any case, for a wake-up at the next change (edge-triggered).
    Always,
}

/// Returns what the socket is ready for (EPOLL* bits), in the directions that `events` asks about. An end or an error
/// is always reported. The result may have bits that `events` does not have.
pub(crate) fn evaluate(socket: &'static Socket, events: u32, arm: Arm) -> u32 {
    progress(socket);
    let mut mask = if socket.has_untold() { ERR } else { 0 };
    // The events of the anchor are read before the directions are checked: an end must not be reported before the data
    // that precedes it.
    let anchor = socket.wakes.anchor.load(Acquire);
    if events & (IN | RDHUP | PRI) != 0 {
        mask |= readable(socket, arm);
    }
    if events & (OUT | WRBAND) != 0 {
        mask |= writable(socket, arm);
    }
    if anchor & (ENDED | PRI | ERROR_QUEUE) == 0 {
        return mask;
    }
    if anchor & ERROR_QUEUE != 0 {
        mask |= error_queue(socket);
        if anchor & (ENDED | PRI) == 0 {
            return mask;
        }
    }
    // Between hosts the end of TCP may be seen before the last data has come over the link.
    let is_early = socket.rx_mode.load(Acquire) == Mode::Link
        && !socket.rx_shut.load(Acquire)
        && socket.rx.lock().is_some_and(|rx| rx.behind == Behind::Link);
    let told = if is_early { ENDED & !RDHUP } else { ENDED };
    // TCP has reported an end or urgent data. The kernel is asked what holds now.
    let Some(tx) = socket.tx.lock() else {
        return mask;
    };
    // Both directions are shut. Between hosts the kernel's own shutdown() may come later, so the kernel may not report
    // HUP yet.
    if tx.end.is_shut() && socket.rx_shut.load(Acquire) {
        mask |= HUP;
    }
    mask | kernel(socket, PollFlags::IN | PollFlags::RDHUP | PollFlags::PRI) & (told | PRI)
}

/// Returns ERR if the error queue (recvmsg(2)) has an entry, else 0.
#[cold]
fn error_queue(socket: &'static Socket) -> u32 {
    // The bit is cleared before the check, so that an entry that comes later sets it again.
    socket.wakes.anchor.fetch_and(!ERROR_QUEUE, SeqCst);
    let Some(_tx) = socket.tx.lock() else {
        return 0;
    };
    let mask = kernel(socket, PollFlags::empty()) & ERR;
    if mask != 0 {
        socket.wakes.anchor.fetch_or(ERROR_QUEUE, SeqCst);
    }
    mask
}

/// Returns the readiness of the receiving direction (EPOLL* bits).
fn readable(socket: &'static Socket, arm: Arm) -> u32 {
    point!("readable: is about to look");
    let Some(mut rx) = socket.rx.lock() else {
        return 0;
    };
    // The mode is read under the lock. If a scan for markers has begun since an earlier check, the kernel's bytes may
    // be a marker.
    match socket.rx_mode.load(Acquire) {
        Mode::Link => {}
        Mode::Marked => {
            drop(rx);
            let scanned = among_markers(socket);
            return scanned.unwrap_or_else(|| evaluate(socket, libc::EPOLLIN as u32, Arm::IfNotReady));
        }
        Mode::Tcp | Mode::Foreign => {
            let mask = kernel(
                socket,
                PollFlags::IN | PollFlags::RDNORM | PollFlags::RDHUP | PollFlags::PRI,
            );
            return mask & (IN | RDHUP | PRI | HUP | ERR);
        }
    }
    let bits = rx.own.bits;
    // `waits`: this is a link between hosts that may bring more bytes; bytes in TCP then belong to the marker RESUME.
    // `goes_on`: this is a link between hosts that brings no more, and the next bytes come by TCP. Within a host both
    // are false.
    let waits = rx.behind == Behind::Link;
    let goes_on = rx.behind == Behind::Tcp;
    let Some(consumer) = rx.consumer.as_mut() else {
        return 0;
    };
    let ready = match arm {
        Arm::Always => arm_data(socket, consumer, bits),
        Arm::No => consumer.has_data().unwrap_or(true),
        Arm::IfNotReady => consumer.has_data().unwrap_or(true) || arm_data(socket, consumer, bits),
    };
    let anchor = socket.wakes.anchor.load(Acquire);
    if !ready && goes_on {
        // All bytes of the ring have been read, and the link brings no more. The stream goes on in TCP, which is
        // checked now.
        drop(rx);
        return match connection::leave_link_at_end(socket) {
            true => readable(socket, arm),
            false => 0,
        };
    }
    if !ready {
        return if waits && socket.rx_shut.load(Acquire) {
            IN | RDHUP
        } else if !waits && anchor & ENDED != 0 {
            // The last events of the anchor decide, except for ERR: a call may have returned the error since.
            // `evaluate` asks the kernel whether there still is an error.
            IN | anchor & ENDED & !ERR
        } else {
            0
        };
    }
    match consumer.end() {
        Ok(None) => IN,
        Ok(Some(_)) if waits => 0,
        // The ring has an end mark, and all bytes before the mark have been read. The direction leaves the link, and
        // TCP shows whether data or the end follows.
        Ok(Some(_)) => {
            drop(rx);
            if connection::leave_link_at_end(socket) {
                return readable(socket, arm);
            }
            let Some(_rx) = socket.rx.lock() else {
                return 0;
            };
            kernel(socket, PollFlags::IN | PollFlags::RDHUP) & (IN | RDHUP | HUP | ERR)
        }
        Err(_) => IN | ERR,
    }
}

/// Returns the readiness of the sending direction (EPOLL* bits).
fn writable(socket: &'static Socket, arm: Arm) -> u32 {
    let mut tx = loop {
        if socket.tx_mode.load(Acquire) == Mode::Marked && !connection::flush(socket) {
            return if tx::is_above_own_send(socket) {
                kernel(socket, PollFlags::OUT | PollFlags::WRNORM) & (OUT | HUP | ERR)
            } else if socket.tx.lock().is_some_and(|tx| tx.end.is_shut()) {
                // The program has shut the direction down. A send fails at once, so the direction counts as writable,
                // even if the kernel's own shutdown() comes later.
                OUT
            } else {
                0
            };
        }
        point!("writable: markers are out");
        let Some(tx) = socket.tx.lock() else {
            return 0;
        };
        // If another marker was announced after the flush, the room in TCP is for that marker, so it is flushed first.
        if socket.tx_mode.load(Acquire) != Mode::Marked {
            break tx;
        }
    };
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return kernel(socket, PollFlags::OUT | PollFlags::WRNORM) & (OUT | HUP | ERR);
    }
    if tx.end.is_shut() {
        // A send fails at once, so the direction counts as writable.
        return OUT;
    }
    let bits = tx.own.bits;
    let Some(producer) = tx.producer.as_mut() else {
        return 0;
    };
    if is_reader_gone(producer) || socket.wakes.anchor.load(Acquire) & (HUP | ERR) != 0 {
        return OUT;
    }
    let ready = producer.has_space().unwrap_or(true) || arm != Arm::No && producer.arm_space(bits).unwrap_or(true);
    if ready || tx::could_have_room(socket, producer) {
        return OUT;
    }
    tx::report_blocked(socket, &mut tx);
    0
}

/// Held by a thread that passes on wake-ups (`tell`). The next thread that gets this lock finds all earlier wake-ups
/// passed on.
static TURN: Lock<()> = Lock::new(());

/// Takes the entries that the link's peer has put into the service thread's ready queue. Each names a socket. Notifies
/// the sets and threads that wait for that socket. If peers notify the service thread for a set (`Epoll::served`), a
/// thread calls this before it checks the set. Otherwise the thread could miss data that has come, because the set was
/// not notified yet.
pub(crate) fn tell(link: &'static Link) {
    // In a signal handler that has interrupted its own thread in this function, the lock cannot be taken. The
    // interrupted call passes the wake-ups on afterwards.
    let Some(_turn) = TURN.lock() else { return };
    let mut sockets = Vec::new();
    link.drain_ready(SERVICE, |slot, at| sockets.push((at, slot)));
    sockets.sort_by_key(|(at, _)| *at);
    for socket in sockets.into_iter().filter_map(|(_, slot)| socket::by_slot(slot)) {
        // The peer may be waiting for this program to read, though the program has closed the fd without a hook. This
        // check finds such an fd.
        call::look_at_anchor(socket);
        link.judge(readable(socket, Arm::No) != 0);
        rx::relieve(socket, link);
        look_for_confirmation(socket, link);
        ready::notify_local(socket);
    }
}

/// Continues the close of a stream between hosts that waits until the peer has received all its bytes: if the peer has,
/// the stream goes on with its way back to TCP.
pub(crate) fn look_for_confirmation(socket: &'static Socket, link: &Link) {
    let Some(remote) = link.remote() else {
        return;
    };
    let theirs = Vqpn(socket.peer_vqpn.load(Acquire));
    if let Some(mut control) = socket.control.lock()
        && control.stay.as_ref().is_some_and(|stay| stay.resume.is_marked())
        && remote.end().unconfirmed(theirs) == Some(0)
    {
        connection::stay::confirmed(socket, &mut control);
    }
}
