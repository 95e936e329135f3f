//! Calls whose fd is closed meanwhile and stands for another file at once. One thread is blocked in a call on a
//! connection. Another thread closes the connection, in every way, and gives its fd to the next connection or file.
//! Every byte names the connection or file that it belongs to.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread;

use libc::{c_int, c_void};

use super::epoll;
use crate::ctx::Ctx;
use crate::sys::Addr;
use crate::{data, sys};

/// Bytes of a record; the stream of the record names the connection.
const RECORD: usize = 24;
/// Rounds of each way to close, with each call.
const ROUNDS: u64 = 4;
/// Exchanges before the call: none, so that the connection is on TCP; two or three, so that a promotion is about to
/// begin or under way; and enough for a link.
const WARM: [u64; 4] = [0, 2, 3, 500];

/// A way to close an fd.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Close {
    Libc,
    /// libc's `syscall`, as libuv does it.
    Syscall,
    Range,
    /// Another file is put in the connection's place by dup2.
    Over,
    /// A system call in line, which no library sees.
    Inline,
}

const SEEN: [Close; 4] = [Close::Libc, Close::Syscall, Close::Range, Close::Over];
const EVERY: [Close; 5] = [Close::Libc, Close::Syscall, Close::Range, Close::Over, Close::Inline];
/// In ms: an fd that was closed unseen may pass for the connection for less than this after its last use.
const REST_MS: u64 = 15;

fn close_by(how: Close, fd: c_int) {
    match how {
        Close::Libc => sys::close(fd).ok(),
        Close::Syscall => call!(libc::syscall(libc::SYS_close, fd)).ok(),
        Close::Range => call!(libc::close_range(fd as u32, fd as u32, 0)).ok(),
        Close::Over => {
            let other = call!(libc::memfd_create(c"over".as_ptr(), 0)).ok();
            call!(libc::dup2(other, fd)).ok();
            sys::close(other).ok();
            // The fd has to be free for the next file.
            sys::close(fd).ok()
        }
        Close::Inline => inline_close(fd),
    };
}

/// Waits until the library checks again which file an fd is: until the kernel's clock, by which it decides, has moved
/// on. (A processor that keeps that clock and is itself held up, as in a virtual machine, holds it up too.)
fn rest() {
    let clock = || {
        let mut now: libc::timespec = sys::zeroed();
        call!(libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now)).ok();
        (now.tv_sec, now.tv_nsec)
    };
    let before = clock();
    sys::pause_ms(REST_MS);
    while clock() == before {
        sys::pause_ms(1);
    }
}

/// close(2) past libc.
fn inline_close(fd: c_int) -> i32 {
    let result: i64;
    // SAFETY: the system call close, which touches no memory.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") libc::SYS_close => result, in("rdi") i64::from(fd),
            lateout("rcx") _, lateout("r11") _);
    }
    assert_eq!(result, 0);
    0
}

/// The calls that wait for bytes.
const RECEIVERS: usize = 8;

/// Receives up to one record by call `which`.
fn receive(which: usize, fd: c_int, buf: &mut [u8; RECORD]) -> i64 {
    let at: *mut c_void = buf.as_mut_ptr().cast();
    let mut iov = libc::iovec {
        iov_base: at,
        iov_len: RECORD,
    };
    let mut message: libc::mmsghdr = sys::zeroed();
    message.msg_hdr.msg_iov = &raw mut iov;
    message.msg_hdr.msg_iovlen = 1;
    let nothing: *mut c_void = std::ptr::null_mut();
    // SAFETY: all structures point to one buffer of that length.
    unsafe {
        match which {
            0 => libc::recv(fd, at, RECORD, 0) as i64,
            1 => libc::read(fd, at, RECORD) as i64,
            2 => libc::readv(fd, &raw const iov, 1) as i64,
            3 => libc::recvfrom(fd, at, RECORD, 0, nothing.cast(), nothing.cast()) as i64,
            4 => libc::recvmsg(fd, &raw mut message.msg_hdr, 0) as i64,
            5 => libc::recv(fd, at, RECORD, libc::MSG_WAITALL) as i64,
            6 => match libc::recvmmsg(fd, &raw mut message, 1, 0, std::ptr::null_mut()) {
                1 => i64::from(message.msg_len),
                n => i64::from(n),
            },
            _ => libc::preadv2(fd, &raw const iov, 1, -1, 0) as i64,
        }
    }
}

