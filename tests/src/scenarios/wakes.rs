//! Threads that enter each kind of wait at each moment of a promotion, of a demotion and of a hand-over: short
//! dialogues on new connections. Every message has to end a wait, and no event may be reported that was not
//! registered. `tests/wakes.rs` plays them with threads held up in between.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, c_int};

use super::epoll::{ET, IN, ONESHOT, OUT, create, ctl, log_wait, wait};
use crate::ctx::Ctx;
use crate::{data, sys};

/// Connections one after the other, and messages each way on each.
const CONNECTIONS: usize = 4;
const MESSAGES: usize = 24;
/// Connections of [`successor`], one after the other.
const SUCCESSORS: usize = 48;
/// The message before which one end takes the connection off its link.
const DEMOTED_AT: usize = 16;
/// In ms: a wait that is not ended within this time never ends.
const AT_MOST_MS: c_int = 5_000;
const LEN: usize = 4;

/// In ms: long enough for a promotion while the other end, whose threads may be held up, waits.
const THINKING_MS: u64 = 15;

/// Pauses before an answer, in the messages after which a connection is promoted or demoted.
fn think(message: usize) {
    if (1..4).contains(&message) || (DEMOTED_AT..DEMOTED_AT + 2).contains(&message) {
        sys::pause_ms(THINKING_MS);
    }
}

/// A wait until a connection can be read. False if it has not ended in time.
type Wait = Box<dyn FnMut() -> bool>;

/// The dialogues of both ends. For each new connection, `prepare` returns the wait that the end uses.
fn talk(c: &Ctx, prepare: impl Fn(c_int) -> Wait) {
    let (listener, port) = c.listener(16);
    for connection in 0..CONNECTIONS {
        let fd = match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&sys::Addr::v4(port)),
        };
        let mut wait = prepare(fd);
        for message in 0..MESSAGES {
            if message == DEMOTED_AT && (connection % 2 == 0) == c.is_server() {
                leave_link(fd, connection);
            }
            if !c.is_server() {
                say(fd, message);
            }
            assert!(wait(), "no wake-up: connection {connection}, message {message}");
            let there = [
                i64::from(sys::readable_bytes(fd)),
                sys::recv(fd, &mut [0; LEN], libc::MSG_PEEK | libc::MSG_DONTWAIT).value,
            ];
            assert_eq!(
                there, [LEN as i64; 2],
                "woken for nothing: connection {connection}, message {message}"
            );
            assert_eq!(sys::recv_exact(fd, LEN), [message as u8; LEN]);
            if c.is_server() {
                think(message);
                say(fd, message);
            }
        }
        drop(wait);
        sys::close(fd).ok();
    }
    c.log("every message has ended a wait");
}

/// Sends a message when there is room for it. (Between hosts a send that does not wait may find none for a moment while
/// the connection leaves its link: docs/limits.md.)
fn say(fd: c_int, message: usize) {
    assert_eq!(
        sys::poll_one(fd, libc::POLLOUT, AT_MOST_MS),
        libc::POLLOUT,
        "no room: message {message}"
    );
    let bytes = [message as u8; LEN];
    if (DEMOTED_AT..DEMOTED_AT + 2).contains(&message) {
        sys::send_all(fd, &bytes).ok();
    } else {
        let sent = sys::send(fd, &bytes, libc::MSG_DONTWAIT).value;
        assert_eq!(sent, LEN as i64, "no room after all: message {message}");
    }
}

/// Takes the connection off its link. The program asks for the bytes in a way that only TCP serves, or has a child
/// that holds the connection too for a moment.
fn leave_link(fd: c_int, connection: usize) {
    if connection < CONNECTIONS / 2 {
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, LEN as c_int).ok();
    } else {
        assert_eq!(sys::wait_child(sys::fork_child(|| 0)), 0);
    }
}

