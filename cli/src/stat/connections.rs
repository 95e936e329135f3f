//! The connections of the instances, each with the unread bytes at both ends and the threads that sleep on it.
//!
//! The unread bytes are those that one end has sent over links and the other end has not received. So they are known if
//! both ends are on this host, and if the caller may read both: processes of one user, or any for root.

use core::net::{IpAddr, SocketAddr};
use std::collections::HashMap;

use rdmasock_core::stats::{Call, Process, SleeperSnapshot, StreamSnapshot};

/// An end of a connection.
#[derive(Debug)]
pub(super) struct Connection<'a> {
    /// The process of this end.
    pub process: &'a Process,
    /// The counters of this end.
    pub stream: &'a StreamSnapshot,
    /// Bytes on the link that this program has not read; `None` if the stream is on no link, or if they are not known.
    pub unread_here: Option<u64>,
    /// Bytes on the link that the program at the other end has not read; `None` as above.
    pub unread_there: Option<u64>,
    /// Calls that sleep until the stream has data, room or an end.
    pub asleep: Vec<&'a SleeperSnapshot>,
}

/// Streams by instance, local address and peer address.
type Ends<'a> = HashMap<([u8; 16], SocketAddr, SocketAddr), &'a StreamSnapshot>;

/// Returns the connections of `shown`. Their other ends are in `shown` or in `others`.
pub(super) fn all<'a>(shown: &'a [Process], others: &'a [Process]) -> Vec<Connection<'a>> {
    let ends: Ends<'a> = shown
        .iter()
        .chain(others)
        .flat_map(|p| p.instance.streams.iter().map(|s| (p.instance.id, s)))
        .filter_map(|(id, s)| Some(((id, plain(s.local?), plain(s.peer?)), s)))
        .collect();
    let of = |process: &'a Process| {
        let streams = process.instance.streams.iter();
        streams.map(|stream| connection(process, stream, &ends))
    };
    shown.iter().flat_map(of).collect()
}

fn connection<'a>(process: &'a Process, stream: &'a StreamSnapshot, ends: &Ends<'a>) -> Connection<'a> {
    let asleep: Vec<_> = process.instance.asleep_on(stream).collect();
    let other = other_end(process, stream, ends);
    // Both counters are read at different times, so the difference may be negative; then it is 0.
    let unread_there = other
        .map(|o| stream.tx.link_bytes.saturating_sub(o.rx.link_bytes))
        .or_else(|| as_seen_by_sender(&asleep));
    Connection {
        process,
        stream,
        unread_here: other.map(|o| o.tx.link_bytes.saturating_sub(stream.rx.link_bytes)),
        unread_there,
        asleep,
    }
}

fn other_end<'a>(process: &Process, stream: &StreamSnapshot, ends: &Ends<'a>) -> Option<&'a StreamSnapshot> {
    let slot = stream.link?;
    let link = process.instance.links.iter().find(|l| l.slot == slot)?;
    let end = (link.peer, plain(stream.peer?), plain(stream.local?));
    ends.get(&end).copied().filter(|s| s.link.is_some())
}

/// Returns the peer's unread bytes as a sleeping sender saw them: it has sent nothing since. `None` without such a
/// sender.
fn as_seen_by_sender(asleep: &[&SleeperSnapshot]) -> Option<u64> {
    let sender = asleep.iter().find(|s| s.call == Some(Call::Send))?;
    Some(sender.unread)
}

/// Returns the address with an IPv4-mapped IPv6 address as IPv4, so that the addresses of both ends compare equal.
fn plain(addr: SocketAddr) -> SocketAddr {
    let ip: IpAddr = addr.ip().to_canonical();
    SocketAddr::new(ip, addr.port())
}
