//! The two ends of a measurement, each a process of its own, with or without the library preloaded. They wait as
//! applications do: in recv, or in epoll. A client prints its figure.

use std::hint::black_box;
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rdmasock_integration::lab::{Lab, Role};
use rdmasock_integration::median;
use rdmasock_integration::proc::Cmd;

/// The work of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Job {
    EchoBlocking,
    EchoEpoll,
    MessagesLargeReads,
    MessagesSmallReads,
    Bulk,
    /// Opens streams, uses them a little, and then leaves them idle.
    Hold,
    /// Passes a cache line to and fro between two threads: the limit of the hardware.
    Bare,
    PassUdp,
    PassBadFd,
}

/// The options of an end.
#[derive(Debug, Args)]
pub struct Peer {
    #[arg(long)]
    server: bool,
    #[arg(long)]
    job: Job,
    /// `address:port`, or the path of a Unix socket.
    #[arg(long)]
    address: String,
    #[arg(long)]
    seconds: f64,
}

/// Returns the command that starts one end.
///
/// # Errors
/// If this program's path is unknown.
pub fn command(lab: &Lab, role: Role, job: Job, address: &str, seconds: f64) -> Result<Cmd> {
    let bench = std::env::current_exe()?;
    let job = job.to_possible_value().context("a job without a name")?;
    let cmd = lab
        .cmd(role, &bench.display().to_string())?
        .args(["peer", "--job", job.get_name(), "--seconds", &seconds.to_string()])
        .args(["--address", address]);
    Ok(if role == Role::Server {
        cmd.args(["--server"])
    } else {
        cmd
    })
}

/// Plays one end: a client until it is done, a server until it is killed.
///
/// # Errors
/// If a socket call fails.
pub fn run(peer: &Peer) -> Result<()> {
    if peer.server {
        return serve(peer);
    }
    let time = Duration::from_secs_f64(peer.seconds);
    let figure = match peer.job {
        Job::Bare => bare_trip(time),
        Job::PassUdp => {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            call_cost(socket.as_raw_fd(), libc::EAGAIN, time)?
        }
        Job::PassBadFd => call_cost(-1, libc::EBADF, time)?,
        Job::Hold => return hold(&peer.address),
        Job::EchoBlocking => trips(time, &mut Blocking(connect(&peer.address)?))?,
        Job::EchoEpoll => trips(time, &mut Waiting::new(connect(&peer.address)?)?)?,
        Job::MessagesLargeReads | Job::MessagesSmallReads => send_for(connect(&peer.address)?, &[7; 8], time)? / 8.0,
        Job::Bulk => send_for(connect(&peer.address)?, &vec![7; 1 << 20], time)?,
    };
    println!("{figure}");
    Ok(())
}