/// Waits in poll().
pub fn poll(c: &Ctx) {
    talk(c, |fd| {
        Box::new(move || sys::poll_one(fd, libc::POLLIN, AT_MOST_MS) == libc::POLLIN)
    });
}

/// Waits in select().
pub fn select(c: &Ctx) {
    talk(c, |fd| Box::new(move || is_selected(fd)));
}

fn is_selected(fd: c_int) -> bool {
    let mut set: libc::fd_set = sys::zeroed();
    // SAFETY: the fd is far below FD_SETSIZE.
    unsafe { libc::FD_SET(fd, &mut set) };
    let mut time = libc::timeval {
        tv_sec: i64::from(AT_MOST_MS) / 1000,
        tv_usec: 0,
    };
    let null = std::ptr::null_mut();
    call!(libc::select(fd + 1, &mut set, null, null, &mut time)).value == 1
}

/// Waits in a receiving call.
pub fn receive(c: &Ctx) {
    talk(c, |fd| {
        let time = std::time::Duration::from_millis(AT_MOST_MS as u64);
        sys::set_timeout(fd, libc::SO_RCVTIMEO, time);
        Box::new(move || sys::recv(fd, &mut [0; LEN], libc::MSG_PEEK).value > 0)
    });
}

/// An epoll set of the wait's own; closed with the wait.
struct Owned(c_int);

impl Owned {
    /// (By this call a closure captures the whole value, not the fd alone.)
    fn fd(&self) -> c_int {
        self.0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        sys::close(self.0).ok();
    }
}

fn set_of(fd: c_int, events: u32) -> Owned {
    let set = Owned(create());
    ctl(set.fd(), EPOLL_CTL_ADD, fd, events, fd as u64).ok();
    set
}

/// Waits on a set. Returns whether it reported the connection; panics if it reported anything else.
fn reports(set: c_int, fd: c_int) -> bool {
    let (_, events) = wait(set, 8, AT_MOST_MS);
    assert!(
        events.iter().all(|(data, _)| *data == fd as u64),
        "reported, and never registered: {events:x?}"
    );
    if events != [(fd as u64, IN)] {
        eprintln!("{events:x?}");
    }
    events == [(fd as u64, IN)]
}

/// Waits in epoll_wait().
pub fn epoll(c: &Ctx) {
    talk(c, |fd| {
        let set = set_of(fd, IN);
        Box::new(move || reports(set.fd(), fd))
    });
}

/// Waits in epoll_wait(), once for each edge. (A connection that changes between the kernel's set and the library's
/// may have more edges.)
pub fn edge(c: &Ctx) {
    talk(c, |fd| {
        let set = set_of(fd, IN | ET);
        Box::new(move || {
            while reports(set.fd(), fd) {
                if sys::readable_bytes(fd) >= LEN as c_int {
                    return true;
                }
            }
            false
        })
    });
}

/// Many short connections, each waited for in an epoll set of its own. The next connection is there while the library
/// still has work left for the one before: it gets the same fd, and nothing of that work.
pub fn successor(c: &Ctx) {
    let (listener, port) = c.listener(16);
    for connection in 0..SUCCESSORS {
        let fd = match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&sys::Addr::v4(port)),
        };
        let set = set_of(fd, IN);
        for message in 0..3 {
            if !c.is_server() {
                say(fd, message);
            }
            assert!(
                reports(set.fd(), fd),
                "no wake-up: connection {connection}, message {message}"
            );
            assert_eq!(sys::recv_exact(fd, LEN), [message as u8; LEN]);
            if c.is_server() {
                sys::pause_ms((connection % 8) as u64);
                say(fd, message);
            }
        }
        drop(set);
        sys::close(fd).ok();
    }
    c.log("every message has ended a wait");
}

/// Waits in epoll_wait(), armed again for each message.
pub fn oneshot(c: &Ctx) {
    talk(c, |fd| {
        let set = set_of(fd, 0);
        Box::new(move || {
            ctl(set.fd(), EPOLL_CTL_MOD, fd, IN | ONESHOT, fd as u64).ok();
            reports(set.fd(), fd)
        })
    });
}

