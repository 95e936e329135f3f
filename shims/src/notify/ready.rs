//! One readiness model under epoll, poll and select: who is to be told when what a socket is ready for changes, at this
//! end and at the peer's, and what the kernel says of its anchor. What it is ready for now is in `readiness`.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::{Consumer, Producer, RxFlags, Wake};
use rdmasock_core::fabric::waiter::{SLEEPER_MASK, WaiterId};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Waiting;
use rustix::event::{PollFd, PollFlags};

use rdmasock_core::stream::connection::{self, Ahead, SocketIo as _, Task};

use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::socket::{Interest, Mode, Sleeping, Socket};
use crate::objects::waiters::SERVICE;
use crate::sys::points::point;

const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ERR: u32 = libc::EPOLLERR as u32;
/// What says that the connection, or the receiving half of it, has ended.
pub const ENDED: u32 = RDHUP | HUP | ERR;

/// Whether the socket's readiness is for this module to say, not for the kernel's set.
#[inline]
pub fn is_watched(socket: &Socket) -> bool {
    socket.is_watched()
}

/// Takes in what has come over the socket's link, where that is not simply there. True if there was something.
#[inline]
pub fn progress(socket: &Socket) -> bool {
    socket.link().is_some_and(Link::progress)
}

/// Has the peer tell of data on behalf of `bits`. True if there is some.
pub fn arm_data(socket: &'static Socket, consumer: &mut Consumer, bits: u32) -> bool {
    match consumer.arm_data(bits) {
        Ok(armed) => {
            notify_peer(socket, armed.wake);
            armed.ready
        }
        Err(_) => true,
    }
}

/// The other end has closed: from here on the kernel answers.
pub fn is_reader_gone(producer: &mut Producer) -> bool {
    producer.consumer_flags().contains(RxFlags::RX_CLOSED)
}

/// What the kernel says of the anchor; the caller holds one of the socket's locks.
pub fn kernel(socket: &Socket, events: PollFlags) -> u32 {
    socket.numbers.anchor_fd().map_or(ERR | HUP, |fd| anchor(fd, events))
}

