//! Several threads on one connection or one epoll.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::thread;

use libc::c_int;

use super::epoll;
use super::epoll::{IN, ONESHOT, ctl, wait};
use crate::ctx::Ctx;
use crate::sys::Addr;
use crate::{data, sys};

/// Eight threads on one epoll with ONESHOT serve 40 connections.
pub fn eight_on_one_epoll(c: &Ctx) {
    const N: usize = 40;
    const ROUNDS: u64 = 10;
    let (listener, port) = c.listener(64);
    let Some(l) = listener else {
        let fds: Vec<_> = (0..N).map(|_| sys::connected(&Addr::v4(port))).collect();
        for round in 0..ROUNDS {
            for (i, fd) in fds.iter().enumerate() {
                sys::send_all(*fd, &data::pattern(i as u64, round * 700, 700)).ok();
            }
            for (i, fd) in fds.iter().enumerate() {
                assert!(sys::recv_exact(*fd, 700) == data::pattern(i as u64, round * 700, 700));
            }
        }
        c.log("all equal");
        return;
    };
    let ep = epoll::create();
    for _ in 0..N {
        let fd = sys::accept4(l, libc::SOCK_NONBLOCK).ok();
        ctl(ep, libc::EPOLL_CTL_ADD, fd, IN | ONESHOT, fd as u64).ok();
    }
    let (closed, bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                while closed.load(Ordering::Relaxed) < N {
                    for (fd, _) in wait(ep, 2, 50).1 {
                        let fd = fd as c_int;
                        let mut b = [0; 500];
                        let r = sys::recv(fd, &mut b, 0);
                        if r.is(libc::EAGAIN) {
                            // An early report of bytes that are not payload is not an error.
                        } else if r.value <= 0 {
                            sys::close(fd);
                            closed.fetch_add(1, Ordering::Relaxed);
                            continue;
                        } else {
                            sys::send_all(fd, &b[..r.count()]).ok();
                            bytes.fetch_add(r.count(), Ordering::Relaxed);
                        }
                        ctl(ep, libc::EPOLL_CTL_MOD, fd, IN | ONESHOT, fd as u64).ok();
                    }
                }
            });
        }
    });
    c.log(format_args!(
        "{} closed, {} bytes",
        closed.into_inner(),
        bytes.into_inner()
    ));
}

/// A thread sends while another receives, on both sides.
pub fn send_and_receive(c: &Ctx) {
    const LEN: u64 = 4 << 20;
    let fd = c.pair();
    thread::scope(|s| {
        s.spawn(|| {
            let mut at = 0;
            while at < LEN {
                sys::send_all(fd, &data::pattern(1, at, 4096)).ok();
                at += 4096;
            }
        });
        let mut at = 0;
        let mut b = vec![0; 10_000];
        while at < LEN {
            let n = sys::recv(fd, &mut b, 0).count();
            assert!(n > 0);
            data::verify(1, at, &b[..n]);
            at += n as u64;
        }
    });
    c.log("4 MiB each way");
    c.sync("done");
    c.close(fd);
}

/// Eight threads send records on one connection: none is torn or lost.
pub fn eight_senders(c: &Ctx) {
    const EACH: usize = 500;
    const RECORD: usize = 64;
    let fd = c.pair();
    if c.is_server() {
        let (_, got) = sys::recv_to_end(fd);
        let mut next = [0u64; 8];
        for record in got.chunks(RECORD) {
            let thread = usize::from(record[0]);
            assert!(
                record[1..] == data::pattern(thread as u64, next[thread], RECORD - 1)[..],
                "torn or out of order"
            );
            next[thread] += 1;
        }
        c.log(format_args!("records {next:?}"));
    } else {
        thread::scope(|s| {
            for t in 0..8u8 {
                s.spawn(move || {
                    for i in 0..EACH {
                        let mut record = vec![t];
                        record.extend(data::pattern(u64::from(t), i as u64, RECORD - 1));
                        // A blocking send of a small record is not split between others.
                        assert_eq!(sys::send(fd, &record, 0).count(), RECORD);
                    }
                });
            }
        });
        c.close(fd);
    }
}