/// Waits in epoll_wait(), where the connection is added for each message, and removed again.
pub fn added(c: &Ctx) {
    talk(c, |fd| {
        let set = Owned(create());
        Box::new(move || {
            ctl(set.fd(), EPOLL_CTL_ADD, fd, IN, fd as u64).ok();
            let is_reported = reports(set.fd(), fd);
            ctl(set.fd(), EPOLL_CTL_DEL, fd, 0, 0).ok();
            is_reported
        })
    });
}

/// Waits in epoll_wait(), while the connection is in a second set on which no thread waits.
pub fn two_sets(c: &Ctx) {
    talk(c, |fd| {
        let (set, other) = (set_of(fd, IN), set_of(fd, OUT));
        Box::new(move || other.fd() >= 0 && reports(set.fd(), fd))
    });
}

/// Waits in epoll_wait() on a set that holds the connection's set.
pub fn nested(c: &Ctx) {
    talk(c, |fd| {
        let inner = set_of(fd, IN);
        let outer = set_of(inner.fd(), IN);
        Box::new(move || {
            // The inner set may no longer be ready when it is asked, as in the kernel.
            while reports(outer.fd(), inner.fd()) {
                let (_, events) = wait(inner.fd(), 8, 0);
                if !events.is_empty() {
                    return events == [(fd as u64, IN)];
                }
            }
            false
        })
    });
}

/// Waits in poll() on the connection's set.
pub fn polled_set(c: &Ctx) {
    talk(c, |fd| {
        let set = set_of(fd, IN);
        Box::new(move || {
            while sys::poll_one(set.fd(), libc::POLLIN, AT_MOST_MS) == libc::POLLIN {
                let (_, events) = wait(set.fd(), 8, 0);
                if !events.is_empty() {
                    return events == [(fd as u64, IN)];
                }
            }
            false
        })
    });
}

/// Two threads in epoll_wait() on one set. One of them leaves in the middle of the dialogue; the other gets the rest.
pub fn two_waiters(c: &Ctx) {
    talk(c, |fd| {
        let set = set_of(fd, IN | ONESHOT);
        let mut left = MESSAGES;
        Box::new(move || {
            left -= 1;
            let threads = if left > MESSAGES / 2 { 2 } else { 1 };
            let found = AtomicUsize::new(0);
            std::thread::scope(|s| {
                for _ in 0..threads {
                    s.spawn(|| {
                        while found.load(SeqCst) == 0 {
                            let (_, events) = wait(set.fd(), 8, 20);
                            let is_other = |(data, _): &(u64, u32)| *data != fd as u64;
                            assert!(!events.iter().any(is_other), "{events:x?}");
                            found.fetch_add(events.len(), SeqCst);
                        }
                    });
                }
            });
            ctl(set.fd(), EPOLL_CTL_MOD, fd, IN | ONESHOT, fd as u64).ok();
            found.into_inner() == 1
        })
    });
}

/// Runs a client whose every message comes back.
fn be_answered(port: u16) {
    let fd = sys::connected(&sys::Addr::v4(port));
    for message in 0..MESSAGES {
        sys::send_all(fd, &[message as u8; LEN]).ok();
        assert_eq!(sys::recv_exact(fd, LEN), [message as u8; LEN]);
    }
    sys::close(fd).ok();
}

