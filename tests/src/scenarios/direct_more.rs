//! Direct transfers (see `direct`) while others are at work: signal handlers, a cancellation, other threads at the
//! socket or at the memory, and forks.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use libc::{c_int, c_void};

use super::direct::{FILL, Flow, Kept, LARGE, assert_filled, is_of_stream, under_signals};
use crate::ctx::Ctx;
use crate::data::Rng;
use crate::sys;

const MUCH: usize = 100_000;

static HITS: AtomicI32 = AtomicI32::new(0);
extern "C" fn count(_: c_int) {
    HITS.fetch_add(1, SeqCst);
}

/// A signal while a receive waits, without SA_RESTART and with it.
pub fn interrupted(c: &Ctx) {
    let mut flow = Flow::begin(c);
    for round in 0..12 {
        let restart = round % 2 == 1;
        c.sync("waits");
        if flow.reads {
            sys::on_signal(libc::SIGUSR1, count, restart);
            let me = call!(libc::pthread_self()).value as libc::pthread_t;
            let id = sys::thread_id();
            let mut kept = Kept::default();
            thread::scope(|s| {
                s.spawn(move || {
                    sys::wait_asleep(id);
                    call!(libc::pthread_kill(me, libc::SIGUSR1)).ok();
                    if restart {
                        sys::pause_ms(10);
                        c.sync("handled");
                    }
                });
                let (r, buf) = flow.receive_into(vec![0; MUCH], libc::MSG_WAITALL);
                c.ret("recv", r);
                if !restart {
                    // Bytes that come before the return would be returned in place of EINTR.
                    c.sync("handled");
                }
                kept.keep(buf);
            });
            if !restart {
                flow.receive_all(MUCH);
            }
            kept.check();
        } else {
            c.sync("handled");
            flow.send(MUCH);
        }
        flow.run_up();
    }
    c.log(format_args!("handler ran: {}", HITS.load(SeqCst)));
    flow.end();
}

/// Signals at any moment of receives, many of which return bytes.
pub fn interrupted_often(c: &Ctx) {
    let mut flow = Flow::begin(c);
    for restart in [false, true] {
        let mut rng = Rng::new(17);
        let mut receive = |flow: &mut Flow| {
            for n in 0..300 {
                let len = 4096 + rng.below(200_000) as usize;
                if !flow.reads {
                    flow.send(len);
                    thread::sleep(std::time::Duration::from_micros([0, 100, 700][n % 3]));
                    continue;
                }
                let flags = if n % 2 == 0 { libc::MSG_WAITALL } else { 0 };
                let (mut kept, mut got) = (Kept::default(), 0);
                while got < len {
                    let (r, buf) = flow.receive_into(vec![0; len - got], flags);
                    assert!(r.value > 0 || r.is(libc::EINTR), "{r}");
                    got += usize::try_from(r.value).unwrap_or(0);
                    kept.keep(buf);
                }
                kept.check();
            }
        };
        sys::on_signal(libc::SIGUSR1, count, restart);
        flow.play(|flow| {
            if flow.reads {
                under_signals(|| receive(flow));
            } else {
                receive(flow);
            }
        });
        flow.run_up();
    }
    flow.end();
}

static CANCEL_FD: AtomicI32 = AtomicI32::new(-1);
static BUFFER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn blocked_in_recv(_: *mut c_void) -> *mut c_void {
    // SAFETY: the buffer is never freed, and is `LARGE` bytes long. No frame here has a destructor, so the
    // cancellation's unwinding passes.
    unsafe { libc::recv(CANCEL_FD.load(SeqCst), BUFFER.load(SeqCst), LARGE, libc::MSG_WAITALL) };
    std::ptr::null_mut()
}

unsafe extern "C" {
    fn pthread_cancel(thread: libc::pthread_t) -> c_int;
}

