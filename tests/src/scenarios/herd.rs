//! Threads that are woken, and threads that are not, when many threads sleep on connections to one program. A message
//! wakes the thread that it is for and few others. No thread depends on another's signal handler. The library's own
//! thread does not wake beside a thread that sends without a pause.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread;
use std::time::Instant;

use libc::{EPOLL_CTL_ADD, c_int};

use super::epoll::{IN, create, ctl, wait};
use crate::ctx::Ctx;
use crate::sys;

/// Connections of the server, with one thread for each.
const THREADS: usize = 24;
/// Messages to each connection, one at a time, that are not counted: the connection leaves TCP.
const WARM: usize = 8;
/// Counted messages, to one connection after the other.
const ROUNDS: usize = 12;
/// Context switches of a process that each message may cost: the kernel's one, and few more.
const SWITCHES_A_MESSAGE: u64 = 4;
/// ms of the pause before each message, far longer than the threads need for the message before.
const REST_MS: u64 = 1;
const AT_MOST_MS: c_int = 20_000;

/// A wait for the next byte of a connection. False if the byte does not come in time.
type Wait = fn(c_int) -> bool;

fn receives(fd: c_int) -> bool {
    let mut byte = [0];
    sys::recv(fd, &mut byte, libc::MSG_PEEK).value == 1
}

fn polls(fd: c_int) -> bool {
    sys::poll_one(fd, libc::POLLIN, AT_MOST_MS) == libc::POLLIN
}

/// Waits on a set of the thread's own.
fn waits_on_a_set(fd: c_int) -> bool {
    thread_local! {
        static SET: std::cell::OnceCell<c_int> = const { std::cell::OnceCell::new() };
    }
    SET.with(|set| {
        let set = set.get_or_init(|| {
            let set = create();
            ctl(set, EPOLL_CTL_ADD, fd, IN, fd as u64).ok();
            set
        });
        wait(*set, 1, AT_MOST_MS).1.len() == 1
    })
}

/// Returns the voluntary context switches of this process so far, or of this thread: each is a sleep.
fn sleeps(of: c_int) -> u64 {
    let mut usage: libc::rusage = sys::zeroed();
    call!(libc::getrusage(of, &mut usage)).ok();
    usage.ru_nvcsw as u64
}

fn ask(fd: c_int) {
    sys::send_all(fd, b"?").ok();
    assert_eq!(sys::recv_exact(fd, 1), b"!");
}

fn answer(fd: c_int, waits: impl Fn(c_int) -> bool) -> bool {
    assert!(waits(fd), "no wake-up");
    if sys::recv_exact(fd, 1) != b"?" {
        return false;
    }
    sys::send_all(fd, b"!").ok();
    true
}

/// Sends one message at a time, to one thread after the other.
fn one_at_a_time(c: &Ctx, waits: Wait) {
    let all = c.connections(THREADS);
    if !c.is_server() {
        for fd in &all {
            (0..WARM).for_each(|_| ask(*fd));
        }
        c.sync("warm");
        for _ in 0..ROUNDS {
            for fd in &all {
                sys::pause_ms(REST_MS);
                ask(*fd);
            }
        }
        c.sync("counted");
        all.iter().for_each(|fd| {
            sys::send_all(*fd, b".").ok();
        });
        return;
    }
    thread::scope(|s| {
        for fd in &all {
            s.spawn(|| while answer(*fd, waits) {});
        }
        c.sync("warm");
        let before = sleeps(libc::RUSAGE_SELF);
        c.sync("counted");
        let each = (sleeps(libc::RUSAGE_SELF) - before) / (ROUNDS * THREADS) as u64;
        c.log(format_args!("few sleeps a message: {}", each <= SWITCHES_A_MESSAGE));
        if each > SWITCHES_A_MESSAGE {
            c.log(each);
        }
    });
}

/// The threads wait in recv().
pub fn receive(c: &Ctx) {
    one_at_a_time(c, receives);
}

/// The threads wait in poll().
pub fn poll(c: &Ctx) {
    one_at_a_time(c, polls);
}

/// The threads wait in epoll_wait(), each on its own set.
pub fn epoll(c: &Ctx) {
    one_at_a_time(c, waits_on_a_set);
}

static RELEASED: AtomicBool = AtomicBool::new(false);
static HELD: AtomicU32 = AtomicU32::new(0);

extern "C" fn hold(_: c_int) {
    HELD.fetch_add(1, SeqCst);
    while !RELEASED.load(SeqCst) {
        sys::pause_ms(1);
    }
}

