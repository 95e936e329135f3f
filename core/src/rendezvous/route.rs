//! Whether an address is this host's: a route lookup by rtnetlink(7). The result decides whether a connection's other
//! end is asked by name or by the control port.

use std::net::IpAddr;

use rustix::io::Errno;
use rustix::net::SocketType;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::rendezvous::diag::{AF_INET, AF_INET6, NLM_F_REQUEST, NLMSG_ERROR, NetlinkHeader, ask};

/// Returns whether the peer `remote` of a connection from `local` is on this host, in this network namespace.
///
/// Asks the kernel unless both addresses are the same or `remote` is a loopback address. Returns false if the kernel
/// does not answer.
pub fn is_here(local: IpAddr, remote: IpAddr) -> bool {
    let (local, remote) = (local.to_canonical(), remote.to_canonical());
    // Most connections within a host need no question.
    local == remote || remote.is_loopback() || look_up(remote).unwrap_or(false)
}

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;

/// linux/rtnetlink.h, struct rtmsg.
#[derive(Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RouteMessage {
    family: u8,
    destination_bits: u8,
    source_bits: u8,
    tos: u8,
    table: u8,
    protocol: u8,
    scope: u8,
    kind: u8,
    flags: u32,
}

/// linux/rtnetlink.h, struct rtattr.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Attribute {
    length: u16,
    kind: u16,
}

fn look_up(remote: IpAddr) -> Result<bool, Errno> {
    // NETLINK_ROUTE is protocol 0.
    ask(SocketType::RAW, None, &request(remote), parse)
}

fn request(remote: IpAddr) -> Vec<u8> {
    let (family, octets) = match remote {
        IpAddr::V4(ip) => (AF_INET, ip.octets().to_vec()),
        IpAddr::V6(ip) => (AF_INET6, ip.octets().to_vec()),
    };
    let message = RouteMessage {
        family,
        // At most 128.
        destination_bits: (8 * octets.len()) as u8,
        ..RouteMessage::default()
    };
    let attribute = Attribute {
        length: (size_of::<Attribute>() + octets.len()) as u16,
        kind: RTA_DST,
    };
    let header = NetlinkHeader {
        len: (size_of::<NetlinkHeader>() + size_of::<RouteMessage>()) as u32 + u32::from(attribute.length),
        kind: RTM_GETROUTE,
        flags: NLM_F_REQUEST,
        sequence: 1,
        port: 0,
    };
    [header.as_bytes(), message.as_bytes(), attribute.as_bytes(), &octets].concat()
}

pub(crate) fn parse(bytes: &[u8]) -> Result<bool, Errno> {
    let (header, body) = NetlinkHeader::read_from_prefix(bytes).map_err(|_| Errno::BADMSG)?;
    match header.kind {
        // No route: no peer can be reached there.
        NLMSG_ERROR => Ok(false),
        RTM_NEWROUTE => {
            let (message, _) = RouteMessage::read_from_prefix(body).map_err(|_| Errno::BADMSG)?;
            Ok(message.kind == RTN_LOCAL)
        }
        _ => Err(Errno::BADMSG),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn loopback_addresses_are_here() {
        for text in ["127.0.0.1", "127.1.2.3"] {
            assert_eq!(look_up(ip(text)), Ok(true));
        }
        assert!(is_here(ip("10.9.8.7"), ip("10.9.8.7")));
        assert!(is_here(ip("::1"), ip("::ffff:127.0.0.1")));
    }

    #[test]
    fn an_address_for_documentation_is_elsewhere() {
        for text in ["192.0.2.1", "2001:db8::1"] {
            assert!(!is_here(ip("127.0.0.1"), ip(text)), "{text}");
        }
    }

    #[test]
    fn the_kind_of_the_route_decides() {
        let mut answer = request(ip("10.0.0.1"));
        answer[4..6].copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
        assert_eq!(parse(&answer), Ok(false));
        answer[16 + 7] = RTN_LOCAL;
        assert_eq!(parse(&answer), Ok(true));
    }

    proptest! {
        #[test]
        fn no_answer_breaks_it(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            if let Some(kind) = bytes.get_mut(4..6) {
                kind.copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
            }
            let _ = parse(&bytes);
        }
    }
}
