//! Whose is the TCP socket that listens on an address? Asked of the kernel by sock_diag(7).
//!
//! A service name can be bound by anybody; it is believed only if its owner is the one who owns the
//! port ([`trusted`]), or has accepted the connection ([`acceptor_uid`]). The accepted socket alone does not serve: its
//! uid is the accepting worker's, and the name may be its parent's.

use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{Tuple, normalise};
use crate::os::privatefd::PrivateFd;

/// The owner of a listening TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenerOwner {
    /// This user, in our user namespace.
    Uid(u32),
    /// Nobody listens there.
    None,
    /// The kernel does not say.
    Unknown,
}

/// May a name whose listener has `name_uid` be believed to speak for the port (P5)?
///
/// Root may speak for all, others for their own ports; where the port's owner is not known, only our own
/// user.
pub fn trusted(name_uid: u32, port_owner: ListenerOwner, own_uid: u32) -> bool {
    match port_owner {
        ListenerOwner::Uid(uid) => name_uid == uid || name_uid == 0,
        ListenerOwner::None => name_uid == 0,
        ListenerOwner::Unknown => name_uid == own_uid,
    }
}

/// Who owns the socket that a SYN to the acceptor of `connection`, which is one of this host, would reach in our
/// network namespace.
///
/// By sock_diag, and where that is missing by /proc/net/tcp, which takes the kernel long: it goes through a table that
/// is made for all connections that there could be.
pub fn listener_owner(connection: &Tuple) -> ListenerOwner {
    let (connector, acceptor) = (connection.connector(), connection.acceptor());
    match ask_kernel(&request(acceptor, None)) {
        Ok((TCP_LISTEN, uid)) => ListenerOwner::Uid(uid),
        // An established connection of the same address.
        Ok(_) => ListenerOwner::None,
        // Or the kernel has sock_diag but not its part for TCP: then it does not know the connection either.
        Err(Errno::NOENT) if ask_kernel(&request(connector, Some(acceptor))).is_ok() => ListenerOwner::None,
        Err(_) => read_proc(acceptor),
    }
}

/// The uid of the process that has accepted `connection`, which is one of this host; `None` if nobody has yet, or the
/// kernel does not say.
pub fn acceptor_uid(connection: &Tuple) -> Option<u32> {
    match ask_kernel(&request(connection.acceptor(), Some(connection.connector()))) {
        // Of a connection that nobody has accepted the kernel says 0, whoever listens.
        Ok((TCP_LISTEN, _) | (_, 0)) | Err(_) => None,
        Ok((_, uid)) => Some(uid),
    }
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
pub(super) const NLM_F_REQUEST: u16 = 1;
pub(super) const NLMSG_ERROR: u16 = 2;
const IPPROTO_TCP: u8 = 6;
const TCP_LISTEN: u8 = 10;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// linux/netlink.h, struct nlmsghdr. Native byte order, as all of netlink but addresses and ports.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct NetlinkHeader {
    pub len: u32,
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    pub port: u32,
}

/// linux/inet_diag.h, struct inet_diag_sockid. Ports and addresses are in network byte order.
#[derive(Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SocketId {
    source_port: [u8; 2],
    destination_port: [u8; 2],
    source: [u8; 16],
    destination: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

/// A request for one socket: nlmsghdr and struct inet_diag_req_v2.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Request {
    header: NetlinkHeader,
    family: u8,
    protocol: u8,
    extensions: u8,
    pad: u8,
    states: u32,
    id: SocketId,
}

/// The beginning of struct inet_diag_msg, all of its fixed part.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    write_queue: u32,
    uid: u32,
    inode: u32,
}

/// State and uid of the socket that is asked for. ENOENT if there is none, or no sock_diag for TCP; EBADMSG for an
/// answer that is none.
fn ask_kernel(request: &Request) -> Result<(u8, u32), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = Some(netlink::SOCK_DIAG);
    let fd = PrivateFd::open(|| socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol))?;
    send(&fd, request.as_bytes(), SendFlags::NOSIGNAL)?;
    // The kernel answers within send(), so the answer is there.
    let mut buf = [MaybeUninit::uninit(); 4096];
    let ((bytes, _), _) = recv(&fd, &mut buf[..], RecvFlags::DONTWAIT)?;
    parse(bytes)
}

