//! The text output of `rdmasock stat`, as tables.

use core::net::SocketAddr;
use std::fmt::Write;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use rdmasock_core::stats::{Counts, Direction, Path, Process, StreamSnapshot};

use super::connections::Connection;
use super::off::Off;
use super::words::{kept_on_tcp, sleep, why_tcp, word};

/// The output if there is no process to show.
pub(super) const NONE: &str = "No program that you may look at runs with rdmasock (root sees those of all users).\n";

const HEADER: [&str; 13] = [
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
];

/// Returns the table with one line for each connection. A line of text follows for each process that has no connection,
/// or whose connections are all kept on TCP.
pub(super) fn overview(processes: &[Process], connections: &[Connection<'_>]) -> String {
    let mut text = String::new();
    if !connections.is_empty() {
        let mut lines = Table::new();
        lines
            // No borders: each connection is one line of text.
            .load_preset(presets::NOTHING)
            // On a terminal the table is at most as wide as the terminal. Elsewhere it is as wide as its content.
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_header(HEADER)
            .add_rows(connections.iter().map(line));
        for index in [0, 2, 7, 8, 9, 10] {
            if let Some(column) = lines.column_mut(index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        // A write to a String cannot fail.
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

/// Returns one line of text for each process whose library is switched off.
pub(crate) fn switched_off(processes: &[Off]) -> String {
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

/// Returns three cells of the table: the unread bytes at this end, the unread bytes at the other end, and the sleeping
/// calls. The first two are empty for a stream on no link.
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

/// Returns an arrow that points from the connecting end to the accepting end. The local address is at its left.
fn arrow(stream: &StreamSnapshot) -> &'static str {
    match stream.direction {
        Some(Direction::Accept) => "<-",
        Some(Direction::Connect) => "->",
        None => "--",
    }
}

/// Returns the paths of both directions, as one word if they are the same.
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

/// Returns a number of bytes as text with a unit, with up to four digits before the decimal point.
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