/// The stream that names connection `round` of kind `which`.
fn name(which: u64, round: u64) -> u64 {
    0x1d00_0000 + which * 100_000 + round
}

fn send_record(fd: c_int, of: u64, at: u64) {
    sys::send_all(fd, &data::pattern(of, at * RECORD as u64, RECORD)).ok();
}

fn expect_record(fd: c_int, of: u64, at: u64) {
    data::verify(of, at * RECORD as u64, &sys::recv_exact(fd, RECORD));
}

/// The client of every scenario here: connection `i` is warmed up; the word to go on comes on connection `i + 1`.
/// Then the client calls `late` with the old connection, which the server has closed.
fn client(port: u16, which: u64, rounds: u64, mut late: impl FnMut(c_int, u64)) {
    let mut fd = sys::connected(&Addr::v4(port));
    for round in 0..rounds {
        let me = name(which, round);
        for i in 0..WARM[round as usize % WARM.len()] {
            send_record(fd, me, i);
            expect_record(fd, me, i);
        }
        let next = sys::connected(&Addr::v4(port));
        send_record(next, name(which, round + 1), 1_000_000);
        expect_record(next, name(which, round + 1), 1_000_001);
        late(fd, round);
        sys::close(fd).ok();
        fd = next;
    }
    sys::close(fd).ok();
}

/// Fills the fds below `fd`, so that `fd` is the lowest free one when it is closed.
fn plug(fd: c_int) {
    loop {
        let filler = call!(libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY)).ok();
        if filler > fd {
            sys::close(filler).ok();
            return;
        }
    }
}

/// The server's part of a round: warms `fd` up.
fn warm_up(fd: c_int, which: u64, round: u64) {
    plug(fd);
    let me = name(which, round);
    for i in 0..WARM[round as usize % WARM.len()] {
        expect_record(fd, me, i);
        send_record(fd, me, i);
    }
    if WARM[round as usize % WARM.len()] > 10 {
        // The connection is on the link by now, if it ever gets there.
        sys::pause_ms(2);
    }
}

/// Accepts the next connection, which gets the fd that has just become free, and tells the client to go on.
fn next_connection(listener: c_int, which: u64, round: u64) -> c_int {
    let next = sys::accept4(listener, 0).ok();
    expect_record(next, name(which, round + 1), 1_000_000);
    send_record(next, name(which, round + 1), 1_000_001);
    next
}

/// Runs `call` in a thread, and `meanwhile` once that thread is asleep in it.
fn beside_a_blocked<R: Send>(call: impl FnOnce() -> R + Send, meanwhile: impl FnOnce()) -> R {
    let id = &AtomicI32::new(0);
    thread::scope(|s| {
        let caller = s.spawn(move || {
            id.store(sys::thread_id(), Ordering::Release);
            call()
        });
        while id.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        let id = id.load(Ordering::Acquire);
        let mut asleep = 0;
        while asleep < 3 {
            sys::pause_ms(1);
            asleep = if sys::is_asleep(id) { asleep + 1 } else { 0 };
        }
        meanwhile();
        caller.join().unwrap()
    })
}