/// Two threads in a receiving call. The first gets one message and leaves; the other gets the rest.
pub fn two_receivers(c: &Ctx) {
    let (listener, port) = c.listener(16);
    for connection in 0..CONNECTIONS {
        let Some(listener) = listener else {
            be_answered(port);
            continue;
        };
        let fd = sys::accept4(listener, 0).ok();
        let time = std::time::Duration::from_millis(AT_MOST_MS as u64);
        sys::set_timeout(fd, libc::SO_RCVTIMEO, time);
        let answered = AtomicUsize::new(0);
        let answer = |messages: usize| {
            for _ in 0..messages {
                let mut bytes = [0; LEN];
                let n = sys::recv(fd, &mut bytes, 0);
                if answered.load(SeqCst) == MESSAGES {
                    return;
                }
                assert_eq!(n.value, LEN as i64, "no wake-up: connection {connection}");
                think(answered.fetch_add(1, SeqCst));
                sys::send_all(fd, &bytes).ok();
            }
        };
        std::thread::scope(|s| {
            for turns in [connection + 2, MESSAGES] {
                s.spawn(move || answer(turns));
            }
        });
        sys::close(fd).ok();
    }
    c.log("every message has ended a wait");
}

/// ms that a thread which is about to sleep gets to reach a point where it may be held up, and ms to go on from there.
const ON_ITS_WAY_MS: u64 = 3;
const ASLEEP_MS: u64 = 15;
/// Rounds of one wait each; the first waits are held up.
const ROUNDS: usize = 10;

/// A thread receives. Another thread takes the bytes that come while it is on its way to sleep, and leaves it the next.
pub fn data_taken(c: &Ctx) {
    let fd = c.pair();
    let ask = || sys::send_all(fd, b"?").ok();
    if c.is_server() {
        let time = std::time::Duration::from_millis(AT_MOST_MS as u64);
        sys::set_timeout(fd, libc::SO_RCVTIMEO, time);
        for round in 0..ROUNDS {
            std::thread::scope(|s| {
                let receiver = s.spawn(|| sys::recv(fd, &mut [0; LEN], 0));
                sys::pause_ms(ON_ITS_WAY_MS);
                ask();
                let is_taken = loop {
                    if receiver.is_finished() {
                        break false;
                    }
                    if sys::recv(fd, &mut [0; LEN], libc::MSG_DONTWAIT).value > 0 {
                        break true;
                    }
                };
                if is_taken {
                    sys::pause_ms(ASLEEP_MS);
                    ask();
                }
                let got = receiver.join().unwrap();
                assert_eq!(got.value, LEN as i64, "no wake-up: round {round}, {got}");
            });
        }
        c.log("every wait has ended");
    } else {
        be_asked(fd);
    }
    c.close(fd);
}

/// A thread receives. The bytes come while the connection is added to an epoll set under a second fd,
/// or removed again, which changes nothing for the thread.
pub fn set_changed(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let time = std::time::Duration::from_millis(AT_MOST_MS as u64);
        sys::set_timeout(fd, libc::SO_RCVTIMEO, time);
        let set = set_of(fd, IN);
        let second = call!(libc::dup(fd)).ok();
        for round in 0..ROUNDS {
            let change = [EPOLL_CTL_ADD, EPOLL_CTL_DEL][round % 2];
            std::thread::scope(|s| {
                let receiver = s.spawn(|| sys::recv(fd, &mut [0; LEN], 0));
                sys::pause_ms(ASLEEP_MS);
                sys::send_all(fd, b"?").ok();
                ctl(set.fd(), change, second, IN, 0).ok();
                let got = receiver.join().unwrap();
                assert_eq!(got.value, LEN as i64, "no wake-up: round {round}, {got}");
            });
        }
        c.log("every wait has ended");
        sys::close(second).ok();
    } else {
        be_asked(fd);
    }
    c.close(fd);
}

