//! Finds a TCP socket and its owner. Asks the kernel by sock_diag(7), in the network namespace of the calling thread.
//!
//! Any user can bind a service name, and any user can ask about a connection. So [`trusted`] compares uids:
//!
//! - A connector trusts a name if the name's uid owns the listening port, or is the uid of the process that has
//!   accepted the connection ([`acceptor_uid`]). The second check cannot replace the first: a server that starts as
//!   root may bind the name, and its worker, with another uid, may accept.
//! - An acceptor answers a question only if the asker's uid owns the connector's socket.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, UCred,
    netlink, recv, send, sendmsg, socket_with,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{Tuple, normalise};
use crate::os::channel::Channel;
use crate::os::dir;
use crate::os::privatefd::PrivateFd;

/// The owner of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The user with this uid in this process's user namespace.
    Uid(u32),
    /// There is no such socket.
    None,
    /// The kernel does not report the owner, or reports the uid that stands for all users of other user namespaces.
    Unknown,
}

/// The uid that the kernel reports for users that this process's user namespace does not map. This is the default; an
/// administrator can set another number (kernel.overflowuid).
const UNMAPPED: u32 = 65_534;

/// Returns whether the user `uid` is trusted in questions about a socket of `owner` (P5, P102).
///
/// Root is trusted for all sockets, other users for their own sockets. If the owner is not known, only the user of this
/// process, `own_uid`, is trusted.
pub fn trusted(uid: u32, owner: Owner, own_uid: u32) -> bool {
    match owner {
        Owner::Uid(owner) => uid == owner || uid == 0,
        Owner::None => uid == 0,
        Owner::Unknown => uid == own_uid && uid != UNMAPPED,
    }
}

fn owner(uid: u32) -> Owner {
    match uid {
        UNMAPPED if !maps_all() => Owner::Unknown,
        _ => Owner::Uid(uid),
    }
}

