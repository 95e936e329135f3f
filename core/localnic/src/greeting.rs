//! What two processes say to each other to connect: messages over a socket of one host (unix(7), SOCK_SEQPACKET), with
//! the descriptors of what they share.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rdmasock_core::fabric::plugin::PRIVATE_BYTES;
use rdmasock_core::fabric::plugin::errno::{Errno, Result};
use rdmasock_core::fabric::plugin::host::Hidden;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Descriptors with one message at most.
const FILES: usize = 3;
/// Changes with what is said.
const VERSION: u8 = 1;
/// Kind, version, length of the private data, process, private data.
const BYTES: usize = 7 + PRIVATE_BYTES;

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Who connects asks: with the pair's memory, its registrations, and what wakes it.
    Request = 1,
    /// The other agrees: with its registrations, and what wakes it.
    Accept = 2,
    /// The other does not.
    Reject = 3,
    /// Who connects is ready.
    Ready = 4,
}

/// What the caller has sent along.
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

    /// EINVAL if it is too long.
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

/// Sends one.
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

/// The next one; `None` if there is none now. ECONNRESET after the last.
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

/// As descriptors to send.
pub fn files<const N: usize>(files: [&Hidden; N]) -> [BorrowedFd<'_>; N] {
    files.map(AsFd::as_fd)
}