/// Waits in epoll_wait() for room, once for each edge, in a sender that fills its link as soon as it is on one. The
/// reader's end may not know the stream's vQPN there yet.
pub fn filled_at_once(c: &Ctx) {
    // With small buffers TCP holds few bytes when the link is there, and the link is full as soon. After the first
    // turns the peer's messages would show how far this end has read.
    const BUFFER: c_int = 16 << 10;
    const LEN: usize = 2 << 20;
    const PIECE: usize = 32 << 10;
    const TURNS: usize = 2 * PIECE;
    const PAUSE: std::time::Duration = std::time::Duration::from_micros(200);
    let time = std::time::Duration::from_millis(AT_MOST_MS as u64);
    let bytes = data::pattern(1, 0, LEN);
    // The first connection keeps the link's first vQPN.
    for (connection, fd) in c.connections(1 + CONNECTIONS).into_iter().enumerate() {
        sys::set_timeout(fd, libc::SO_RCVTIMEO, time);
        for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
            sys::set_int(fd, libc::SOL_SOCKET, option, BUFFER).ok();
        }
        if c.is_server() {
            let set = set_of(fd, OUT | ET);
            let mut sent = 0;
            while sent < LEN {
                let n = sys::send(fd, &bytes[sent..LEN.min(sent + PIECE)], libc::MSG_DONTWAIT);
                if n.is(libc::EAGAIN) {
                    let (_, events) = wait(set.fd(), 1, AT_MOST_MS);
                    let where_it_is = format!("connection {connection}, {sent} bytes sent");
                    assert!(!events.is_empty(), "no wake-up: {where_it_is}");
                    continue;
                }
                sent += n.count();
                if sent < LEN / 2 {
                    sys::recv(fd, &mut [0; 64], libc::MSG_DONTWAIT);
                }
            }
            let mut answer = [0; 64];
            while !answer.contains(&2) {
                let n = sys::recv(fd, &mut answer, 0).value;
                assert!(n > 0, "no answer: connection {connection}");
            }
        } else {
            let (mut got, mut piece) = (0, vec![0; PIECE]);
            while got < LEN {
                let n = sys::recv(fd, &mut piece, 0).count();
                assert!(n > 0, "nothing comes: connection {connection}, {got} bytes read");
                assert!(piece[..n] == bytes[got..got + n]);
                got += n;
                if got < TURNS {
                    sys::send_all(fd, &[1]).ok();
                }
                std::thread::sleep(PAUSE);
            }
            sys::send_all(fd, &[2]).ok();
        }
    }
    c.log("all of it has come");
}

/// Runs a client that answers each byte, after a moment.
fn be_asked(fd: c_int) {
    while sys::recv(fd, &mut [0], 0).value > 0 {
        sys::pause_ms(1);
        sys::send_all(fd, &[1; LEN]).ok();
    }
}

/// A thread waits for room. Another thread uses the room that comes while it is on its way to sleep, before there
/// is more.
pub fn room_taken(c: &Ctx) {
    const SOME: usize = 1 << 20;
    let fd = c.pair();
    for round in 0..ROUNDS {
        if c.is_server() {
            let time = std::time::Duration::from_millis(AT_MOST_MS as u64);
            sys::set_timeout(fd, libc::SO_SNDTIMEO, time);
            let fill = || {
                let mut sent = 0;
                loop {
                    let n = sys::send(fd, &[2; 1 << 16], libc::MSG_DONTWAIT).value;
                    if n <= 0 {
                        return sent;
                    }
                    sent += n;
                }
            };
            fill();
            std::thread::scope(|s| {
                let sender = s.spawn(|| sys::send(fd, &[3; LEN], 0));
                sys::pause_ms(ON_ITS_WAY_MS);
                c.sync("some");
                // The kernel need not make room for so small a read.
                for _ in 0..ASLEEP_MS {
                    if sender.is_finished() || fill() > 0 {
                        break;
                    }
                    sys::pause_ms(1);
                }
                sys::pause_ms(ASLEEP_MS);
                c.sync("all");
                let sent = sender.join().unwrap();
                assert_eq!(sent.value, LEN as i64, "no wake-up: round {round}, {sent}");
            });
            sys::send_all(fd, &[4]).ok();
        } else {
            c.sync("some");
            sys::recv_up_to(fd, SOME);
            c.sync("all");
            let mut bytes = vec![0; SOME];
            loop {
                let n = sys::recv(fd, &mut bytes, 0).count();
                if n == 0 || bytes[..n].contains(&4) {
                    break;
                }
            }
        }
        c.sync("read");
    }
    c.log("every wait has ended");
    c.close(fd);
}

