//! One readiness model under epoll, poll and select: what is a socket ready for now, and who is
//! to be told when that changes.
//!
//! A direction on the link is asked through its ring, one on TCP through the kernel. While markers
//! may be in flight it is the payload that counts, not what the kernel calls readable.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::{Consumer, Producer, RxFlags, Wake};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Waiting;
use rustix::event::{PollFd, PollFlags};

use crate::library::Library;
use crate::link::Link;
use crate::points::point;
use crate::promote;
use crate::service::Command;
use crate::socket::{Interest, Mode, Sleeping, Socket};
use crate::tx;
use crate::wait::{SLEEPER_MASK, WaiterId};

const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ERR: u32 = libc::EPOLLERR as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const WRBAND: u32 = libc::EPOLLWRBAND as u32;
/// What says that the connection, or the receiving half of it, has ended.
pub const ENDED: u32 = RDHUP | HUP | ERR;

/// Whether to ask to be told of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arm {
    /// Only look.
    No,
    /// For what is not ready now (level-triggered).
    IfNotReady,
    /// For every change from now on (edge-triggered).
    Always,
}

/// Whether the socket's readiness is for this module to say, not for the kernel's set.
#[inline]
pub fn is_watched(socket: &Socket) -> bool {
    socket.watched.load(Acquire)
}

/// What the socket is ready for, of `events` and what is always reported (EPOLL* bits).
pub fn evaluate(socket: &'static Socket, events: u32, arm: Arm) -> u32 {
    let mut mask = 0;
    progress(socket);
    // Before the directions: an end is not told before what has come ahead of it.
    let anchor = socket.anchor.load(Acquire);
    if events & (IN | RDHUP | PRI) != 0 {
        mask |= readable(socket, arm);
    }
    if events & (OUT | WRBAND) != 0 {
        mask |= writable(socket, arm);
    }
    if anchor & (ENDED | PRI) == 0 {
        return mask;
    }
    // Something has ended: what exactly is true now is for the kernel to say.
    let Some(_tx) = socket.tx.lock() else {
        return mask;
    };
    mask | kernel(socket, PollFlags::IN | PollFlags::RDHUP | PollFlags::PRI) & (ENDED | PRI)
}

/// Takes in what has come over the socket's link, where that is not simply there. True if there was something.
#[inline]
pub fn progress(socket: &Socket) -> bool {
    socket.link().is_some_and(Link::progress)
}