/// Connects a stream socket of either family. After connect and accept only recv and send are used, which are the same
/// for both families.
///
/// # Errors
/// If connect(2) fails.
pub fn connect(address: &str) -> Result<TcpStream> {
    if address.starts_with('/') {
        return Ok(TcpStream::from(OwnedFd::from(UnixStream::connect(address)?)));
    }
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn serve(peer: &Peer) -> Result<()> {
    if peer.job == Job::Hold {
        return serve_held(TcpListener::bind(&peer.address)?);
    }
    if peer.address.starts_with('/') {
        let listener = UnixListener::bind(&peer.address)?;
        loop {
            answer(TcpStream::from(OwnedFd::from(listener.accept()?.0)), peer)?;
        }
    }
    let listener = TcpListener::bind(&peer.address)?;
    loop {
        let stream = listener.accept()?.0;
        stream.set_nodelay(true)?;
        answer(stream, peer)?;
    }
}

fn answer(stream: TcpStream, peer: &Peer) -> Result<()> {
    let time = Duration::from_secs_f64(peer.seconds);
    match peer.job {
        Job::EchoBlocking => echo(&mut Blocking(stream)),
        Job::EchoEpoll => echo(&mut Waiting::new(stream)?),
        Job::MessagesSmallReads => drain(stream, 8, time),
        Job::MessagesLargeReads => drain(stream, 64 << 10, time),
        _ => drain(stream, 1 << 20, time),
    }
}

/// An end of a ping-pong of 8 bytes.
trait Ball {
    fn send(&mut self, ball: [u8; 8]) -> Result<()>;
    /// Waits for the next ball. Returns `None` at the end of file.
    fn receive(&mut self) -> Result<Option<[u8; 8]>>;
}

struct Blocking(TcpStream);

impl Ball for Blocking {
    fn send(&mut self, ball: [u8; 8]) -> Result<()> {
        Ok(self.0.write_all(&ball)?)
    }

    fn receive(&mut self) -> Result<Option<[u8; 8]>> {
        let mut ball = [0; 8];
        match self.0.read_exact(&mut ball) {
            Ok(()) => Ok(Some(ball)),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

struct Waiting {
    stream: TcpStream,
    epoll: Epoll,
}

impl Waiting {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nonblocking(true)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Self { stream, epoll })
    }
}

impl Ball for Waiting {
    fn send(&mut self, ball: [u8; 8]) -> Result<()> {
        // Only one ball is in flight, so eight bytes always fit.
        Ok(self.stream.write_all(&ball)?)
    }

    fn receive(&mut self) -> Result<Option<[u8; 8]>> {
        let (mut ball, mut got) = ([0; 8], 0);
        while let Some(rest) = ball.get_mut(got..).filter(|rest| !rest.is_empty()) {
            let mut events = [EpollEvent::empty()];
            self.epoll.wait(&mut events, EpollTimeout::NONE)?;
            match self.stream.read(rest) {
                Ok(0) => return Ok(None),
                Ok(count) => got += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(ball))
    }
}

fn echo(ball: &mut impl Ball) -> Result<()> {
    while let Some(bytes) = ball.receive()? {
        ball.send(bytes)?;
    }
    Ok(())
}

/// Returns the time of a round trip in ns, as the median over batches.
fn trips(time: Duration, ball: &mut impl Ball) -> Result<f64> {
    const WARM_UP: u64 = 2000;
    for number in 0..WARM_UP {
        trip(number, ball)?;
    }
    batches(time, 100, || trip(1, ball))
}

fn trip(number: u64, ball: &mut impl Ball) -> Result<()> {
    ball.send(number.to_le_bytes())?;
    match ball.receive()? {
        Some(back) if back == number.to_le_bytes() => Ok(()),
        other => bail!("sent {number}, got {other:?} back"),
    }
}

/// Calls `work` in batches of `size` for `time`. Returns the time of a call in ns, as the median over the batches.
fn batches(time: Duration, size: u32, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let (begin, mut samples) = (Instant::now(), Vec::new());
    while begin.elapsed() < time {
        let start = Instant::now();
        for _ in 0..size {
            work()?;
        }
        samples.push(start.elapsed().as_nanos() as f64 / f64::from(size));
    }
    Ok(median(&samples))
}

/// The time before the bytes of a one-way measurement count, as a fraction of the whole. At the beginning TCP carries
/// the bytes, also if the connection is promoted later.
const WARM_UP: f64 = 0.3;

/// Sends `message` again and again for `time`. Returns the bytes a second that the other end has measured.
fn send_for(mut stream: TcpStream, message: &[u8], time: Duration) -> Result<f64> {
    // Reading the clock costs about as much as sending a small message on the fast path.
    let burst = if message.len() < 1024 { 256 } else { 1 };
    let (begin, mut sent) = (Instant::now(), 0_u64);
    while begin.elapsed() < time {
        for _ in 0..burst {
            stream.write_all(message)?;
        }
        sent += burst * message.len() as u64;
    }
    stream.shutdown(Shutdown::Write)?;
    let (mut got, mut rate) = ([0; 8], [0; 8]);
    stream.read_exact(&mut got)?;
    stream.read_exact(&mut rate)?;
    let got = u64::from_le_bytes(got);
    if got != sent {
        bail!("sent {sent} bytes, the other end got {got}");
    }
    Ok(f64::from_le_bytes(rate))
}

/// Reads to the end of file with calls of `size` bytes. Answers with the bytes that came, and with the bytes a second
/// after the warm-up.
fn drain(mut stream: TcpStream, size: usize, time: Duration) -> Result<()> {
    let (mut buffer, mut total) = (vec![0; size], 0_u64);
    let (begin, mut warm, mut reads) = (Instant::now(), None, 0_u32);
    loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        total += count as u64;
        reads = reads.wrapping_add(1);
        if warm.is_none() && (size >= 1024 || reads.is_multiple_of(256)) && begin.elapsed() >= time.mul_f64(WARM_UP) {
            warm = Some((Instant::now(), total));
        }
    }
    let (from, before) = warm.unwrap_or((begin, 0));
    let rate = (total - before) as f64 / from.elapsed().as_secs_f64();
    stream.write_all(&total.to_le_bytes())?;
    Ok(stream.write_all(&rate.to_le_bytes())?)
}

/// A cache line of its own, also for a prefetcher that fetches pairs of lines.
#[repr(align(128))]
struct Line(AtomicU64);

/// Returns the round trip of a cache line between two threads, in ns.
fn bare_trip(time: Duration) -> f64 {
    const STOP: u64 = u64::MAX;
    let (there, back) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut last = 0;
            while last != STOP {
                // Acquire and Release on both lines: each side sees all that the other wrote before.
                let now = there.0.load(Ordering::Acquire);
                if now == last {
                    std::hint::spin_loop();
                    continue;
                }
                back.0.store(now, Ordering::Release);
                last = now;
            }
        });
        let mut number = 0;
        let result = batches(time, 1000, || {
            number += 1;
            there.0.store(number, Ordering::Release);
            while back.0.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
            Ok(())
        });
        there.0.store(STOP, Ordering::Release);
        result.unwrap_or(0.0)
    })
}