/// Three threads in epoll_wait() on one set, each of which leaves after its share; the remaining ones get the rest.
pub fn crowd(c: &Ctx) {
    const EACH: usize = MESSAGES / 3;
    let (listener, port) = c.listener(16);
    for connection in 0..CONNECTIONS {
        let Some(listener) = listener else {
            be_answered(port);
            continue;
        };
        let fd = sys::accept4(listener, 0).ok();
        let set = set_of(fd, IN | ONESHOT);
        let answered = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for thread in 0..3 {
                let (set, answered) = (&set, &answered);
                s.spawn(move || {
                    for _ in 0..EACH {
                        assert!(
                            reports(set.fd(), fd),
                            "no wake-up: connection {connection}, thread {thread}"
                        );
                        let bytes = sys::recv_exact(fd, LEN);
                        think(answered.fetch_add(1, SeqCst));
                        ctl(set.fd(), EPOLL_CTL_MOD, fd, IN | ONESHOT, fd as u64).ok();
                        sys::send_all(fd, &bytes).ok();
                    }
                });
                // The messages come one after the other.
                sys::pause_ms(1);
            }
        });
        sys::close(fd).ok();
    }
    c.log("every message has ended a wait");
}

/// Waits in epoll_wait() on a set that a child waits on too; the child cannot use the connections that come later.
pub fn shared_set(c: &Ctx) {
    let set = Owned(create());
    let number = set.fd();
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    let [end, alive] = pipe;
    let child = sys::fork_child(|| {
        sys::close(alive).ok();
        while sys::poll_one(end, libc::POLLIN, 0) == 0 {
            let (_, events) = wait(number, 8, 20);
            if events.iter().any(|(data, _)| *data > 1000) {
                eprintln!("reported to the child: {events:x?}");
            }
            if !events.is_empty() {
                // The bytes are for the parent.
                sys::pause_ms(1);
            }
        }
        0
    });
    talk(c, move |fd| {
        ctl(number, EPOLL_CTL_ADD, fd, IN, fd as u64).ok();
        Box::new(move || reports(number, fd))
    });
    sys::close(alive).ok();
    c.log(format_args!("child {}", sys::wait_child(child)));
}

/// EPOLLONESHOT has fired when the connection leaves its link, and again when it ends: no event is reported before
/// it is armed again.
pub fn oneshot_over(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let set = set_of(fd, IN | ONESHOT);
        c.sync("armed");
        assert!(reports(set.fd(), fd));
        sys::recv_exact(fd, LEN);
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1).ok();
        c.sync("left");
        c.sync("reset");
        sys::wait_for(fd, libc::POLLIN);
        log_wait(c, set.fd(), 200);
        c.ret("arm", ctl(set.fd(), EPOLL_CTL_MOD, fd, IN | ONESHOT, 7));
        log_wait(c, set.fd(), AT_MOST_MS);
        log_wait(c, set.fd(), 0);
        c.ret("arm", ctl(set.fd(), EPOLL_CTL_MOD, fd, IN, 8));
        log_wait(c, set.fd(), AT_MOST_MS);
        c.ret("add", ctl(set.fd(), EPOLL_CTL_ADD, fd, IN, 9));
        c.ret("delete", ctl(set.fd(), EPOLL_CTL_DEL, fd, 0, 0));
        c.ret("again", ctl(set.fd(), EPOLL_CTL_DEL, fd, 0, 0));
        log_wait(c, set.fd(), 0);
        c.close(fd);
    } else {
        c.sync("armed");
        sys::send_all(fd, &[1; LEN]).ok();
        c.sync("left");
        let linger = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        let size = size_of::<libc::linger>() as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_LINGER);
        let value = std::ptr::from_ref(&linger).cast();
        call!(libc::setsockopt(fd, level, name, value, size)).ok();
        c.close(fd);
        c.sync("reset");
    }
}

