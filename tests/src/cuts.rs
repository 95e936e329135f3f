//! Both ends of a connection of `tests/cuts.rs`: each end sends a sequence that follows from the connection's seed, and
//! compares every byte that it receives with the other end's sequence. Not here: the processes (`bin/cuts-peer.rs`).

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use std::{fmt, io};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::data;
use crate::data::Rng;

/// The index of the client's end.
pub const CLIENT: usize = 0;
/// The index of the server's end.
pub const SERVER: usize = 1;

/// As a rule, a direction carries at most twice two to the power of this in bytes.
const LONGEST: u64 = 19;
/// Small sends at the beginning of a direction that warms up, and the pause before each.
const WARMING: u64 = 30;
const WARMING_PAUSE: Duration = Duration::from_millis(2);
/// The most bytes that one call sends, or has room for.
const MOST: u64 = 256 * 1024;

/// How one end of a connection plays.
#[derive(Clone, Debug)]
pub struct Part {
    /// Bytes that the end sends.
    pub len: u64,
    way: Way,
    pace: Pace,
    /// The end begins with small pieces, so that the rest uses a link.
    warms_up: bool,
    /// The end sends the second half when it has read the other end's EOF.
    answers: bool,
    /// The end shuts its direction down behind the last byte; else its close ends the direction.
    shuts: bool,
    /// The end reads until EOF; else it closes when it has read all bytes.
    reads_end: bool,
}

/// The calls by which an end waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Two threads, each in a call that blocks.
    Blocking,
    /// A single thread, in poll.
    Poll,
    /// A single thread, in epoll_wait.
    Epoll,
    /// A single thread, in epoll_wait, edge-triggered.
    Edges,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pace {
    /// As fast as the end can.
    Fast,
    /// The end often waits before it sends.
    SlowSender,
    /// The end often waits before it receives, so that rings are full.
    SlowReader,
    /// Small pieces with pauses. They last this many times as long as a stream needs to return to a link.
    Long(u64),
}

/// Pieces for one return, with [`PAUSE`] before each, for [`Pace::Long`]. A stream returns a second after its failure.
const PIECES: u64 = 75;
const PAUSE: Duration = Duration::from_millis(20);

/// Returns the parts of both ends, by the connection's seed; a `long` connection lasts some seconds.
pub fn plan(seed: u64, long: u8) -> [Part; 2] {
    let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
    for _ in 0..8 {
        rng.below(2);
    }
    let mut part = || {
        let warms_up = rng.below(4) > 0;
        let least = if warms_up { LONGEST - 5 } else { 0 };
        // Few directions are long, because bytes take time to compare.
        let most = LONGEST + 2 * u64::from(rng.below(16) == 0);
        let bits = least + rng.below(most - least + 1);
        let pace = match rng.below(8) {
            _ if long > 0 => Pace::Long(u64::from(long)),
            0 | 1 => Pace::SlowSender,
            2 | 3 => Pace::SlowReader,
            _ => Pace::Fast,
        };
        let shift = if long > 0 { 3 } else { 0 };
        Part {
            len: rng.below(2 << bits) >> shift,
            way: [Way::Blocking, Way::Blocking, Way::Poll, Way::Epoll, Way::Edges][rng.below(5) as usize],
            pace,
            warms_up,
            answers: false,
            shuts: true,
            reads_end: true,
        }
    };
    let mut parts = [part(), part()];
    let first = rng.below(2) as usize;
    match rng.below(4) {
        // Each end shuts down independently.
        0 => {}
        // The first end shuts down; the other sends on after that, and closes.
        1 => {
            parts[1 - first].answers = true;
            parts[1 - first].shuts = false;
        }
        // As above, but the other end shuts down too.
        2 => parts[1 - first].answers = true,
        // The first end closes with its last byte, and the other closes then.
        _ => {
            parts[first].shuts = false;
            parts[first].reads_end = false;
            parts[1 - first].shuts = false;
        }
    }
    parts
}

