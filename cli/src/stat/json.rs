//! The JSON of `rdmasock stat`. Names and shapes are an interface: only ever add.

use std::collections::BTreeMap;

use rdmasock_core::stats::{
    Counts, Direction, Event, LinkSnapshot, LinkState, Path, Process, StreamSnapshot, Totals,
};
use serde::Serialize;

use super::{hex, why_tcp, word};

/// The whole output.
#[derive(Debug, Serialize)]
pub struct Document {
    instances: Vec<Instance>,
}

#[derive(Debug, Serialize)]
struct Instance {
    pid: u32,
    uid: u32,
    program: String,
    id: String,
    uptime_s: f64,
    /// Why all connections are held on TCP, if they are.
    held: Option<String>,
    totals: Sums,
    /// How often each event was counted, by its name.
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
}

impl From<&[Process]> for Document {
    fn from(processes: &[Process]) -> Self {
        Self {
            instances: processes.iter().map(Instance::from).collect(),
        }
    }
}

impl From<&Process> for Instance {
    fn from(process: &Process) -> Self {
        let seen = &process.instance;
        Self {
            pid: process.pid,
            uid: process.uid,
            program: seen.program.clone(),
            id: hex(seen.id),
            uptime_s: seen.uptime.as_secs_f64(),
            held: seen.held.map(super::held),
            totals: Sums::from(&seen.totals),
            events: Event::ALL
                .iter()
                .map(|e| (e.name(), seen.count(*e)))
                .collect(),
            links: seen.links.iter().map(Link::from).collect(),
            streams: seen.streams.iter().map(Stream::from).collect(),
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
        Self {
            peer: hex(link.peer),
            peer_pid: link.peer_pid,
            fabric: word(link.fabric.map(Path::text)),
            state: word(link.state.map(LinkState::text)),
            streams: link.streams,
        }
    }
}

impl From<&StreamSnapshot> for Stream {
    fn from(stream: &StreamSnapshot) -> Self {
        Self {
            fd: stream.fd,
            local: stream.local.map(|addr| addr.to_string()),
            peer: stream.peer.map(|addr| addr.to_string()),
            direction: word(stream.direction.map(Direction::text)),
            tx_path: word(stream.tx_path.map(Path::text)),
            rx_path: word(stream.rx_path.map(Path::text)),
            why_tcp: why_tcp(stream),
            counters: Counters::new(stream.tx, stream.rx),
        }
    }
}