/// A server that hands each connection to a child in the middle of a dialogue, when its peer may just have asked
/// for a promotion. The child reads none of the promotion's bytes.
pub fn forked(c: &Ctx) {
    let (listener, port) = c.listener(16);
    let echo = |fd: c_int, messages: std::ops::Range<usize>| {
        for message in messages {
            assert_eq!(sys::recv_exact(fd, LEN), [message as u8; LEN]);
            sys::send_all(fd, &[message as u8; LEN]).ok();
        }
    };
    for connection in 0..2 * CONNECTIONS {
        let Some(listener) = listener else {
            be_answered(port);
            continue;
        };
        let fd = sys::accept4(listener, 0).ok();
        let forks_at = 1 + connection % 4;
        echo(fd, 0..forks_at);
        // The question comes, and its answer is held up.
        sys::pause_ms(2);
        let child = sys::fork_child(|| {
            echo(fd, forks_at..MESSAGES);
            0
        });
        sys::close(fd).ok();
        c.log(format_args!("child {}", sys::wait_child(child)));
    }
}

extern "C" fn nothing(_: c_int) {}

/// A call on a connection while another thread puts a dead socket in its place and then sends a signal, as Java does
/// to close a socket. The call ends by the signal, or finds the dead socket.
pub fn replaced(c: &Ctx) {
    let (listener, port) = c.listener(16);
    let Some(listener) = listener else {
        for _ in 0..MESSAGES {
            let fd = sys::connected(&sys::Addr::v4(port));
            let mut byte = [0];
            while sys::recv(fd, &mut byte, 0).value == 1 {
                sys::send(fd, &byte, libc::MSG_NOSIGNAL);
            }
            sys::close(fd).ok();
        }
        return;
    };
    let mut pair = [-1; 2];
    call!(libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr())).ok();
    let [dead, other] = pair;
    sys::close(other).ok();
    sys::on_signal(libc::SIGUSR1, nothing, false);
    sys::on_signal(libc::SIGUSR2, nothing, true);
    for round in 0..MESSAGES {
        let fd = sys::accept4(listener, 0).ok();
        for message in 0..round / 3 {
            sys::send_all(fd, &[message as u8]).ok();
            assert_eq!(sys::recv_exact(fd, 1), [message as u8]);
            think(message);
        }
        let me = AtomicUsize::new(0);
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| {
                me.store(call!(libc::pthread_self()).value as usize, SeqCst);
                match round % 3 {
                    0 => sys::poll_one(fd, libc::POLLIN, -1).into(),
                    _ => sys::recv(fd, &mut [0; LEN], 0).value as c_int,
                }
            });
            while me.load(SeqCst) == 0 {
                std::thread::yield_now();
            }
            sys::pause_ms(if round % 2 == 0 { 0 } else { ON_ITS_WAY_MS });
            if round % 4 < 2 {
                call!(libc::shutdown(fd, libc::SHUT_WR)).ok();
            }
            call!(libc::dup2(dead, fd)).ok();
            let signal = if round % 3 == 1 { libc::SIGUSR2 } else { libc::SIGUSR1 };
            call!(libc::pthread_kill(me.load(SeqCst) as libc::pthread_t, signal)).ok();
            let begun = std::time::Instant::now();
            while !sleeper.is_finished() {
                let is_late = begun.elapsed().as_millis() > AT_MOST_MS as u128;
                assert!(!is_late, "sleeps on: round {round}");
                sys::pause_ms(1);
            }
            let got = sleeper.join().unwrap();
            assert!(round % 3 == 0 || got <= 0, "a byte that nobody has sent: round {round}");
        });
        sys::close(fd).ok();
    }
    c.log("every call has ended");
}