/// pthread_cancel of the thread that waits with a buffer. Bytes that come later belong to another call.
pub fn cancel(c: &Ctx) {
    let mut flow = Flow::begin(c);
    for _ in 0..8 {
        if flow.reads {
            CANCEL_FD.store(flow.fd, SeqCst);
            let buffer = map(LARGE);
            BUFFER.store(buffer.cast(), SeqCst);
            let mut thread: libc::pthread_t = 0;
            let (none, mut ended) = (std::ptr::null_mut(), std::ptr::null_mut());
            call!(libc::pthread_create(
                &mut thread,
                std::ptr::null(),
                blocked_in_recv,
                none
            ))
            .ok();
            sys::pause_ms(30);
            c.ret("cancel", call!(pthread_cancel(thread)));
            c.ret("join", call!(libc::pthread_join(thread, &mut ended)));
            c.log(format_args!("cancelled: {}", ended as isize == -1));
            c.sync("cancelled");
            flow.receive_all(MUCH);
            // SAFETY: mapped by `map`, and no thread uses it any more.
            assert_filled(unsafe { std::slice::from_raw_parts(buffer, LARGE) });
            unmap(buffer, LARGE);
        } else {
            c.sync("cancelled");
            flow.send(MUCH);
        }
        flow.run_up();
    }
    flow.end();
}

/// Two threads that receive from the connection, and a third that receives without waiting.
pub fn two_readers(c: &Ctx) {
    const ALL: usize = 30_000_000;
    let flow = Flow::begin(c);
    let fd = flow.fd;
    if !flow.reads {
        let mut left = ALL;
        let mut rng = Rng::new(19);
        let mut pattern = vec![0; 300_000];
        let mut sum = 0u64;
        while left > 0 {
            let len = (1 + rng.below(300_000) as usize).min(left);
            pattern[..len].iter_mut().for_each(|byte| *byte = rng.below(251) as u8);
            sum += sum_of(&pattern[..len]);
            sys::send_all(fd, &pattern[..len]).ok();
            pattern[..len].fill(FILL);
            left -= len;
        }
        c.shutdown(fd, libc::SHUT_WR);
        c.log(format_args!("{ALL} bytes, sum {sum}"));
    } else {
        let read = |flags: c_int| {
            let (mut bytes, mut sum) = (0, 0);
            let mut buf = vec![FILL; MUCH];
            loop {
                let r = sys::recv(fd, &mut buf, flags);
                if r.is(libc::EAGAIN) {
                    thread::sleep(std::time::Duration::from_micros(500));
                    continue;
                }
                let n = r.count();
                if n == 0 {
                    return (bytes, sum);
                }
                bytes += n;
                sum += sum_of(&buf[..n]);
                assert_filled(&buf[n..]);
                buf[..n].fill(FILL);
            }
        };
        let (bytes, sum) = thread::scope(|s| {
            let readers = [0, libc::MSG_WAITALL, libc::MSG_DONTWAIT].map(|flags| s.spawn(move || read(flags)));
            readers.into_iter().fold((0, 0), |(bytes, sum), reader| {
                let read = reader.join().unwrap();
                (bytes + read.0, sum + read.1)
            })
        });
        c.log(format_args!("{bytes} bytes, sum {sum}"));
    }
    flow.end();
}

fn sum_of(bytes: &[u8]) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
}

/// While a thread waits with a buffer, another asks for the number of bytes.
pub fn others_look(c: &Ctx) {
    let mut flow = Flow::begin(c);
    let fd = flow.fd;
    for _ in 0..8 {
        c.sync("waits");
        if flow.reads {
            let id = sys::thread_id();
            thread::scope(|s| {
                s.spawn(move || {
                    sys::wait_asleep(id);
                    for _ in 0..3 {
                        c.recv(fd, MUCH, libc::MSG_DONTWAIT);
                        c.recv(fd, MUCH, libc::MSG_DONTWAIT | libc::MSG_PEEK);
                        c.poll(fd, libc::POLLIN | libc::POLLOUT, 0);
                        c.fionread(fd);
                    }
                    c.sync("looked");
                });
                c.ret("recv", flow.receive(MUCH, libc::MSG_WAITALL));
            });
        } else {
            c.sync("looked");
            flow.send(MUCH);
        }
        flow.run_up();
    }
    flow.end();
}

