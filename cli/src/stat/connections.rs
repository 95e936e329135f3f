//! The connections of the instances, each with the unread bytes at both ends and the threads that sleep on it.
//!
//! Unread bytes are bytes that one end has sent over a link and the program at the other end has not received. They are
//! computed from the counters of both ends. So both ends have to be on this host, and the caller has to be allowed to
//! read both: root may read all processes, other users their own.

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
    /// The number of bytes on the link that this program has not read; `None` if the stream is on no link, or if the
    /// number is not known.
    pub unread_here: Option<u64>,
    /// The number of bytes on the link that the program at the other end has not read; `None` as for `unread_here`.
    pub unread_there: Option<u64>,
    /// The sleeping threads that wait until the stream has data or room, or has ended.
    pub asleep: Vec<&'a SleeperSnapshot>,
}

/// Streams by their instance, local address and peer address.
type Ends<'a> = HashMap<([u8; 16], SocketAddr, SocketAddr), &'a StreamSnapshot>;

/// Returns the connections of the processes `shown`. The other ends of these connections are looked up in `shown` and
/// in `others`.
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
    // The two counters are read at different times, so the difference could be negative. Then 0 is used.
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

/// Returns the number of bytes that the peer had not read when a sender of this end went to sleep. The sender has sent
/// nothing since, so this is an upper bound. `None` if no sender sleeps.
fn as_seen_by_sender(asleep: &[&SleeperSnapshot]) -> Option<u64> {
    let sender = asleep.iter().find(|s| s.call == Some(Call::Send))?;
    Some(sender.unread)
}

/// Returns the address, with an IPv4-mapped IPv6 address converted to IPv4. So the addresses of both ends compare
/// equal.
fn plain(addr: SocketAddr) -> SocketAddr {
    let ip: IpAddr = addr.ip().to_canonical();
    SocketAddr::new(ip, addr.port())
}
