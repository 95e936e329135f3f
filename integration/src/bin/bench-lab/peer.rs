//! The two ends of a measurement. The first byte of its last message is 1.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use nix::sys::socket::{Backlog, accept, bind, listen, setsockopt, sockopt};
use rdmasock_integration::median;
use rdmasock_integration::stat::{Stat, Totals};

use crate::counted;
use crate::report::Sample;
use crate::stream::{Address, HELLO, LAST, Stream};
use crate::subject::{Job, Subject};

/// The server.
#[derive(Debug, Args)]
pub struct Server {
    #[command(flatten)]
    address: Address,
    /// The subject that this process runs on, for the lines that it prints.
    #[arg(long)]
    subject: Subject,
}

/// Takes one sample.
#[derive(Debug, Args)]
pub struct Client {
    #[command(flatten)]
    address: Address,
    #[arg(long)]
    job: Job,
    /// Bytes of a message.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    size: u32,
    #[arg(long)]
    seconds: f64,
    /// The subject that this process runs on; the kind of its fd is checked.
    #[arg(long)]
    subject: Subject,
}

impl Client {
    /// Returns the first message of the client.
    fn hello(&self) -> Vec<u8> {
        let mut hello = (self.job as u32).to_le_bytes().to_vec();
        hello.extend(self.size.to_le_bytes());
        hello.extend(self.seconds.to_le_bytes());
        hello
    }
}

/// The time before bytes count, as a fraction of the measurement's time.
const WARM_UP: f64 = 0.4;
/// How long the library may take to promote the connection; between emulated machines a promotion takes seconds. After
/// that the sample shows what TCP carried.
const PROMOTION: Duration = Duration::from_secs(20);
/// The least bytes that one read of the one-way reader asks for, also if messages are smaller.
const READ: usize = 64 << 10;

/// Serves one client after the other until the process is killed. The failure of a client goes to standard error.
pub fn serve(server: &Server) -> Result<()> {
    let Server { address, subject } = server;
    let listener = Stream::new()?;
    setsockopt(&listener.0, sockopt::ReuseAddr, &true).context("SO_REUSEADDR")?;
    bind(listener.0.as_raw_fd(), &address.socket()).context("bind")?;
    listen(&listener.0, Backlog::new(8)?).context("listen")?;
    loop {
        let fd = accept(listener.0.as_raw_fd()).context("accept")?;
        // SAFETY: accept has just returned this fd, so no other object owns it.
        let stream = Stream(unsafe { OwnedFd::from_raw_fd(fd) });
        if let Err(error) = answer(&stream, *subject) {
            eprintln!("server: {error:#}");
        }
    }
}

fn answer(stream: &Stream, subject: Subject) -> Result<()> {
    stream.set_nodelay()?;
    let mut hello = [0; HELLO];
    stream.receive_all(&mut hello)?;
    let [j0, j1, j2, j3, s0, s1, s2, s3, seconds @ ..] = hello;
    let job = u32::from_le_bytes([j0, j1, j2, j3]);
    let size = u32::from_le_bytes([s0, s1, s2, s3]) as usize;
    let time = Duration::try_from_secs_f64(f64::from_le_bytes(seconds))?;
    ensure!((1..=1 << 26).contains(&size), "a size of {size} bytes");
    echo(stream, HELLO)?;
    if job == Job::Connect as u32 {
        Ok(())
    } else if job == Job::Latency as u32 {
        echo(stream, size)
    } else if job == Job::TripCosts as u32 {
        counted::echo(stream, size, subject)
    } else if job == Job::StreamCosts as u32 {
        counted::drain(stream, size, subject)
    } else {
        drain(stream, size, time)
    }
}

fn echo(stream: &Stream, size: usize) -> Result<()> {
    let mut ball = vec![0; size];
    loop {
        stream.receive_all(&mut ball)?;
        stream.send_all(&ball)?;
        if ball.first() == Some(&LAST) {
            return Ok(());
        }
    }
}

/// Reads up to the last message. Answers with the bytes that came and with the bytes a second after the warm-up.
fn drain(stream: &Stream, size: usize, time: Duration) -> Result<()> {
    let (mut buffer, mut total) = (vec![0; size.max(READ)], 0_usize);
    let (begin, mut warm, mut is_last) = (Instant::now(), None, false);
    while !(is_last && total.is_multiple_of(size)) {
        let count = stream.receive(&mut buffer)?;
        ensure!(count > 0, "the other end has closed after {total} bytes");
        // The next message that begins in these bytes, and all bytes after it.
        let first = (size - total % size) % size;
        let got = buffer.get(first..count).unwrap_or_default();
        is_last |= got.iter().step_by(size).any(|byte| *byte == LAST);
        total += count;
        if warm.is_none() && begin.elapsed() >= time.mul_f64(WARM_UP) {
            warm = Some((Instant::now(), total));
        }
    }
    let (from, before) = warm.unwrap_or((begin, 0));
    let rate = (total - before) as f64 / from.elapsed().as_secs_f64();
    let mut said = (total as u64).to_le_bytes().to_vec();
    said.extend(rate.to_le_bytes());
    stream.send_all(&said)
}