/// A thread is blocked in each of the calls that receive. After a shutdown the call gets the end of its own stream.
/// After a mere close the call still holds the file, and gets the bytes that the peer sends then.
pub fn receivers(c: &Ctx) {
    let rounds = RECEIVERS as u64 * SEEN.len() as u64 * ROUNDS * 2;
    let (listener, port) = c.listener(8);
    let Some(listener) = listener else {
        client(port, 1, rounds, |fd, round| {
            if round % 2 == 1 {
                send_record(fd, name(1, round), 500);
            }
        });
        c.log("all equal");
        return;
    };
    let mut fd = sys::accept4(listener, 0).ok();
    for round in 0..rounds {
        warm_up(fd, 1, round);
        let how = SEEN[(round / 2) as usize % SEEN.len()];
        let which = (round / 8) as usize % RECEIVERS;
        let ends = round % 2 == 0;
        let next = Cell::new(-1);
        let mut buf = [0; RECORD];
        let receiving = &mut buf;
        let got = beside_a_blocked(
            move || (receive(which, fd, receiving), std::io::Error::last_os_error()),
            || {
                if ends {
                    call!(libc::shutdown(fd, libc::SHUT_RDWR)).ok();
                }
                close_by(how, fd);
                next.set(next_connection(listener, 1, round));
            },
        );
        if ends {
            assert_eq!(got.0, 0, "round {round}: {how:?}, call {which}: {}", got.1);
        } else {
            assert_eq!(got.0, RECORD as i64, "round {round}: {how:?}, call {which}: {}", got.1);
            data::verify(name(1, round), 500 * RECORD as u64, &buf);
        }
        fd = next.get();
    }
    sys::close(fd).ok();
    c.log("all equal");
}

/// A thread is blocked in send() on a connection whose peer does not read. The connection is closed, and the next
/// connection gets its fd. The peer gets all bytes that were sent to it, and the next connection none.
pub fn senders(c: &Ctx) {
    const MUCH: usize = 24 << 20;
    let rounds = 8;
    let (listener, port) = c.listener(8);
    let Some(listener) = listener else {
        client(port, 2, rounds, |fd, round| {
            let (end, got) = sys::recv_to_end(fd);
            end.ok();
            assert_eq!(got.len(), MUCH, "round {round}");
            data::verify(name(2, round), 9_000_000, &got);
        });
        c.log("all equal");
        return;
    };
    let mut fd = sys::accept4(listener, 0).ok();
    for round in 0..rounds {
        warm_up(fd, 2, round);
        let how = SEEN[round as usize % SEEN.len()];
        let bytes = data::pattern(name(2, round), 9_000_000, MUCH);
        let next = Cell::new(-1);
        let sent = beside_a_blocked(
            move || {
                // SAFETY: the vector's bytes.
                unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), 0) }
            },
            || {
                close_by(how, fd);
                next.set(next_connection(listener, 2, round));
            },
        );
        assert_eq!(sent, MUCH as isize, "round {round}: {how:?}");
        fd = next.get();
    }
    sys::close(fd).ok();
    c.log("all equal");
}

/// A thread waits for the connection by poll, select or epoll_wait. The connection is closed, and a file gets its
/// fd, which the wait does not touch.
pub fn waiters(c: &Ctx) {
    /// ms of the wait, longer than a busy machine needs to get there.
    const MS: c_int = 400;
    let rounds = 4 * 3;
    let (listener, port) = c.listener(8);
    let Some(listener) = listener else {
        client(port, 3, rounds, |_, _| {});
        c.log("all equal");
        return;
    };
    let mut fd = sys::accept4(listener, 0).ok();
    for round in 0..rounds {
        warm_up(fd, 3, round);
        let how = SEEN[round as usize % SEEN.len()];
        let ep = epoll::create();
        epoll::ctl(ep, libc::EPOLL_CTL_ADD, fd, epoll::IN, 77).ok();
        let which = round / 4 % 3;
        let file = Cell::new(-1);
        let waited = beside_a_blocked(
            move || match which {
                0 => {
                    let mut set = libc::pollfd {
                        fd,
                        events: libc::POLLIN,
                        revents: 0,
                    };
                    call!(libc::poll(&raw mut set, 1, MS)).ok()
                }
                1 => {
                    let mut set: libc::fd_set = sys::zeroed();
                    let mut time = libc::timeval {
                        tv_sec: 0,
                        tv_usec: i64::from(MS) * 1000,
                    };
                    let none = std::ptr::null_mut();
                    // SAFETY: a set of the test's own.
                    unsafe { libc::FD_SET(fd, &raw mut set) };
                    call!(libc::select(fd + 1, &raw mut set, none, none, &raw mut time)).ok()
                }
                _ => epoll::wait(ep, 8, MS).1.len() as i32,
            },
            || {
                close_by(how, fd);
                file.set(tagged_file(round));
                check_file(file.get(), round);
            },
        );
        // At the end of their time poll and select look the fd up again, and a file can always be read.
        let expected = i32::from(which < 2);
        assert_eq!(waited, expected, "round {round}: {how:?}, wait {which}");
        check_file(file.get(), round);
        sys::close(file.get()).ok();
        // A set that was closed while a thread was in it is not confused with the next file of its fd either.
        let again = beside_a_blocked(
            move || epoll::wait(ep, 8, MS).1.len(),
            || {
                sys::close(ep).ok();
                let file = tagged_file(round);
                check_file(file, round);
                sys::close(file).ok();
            },
        );
        assert_eq!(again, 0, "round {round}");
        let me = name(3, round + 1);
        fd = sys::accept4(listener, 0).ok();
        expect_record(fd, me, 1_000_000);
        send_record(fd, me, 1_000_001);
    }
    sys::close(fd).ok();
    c.log("all equal");
}

