//! The connections of the instances, each with what its own statistics do not say: what is unread at either end, and
//! who sleeps on it.
//!
//! What one end has sent over links and the other has not received there is unread. So it takes the statistics of both,
//! which are those of one host, and of one user unless it is root who asks.

use core::net::{IpAddr, SocketAddr};
use std::collections::HashMap;

use rdmasock_core::stats::{Call, Process, SleeperSnapshot, StreamSnapshot};

/// One end of a connection.
#[derive(Debug)]
pub struct Connection<'a> {
    /// Whose it is.
    pub process: &'a Process,
    /// What its statistics say.
    pub stream: &'a StreamSnapshot,
    /// Bytes on the link that this program has not read; `None` where it is on none, or that is not known.
    pub unread_here: Option<u64>,
    /// Likewise, that the program at the other end has not read.
    pub unread_there: Option<u64>,
    /// Who sleeps until something happens on it.
    pub asleep: Vec<&'a SleeperSnapshot>,
}

/// By instance, its own address and the other's.
type Ends<'a> = HashMap<([u8; 16], SocketAddr, SocketAddr), &'a StreamSnapshot>;

/// The connections of `shown`. The other ends are looked for in `shown` and in `others`.
pub fn all<'a>(shown: &'a [Process], others: &'a [Process]) -> Vec<Connection<'a>> {
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
    // Read one after the other: what came in between is not less than nothing.
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

/// Who sleeps for want of room has sent nothing since.
fn as_seen_by_sender(asleep: &[&SleeperSnapshot]) -> Option<u64> {
    let sender = asleep.iter().find(|s| s.call == Some(Call::Send))?;
    Some(sender.unread)
}

/// An IPv4 address that one of the two sees as one of IPv6 is the same.
fn plain(addr: SocketAddr) -> SocketAddr {
    let ip: IpAddr = addr.ip().to_canonical();
    SocketAddr::new(ip, addr.port())
}
