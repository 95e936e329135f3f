//! The UDP sockets of the control port: one that answers on all addresses of the host and says which of them
//! a datagram came to, and one that asks a single host. Neither ever blocks.
//!
//! What a datagram says is `rendezvous::control`'s business. All calls are raw system calls.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, recv, send, socket_with, sockopt,
};

use super::kernel;
use super::privatefd::PrivateFd;

/// A datagram that came to an [`Answerer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Its bytes; more than the buffer's if it was cut short.
    pub length: usize,
    /// Who sent it, as the socket names addresses: pass it back to [`Answerer::send`] as it is.
    pub from: SocketAddr,
    /// Our address that it was sent to; `None` if the kernel did not say.
    pub to: Option<IpAddr>,
}

/// A socket bound to a port on all addresses, IPv6 and IPv4 or, where there is no IPv6, IPv4 alone.
#[derive(Debug)]
pub struct Answerer {
    fd: PrivateFd,
    is_v6: bool,
}

/// A control message buffer; the kernel wants it aligned as its header is.
#[repr(C, align(8))]
struct Control([u8; 64]);

impl Answerer {
    /// Binds to `port`. Several processes of one user may: the kernel gives a datagram to one of them.
    ///
    /// EADDRINUSE if another user, or somebody who does not share, has the port. Not SO_REUSEADDR: between
    /// UDP sockets that have it, the port can be shared with other users' too.
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

    /// The port, for tests that let the kernel choose it.
    pub fn port(&self) -> Result<u16, Errno> {
        let address = rustix::net::getsockname(&self.fd)?;
        Ok(SocketAddr::try_from(address)?.port())
    }

    /// Takes the next datagram; `None` if none is there. Errors that are about an earlier answer (ICMP) come
    /// as the kernel's errno; the next call goes on.
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
        // SAFETY: the header and the four buffers that it names outlive the call, which keeps nothing of
        // them; each is valid for writes of the size that the header says.
        let received = unsafe { self.call(libc::SYS_recvmsg, &raw mut header, libc::MSG_TRUNC) };
        let length = match received {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        // SAFETY: zeroed before, and plain numbers whatever the kernel has written.
        let name = unsafe { name.assume_init() };
        let from = address(&name).ok_or(Errno::BADMSG)?;
        // SAFETY: the kernel has filled the header; it and the control buffer are still there.
        let to = unsafe { destination(&header) };
        Ok(Some(Arrival { length, from, to }))
    }

    /// Sends `bytes` to `to`, from our address `from`. An answer that finds no room, or no way, is lost.
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
            let (ip, scope) = match to {
                SocketAddr::V4(to) => (to.ip().to_ipv6_mapped(), 0),
                SocketAddr::V6(to) => (*to.ip(), to.scope_id()),
            };
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = to.port().to_be();
            v6.sin6_addr.s6_addr = ip.octets();
            v6.sin6_scope_id = scope;
            header.msg_name = (&raw mut v6).cast();
            header.msg_namelen = size_of_val(&v6) as libc::socklen_t;
            let from = match from {
                IpAddr::V4(from) => from.to_ipv6_mapped(),
                IpAddr::V6(from) => from,
            };
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr { s6_addr: from.octets() },
                ipi6_ifindex: scope,
            };
            // SAFETY: the control buffer is aligned, larger than the message, and there until after the call.
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
        // SAFETY: the header and what it names outlive the call, which keeps nothing of them.
        unsafe { self.call(libc::SYS_sendmsg, &raw mut header, libc::MSG_NOSIGNAL) }.map(drop)
    }

    /// sendmsg(2) or recvmsg(2), without waiting.
    ///
    /// # Safety
    /// What the header names is valid for the call, for writes if that receives.
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

/// A socket that talks to one host only: the kernel drops what comes from elsewhere, and tells if nobody
/// listens there.
#[derive(Debug)]
pub struct Asker {
    fd: PrivateFd,
}

impl Asker {
    /// From the address `local`, any port, to `remote`. EADDRNOTAVAIL, ENETUNREACH and the like.
    pub fn connect(local: IpAddr, remote: SocketAddr) -> Result<Self, Errno> {
        let fd = socket(remote.is_ipv6())?;
        bind(&fd, &SocketAddr::new(local, 0))?;
        connect(&fd, &remote)?;
        Ok(Self { fd })
    }

    /// Sends a datagram. ECONNREFUSED: an earlier one found nobody.
    pub fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        send(&self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
    }

    /// Takes the next datagram, gives its bytes (more than the buffer's if it was cut short); `None` if none
    /// is there. ECONNREFUSED: nobody listens there.
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

/// The address that the kernel has written; what was meant for IPv4 is shorter, and begins alike.
fn address(name: &libc::sockaddr_in6) -> Option<SocketAddr> {
    let port = u16::from_be(name.sin6_port);
    match i32::from(name.sin6_family) {
        libc::AF_INET6 => Some(SocketAddr::V6(SocketAddrV6::new(
            Ipv6Addr::from(name.sin6_addr.s6_addr),
            port,
            0,
            name.sin6_scope_id,
        ))),
        // sockaddr_in has the address where sockaddr_in6 has the flow label.
        libc::AF_INET => Some(SocketAddr::from((
            Ipv4Addr::from(name.sin6_flowinfo.to_ne_bytes()),
            port,
        ))),
        _ => None,
    }
}

/// The local address among the control messages.
///
/// # Safety
/// The header is as recvmsg has left it, and its control buffer is still there and not changed.
unsafe fn destination(header: &libc::msghdr) -> Option<IpAddr> {
    // SAFETY: by the contract. The macros stay within the control buffer, and each message's data is as
    // long as the kernel's structure of that type, read unaligned.
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
/// `header.msg_control` is aligned as cmsghdr is, and at least CMSG_SPACE(size of `value`) long.
unsafe fn put<T>(header: &mut libc::msghdr, level: libc::c_int, kind: libc::c_int, value: T) {
    // SAFETY: by the contract; CMSG_FIRSTHDR gives the start of the buffer once its length is set.
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

    /// Where the machine has no IPv6 only the first is played.
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
