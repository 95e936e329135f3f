//! The UDP sockets of the control port, by which instances on two hosts ask and answer. [`Answerer`] has a port on all
//! addresses of the host, and reports for each datagram to which of them it was sent. [`Asker`] sends to a single host.
//! Neither ever blocks.
//!
//! `rendezvous::control` defines the datagrams. All calls are raw system calls.

use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::addr::SocketAddrStorage;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrAny, SocketFlags, SocketType, bind, connect, recv, send,
    socket_with, sockopt,
};

use crate::ids::mapped;
use crate::os::kernel;
use crate::os::privatefd::PrivateFd;

/// A datagram that an [`Answerer`] has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The length of the datagram in bytes; greater than the buffer's if the datagram was cut short.
    pub length: usize,
    /// The sender, in the socket's own form of addresses. To be passed to [`Answerer::send`] unchanged.
    pub from: SocketAddr,
    /// The local address to which the datagram was sent; `None` if the kernel did not report it.
    pub to: Option<IpAddr>,
}

/// A socket bound to a port on all addresses, IPv6 and IPv4; IPv4 alone on a host without IPv6.
#[derive(Debug)]
pub struct Answerer {
    fd: PrivateFd,
    is_v6: bool,
}

/// The control message with the local address of a datagram, as cmsg(3) lays it out.
#[derive(Default)]
#[repr(C)]
struct Control {
    length: usize,
    level: libc::c_int,
    kind: libc::c_int,
    /// An `in6_pktinfo` of 20 bytes, or an `in_pktinfo` of 12.
    info: [u8; 24],
}

/// The size in bytes of the storage for an address of either family.
const STORAGE: u32 = size_of::<SocketAddrStorage>() as u32;

impl Answerer {
    /// Binds to `port`. Several processes of one user may bind the same port: the kernel passes each datagram to one of
    /// them.
    ///
    /// Fails with EADDRINUSE if another user, or a socket that does not share its port (SO_REUSEPORT), has bound the
    /// port. SO_REUSEADDR is not used, since between UDP sockets with that option other users could share the port too.
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

    /// Returns the port. For tests, in which the kernel chooses it.
    pub fn port(&self) -> Result<u16, Errno> {
        let address = rustix::net::getsockname(&self.fd)?;
        Ok(SocketAddr::try_from(address)?.port())
    }

