//! Measures the cost of a link for a server of many clients. Each client is a process of its own with one idle stream.
//! Descriptors, memory and address space are read from the server's /proc. The cost is the difference between few and
//! many clients.

use std::io::Write;

use anyhow::{Context, Result, ensure};
use rdmasock_integration::lab::{Lab, Mode, Role};
use rdmasock_integration::ports::free_port;
use rdmasock_integration::proc::{Proc, wait_until};
use rdmasock_integration::table::{Better, Goal, Row, Subject};

use crate::idle::{SETTLE, Usage};
use crate::peer::{Job, command};

const FEW: usize = 10;
const MANY: usize = 1_000;
const MANY_QUICK: usize = 100;
/// Clients that start at the same time.
const AT_ONCE: usize = 10;

/// Returns the rows that [`measure`] fills, in its order. On kernel TCP they show the cost of the stream alone.
pub fn rows() -> Vec<Row> {
    let row = |name, unit, goal| Row::new(name, unit, Better::Lower, &[goal]);
    vec![
        row(
            "peers: memory of a link and its stream, the server",
            "bytes",
            Goal::AtMost(32.0 * 1024.0),
        ),
        row(
            "peers: descriptors of a link and its stream, the server",
            "fds",
            Goal::Over(Subject::Tcp, 0.0),
        ),
        row(
            "peers: address space of a link and its stream, the server",
            "bytes",
            Goal::AtMost(1024.0 * 1024.0),
        ),
    ]
}

/// Adds one sample to each of [`rows`].
pub fn measure(lab: &Lab, rows: &mut [Row], subject: Subject, quick: bool) -> Result<()> {
    let many = if quick { MANY_QUICK } else { MANY };
    let port = free_port()?;
    let address = format!("127.0.0.1:{port}");
    let server = lab.serve(command(lab, Role::Server, Job::Hold, &address, 0.0)?, port)?;
    let mut clients = Vec::new();
    let mut with = |number: usize| {
        while clients.len() < number {
            let more = AT_ONCE.min(number - clients.len());
            let new: Result<Vec<_>> = (0..more).map(|_| client(lab, &address)).collect();
            let mut new = new?;
            for (client, _) in &mut new {
                wait_until("a stream", lab.deadline(), || {
                    client.check_running()?;
                    Ok(client.text().ends_with("held 1\n"))
                })?;
            }
            clients.extend(new);
        }
        std::thread::sleep(SETTLE);
        Usage::of(&[server.pid()])
    };
    let few = with(FEW)?;
    let later = with(many)?;
    if lab.mode() == Mode::Both {
        let promoted = lab.totals(server.pid())?.promoted;
        ensure!(
            promoted == many as u64,
            "{promoted} of {many} promoted: {}",
            lab.not_promoted(&server)
        );
    }
    let links = (many - FEW) as f64;
    let figures = [
        (later.memory - few.memory) / links,
        (later.descriptors - few.descriptors) / links,
        (later.addresses - few.addresses) / links,
    ];
    for (row, figure) in rows.iter_mut().zip(figures) {
        row.add(subject, figure);
    }
    Ok(())
}

/// Starts a client with one stream. The stream stays open until the returned process and pipe are dropped.
fn client(lab: &Lab, address: &str) -> Result<(Proc, std::process::ChildStdin)> {
    let mut client = command(lab, Role::Client, Job::Hold, address, 0.0)?
        .stdin_pipe()
        .spawn()?;
    let mut orders = client.stdin().context("a pipe")?;
    writeln!(orders, "1")?;
    Ok((client, orders))
}
