//! A channel of whole messages with file descriptors between two processes of one host: a connected AF_UNIX SEQPACKET
//! socket, which never blocks.
//!
//! `wire` defines the messages; `rendezvous::names` makes the connections.

use std::io::{IoSlice, IoSliceMut};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown, sockopt,
};

use crate::os::kernel;
use crate::os::privatefd::{PrivateFd, Transit};

/// The most fds that one message may carry.
pub const MAX_FDS: usize = 4;

/// The process at the other end, as the kernel has recorded it (unix(7), SO_PEERCRED). If the other end connected, that
/// is the process that called connect(). If this end connected, it is the process that called listen().
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The process id; `None` if the process is not visible from this pid namespace.
    pub pid: Option<u32>,
    /// The effective user of the process, in this user namespace.
    pub uid: u32,
}

/// The reason why no message was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecvError {
    /// The queue holds no message at this moment.
    #[error("no message yet")]
    WouldBlock,
    /// The peer has closed its end, and all its messages have been received. A received empty message looks the same; a
    /// peer that sends one misbehaves.
    #[error("closed by the peer")]
    Closed,
    /// The message was longer than the buffer, or had more than `MAX_FDS` fds: the peer misbehaves. The message is
    /// discarded and its fds are closed.
    #[error("message or fds cut short")]
    Truncated,
    /// Any other failure, with the kernel's errno.
    #[error("receive failed: {0}")]
    Kernel(Errno),
}

/// A received message.
#[derive(Debug)]
pub struct Received<'b> {
    /// The bytes of the message, at least one.
    pub bytes: &'b [u8],
    /// The fds of the message, in the sender's order, at most [`MAX_FDS`].
    pub fds: Vec<PrivateFd>,
    /// Whether the message had fds for which this process had no free number. In that case `fds` is empty.
    pub fds_lost: bool,
}

/// The next message of a channel, as [`Channel::next`] returns it.
#[derive(Debug)]
pub struct Next<'b> {
    /// The bytes of the message.
    pub bytes: &'b [u8],
    /// Whether the message has fds. If it has, the message is still in the channel.
    pub has_fds: bool,
}

/// An end of a channel.
#[derive(Debug)]
pub struct Channel {
    fd: ManuallyDrop<PrivateFd>,
}

impl Channel {
    /// Makes a channel of a connected SEQPACKET socket, and takes over the socket.
    pub fn new(fd: PrivateFd) -> Self {
        Self {
            fd: ManuallyDrop::new(fd),
        }
    }

    /// Returns two ends that are connected to each other.
    pub fn pair() -> Result<(Self, Self), Errno> {
        let (a, b) = PrivateFd::pair()?;
        Ok((Self::new(a), Self::new(b)))
    }