    /// Receives the next datagram; `None` if the queue is empty. Fails with the kernel's errno if an earlier answer has
    /// caused an error (ICMP). The next call goes on with the queue.
    pub fn recv(&self, buf: &mut [u8]) -> Result<Option<Arrival>, Errno> {
        let mut name = MaybeUninit::<SocketAddrStorage>::zeroed();
        let mut control = Control::default();
        let (at, piece) = ((name.as_mut_ptr(), STORAGE), (buf.as_mut_ptr(), buf.len()));
        // SAFETY: both pieces of memory are valid for writes during the whole call.
        let received = unsafe { self.call(libc::SYS_recvmsg, at, piece, &mut control, libc::MSG_TRUNC) };
        let length = match received {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        // SAFETY: the storage was zeroed, and holds the address that the kernel has written.
        let from = unsafe { SocketAddrAny::new(name, STORAGE) };
        let from = SocketAddr::try_from(from).map_err(|_| Errno::BADMSG)?;
        let to = control.local();
        Ok(Some(Arrival { length, from, to }))
    }

    /// Sends `bytes` to `to`, from the local address `from`. If there is no room in the send queue, or no route, fails
    /// with the kernel's errno, and the datagram is lost.
    pub fn send(&self, bytes: &[u8], to: SocketAddr, from: IpAddr) -> Result<(), Errno> {
        let mut control = Control::default();
        let to = if self.is_v6 {
            let scope = if let SocketAddr::V6(to) = to { to.scope_id() } else { 0 };
            let address = mapped(from).octets();
            control.set(
                libc::IPPROTO_IPV6,
                libc::IPV6_PKTINFO,
                &[&address, &scope.to_ne_bytes()],
            );
            SocketAddrV6::new(mapped(to.ip()), to.port(), 0, scope).into()
        } else {
            let (IpAddr::V4(ip), IpAddr::V4(from)) = (to.ip().to_canonical(), from.to_canonical()) else {
                return Err(Errno::AFNOSUPPORT);
            };
            control.set(libc::IPPROTO_IP, libc::IP_PKTINFO, &[&[0; 4], &from.octets(), &[0; 4]]);
            SocketAddr::from((ip, to.port()))
        };
        let mut to = SocketAddrAny::from(to);
        let (at, piece) = (
            (to.as_mut_ptr(), to.addr_len()),
            (bytes.as_ptr().cast_mut(), bytes.len()),
        );
        // SAFETY: both pieces of memory are valid for reads during the whole call, and the kernel does not write to
        // them.
        unsafe { self.call(libc::SYS_sendmsg, at, piece, &mut control, libc::MSG_NOSIGNAL) }.map(drop)
    }

    /// Calls sendmsg(2) or recvmsg(2) with MSG_DONTWAIT, for a datagram whose bytes lie in one piece of memory, with an
    /// address and a control message.
    ///
    /// # Safety
    /// `address` and `piece`, each a pointer and a size in bytes, are valid for reads during the whole call. If the
    /// call receives, they are valid for writes too.
    unsafe fn call(
        &self,
        number: libc::c_long,
        address: (*mut SocketAddrStorage, u32),
        piece: (*mut u8, usize),
        control: &mut Control,
        flags: libc::c_int,
    ) -> Result<usize, Errno> {
        let mut piece = libc::iovec {
            iov_base: piece.0.cast(),
            iov_len: piece.1,
        };
        // SAFETY: all zeroes is a valid value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        (header.msg_name, header.msg_namelen) = (address.0.cast(), address.1);
        (header.msg_iov, header.msg_iovlen) = (&raw mut piece, 1);
        (header.msg_control, header.msg_controllen) = (std::ptr::from_mut(control).cast(), size_of_val(control));
        let fd = self.fd.as_raw_fd() as usize;
        let flags = (libc::MSG_DONTWAIT | flags) as usize;
        // SAFETY: `address` and `piece` are valid by the contract. The header, the description of the piece and the
        // control message outlive the call, and the kernel keeps no pointer to them.
        unsafe { kernel::call(number, [fd, kernel::address(&raw mut header), flags, 0, 0, 0]) }
    }
}

impl AsFd for Answerer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A socket connected to one host. The kernel drops datagrams from elsewhere, and reports if no socket listens at the
/// remote port.
#[derive(Debug)]
pub struct Asker {
    fd: PrivateFd,
}

impl Asker {
    /// Binds to the address `local`, at any port, and connects to `remote`. Fails with the kernel's errno, for example
    /// EADDRNOTAVAIL or ENETUNREACH.
    pub fn connect(local: IpAddr, remote: SocketAddr) -> Result<Self, Errno> {
        let fd = socket(remote.is_ipv6())?;
        bind(&fd, &SocketAddr::new(local, 0))?;
        connect(&fd, &remote)?;
        Ok(Self { fd })
    }

    /// Sends a datagram. Fails with ECONNREFUSED if no socket listened where an earlier datagram arrived.
    pub fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        send(&self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
    }

    /// Receives the next datagram and returns its length in bytes. A length greater than the buffer's means that the
    /// datagram was cut short. `None` if the queue is empty. Fails with ECONNREFUSED if no socket listens at the remote
    /// port.
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

impl Control {
    /// Fills the message in. `parts` are the fields of an `in6_pktinfo` or `in_pktinfo`, in their order.
    fn set(&mut self, level: libc::c_int, kind: libc::c_int, parts: &[&[u8]]) {
        let mut length = 0;
        for (to, from) in self.info.iter_mut().zip(parts.iter().copied().flatten()) {
            *to = *from;
            length += 1;
        }
        self.length = size_of::<libc::cmsghdr>() + length;
        (self.level, self.kind) = (level, kind);
    }

    /// Returns the local address that the kernel has written; `None` if it has written none.
    fn local(&self) -> Option<IpAddr> {
        match (self.level, self.kind) {
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                let octets = self.info.first_chunk::<16>()?;
                Some(Ipv6Addr::from(*octets).to_canonical())
            }
            // The address that the datagram was sent to is `ipi_addr`, the last field of the `in_pktinfo`.
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                let octets = self.info.get(8..)?.first_chunk::<4>()?;
                Some(Ipv4Addr::from(*octets).into())
            }
            _ => None,
        }
    }
}

const _: () = assert!(std::mem::offset_of!(Control, info) == size_of::<libc::cmsghdr>());

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
