//! The JSON of `rdmasock stat`. Its names and shapes are an interface: a change may add fields, and not rename or
//! remove any.

use std::collections::BTreeMap;

use rdmasock_core::stats::{
    Call, Counts, Direction, Event, LinkSnapshot, LinkState, Path, Process, SleeperSnapshot, StreamSnapshot, Totals,
};
use serde::Serialize;

use super::connections::Connection;
use super::off::Off;
use super::words;
use super::words::{hex, why_tcp, word};

/// The whole output.
#[derive(Debug, Serialize)]
pub struct Document<'a> {
    instances: Vec<Instance>,
    off: &'a [Off],
}

#[derive(Debug, Serialize)]
struct Instance {
    pid: u32,
    uid: u32,
    program: String,
    id: String,
    uptime_s: f64,
    /// The reason why all connections are kept on TCP; null if they are not.
    held: Option<String>,
    totals: Sums,
    /// The count of each event, by its name.
    events: BTreeMap<&'static str, u64>,
    links: Vec<Link>,
    streams: Vec<Stream>,
}

#[derive(Debug, Serialize)]
struct Counters {
    tx_tcp_bytes: u64,
    tx_tcp_calls: u64,
    tx_link_bytes: u64,
    tx_link_calls: u64,
    rx_tcp_bytes: u64,
    rx_tcp_calls: u64,
    rx_link_bytes: u64,
    rx_link_calls: u64,
}

#[derive(Debug, Serialize)]
struct Sums {
    #[serde(flatten)]
    counters: Counters,
    promoted: u64,
    demoted: u64,
    streams: u64,
}

#[derive(Debug, Serialize)]
struct Link {
    peer: String,
    peer_pid: u32,
    fabric: &'static str,
    state: &'static str,
    streams: u32,
    /// The reason why the link is down; null if it is not.
    why: Option<String>,
}

#[derive(Debug, Serialize)]
struct Stream {
    fd: i32,
    local: Option<String>,
    peer: Option<String>,
    direction: &'static str,
    tx_path: &'static str,
    rx_path: &'static str,
    why_tcp: Option<String>,
    #[serde(flatten)]
    counters: Counters,
    /// Bytes on the link that were not read; null if the stream is on no link, or if they are not known.
    unread_here: Option<u64>,
    unread_there: Option<u64>,
    asleep: Vec<Sleeper>,
}

/// Threads that sleep in a call until the stream has data, room or an end.
#[derive(Debug, Serialize)]
struct Sleeper {
    call: &'static str,
    /// The thread that began to sleep last, if it still sleeps.
    thread: Option<u32>,
    threads: u16,
    asleep_s: f64,
}

impl<'a> Document<'a> {
    pub fn new(processes: &[Process], connections: &[Connection<'_>], off: &'a [Off]) -> Self {
        let instance = |p| Instance::new(p, connections);
        Self {
            instances: processes.iter().map(instance).collect(),
            off,
        }
    }
}

impl Instance {
    fn new(process: &Process, connections: &[Connection<'_>]) -> Self {
        let streams = connections.iter().filter(|c| std::ptr::eq(c.process, process));
        let seen = &process.instance;
        Self {
            pid: process.pid,
            uid: process.uid,
            program: seen.program.clone(),
            id: hex(seen.id),
            uptime_s: seen.uptime.as_secs_f64(),
            held: seen.kept_on_tcp.map(words::kept_on_tcp),
            totals: Sums::from(&seen.totals),
            events: Event::ALL.iter().map(|e| (e.text(), seen.count(*e))).collect(),
            links: seen.links.iter().map(Link::from).collect(),
            streams: streams.map(Stream::from).collect(),
        }
    }
}

impl Counters {
    fn new(tx: Counts, rx: Counts) -> Self {
        Self {
            tx_tcp_bytes: tx.tcp_bytes,
            tx_tcp_calls: tx.tcp_calls,
            tx_link_bytes: tx.link_bytes,
            tx_link_calls: tx.link_calls,
            rx_tcp_bytes: rx.tcp_bytes,
            rx_tcp_calls: rx.tcp_calls,
            rx_link_bytes: rx.link_bytes,
            rx_link_calls: rx.link_calls,
        }
    }
}

impl From<&Totals> for Sums {
    fn from(totals: &Totals) -> Self {
        Self {
            counters: Counters::new(totals.tx, totals.rx),
            promoted: totals.promoted,
            demoted: totals.demoted,
            streams: totals.streams,
        }
    }
}

impl From<&LinkSnapshot> for Link {
    fn from(link: &LinkSnapshot) -> Self {
        let is_down = link.state == Some(LinkState::Down);
        Self {
            peer: hex(link.peer),
            peer_pid: link.peer_pid,
            fabric: word(link.fabric.map(Path::text)),
            state: word(link.state.map(LinkState::text)),
            streams: link.streams,
            why: link.why.ok().filter(|_| is_down).map(|why| why.to_string()),
        }
    }
}

impl From<&&SleeperSnapshot> for Sleeper {
    fn from(sleeper: &&SleeperSnapshot) -> Self {
        Self {
            call: word(sleeper.call.map(Call::text)),
            thread: sleeper.thread,
            threads: sleeper.count,
            asleep_s: sleeper.asleep.as_secs_f64(),
        }
    }
}

impl From<&Connection<'_>> for Stream {
    fn from(connection: &Connection<'_>) -> Self {
        let stream: &StreamSnapshot = connection.stream;
        Self {
            fd: stream.fd,
            local: stream.local.map(|addr| addr.to_string()),
            peer: stream.peer.map(|addr| addr.to_string()),
            direction: word(stream.direction.map(Direction::text)),
            tx_path: word(stream.tx_path.map(Path::text)),
            rx_path: word(stream.rx_path.map(Path::text)),
            why_tcp: why_tcp(stream),
            counters: Counters::new(stream.tx, stream.rx),
            unread_here: connection.unread_here,
            unread_there: connection.unread_there,
            asleep: connection.asleep.iter().map(Sleeper::from).collect(),
        }
    }
}