    /// Sends one message with up to [`MAX_FDS`] fds; never blocks, never raises SIGPIPE.
    ///
    /// Fails with EAGAIN if the peer's queue is full, and with EPIPE or ECONNRESET if the peer has closed. ETOOMANYREFS
    /// means that too many fds are in flight. EINVAL means more than [`MAX_FDS`] fds, or no bytes.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        if bytes.is_empty() || fds.len() > MAX_FDS {
            return Err(Errno::INVAL);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // A SEQPACKET socket sends the whole message or nothing.
        sendmsg(self.as_fd(), &[IoSlice::new(bytes)], &mut control, flags).map(|_| ())
    }

    /// Receives one message into `buf`. If the message has fds, reads only its bytes, and leaves the message in the
    /// channel.
    ///
    /// Never blocks. To receive the fds could block: the kernel closes fds for which there is no room, and such a close
    /// takes as long as the sender has arranged (SO_LINGER).
    pub fn next<'b>(&self, buf: &'b mut [u8]) -> Result<Next<'b>, RecvError> {
        let shown = peek(self.as_fd(), buf, &mut []).map_err(RecvError::of)?;
        if shown.flags & libc::MSG_TRUNC != 0 {
            return Err(RecvError::Truncated);
        }
        let has_fds = shown.flags & libc::MSG_CTRUNC != 0;
        if !has_fds {
            skip(self.as_fd());
            if shown.bytes == 0 {
                return Err(RecvError::Closed);
            }
        }
        let bytes = buf.get(..shown.bytes).ok_or(RecvError::Truncated)?;
        Ok(Next { bytes, has_fds })
    }

    /// Receives one message into `buf`, and its fds as private fds. Does not block, provided that the peer is trusted
    /// not to send files whose close blocks.
    pub fn recv<'b>(&self, buf: &'b mut [u8]) -> Result<Received<'b>, RecvError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let transit = Transit::begin();
        let received =
            recvmsg(self.as_fd(), &mut [IoSliceMut::new(buf)], &mut control, flags).map_err(RecvError::of)?;
        // All fds are owned before any check can refuse the message, so that no fd leaks.
        let placed: Vec<_> = rights(&mut control).map(PrivateFd::place).collect();
        let placed: Result<Vec<PrivateFd>, Errno> = placed.into_iter().collect();
        drop(transit);
        let cut = received.flags.contains(ReturnFlags::CTRUNC);
        // Because of alignment, the space for four fds has room for a fifth.
        let too_many = placed
            .as_ref()
            .is_ok_and(|fds| fds.len() > MAX_FDS || cut && fds.len() == MAX_FDS);
        if received.flags.contains(ReturnFlags::TRUNC) || too_many {
            return Err(RecvError::Truncated);
        }
        let fds_lost = cut || placed.is_err();
        let fds = placed.ok().filter(|_| !cut).unwrap_or_default();
        if received.bytes == 0 {
            return Err(RecvError::Closed);
        }
        // The kernel returns at most the buffer's length, since MSG_TRUNC was not requested.
        let bytes = buf.get(..received.bytes).ok_or(RecvError::Truncated)?;
        Ok(Received { bytes, fds, fds_lost })
    }

    /// Gives up the ownership and returns the fd, which stays open and private ([`PrivateFd::release`]).
    pub fn release(self) -> i32 {
        ManuallyDrop::new(self).fd.as_raw_fd()
    }

    /// Returns the credentials of the process at the other end. On a connected socket this does not fail.
    pub fn peer(&self) -> Result<Credentials, Errno> {
        // A raw system call: rustix returns the pid as a non-zero type, but the kernel returns 0 for a peer outside
        // this pid namespace. Containers that share a network namespace have such peers.
        const UCRED: usize = size_of::<libc::ucred>();
        let (ucred, _) = kernel::option::<UCRED>(self.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED)?;
        let [pid, uid, _gid]: [u32; 3] = zerocopy::transmute!(ucred);
        Ok(Credentials {
            pid: (pid != 0).then_some(pid),
            uid,
        })
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let can_close = end_reading(self.as_fd(), Shutdown::Both);
        // SAFETY: `self.fd` is not used after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        if !can_close {
            fd.leave();
        }
    }
}

impl RecvError {
    fn of(errno: Errno) -> Self {
        match errno {
            Errno::AGAIN => Self::WouldBlock,
            Errno::CONNRESET => Self::Closed,
            other => Self::Kernel(other),
        }
    }
}

/// Returns the descriptors that came with a message.
pub(super) fn rights(control: &mut RecvAncillaryBuffer<'_>) -> impl Iterator<Item = OwnedFd> {
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    rights.flatten()
}

/// Shuts a connected SEQPACKET socket down for reading, which no holder of the socket can undo, and empties its queue.
/// Returns `false` if a message in the queue has fds, or if the queue is too long: then a close of the socket may
/// block.
pub(super) fn end_reading(socket: BorrowedFd<'_>, how: Shutdown) -> bool {
    /// The most messages to skip: more than a correct peer leaves unread.
    const MOST: usize = 256;
    // With SO_PASSCRED each message has credentials. So an empty message differs from the end of the queue.
    if shutdown(socket, how).is_err() || sockopt::set_socket_passcred(socket, true).is_err() {
        return false;
    }
    for _ in 0..MOST {
        let mut credentials = [0; CREDENTIALS];
        match peek(socket, &mut [0], &mut credentials) {
            Ok(shown) if shown.flags & libc::MSG_CTRUNC != 0 => return false,
            Ok(shown) if shown.control == 0 => return true,
            Ok(_) => skip(socket),
            // The kernel reports a pending error of the socket once, so the next peek does not fail with it.
            Err(Errno::CONNRESET) => {}
            Err(errno) => return errno == Errno::AGAIN,
        }
    }
    false
}

/// The size of a control message with a sender's credentials (SCM_CREDENTIALS), in words of 8 bytes.
const CREDENTIALS: usize = 4;

struct Shown {
    bytes: usize,
    control: usize,
    flags: i32,
}

/// Reads the next message without removing it. `control` has room for a sender's credentials at most, so a peek
/// receives no fd. The kernel cuts control messages for which there is no room (MSG_CTRUNC). Makes a raw system call,
/// since rustix has no value for the pid 0 of an unknown sender.
fn peek(socket: BorrowedFd<'_>, buf: &mut [u8], control: &mut [u64]) -> Result<Shown, Errno> {
    let mut part = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: zero is a valid value for each field.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(control);
    }
    let flags = (libc::MSG_PEEK | libc::MSG_DONTWAIT) as usize;
    let number = socket.as_raw_fd() as usize;
    // SAFETY: the memory that the message points to is borrowed, and valid for writes, for the whole call.
    let bytes = unsafe {
        kernel::call(
            libc::SYS_recvmsg,
            [number, kernel::address(&raw mut message), flags, 0, 0, 0],
        )
    }?;
    Ok(Shown {
        bytes,
        control: message.msg_controllen,
        flags: message.msg_flags,
    })
}