/// The progress of an end.
#[derive(Debug)]
pub struct Progress {
    seed: u64,
    end: usize,
    parts: [Part; 2],
    sent: AtomicU64,
    received: AtomicU64,
    is_over: AtomicBool,
}

impl Progress {
    /// Returns the progress of a connection that begins.
    pub fn new(seed: u64, long: u8, end: usize) -> Self {
        Self {
            seed,
            end,
            parts: plan(seed, long),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        }
    }

    /// Bytes that were compared.
    pub fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Returns a number that grows while the connection moves bytes.
    pub fn moved(&self) -> u64 {
        self.sent.load(Relaxed) + self.received()
    }

    /// Returns whether the end has finished.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Relaxed)
    }

    fn own(&self) -> &Part {
        &self.parts[self.end]
    }

    fn other(&self) -> &Part {
        &self.parts[1 - self.end]
    }

    /// Returns the name of the direction that an end sends in.
    fn stream(&self, end: usize) -> u64 {
        self.seed.wrapping_mul(2) + end as u64
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sent, received) = (self.sent.load(Relaxed), self.received());
        let (own, other) = (self.own(), self.other());
        let end = ["client", "server"][self.end];
        write!(
            f,
            "seed {}, {end}: sent {sent} of {}, received {received} of {}; it is {own:?}, the other {other:?}",
            self.seed, own.len, other.len
        )
    }
}

/// Whether the other end's EOF was read, for the thread that sends.
#[derive(Default)]
struct Ended(Mutex<bool>, Condvar);

impl Ended {
    fn set(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        let is_set = self.0.lock().unwrap();
        drop(self.1.wait_while(is_set, |is_set| !*is_set).unwrap());
    }
}

/// Plays an end to its close. The error is the fault, and its place.
pub fn play(stream: TcpStream, progress: &Progress) -> Result<(), String> {
    let played = match progress.own().way {
        Way::Blocking => blocking(&stream, progress),
        _ => in_one_thread(&stream, progress),
    };
    progress.is_over.store(true, Relaxed);
    played.map_err(|why| format!("{why}; {progress}"))
}

/// The result of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// There is nothing left to do.
    Done,
    /// The end can call again.
    Again,
    /// The end has to wait.
    Blocked,
}

fn blocking(stream: &TcpStream, progress: &Progress) -> Result<(), String> {
    let ended = Ended::default();
    // The other thread must not wait for an EOF that never comes.
    let guarded = |outcome: Result<(), String>| {
        if outcome.is_err() {
            ended.set();
            let _ = stream.shutdown(Shutdown::Both);
        }
        outcome
    };
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let mut sender = Sender::new(progress);
            guarded(loop {
                if sender.waits() {
                    ended.wait();
                    sender.may_go_on = true;
                }
                match sender.step(stream) {
                    Ok(Step::Done) => break Ok(()),
                    Ok(_) => {}
                    Err(why) => break Err(why),
                }
            })
        });
        let mut receiver = Receiver::new(progress);
        let received = guarded(loop {
            match receiver.step(stream) {
                Ok(Step::Done) => break Ok(()),
                Ok(_) => {}
                Err(why) => break Err(why),
            }
        });
        ended.set();
        received.and(sending.join().unwrap())
    })
}

fn in_one_thread(stream: &TcpStream, progress: &Progress) -> Result<(), String> {
    stream.set_nonblocking(true).map_err(|e| e.to_string())?;
    let wait = Wait::new(stream, progress.own().way);
    let (mut sender, mut receiver) = (Sender::new(progress), Receiver::new(progress));
    let (mut sent, mut received) = (Step::Again, Step::Again);
    while (sent, received) != (Step::Done, Step::Done) {
        if received != Step::Done {
            received = receiver.step(stream)?;
            sender.may_go_on |= received == Step::Done;
        }
        if sent != Step::Done && !sender.waits() {
            sent = sender.step(stream)?;
        }
        let can_send = sent == Step::Again && !sender.waits();
        let is_left = sent != Step::Done || received != Step::Done;
        if is_left && received != Step::Again && !can_send {
            wait.wait(stream, (received == Step::Blocked, sent == Step::Blocked));
            received = if received == Step::Done { received } else { Step::Again };
            sent = if sent == Step::Done { sent } else { Step::Again };
        }
    }
    Ok(())
}