/// Asks for the one connection from `local` to `remote`, or without that for the one socket that would take a
/// connection to `local`: the kernel looks it up as it does for a SYN, so wildcard, dual-stack and bound-to-device
/// listeners are found with the right precedence.
fn request(local: SocketAddr, remote: Option<SocketAddr>) -> Request {
    let interface = match local {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    Request {
        header: NetlinkHeader {
            len: size_of::<Request>() as u32,
            kind: SOCK_DIAG_BY_FAMILY,
            flags: NLM_F_REQUEST,
            sequence: 1,
            port: 0,
        },
        family: match local.ip().to_canonical() {
            IpAddr::V4(_) => AF_INET,
            IpAddr::V6(_) => AF_INET6,
        },
        protocol: IPPROTO_TCP,
        extensions: 0,
        pad: 0,
        states: u32::MAX,
        id: SocketId {
            source_port: local.port().to_be_bytes(),
            source: address_field(local.ip()),
            destination_port: remote.map_or(0, |remote| remote.port()).to_be_bytes(),
            destination: remote.map_or([0; 16], |remote| address_field(remote.ip())),
            interface,
            // INET_DIAG_NOCOOKIE: any socket.
            cookie: [u32::MAX; 2],
        },
    }
}

/// The unused rest of an IPv4 address field is zero.
fn address_field(ip: IpAddr) -> [u8; 16] {
    match ip.to_canonical() {
        IpAddr::V4(v4) => {
            let mut field = [0; 16];
            field.iter_mut().zip(v4.octets()).for_each(|(to, from)| *to = from);
            field
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

pub(crate) fn parse(bytes: &[u8]) -> Result<(u8, u32), Errno> {
    let (header, body) = NetlinkHeader::read_from_prefix(bytes).map_err(|_| Errno::BADMSG)?;
    if header.kind == NLMSG_ERROR {
        let (code, _) = i32::read_from_prefix(body).map_err(|_| Errno::BADMSG)?;
        // 1..4096 is what the kernel uses as errno; 0 is an acknowledgement, which we did not ask for.
        let errno = code
            .checked_neg()
            .filter(|e| (1..4096).contains(e))
            .ok_or(Errno::BADMSG)?;
        return Err(Errno::from_raw_os_error(errno));
    }
    let (answer, _) = Answer::read_from_prefix(body).map_err(|_| Errno::BADMSG)?;
    match header.kind {
        SOCK_DIAG_BY_FAMILY => Ok((answer.state, answer.uid)),
        _ => Err(Errno::BADMSG),
    }
}

/// The same from /proc, for kernels without sock_diag. Unknown if /proc cannot be read, or if sockets of
/// different users fit equally well.
fn read_proc(server: SocketAddr) -> ListenerOwner {
    let server = normalise(server);
    let mut owner = if server.is_ipv4() {
        read_table("/proc/net/tcp", server)
    } else {
        ListenerOwner::None
    };
    if owner == ListenerOwner::None {
        owner = read_table("/proc/net/tcp6", server);
    }
    owner
}

fn read_table(path: &str, server: SocketAddr) -> ListenerOwner {
    // Listeners come first in these tables; what lies beyond this many bytes are connections.
    const ENOUGH: usize = 256 * 1024;
    let mut table = Vec::new();
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let opened = PrivateFd::open(|| openat(CWD, path, flags, Mode::empty()));
    let Ok(fd) = opened else {
        return ListenerOwner::Unknown;
    };
    let mut piece = [0u8; 4096];
    while table.len() < ENOUGH {
        match rustix::io::read(fd.as_fd(), &mut piece) {
            Ok(0) => break,
            Ok(n) => table.extend_from_slice(piece.get(..n).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(_) => return ListenerOwner::Unknown,
        }
    }
    find_listener(&String::from_utf8_lossy(&table), server)
}

/// Finds the listener for `server` in the text of /proc/net/tcp or tcp6: the one with that address, or
/// else a wildcard one.
pub(crate) fn find_listener(table: &str, server: SocketAddr) -> ListenerOwner {
    let listeners = || {
        let sockets = table.lines().filter_map(parse_line);
        sockets.filter(|(local, state, _)| *state == TCP_LISTEN && local.port() == server.port())
    };
    let exact = one_owner(listeners().filter(|(local, ..)| *local == server).map(|(.., uid)| uid));
    if exact != ListenerOwner::None {
        return exact;
    }
    one_owner(
        listeners()
            .filter(|(local, ..)| local.ip().is_unspecified())
            .map(|(.., uid)| uid),
    )
}

fn one_owner(mut uids: impl Iterator<Item = u32>) -> ListenerOwner {
    match uids.next() {
        None => ListenerOwner::None,
        Some(uid) if uids.all(|other| other == uid) => ListenerOwner::Uid(uid),
        Some(_) => ListenerOwner::Unknown,
    }
}

/// Local address, state and uid of a line of /proc/net/tcp or tcp6 (proc_net_tcp.txt of the kernel).
fn parse_line(line: &str) -> Option<(SocketAddr, u8, u32)> {
    let mut fields = line.split_ascii_whitespace();
    let local = fields.nth(1)?;
    let state = u8::from_str_radix(fields.nth(1)?, 16).ok()?;
    let uid = fields.nth(3)?.parse().ok()?;
    // The inode follows; without it the line, and perhaps the uid, is cut short.
    fields.nth(1)?;
    let (ip, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Addresses are printed as 32-bit numbers of the host's byte order.
    let word = |i: usize| {
        u32::from_str_radix(ip.get(8 * i..8 * i + 8)?, 16)
            .ok()
            .map(u32::to_ne_bytes)
    };
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            IpAddr::from(<[u8; 16]>::read_from_bytes(words.as_bytes()).ok()?)
        }
        _ => return None,
    };
    Some((normalise(SocketAddr::new(ip, port)), state, uid))
}

#[cfg(test)]
mod tests;