/// Makes a file of one of the kinds, with its name in it.
fn tagged_file(round: u64) -> c_int {
    let fd = match round % 3 {
        0 => call!(libc::memfd_create(c"tagged".as_ptr(), 0)).ok(),
        1 => {
            let mut path = *b"/tmp/rdmasock-identity-XXXXXX\0";
            let fd = call!(libc::mkstemp(path.as_mut_ptr().cast())).ok();
            call!(libc::unlink(path.as_ptr().cast())).ok();
            fd
        }
        _ => {
            let dir = c"/tmp";
            let flags = libc::O_TMPFILE | libc::O_RDWR;
            call!(libc::open(dir.as_ptr(), flags, 0o600)).ok()
        }
    };
    let text = data::pattern(name(4, round), 0, RECORD);
    assert_eq!(sys::write(fd, &text).count(), RECORD);
    fd
}

/// Checks that the file holds the bytes that were written to it, and nothing else.
fn check_file(fd: c_int, round: u64) {
    let mut buf = [0u8; 2 * RECORD];
    call!(libc::lseek(fd, 0, libc::SEEK_SET)).ok();
    let n = sys::read(fd, &mut buf).count();
    let mut kind: libc::stat = sys::zeroed();
    call!(libc::fstat(fd, &raw mut kind)).ok();
    assert_eq!(n, RECORD, "round {round}: of {} bytes", kind.st_size);
    data::verify(name(4, round), 0, &buf[..n]);
    assert_eq!(kind.st_size, RECORD as i64, "round {round}");
}

/// A connection is closed where no library sees it, after a rest, and the next file gets its fd. Bytes written to
/// the file are in the file; the peer of the connection gets EOF, and nothing else.
pub fn files(c: &Ctx) {
    let rounds = 240;
    let ways = [Close::Inline, Close::Syscall, Close::Libc];
    let (listener, port) = c.listener(8);
    let Some(listener) = listener else {
        client(port, 5, rounds, |fd, round| {
            let (_, got) = sys::recv_to_end(fd);
            assert!(got.is_empty(), "round {round}: {} bytes", got.len());
            // No process holds the connection any more, so the kernel refuses the send.
            let mut last = sys::send(fd, b"x", libc::MSG_NOSIGNAL);
            for _ in 0..1_000 {
                if last.failed() {
                    break;
                }
                sys::pause_ms(1);
                last = sys::send(fd, b"x", libc::MSG_NOSIGNAL);
            }
            assert!(last.failed(), "round {round}: a closed connection takes bytes");
        });
        c.log("all equal");
        return;
    };
    let mut fd = sys::accept4(listener, 0).ok();
    for round in 0..rounds {
        warm_up(fd, 5, round);
        rest();
        close_by(ways[round as usize % ways.len()], fd);
        let file = tagged_file(round);
        check_file(file, round);
        fd = next_connection(listener, 5, round);
        check_file(file, round);
        sys::close(file).ok();
    }
    sys::close(fd).ok();
    c.log("all equal");
}

