//! The tables of `rdmasock stat`, for people.

use core::net::SocketAddr;
use std::fmt::Write;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use rdmasock_core::stats::{Counts, Direction, Event, LinkState, Path, Process, StreamSnapshot};

use super::connections::Connection;
use super::off::Off;
use super::words::{duration, hex, kept_on_tcp, sleep, why_tcp, word};

/// The output if there is no instance to show.
pub const NONE: &str = "No program that you may look at runs with rdmasock (root sees those of all users).\n";

/// Returns the table with one line for each connection.
pub fn overview(processes: &[Process], connections: &[Connection<'_>]) -> String {
    let mut text = String::new();
    if !connections.is_empty() {
        let mut lines = table(&[
            "pid",
            "program",
            "fd",
            "local",
            "",
            "peer",
            "path",
            "sent",
            "received",
            "unread here",
            "there",
            "asleep",
            "why on tcp",
        ]);
        for connection in connections {
            lines.add_row(line(connection));
        }
        // A line is a connection, so lines have no rules between them.
        lines.load_preset(presets::NOTHING);
        align_right(&mut lines, [0, 2, 7, 8, 9, 10]);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{lines}");
    }
    for process in processes {
        let seen = &process.instance;
        let who = format!("{} (pid {})", seen.program, process.pid);
        if let Some(reason) = seen.kept_on_tcp {
            let _ = writeln!(text, "{who}: all connections on TCP: {}", kept_on_tcp(reason));
        } else if seen.streams.is_empty() {
            let _ = writeln!(text, "{who}: no connection now, {} so far", seen.totals.streams);
        }
    }
    text
}

/// Returns one line for each process that is switched off.
pub fn switched_off(processes: &[Off]) -> String {
    let line = |p: &Off| format!("{} (pid {}): switched off by RDMASOCK={}\n", p.program, p.pid, p.value);
    processes.iter().map(line).collect()
}

fn line(connection: &Connection<'_>) -> [String; 13] {
    let (process, stream) = (connection.process, connection.stream);
    let both = |counts: Counts| bytes(counts.tcp_bytes.saturating_add(counts.link_bytes));
    let [here, there, asleep] = state(connection);
    [
        process.pid.to_string(),
        process.instance.program.clone(),
        stream.fd.to_string(),
        address(stream.local),
        arrow(stream).to_owned(),
        address(stream.peer),
        path(stream),
        both(stream.tx),
        both(stream.rx),
        here,
        there,
        asleep,
        why_tcp(stream).unwrap_or_default(),
    ]
}

/// Returns three cells: unread bytes at this end, at the other end, and sleeping calls. The first two are empty for a
/// stream on no link.
fn state(connection: &Connection<'_>) -> [String; 3] {
    let unread = |n: Option<u64>| match (n, connection.stream.link) {
        (Some(n), _) => bytes(n),
        (None, Some(_)) => "?".to_owned(),
        (None, None) => String::new(),
    };
    let asleep: Vec<String> = connection.asleep.iter().map(|s| sleep(s)).collect();
    [
        unread(connection.unread_here),
        unread(connection.unread_there),
        asleep.join("; "),
    ]
}

/// Returns one section for each process.
pub fn sections(processes: &[Process], connections: &[Connection<'_>]) -> String {
    let sections: Vec<String> = processes.iter().map(|p| section(p, connections)).collect();
    sections.join("\n")
}

/// Returns the counters of the control port; `None` if all are 0.
fn control(process: &Process) -> Option<String> {
    let counts: Vec<String> = Event::ALL
        .iter()
        .filter_map(|event| Some((event.text().strip_prefix("control_")?, *event)))
        .map(|(name, event)| (name, process.instance.count(event)))
        .filter(|(_, n)| *n > 0)
        .map(|(name, n)| format!("{} {n}", name.replace('_', " ")))
        .collect();
    (!counts.is_empty()).then(|| format!("other hosts: {}", counts.join("  ")))
}

fn section(process: &Process, connections: &[Connection<'_>]) -> String {
    let seen = &process.instance;
    let mut text = format!(
        "{}  pid {}  uid {}  up {}  id {}\n",
        seen.program,
        process.pid,
        process.uid,
        duration(seen.uptime.as_secs()),
        hex(seen.id),
    );
    if let Some(reason) = seen.kept_on_tcp {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "all connections on TCP: {}", kept_on_tcp(reason));
    }
    let totals = &seen.totals;
    let counts = [
        ("streams", totals.streams),
        ("promoted", totals.promoted),
        ("demoted", totals.demoted),
        ("asks", seen.count(Event::Ask)),
        ("yes", seen.count(Event::Yes)),
        ("no", seen.count(Event::No)),
        ("time-outs", seen.count(Event::HandshakeTimeout)),
        ("violations", seen.count(Event::LinkViolation)),
    ];
    let counts: Vec<String> = counts.iter().map(|(name, n)| format!("{name} {n}")).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{}", counts.join("  "));
    if let Some(line) = control(process) {
        let _ = writeln!(text, "{line}");
    }

    let mut sums = table(&["total", "sent", "calls", "received", "calls"]);
    let (tx, rx) = (totals.tx, totals.rx);
    sums.add_row([
        "tcp".into(),
        bytes(tx.tcp_bytes),
        tx.tcp_calls.to_string(),
        bytes(rx.tcp_bytes),
        rx.tcp_calls.to_string(),
    ]);
    sums.add_row([
        "link".into(),
        bytes(tx.link_bytes),
        tx.link_calls.to_string(),
        bytes(rx.link_bytes),
        rx.link_calls.to_string(),
    ]);
    align_right(&mut sums, 1..5);
    let _ = writeln!(text, "{sums}");

    if !seen.links.is_empty() {
        let mut links = table(&["link to", "pid", "fabric", "state", "streams"]);
        for link in &seen.links {
            let state = word(link.state.map(LinkState::text));
            let state = match link.why {
                Ok(why) if link.state == Some(LinkState::Down) => format!("{state}: {why}"),
                _ => state.to_owned(),
            };
            let fabric = word(link.fabric.map(Path::text)).to_owned();
            links.add_row([
                hex(link.peer),
                link.peer_pid.to_string(),
                fabric,
                state,
                link.streams.to_string(),
            ]);
        }
        align_right(&mut links, [1, 4]);
        let _ = writeln!(text, "{links}");
    }
    if !seen.streams.is_empty() {
        let mut streams = table(&[
            "fd",
            "local",
            "",
            "peer",
            "path",
            "sent tcp",
            "sent link",
            "received tcp",
            "received link",
            "calls",
            "unread here",
            "there",
            "asleep",
            "why on tcp",
        ]);
        for connection in connections {
            if std::ptr::eq(connection.process, process) {
                streams.add_row(row(connection));
            }
        }
        align_right(&mut streams, [0, 5, 6, 7, 8, 9, 10, 11]);
        let _ = writeln!(text, "{streams}");
    }
    text
}

/// Returns an arrow from the connecting end to the accepting end.
fn arrow(stream: &StreamSnapshot) -> &'static str {
    match stream.direction {
        Some(Direction::Accept) => "<-",
        Some(Direction::Connect) => "->",
        None => "--",
    }
}

fn row(connection: &Connection<'_>) -> [String; 14] {
    let stream = connection.stream;
    let [here, there, asleep] = state(connection);
    let calls = |counts: Counts| counts.tcp_calls.saturating_add(counts.link_calls);
    [
        stream.fd.to_string(),
        address(stream.local),
        arrow(stream).to_owned(),
        address(stream.peer),
        path(stream),
        bytes(stream.tx.tcp_bytes),
        bytes(stream.tx.link_bytes),
        bytes(stream.rx.tcp_bytes),
        bytes(stream.rx.link_bytes),
        calls(stream.tx).saturating_add(calls(stream.rx)).to_string(),
        here,
        there,
        asleep,
        why_tcp(stream).unwrap_or_default(),
    ]
}

/// Returns the path of both directions, in one word if they agree.
fn path(stream: &StreamSnapshot) -> String {
    let tx = word(stream.tx_path.map(Path::text));
    let rx = word(stream.rx_path.map(Path::text));
    if tx == rx {
        tx.to_owned()
    } else {
        format!("{tx} out, {rx} in")
    }
}

fn address(addr: Option<SocketAddr>) -> String {
    addr.map_or_else(|| "?".to_owned(), |addr| addr.to_string())
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_HORIZONTAL_ONLY)
        // On a terminal its width bounds the table; elsewhere the table is as wide as its content.
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(header);
    table
}

fn align_right(table: &mut Table, columns: impl IntoIterator<Item = usize>) {
    for index in columns {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Returns a count of bytes with three or four digits and a unit.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut size = count as f64;
    let mut unit = "B";
    for larger in UNITS {
        if size < 1024.0 {
            break;
        }
        size /= 1024.0;
        unit = larger;
    }
    if unit == "B" {
        format!("{count} B")
    } else {
        format!("{size:.1} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_units() {
        for (count, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (u64::MAX, "16.0 EiB")] {
            assert_eq!(bytes(count), text);
        }
    }
}
