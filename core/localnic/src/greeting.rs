//! The messages by which two processes connect, over a socket of one host (unix(7), SOCK_SEQPACKET). They carry the
//! descriptors of the shared objects.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rdmasock_core::fabric::plugin::{Errno, Hidden, PRIVATE_BYTES, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// The most descriptors of one message.
const FILES: usize = 3;
/// The version of these messages; changes with any change of their content.
const VERSION: u8 = 1;
/// The length of a message: kind, version, length of the private data, process, private data.
const BYTES: usize = 7 + PRIVATE_BYTES;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The connecting end's request: with the pair's memory, its registrations and its bell.
    Request = 1,
    /// The other end accepts: with its registrations and its bell.
    Accept = 2,
    /// The other end refuses.
    Reject = 3,
    /// The connecting end is ready.
    Ready = 4,
}

/// Private data of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    pub bytes: [u8; PRIVATE_BYTES],
    pub len: u32,
}

impl Private {
    pub const NONE: Self = Self {
        bytes: [0; PRIVATE_BYTES],
        len: 0,
    };

    /// Returns private data of these bytes; EINVAL if there are too many.
    pub fn of(bytes: &[u8]) -> Result<Self> {
        let mut private = Self::NONE;
        let place = private.bytes.get_mut(..bytes.len()).ok_or(Errno(libc::EINVAL))?;
        place.copy_from_slice(bytes);
        private.len = bytes.len() as u32;
        Ok(private)
    }
}

/// A message.
#[derive(Debug)]
pub struct Greeting {
    pub kind: Kind,
    pub pid: i32,
    pub private: Private,
    pub files: Vec<Hidden>,
}

/// Sends a message.
pub fn send(channel: &Hidden, kind: Kind, private: &Private, files: &[BorrowedFd<'_>]) -> Result<()> {
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let mut bytes = [0; BYTES];
    let (head, rest) = bytes.split_at_mut(7);
    head[..3].copy_from_slice(&[kind as u8, VERSION, private.len as u8]);
    head[3..].copy_from_slice(&pid.to_le_bytes());
    rest.copy_from_slice(&private.bytes);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno(libc::EINVAL));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(channel, &[IoSlice::new(&bytes)], &mut control, flags)?;
    Ok(())
}

/// Returns the next message; `None` if none has arrived. ECONNRESET after the last one.
pub fn receive(channel: &Hidden) -> Result<Option<Greeting>> {
    let mut bytes = [0; BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match recvmsg(channel, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Ok(received) => received,
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            files.extend(fds.map(Hidden::place));
        }
    }
    let files = files.into_iter().collect::<Result<Vec<_>>>()?;
    if received.bytes == 0 {
        return Err(Errno(libc::ECONNRESET));
    }
    let [kind, version, len, a, b, c, d, private @ ..] = bytes;
    let kind = match kind {
        1 => Kind::Request,
        2 => Kind::Accept,
        3 => Kind::Reject,
        4 => Kind::Ready,
        _ => return Err(Errno(libc::EPROTO)),
    };
    if received.bytes != BYTES || version != VERSION || usize::from(len) > PRIVATE_BYTES {
        return Err(Errno(libc::EPROTO));
    }
    Ok(Some(Greeting {
        kind,
        pid: i32::from_le_bytes([a, b, c, d]),
        private: Private {
            bytes: private,
            len: len.into(),
        },
        files,
    }))
}

/// Borrows the descriptors for sending.
pub fn files<const N: usize>(files: [&Hidden; N]) -> [BorrowedFd<'_>; N] {
    files.map(AsFd::as_fd)
}
