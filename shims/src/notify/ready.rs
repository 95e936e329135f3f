//! Notification of readiness, for epoll, poll, select and blocking calls.
//!
//! A socket's `Interest` lists the epoll sets and threads that wait for the socket. This module changes that list. It
//! also sets the *wake-up words* of the socket's rings. The *bits* of such a word name a waiter of this process, and
//! the peer notifies that waiter. To *arm* the word is to write bits into it. This module also polls the kernel's TCP
//! socket (the anchor), and adds the anchor to the service thread's epoll set. The present readiness of a socket is
//! computed in `polling/readiness`.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::{Consumer, Producer, RxFlags, Wake};
use rdmasock_core::fabric::waiter::{SLEEPER_MASK, WaiterId};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stream::connection::{self, Ahead, SocketIo as _, Task};
use rustix::event::{PollFd, PollFlags, epoll as kernel};

use crate::notify::epoll::add_to;
use crate::objects::mailbox::{kind, tag};
use crate::objects::socket::{Interest, Mode, Sleeping, Socket};
use crate::objects::{library::Library, link::Link, waiters::SERVICE};
use crate::sys::points::point;

pub(crate) const RDHUP: u32 = libc::EPOLLRDHUP as u32;
pub(crate) const HUP: u32 = libc::EPOLLHUP as u32;
pub(crate) const ERR: u32 = libc::EPOLLERR as u32;
/// EPOLL* bits that report the end of the connection, or of its receiving direction.
pub(crate) const ENDED: u32 = RDHUP | HUP | ERR;

/// Takes in what the peer has sent over a link to another host, by polling the link's completions. Returns true if
/// there were any. Does nothing on a link within the host, where the peer itself writes into this end's ring.
#[inline]
pub(crate) fn progress(socket: &Socket) -> bool {
    socket.link().is_some_and(Link::progress)
}

/// Writes `bits` into the ring's wake-up word for data. Returns true if the ring has data already, or is invalid.
pub(crate) fn arm_data(socket: &'static Socket, consumer: &mut Consumer, bits: u32) -> bool {
    match consumer.arm_data(bits) {
        Ok(armed) => {
            notify_peer(socket, armed.wake);
            armed.ready
        }
        Err(_) => true,
    }
}

/// Whether the peer has closed its receiving end. If so, a send is left to the kernel, which decides its result.
pub(crate) fn is_reader_gone(producer: &mut Producer) -> bool {
    producer.consumer_flags().contains(RxFlags::RX_CLOSED)
}

/// Polls the TCP socket for `events`. Returns EPOLL* bits, or ERR and HUP if no fd stands for the socket any more. The
/// caller holds one of the socket's locks.
pub(crate) fn kernel(socket: &Socket, events: PollFlags) -> u32 {
    socket.numbers.anchor_fd().map_or(ERR | HUP, |fd| anchor(fd, events))
}

