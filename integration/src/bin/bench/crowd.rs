//! The two ends of `scale`, each a process of its own. The server echoes on all connections, in one thread or in a
//! thread for each connection. The client has one or more connections and keeps a number of messages in flight. It
//! takes orders from its standard input.

use std::collections::VecDeque;
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rdmasock_integration::signals;
use serde::{Deserialize, Serialize};

use crate::peer::connect;

/// Bytes of a message.
const MESSAGE: usize = 64;
/// The most bytes that one read of an end takes: as a rule all that are in flight.
const READ: usize = 4096;
/// Messages that the order `warm` sends on each connection.
const WARM_UP: usize = 20;
/// The byte that fills a message. After a message of `BULK` the connection carries bulk, which the server only reads.
const ORDINARY: u8 = 7;
const BULK: u8 = 9;
/// Bytes of a piece of bulk.
const PIECE: usize = 64 << 10;

/// The options of an end.
#[derive(Debug, Args)]
pub struct Crowd {
    #[arg(long)]
    pub server: bool,
    /// The server has a thread for each connection, which blocks in recv.
    #[arg(long)]
    pub threads: bool,
    /// `address:port`, or the path of a Unix socket.
    #[arg(long)]
    pub address: String,
    /// Connections of this client.
    #[arg(long, default_value_t = 1)]
    pub connections: usize,
    /// Bulk streams beside these connections.
    #[arg(long, default_value_t = 0)]
    pub bulk: usize,
    /// Messages in flight, on all connections together.
    #[arg(long, default_value_t = 1)]
    pub in_flight: usize,
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
}

/// A client's answer to `go`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answered {
    pub messages: u64,
    pub seconds: f64,
    /// Messages, including those before and after the measured time.
    pub served: u64,
    /// Pairs of a time in ns and the number of messages that took it, so that the histograms of several clients can be
    /// added.
    pub times: Vec<(u64, u64)>,
    /// Bytes of bulk that were sent in the measured time.
    pub bulk: u64,
}

/// Plays one end: a client until its standard input ends, a server until it is killed.
///
/// # Errors
/// If a socket call fails, or a client gets an unknown order.
pub fn run(options: &Crowd) -> Result<()> {
    signals::raise_nofile()?;
    match options.server {
        true => serve(options),
        false => play(options),
    }
}

fn play(options: &Crowd) -> Result<()> {
    let mut crowd = Clients::new()?;
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "warm" => {
                crowd.open(options)?;
                crowd.warm()?;
                println!("warm");
            }
            "go" => {
                let answered = crowd.talk_beside_bulk(options)?;
                println!("{}", serde_json::to_string(&answered)?);
            }
            other => bail!("no order: {other}"),
        }
    }
    Ok(())
}

/// A connection of a client.
struct Connection {
    stream: TcpStream,
    /// The bytes that have arrived of an incomplete message.
    part: usize,
    /// The times at which the messages in flight were sent, oldest first.
    sent: VecDeque<Instant>,
}

struct Clients {
    epoll: Epoll,
    connections: Vec<Connection>,
    next: usize,
    bulk: Vec<TcpStream>,
}

/// The state that the threads of bulk streams share.
#[derive(Default)]
struct Bulk {
    bytes: AtomicU64,
    is_over: AtomicBool,
}

