//! The UDP sockets of the control port: [`Answerer`] answers on all addresses of the host and returns the address that
//! a datagram was sent to; [`Asker`] asks a single host. Neither ever blocks.
//!
//! `rendezvous::control` defines the datagrams. All calls are raw system calls.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, recv, send, socket_with, sockopt,
};

use crate::ids::mapped;
use crate::os::kernel;
use crate::os::privatefd::PrivateFd;

/// A datagram that an [`Answerer`] has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The length of the datagram in bytes; greater than the buffer's if the datagram was cut short.
    pub length: usize,
    /// The sender, in the socket's own form of addresses: pass it to [`Answerer::send`] unchanged.
    pub from: SocketAddr,
    /// The local address that the datagram was sent to; `None` if the kernel did not report it.
    pub to: Option<IpAddr>,
}

/// A socket bound to a port on all addresses, IPv6 and IPv4; IPv4 alone on a host without IPv6.
#[derive(Debug)]
pub struct Answerer {
    fd: PrivateFd,
    is_v6: bool,
}

/// A buffer for control messages; the kernel expects it to be aligned like cmsghdr.
#[repr(C, align(8))]
struct Control([u8; 64]);

impl Answerer {
    /// Binds to `port`. Several processes of one user may bind it: the kernel gives each datagram to one of them.
    ///
    /// Fails with EADDRINUSE if another user, or a socket that does not share its port, has bound it. Not SO_REUSEADDR:
    /// between UDP sockets with that option, other users could share the port too.
    pub fn bind(port: u16) -> Result<Self, Errno> {
        match Self::bind_to(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))) {
            Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => {
                Self::bind_to(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
            }
            other => other,
        }
    }

    fn bind_to(address: SocketAddr) -> Result<Self, Errno> {
        let is_v6 = address.is_ipv6();
        let fd = socket(is_v6)?;
        sockopt::set_socket_reuseport(&fd, true)?;
        let (level, name) = if is_v6 {
            sockopt::set_ipv6_v6only(&fd, false)?;
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
        } else {
            (libc::IPPROTO_IP, libc::IP_PKTINFO)
        };
        kernel::set_option(fd.as_fd(), level, name, 1)?;
        bind(&fd, &address)?;
        Ok(Self { fd, is_v6 })
    }

    /// Returns the port, for tests that let the kernel choose it.
    pub fn port(&self) -> Result<u16, Errno> {
        let address = rustix::net::getsockname(&self.fd)?;
        Ok(SocketAddr::try_from(address)?.port())
    }

    /// Receives the next datagram; `None` if the queue is empty. An error about an earlier answer (ICMP) is returned as
    /// the kernel's errno; the next call goes on with the queue.
    pub fn recv(&self, buf: &mut [u8]) -> Result<Option<Arrival>, Errno> {
        let mut name = MaybeUninit::<libc::sockaddr_in6>::zeroed();
        let mut control = Control([0; 64]);
        let mut piece = libc::iovec {
            iov_base: buf.as_mut_ptr().cast(),
            iov_len: buf.len(),
        };
        // SAFETY: all zeroes is a valid msghdr.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name = name.as_mut_ptr().cast();
        header.msg_namelen = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
        header.msg_iov = &raw mut piece;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control.0.len();
        // SAFETY: the header and the four buffers that it points to outlive the call, and the kernel keeps no pointer
        // to them. Each is valid for writes of the size that the header names.
        let received = unsafe { self.call(libc::SYS_recvmsg, &raw mut header, libc::MSG_TRUNC) };
        let length = match received {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        // SAFETY: the structure was zeroed, and consists of integers, for which all bytes that the kernel writes are
        // valid.
        let name = unsafe { name.assume_init() };
        let from = address(&name).ok_or(Errno::BADMSG)?;
        // SAFETY: the kernel has filled the header; the header and the control buffer are still alive and unchanged.
        let to = unsafe { destination(&header) };
        Ok(Some(Arrival { length, from, to }))
    }

    /// Sends `bytes` to `to`, from the local address `from`. An answer without room in the send queue, or without a
    /// route, is lost.
    pub fn send(&self, bytes: &[u8], to: SocketAddr, from: IpAddr) -> Result<(), Errno> {
        let mut control = Control([0; 64]);
        let mut piece = IoSlice::new(bytes);
        // SAFETY: all zeroes is a valid msghdr, sockaddr_in6 and sockaddr_in.
        let (mut header, mut v6, mut v4): (libc::msghdr, libc::sockaddr_in6, libc::sockaddr_in) =
            unsafe { std::mem::zeroed() };
        header.msg_iov = (&raw mut piece).cast();
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        if self.is_v6 {
            let scope = if let SocketAddr::V6(to) = to { to.scope_id() } else { 0 };
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = to.port().to_be();
            v6.sin6_addr.s6_addr = mapped(to.ip()).octets();
            v6.sin6_scope_id = scope;
            header.msg_name = (&raw mut v6).cast();
            header.msg_namelen = size_of_val(&v6) as libc::socklen_t;
            let s6_addr = mapped(from).octets();
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr { s6_addr },
                ipi6_ifindex: scope,
            };
            // SAFETY: the control buffer is aligned, larger than the message, and lives until after the call.
            unsafe {
                put(&mut header, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
        } else {
            let (IpAddr::V4(ip), IpAddr::V4(from)) = (to.ip().to_canonical(), from.to_canonical()) else {
                return Err(Errno::AFNOSUPPORT);
            };
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = to.port().to_be();
            v4.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
            header.msg_name = (&raw mut v4).cast();
            header.msg_namelen = size_of_val(&v4) as libc::socklen_t;
            let info = libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(from.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            // SAFETY: as above.
            unsafe {
                put(&mut header, libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
        }
        // SAFETY: the header and the buffers that it points to outlive the call, and the kernel keeps no pointer to
        // them.
        unsafe { self.call(libc::SYS_sendmsg, &raw mut header, libc::MSG_NOSIGNAL) }.map(drop)
    }

    /// Calls sendmsg(2) or recvmsg(2) with MSG_DONTWAIT.
    ///
    /// # Safety
    /// The memory that the header points to is valid for the whole call; for writes, if the call receives.
    unsafe fn call(&self, number: libc::c_long, header: *mut libc::msghdr, flags: libc::c_int) -> Result<usize, Errno> {
        let fd = self.fd.as_raw_fd() as usize;
        let flags = (libc::MSG_DONTWAIT | flags) as usize;
        // SAFETY: by this function's contract.
        unsafe { kernel::call(number, [fd, kernel::address(header), flags, 0, 0, 0]) }
    }
}

impl AsFd for Answerer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A socket connected to one host: the kernel drops datagrams from elsewhere, and reports if no socket listens there.
#[derive(Debug)]
pub struct Asker {
    fd: PrivateFd,
}

impl Asker {
    /// Binds to the address `local`, any port, and connects to `remote`. Fails with EADDRNOTAVAIL, ENETUNREACH and the
    /// like.
    pub fn connect(local: IpAddr, remote: SocketAddr) -> Result<Self, Errno> {
        let fd = socket(remote.is_ipv6())?;
        bind(&fd, &SocketAddr::new(local, 0))?;
        connect(&fd, &remote)?;
        Ok(Self { fd })
    }

    /// Sends a datagram. ECONNREFUSED: no socket listened where an earlier datagram arrived.
    pub fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        send(&self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
    }

    /// Receives the next datagram and returns its length in bytes, which is greater than the buffer's if it was cut
    /// short. `None` if the queue is empty. ECONNREFUSED: no socket listens at the remote port.
    pub fn recv(&self, buf: &mut [u8]) -> Result<Option<usize>, Errno> {
        match recv(&self.fd, buf, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
            Ok((_, length)) => Ok(Some(length)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for Asker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket(is_v6: bool) -> Result<PrivateFd, Errno> {
    let family = if is_v6 {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    PrivateFd::open(|| socket_with(family, SocketType::DGRAM, flags, None))
}

/// Returns the address that the kernel has written. An IPv4 address is shorter, but family and port lie at the same
/// offsets. `None` for other families.
fn address(name: &libc::sockaddr_in6) -> Option<SocketAddr> {
    let port = u16::from_be(name.sin6_port);
    match i32::from(name.sin6_family) {
        libc::AF_INET6 => Some(SocketAddr::V6(SocketAddrV6::new(
            Ipv6Addr::from(name.sin6_addr.s6_addr),
            port,
            0,
            name.sin6_scope_id,
        ))),
        // sockaddr_in has the IPv4 address where sockaddr_in6 has the flow label.
        libc::AF_INET => Some(SocketAddr::from((
            Ipv4Addr::from(name.sin6_flowinfo.to_ne_bytes()),
            port,
        ))),
        _ => None,
    }
}

/// Returns the local address among the control messages; `None` if none of them has it.
///
/// # Safety
/// recvmsg(2) has filled the header; the header and its control buffer are still alive and unchanged.
unsafe fn destination(header: &libc::msghdr) -> Option<IpAddr> {
    // SAFETY: by the contract. The macros stay within the control buffer. Each message has as many bytes as the
    // kernel's structure for its type, which is read unaligned.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(head) = message.as_ref() {
            let data = libc::CMSG_DATA(message);
            match (head.cmsg_level, head.cmsg_type) {
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    return Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    let octets = info.ipi_addr.s_addr.to_ne_bytes();
                    return Some(IpAddr::V4(Ipv4Addr::from(octets)));
                }
                _ => message = libc::CMSG_NXTHDR(header, message),
            }
        }
    }
    None
}

/// Makes `value` the one control message of a header.
///
/// # Safety
/// `header.msg_control` is aligned like cmsghdr, and at least CMSG_SPACE(size of `value`) bytes long.
unsafe fn put<T>(header: &mut libc::msghdr, level: libc::c_int, kind: libc::c_int, value: T) {
    // SAFETY: by the contract; CMSG_FIRSTHDR returns the start of the buffer once its length is set.
    unsafe {
        header.msg_controllen = libc::CMSG_SPACE(size_of::<T>() as u32) as usize;
        let message = libc::CMSG_FIRSTHDR(header);
        if let Some(head) = message.as_mut() {
            head.cmsg_level = level;
            head.cmsg_type = kind;
            head.cmsg_len = libc::CMSG_LEN(size_of::<T>() as u32) as usize;
            libc::CMSG_DATA(message).cast::<T>().write_unaligned(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(fd: BorrowedFd<'_>) {
        let mut polled = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let limit = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&limit)).unwrap();
    }

    /// Returns the addresses to test. On a machine without IPv6 these are the IPv4 addresses alone.
    fn addresses() -> Vec<IpAddr> {
        let all = ["127.0.0.1", "127.0.0.2", "::1"].map(|ip| ip.parse::<IpAddr>().unwrap());
        let has = |ip: &IpAddr| std::net::UdpSocket::bind((*ip, 0)).is_ok();
        all.into_iter().filter(has).collect()
    }

    #[test]
    fn an_answer_comes_from_the_address_that_was_asked() {
        let any_v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        for answerer in [Answerer::bind(0), Answerer::bind_to(any_v4)] {
            let answerer = answerer.unwrap();
            let port = answerer.port().unwrap();
            for ip in addresses() {
                if ip.is_ipv6() && !answerer.is_v6 {
                    continue;
                }
                let asker = Asker::connect(ip, SocketAddr::new(ip, port)).unwrap();
                asker.send(b"question").unwrap();
                wait(answerer.as_fd());
                let mut buf = [0; 16];
                let arrival = answerer.recv(&mut buf).unwrap().unwrap();
                assert_eq!((arrival.length, &buf[..8]), (8, &b"question"[..]));
                assert_eq!(arrival.to, Some(ip));
                assert_eq!(arrival.from.ip().to_canonical(), ip);
                answerer.send(b"answer", arrival.from, ip).unwrap();
                wait(asker.as_fd());
                assert_eq!(asker.recv(&mut buf), Ok(Some(6)));
                assert_eq!(asker.recv(&mut buf), Ok(None));
                assert_eq!(answerer.recv(&mut buf), Ok(None));
            }
        }
    }

    #[test]
    fn who_asks_where_nobody_listens_is_told() {
        let local = IpAddr::from(Ipv4Addr::LOCALHOST);
        let port = Answerer::bind(0).unwrap().port().unwrap();
        let asker = Asker::connect(local, SocketAddr::new(local, port)).unwrap();
        asker.send(b"question").unwrap();
        wait(asker.as_fd());
        assert_eq!(asker.recv(&mut [0; 16]), Err(Errno::CONNREFUSED));
    }

    #[test]
    fn processes_of_one_user_share_a_port_and_others_do_not() {
        let first = Answerer::bind(0).unwrap();
        let port = first.port().unwrap();
        assert!(Answerer::bind(port).is_ok());
        assert!(std::net::UdpSocket::bind(("127.0.0.1", port)).is_err());
    }

    #[test]
    fn a_datagram_that_is_too_long_is_told_by_its_length() {
        let local = IpAddr::from(Ipv4Addr::LOCALHOST);
        let answerer = Answerer::bind(0).unwrap();
        let to = SocketAddr::new(local, answerer.port().unwrap());
        let asker = Asker::connect(local, to).unwrap();
        asker.send(&[1; 100]).unwrap();
        wait(answerer.as_fd());
        let arrival = answerer.recv(&mut [0; 16]).unwrap().unwrap();
        assert_eq!(arrival.length, 100);
    }
}
