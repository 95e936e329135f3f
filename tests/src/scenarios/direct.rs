//! Direct transfers between hosts: the peer's device writes into the buffer that a blocking receive waits with, and
//! reads the bytes from the memory of a blocking send. Here: the results of calls of all forms, time-outs, and senders.
//! `direct_more` has other users of the socket or the memory. All scenarios are played also as `lent_into_…`: then
//! the sender lends its memory (`RDMASOCK_DEV_WAY`), and the reader's own device reads it into that buffer.
//!
//! The server reads and the client sends. A run-up comes before the part that is tested: large messages whose reader
//! waits for each, until they are direct transfers. Some bytes of the tested part have to be direct, too.

use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use libc::c_int;

use super::epoll;
use crate::ctx::Ctx;
use crate::data::Rng;
use crate::sys::Ret;
use crate::{data, sys};

/// The byte that fills a buffer before a receive.
pub const FILL: u8 = 0xA5;
/// Bytes of a large buffer; the largest sends and receives are twice as long.
pub const LARGE: usize = 1 << 20;
/// The bytes of a stream repeat after this many.
const PERIOD: usize = 1_999_993;
/// Messages of a run-up at a time, and bytes of one.
const RUN: usize = 200;
const MESSAGE: usize = 16 * 1024;

/// Returns `len` bytes of the stream from `at` on.
fn bytes_at(at: u64, len: usize) -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let mut table = data::pattern(40, 0, PERIOD);
        table.extend_from_within(..);
        table.extend_from_within(..PERIOD);
        table
    });
    let from = (at % PERIOD as u64) as usize;
    &table[from..from + len]
}

/// Waits until the reader is in its next call, and sleeps.
pub fn rest() {
    sys::pause_ms(3);
}

/// A direction of a connection, as one end of it sees it.
pub struct Flow<'a> {
    c: &'a Ctx,
    /// The connection.
    pub fd: c_int,
    /// Whether this end reads.
    pub reads: bool,
    /// Bytes sent, or received, so far.
    pub at: u64,
    /// Whether the tested bytes are those that the reader's device reads from the sender's memory.
    pub is_lent: bool,
}

impl<'a> Flow<'a> {
    /// Makes a connection whose server reads, and runs it up.
    pub fn begin(c: &'a Ctx) -> Self {
        let mut flow = Self::of(c, c.pair(), c.is_server());
        flow.run_up();
        flow
    }

    /// Returns a direction of this connection, without a run-up.
    pub fn of(c: &'a Ctx, fd: c_int, reads: bool) -> Self {
        Self {
            c,
            fd,
            reads,
            at: 0,
            is_lent: false,
        }
    }

    /// As [`begin`](Self::begin), with a reader that waits in epoll_wait.
    pub fn lent(c: &'a Ctx) -> Self {
        let mut flow = Self::of(c, c.pair(), c.is_server()).lending();
        flow.run_up();
        flow
    }

    /// Has the reader wait in epoll_wait.
    pub fn lending(mut self) -> Self {
        self.is_lent = true;
        self
    }

    /// Sends large messages until they are direct transfers.
    #[track_caller]
    pub fn run_up(&mut self) {
        let end = Instant::now() + Duration::from_secs(30);
        // The pause doubles each time: on a machine that has much else to do the reader is late.
        let mut pause = Duration::from_micros(60);
        loop {
            self.c.sync("run-up");
            let before = self.asked();
            for _ in 0..RUN {
                if self.reads {
                    self.receive_all(MESSAGE);
                } else {
                    self.send(MESSAGE);
                    thread::sleep(pause);
                }
            }
            pause = (2 * pause).min(Duration::from_millis(2));
            // The counters are up to date when the call has returned.
            self.c.sync("run");
            if self.went(before, (RUN * MESSAGE / 8) as u64) {
                return;
            }
            assert!(Instant::now() < end, "nothing goes directly");
        }
    }