/// Returns whether this process's user namespace maps all uids, as the initial one does (user_namespaces(7)). Finds
/// this out without /proc, by sending credentials with the last uid. The kernel answers EINVAL if the uid is not
/// mapped, and EPERM if it is mapped but belongs to another user.
fn maps_all() -> bool {
    /// The last uid. If this uid is mapped, all are.
    const LAST: u32 = u32::MAX - 1;
    let Ok((ours, _theirs)) = Channel::pair() else {
        return false;
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let credentials = UCred {
        pid: rustix::process::getpid(),
        uid: rustix::process::Uid::from_raw(LAST),
        gid: rustix::process::getegid(),
    };
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = control
        .push(SendAncillaryMessage::ScmCredentials(credentials))
        .then(|| sendmsg(ours.as_fd(), &[IoSlice::new(&[0])], &mut control, flags));
    matches!(sent, Some(Ok(_) | Err(Errno::PERM)))
}

/// Returns the owner of the connector's socket of `connection`. `Owner::None` if this thread's network namespace does
/// not have the socket.
pub fn connector_owner(connection: &Tuple) -> Owner {
    match find(connection.connector(), connection.acceptor(), connection.device()) {
        Ok(Some(socket)) => owner(socket.uid),
        Ok(None) => Owner::None,
        Err(Unknown) => Owner::Unknown,
    }
}

/// Returns the number of bytes that the connector's socket of `connection` has sent and the acceptor's socket has not
/// received. `None` if the kernel does not report it, or if the connector's socket is not in this thread's network
/// namespace.
pub fn under_way(connection: &Tuple) -> Option<u32> {
    let (connector, acceptor) = (connection.connector(), connection.acceptor());
    let socket = ask_kernel(IPPROTO_TCP, connector, Some(acceptor), connection.device()).ok()?;
    (socket.state != TCP_LISTEN).then_some(socket.write_queue)
}

/// Returns whether the socket with the address `remote`, the peer of `local`, is in this thread's network namespace. If
/// so, its process is asked by name, else by the control port of its host.
///
/// Asks the kernel unless both addresses are the same or `remote` is a loopback address. Returns false if the kernel
/// does not answer.
pub fn is_here(local: SocketAddr, remote: SocketAddr, device: u32) -> bool {
    let ips = (local.ip().to_canonical(), remote.ip().to_canonical());
    // Most connections within a host need no question.
    ips.0 == ips.1
        || ips.1.is_loopback()
        || ask_kernel(IPPROTO_TCP, remote, Some(local), device).is_ok_and(|socket| socket.state != TCP_LISTEN)
}

/// Returns whether the socket of the connection from `local` to `remote`, in this thread's network namespace, has this
/// inode number (as fstat(2) reports it).
pub fn is_socket(local: SocketAddr, remote: SocketAddr, device: u32, inode: u64) -> bool {
    // sock_diag(7) reports the lower 32 bits of the inode number.
    find(local, remote, device).is_ok_and(|socket| socket.is_some_and(|socket| socket.inode == inode as u32))
}

/// Returns the owner of the UDP socket that a datagram to `port` of the loopback address would reach, in this thread's
/// network namespace.
pub fn udp_owner(port: u16) -> Owner {
    let local = SocketAddr::from(([127, 0, 0, 1], port));
    // The kernel's udp_diag expects source and destination swapped, compared with TCP.
    let socket = ask_kernel(IPPROTO_UDP, SocketAddr::from(([0, 0, 0, 0], 0)), Some(local), 0);
    socket.map_or(Owner::Unknown, |socket| owner(socket.uid))
}

/// Error: the kernel does not report the socket.
struct Unknown;

/// Returns the socket of the connection from `local` to `remote`, `None` if there is none.
fn find(local: SocketAddr, remote: SocketAddr, device: u32) -> Result<Option<Socket>, Unknown> {
    match ask_kernel(IPPROTO_TCP, local, Some(remote), device) {
        Ok(socket) => Ok(Some(socket).filter(|socket| socket.state != TCP_LISTEN)),
        // ENOENT is ambiguous: a kernel that has sock_diag but not its module for TCP returns it too. If the kernel
        // knows the other end of the connection, it has the module, and the socket does not exist.
        Err(Errno::NOENT) if ask_kernel(IPPROTO_TCP, remote, Some(local), device).is_ok() => Ok(None),
        Err(_) => {
            let ends = (normalise(local), normalise(remote));
            read_proc(ends.0, |table, is_whole| find_connection(table, is_whole, ends))?.transpose()
        }
    }
}

/// Returns the owner of the socket that a SYN to the acceptor of `connection` would reach, in this thread's network
/// namespace. The acceptor has to be on this host.
///
/// Asks sock_diag; where that is missing, reads /proc/net/tcp. To produce that file the kernel walks a hash table that
/// is sized for all possible connections, which takes long.
pub fn listener_owner(connection: &Tuple) -> Owner {
    let (connector, acceptor) = (connection.connector(), connection.acceptor());
    match ask_kernel(IPPROTO_TCP, acceptor, None, connection.device()) {
        Ok(socket) if socket.state == TCP_LISTEN => owner(socket.uid),
        // The kernel found an established connection with this local address, no listener.
        Ok(_) => Owner::None,
        // The kernel has its module for TCP if it knows the connector's end (see `find`).
        Err(Errno::NOENT) if ask_kernel(IPPROTO_TCP, connector, Some(acceptor), connection.device()).is_ok() => {
            Owner::None
        }
        Err(_) => read_listener(acceptor),
    }
}

/// Returns the uid of the process that has accepted `connection`. The acceptor has to be on this host. `None` if no
/// process has accepted the connection yet, or the kernel does not report it. Also `None` for uid 0.
pub fn acceptor_uid(connection: &Tuple) -> Option<u32> {
    let (connector, acceptor) = (connection.connector(), connection.acceptor());
    let socket = ask_kernel(IPPROTO_TCP, acceptor, Some(connector), connection.device()).ok()?;
    // Uid 0 counts as not accepted: the kernel reports it for a connection before accept(), whichever user listens.
    match owner(socket.uid) {
        Owner::Uid(uid) if socket.state != TCP_LISTEN && uid != 0 => Some(uid),
        _ => None,
    }
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;
const TCP_LISTEN: u8 = 10;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// struct nlmsghdr of linux/netlink.h. All of netlink is in native byte order, except addresses and ports.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct NetlinkHeader {
    len: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
}

/// struct inet_diag_sockid of linux/inet_diag.h. Ports and addresses are in network byte order.
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

/// A request for one socket: struct nlmsghdr, then struct inet_diag_req_v2.
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

/// The first, fixed part of struct inet_diag_msg.
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

/// The kernel's description of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Socket {
    pub state: u8,
    pub uid: u32,
    /// 0 for a connection that no fd refers to.
    inode: u32,
    /// Bytes that were sent and are not acknowledged.
    write_queue: u32,
}

