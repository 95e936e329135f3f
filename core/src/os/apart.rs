//! Receives and closes descriptors that another user's process has sent. A short-lived thread does this. It has a
//! descriptor table of its own, for two reasons:
//!
//! - close() of a descriptor drops the fcntl(2) locks that the closing table has on the file. The thread's table has no
//!   locks.
//! - The last close of a file can take as long as its sender arranges (a socket with SO_LINGER, a file of FUSE). The
//!   kernel also makes this last close if the receiving process has no free number for the file, or closes a socket in
//!   whose queue the file is unread.
//!
//! The thread closes nothing itself: the kernel closes its table when the thread ends, and ignores SO_LINGER in a
//! thread that exits.
//!
//! The thread's table is empty at first. The thread connects to an abstract name that the service thread has bound, and
//! the service thread sends descriptors over this connection: SCM_RIGHTS carries a file from one table into another.
//! (pidfd_getfd(2) would do as well, but many seccomp filters refuse it.)
//!
//! Only the service thread, which has all signals blocked, calls this module.

use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, getsockname, listen, recvmsg,
    sendmsg, socket_with,
};

use crate::os::channel::{Channel, MAX_FDS};
use crate::os::doorbell::Button;
use crate::os::privatefd::PrivateFd;
use crate::os::thread::spawn;
use crate::os::{channel, kernel, memfd};

/// The most threads of this module at a time. If one of them does not end, the close of a file in its table blocks.
const MOST: usize = 8;
/// The most descriptors that the kernel sends with one message.
const SCM_MAX_FD: usize = 253;
/// The most bytes of a message that a thread passes on.
const MOST_BYTES: usize = 2048;
/// The size of a thread's stack in bytes. libc keeps the program's thread-local variables there too.
const STACK: usize = 256 * 1024;
/// The longest wait for each connection to the socket of `start`, by the new thread or by another process.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The most connections of other processes that are dropped while `start` waits for the new thread's connection.
const STRANGERS: usize = 16;

/// The two requests to a thread. With `RECEIVE` comes a channel, whose next message the thread passes on. With `CLOSE`
/// comes a socket, which is closed when the thread ends.
const RECEIVE: &[u8] = b"receive";
const CLOSE: &[u8] = b"close";

/// For each place the kernel's id of its last thread, which may have ended (`is_free`); 0 if there is no such id.
static PLACES: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];
/// Stands for the id of a thread that was started and has not stored its id yet.
const BEGINS: u32 = u32::MAX;

/// Receives the next message of the channel `from` in a separate thread, which checks that the message's descriptors
/// are sealed memory or [buttons](Button).
///
/// Returns a channel on which the message arrives. If the thread finds another kind of descriptor, or gets no whole
/// message, it closes that channel without a message.
///
/// Fails with the kernel's errno if no thread can be started (EAGAIN, EMFILE, EPERM), and with ETIMEDOUT if the thread
/// does not connect.
pub fn receive(from: BorrowedFd<'_>) -> Result<Channel, Errno> {
    let thread = start()?;
    thread.send(RECEIVE, &[from])?;
    Ok(thread)
}

/// Closes the sockets whose close was left to this module ([`PrivateFd::leave`]). Returns `false` if no thread could be
/// started, or if at least one socket could not be sent to it.
pub fn close_left() -> bool {
    let Ok(thread) = start() else { return false };
    PrivateFd::close_left(|socket| thread.send(CLOSE, &[socket]).is_ok())
}

fn is_free(place: &AtomicU32) -> bool {
    match place.load(Acquire) {
        0 => true,
        BEGINS => false,
        thread => {
            let process = rustix::process::getpid().as_raw_nonzero().get();
            // SAFETY: signal 0 only checks that the thread exists; no signal is sent.
            unsafe { kernel::call(libc::SYS_tgkill, [process as usize, thread as usize, 0, 0, 0, 0]) }.is_err()
        }
    }
}