/// Polls `fd`, which the caller keeps open, for `events`. Returns EPOLL* bits, 0 if poll(2) fails.
pub(crate) fn anchor(fd: BorrowedFd<'_>, events: PollFlags) -> u32 {
    let mut set = [PollFd::from_borrowed_fd(fd, events)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    let asked = rustix::event::poll(&mut set, Some(&now));
    let [polled] = set;
    asked.map_or(0, |_| u32::from(polled.revents().bits()))
}

/// Clears ERR if it only reports an entry in the error queue (recvmsg(2)) of a living connection. TCP reports HUP
/// together with ERR when a connection has failed.
pub(crate) fn without_queue(events: u32) -> u32 {
    if events & (ERR | HUP) == ERR {
        events & !ERR
    } else {
        events
    }
}

/// Whether the connection has failed, by the poll(2) result `events`. If so, the next call returns the error.
pub(crate) fn has_failed(events: u32) -> bool {
    without_queue(events) & ERR != 0
}

/// Whether the peer has ended its direction of TCP, or the connection is over. False after a local shutdown(SHUT_RD)
/// alone: poll(2) and an empty read report that in the same way as the peer's end, but the TCP state differs.
pub(crate) fn has_peer_ended(fd: BorrowedFd<'_>) -> bool {
    is_peers_end(fd, anchor(fd, PollFlags::RDHUP))
}

/// Answers as [`has_peer_ended`] does, from the poll(2) result `events`.
pub(crate) fn is_peers_end(fd: BorrowedFd<'_>, events: u32) -> bool {
    events & ENDED != 0 && (has_failed(events) || !crate::sys::sockopt::is_open_to_peer(fd))
}

/// Returns the EPOLL* bits for what the program can read in a direction that is scanned for markers. `None` if the
/// direction is not scanned any more.
pub(crate) fn among_markers(socket: &Socket) -> Option<u32> {
    match connection::look(socket) {
        Some(Ahead::Payload { .. }) => Some((libc::EPOLLIN | libc::EPOLLRDNORM) as u32),
        Some(Ahead::Nothing) | None => Some(0),
        Some(Ahead::Ended | Ahead::Shut) => {
            let Some(rx) = socket.rx.lock() else {
                return Some(0);
            };
            if rx.then_shut {
                return Some((libc::EPOLLIN | libc::EPOLLRDNORM | libc::EPOLLRDHUP) as u32);
            }
            Some(kernel(socket, PollFlags::IN | PollFlags::RDHUP))
        }
        Some(Ahead::Changed) => None,
    }
}

/// Wakes the waiters of the peer that `wake` names. `wake` holds the bits that were taken out of a wake-up word of the
/// socket's ring.
#[inline]
pub(crate) fn notify_peer(socket: &Socket, wake: Wake) {
    if !wake.is_none()
        && let Some(link) = socket.link()
    {
        link.notify(wake, Vqpn(socket.peer_vqpn.load(Relaxed)));
    }
}

/// Notifies all epoll sets and threads of this process that wait on the socket. The caller holds no lock.
pub(crate) fn notify_local(socket: &'static Socket) {
    let Some(interest) = socket.wakes.interest.lock() else {
        return;
    };
    let members = interest.members.clone();
    let sleepers = interest.sleepers.clone();
    drop(interest);
    point!("notify: it is known whom");
    for m in members {
        m.epoll.push(m.item, socket);
    }
    let waiters = &Library::get().waiters;
    for w in sleepers {
        waiters.ring(w.waiter);
    }
}

/// Wakes the threads that wait for the socket in the kernel's poll() or select(). The library has just begun to report
/// on the socket, so the kernel would not wake them for bytes on a link.
pub(crate) fn tell_onlookers(socket: &'static Socket) {
    let waiters = &Library::get().waiters;
    for waiter in waiters.onlookers.of(socket.slot) {
        waiters.ring(WaiterId(waiter));
    }
}

/// Moves the socket's items back from the library's list into the kernel's set, in each epoll set that has the socket.
pub(crate) fn hand_back(socket: &'static Socket) {
    for m in socket.wakes.members() {
        m.epoll.hand_back(m.item, socket);
    }
}

/// The bits to write into the wake-up words of one socket. 0 names no waiter.
struct Attention {
    /// Names the waiter of the socket's epoll set. Names the service thread if the socket has several sets, if several
    /// threads sleep, or if the peer cannot wake the set's waiter or the only sleeping thread.
    sets: u32,
    /// Names the only sleeping thread, if that waits for data. Names the service thread if several threads sleep, or if
    /// the peer cannot wake the only one.
    data: u32,
    /// As `data`, for a thread that waits for space.
    space: u32,
}

/// Returns the bits for a socket's wake-up words. The peer notifies a single epoll set or a single sleeping thread
/// directly. If several wait, or the peer cannot wake the only one, it notifies the service thread, which notifies all
/// of them.
fn attention(socket: &Socket, interest: &Interest) -> Attention {
    let link = socket.link();
    let told = |w: WaiterId| link.is_some_and(|l| l.announce(w));
    let service = Link::service_bits();
    let (sets, data, space) = match interest.sleepers.as_slice() {
        [] => (of_sets(interest, told), 0, 0),
        [one] if told(one.waiter) => {
            let bits = |waits| if waits { one.waiter.sleeper_bits() } else { 0 };
            (of_sets(interest, told), bits(one.data), bits(one.space))
        }
        _ => (service, service, service),
    };
    if sets == service {
        // `Epoll::served` is set before the peer can find the service thread's bits in a wake-up word.
        interest.members.iter().for_each(|m| m.epoll.be_served());
    }
    Attention { sets, data, space }
}

/// Returns the bits of the only epoll set, if its waiter has a ready queue and the peer can wake it. Else returns the
/// service thread's bits; 0 if there is no set.
fn of_sets(interest: &Interest, told: impl Fn(WaiterId) -> bool) -> u32 {
    match interest.members.as_slice() {
        [] => 0,
        [first, rest @ ..] if rest.iter().all(|m| std::ptr::addr_eq(m.epoll, first.epoll)) => {
            let bits = first.epoll.waiter().map_or(0, WaiterId::queue_bits);
            let known = WaiterId::of_queue(bits).is_some_and(told);
            if known { bits } else { Link::service_bits() }
        }
        _ => Link::service_bits(),
    }
}

/// Whether `waiter`, which sleeps for data or for space, will be notified, by the peer or by the service thread. False
/// if the peer has taken the wake-up word since the waiter was written into it.
pub(crate) fn will_be_told(socket: &Socket, waiter: WaiterId, is_data: bool) -> bool {
    let names = |word| WaiterId::of_sleeper(word) == Some(waiter) || WaiterId::of_queue(word) == Some(SERVICE);
    // If the direction is not on the link, the service thread notifies the waiters.
    if is_data {
        let rx = socket.rx.lock();
        let consumer = rx.as_ref().and_then(|rx| rx.consumer.as_ref());
        socket.rx_mode.load(Acquire) != Mode::Link || consumer.is_some_and(|c| names(c.data_wanted()))
    } else {
        let tx = socket.tx.lock();
        let producer = tx.as_ref().and_then(|tx| tx.producer.as_ref());
        socket.tx_mode.load(Acquire) != Mode::Link || producer.is_some_and(|p| names(p.space_wanted()))
    }
}

/// Records one sleeping thread and one epoll set of the socket in the statistics.
fn show(socket: &Socket, interest: &Interest) {
    let Some(stats) = socket.told.stats() else { return };
    let sleeper = interest.sleepers.first().map(|s| s.waiter.0);
    let set = interest.members.first().and_then(|m| m.epoll.waiter()).map(|w| w.0);
    stats.set_waiting(sleeper, set);
}

/// Applies `change` to the socket's list of sets and sleepers. Then updates the wake-up words that the peer sees.
pub(crate) fn change_interest(socket: &'static Socket, change: impl FnOnce(&mut Interest)) {
    let Some(mut interest) = socket.wakes.interest.lock() else {
        return;
    };
    let slept = interest.sleepers.len();
    let before = interest.members.len() + slept;
    change(&mut interest);
    let after = interest.members.len() + interest.sleepers.len();
    let sleep_on = slept.min(interest.sleepers.len());
    show(socket, &interest);
    if socket.is_plain() && !socket.is_watched() {
        return;
    }
    let new = attention(socket, &interest);
    point!("interest: it is known whom the peer is to tell");
    let wants = |what: fn(&Sleeping) -> bool| interest.sleepers.iter().any(what);
    let mut changed = false;
    // Whether data or space that a sleeper waits for has come between the check (`was_there`) and the arming of the
    // word.
    let mut come = false;
    if let Some(mut rx) = socket.rx.lock() {
        let is_new = std::mem::replace(&mut rx.own.bits, new.sets) != new.sets;
        changed |= is_new;
        if let Some(consumer) = rx.consumer.as_mut() {
            // If data was there before, each thread that slept before this change has been notified of it, or does not
            // wait for data.
            let was_there = consumer.has_data().unwrap_or(true);
            // `arm_data` only adds bits to the word. So the bits of another waiter are cleared first. Otherwise the ids
            // of two waiters would mix.
            consumer.disarm_data(if is_new { u32::MAX } else { SLEEPER_MASK });
            if new.data != 0 {
                point!("interest: the peer is to tell nobody");
                let has_come = arm_data(socket, consumer, new.data) && !was_there;
                come |= has_come && socket.rx_mode.load(Acquire) == Mode::Link && wants(|s| s.data);
            }
        }
    }
    if let Some(mut tx) = socket.tx.lock() {
        let is_new = std::mem::replace(&mut tx.own.bits, new.sets) != new.sets;
        changed |= is_new;
        if let Some(producer) = tx.producer.as_mut() {
            let was_there = producer.has_space().unwrap_or(true);
            producer.disarm_space(if is_new { u32::MAX } else { SLEEPER_MASK });
            if new.space != 0 {
                let has_come = producer.arm_space(new.space).unwrap_or(true) && !was_there;
                // A direction that waits for the peer's RESUME is not in mode `Link`, though its ring may have space.
                come |= has_come && socket.tx_mode.load(Acquire) == Mode::Link && wants(|s| s.space);
            }
        }
    }
    // Waiters that the words named before may have missed data or space while the words did not name them.
    //
    // If the bits for sets have changed, epoll sets check the socket again, and arm its words by that check. The
    // exception is a single waiter that was just added, which checks by itself.
    //
    // Sleepers are notified only if data or space has come. A sleeper that wakes, checks and sleeps again changes the
    // words again. If each change woke the other sleepers, two of them would keep each other awake. Whether data or
    // space has come is checked after every change, because each change clears the sleepers' bits and arms them again.
    let sets_look = changed && !interest.members.is_empty() && after > usize::from(after > before);
    drop(interest);
    if sets_look || come && sleep_on > 0 {
        socket.later(Task::Notify);
    }
}

/// Adds the TCP socket of a connection that the library reports on to the service thread's epoll set, edge-triggered.
/// Returns false if the kernel refuses.
pub(crate) fn watch(socket: &Socket, fd: BorrowedFd<'_>) -> bool {
    let generation = socket.generation.load(Acquire) & 0xffff_ffff;
    let data = tag(kind::ANCHOR, u64::from(socket.slot) << 32 | generation);
    let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLPRI | libc::EPOLLET;
    add_to(Library::get().service.epoll.as_fd(), fd, events as u32, data).is_ok()
}

/// Removes the TCP socket from the service thread's epoll set before it is closed. The caller holds the control lock.
pub(crate) fn forget(socket: &Socket) {
    if socket.is_watched()
        && let Some(fd) = socket.numbers.anchor_fd()
    {
        let _ = kernel::delete(&Library::get().service.epoll, fd);
    }
}