/// A connection in an epoll set is closed where no library sees it. The set no longer reports it, and its fd in the
/// set belongs to the next connection.
pub fn sets(c: &Ctx) {
    let rounds = 120;
    let (listener, port) = c.listener(8);
    let Some(listener) = listener else {
        client(port, 6, rounds, |fd, round| {
            // These bytes come too late for the old connection.
            let _ = sys::send(fd, &data::pattern(name(6, round), 0, RECORD), libc::MSG_NOSIGNAL);
        });
        c.log("all equal");
        return;
    };
    let ep = epoll::create();
    let mut fd = sys::accept4(listener, 0).ok();
    epoll::ctl(ep, libc::EPOLL_CTL_ADD, fd, epoll::IN, 0).ok();
    for round in 0..rounds {
        warm_up(fd, 6, round);
        // The set's reports of the connection are drained.
        while !epoll::wait(ep, 8, 0).1.is_empty() {}
        rest();
        let how = [Close::Inline, Close::Syscall][round as usize % 2];
        close_by(how, fd);
        // An event counter gets the fd first, and is in the set from then on.
        let counter = call!(libc::eventfd(7, 0)).ok();
        epoll::ctl(ep, libc::EPOLL_CTL_ADD, counter, epoll::IN, 1_000).ok();
        let reported = epoll::wait(ep, 8, 1_000).1;
        assert_eq!(reported, [(1_000, epoll::IN)], "round {round}: {how:?}");
        let mut count = [0u8; 8];
        assert_eq!(sys::read(counter, &mut count).count(), 8);
        assert_eq!(u64::from_ne_bytes(count), 7, "round {round}: {how:?}");
        sys::close(counter).ok();
        let next = sys::accept4(listener, 0).ok();
        epoll::ctl(ep, libc::EPOLL_CTL_ADD, next, epoll::IN, round + 1).ok();
        let me = name(6, round + 1);
        expect_record(next, me, 1_000_000);
        send_record(next, me, 1_000_001);
        for (data, _) in epoll::wait(ep, 8, 5).1 {
            assert_eq!(data, round + 1, "reported for a connection that is closed");
        }
        fd = next;
    }
    sys::close(fd).ok();
    sys::close(ep).ok();
    c.log("all equal");
}

/// Connections of the churn.
const CHURNED: u64 = 1_500;

/// Returns a record of the churn: the connection, the record's index, and their hash, as text. (The end of other
/// bytes may be held back where a marker may begin, and several threads receive here.)
fn churn_record(connection: u64, at: u64) -> Vec<u8> {
    let head = format!("{connection:08x}{at:08x}");
    let sum = data::hash(head.as_bytes()) as u32;
    format!("{head}{sum:08x}").into_bytes()
}

/// The connection that the victims use: its index among all, and its fd in the low bits. 0: none.
static CURRENT: AtomicU64 = AtomicU64::new(0);

/// A thread of the churn that makes one call after the other.
#[derive(Default)]
struct Victim {
    id: AtomicI32,
    is_inside: AtomicBool,
}

impl Victim {
    /// Waits until the call that the victim may be in has ended, or sleeps for good. A sleep on a lock on the way there
    /// does not count: no thread can know then that the call has begun.
    fn settle(&self) {
        let mut asleep = 0;
        while self.is_inside.load(Ordering::SeqCst) && asleep < 4 {
            thread::sleep(std::time::Duration::from_micros(100));
            let id = self.id.load(Ordering::SeqCst);
            let is_waiting = sys::is_asleep(id) && !sys::is_in_lock(id);
            asleep = if is_waiting { asleep + 1 } else { 0 };
        }
    }
}