/// While a thread receives much, another one peeks, with waiting and without, and asks whether there is data.
pub fn others_peek(c: &Ctx) {
    const PEEKED: usize = 3000;
    let mut flow = Flow::begin(c);
    let (fd, at, is_over) = (flow.fd, &AtomicU64::new(flow.at), &AtomicBool::new(false));
    thread::scope(|s| {
        if flow.reads {
            s.spawn(move || {
                for n in 0.. {
                    let from = at.load(SeqCst);
                    let flags = libc::MSG_PEEK | if n % 3 == 0 { 0 } else { libc::MSG_DONTWAIT };
                    let mut buf = vec![FILL; PEEKED];
                    let r = sys::recv(fd, &mut buf, flags);
                    assert!(r.value >= 0 || r.is(libc::EAGAIN), "{r}");
                    if is_over.load(SeqCst) {
                        return;
                    }
                    let peeked = usize::try_from(r.value).unwrap_or(0);
                    let until = at.load(SeqCst) + 2 * LARGE as u64;
                    assert!(
                        is_of_stream(&buf[..peeked], from, until),
                        "peeked {peeked} bytes that are not there from {from} on, up to {until}"
                    );
                    assert_filled(&buf[peeked..]);
                    if sys::poll_one(fd, libc::POLLIN, 1) == 0 {
                        sys::readable_bytes(fd);
                    }
                }
            });
        }
        let mut rng = Rng::new(23);
        for _ in 0..400 {
            let len = 4096 + rng.below(100_000) as usize;
            if flow.reads {
                flow.receive_all(len);
                at.store(flow.at, SeqCst);
            } else {
                flow.send(len);
                thread::sleep(std::time::Duration::from_micros(200));
            }
        }
        // A thread that waits in a peek wakes up.
        if flow.reads {
            is_over.store(true, SeqCst);
            c.sync("over");
            flow.receive_all(MUCH);
        } else {
            c.sync("over");
            flow.send(1000);
            sys::pause_ms(20);
            flow.send(MUCH - 1000);
        }
        c.shutdown(fd, if flow.reads { libc::SHUT_RD } else { libc::SHUT_WR });
    });
    flow.end();
}

/// Maps new memory, and fills it.
fn map(len: usize) -> *mut u8 {
    map_at(std::ptr::null_mut(), len, 0)
}

fn map_at(at: *mut u8, len: usize, how: c_int) -> *mut u8 {
    let (access, how) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | how,
    );
    // SAFETY: at any address, or in place of memory that the caller does not use any more.
    let memory = unsafe { libc::mmap(at.cast(), len, access, how, -1, 0) }.cast::<u8>();
    assert_ne!(memory.cast(), libc::MAP_FAILED);
    // SAFETY: just mapped with `len` bytes, and used by no other code.
    unsafe { std::slice::from_raw_parts_mut(memory, len) }.fill(FILL);
    memory
}

fn unmap(memory: *mut u8, len: usize) {
    call!(libc::munmap(memory.cast(), len)).ok();
}

/// Memory of [`LARGE`] bytes that a call has returned.
struct Used(*mut u8);
// SAFETY: the owner of the value is the only user of the memory.
unsafe impl Send for Used {}