/// Returns the local socket of the connection from `local` to `remote`. Without `remote`, returns the listening socket
/// that a SYN to `local` would reach. The kernel looks it up as for a real SYN, so wildcard, dual-stack and
/// bound-to-device listeners are found with the right precedence. `device` is the index of the interface that the SYN
/// would come in by, or that the socket is bound to.
///
/// ENOENT if there is no such socket, or if the kernel has no sock_diag for the protocol. EBADMSG if the answer cannot
/// be parsed.
fn ask_kernel(protocol: u8, local: SocketAddr, remote: Option<SocketAddr>, device: u32) -> Result<Socket, Errno> {
    let request = Request {
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
        protocol,
        extensions: 0,
        pad: 0,
        states: u32::MAX,
        id: SocketId {
            source_port: local.port().to_be_bytes(),
            source: address_field(local.ip()),
            destination_port: remote.map_or(0, |remote| remote.port()).to_be_bytes(),
            destination: remote.map_or([0; 16], |remote| address_field(remote.ip())),
            interface: device,
            // INET_DIAG_NOCOOKIE: any socket.
            cookie: [u32::MAX; 2],
        },
    };
    let (kind, flags) = (SocketType::DGRAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let protocol = Some(netlink::SOCK_DIAG);
    let fd = PrivateFd::open(|| socket_with(AddressFamily::NETLINK, kind, flags, protocol))?;
    send(&fd, request.as_bytes(), SendFlags::NOSIGNAL)?;
    // The kernel queues the answer within send(), so it can be received at once.
    let mut buf = [MaybeUninit::uninit(); 4096];
    let ((bytes, _), _) = recv(&fd, &mut buf[..], RecvFlags::DONTWAIT)?;
    parse(bytes)
}

/// Returns the address in netlink's form: 16 bytes. An IPv4 address fills the first four, and the rest is zero.
fn address_field(ip: IpAddr) -> [u8; 16] {
    match ip.to_canonical() {
        IpAddr::V4(v4) => zerocopy::transmute!([v4.octets(), [0; 4], [0; 4], [0; 4]]),
        IpAddr::V6(v6) => v6.octets(),
    }
}

pub(crate) fn parse(bytes: &[u8]) -> Result<Socket, Errno> {
    let (header, body) = NetlinkHeader::read_from_prefix(bytes).map_err(|_| Errno::BADMSG)?;
    if header.kind == NLMSG_ERROR {
        let (code, _) = i32::read_from_prefix(body).map_err(|_| Errno::BADMSG)?;
        // The kernel uses 1 to 4095 as errno. 0 would be an acknowledgement, which the request did not ask for.
        let errno = code
            .checked_neg()
            .filter(|e| (1..4096).contains(e))
            .ok_or(Errno::BADMSG)?;
        return Err(Errno::from_raw_os_error(errno));
    }
    let (answer, _) = Answer::read_from_prefix(body).map_err(|_| Errno::BADMSG)?;
    match header.kind {
        SOCK_DIAG_BY_FAMILY => Ok(Socket {
            state: answer.state,
            uid: answer.uid,
            inode: answer.inode,
            write_queue: answer.write_queue,
        }),
        _ => Err(Errno::BADMSG),
    }
}

/// Returns the owner of the listener for the address `server` from /proc, for kernels without sock_diag.
/// `Owner::Unknown` if /proc cannot be read, or if listeners of different users fit equally well.
fn read_listener(server: SocketAddr) -> Owner {
    let server = normalise(server);
    let find = |table: &str, _| Some(find_listener(table, server)).filter(|owner| *owner != Owner::None);
    read_proc(server, find).map_or(Owner::Unknown, |found| found.unwrap_or(Owner::None))
}

/// Searches the tables of /proc that may list a socket with the address `local`: tcp, then tcp6. Calls `find` with each
/// table's text, and whether the text is the whole table, until `find` returns a value. `None` if it never does.
fn read_proc<T>(local: SocketAddr, find: impl Fn(&str, bool) -> Option<T>) -> Result<Option<T>, Unknown> {
    /// Bytes of a table that are read, at most. A table lists listeners first.
    const ENOUGH: usize = 256 * 1024;
    let tables = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];
    for path in tables.into_iter().skip(usize::from(local.is_ipv6())) {
        let (table, is_whole) = dir::bytes(path, ENOUGH).map_err(|_| Unknown)?;
        if let Some(found) = find(&String::from_utf8_lossy(&table), is_whole) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Finds a connection in the text of /proc/net/tcp or tcp6 by its two addresses. [`Unknown`] if several connections
/// have these addresses (on different interfaces), or if none has and the text is not the whole table.
fn find_connection(
    table: &str,
    is_whole: bool,
    (local, remote): (SocketAddr, SocketAddr),
) -> Option<Result<Socket, Unknown>> {
    let mut found = table
        .lines()
        .filter_map(parse_line)
        .filter(|line| (line.local, line.remote) == (local, remote) && line.socket.state != TCP_LISTEN);
    match (found.next(), found.next()) {
        (Some(line), None) => Some(Ok(line.socket)),
        (None, _) if is_whole => None,
        _ => Some(Err(Unknown)),
    }
}

/// Returns the owner of the listener for `server`, by the text of /proc/net/tcp or tcp6. A listener with exactly that
/// address precedes wildcard listeners.
pub(crate) fn find_listener(table: &str, server: SocketAddr) -> Owner {
    let one = |fits: &dyn Fn(SocketAddr) -> bool| {
        let lines = table.lines().filter_map(parse_line);
        let listeners = lines.filter(|l| l.socket.state == TCP_LISTEN && l.local.port() == server.port());
        one_owner(listeners.filter(|l| fits(l.local)).map(|l| l.socket.uid))
    };
    match one(&|local| local == server) {
        Owner::None => one(&|local| local.ip().is_unspecified()),
        exact => exact,
    }
}

fn one_owner(mut uids: impl Iterator<Item = u32>) -> Owner {
    match uids.next() {
        None => Owner::None,
        Some(uid) if uids.all(|other| other == uid) => owner(uid),
        Some(_) => Owner::Unknown,
    }
}

/// A line of /proc/net/tcp or tcp6.
struct Line {
    local: SocketAddr,
    remote: SocketAddr,
    socket: Socket,
}

/// Parses a line of /proc/net/tcp or tcp6 (the kernel's proc_net_tcp.txt). `None` if it is malformed or cut short.
fn parse_line(line: &str) -> Option<Line> {
    let mut fields = line.split_ascii_whitespace();
    let local = parse_address(fields.nth(1)?)?;
    let remote = parse_address(fields.next()?)?;
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    let (write_queue, _) = fields.next()?.split_once(':')?;
    let write_queue = u32::from_str_radix(write_queue, 16).ok()?;
    let uid = fields.nth(2)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    // If no field follows the inode number, the text may end in the middle of the number.
    fields.next()?;
    let socket = Socket {
        state,
        uid,
        inode,
        write_queue,
    };
    Some(Line { local, remote, socket })
}

fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // The kernel prints an address as 32-bit numbers in the host's byte order.
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
    Some(normalise(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests;
