//! A doorbell: the owner of a [`Button`] can wake the threads that poll the button's doorbell, and can do nothing else
//! to them. Threads that sleep in one call have futexes instead (`fabric::waiter`).
//!
//! A doorbell is a pair of connected AF_UNIX SEQPACKET sockets over which no byte is ever sent. To press the button is
//! `shutdown(SHUT_WR)`. The first press makes the other end, the doorbell, readable for good (end of file). Each
//! further press wakes the threads that poll the doorbell again: the kernel calls the doorbell's `sk_state_change`
//! whether its state changes or not. So an edge-triggered registration reports each press. A shutdown has advantages
//! over an eventfd, a pipe, or a byte through a socket:
//!
//! - A press stores nothing, so nothing fills up: a press never waits, never fails for want of room, and nothing has to
//!   be drained. No process can undo a shutdown.
//! - shutdown() ignores the flags of the open file, which the peer shares and could change (O_NONBLOCK). It raises no
//!   signal, and holds no lock of an object that the peer owns.
//! - A press costs what a write to an eventfd costs. A byte through a socket costs half as much again for each wake-up.
//!
//! The end that is polled never leaves the process that made it. That process sends the other end to the peer, and the
//! peer only checks that the received fd is a connected socket of this kind. Whichever socket of this kind the sender
//! has sent, a shutdown by the peer has no effect that the sender could not cause itself.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketType, getpeername, sockopt};

use crate::os::privatefd::PrivateFd;

/// The end that rings the doorbell.
#[derive(Debug)]
pub struct Button(PrivateFd);

/// Returns a doorbell, to be polled edge-triggered and for input, and its button. Fails with the kernel's errno
/// (EMFILE).
pub fn pair() -> Result<(PrivateFd, Button), Errno> {
    let (bell, button) = PrivateFd::pair()?;
    Ok((bell, Button(button)))
}

impl Button {
    /// Makes a button of an fd that a peer has sent; `None` if the fd cannot be one.
    pub fn received(fd: PrivateFd) -> Option<Self> {
        Self::is_one(fd.as_fd()).then_some(Self(fd))
    }

    /// Returns whether `fd` is a connected AF_UNIX SEQPACKET socket. Such a socket stays connected for ever.
    pub fn is_one(fd: BorrowedFd<'_>) -> bool {
        sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
            && getpeername(fd).is_ok()
    }

    /// Wakes the threads that poll the doorbell.
    pub fn press(&self) {
        press(self.0.as_fd());
    }

    /// Gives up the ownership and returns the fd, which stays open and private ([`PrivateFd::release`]).
    pub fn release(self) -> i32 {
        self.0.release()
    }
}

/// Does what [`Button::press`] does, for a caller that has only the button's fd.
pub fn press(button: BorrowedFd<'_>) {
    // An error is ignored: if the doorbell is closed, no thread waits for it.
    let _ = rustix::net::shutdown(button, Shutdown::Write);
}

impl AsFd for Button {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns whether this kernel reports each press to an edge-triggered registration. All kernels since 2.6 do, but no
/// interface promises it. Opens a few descriptors for a moment, and fails with the kernel's errno if it gets none.
pub fn is_reliable() -> Result<bool, Errno> {
    let (bell, button) = pair()?;
    let set = PrivateFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&set, &bell, epoll::EventData::new_u64(0), flags)?;
    let mut reported = [epoll::Event {
        flags: epoll::EventFlags::empty(),
        data: epoll::EventData::new_u64(0),
    }; 1];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut is_rung = || Ok::<_, Errno>(epoll::wait(&set, &mut reported[..], Some(&now))? == 1);
    for _ in 0..2 {
        if is_rung()? {
            return Ok(false);
        }
        button.press();
        if !is_rung()? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{OFlags, fcntl_setfl};
    use rustix::net::{SocketFlags, socket_with, socketpair};

    use super::*;

    fn sockets(kind: SocketType) -> (PrivateFd, PrivateFd) {
        let (a, b) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        (PrivateFd::place(a).unwrap(), PrivateFd::place(b).unwrap())
    }

    #[test]
    fn each_press_is_reported_also_through_a_set_in_a_set() {
        assert_eq!(is_reliable(), Ok(true));
        let (bell, button) = pair().unwrap();
        let [inner, outer] = [(); 2].map(|()| epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&inner, &bell, epoll::EventData::new_u64(1), flags).unwrap();
        epoll::add(&outer, &inner, epoll::EventData::new_u64(2), flags).unwrap();
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let rung = || {
            let mut reported = Vec::with_capacity(4);
            epoll::wait(&outer, rustix::buffer::spare_capacity(&mut reported), Some(&now)).unwrap()
        };
        assert_eq!(rung(), 0);
        for _ in 0..1000 {
            button.press();
            assert_eq!((rung(), rung()), (1, 0));
        }
    }

    #[test]
    fn only_such_a_socket_is_taken_for_a_button() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for other in [writer, event] {
            assert!(Button::received(PrivateFd::place(other).unwrap()).is_none());
        }
        assert!(Button::received(sockets(SocketType::STREAM).0).is_none());
        assert!(Button::received(sockets(SocketType::DGRAM).0).is_none());
        let alone = || socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        assert!(Button::received(PrivateFd::open(alone).unwrap()).is_none());
        assert!(Button::received(sockets(SocketType::SEQPACKET).0).is_some());
    }

    #[test]
    fn a_button_that_is_full_blocking_or_whose_bell_is_gone_can_be_pressed() {
        let (bell, button) = sockets(SocketType::SEQPACKET);
        fcntl_setfl(&button, OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&button, &[0; 4096]).is_ok() {}
        fcntl_setfl(&button, OFlags::empty()).unwrap();
        let button = Button::received(button).unwrap();
        button.press();
        button.press();
        drop(bell);
        button.press();
    }
}