/// Takes one sample.
pub fn sample(client: &Client) -> Result<()> {
    let time = Duration::try_from_secs_f64(client.seconds)?;
    if client.job == Job::Connect {
        return connects(client, time);
    }
    let stream = Stream::connected(&client.address)?;
    match (client.subject, stream.is_socket()?) {
        (Subject::Rsocket, true) => bail!("librspreload has fallen back to TCP"),
        (Subject::Rsocket | Subject::Rstream, false) => {}
        (_, false) => bail!("this is no socket"),
        _ => {}
    }
    stream.send_all(&client.hello())?;
    let before = match client.subject.has_library() {
        true => Some(promoted(&stream)?),
        false => None,
    };
    ping(&stream, LAST)?;
    let size = client.size as usize;
    let totals = || {
        before
            .map(|before| Ok::<_, anyhow::Error>(counters()?.since(before)))
            .transpose()
    };
    let value = match client.job {
        Job::TripCosts => return counted::trips(&stream, client.subject, client.size)?.print(totals()?),
        Job::StreamCosts => return counted::stream(&stream, client.subject, client.size)?.print(totals()?),
        Job::Connect | Job::Latency => trips(&stream, size, time)?,
        Job::Bandwidth | Job::Ways => rate(&stream, size, time)?,
        Job::Messages => rate(&stream, size, time)? / size as f64,
    };
    let totals = totals()?;
    Sample::new(client.subject, client.job, client.size, value, totals).print()
}

/// Measures the time from connect to the first byte of the answer, in µs. The result is the median over connections
/// that are made one after the other. The server has not the library, so every byte has to stay on TCP.
fn connects(client: &Client, time: Duration) -> Result<()> {
    let mut said = client.hello();
    said.extend([LAST; HELLO]);
    let (begin, mut samples) = (Instant::now(), Vec::new());
    loop {
        let start = Instant::now();
        let stream = Stream::connected(&client.address)?;
        stream.send_all(&said)?;
        stream.receive_all(&mut [0; 1])?;
        samples.push(start.elapsed().as_secs_f64() * 1e6);
        stream.receive_all(&mut [0; HELLO - 1])?;
        if begin.elapsed() >= time {
            if client.subject.has_library() {
                ensure!(counters()?.link() == 0, "the server has the library");
            }
            let value = median(&samples);
            return Sample::new(client.subject, client.job, client.size, value, None).print();
        }
    }
}

/// Makes one round trip. After a round trip with [`LAST`] the other end goes on to the measurement.
fn ping(stream: &Stream, mark: u8) -> Result<()> {
    stream.send_all(&[mark; HELLO])?;
    stream.receive_all(&mut [0; HELLO])
}

/// Uses the connection until both directions have moved bytes over a link, or until `PROMOTION` has passed. Returns the
/// counters at that time.
fn promoted(stream: &Stream) -> Result<Totals> {
    // Without this flag, the program that prints the counters would be one more holder of the connection.
    nix::fcntl::fcntl(&stream.0, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    let begin = Instant::now();
    loop {
        for _ in 0..50 {
            ping(stream, 0)?;
        }
        let totals = counters()?;
        if totals.tx_link_bytes > 0 && totals.rx_link_bytes > 0 || begin.elapsed() >= PROMOTION {
            return Ok(totals);
        }
    }
}

/// Returns the counters of the library in this process, while the connection is open.
fn counters() -> Result<Totals> {
    let command = std::env::current_exe()?.with_file_name("rdmasock");
    // SAFETY: getpgrp has no preconditions.
    let group = unsafe { libc::getpgrp() }.cast_unsigned();
    let instances = Stat::new(command).group(group)?;
    let ours = instances.iter().find(|instance| instance.pid == std::process::id());
    Ok(ours.context("the library is not in front of this process")?.totals)
}

/// Measures half a round trip in µs, as the median over batches.
fn trips(stream: &Stream, size: usize, time: Duration) -> Result<f64> {
    const BATCH: u32 = 10;
    let (mut ball, mut back) = (vec![7; size], vec![0; size]);
    let mut trip = |mark| -> Result<()> {
        if let Some(first) = ball.first_mut() {
            *first = mark;
        }
        stream.send_all(&ball)?;
        stream.receive_all(&mut back)?;
        ensure!(ball == back, "other bytes came back");
        Ok(())
    };
    let begin = Instant::now();
    while begin.elapsed() < time.mul_f64(WARM_UP) {
        trip(0)?;
    }
    let (begin, mut samples) = (Instant::now(), Vec::new());
    while begin.elapsed() < time {
        let start = Instant::now();
        for _ in 0..BATCH {
            trip(0)?;
        }
        samples.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(BATCH) / 2.0);
    }
    trip(LAST)?;
    Ok(median(&samples))
}

/// Measures the bytes a second one way, by the other end's clock.
fn rate(stream: &Stream, size: usize, time: Duration) -> Result<f64> {
    let mut message = vec![0; size];
    // Reading the clock costs about as much as sending a small message.
    let burst = if size < 1024 { 64 } else { 1 };
    let (begin, mut sent) = (Instant::now(), 0_u64);
    while begin.elapsed() < time.mul_f64(1.0 + WARM_UP) {
        for _ in 0..burst {
            stream.send_all(&message)?;
        }
        sent += burst * size as u64;
    }
    if let Some(first) = message.first_mut() {
        *first = LAST;
    }
    stream.send_all(&message)?;
    sent += size as u64;
    let (mut got, mut rate) = ([0; 8], [0; 8]);
    stream.receive_all(&mut got)?;
    stream.receive_all(&mut rate)?;
    let got = u64::from_le_bytes(got);
    ensure!(got == sent, "sent {sent} bytes, the other end got {got}");
    Ok(f64::from_le_bytes(rate))
}