/// Starts a thread, and returns a channel to it. If other processes connect to the thread's name, closes their
/// connections.
fn start() -> Result<Channel, Errno> {
    let place = PLACES.iter().find(|place| is_free(place)).ok_or(Errno::AGAIN)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = PrivateFd::open(|| socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))?;
    bind(&listener, &SocketAddrUnix::new_unnamed())?;
    listen(&listener, STRANGERS as i32)?;
    let address = SocketAddrUnix::try_from(getsockname(&listener)?)?;
    place.store(BEGINS, Release);
    // The thread inherits the signal mask of the service thread, in which all signals are blocked.
    if let Err(error) = spawn(c"rdmasock", STACK, move || run(place, &address)) {
        place.store(0, Release);
        return Err(error);
    }
    for _ in 0..=STRANGERS {
        let mut ready = [PollFd::new(&listener, PollFlags::IN)];
        if poll(&mut ready, Some(&PATIENCE))? == 0 {
            break;
        }
        let channel = Channel::new(PrivateFd::open(|| accept_with(&listener, flags))?);
        if channel.peer()?.pid == Some(rustix::process::getpid().as_raw_nonzero().get() as u32) {
            return Ok(channel);
        }
    }
    Err(Errno::TIMEDOUT)
}

/// The body of the thread. Once the thread has a table of its own, a descriptor number means another file to it than to
/// the rest of the process. So it uses only descriptors that it opened itself, makes only raw system calls, and logs
/// nothing.
fn run(place: &AtomicU32, name: &SocketAddrUnix) {
    let id = rustix::thread::gettid().as_raw_nonzero().get();
    let all = u32::MAX as usize;
    let unshare = libc::CLOSE_RANGE_UNSHARE as usize;
    // SAFETY: the call unshares the table and empties it, which changes only the table of this thread. The thread owns
    // no descriptor yet.
    let is_apart = unsafe { kernel::call(libc::SYS_close_range, [0, all, unshare, 0, 0, 0]) }.is_ok();
    place.store(id as u32, Release);
    if is_apart {
        let _ = serve(name);
    }
}

fn serve(name: &SocketAddrUnix) -> Result<(), Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let socket = forever(socket);
    connect(socket, name)?;
    let mut buf = [0; MOST_BYTES];
    loop {
        let (request, fds) = take(socket, &mut buf, RecvFlags::empty())?;
        match (request, &fds[..]) {
            (RECEIVE, [from]) => return pass_on(*from, socket),
            // The kernel closes the descriptor when the thread ends.
            (CLOSE, _) => {}
            _ => return Ok(()),
        }
    }
}

/// Receives a message from `from` and sends it to `to`, if all its descriptors are of kinds that a peer may send.
fn pass_on(from: BorrowedFd<'_>, to: BorrowedFd<'static>) -> Result<(), Errno> {
    let mut buf = [0; MOST_BYTES];
    let (bytes, fds) = take(from, &mut buf, RecvFlags::DONTWAIT)?;
    if fds.len() > MAX_FDS || !fds.iter().all(|fd| is_expected(*fd)) {
        return Err(Errno::INVAL);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(|_| ())
}

/// Returns whether a peer may send this descriptor: sealed memory, or a button in whose queue no descriptors are found.
/// Shuts a button down for reading, so that no message can be sent to it any more. None of the calls involves a file
/// system.
fn is_expected(fd: BorrowedFd<'_>) -> bool {
    memfd::is_sealed(fd) || Button::is_one(fd) && channel::end_reading(fd, Shutdown::Read)
}

/// Receives a message with its descriptors. Fails with EMSGSIZE if bytes or descriptors of the message are missing.
fn take<'b>(
    from: BorrowedFd<'_>,
    buf: &'b mut [u8],
    flags: RecvFlags,
) -> Result<(&'b [u8], Vec<BorrowedFd<'static>>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(from, &mut [IoSliceMut::new(buf)], &mut control, flags)?;
    let fds = channel::rights(&mut control).map(forever).collect();
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE);
    }
    Ok((buf.get(..received.bytes).ok_or(Errno::MSGSIZE)?, fds))
}