/// Removes the message that [`peek`] has read. The message has no fds.
fn skip(socket: BorrowedFd<'_>) {
    let _ = rustix::net::recv(socket, &mut [0u8; 1][..], RecvFlags::DONTWAIT);
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::fstat;
    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;
    use crate::os::forked::in_child;
    use crate::os::privatefd::is_private;

    fn event() -> PrivateFd {
        PrivateFd::place(eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap()
    }

    #[test]
    fn messages_keep_their_bounds_and_their_order() {
        in_child(|| {
            let (a, b) = Channel::pair().unwrap();
            let mut buf = [0; 64];
            assert_eq!(b.recv(&mut buf).unwrap_err(), RecvError::WouldBlock);
            a.send(b"one", &[]).unwrap();
            a.send(b"two!", &[]).unwrap();
            drop(a);
            assert_eq!(b.recv(&mut buf).unwrap().bytes, b"one");
            assert_eq!(b.recv(&mut buf).unwrap().bytes, b"two!");
            assert_eq!(b.recv(&mut buf).unwrap_err(), RecvError::Closed);
            assert_eq!(b.send(b"x", &[]), Err(Errno::PIPE));
        });
    }

    #[test]
    fn fds_arrive_in_order_and_hidden() {
        let (a, b) = Channel::pair().unwrap();
        let sent: Vec<PrivateFd> = (0..MAX_FDS).map(|_| event()).collect();
        let borrowed: Vec<BorrowedFd<'_>> = sent.iter().map(AsFd::as_fd).collect();
        a.send(b"fds", &borrowed).unwrap();
        let mut buf = [0; 8];
        let received = b.recv(&mut buf).unwrap();
        assert_eq!(received.fds.len(), MAX_FDS);
        for (mine, theirs) in sent.iter().zip(&received.fds) {
            assert!(is_private(theirs.as_raw_fd()));
            assert!(fcntl_getfd(theirs).unwrap().contains(FdFlags::CLOEXEC));
            rustix::io::write(mine, &7u64.to_ne_bytes()).unwrap();
            let mut count = [0; 8];
            rustix::io::read(theirs, &mut count[..]).unwrap();
            assert_eq!(u64::from_ne_bytes(count), 7);
            assert_eq!(fstat(mine).unwrap().st_ino, fstat(theirs).unwrap().st_ino);
        }
    }

    #[test]
    fn what_is_cut_short_is_refused_and_leaks_nothing() {
        let (a, b) = Channel::pair().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        a.send(b"too long", &[writer.as_fd()]).unwrap();
        drop(writer);
        assert_eq!(b.recv(&mut [0; 4]).unwrap_err(), RecvError::Truncated);
        // The receiver kept no copy of the write end, so the pipe is at its end.
        assert_eq!(rustix::io::read(&reader, &mut [0u8; 1][..]), Ok(0));
        a.send(b"next", &[]).unwrap();
        assert_eq!(b.recv(&mut [0; 4]).unwrap().bytes, b"next");
    }

    #[test]
    fn more_fds_than_allowed_are_refused_and_closed() {
        let (a, b) = Channel::pair().unwrap();
        for count in [5, 6, 20] {
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            let fds = vec![writer.as_fd(); count];
            // The library never sends more than `MAX_FDS` fds, but a foreign program may.
            assert_eq!(a.send(b"x", &fds), Err(Errno::INVAL));
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(&a, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
            drop(writer);
            assert_eq!(b.recv(&mut [0; 4]).unwrap_err(), RecvError::Truncated);
            assert_eq!(rustix::io::read(&reader, &mut [0u8; 1][..]), Ok(0));
        }
    }

    #[test]
    fn a_full_queue_says_so() {
        let (a, _b) = Channel::pair().unwrap();
        let refused = (0..100_000).find_map(|_| a.send(&[0; 1024], &[]).err());
        assert_eq!(refused, Some(Errno::AGAIN));
        assert_eq!(a.send(b"", &[]), Err(Errno::INVAL));
    }

    #[test]
    fn the_peer_is_known() {
        let (a, _b) = Channel::pair().unwrap();
        let expected = Credentials {
            pid: Some(std::process::id()),
            uid: rustix::process::geteuid().as_raw(),
        };
        assert_eq!(a.peer().unwrap(), expected);
    }
}