/// Four threads receive from one connection: together they have every byte once.
pub fn four_receivers(c: &Ctx) {
    const LEN: usize = 1 << 20;
    let fd = c.pair();
    if c.is_server() {
        let totals: Vec<(usize, u64)> = thread::scope(|s| {
            let threads = [0; 4].map(|_| {
                s.spawn(|| {
                    let (mut n, mut sum) = (0, 0);
                    let mut b = vec![0; 3000];
                    loop {
                        let r = sys::recv(fd, &mut b, 0).count();
                        if r == 0 {
                            return (n, sum);
                        }
                        n += r;
                        sum += b[..r].iter().map(|b| u64::from(*b)).sum::<u64>();
                    }
                })
            });
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let n: usize = totals.iter().map(|t| t.0).sum();
        let sum: u64 = totals.iter().map(|t| t.1).sum();
        c.log(format_args!("{n} bytes, sum {sum}"));
    } else {
        for i in 0..LEN / 1024 {
            sys::send_all(fd, &data::pattern(3, i as u64 * 1024, 1024)).ok();
        }
        c.close(fd);
    }
}

/// A thread is blocked in recv when another shuts the connection down: EOF.
pub fn shutdown_wakes(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        thread::scope(|s| {
            s.spawn(|| c.recv(fd, 10, 0));
            sys::pause_ms(60);
            call!(libc::shutdown(fd, libc::SHUT_RDWR)).ok();
        });
        c.close(fd);
    } else {
        c.recv_to_end(fd);
    }
    c.sync("done");
}

/// A thread blocked in poll and one in epoll_wait when another shuts down.
pub fn shutdown_wakes_pollers(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = epoll::create();
        ctl(ep, libc::EPOLL_CTL_ADD, fd, IN, 1).ok();
        thread::scope(|s| {
            let poller = s.spawn(|| sys::poll_one(fd, libc::POLLIN, sys::SOON));
            let epoller = s.spawn(|| wait(ep, 1, sys::SOON).0.value);
            sys::pause_ms(60);
            call!(libc::shutdown(fd, libc::SHUT_RD)).ok();
            let readable = poller.join().unwrap() & libc::POLLIN != 0;
            c.log(format_args!("poll {readable} epoll {}", epoller.join().unwrap()));
        });
    }
    c.sync("done");
    c.close(fd);
}

/// A thread blocked in recv stays so when another closes the fd; data still reaches it.
pub fn close_does_not_wake(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let id = &AtomicI32::new(0);
        thread::scope(|s| {
            s.spawn(move || {
                id.store(sys::thread_id(), Ordering::Release);
                c.recv(fd, 10, 0)
            });
            while id.load(Ordering::Acquire) == 0 {
                sys::pause_ms(1);
            }
            sys::wait_asleep(id.load(Ordering::Acquire));
            sys::close(fd).ok();
            c.sync("closed");
        });
        c.ret("recv", sys::recv(fd, &mut [0; 4], 0));
        c.sync("done");
    } else {
        c.sync("closed");
        sys::pause_ms(30);
        c.send(fd, b"still", 0);
        c.sync("done");
    }
}

/// The function that pthread_create runs.
type ThreadFn = extern "C" fn(*mut libc::c_void) -> *mut libc::c_void;

/// More bytes than a connection of kernel TCP accepts from a sender whose peer does not read.
const MUCH_BYTES: usize = 32 * 1024 * 1024;

static CANCEL_FD: AtomicI32 = AtomicI32::new(-1);
extern "C" fn blocked_in_recv(_: *mut libc::c_void) -> *mut libc::c_void {
    let fd = CANCEL_FD.load(Ordering::Relaxed);
    let mut b = [0u8; 4];
    // SAFETY: the buffer is 4 bytes long. A plain call: no frame here has a destructor,
    // so that the cancellation's unwinding passes.
    unsafe { libc::recv(fd, b.as_mut_ptr().cast(), 4, 0) };
    std::ptr::null_mut()
}

extern "C" fn blocked_in_send(_: *mut libc::c_void) -> *mut libc::c_void {
    let fd = CANCEL_FD.load(Ordering::Relaxed);
    static MUCH: [u8; MUCH_BYTES] = [7; MUCH_BYTES];
    // SAFETY: `MUCH` has `MUCH_BYTES` bytes. A plain call, as above.
    unsafe { libc::send(fd, MUCH.as_ptr().cast(), MUCH_BYTES, 0) };
    std::ptr::null_mut()
}

