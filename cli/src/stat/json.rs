//! The JSON of `rdmasock stat`. Other programs depend on its names and structure: a change may add fields, but not
//! rename or remove any.

use rdmasock_core::stats::{Call, Counts, Direction, Event, LinkSnapshot, LinkState, Path, Process, SleeperSnapshot};
use serde_json::{Map, Value, json};

use super::connections::Connection;
use super::off::Off;
use super::words;
use super::words::{hex, why_tcp, word};

/// Returns the whole JSON document.
pub(crate) fn document(processes: &[Process], connections: &[Connection<'_>], off: &[Off]) -> Value {
    let instances: Vec<Value> = processes.iter().map(|p| instance(p, connections)).collect();
    let off = off
        .iter()
        .map(|p| json!({"pid": p.pid, "program": p.program, "value": p.value}));
    json!({"instances": instances, "off": off.collect::<Vec<_>>()})
}

fn instance(process: &Process, connections: &[Connection<'_>]) -> Value {
    let seen = &process.instance;
    let events: Map<String, Value> = Event::ALL
        .iter()
        .map(|e| (e.text().to_owned(), seen.count(*e).into()))
        .collect();
    let own = connections.iter().filter(|c| std::ptr::eq(c.process, process));
    let totals = &seen.totals;
    json!({
        "pid": process.pid,
        "uid": process.uid,
        "program": seen.program,
        "id": hex(seen.id),
        "uptime_s": seen.uptime.as_secs_f64(),
        // The reason why all connections are kept on TCP; null if they are not.
        "held": seen.kept_on_tcp.map(words::kept_on_tcp),
        "totals": with_counters(totals.tx, totals.rx, json!({
            "promoted": totals.promoted,
            "demoted": totals.demoted,
            "streams": totals.streams,
        })),
        // The count of each event, by its name.
        "events": events,
        "links": seen.links.iter().map(link).collect::<Vec<_>>(),
        "streams": own.map(stream).collect::<Vec<_>>(),
    })
}

fn link(link: &LinkSnapshot) -> Value {
    let is_down = link.state == Some(LinkState::Down);
    json!({
        "peer": hex(link.peer),
        "peer_pid": link.peer_pid,
        "fabric": word(link.fabric.map(Path::text)),
        "state": word(link.state.map(LinkState::text)),
        "streams": link.streams,
        // The reason why the link is down; null if it is not.
        "why": link.why.ok().filter(|_| is_down).map(|why| why.to_string()),
    })
}

fn stream(connection: &Connection<'_>) -> Value {
    let stream = connection.stream;
    let rest = json!({
        "fd": stream.fd,
        "local": stream.local.map(|addr| addr.to_string()),
        "peer": stream.peer.map(|addr| addr.to_string()),
        "direction": word(stream.direction.map(Direction::text)),
        "tx_path": word(stream.tx_path.map(Path::text)),
        "rx_path": word(stream.rx_path.map(Path::text)),
        "why_tcp": why_tcp(stream),
        // The numbers of bytes on the link that the programs have not read; null if the stream is on no link, or if
        // they are not known.
        "unread_here": connection.unread_here,
        "unread_there": connection.unread_there,
        // The sleeping threads that wait until the stream has data or room, or has ended.
        "asleep": connection.asleep.iter().map(|s| sleeper(s)).collect::<Vec<_>>(),
    });
    with_counters(stream.tx, stream.rx, rest)
}

fn sleeper(sleeper: &SleeperSnapshot) -> Value {
    json!({
        "call": word(sleeper.call.map(Call::text)),
        // The id of the thread that went to sleep last; null if it is awake again.
        "thread": sleeper.thread,
        "threads": sleeper.count,
        "asleep_s": sleeper.asleep.as_secs_f64(),
    })
}

/// Adds the counters of both directions to the JSON object `object`.
fn with_counters(tx: Counts, rx: Counts, mut object: Value) -> Value {
    for (way, counts) in [("tx", tx), ("rx", rx)] {
        object[format!("{way}_tcp_bytes")] = counts.tcp_bytes.into();
        object[format!("{way}_tcp_calls")] = counts.tcp_calls.into();
        object[format!("{way}_link_bytes")] = counts.link_bytes.into();
        object[format!("{way}_link_calls")] = counts.link_calls.into();
    }
    object
}