enum Wait {
    Poll,
    Epoll(Epoll),
    Edges(Epoll),
}

impl Wait {
    fn new(stream: &TcpStream, way: Way) -> Self {
        if way == Way::Poll {
            return Self::Poll;
        }
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        if way == Way::Epoll {
            epoll.add(stream, EpollEvent::new(EpollFlags::empty(), 0)).unwrap();
            return Self::Epoll(epoll);
        }
        let all = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        epoll.add(stream, EpollEvent::new(all, 0)).unwrap();
        Self::Edges(epoll)
    }

    /// Waits until the stream is readable, or writable.
    fn wait(&self, stream: &TcpStream, (reads, writes): (bool, bool)) {
        let mut event = [EpollEvent::empty()];
        match self {
            Self::Poll => {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::POLLIN, reads);
                flags.set(PollFlags::POLLOUT, writes);
                poll(&mut [PollFd::new(stream.as_fd(), flags)], PollTimeout::NONE).unwrap();
            }
            Self::Epoll(epoll) => {
                let mut flags = EpollFlags::empty();
                flags.set(EpollFlags::EPOLLIN, reads);
                flags.set(EpollFlags::EPOLLOUT, writes);
                epoll.modify(stream, &mut EpollEvent::new(flags, 0)).unwrap();
                epoll.wait(&mut event, EpollTimeout::NONE).unwrap();
            }
            Self::Edges(epoll) => {
                epoll.wait(&mut event, EpollTimeout::NONE).unwrap();
            }
        }
    }
}

/// Returns a size for a call: few bytes as often as many.
fn size(rng: &mut Rng) -> usize {
    let most = [16, 1500, 16 * 1024, MOST][rng.below(4) as usize];
    1 + rng.below(most) as usize
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

struct Sender<'a> {
    progress: &'a Progress,
    rng: Rng,
    calls: u64,
    /// The other end's EOF has been read.
    may_go_on: bool,
}

impl<'a> Sender<'a> {
    fn new(progress: &'a Progress) -> Self {
        let rng = Rng::new(!progress.stream(progress.end).rotate_left(20));
        Self {
            progress,
            rng,
            calls: 0,
            may_go_on: false,
        }
    }

    /// Returns the offset up to which bytes may be sent now.
    fn limit(&self) -> u64 {
        let part = self.progress.own();
        if part.answers && !self.may_go_on {
            part.len / 2
        } else {
            part.len
        }
    }

    /// Returns whether the sender has to read the other end's EOF first.
    fn waits(&self) -> bool {
        let part = self.progress.own();
        part.answers && !self.may_go_on && self.progress.sent.load(Relaxed) == self.limit()
    }