    /// Plays a part that logs nothing, until some of its bytes were direct transfers. On a machine that has much else
    /// to do, a reader need not be there in time. A run-up precedes each attempt.
    #[track_caller]
    pub fn play(&mut self, part: impl FnMut(&mut Self)) {
        self.play_until(1, part);
    }

    /// As [`play`](Self::play), until `bytes` of its bytes were direct.
    #[track_caller]
    pub fn play_until(&mut self, bytes: usize, mut part: impl FnMut(&mut Self)) {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            self.c.sync("part");
            let before = self.asked();
            part(self);
            self.c.sync("played");
            if self.went(before, bytes as u64) {
                return;
            }
            assert!(Instant::now() < end, "nothing of what matters goes directly");
            self.run_up();
        }
    }

    /// Returns whether at least `bytes` were direct transfers since `before`, or the count is not known.
    fn went(&self, before: Option<u64>, bytes: u64) -> bool {
        let went = before
            .zip(self.asked())
            .is_none_or(|(before, now)| now - before >= bytes);
        self.c.exchange("went", u64::from(went)) != 0 && went
    }

    /// Returns the bytes of direct transfers so far, which the sender asks for. `None` at the reader, or if not known.
    fn asked(&self) -> Option<u64> {
        let past = if self.reads { None } else { self.c.past_the_rings() }?;
        Some(match std::env::var("RDMASOCK_DEV_WAY").is_ok_and(|way| way == "get") {
            _ if self.is_lent => past.read,
            true => past.landed,
            false => past.written,
        })
    }

    /// Ends the connection, when all bytes that were sent have been received.
    pub fn end(self) {
        self.c.sync("end");
        self.c.log("every byte is right");
        self.c.close(self.fd);
    }

    /// Sends `len` bytes, or receives them. A sender then pauses, if its reader is to wait with a buffer by the next
    /// send.
    #[track_caller]
    pub fn pass(&mut self, len: usize, pause: Duration) {
        if self.reads {
            return self.receive_all(len);
        }
        self.send(len);
        if !self.is_lent {
            thread::sleep(pause);
        }
    }

    /// Sends `len` bytes from memory that is overwritten as soon as the call has accepted the bytes. A call that ends
    /// early is followed by another.
    #[track_caller]
    pub fn send(&mut self, len: usize) {
        self.send_from(&mut vec![0; len]);
    }

    /// As [`send`](Self::send), from this memory.
    #[track_caller]
    pub fn send_from(&mut self, bytes: &mut [u8]) {
        let (len, mut sent) = (bytes.len(), 0);
        bytes.copy_from_slice(bytes_at(self.at, len));
        while sent < len {
            let r = sys::send(self.fd, &bytes[sent..], libc::MSG_NOSIGNAL);
            if !r.is(libc::EINTR) && !r.is(libc::EAGAIN) {
                let n = r.count();
                bytes[sent..sent + n].fill(!FILL);
                sent += n;
            }
        }
        self.at += len as u64;
    }

    /// Sends these pieces with one call.
    #[track_caller]
    pub fn send_pieces(&mut self, lens: &[usize], is_message: bool) {
        let whole: usize = lens.iter().sum();
        let mut bytes = bytes_at(self.at, whole).to_vec();
        let mut pieces = pieces(&mut bytes, lens);
        let message = sys::msghdr(&mut pieces);
        let sent = if is_message {
            call!(libc::sendmsg(self.fd, &message, 0))
        } else {
            call!(libc::writev(self.fd, pieces.as_ptr(), pieces.len() as c_int))
        };
        assert_eq!(sent.count(), whole);
        bytes.fill(!FILL);
        self.at += whole as u64;
    }

    /// Receives once into `buf`. Checks that the buffer holds the stream's next bytes, and that no byte was written
    /// behind them. Returns the call's result and the buffer.
    #[track_caller]
    pub fn receive_into(&mut self, mut buf: Vec<u8>, flags: c_int) -> (Ret, Vec<u8>) {
        buf.fill(FILL);
        let r = sys::recv(self.fd, &mut buf, flags);
        self.check(r, &buf);
        (r, buf)
    }

    /// As [`receive_into`](Self::receive_into), with a new buffer.
    #[track_caller]
    pub fn receive(&mut self, len: usize, flags: c_int) -> Ret {
        self.receive_into(vec![0; len], flags).0
    }

    /// As [`receive_into`](Self::receive_into), into pieces.
    #[track_caller]
    pub fn receive_pieces(&mut self, lens: &[usize], is_message: bool, flags: c_int) -> Ret {
        let mut buf = vec![FILL; lens.iter().sum()];
        let mut pieces = pieces(&mut buf, lens);
        let mut message = sys::msghdr(&mut pieces);
        let r = if is_message {
            call!(libc::recvmsg(self.fd, &mut message, flags))
        } else {
            call!(libc::readv(self.fd, pieces.as_ptr(), pieces.len() as c_int))
        };
        self.check(r, &buf);
        r
    }

    /// Receives exactly `len` bytes, in further calls if one ends early.
    #[track_caller]
    pub fn receive_all(&mut self, len: usize) {
        if self.is_lent {
            let mut got = 0;
            while got < len {
                let r = self.receive_when_told(len - got);
                assert!(r.value > 0, "{r} after {got}");
                got += r.count();
            }
            return;
        }
        let mut got = 0;
        while got < len {
            let r = self.receive(len - got, libc::MSG_WAITALL);
            if !r.is(libc::EINTR) && !r.is(libc::EAGAIN) {
                assert!(r.value > 0, "{r} after {got}");
                got += r.count();
            }
        }
    }

    /// Receives at most `most` bytes when epoll_wait has reported an event, with one call that does not wait.
    #[track_caller]
    fn receive_when_told(&mut self, most: usize) -> Ret {
        loop {
            let r = self.receive(most.min(LARGE), libc::MSG_DONTWAIT);
            if r.is(libc::EAGAIN) {
                let set = epoll::create();
                epoll::ctl(set, libc::EPOLL_CTL_ADD, self.fd, epoll::IN, 1).ok();
                epoll::wait(set, 1, -1);
                sys::close(set).ok();
            } else if !r.is(libc::EINTR) {
                return r;
            }
        }
    }

    /// Receives until EOF, or an error. Returns the number of bytes, and the last call's result.
    pub fn receive_to_end(&mut self) -> (usize, Ret) {
        let mut got = 0;
        loop {
            let r = self.receive_when_told(LARGE);
            if r.value <= 0 {
                return (got, r);
            }
            got += r.count();
        }
    }

    /// Sends again and again until a call fails. Returns the failed call's result.
    pub fn send_until_it_fails(&mut self) -> Ret {
        loop {
            let mut bytes = bytes_at(self.at, LARGE).to_vec();
            let r = sys::send(self.fd, &bytes, libc::MSG_NOSIGNAL);
            if r.failed() {
                return r;
            }
            bytes.fill(!FILL);
            self.at += r.value as u64;
        }
    }

    /// Checks that a call has received the stream's next bytes, and that no byte was written behind them.
    #[track_caller]
    pub fn check(&mut self, r: Ret, buf: &[u8]) {
        let n = usize::try_from(r.value).unwrap_or(0);
        let want = bytes_at(self.at, n);
        if let Some(wrong) = (0..n).find(|at| buf[*at] != want[*at]) {
            panic!(
                "byte {} of {n} at {} is {:#x}, not {:#x}",
                wrong, self.at, buf[wrong], want[wrong]
            );
        }
        assert_filled(&buf[n..]);
        self.at += n as u64;
    }
}