/// The receiving direction.
pub fn readable(socket: &'static Socket, arm: Arm) -> u32 {
    if socket.rx_mode.load(Acquire) == Mode::Marked {
        return promote::readable(socket);
    }
    let Some(mut rx) = socket.rx.lock() else {
        return 0;
    };
    if socket.rx_mode.load(Acquire) != Mode::Link {
        let mask = kernel(
            socket,
            PollFlags::IN | PollFlags::RDNORM | PollFlags::RDHUP | PollFlags::PRI,
        );
        return mask & (IN | RDHUP | PRI | HUP | ERR);
    }
    let bits = rx.bits;
    // What TCP has is RESUME, or will be.
    let waits = rx.stays && !rx.read_on;
    let Some(consumer) = rx.consumer.as_mut() else {
        return 0;
    };
    let ready = match arm {
        Arm::Always => arm_data(socket, consumer, bits),
        Arm::No => consumer.has_data().unwrap_or(true),
        Arm::IfNotReady => match consumer.has_data() {
            Ok(false) => arm_data(socket, consumer, bits),
            Ok(true) => true,
            Err(_) => true,
        },
    };
    let anchor = socket.anchor.load(Acquire);
    if !ready {
        return if waits && socket.rx_shut.load(Acquire) {
            IN | RDHUP
        } else if waits {
            0
        } else if anchor & ENDED != 0 {
            // An error is over when somebody has been told of it: whether there still is one is for the kernel to say.
            IN | anchor & ENDED & !ERR
        } else {
            0
        };
    }
    match consumer.end() {
        Ok(None) => IN,
        Ok(Some(_)) if waits => 0,
        // A mark and no data: what it means is for the kernel to say, once the rest is done.
        Ok(Some(_)) => {
            drop(rx);
            if crate::rx::leave_link_at_end(socket) {
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

fn arm_data(socket: &'static Socket, consumer: &mut Consumer, bits: u32) -> bool {
    match consumer.arm_data(bits) {
        Ok(armed) => {
            notify_peer(socket, armed.wake);
            armed.ready
        }
        Err(_) => true,
    }
}

/// The sending direction; as `readable`.
pub fn writable(socket: &'static Socket, arm: Arm) -> u32 {
    if socket.tx_mode.load(Acquire) == Mode::Marked && !promote::flush(socket) {
        return if crate::tx::is_above_own_send(socket) {
            kernel(socket, PollFlags::OUT | PollFlags::WRNORM) & (OUT | HUP | ERR)
        } else {
            0
        };
    }
    let Some(mut tx) = socket.tx.lock() else {
        return 0;
    };
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return kernel(socket, PollFlags::OUT | PollFlags::WRNORM) & (OUT | HUP | ERR);
    }
    let bits = tx.bits;
    let Some(producer) = tx.producer.as_mut() else {
        return 0;
    };
    if is_reader_gone(producer) || socket.anchor.load(Acquire) & (HUP | ERR) != 0 {
        return OUT;
    }
    let ready = match arm {
        Arm::Always | Arm::IfNotReady => match producer.has_space() {
            Ok(false) => producer.arm_space(bits).unwrap_or(true),
            _ => true,
        },
        Arm::No => producer.has_space().unwrap_or(true),
    };
    if ready || tx::could_have_room(socket, producer) {
        return OUT;
    }
    tx::report_blocked(socket, &mut tx);
    0
}

/// The other end has closed: from here on the kernel answers.
pub fn is_reader_gone(producer: &mut Producer) -> bool {
    producer.consumer_flags().contains(RxFlags::RX_CLOSED)
}

/// What the kernel says of the anchor; the caller holds one of the socket's locks.
pub fn kernel(socket: &Socket, events: PollFlags) -> u32 {
    socket
        .anchor_fd()
        .map_or(ERR | HUP, |fd| anchor(fd, events))
}

/// The same, of an anchor that the caller holds.
pub fn anchor(fd: BorrowedFd<'_>, events: PollFlags) -> u32 {
    let mut set = [PollFd::from_borrowed_fd(fd, events)];
    let now = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match rustix::event::poll(&mut set, Some(&now)) {
        Ok(_) => set.first().map_or(0, |p| u32::from(p.revents().bits())),
        Err(_) => 0,
    }
}

/// Whether the peer has ended its direction of TCP, or the connection is over. To poll(2), and to a read of nothing, a
/// shutdown(SHUT_RD) of our own looks the same, to TCP's state it does not.
pub fn has_peer_ended(fd: BorrowedFd<'_>) -> bool {
    is_peers_end(fd, anchor(fd, PollFlags::RDHUP))
}

/// The same, given what poll(2) says.
pub fn is_peers_end(fd: BorrowedFd<'_>, events: u32) -> bool {
    events & ENDED != 0 && (events & ERR != 0 || !crate::sockopt::is_open_to_peer(fd))
}

/// Passes on what the ring says must be woken at the peer.
#[inline]
pub fn notify_peer(socket: &'static Socket, wake: Wake) {
    if !wake.is_none()
        && let Some(link) = socket.link()
    {
        link.notify(wake, Vqpn(socket.peer_vqpn.load(Relaxed)));
    }
}

/// Tells everybody in this process who waits on the socket. No lock may be held.
pub fn notify_local(socket: &'static Socket) {
    let Some(interest) = socket.interest.lock() else {
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
    let members = socket
        .interest
        .lock()
        .map(|i| i.members.clone())
        .unwrap_or_default();
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
    let sets = match interest.members.as_slice() {
        [] => 0,
        [first, rest @ ..] if rest.iter().all(|m| std::ptr::eq(m.epoll, first.epoll)) => {
            let bits = first.epoll.queue_bits();
            let known = WaiterId::of_queue(bits).is_some_and(told);
            if known { bits } else { Link::service_bits() }
        }
        _ => Link::service_bits(),
    };
    match interest.sleepers.as_slice() {
        [] => Attention {
            sets,
            data: 0,
            space: 0,
        },
        [one] if told(one.waiter) => Attention {
            sets,
            data: if one.data {
                one.waiter.sleeper_bits()
            } else {
                0
            },
            space: if one.space {
                one.waiter.sleeper_bits()
            } else {
                0
            },
        },
        _ => {
            let sets = Link::service_bits();
            Attention {
                sets,
                data: sets,
                space: sets,
            }
        }
    }
}

/// Has the statistics say who is interested.
fn show(socket: &Socket, interest: &Interest) {
    let Some(stats) = socket.stats() else { return };
    let sleeper = match interest.sleepers.as_slice() {
        [] => Waiting::Nobody,
        [one] => Waiting::One(one.waiter.0),
        _ => Waiting::Several,
    };
    let set = match interest.members.as_slice() {
        [] => Waiting::Nobody,
        [first, rest @ ..] if rest.iter().all(|m| std::ptr::eq(m.epoll, first.epoll)) => {
            let waiter = first.epoll.waiter();
            waiter.map_or(Waiting::Nobody, |w| Waiting::One(w.0))
        }
        _ => Waiting::Several,
    };
    stats.set_waiting(sleeper, set);
}

/// Changes who is interested, and whom the peer tells.
pub fn change_interest(socket: &'static Socket, change: impl FnOnce(&mut Interest)) {
    let Some(mut interest) = socket.interest.lock() else {
        return;
    };
    let before = interest.members.len() + interest.sleepers.len();
    change(&mut interest);
    let after = interest.members.len() + interest.sleepers.len();
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
        changed |= rx.bits != new.sets;
        let old = std::mem::replace(&mut rx.bits, new.sets);
        if let Some(consumer) = rx.consumer.as_mut() {
            // Two different waiters must not be mixed in one word.
            consumer.disarm_data(if old == new.sets {
                SLEEPER_MASK
            } else {
                u32::MAX
            });
            if new.data != 0 {
                let is_there = arm_data(socket, consumer, new.data);
                come |= is_there && socket.rx_mode.load(Acquire) == Mode::Link && wants(|s| s.data);
            }
        }
    }
    if let Some(mut tx) = socket.tx.lock() {
        changed |= tx.bits != new.sets;
        let old = std::mem::replace(&mut tx.bits, new.sets);
        if let Some(producer) = tx.producer.as_mut() {
            producer.disarm_space(if old == new.sets {
                SLEEPER_MASK
            } else {
                u32::MAX
            });
            if new.space != 0 {
                let is_there = producer.arm_space(new.space).unwrap_or(true);
                // A direction that waits for the other's RESUME may have room.
                come |=
                    is_there && socket.tx_mode.load(Acquire) == Mode::Link && wants(|s| s.space);
            }
        }
    }
    // The words of sets are set when they are looked at. Sleepers are told only for a reason: a look makes two of
    // them change the words again, and if each was told of that none would ever sleep.
    let tell = come || !interest.members.is_empty();
    drop(interest);
    // Who has just come looks for itself.
    if changed && tell && after > usize::from(after > before) {
        // Whoever was armed before may have missed a change in between: let all look again.
        Library::get().service.submit(Command::notify(socket));
    }
}

/// A thread's interest for as long as the value lives. The thread looks once more after making
/// it, and sleeps on the waiter's doorbell then.
pub struct Sleeper {
    pub socket: &'static Socket,
    waiter: WaiterId,
}

impl Sleeper {
    /// From now on the waiter's doorbell rings when there is `data` to read, or `space` to write.
    pub fn new(socket: &'static Socket, waiter: WaiterId, data: bool, space: bool) -> Self {
        change_interest(socket, |i| {
            i.sleepers.push(Sleeping {
                waiter,
                data,
                space,
            })
        });
        Self { socket, waiter }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let waiter = self.waiter;
        change_interest(self.socket, |i| {
            if let Some(at) = i.sleepers.iter().position(|s| s.waiter == waiter) {
                i.sleepers.swap_remove(at);
            }
        });
        if self.socket.is_closed() {
            crate::lifecycle::on_call_back(self.socket);
        }
    }
}