    /// Makes one sending call.
    fn step(&mut self, mut stream: &TcpStream) -> Result<Step, String> {
        let (part, at) = (self.progress.own(), self.progress.sent.load(Relaxed));
        if at == part.len {
            if part.shuts {
                stream
                    .shutdown(Shutdown::Write)
                    .map_err(|e| format!("shutdown behind byte {at}: {e}"))?;
            }
            return Ok(Step::Done);
        }
        let mut size = size(&mut self.rng);
        match part.pace {
            Pace::SlowSender if self.rng.below(4) == 0 => std::thread::sleep(Duration::from_millis(self.rng.below(4))),
            Pace::Long(times) => {
                size = (part.len / (PIECES * times)) as usize + 1;
                std::thread::sleep(PAUSE);
            }
            _ if part.warms_up && self.calls < WARMING => {
                // On a link the larger sizes are WRITEs.
                size = 1 + self.rng.below([100, 16 * 1024][usize::from(self.calls > WARMING / 4)]) as usize;
                std::thread::sleep(WARMING_PAUSE);
            }
            _ => {}
        }
        self.calls += 1;
        let bytes = data::pattern(
            self.progress.stream(self.progress.end),
            at,
            size.min((self.limit() - at) as usize),
        );
        let sent = if self.rng.below(4) == 0 {
            let (first, second) = bytes.split_at(self.rng.below(bytes.len() as u64 + 1) as usize);
            stream.write_vectored(&[IoSlice::new(first), IoSlice::new(second)])
        } else {
            stream.write(&bytes)
        };
        match sent {
            Ok(n @ 1..) => {
                self.progress.sent.fetch_add(n as u64, Relaxed);
                Ok(Step::Again)
            }
            Ok(0) => Err(format!("nothing of {} bytes was sent at {at}", bytes.len())),
            Err(error) if would_block(&error) => Ok(Step::Blocked),
            Err(error) => Err(format!("sending at byte {at}: {error}")),
        }
    }
}

struct Receiver<'a> {
    progress: &'a Progress,
    rng: Rng,
    buffer: Vec<u8>,
}

impl<'a> Receiver<'a> {
    fn new(progress: &'a Progress) -> Self {
        let rng = Rng::new(progress.stream(progress.end).rotate_left(33));
        let buffer = vec![0; MOST as usize];
        Self { progress, rng, buffer }
    }

    /// Makes one receiving call.
    fn step(&mut self, mut stream: &TcpStream) -> Result<Step, String> {
        let (part, at) = (self.progress.own(), self.progress.received());
        let len = self.progress.other().len;
        if !part.reads_end && at == len {
            return Ok(Step::Done);
        }
        if part.pace == Pace::SlowReader && self.rng.below(4) == 0 {
            std::thread::sleep(Duration::from_millis(self.rng.below(4)));
        }
        let size = size(&mut self.rng);
        let kind = self.rng.below(8);
        let got = match kind {
            0 => stream.peek(&mut self.buffer[..size]),
            1 | 2 => {
                let (first, second) = self.buffer[..size].split_at_mut(self.rng.below(size as u64 + 1) as usize);
                stream.read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(second)])
            }
            _ => stream.read(&mut self.buffer[..size]),
        };
        let n = match got {
            Ok(n) => n,
            Err(error) if would_block(&error) => return Ok(Step::Blocked),
            Err(error) => return Err(format!("receiving at byte {at}: {error}")),
        };
        let stream = self.progress.stream(1 - self.progress.end);
        let expected = data::pattern(stream, at, n);
        if let Some(i) = (0..n).find(|i| self.buffer[*i] != expected[*i]) {
            let (is, wanted) = (self.buffer[i], expected[i]);
            let position = at + i as u64;
            let found = whence(stream, &self.buffer[i..n], len);
            return Err(format!("byte {position} is {is:#x}, not {wanted:#x} ({found})"));
        }
        if at + n as u64 > len {
            return Err(format!(
                "{} bytes more than were sent, behind byte {len}",
                at + n as u64 - len
            ));
        }
        match n {
            0 if at < len => Err(format!("the end of the stream at byte {at}")),
            0 => Ok(Step::Done),
            _ if kind == 0 => Ok(Step::Again),
            _ => {
                self.progress.received.fetch_add(n as u64, Relaxed);
                Ok(Step::Again)
            }
        }
    }
}

/// Returns where in the sequence wrong bytes belong, for an error text that points to the cause.
fn whence(stream: u64, bytes: &[u8], len: u64) -> String {
    let some = &bytes[..bytes.len().min(12)];
    let belongs = |at: &u64| data::pattern(stream, *at, some.len()) == some;
    match (0..len).find(belongs) {
        Some(at) if some.len() == 12 => format!("what is there belongs at {at}"),
        _ => format!("{some:x?}, which belongs nowhere"),
    }
}