impl Clients {
    fn new() -> Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            connections: Vec::new(),
            next: 0,
            bulk: Vec::new(),
        })
    }

    /// Opens the connections that are not open yet.
    fn open(&mut self, options: &Crowd) -> Result<()> {
        while self.connections.len() < options.connections {
            let stream = connect(&options.address)?;
            let number = self.connections.len() as u64;
            self.epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, number))?;
            self.connections.push(Connection {
                stream,
                part: 0,
                sent: VecDeque::new(),
            });
        }
        while self.bulk.len() < options.bulk {
            self.bulk.push(connect(&options.address)?);
        }
        Ok(())
    }

    /// Sends `WARM_UP` messages on each connection, which is enough for a promotion.
    fn warm(&mut self) -> Result<()> {
        let streams = self.connections.iter_mut().map(|connection| &mut connection.stream);
        for stream in streams.chain(&mut self.bulk) {
            for _ in 0..WARM_UP {
                let mut message = [ORDINARY; MESSAGE];
                stream.write_all(&message)?;
                stream.read_exact(&mut message)?;
            }
        }
        Ok(())
    }

    /// Does [`Self::talk`] while each bulk stream sends from a thread of its own.
    fn talk_beside_bulk(&mut self, options: &Crowd) -> Result<Answered> {
        let bulk = Bulk::default();
        let streams = std::mem::take(&mut self.bulk);
        let answered = std::thread::scope(|scope| {
            for stream in &streams {
                scope.spawn(|| bulk.send(stream));
            }
            let answered = self.talk(options, &bulk);
            bulk.is_over.store(true, Relaxed);
            answered
        });
        // The streams stay open, because the benchmark inspects them after the measurement.
        self.bulk = streams;
        answered
    }

    /// Keeps messages in flight for `options.seconds`. A tenth of this time goes before and does not count.
    fn talk(&mut self, options: &Crowd, bulk: &Bulk) -> Result<Answered> {
        let mut times = Histogram::<u64>::new(3)?;
        for _ in 0..options.in_flight {
            self.send()?;
        }
        let time = Duration::from_secs_f64(options.seconds);
        let mut served = self.answer_until(Instant::now() + time / 10, None)?;
        let begin = Instant::now();
        let bulk_before = bulk.bytes.load(Relaxed);
        let messages = self.answer_until(begin + time, Some(&mut times))?;
        let seconds = begin.elapsed().as_secs_f64();
        let bulk = bulk.bytes.load(Relaxed) - bulk_before;
        while self.connections.iter().any(|connection| !connection.sent.is_empty()) {
            served += self.receive(None)?;
        }
        served += messages;
        let times = times.iter_recorded();
        Ok(Answered {
            messages,
            seconds,
            served,
            times: times
                .map(|value| (value.value_iterated_to(), value.count_at_value()))
                .collect(),
            bulk,
        })
    }

    /// Sends a message for each one that comes back, until `end`. Returns the number that came back.
    fn answer_until(&mut self, end: Instant, mut times: Option<&mut Histogram<u64>>) -> Result<u64> {
        let mut messages = 0;
        while Instant::now() < end {
            let back = self.receive(times.as_deref_mut())?;
            for _ in 0..back {
                self.send()?;
            }
            messages += back;
        }
        Ok(messages)
    }

    /// Sends a message on the next connection in turn.
    fn send(&mut self) -> Result<()> {
        let count = self.connections.len();
        let connection = self.connections.get_mut(self.next).context("no connection")?;
        self.next = (self.next + 1) % count;
        connection.sent.push_back(Instant::now());
        Ok(connection.stream.write_all(&[ORDINARY; MESSAGE])?)
    }

    /// Waits for messages and returns the number of whole ones that came back.
    fn receive(&mut self, mut times: Option<&mut Histogram<u64>>) -> Result<u64> {
        let mut events = [EpollEvent::empty(); 64];
        let ready = wait(&self.epoll, &mut events)?;
        let mut messages = 0;
        for event in events.iter().take(ready) {
            let connection = self
                .connections
                .get_mut(event.data() as usize)
                .context("no connection")?;
            let mut buffer = [0; READ];
            let got = connection.stream.read(&mut buffer)?;
            ensure!(got > 0, "the server is gone");
            connection.part += got;
            while connection.part >= MESSAGE {
                connection.part -= MESSAGE;
                let sent = connection.sent.pop_front().context("more came than was sent")?;
                if let Some(times) = times.as_deref_mut() {
                    times.record(sent.elapsed().as_nanos() as u64)?;
                }
                messages += 1;
            }
        }
        Ok(messages)
    }
}

impl Bulk {
    /// Sends pieces until `is_over`, or until the server has ended.
    fn send(&self, mut stream: &TcpStream) {
        let piece = vec![BULK; PIECE];
        while !self.is_over.load(Relaxed) && stream.write_all(&piece).is_ok() {
            self.bytes.fetch_add(PIECE as u64, Relaxed);
        }
    }
}

/// Reads bulk to its end in a new thread.
fn drain(mut stream: TcpStream) -> Result<()> {
    stream.set_nonblocking(false)?;
    std::thread::spawn(move || {
        let mut buffer = vec![0; PIECE];
        while stream.read(&mut buffer).is_ok_and(|got| got > 0) {}
    });
    Ok(())
}

