//! Programs that load a server of [`crate::servers`] and print how much it served. For each of them this file has the
//! arguments, and reads the figure in the output. Each program has the role of the client.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::lab::{Lab, Role};
use crate::servers::{Service, databases, redis_unix};
use crate::table::Subject;

/// Runs redis-benchmark with 50 connections; `options` are appended. Returns the requests per second of `test`.
///
/// # Errors
/// If the program fails or prints no figure. The same holds for all functions below.
pub fn redis_benchmark(
    lab: &Lab,
    server: &Service,
    subject: Subject,
    test: &str,
    requests: u32,
    options: &[&str],
) -> Result<f64> {
    let cmd = lab.cmd(Role::Client, "redis-benchmark")?;
    let cmd = match subject {
        Subject::Unix => cmd.args([PathBuf::from("-s"), redis_unix(lab, server.port)]),
        _ => cmd.args(["-h", "127.0.0.1", "-p", &server.port.to_string()]),
    };
    let cmd = cmd
        .args(["-c", "50", "-n", &requests.to_string()])
        .args(["-t", test, "--csv"])
        .args(options);
    let text = lab.text(cmd)?;
    // "test","rps","avg_latency_ms",… and then one line a test, every field in quotes.
    let line = text.lines().find(|line| line.starts_with(&format!("\"{test}")));
    line.and_then(|line| line.split(',').nth(1)?.trim_matches('"').parse().ok())
        .with_context(|| format!("no figure in what redis-benchmark printed: {text}"))
}

/// Runs wrk with 50 connections that fetch `path`, with an optional header. Returns requests per second.
///
/// # Errors
/// As [`redis_benchmark`].
pub fn wrk(lab: &Lab, server: &Service, path: &str, seconds: u32, header: Option<&str>) -> Result<f64> {
    let mut cmd = lab
        .cmd(Role::Client, "wrk")?
        .args(["-t", "1", "-c", "50", "-d", &format!("{seconds}s")]);
    if let Some(header) = header {
        cmd = cmd.args(["-H", header]);
    }
    let text = lab.text(cmd.args([server.url(path)]))?;
    if text.contains("Non-2xx") || text.contains("Socket errors") {
        bail!("wrk counted errors: {text}");
    }
    after(&text, "Requests/sec:")
        .filter(|rate| *rate > 0.0)
        .with_context(|| format!("no figure in what wrk printed: {text}"))
}

/// Runs iperf3 with one stream. Returns bytes per second.
///
/// # Errors
/// As [`redis_benchmark`].
pub fn iperf3(lab: &Lab, server: &Service, seconds: u32) -> Result<f64> {
    let cmd = lab.cmd(Role::Client, "iperf3")?;
    let port = server.port.to_string();
    let seconds = seconds.to_string();
    let json = lab.run(cmd.args(["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-J"]))?;
    let json: serde_json::Value = serde_json::from_slice(&json)?;
    json.pointer("/end/sum_received/bits_per_second")
        .and_then(serde_json::Value::as_f64)
        .filter(|rate| *rate > 0.0)
        .map(|bits| bits / 8.0)
        .with_context(|| format!("no figure in what iperf3 printed: {json}"))
}

/// Runs pgbench's reads by primary key on [`databases::Postgres`], with `options`. Returns transactions per second as
/// pgbench prints them. If each transaction has its own connection, they include the time to connect.
///
/// # Errors
/// As [`redis_benchmark`].
pub fn pgbench(lab: &Lab, server: &Service, seconds: u32, options: &[&str]) -> Result<f64> {
    let program = databases::postgres_program("pgbench")?;
    let cmd = lab
        .cmd(Role::Client, &program)?
        .args(["-n", "-S", "-h", "127.0.0.1", "-p"])
        .args([server.port.to_string(), "-T".to_owned(), seconds.to_string()])
        .args(["-U", databases::USER])
        .args(options)
        .args([databases::DATABASE]);
    let text = lab.text(cmd)?;
    ensure!(
        text.contains("number of failed transactions: 0 "),
        "pgbench counted failures: {text}"
    );
    after(&text, "tps =").with_context(|| format!("no figure in what pgbench printed: {text}"))
}

/// Runs one of sysbench's tests on [`databases::MariaDb`]. Returns transactions per second.
///
/// # Errors
/// As [`redis_benchmark`].
pub fn sysbench(lab: &Lab, server: &Service, test: &str, threads: u32, seconds: u32) -> Result<f64> {
    let cmd = databases::sysbench(lab, Role::Client, server.port, test)?
        .args([format!("--threads={threads}"), format!("--time={seconds}")])
        .args(["run"]);
    let text = lab.text(cmd)?;
    // `transactions:   1234   (1234.56 per sec.)`.
    text.lines()
        .find_map(|line| line.trim().strip_prefix("transactions:"))
        .and_then(|line| line.split_once('(')?.1.split_whitespace().next()?.parse().ok())
        .filter(|rate| *rate > 0.0)
        .with_context(|| format!("no figure in what sysbench printed: {text}"))
}

/// Fetches a file of `bytes` from [`rsync`](crate::servers::relays::rsync) again and again for `seconds`. Returns bytes
/// per second.
///
/// # Errors
/// As [`redis_benchmark`].
pub fn rsync(lab: &Lab, server: &Service, file: &str, bytes: u64, seconds: u32) -> Result<f64> {
    let begin = Instant::now();
    let mut moved = 0;
    while begin.elapsed().as_secs() < u64::from(seconds) {
        let to = lab.path("rsync-copy");
        let from = format!("rsync://{}/files/{file}", server.address());
        let cmd = lab
            .cmd(Role::Client, "rsync")?
            .args(["--whole-file", "--inplace", "--ignore-times", &from])
            .args([&to]);
        lab.run(cmd)?;
        let copied = std::fs::metadata(&to)?.len();
        ensure!(copied == bytes, "rsync copied {copied} of {bytes} bytes");
        moved += bytes;
    }
    Ok(moved as f64 / begin.elapsed().as_secs_f64())
}

/// Returns the number after `label` in the line that begins with it, or `None`.
fn after(text: &str, label: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.trim().strip_prefix(label))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::after;

    #[test]
    fn a_figure_is_found_by_its_label() {
        let text = "latency average = 0.5 ms\n  tps = 1234.5 (without initial connection time)\n";
        assert_eq!(after(text, "tps ="), Some(1234.5));
        assert_eq!(after(text, "Requests/sec:"), None);
    }
}