/// This many ms after the last message the library's service thread no longer watches the connection's device
/// (docs/protocol.md, P80). Only the threads themselves can notice the next message.
const QUIET_MS: u64 = 3_500;

/// Threads wait in recv(), poll() or epoll_wait(). A signal handler then holds all but one of them until that one has
/// answered.
pub fn under_handlers(c: &Ctx) {
    // This thread waits in recv(); the first thread polls.
    const FREE: usize = THREADS - 3;
    let all = c.connections(THREADS);
    if !c.is_server() {
        for fd in &all {
            (0..WARM).for_each(|_| ask(*fd));
        }
        c.sync("warm");
        c.sync("held");
        ask(all[FREE]);
        c.sync("answered");
        all.iter().for_each(|fd| {
            ask(*fd);
            sys::send_all(*fd, b".").ok();
        });
        return;
    }
    sys::on_signal(libc::SIGUSR1, hold, true);
    thread::scope(|s| {
        const WAYS: [Wait; 3] = [receives, polls, waits_on_a_set];
        let threads: Vec<_> = all
            .iter()
            .zip(WAYS.into_iter().cycle())
            .map(|(fd, waits)| {
                let (tell, told) = std::sync::mpsc::channel();
                s.spawn(move || {
                    let me = call!(libc::pthread_self()).value as libc::pthread_t;
                    tell.send((me, sys::thread_id())).unwrap();
                    // The signal ends a poll.
                    while answer(*fd, |fd| waits(fd) || waits(fd)) {}
                });
                told.recv().unwrap()
            })
            .collect();
        c.sync("warm");
        sys::pause_ms(QUIET_MS);
        for (at, (thread, id)) in threads.iter().enumerate() {
            sys::wait_asleep(*id);
            if at != FREE {
                call!(libc::pthread_kill(*thread, libc::SIGUSR1)).ok();
            }
        }
        while HELD.load(SeqCst) < THREADS as u32 - 1 {
            sys::pause_ms(1);
        }
        c.sync("held");
        c.sync("answered");
        RELEASED.store(true, SeqCst);
    });
    c.log("all were answered");
}

/// Sends of a bulk transfer, and bytes of one.
const SENDS: usize = 32_768;
const SEND: usize = 16 * 1024;
/// Other threads may sleep once for this many sends. Periodic checks may add one sleep for each `MS_A_SLEEP` ms.
const SENDS_A_SLEEP: usize = 64;
const MS_A_SLEEP: u64 = 10;
/// The number of a sender's pauses; their length in ms, enough for the library's own thread to watch the connection
/// again; and the sleeps for one pause until that thread stops.
const RESTS: usize = 16;
const AT_REST_MS: u64 = 100;
const SLEEPS_A_REST: usize = 64;

/// Sends without a pause to a reader that waits with buffers (direct transfers): many completions, and hardly a
/// sleep. Other threads may sleep at most `most` times, and once for each `MS_A_SLEEP` ms.
fn busily(c: &Ctx, bulks: usize, sends: usize, most: usize) {
    let fd = c.pair();
    let buffer = [7; SEND];
    if c.is_server() {
        c.sync("bulk");
        (0..bulks * sends).for_each(|_| assert_eq!(sys::recv_exact(fd, SEND), buffer));
        return;
    }
    let others = || sleeps(libc::RUSAGE_SELF) - sleeps(libc::RUSAGE_THREAD);
    c.sync("bulk");
    let (before, begun) = (others(), Instant::now());
    for bulk in 0..bulks {
        if bulk > 0 {
            sys::pause_ms(AT_REST_MS);
        }
        (0..sends).for_each(|_| {
            sys::send_all(fd, &buffer).ok();
        });
    }
    let sleeps = others() - before;
    let most = most as u64 + begun.elapsed().as_millis() as u64 / MS_A_SLEEP;
    c.log(format_args!("other threads rest: {}", sleeps <= most));
    if sleeps > most {
        c.log(format_args!("{sleeps} sleeps of {most}"));
    }
}

/// The sender makes no pause.
pub fn busy_sender(c: &Ctx) {
    busily(c, 1, SENDS, SENDS / SENDS_A_SLEEP);
}

/// The sender pauses now and then.
pub fn busy_sender_rests(c: &Ctx) {
    busily(c, 1 + RESTS, SENDS / 4, RESTS * SLEEPS_A_REST);
}