/// Checks that no byte of the buffer was written.
#[track_caller]
pub fn assert_filled(buf: &[u8]) {
    let written = buf.iter().position(|byte| *byte != FILL);
    assert_eq!(written, None, "written behind what was received, of {}", buf.len());
}

/// Returns whether `part` is in the stream, from a position in this range on.
pub fn is_of_stream(part: &[u8], from: u64, until: u64) -> bool {
    (from..=until).any(|at| bytes_at(at, part.len()) == part)
}

fn pieces(mut buf: &mut [u8], lens: &[usize]) -> Vec<libc::iovec> {
    let mut all = Vec::new();
    for len in lens {
        let (piece, rest) = buf.split_at_mut(*len);
        all.push(sys::iov(piece));
        buf = rest;
    }
    all
}

/// Buffers that calls have returned, with a copy of their bytes: no device may write there any more.
#[derive(Default)]
pub struct Kept(Vec<(Vec<u8>, Vec<u8>)>);

impl Kept {
    /// Adds a buffer.
    pub fn keep(&mut self, buf: Vec<u8>) {
        self.0.push((buf.clone(), buf));
    }

    /// Checks that all buffers are unchanged, and drops them.
    #[track_caller]
    pub fn check(&mut self) {
        assert!(
            self.0.drain(..).all(|(then, now)| then == now),
            "written after the call"
        );
    }
}

