//! The two ends of `sweep`, each a process of its own, with one connection. The client sends transfers of one size that
//! the server receives whole, or both send one transfer to and fro. The client takes orders from its standard input,
//! one a line.

use std::io::{BufRead, ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::socket::{MsgFlags, recv};
use nix::sys::time::TimeValLike;
use serde::{Deserialize, Serialize};

use crate::peer::connect;
use crate::results::Series;

/// The options of an end.
#[derive(Debug, Args)]
pub struct Transfer {
    #[arg(long)]
    pub server: bool,
    /// `address:port`, or the path of a Unix socket.
    #[arg(long)]
    pub address: String,
    /// How both ends wait.
    #[arg(long)]
    pub receiver: Series,
    /// Bytes of a transfer.
    #[arg(long)]
    pub size: usize,
    /// Transfers of the measurement.
    #[arg(long)]
    pub count: u64,
    /// Round trips of the measurement.
    #[arg(long)]
    pub trips: u64,
}

/// A client's answer to `transfer`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Moved {
    pub bytes: u64,
    pub seconds: f64,
    /// Processor seconds of the sender and of the receiver.
    pub sender: f64,
    pub receiver: f64,
}

/// A client's answer to `trips`, in ns.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trips {
    pub p50: u64,
    pub p99: u64,
    pub p999: u64,
}

/// An order of the client to the server, which sends it back: a round trip alone, or the announcement of transfers or
/// trips.
type Word = [u8; 8];
const NOTHING: Word = *b"nothing.";
const TRANSFER: Word = *b"transfer";
const TRIPS: Word = *b"trips...";

/// Round trips that the order `warm` makes.
const WARM_UP: u32 = 50;

impl Transfer {
    /// Returns the number of transfers before those that count. They touch the memory and grow the buffers to the size
    /// needed.
    fn first(&self) -> u64 {
        (self.count / 8).max(1)
    }

    /// Returns the number of round trips before those that count.
    fn first_trips(&self) -> u64 {
        (self.trips / 8).max(10)
    }
}

/// Plays one end until the other end is gone, or until its standard input ends.
///
/// # Errors
/// If a socket call fails, or an end receives other bytes than were sent.
pub fn run(options: &Transfer) -> Result<()> {
    match options.server {
        true => serve(options),
        false => play(options),
    }
}

fn play(options: &Transfer) -> Result<()> {
    let mut end = End::new(connect(&options.address)?, options.receiver)?;
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "warm" => {
                for _ in 0..WARM_UP {
                    end.say(NOTHING)?;
                }
                println!("warm");
            }
            "transfer" => {
                end.say(TRANSFER)?;
                send(&mut end, options.size, options.first())?;
                let moved = send(&mut end, options.size, options.count)?;
                println!("{}", serde_json::to_string(&moved)?);
            }
            "trips" => {
                end.say(TRIPS)?;
                there_and_back(&mut end, options.size, options.first_trips())?;
                let trips = there_and_back(&mut end, options.size, options.trips)?;
                println!("{}", serde_json::to_string(&trips)?);
            }
            other => bail!("no order: {other}"),
        }
    }
    Ok(())
}

fn serve(options: &Transfer) -> Result<()> {
    let stream = match options.address.starts_with('/') {
        true => TcpStream::from(OwnedFd::from(UnixListener::bind(&options.address)?.accept()?.0)),
        false => {
            let stream = TcpListener::bind(&options.address)?.accept()?.0;
            stream.set_nodelay(true)?;
            stream
        }
    };
    let mut end = End::new(stream, options.receiver)?;
    let mut word = NOTHING;
    while end.receive(&mut word)? {
        end.send(&word)?;
        match word {
            TRANSFER => {
                take(&mut end, options.size, options.first())?;
                take(&mut end, options.size, options.count)?;
            }
            TRIPS => give_back(&mut end, options.size, options.first_trips() + options.trips)?,
            _ => {}
        }
    }
    Ok(())
}