/// Gives up the ownership: the descriptor stays open until the thread, and with it its table, ends.
fn forever(fd: OwnedFd) -> BorrowedFd<'static> {
    // SAFETY: `into_raw_fd` has taken the descriptor out of its owner, and this thread closes no descriptor.
    unsafe { BorrowedFd::borrow_raw(fd.into_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{Mode, OFlags, open};
    use rustix::net::socketpair;

    use super::*;
    use crate::os::forked::in_child;
    use crate::os::privatefd;

    /// Sends a message with `fd`, and receives it in a separate thread. Returns the number of descriptors that arrive;
    /// `None` if the message is refused.
    fn passed(fd: BorrowedFd<'_>) -> Option<usize> {
        let (a, b) = Channel::pair().unwrap();
        a.send(b"message", &[fd]).unwrap();
        let mut buf = [0; 16];
        let next = b.next(&mut buf).unwrap();
        assert_eq!((next.bytes, next.has_fds), (b"message".as_slice(), true));
        let apart = receive(b.as_fd()).unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            match apart.recv(&mut buf) {
                Ok(received) => {
                    assert_eq!(received.bytes, b"message");
                    return Some(received.fds.len());
                }
                Err(channel::RecvError::WouldBlock) if std::time::Instant::now() < end => std::thread::yield_now(),
                Err(channel::RecvError::Closed) => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn sockets() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn sealed_memory_and_buttons_are_passed_on_and_nothing_else() {
        in_child(|| {
            assert_eq!(passed(memfd::create_file("test", 4096).unwrap().as_fd()), Some(1));
            let (_bell, button) = crate::os::doorbell::pair().unwrap();
            assert_eq!(passed(button.as_fd()), Some(1));
            let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            let file = open("/proc/self/exe", OFlags::RDONLY, Mode::empty()).unwrap();
            let (used, other) = sockets();
            sendmsg(
                &other,
                &[IoSlice::new(b"x")],
                &mut Default::default(),
                SendFlags::empty(),
            )
            .unwrap();
            // `used` has an unread message without descriptors. `is_expected` drops such a message and accepts the
            // socket. The next socket's message has a descriptor, so that socket is refused.
            assert_eq!(passed(used.as_fd()), Some(1));
            let (used, other) = sockets();
            let other = Channel::new(PrivateFd::place(other).unwrap());
            other.send(b"x", &[event.as_fd()]).unwrap();
            for fd in [event.as_fd(), file.as_fd(), used.as_fd()] {
                assert_eq!(passed(fd), None);
            }
        });
    }

    #[test]
    fn a_button_that_was_passed_on_takes_nothing_more() {
        in_child(|| {
            let (button, other) = sockets();
            assert_eq!(passed(button.as_fd()), Some(1));
            let other = Channel::new(PrivateFd::place(other).unwrap());
            assert_eq!(other.send(b"x", &[button.as_fd()]), Err(Errno::PIPE));
        });
    }

    #[test]
    fn a_channel_with_unread_descriptors_is_closed_apart() {
        in_child(|| {
            for (messages, is_apart) in [(&[false, false][..], false), (&[false, true], true)] {
                let (reader, writer) = rustix::pipe::pipe().unwrap();
                let (a, b) = Channel::pair().unwrap();
                for has_fd in messages {
                    let fds = [writer.as_fd()];
                    a.send(b"x", if *has_fd { &fds } else { &[] }).unwrap();
                }
                drop((b, writer));
                assert_eq!(privatefd::is_any_left(), is_apart);
                assert_eq!(a.send(b"x", &[]), Err(Errno::PIPE));
                assert!(close_left() && !privatefd::is_any_left());
                // The read returns 0 once the last copy of `writer` is closed, at the latest when the thread ends.
                assert_eq!(rustix::io::read(&reader, &mut [0u8; 1][..]), Ok(0));
            }
        });
    }

    #[test]
    fn locks_of_the_program_stay() {
        in_child(|| {
            let flags = OFlags::RDWR | OFlags::TMPFILE;
            let file = open("/tmp", flags, Mode::RUSR | Mode::WUSR).unwrap();
            // SAFETY: zero is a valid value for each field.
            let mut lock: libc::flock = unsafe { std::mem::zeroed() };
            let fcntl = |how: i32, lock: &mut libc::flock| {
                let number = std::os::fd::AsRawFd::as_raw_fd(&file);
                // SAFETY: the lock is valid for writes.
                unsafe { libc::fcntl(number, how, std::ptr::from_mut(lock)) }
            };
            lock.l_type = libc::F_WRLCK as libc::c_short;
            assert_eq!(fcntl(libc::F_SETLK, &mut lock), 0);
            assert_eq!(passed(file.as_fd()), None);
            while PLACES.iter().any(|place| !is_free(place)) {
                std::thread::yield_now();
            }
            in_child(|| {
                assert_eq!(fcntl(libc::F_GETLK, &mut lock), 0);
                assert_eq!(i32::from(lock.l_type), libc::F_WRLCK);
            });
        });
    }
}