/// One thread closes connections in every way and fills their fds with files, socket pairs and the next connections.
/// Meanwhile other threads are in every call that receives or waits. Each call gets bytes of the connection that it
/// began on, and a file keeps its bytes.
pub fn churn(c: &Ctx) {
    let (listener, port) = c.listener(8);
    let Some(listener) = listener else {
        churn_client(port);
        c.log("all whole");
        return;
    };
    let is_over = &AtomicBool::new(false);
    let victims: [Victim; 3] = Default::default();
    thread::scope(|s| {
        for (seed, victim) in victims.iter().enumerate() {
            s.spawn(move || {
                victim.id.store(sys::thread_id(), Ordering::SeqCst);
                let mut rng = data::Rng::new(seed as u64);
                let ep = epoll::create();
                while !is_over.load(Ordering::SeqCst) {
                    // This comes first, so that the thread that takes the connection away sees it.
                    victim.is_inside.store(true, Ordering::SeqCst);
                    let current = CURRENT.load(Ordering::SeqCst);
                    if current != 0 {
                        churn_call(current, ep, &mut rng);
                    }
                    victim.is_inside.store(false, Ordering::SeqCst);
                    thread::yield_now();
                }
                sys::close(ep).ok();
            });
        }
        let mut rng = data::Rng::new(99);
        for round in 1..=CHURNED {
            let fd = sys::accept4(listener, 0).ok();
            CURRENT.store(round << 32 | fd as u64, Ordering::SeqCst);
            // Some connections get long enough for a link, most for a part of the way there.
            let us = match rng.below(4) {
                0 => 3_000,
                1 => 900,
                _ => rng.below(500),
            };
            thread::sleep(std::time::Duration::from_micros(us));
            CURRENT.store(0, Ordering::SeqCst);
            victims.iter().for_each(Victim::settle);
            if rng.below(2) == 0 {
                let _ = call!(libc::shutdown(fd, libc::SHUT_RDWR));
            }
            let how = EVERY[rng.below(EVERY.len() as u64) as usize];
            close_by(how, fd);
            if how == Close::Inline {
                rest();
            }
            fill_number(round, rng.below(3));
        }
        is_over.store(true, Ordering::SeqCst);
        sys::close(listener).ok();
    });
    c.log("all whole");
}

/// Gives the fd that has become free to a file, or a socket pair, for a moment.
fn fill_number(round: u64, what: u64) {
    match what {
        0 => {
            let file = tagged_file(round);
            check_file(file, round);
            sys::close(file).ok();
        }
        1 => {
            let mut pair = [0; 2];
            let (domain, kind) = (libc::AF_UNIX, libc::SOCK_STREAM);
            call!(libc::socketpair(domain, kind, 0, pair.as_mut_ptr())).ok();
            assert_eq!(sys::write(pair[0], b"pair").count(), 4);
            let mut got = [0; 8];
            assert_eq!(sys::read(pair[1], &mut got).count(), 4);
            assert_eq!(&got[..4], b"pair");
            for fd in pair {
                sys::close(fd).ok();
            }
        }
        _ => {}
    }
}

/// Makes one call on the connection, which may be closed while the call waits.
fn churn_call(current: u64, ep: c_int, rng: &mut data::Rng) {
    let (round, fd) = (current >> 32, current as u32 as c_int);
    let which = rng.below(RECEIVERS as u64 + 4) as usize;
    if which < RECEIVERS {
        let mut buf = [0; RECORD];
        let n = receive(which, fd, &mut buf);
        if n > 0 {
            let text = String::from_utf8_lossy(&buf);
            let at = text.get(8..16).and_then(|at| u64::from_str_radix(at, 16).ok());
            let expected = churn_record(round, at.unwrap_or_default());
            assert!(buf[..] == expected, "call {which} of {round} got {n}: {text}");
        }
    } else if which == RECEIVERS {
        let mut poll = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let _ = call!(libc::poll(&raw mut poll, 1, 2));
    } else if which == RECEIVERS + 1 {
        let _ = epoll::ctl(ep, libc::EPOLL_CTL_ADD, fd, epoll::IN, round);
        let _ = epoll::wait(ep, 4, 2);
    } else if which == RECEIVERS + 2 {
        let _ = epoll::wait(ep, 4, 2);
    } else {
        let mut n: c_int = 0;
        let _ = call!(libc::ioctl(fd, libc::FIONREAD, &raw mut n));
    }
}

/// Sends records on one connection after the other, each until it is closed. Returns when a connect is refused.
fn churn_client(port: u16) {
    let mut connection = 0;
    loop {
        let fd = sys::tcp(libc::AF_INET);
        if sys::connect(fd, &Addr::v4(port)).failed() {
            sys::close(fd).ok();
            return;
        }
        connection += 1;
        let mut at = 0;
        while sys::send(fd, &churn_record(connection, at), libc::MSG_NOSIGNAL).value > 0 {
            at += 1;
            if at % 16 == 0 {
                thread::sleep(std::time::Duration::from_micros(50));
            }
        }
        sys::close(fd).ok();
    }
}