/// Replaces memory that it receives by other memory, and checks the new memory a moment later. The sender has made no
/// call with that memory since.
fn replaces() -> (SyncSender<Used>, thread::JoinHandle<()>) {
    let (give, taken) = sync_channel::<Used>(1);
    let replacer = thread::spawn(move || {
        let mut before: Option<Used> = None;
        let look = |used: Option<Used>| {
            if let Some(Used(memory)) = used {
                // SAFETY: mapped by `map_at` below, and used by no other code.
                assert_filled(unsafe { std::slice::from_raw_parts(memory, LARGE) });
                unmap(memory, LARGE);
            }
        };
        for (n, used) in taken.iter().enumerate() {
            if n % 2 == 0 {
                unmap(used.0, LARGE);
                // Memory that another thread has mapped there meanwhile is not replaced.
                let access = libc::PROT_READ | libc::PROT_WRITE;
                let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                // SAFETY: no existing mapping is replaced.
                let again = unsafe { libc::mmap(used.0.cast(), LARGE, access, how, -1, 0) };
                if again == libc::MAP_FAILED {
                    look(before.take());
                    continue;
                }
                // SAFETY: just mapped with `LARGE` bytes, and used by no other code.
                unsafe { std::slice::from_raw_parts_mut(used.0, LARGE) }.fill(FILL);
            } else {
                map_at(used.0, LARGE, libc::MAP_FIXED);
            }
            look(before.replace(used));
        }
        look(before);
    });
    (give, replacer)
}

/// The memory of each call is unmapped or replaced as soon as the call has returned, on both ends.
pub fn unmapped(c: &Ctx) {
    let mut flow = Flow::begin(c);
    let (give, replacer) = replaces();
    let mut rng = Rng::new(29);
    flow.play(|flow| {
        for n in 0..400 {
            let len = (4096 + rng.below((LARGE - 4096) as u64) as usize) >> rng.below(6);
            let memory = map(LARGE);
            // SAFETY: mapped just now, and given away only when this is not used any more.
            let buf = unsafe { std::slice::from_raw_parts_mut(memory, LARGE) };
            if flow.reads {
                let flags = if n % 3 == 0 { 0 } else { libc::MSG_WAITALL };
                let mut got = 0;
                while got < len {
                    let r = sys::recv(flow.fd, &mut buf[..len - got], flags);
                    assert!(r.value > 0, "{r}");
                    flow.check(r, &buf[..]);
                    buf.fill(FILL);
                    got += r.count();
                }
            } else {
                thread::sleep(std::time::Duration::from_micros([0, 300][n % 2]));
                flow.send_from(&mut buf[..len]);
            }
            give.send(Used(memory)).unwrap();
        }
    });
    drop(give);
    replacer.join().unwrap();
    flow.end();
}

/// Forks of the process, at both ends, while a thread waits with a buffer, or sends. The child ends, or runs another
/// program, before the awaited bytes come or afterwards.
pub fn forks(c: &Ctx) {
    let mut flow = Flow::begin(c);
    // A program that inherits the connection would take it off the link: see `direct_ends`.
    call!(libc::fcntl(flow.fd, libc::F_SETFD, libc::FD_CLOEXEC)).ok();
    flow.play(|flow| {
        for round in 0..24 {
            let (does_exec, is_late, by_reader) = (round % 2 == 1, round % 4 > 1, round % 3 > 0);
            let fork = || {
                let child = sys::fork_child(|| {
                    if is_late {
                        sys::pause_ms(20);
                    }
                    if does_exec {
                        let words = [c"true".as_ptr(), std::ptr::null()];
                        call!(libc::execv(c"/bin/true".as_ptr(), words.as_ptr()));
                    }
                    i32::from(does_exec)
                });
                if !is_late {
                    assert_eq!(sys::wait_child(child), 0);
                }
                child
            };
            c.sync("waits");
            if flow.reads {
                let id = sys::thread_id();
                thread::scope(|s| {
                    s.spawn(move || {
                        sys::wait_asleep(id);
                        let child = by_reader.then(fork);
                        c.sync("forked");
                        if let Some(child) = child.filter(|_| is_late) {
                            assert_eq!(sys::wait_child(child), 0);
                        }
                    });
                    flow.receive_all(LARGE);
                });
            } else {
                c.sync("forked");
                thread::scope(|s| {
                    if !by_reader {
                        s.spawn(move || {
                            let child = fork();
                            if is_late {
                                assert_eq!(sys::wait_child(child), 0);
                            }
                        });
                    }
                    flow.send(LARGE);
                });
            }
            flow.run_up();
        }
    });
    flow.end();
}