/// Returns the time in ns of a `recv` that the kernel answers with `errno` at once.
fn call_cost(fd: i32, errno: i32, time: Duration) -> Result<f64> {
    let mut buffer = [0_u8; 8];
    batches(time, 5000, || {
        // SAFETY: the buffer outlives the call and has the length given; a bad fd is an error.
        let result = unsafe {
            libc::recv(
                black_box(fd),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                libc::MSG_DONTWAIT,
            )
        };
        let error = std::io::Error::last_os_error().raw_os_error();
        if result != -1 || error != Some(errno) {
            bail!("recv answered {result}, errno {error:?}");
        }
        Ok(())
    })
}

/// Opens streams up to the number on each line of standard input, makes twenty round trips on each new one, and answers
/// `held <number>`. Then it blocks in the next read.
fn hold(address: &str) -> Result<()> {
    rdmasock_integration::signals::raise_nofile()?;
    let mut held = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let number: usize = line?.trim().parse()?;
        while held.len() < number {
            let mut ball = Blocking(connect(address)?);
            for count in 0..20 {
                trip(count, &mut ball)?;
            }
            held.push(ball);
        }
        println!("held {number}");
    }
    Ok(())
}

/// Echoes in one thread on every readable stream, and otherwise sleeps in epoll_wait.
fn serve_held(listener: TcpListener) -> Result<()> {
    rdmasock_integration::signals::raise_nofile()?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut streams: Vec<TcpStream> = Vec::new();
    epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, u64::MAX))?;
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let count = epoll.wait(&mut events, EpollTimeout::NONE)?;
        for event in events.iter().take(count) {
            if event.data() == u64::MAX {
                let stream = listener.accept()?.0;
                epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, streams.len() as u64))?;
                streams.push(stream);
            } else if let Some(stream) = streams.get_mut(event.data() as usize) {
                let mut buffer = [0; 64];
                match stream.read(&mut buffer)? {
                    0 => epoll.delete(&*stream)?,
                    got => stream.write_all(buffer.get(..got).unwrap_or_default())?,
                }
            }
        }
    }
}
