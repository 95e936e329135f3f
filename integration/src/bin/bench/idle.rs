//! Measures the cost of idle streams: memory, descriptors, wake-ups and CPU time, read from /proc of both ends. Memory
//! and descriptors of a stream are the difference between 100 and 1,100 streams.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rdmasock_integration::lab::{Lab, Mode, Role};
use rdmasock_integration::ports::free_port;
use rdmasock_integration::proc::wait_until;
use rdmasock_integration::table::{Better, Goal, Row, Subject};

use crate::peer::{Job, command};

const FEW: u32 = 100;
const MANY: u32 = 1_100;
/// The time that the library may need to notice that a stream is idle.
pub const SETTLE: Duration = Duration::from_secs(2);
const WATCH: Duration = Duration::from_secs(5);

/// Returns the rows that [`measure`] fills, in its order. "A side" is the mean of the two ends.
pub fn rows() -> Vec<Row> {
    let row = |name, unit, goals: &[Goal]| Row::new(name, unit, Better::Lower, goals);
    vec![
        row("idle: memory of a stream, a side", "bytes", &[Goal::AtMost(8192.0)]),
        row("idle: descriptors of a stream, a side", "fds", &[Goal::AtMost(1.0)]),
        row("idle: wake-ups with 1,100 streams, both", "1/s", &[Goal::AtMost(0.0)]),
        row("idle: CPU with 1,100 streams, both", "ms/s", &[Goal::AtMost(0.0)]),
    ]
}

/// Adds one sample to each of [`rows`].
pub fn measure(lab: &Lab, rows: &mut [Row], subject: Subject) -> Result<()> {
    let port = free_port()?;
    let address = format!("127.0.0.1:{port}");
    let server = lab.serve(command(lab, Role::Server, Job::Hold, &address, 0.0)?, port)?;
    let mut client = command(lab, Role::Client, Job::Hold, &address, 0.0)?
        .stdin_pipe()
        .spawn()?;
    let mut orders = client.stdin().context("a pipe")?;
    let pids = [server.pid(), client.pid()];

    let mut held = |number: u32| {
        writeln!(orders, "{number}")?;
        wait_until("the streams", lab.deadline(), || {
            client.check_running()?;
            Ok(client.text().ends_with(&format!("held {number}\n")))
        })?;
        std::thread::sleep(SETTLE);
        Usage::of(&pids)
    };
    let few = held(FEW)?;
    let many = held(MANY)?;
    std::thread::sleep(WATCH);
    let later = Usage::of(&pids)?;
    if lab.mode() == Mode::Both {
        let promoted = lab.totals(server.pid())?.promoted;
        ensure!(
            promoted == u64::from(MANY),
            "{promoted} of {MANY} promoted: {}",
            lab.not_promoted(&server)
        );
    }

    let sides = f64::from(MANY - FEW) * 2.0;
    let figures = [
        (many.memory - few.memory) / sides,
        (many.descriptors - few.descriptors) / sides,
        (later.wake_ups - many.wake_ups) / WATCH.as_secs_f64(),
        (later.cpu_ms - many.cpu_ms) / WATCH.as_secs_f64(),
    ];
    for (row, figure) in rows.iter_mut().zip(figures) {
        row.add(subject, figure);
    }
    Ok(())
}

/// The resources that several processes use, added up.
#[derive(Debug, Default)]
pub struct Usage {
    /// Proportional set size in bytes: a page that two processes map counts half in each.
    pub memory: f64,
    pub descriptors: f64,
    /// Address space in bytes.
    pub addresses: f64,
    /// Context switches of all threads; a thread that sleeps has none.
    wake_ups: f64,
    /// The voluntary ones of these context switches: a thread went to sleep.
    pub sleeps: f64,
    cpu_ms: f64,
}

impl Usage {
    pub fn of(pids: &[u32]) -> Result<Self> {
        let mut sum = Self::default();
        for pid in pids {
            let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            sum.memory += field(&rollup, "Pss:") * 1024.0;
            let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
            sum.addresses += field(&status, "VmSize:") * 1024.0;
            sum.descriptors += std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64;
            for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
                let status = std::fs::read_to_string(task?.path().join("status"))?;
                let sleeps = field(&status, "voluntary_ctxt_switches:");
                sum.sleeps += sleeps;
                sum.wake_ups += sleeps + field(&status, "nonvoluntary_ctxt_switches:");
            }
            sum.cpu_ms += cpu_ms(*pid)?;
        }
        Ok(sum)
    }
}

/// Returns the number after `name` at the start of a line, or 0 if there is none.
pub fn field(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0.0)
}

/// Returns the CPU time of a process in ms: utime and stime, fields 14 and 15 of proc_pid_stat(5). Their unit is 10 ms
/// on Linux.
fn cpu_ms(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    Ok(ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() * 10.0)
}