fn wait(epoll: &Epoll, events: &mut [EpollEvent]) -> Result<usize> {
    loop {
        match epoll.wait(events, EpollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            result => return Ok(result?),
        }
    }
}

fn serve(options: &Crowd) -> Result<()> {
    if options.address.starts_with('/') {
        let listener = UnixListener::bind(&options.address)?;
        return echo(options, listener.as_fd(), &|| {
            Ok(TcpStream::from(OwnedFd::from(listener.accept()?.0)))
        });
    }
    let listener = TcpListener::bind(&options.address)?;
    echo(options, listener.as_fd(), &|| {
        let stream = listener.accept()?.0;
        stream.set_nodelay(true)?;
        Ok(stream)
    })
}

fn echo(options: &Crowd, listener: BorrowedFd, accept: &dyn Fn() -> Result<TcpStream>) -> Result<()> {
    match options.threads {
        true => echo_in_threads(accept),
        false => echo_in_one_thread(listener, accept),
    }
}

/// Sends back each message, in a blocking thread for each connection.
fn echo_in_threads(accept: &dyn Fn() -> Result<TcpStream>) -> Result<()> {
    loop {
        let mut stream = accept()?;
        std::thread::spawn(move || {
            let mut message = [0; MESSAGE];
            while stream.read_exact(&mut message).is_ok() && stream.write_all(&message).is_ok() {}
        });
    }
}

/// A connection of the server, with the bytes that it could not send back yet.
struct Echo {
    stream: TcpStream,
    left: Vec<u8>,
}

/// The state of a connection after [`Echo::step`].
#[derive(PartialEq)]
enum Next {
    /// The connection stays open for more messages.
    Open,
    /// The client has ended.
    Over,
    /// The connection carries bulk from now on.
    Bulk,
}

impl Echo {
    /// Sends back the bytes that can be read now.
    fn step(&mut self, epoll: &Epoll, number: u64) -> Result<Next> {
        let had_left = !self.left.is_empty();
        if !had_left {
            let mut buffer = [0; READ];
            match self.stream.read(&mut buffer) {
                Ok(1..) if buffer.first() == Some(&BULK) => return Ok(Next::Bulk),
                Ok(got @ 1..) => self.left.extend_from_slice(buffer.get(..got).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Next::Open),
                Ok(0) | Err(_) => return Ok(Next::Over),
            }
        }
        while !self.left.is_empty() {
            match self.stream.write(&self.left) {
                Ok(sent) => drop(self.left.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Ok(Next::Over),
            }
        }
        if had_left == self.left.is_empty() {
            // The events to wait for change only if `left` has become empty or is no longer empty.
            let wanted = match self.left.is_empty() {
                true => EpollFlags::EPOLLIN,
                false => EpollFlags::EPOLLOUT,
            };
            epoll.modify(&self.stream, &mut EpollEvent::new(wanted, number))?;
        }
        Ok(Next::Open)
    }
}

/// Sends back the bytes of all connections, in one thread.
fn echo_in_one_thread(listener: BorrowedFd, accept: &dyn Fn() -> Result<TcpStream>) -> Result<()> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, u64::MAX))?;
    let mut echoes: Vec<Option<Echo>> = Vec::new();
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let ready = wait(&epoll, &mut events)?;
        for event in events.iter().take(ready) {
            if event.data() == u64::MAX {
                let stream = accept()?;
                stream.set_nonblocking(true)?;
                epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, echoes.len() as u64))?;
                echoes.push(Some(Echo {
                    stream,
                    left: Vec::new(),
                }));
            } else if let Some(slot) = echoes.get_mut(event.data() as usize) {
                let next = match slot {
                    Some(echo) => echo.step(&epoll, event.data())?,
                    None => Next::Open,
                };
                match (next, slot.take()) {
                    (Next::Open, echo) => *slot = echo,
                    // The connection of a client that has ended is closed, and its slot stays empty.
                    (Next::Over, _) => {}
                    (Next::Bulk, echo) => {
                        let stream = echo.context("no connection")?.stream;
                        epoll.delete(&stream)?;
                        drain(stream)?;
                    }
                }
            }
        }
    }
}