/// Runs `act` in this thread, which gets SIGUSR1 again and again meanwhile.
pub fn under_signals(act: impl FnOnce()) {
    let me = call!(libc::pthread_self()).value as libc::pthread_t;
    let is_over = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            let mut rng = Rng::new(11);
            while !is_over.load(SeqCst) {
                thread::sleep(Duration::from_micros(50 + rng.below(900)));
                call!(libc::pthread_kill(me, libc::SIGUSR1)).ok();
            }
        });
        act();
        is_over.store(true, SeqCst);
    });
}

/// A receive with a large buffer returns no more than was sent at once.
pub fn sizes(c: &Ctx) {
    const SIZES: [usize; 17] = [
        4096,
        4097,
        5000,
        8191,
        65_536,
        65_537,
        100_003,
        131_071,
        300_001,
        LARGE - 1,
        LARGE,
        LARGE + 1,
        1_500_000,
        1,
        100,
        4095,
        20_000,
    ];
    let mut flow = Flow::begin(c);
    flow.play(|flow| {
        for len in [SIZES; 4].concat() {
            c.sync("waits");
            if flow.reads {
                let mut got = 0;
                while got < len {
                    got += flow.receive(LARGE, 0).count();
                }
                assert_eq!(got, len);
            } else {
                rest();
                flow.send(len);
            }
        }
    });
    flow.end();
}

/// Several pieces at both ends; the first is large, or not.
pub fn vectors(c: &Ctx) {
    const PIECES: [&[usize]; 6] = [
        &[65_536, 10, 7000],
        &[100, 65_536, 20_000],
        &[8192, 8192, 8192, 8192],
        &[4096, 0, 1, 300_000],
        &[0, 500_000],
        &[33_333],
    ];
    let mut flow = Flow::begin(c);
    flow.play(|flow| {
        for round in 0..96 {
            let (there, here) = (PIECES[round % 6], PIECES[round / 6 % 6]);
            let (is_message, is_whole) = (round % 2 == 0, round % 4 == 0);
            c.sync("waits");
            if flow.reads {
                let mut left: usize = there.iter().sum();
                while left > 0 {
                    let whole: usize = here.iter().sum();
                    let flags = if is_whole && whole <= left {
                        libc::MSG_WAITALL
                    } else {
                        0
                    };
                    let n = flow.receive_pieces(here, is_message, flags).count();
                    assert!(n > 0 && (flags == 0 || !is_message || n == whole), "{n} of {whole}");
                    left -= n;
                }
            } else {
                rest();
                flow.send_pieces(there, round % 3 == 0);
            }
        }
    });
    flow.end();
}