/// Sends `count` transfers. The clock stops when the receiver has confirmed them all.
fn send(end: &mut End, size: usize, count: u64) -> Result<Moved> {
    let mut buffer = vec![7; size];
    let (begin, before) = (Instant::now(), processor()?);
    for number in 0..count {
        mark(&mut buffer, number);
        end.send(&buffer)?;
    }
    let mut answer = [0; 8];
    ensure!(end.receive(&mut answer)?, "the receiver is gone");
    Ok(Moved {
        bytes: count * size as u64,
        seconds: begin.elapsed().as_secs_f64(),
        sender: processor()? - before,
        receiver: f64::from_le_bytes(answer),
    })
}

/// Receives `count` transfers, and answers with the processor seconds that this took.
fn take(end: &mut End, size: usize, count: u64) -> Result<()> {
    let mut buffer = vec![0; size];
    let before = processor()?;
    for number in 0..count {
        ensure!(end.receive(&mut buffer)?, "the sender is gone");
        check(&buffer, number)?;
    }
    let used = processor()? - before;
    end.send(&used.to_le_bytes())
}

fn there_and_back(end: &mut End, size: usize, count: u64) -> Result<Trips> {
    let mut times = Histogram::<u64>::new(3)?;
    let (mut there, mut back) = (vec![7; size], vec![0; size]);
    for number in 0..count {
        mark(&mut there, number);
        let begin = Instant::now();
        end.send(&there)?;
        ensure!(end.receive(&mut back)?, "the other end is gone");
        times.record(begin.elapsed().as_nanos() as u64)?;
        check(&back, number)?;
    }
    Ok(Trips {
        p50: times.value_at_quantile(0.5),
        p99: times.value_at_quantile(0.99),
        p999: times.value_at_quantile(0.999),
    })
}

fn give_back(end: &mut End, size: usize, count: u64) -> Result<()> {
    let mut buffer = vec![0; size];
    for _ in 0..count {
        ensure!(end.receive(&mut buffer)?, "the other end is gone");
        end.send(&buffer)?;
    }
    Ok(())
}

/// Writes the number of a transfer into its first bytes.
fn mark(buffer: &mut [u8], number: u64) {
    if let Some(first) = buffer.first_chunk_mut() {
        *first = number.to_le_bytes();
    }
}

fn check(buffer: &[u8], number: u64) -> Result<()> {
    let first = buffer.first_chunk().context("a transfer without a number")?;
    let got = u64::from_le_bytes(*first);
    ensure!(got == number, "transfer {got} came in place of {number}");
    Ok(())
}

/// Returns the processor seconds that all threads of this process have used.
fn processor() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = usage.user_time() + usage.system_time();
    Ok(time.num_microseconds() as f64 / 1e6)
}

/// A connection, with the way in which this end waits.
struct End {
    stream: TcpStream,
    flags: MsgFlags,
    epoll: Option<Epoll>,
}

impl End {
    fn new(stream: TcpStream, receiver: Series) -> Result<Self> {
        let (mut flags, mut epoll) = (MsgFlags::empty(), None);
        match receiver {
            Series::Recv => {}
            Series::Waitall | Series::Threshold => flags = MsgFlags::MSG_WAITALL,
            Series::Epoll => {
                flags = MsgFlags::MSG_DONTWAIT;
                let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
                set.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
                epoll = Some(set);
            }
            _ => bail!("no receiver"),
        }
        Ok(Self { stream, flags, epoll })
    }

    fn send(&mut self, buffer: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(buffer)?)
    }

    /// Fills the buffer. Returns false at the end of file.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<bool> {
        let mut got = 0;
        while let Some(rest) = buffer.get_mut(got..).filter(|rest| !rest.is_empty()) {
            if let Some(epoll) = &self.epoll {
                match epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::NONE) {
                    Ok(_) | Err(Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            match recv(self.stream.as_raw_fd(), rest, self.flags) {
                Ok(0) if got == 0 => return Ok(false),
                Ok(0) => return Err(std::io::Error::from(ErrorKind::UnexpectedEof).into()),
                Ok(count) => got += count,
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Sends a word and waits until the server returns it.
    fn say(&mut self, word: Word) -> Result<()> {
        self.send(&word)?;
        let mut back = NOTHING;
        ensure!(self.receive(&mut back)? && back == word, "the server is gone");
        Ok(())
    }
}