extern "C" fn blocked_in_poll(_: *mut libc::c_void) -> *mut libc::c_void {
    let mut entry = libc::pollfd {
        fd: CANCEL_FD.load(Ordering::Relaxed),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry. A plain call, as above.
    unsafe { libc::poll(&mut entry, 1, -1) };
    std::ptr::null_mut()
}

// The caller has already run all code that could panic, such as FD_SET: a frame that handles panics stops the
// cancellation's unwinding.
extern "C" fn blocked_in_select(set: *mut libc::c_void) -> *mut libc::c_void {
    let fd = CANCEL_FD.load(Ordering::Relaxed);
    let none = std::ptr::null_mut();
    // SAFETY: `cancel_in` gives a valid set. A plain call, as above.
    unsafe { libc::select(fd.wrapping_add(1), set.cast(), none, none, std::ptr::null_mut()) };
    std::ptr::null_mut()
}

extern "C" fn blocked_in_pselect(set: *mut libc::c_void) -> *mut libc::c_void {
    let fd = CANCEL_FD.load(Ordering::Relaxed);
    let none = std::ptr::null_mut();
    // SAFETY: as above.
    unsafe {
        libc::pselect(
            fd.wrapping_add(1),
            set.cast(),
            none,
            none,
            std::ptr::null(),
            std::ptr::null(),
        );
    }
    std::ptr::null_mut()
}

static CANCEL_EPOLL: AtomicI32 = AtomicI32::new(-1);
extern "C" fn blocked_in_epoll_wait(_: *mut libc::c_void) -> *mut libc::c_void {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: room for one event. A plain call, as above.
    unsafe { libc::epoll_wait(CANCEL_EPOLL.load(Ordering::Relaxed), &mut event, 1, -1) };
    std::ptr::null_mut()
}

/// pthread_cancel of a thread that runs `blocked` with a set that holds the connection.
fn cancel_in(c: &Ctx, blocked: ThreadFn) {
    let mut t: libc::pthread_t = 0;
    let mut ended = std::ptr::null_mut();
    // SAFETY: the function never returns a pointer that is used; t is joined below.
    unsafe extern "C" {
        fn pthread_cancel(t: libc::pthread_t) -> c_int;
    }
    let mut set: libc::fd_set = sys::zeroed();
    // SAFETY: a valid set, and a number below FD_SETSIZE.
    unsafe { libc::FD_SET(CANCEL_FD.load(Ordering::Relaxed), &mut set) };
    c.ret(
        "create",
        call!(libc::pthread_create(
            &mut t,
            std::ptr::null(),
            blocked,
            (&raw mut set).cast()
        )),
    );
    sys::pause_ms(60);
    c.ret("cancel", call!(pthread_cancel(t)));
    c.ret("join", call!(libc::pthread_join(t, &mut ended)));
    c.log(format_args!("cancelled: {}", ended as isize == -1));
}

/// pthread_cancel of a thread blocked in recv; the connection then works for other threads.
pub fn cancel(c: &Ctx) {
    cancel_each(c, |_| {}, &[blocked_in_recv]);
}

/// As [`cancel`], on a connection that is not promoted yet, and is afterwards.
pub fn cancel_early(c: &Ctx) {
    let fd = c.cold_pair();
    if c.is_server() {
        CANCEL_FD.store(fd, Ordering::Relaxed);
        cancel_in(c, blocked_in_recv);
    }
    c.sync("cancelled");
    c.warm_up(fd);
    c.close(fd);
}

/// As [`cancel_early`], in send.
pub fn cancel_sender_early(c: &Ctx) {
    let fd = c.cold_pair();
    if c.is_server() {
        CANCEL_FD.store(fd, Ordering::Relaxed);
        cancel_in(c, blocked_in_send);
    }
    c.sync("cancelled");
    if !c.is_server() {
        // The number of bytes that were sent is not known.
        while sys::poll_one(fd, libc::POLLIN, 500) != 0 {
            sys::recv(fd, &mut [0; 65536], 0).ok();
        }
    }
    c.sync("drained");
    c.warm_up(fd);
    c.close(fd);
}

/// As [`cancel`], of threads that wait for readiness.
pub fn cancel_pollers(c: &Ctx) {
    let add_to_epoll = |fd| {
        let ep = epoll::create();
        ctl(ep, libc::EPOLL_CTL_ADD, fd, IN, 1).ok();
        CANCEL_EPOLL.store(ep, Ordering::Relaxed);
    };
    cancel_each(
        c,
        add_to_epoll,
        &[
            blocked_in_poll,
            blocked_in_select,
            blocked_in_pselect,
            blocked_in_epoll_wait,
        ],
    );
}

fn cancel_each(c: &Ctx, prepare: impl FnOnce(c_int), blocked: &[ThreadFn]) {
    let fd = c.pair();
    if c.is_server() {
        CANCEL_FD.store(fd, Ordering::Relaxed);
        prepare(fd);
        for function in blocked {
            cancel_in(c, *function);
        }
        c.sync("cancelled");
        c.recv(fd, 10, 0);
        c.send(fd, b"works", 0);
    } else {
        c.sync("cancelled");
        c.send(fd, b"hello", 0);
        c.recv_all(fd, 5);
    }
    c.sync("done");
    c.close(fd);
}

/// Four threads accept on one listener and serve.
pub fn four_acceptors(c: &Ctx) {
    const N: usize = 32;
    let (listener, port) = c.listener(64);
    if let Some(l) = listener {
        let served = AtomicUsize::new(0);
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..N / 4 {
                        let fd = sys::accept4(l, 0).ok();
                        for _ in 0..5 {
                            sys::send_all(fd, &sys::recv_exact(fd, 5000)).ok();
                        }
                        sys::close(fd).ok();
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        c.log(format_args!("served {}", served.into_inner()));
    } else {
        thread::scope(|s| {
            for t in 0..8u64 {
                s.spawn(move || {
                    for _ in 0..N / 8 {
                        let fd = sys::connected(&Addr::v4(port));
                        for round in 0..5 {
                            let want = data::pattern(t, round, 5000);
                            sys::send_all(fd, &want).ok();
                            assert!(sys::recv_exact(fd, 5000) == want);
                        }
                        assert_eq!(sys::recv_to_end(fd).0.value, 0);
                        sys::close(fd).ok();
                    }
                });
            }
        });
        c.log("all equal");
    }
}
