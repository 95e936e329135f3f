//! A connection that librspreload supports: plain sockets without flags, blocking send and recv, and no half-close.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use clap::Args;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrIn, connect, recv, send, setsockopt, socket, sockopt,
};

/// The address of a server.
#[derive(Debug, Args)]
pub struct Address {
    address: Ipv4Addr,
    port: u16,
}

impl Address {
    pub fn socket(&self) -> SockaddrIn {
        SockaddrIn::from(std::net::SocketAddrV4::new(self.address, self.port))
    }
}

/// The first bytes on a connection.
pub const HELLO: usize = 16;
/// The first byte of the last message.
pub const LAST: u8 = 1;

/// An end of a connection.
pub struct Stream(pub OwnedFd);

impl Stream {
    pub fn new() -> Result<Self> {
        let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None)?;
        Ok(Self(fd))
    }

    pub fn connected(address: &Address) -> Result<Self> {
        let stream = Self::new()?;
        connect(stream.0.as_raw_fd(), &address.socket()).context("connect")?;
        stream.set_nodelay()?;
        Ok(stream)
    }

    pub fn set_nodelay(&self) -> Result<()> {
        setsockopt(&self.0, sockopt::TcpNoDelay, &true).context("TCP_NODELAY")
    }

    /// Returns whether the kernel has a socket at this fd. An fd of librspreload is no socket of the kernel.
    pub fn is_socket(&self) -> Result<bool> {
        let kind = nix::sys::stat::fstat(&self.0)?.st_mode & libc::S_IFMT;
        Ok(kind == libc::S_IFSOCK)
    }

    pub fn send_all(&self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let count = send(self.0.as_raw_fd(), bytes, MsgFlags::empty()).context("send")?;
            bytes = bytes.get(count..).unwrap_or_default();
        }
        Ok(())
    }

    pub fn receive(&self, buffer: &mut [u8]) -> Result<usize> {
        recv(self.0.as_raw_fd(), buffer, MsgFlags::empty()).context("recv")
    }

    pub fn receive_all(&self, buffer: &mut [u8]) -> Result<()> {
        let mut got = 0;
        while let Some(rest) = buffer.get_mut(got..).filter(|rest| !rest.is_empty()) {
            let count = self.receive(rest)?;
            ensure!(count > 0, "the other end has closed");
            got += count;
        }
        Ok(())
    }
}