/// The same, of an anchor that the caller holds.
pub fn anchor(fd: BorrowedFd<'_>, events: PollFlags) -> u32 {
    let mut set = [PollFd::from_borrowed_fd(fd, events)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    match rustix::event::poll(&mut set, Some(&now)) {
        Ok(_) => set.first().map_or(0, |p| u32::from(p.revents().bits())),
        Err(_) => 0,
    }
}

/// What an anchor reports, less an error that is none: something is in the error queue (recvmsg(2)) of a connection
/// that goes on. Of one that has failed TCP is closed when that is reported.
pub fn without_queue(events: u32) -> u32 {
    if events & (ERR | HUP) == ERR {
        events & !ERR
    } else {
        events
    }
}

/// Whether an anchor of which poll(2) says this has failed, and the next call gets the error.
pub fn has_failed(events: u32) -> bool {
    without_queue(events) & ERR != 0
}

/// Whether the peer has ended its direction of TCP, or the connection is over. To poll(2), and to a read of nothing, a
/// shutdown(SHUT_RD) of our own looks the same, to TCP's state it does not.
pub fn has_peer_ended(fd: BorrowedFd<'_>) -> bool {
    is_peers_end(fd, anchor(fd, PollFlags::RDHUP))
}

/// The same, given what poll(2) says.
pub fn is_peers_end(fd: BorrowedFd<'_>, events: u32) -> bool {
    events & ENDED != 0 && (has_failed(events) || !crate::sys::sockopt::is_open_to_peer(fd))
}

/// What a direction that is scanned for markers has to read for the program (EPOLL* bits). `None` if it is scanned no
/// more.
pub fn among_markers(socket: &Socket) -> Option<u32> {
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

/// Passes on what the ring says must be woken at the peer.
#[inline]
pub fn notify_peer(socket: &Socket, wake: Wake) {
    if !wake.is_none()
        && let Some(link) = socket.link()
    {
        link.notify(wake, Vqpn(socket.peer_vqpn.load(Relaxed)));
    }
}

/// Tells everybody in this process who waits on the socket. No lock may be held.
pub fn notify_local(socket: &'static Socket) {
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

/// The socket has just become ours to report on: threads that are inside the kernel's poll on it come here.
pub fn tell_onlookers(socket: &'static Socket) {
    let waiters = &Library::get().waiters;
    for waiter in waiters.onlookers.of(socket.slot) {
        waiters.ring(WaiterId(waiter));
    }
}

/// The kernel's sets have the socket again.
pub fn hand_back(socket: &'static Socket) {
    let members = socket.wakes.members();
    for m in members {
        m.epoll.hand_back(m.item, socket);
    }
}

/// What the peer is to be asked for.
struct Attention {
    /// On behalf of the epoll sets, and of several sleepers.
    sets: u32,
    /// On behalf of the one thread that sleeps for data.
    data: u32,
    /// On behalf of the one thread that sleeps for space.
    space: u32,
}

/// One epoll set or one sleeping thread is told by the peer directly; where there are more, the
/// service thread is told, and tells them all.
fn attention(socket: &Socket, interest: &Interest) -> Attention {
    let link = socket.link();
    let told = |w: WaiterId| link.is_some_and(|l| l.announce(w));
    let words = match interest.sleepers.as_slice() {
        [] => Attention {
            sets: of_sets(interest, told),
            data: 0,
            space: 0,
        },
        [one] if told(one.waiter) => Attention {
            sets: of_sets(interest, told),
            data: if one.data { one.waiter.sleeper_bits() } else { 0 },
            space: if one.space { one.waiter.sleeper_bits() } else { 0 },
        },
        _ => {
            let sets = Link::service_bits();
            Attention {
                sets,
                data: sets,
                space: sets,
            }
        }
    };
    if words.sets == Link::service_bits() {
        // Before the peer knows.
        interest.members.iter().for_each(|m| m.epoll.be_served());
    }
    words
}

/// Who is told on behalf of the sets.
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

/// Whether a sleeper for data, or for space, will be told of what comes: by the peer, or by the service thread. Not if
/// its word was taken since it was made one.
pub fn will_be_told(socket: &Socket, waiter: WaiterId, is_data: bool) -> bool {
    let names = |word| WaiterId::of_sleeper(word) == Some(waiter) || WaiterId::of_queue(word) == Some(SERVICE);
    // What a direction that is not on the link waits for the service thread tells.
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

/// Has the statistics say who is interested.
fn show(socket: &Socket, interest: &Interest) {
    let Some(stats) = socket.told.stats() else { return };
    let sleeper = match interest.sleepers.as_slice() {
        [] => Waiting::Nobody,
        [one] => Waiting::One(one.waiter.0),
        _ => Waiting::Several,
    };
    let set = match interest.members.as_slice() {
        [] => Waiting::Nobody,
        [first, rest @ ..] if rest.iter().all(|m| std::ptr::addr_eq(m.epoll, first.epoll)) => {
            let waiter = first.epoll.waiter();
            waiter.map_or(Waiting::Nobody, |w| Waiting::One(w.0))
        }
        _ => Waiting::Several,
    };
    stats.set_waiting(sleeper, set);
}

/// Changes who is interested, and whom the peer tells.
pub fn change_interest(socket: &'static Socket, change: impl FnOnce(&mut Interest)) {
    let Some(mut interest) = socket.wakes.interest.lock() else {
        return;
    };
    let slept = interest.sleepers.len();
    let before = interest.members.len() + slept;
    change(&mut interest);
    let after = interest.members.len() + interest.sleepers.len();
    let sleep_on = slept.min(interest.sleepers.len());
    show(socket, &interest);
    if socket.is_plain() && !is_watched(socket) {
        return;
    }
    let new = attention(socket, &interest);
    point!("interest: it is known whom the peer is to tell");
    let wants = |what: fn(&Sleeping) -> bool| interest.sleepers.iter().any(what);
    let mut changed = false;
    // What a sleeper waits for has come while the word was being changed, or before.
    let mut come = false;
    if let Some(mut rx) = socket.rx.lock() {
        changed |= rx.own.bits != new.sets;
        let old = std::mem::replace(&mut rx.own.bits, new.sets);
        if let Some(consumer) = rx.consumer.as_mut() {
            // Whoever sleeps on has been told of that, or does not wait for it.
            let was_there = consumer.has_data().unwrap_or(true);
            // Two different waiters must not be mixed in one word.
            consumer.disarm_data(if old == new.sets { SLEEPER_MASK } else { u32::MAX });
            if new.data != 0 {
                point!("interest: the peer is to tell nobody");
                let is_there = arm_data(socket, consumer, new.data);
                let has_come = is_there && !was_there;
                come |= has_come && socket.rx_mode.load(Acquire) == Mode::Link && wants(|s| s.data);
            }
        }
    }
    if let Some(mut tx) = socket.tx.lock() {
        changed |= tx.own.bits != new.sets;
        let old = std::mem::replace(&mut tx.own.bits, new.sets);
        if let Some(producer) = tx.producer.as_mut() {
            let was_there = producer.has_space().unwrap_or(true);
            producer.disarm_space(if old == new.sets { SLEEPER_MASK } else { u32::MAX });
            if new.space != 0 {
                let is_there = producer.arm_space(new.space).unwrap_or(true);
                // A direction that waits for the other's RESUME may have room.
                let has_come = is_there && !was_there;
                come |= has_come && socket.tx_mode.load(Acquire) == Mode::Link && wants(|s| s.space);
            }
        }
    }
    // Whoever was armed before may have missed a change in between: let all look again; who has just come looks for
    // itself. The words of sets are set when they are looked at. Sleepers are told only for a reason: a look makes two
    // of them change the words again, and if each was told of that none would ever sleep. But they may have missed
    // something whatever has changed: their part of a word is always taken out and put back.
    let sets_look = changed && !interest.members.is_empty() && after > usize::from(after > before);
    drop(interest);
    if sets_look || come && sleep_on > 0 {
        socket.later(Task::Notify);
    }
}