/// MSG_WAITALL, from sends that are smaller or larger than the buffer, and tiny ones in between.
pub fn whole(c: &Ctx) {
    const ALL: usize = 40_000_000;
    let mut flow = Flow::begin(c);
    let mut rng = Rng::new(if flow.reads { 3 } else { 5 });
    flow.play(|flow| {
        let mut left = ALL;
        while left > 0 {
            let most = [100, 5000, 60_000, 300_000, 1_200_000][rng.below(5) as usize];
            let len = (1 + rng.below(most) as usize).min(left);
            if flow.reads {
                assert_eq!(flow.receive(len, libc::MSG_WAITALL).count(), len);
            } else {
                flow.send(len);
                thread::sleep(Duration::from_micros([0, 0, 100, 1000][rng.below(4) as usize]));
            }
            left -= len;
        }
    });
    flow.end();
}

/// A head and a body in one send, which the reader receives one after the other: many of the bodies are direct.
pub fn behind_heads(c: &Ctx) {
    const HEAD: usize = 100;
    const ROUNDS: usize = 40;
    let mut flow = Flow::begin(c);
    flow.play_until(ROUNDS * LARGE / 4, |flow| {
        for round in 0..ROUNDS {
            if flow.reads {
                flow.receive_all(HEAD);
                flow.receive_all(LARGE);
            } else {
                // A third piece is sent in the same way as the second.
                let parts: [&[usize]; 2] = [&[HEAD, LARGE], &[HEAD / 2, HEAD / 2, LARGE / 2, LARGE / 2]];
                flow.send_pieces(parts[round % 2], round % 3 == 0);
            }
        }
    });
    flow.end();
}

/// SO_RCVTIMEO expires before any byte, or the last, has come: later bytes go elsewhere.
pub fn time_outs(c: &Ctx) {
    const PART: usize = 10_000;
    const LATE: usize = 50_000;
    let mut flow = Flow::begin(c);
    let fd = flow.fd;
    for round in 0..8 {
        let has_part = round % 2 == 1;
        c.sync("waits");
        if flow.reads {
            sys::set_timeout(fd, libc::SO_RCVTIMEO, Duration::from_millis(250)).ok();
            let mut kept = Kept::default();
            let (r, buf) = flow.receive_into(vec![0; LARGE], if has_part { libc::MSG_WAITALL } else { 0 });
            kept.keep(buf);
            c.ret("recv", r);
            c.sync("over");
            sys::set_timeout(fd, libc::SO_RCVTIMEO, Duration::ZERO).ok();
            flow.receive_all(LATE);
            kept.check();
        } else {
            if has_part {
                rest();
                flow.send(PART);
            }
            c.sync("over");
            flow.send(LATE);
        }
        flow.run_up();
    }
    flow.end();
}

/// SO_RCVTIMEO expires at about the time at which bytes come.
pub fn late_time_outs(c: &Ctx) {
    const ROUNDS: usize = 400;
    let mut flow = Flow::begin(c);
    let mut rng = Rng::new(7);
    if flow.reads {
        sys::set_timeout(flow.fd, libc::SO_RCVTIMEO, Duration::from_millis(1)).ok();
    }
    flow.play(|flow| {
        for round in 0..ROUNDS {
            let len = 4096 + rng.below(60_000) as usize;
            let pause = rng.below(2500);
            c.sync("round");
            if flow.reads {
                let mut kept = Kept::default();
                let mut got = 0;
                while got < len {
                    let flags = if round % 2 == 0 { libc::MSG_WAITALL } else { 0 };
                    let (r, buf) = flow.receive_into(vec![0; len - got], flags);
                    assert!(r.value > 0 || r.is(libc::EAGAIN), "{r}");
                    got += usize::try_from(r.value).unwrap_or(0);
                    kept.keep(buf);
                }
                kept.check();
            } else {
                thread::sleep(Duration::from_micros(pause));
                flow.send(len);
            }
            if round % 50 == 49 {
                flow.run_up();
            }
        }
    });
    flow.end();
}
