//! Whether an address is this host's, and else through which interface it is reached: a route lookup by rtnetlink(7).
//! The result decides whether a connection's other end is asked by name or by the control port.

use std::net::IpAddr;

use rustix::io::Errno;
use rustix::net::SocketType;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::rendezvous::diag::{AF_INET, AF_INET6, NLM_F_REQUEST, NLMSG_ERROR, NetlinkHeader, ask};

/// The place of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On this host, in this network namespace.
    Here,
    /// On another host, or in another network namespace.
    There {
        /// Index of the interface that leads there; `None` if the kernel does not report it.
        interface: Option<u32>,
    },
}

/// Returns the place of the peer `remote` of a connection from `local`.
///
/// Asks the kernel unless both addresses are the same or `remote` is a loopback address. If the kernel does not answer,
/// the place is [`Place::There`].
pub fn place_of(local: IpAddr, remote: IpAddr) -> Place {
    let (local, remote) = (local.to_canonical(), remote.to_canonical());
    // Most connections within a host need no question.
    if local == remote || remote.is_loopback() {
        return Place::Here;
    }
    look_up(remote).unwrap_or(Place::There { interface: None })
}

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;

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
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Attribute {
    length: u16,
    kind: u16,
}

fn look_up(remote: IpAddr) -> Result<Place, Errno> {
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

pub(crate) fn parse(bytes: &[u8]) -> Result<Place, Errno> {
    let (header, body) = NetlinkHeader::read_from_prefix(bytes).map_err(|_| Errno::BADMSG)?;
    match header.kind {
        // No route: no peer can be reached there.
        NLMSG_ERROR => return Ok(Place::There { interface: None }),
        RTM_NEWROUTE => {}
        _ => return Err(Errno::BADMSG),
    }
    let (message, mut rest) = RouteMessage::read_from_prefix(body).map_err(|_| Errno::BADMSG)?;
    if message.kind == RTN_LOCAL {
        return Ok(Place::Here);
    }
    let mut interface = None;
    while let Ok((attribute, _)) = Attribute::read_from_prefix(rest) {
        let length = usize::from(attribute.length);
        let Some(value) = rest.get(size_of::<Attribute>()..length) else {
            break;
        };
        if attribute.kind == RTA_OIF {
            interface = u32::read_from_bytes(value).ok();
        }
        // The next attribute is aligned to 4 bytes.
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(Place::There { interface })
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
            assert_eq!(look_up(ip(text)), Ok(Place::Here));
        }
        assert_eq!(place_of(ip("10.9.8.7"), ip("10.9.8.7")), Place::Here);
        assert_eq!(place_of(ip("::1"), ip("::ffff:127.0.0.1")), Place::Here);
    }

    #[test]
    fn an_address_for_documentation_is_elsewhere() {
        for text in ["192.0.2.1", "2001:db8::1"] {
            let place = place_of(ip("127.0.0.1"), ip(text));
            assert!(matches!(place, Place::There { .. }), "{text}");
        }
    }

    #[test]
    fn the_interface_is_found_among_the_attributes() {
        let mut answer = request(ip("10.0.0.1"));
        answer[4..6].copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
        answer.extend([5, 0, 99, 0, 1, 0, 0, 0]);
        answer.extend([8, 0, 4, 0]);
        answer.extend(7_u32.to_ne_bytes());
        let interface = Some(7);
        assert_eq!(parse(&answer), Ok(Place::There { interface }));
        answer[16 + 7] = RTN_LOCAL;
        assert_eq!(parse(&answer), Ok(Place::Here));
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
