//! Sending: the program's bytes onto what the direction runs on. Here are the call, and what takes the
//! direction back to TCP.

mod cork;
mod direct;
mod lent;
mod offered;
mod rest;
mod room;
pub mod sendfile;

pub use cork::{cork, pass_cork, send_delayed_wake};
pub use room::{
    ask_for_room, could_have_room, forget_standing, give_back, is_full, is_unread, on_buffer_size, on_link, reader_at,
    report_blocked, report_blocked_at_end, stands_still, unread,
};

use cork::{delay_wake, is_more_to_come};
use direct::Went;
use room::{Room, no_room};

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::ssize_t;
use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::os::{kernel, thread};
use rdmasock_core::sync::store_load_fence;

use crate::notify::blocking;
use crate::notify::call::{Began, Call, Direction, Place, on_its_file};
use crate::notify::closing;
use crate::notify::ready;
use crate::notify::reset;
use crate::notify::table;
use crate::notify::threshold::worth_it;
use crate::notify::wait;
use crate::objects::library::{Library, threshold_of};
use crate::objects::mailbox::Command;
use crate::objects::socket::{Mode, Sending, Socket, Stage};
use crate::signals::jump::{about_or_if_cancelled, cancellation_point, outside, quick_or_if_cancelled, within};
use crate::sys::errno;
use crate::sys::iov::Iov;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::policy::{Progress, Threshold};

/// A long send is handed over in pieces of this many bytes, so that the reader copies out while
/// we still copy in.
const PIECE: usize = 64 * 1024;

/// Flags that the link serves; any other takes the socket back to TCP.
const SERVED: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_MORE | libc::MSG_EOR | libc::MSG_CONFIRM;
/// Flags that keep a connection on TCP for good before the send reaches the kernel.
const FOR_GOOD: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY;

/// send() and its kin. `real(fd)` is libc's own call with the program's other arguments.
///
/// # Safety
/// The pieces of `iov` are readable.
#[inline]
pub unsafe fn send(
    socket: &'static Socket,
    fd: c_int,
    iov: &mut Iov,
    flags: c_int,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    if flags & FOR_GOOD != 0 {
        keep_on_tcp(socket, flags);
    }
    let began = Began::now(socket, fd);
    if socket.tx_mode.load(Acquire) == Mode::Tcp {
        if socket.promotion.stage() == Stage::Plain {
            let n = real(fd);
            count_sent(&began, n);
            return n;
        }
        if socket.enter_tx() {
            if began.is_named() {
                return plain(socket, blocking::is_quick(socket, flags), || real(fd));
            }
            leave(socket);
        }
    }
    // SAFETY: by this function's contract.
    unsafe { send_slow(began, iov, flags, real) }
}

/// Keeps the connection on TCP for good, or takes it back there, before a send with one of [`FOR_GOOD`], which may be
/// the one that would begin a promotion. Nothing of ours may follow urgent data in TCP: what is read behind the mark
/// takes the urgent byte from the kernel (tcp(7)). Sends with MSG_ZEROCOPY are numbered and reported by the kernel,
/// which sees none that goes over a link.
#[cold]
fn keep_on_tcp(socket: &'static Socket, flags: c_int) {
    let is_kept = matches!(socket.promotion.stage(), Stage::Pinned | Stage::Plain);
    if !is_kept || flags & libc::MSG_OOB != 0 {
        within(|| take_back(socket, reason_for(flags)));
    }
}

/// The call has not begun yet, and its number stands for something else by now.
#[cold]
unsafe fn begin_anew(fd: c_int, iov: &mut Iov, flags: c_int, real: &impl Fn(c_int) -> ssize_t) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: by the caller's word.
        Some(socket) => unsafe { send(socket, fd, iov, flags, real) },
        None => real(fd),
    }
}

/// Counts what TCP took of a connection that stays there.
#[inline]
fn count_sent(began: &Began, n: ssize_t) {
    if n > 0
        && began.is_named()
        && let Some(stats) = began.socket().told.stats()
    {
        stats.add_tx_tcp(n as u64);
    }
}

/// The program's call on a plain direction, which the caller has entered.
#[inline]
fn plain(socket: &'static Socket, is_quick: bool, real: impl FnOnce() -> ssize_t) -> ssize_t {
    if socket.has_untold()
        && let Some(error) = reset::take_untold(socket)
    {
        leave(socket);
        return errno::fail(error);
    }
    in_kernel(socket, is_quick, real)
}

/// The kernel's call on a plain direction, which the caller has entered.
#[inline]
fn in_kernel(socket: &'static Socket, is_quick: bool, real: impl FnOnce() -> ssize_t) -> ssize_t {
    let n = if is_quick {
        quick_or_if_cancelled(real, || leave(socket))
    } else {
        about_or_if_cancelled(about(socket), real, || leave(socket))
    };
    if n > 0 {
        account(socket, n as u64);
    } else if n < 0 && socket.told.timed_out.load(Relaxed) {
        reset::say_timed_out(socket);
    }
    leave(socket);
    n
}

/// How a thread knows that it is in the kernel's send on this socket.
fn about(socket: &'static Socket) -> *const () {
    (&raw const socket.tx_inside).cast()
}

/// Whether this is a signal handler above the kernel's send on this very socket. A marker waits for that call, which
/// waits for the handler: until then nothing of it goes, and what the handler sends may go before it.
#[cold]
pub fn is_above_own_send(socket: &'static Socket) -> bool {
    thread::current().is_inside(about(socket))
}

/// A call is back from the kernel's send.
#[inline]
fn leave(socket: &'static Socket) {
    if socket.leave_tx() {
        go_on(socket);
    }
    thread::current().end();
}

/// Does what waited for the last call to be back from the kernel's send.
#[cold]
fn go_on(socket: &'static Socket) {
    let errno = errno::get();
    if socket.tx_mode.load(Acquire) == Mode::Marked && connection::flush(socket) {
        ready::notify_local(socket);
    }
    if socket.numbers.is_closed() {
        closing::on_call_back(socket);
    }
    errno::set(errno);
}

/// Counts what TCP took, and begins a promotion at the threshold.
#[inline]
pub fn account(socket: &'static Socket, n: u64) {
    if let Some(stats) = socket.told.stats() {
        stats.add_tx_tcp(n);
    }
    advance(socket, |progress, threshold| progress.on_sent(n, threshold));
}

/// Counts towards the threshold, and begins a promotion there, if the connection is below it.
#[inline]
pub fn advance(socket: &'static Socket, count: impl FnOnce(&Progress, &Threshold) -> bool) {
    if socket.promotion.stage() == Stage::Watching {
        let progress = &socket.promotion.progress;
        let first = !progress.has_begun();
        if count(progress, threshold_of(socket.promotion.role())) {
            worth_it(socket);
        }
        if first {
            answer_if_asked(socket);
        }
    }
}

/// An ASK may wait for the process to use the connection.
#[cold]
pub fn answer_if_asked(socket: &'static Socket) {
    // The service thread sets `asked`, then looks whether the connection has been used; we the other
    // way round. So one of the two sees the other.
    store_load_fence();
    if socket.promotion.asked.load(SeqCst) && socket.promotion.asked.swap(false, SeqCst) {
        Library::get().service.submit(Command::Used(socket.into()));
    }
}

/// What one look of a send came to.
enum SendStep {
    /// The direction changed: look again.
    Again,
    /// The kernel's own call.
    Kernel,
    /// The kernel's own call, ahead of a marker ([`is_above_own_send`]).
    Ahead,
    /// The connection is not this call's ([`Place`]).
    Elsewhere(Place),
    /// No room.
    Full,
    /// All is sent.
    Done,
    /// The program has shut the direction down, which has not left the link yet.
    Shut,
}

/// What a send gives once the program has shut the direction down: between hosts that stays on the link until all of it
/// is there, and the kernel knows nothing of it yet. Its own sends raise the signal before they fail (send(2)).
#[cold]
pub fn after_shutdown(sent: usize, flags: c_int) -> ssize_t {
    if sent > 0 {
        return sent as ssize_t;
    }
    if flags & libc::MSG_NOSIGNAL == 0 {
        let (process, thread) = (rustix::process::getpid(), rustix::thread::gettid());
        let ids = [process, thread].map(|id| id.as_raw_nonzero().get() as usize);
        let [process, thread] = ids;
        // SAFETY: numbers alone.
        let _ = unsafe { kernel::call(libc::SYS_tgkill, [process, thread, libc::SIGPIPE as usize, 0, 0, 0]) };
    }
    errno::fail(libc::EPIPE)
}

/// Whether the program has shut the direction, and the kernel may not know it yet.
fn is_shut(socket: &Socket) -> bool {
    socket.tx_mode.load(Acquire) == Mode::Marked && socket.tx.lock().is_some_and(|tx| tx.is_shut)
}

#[cold]
fn interrupted() -> SendStep {
    // A signal handler that sends on the stream that it has interrupted in the middle of a send.
    errno::set(libc::EINTR);
    SendStep::Done
}

// Not inlined: the forced unwind of pthread_cancel runs the call's destructor here (see `hooks`).
#[inline(never)]
unsafe fn send_slow(began: Began, iov: &mut Iov, flags: c_int, real: &impl Fn(c_int) -> ssize_t) -> ssize_t {
    cancellation_point();
    let mut call = Call::new(began, Direction::Send);
    // SAFETY: by `send`'s contract.
    let result = unsafe { send_loop(&mut call, iov, flags, real) };
    result.unwrap_or_else(|| {
        let fd = call.fd;
        drop(call);
        // SAFETY: as above.
        unsafe { begin_anew(fd, iov, flags, real) }
    })
}

/// Looks and waits until all is sent, or what there is room for; `None`: the call is to begin anew.
///
/// # Safety
/// The pieces of `iov` are readable.
#[inline]
unsafe fn send_loop(call: &mut Call, iov: &mut Iov, flags: c_int, real: &impl Fn(c_int) -> ssize_t) -> Option<ssize_t> {
    let socket = call.socket;
    crate::notify::reclaim::reclaim(socket);
    let beyond = flags & !SERVED;
    if beyond != 0 {
        within(|| take_back(socket, reason_for(beyond)));
    }
    let total = iov.len();
    // What has gone over a link.
    let mut sent = 0;
    let mut patience = wait::Patience::default();
    loop {
        if beyond != 0 {
            // A link between hosts is not left before the other end has answered.
            connection::wait_for_tcp(socket);
        }
        let mut until = 0;
        if total >= direct::LEAST && socket.tx_mode.load(Acquire) == Mode::Link {
            match direct::send(call, iov, flags, total) {
                Went::Directly(bytes) => {
                    sent += bytes;
                    if iov.len() == 0 {
                        return Some(sent as ssize_t);
                    }
                    // The reader may wait for the rest.
                    continue;
                }
                Went::Not { first } => until = first,
            }
        }
        let before = iov.len();
        // SAFETY: the pieces are readable by `send`'s contract.
        let step = unsafe { step(call, iov, flags, until) };
        sent += before - iov.len();
        match step {
            SendStep::Shut => return Some(after_shutdown(sent, flags)),
            SendStep::Done if sent == 0 && before > 0 => return Some(-1),
            SendStep::Done => return Some(sent as ssize_t),
            SendStep::Again => continue,
            SendStep::Elsewhere(Place::Here) => {}
            SendStep::Elsewhere(Place::Moved) if sent == 0 => {
                closing::look_again(socket, call.fd);
                return None;
            }
            SendStep::Elsewhere(_) => {
                closing::look_again(socket, call.fd);
                return Some(errno::after(sent, libc::EBADF));
            }
            SendStep::Ahead => {
                let went = on_its_file(call, |fd| outside(|| real(fd)));
                let n = went.unwrap_or_else(|| errno::fail(libc::EBADF));
                if n > 0 {
                    account(socket, n as u64);
                }
                return Some(n);
            }
            SendStep::Kernel => {
                if sent > 0 && !goes_on(call, flags) {
                    return Some(sent as ssize_t);
                }
                if !call.is_held() && !call.is_named() {
                    return None;
                }
                let is_held = call.is_held();
                let was_over = Cell::new(false);
                // The kernel does not know of a handler that has run since the call began to wait.
                let is_over = || {
                    was_over.set(is_held && sent == 0 && patience.is_interrupted());
                    was_over.get()
                };
                if sent > 0 && socket.enter_tx() {
                    let went = on_its_file(call, |fd| {
                        in_kernel(socket, false, || match is_over() {
                            true => 0,
                            false => rest::send(socket, fd, iov, flags),
                        })
                    });
                    let taken = went.unwrap_or_else(|| {
                        leave(socket);
                        0
                    });
                    return Some(sent as ssize_t + taken.max(0));
                }
                if sent == 0 && socket.enter_tx() {
                    let went = on_its_file(call, |fd| {
                        plain(socket, blocking::is_quick(socket, flags), || match is_over() {
                            true => errno::fail(libc::EINTR),
                            false => real(fd),
                        })
                    });
                    match went {
                        Some(_) if was_over.get() => match patience.interrupt(socket, false) {
                            Err(error) => return Some(errno::fail(error)),
                            Ok(_) if patience.take_restart() && !call.is_named() => return None,
                            Ok(_) => continue,
                        },
                        Some(n) => return Some(n),
                        None => {
                            leave(socket);
                            return Some(errno::fail(libc::EBADF));
                        }
                    }
                }
            }
            SendStep::Full => {
                if let Err(error) = wait::may_wait(socket, flags) {
                    return Some(errno::after(sent, error));
                }
                if !call.is_held() {
                    match call.hold_now() {
                        Place::Here => {}
                        Place::Moved if sent == 0 => {
                            closing::look_again(socket, call.fd);
                            continue;
                        }
                        Place::Moved | Place::Lost => return Some(errno::after(sent, libc::EBADF)),
                    }
                }
                patience.is_partial = sent > 0;
                match wait::wait_for::<Space>(socket, &mut patience) {
                    Ok(_) if patience.take_restart() && (sent > 0 || !call.is_named()) => {
                        return (sent > 0).then_some(sent as ssize_t);
                    }
                    Ok(_) => {}
                    Err(error) => return Some(errno::after(sent, error)),
                }
            }
        }
    }
}

/// Whether a call of which the link took the beginning goes on in TCP: it may wait, and there is somebody for the rest.
/// Then it holds the connection, for its bytes are one connection's.
fn goes_on(call: &mut Call, flags: c_int) -> bool {
    wait::may_wait(call.socket, flags).is_ok() && call.hold_now() == Place::Here && rest::is_taken(call.socket)
}

/// One attempt, at what precedes the last `until` bytes.
#[inline]
unsafe fn step(call: &mut Call, iov: &mut Iov, flags: c_int, until: usize) -> SendStep {
    let socket = call.socket;
    if socket.tx_mode.load(Acquire) == Mode::Marked {
        let place = call.place_by_name();
        if place != Place::Here {
            return SendStep::Elsewhere(place);
        }
        if is_shut(socket) {
            // Not where the number is another's.
            return match call.place_now() {
                Place::Here => SendStep::Shut,
                place => SendStep::Elsewhere(place),
            };
        }
        if within(|| connection::flush(socket)) {
            return SendStep::Again;
        }
        // Where the number is another's nobody will say that there is room.
        return match call.place_now() {
            Place::Here if is_above_own_send(socket) => SendStep::Ahead,
            Place::Here => SendStep::Full,
            place => SendStep::Elsewhere(place),
        };
    }
    loop {
        let Some(mut tx) = socket.tx.lock() else {
            return interrupted();
        };
        if socket.tx_mode.load(Acquire) != Mode::Link {
            return if socket.tx_mode.load(Acquire) == Mode::Tcp {
                SendStep::Kernel
            } else {
                SendStep::Again
            };
        }
        let tx_now = &mut *tx;
        let Some(producer) = tx_now.producer.as_mut() else {
            return SendStep::Kernel;
        };
        let place = match call.place_by_name() {
            Place::Here => call.place_by_kernel(&tx_now.own.seen),
            place => place,
        };
        if place != Place::Here {
            return SendStep::Elsewhere(place);
        }
        if tx_now.is_shut {
            return SendStep::Shut;
        }
        if iov.is_implausible() {
            drop(tx);
            errno::set(libc::EFAULT);
            return SendStep::Done;
        }
        if socket.wakes.is_dead() || ready::is_reader_gone(producer) {
            // What becomes of bytes that nobody reads is for the kernel to say.
            socket.tx_mode.go(Sending::Left);
            return SendStep::Kernel;
        }
        let want = (iov.len() - until).min(PIECE);
        let spans = match producer.spans(want) {
            Ok(spans) => spans,
            Err(error) => {
                let _section = tx.unlock();
                violation(socket, &error);
                return SendStep::Again;
            }
        };
        let room = spans.len().min(want);
        let mut copied = 0;
        while copied < room {
            let (from, n) = iov.head();
            if n == 0 {
                break;
            }
            // SAFETY: readable by the contract; the ring is ours to write up to `room`.
            let n = unsafe { spans.copy_in(copied, from, n.min(room - copied)) };
            iov.advance(n);
            copied += n;
        }
        let holds = copied == want && is_more_to_come(socket, flags, copied);
        let wake = if holds {
            producer.commit_quietly(copied);
            Wake::NONE
        } else {
            producer.commit(copied)
        };
        if holds {
            delay_wake(&mut tx);
        } else {
            tx.wake_delayed = false;
        }
        if copied > 0 {
            tx.own.last = tx.own.seen.tick();
            if let Some(stats) = socket.told.stats() {
                stats.add_tx_link(copied as u64);
            }
        }
        let room = if copied < want {
            no_room(socket, &mut tx, wait::may_wait(socket, flags).is_ok())
        } else {
            Room::There
        };
        if iov.len() == 0 {
            call.let_go(&mut tx.own.waiting);
        }
        let section = tx.unlock();
        ready::notify_peer(socket, wake);
        drop(section);
        if iov.len() == 0 {
            return SendStep::Done;
        }
        if iov.len() == until {
            return SendStep::Again;
        }
        match room {
            Room::There => {}
            Room::Full if ready::progress(socket) => {}
            Room::Full => return SendStep::Full,
            Room::Unbacked => {
                within(|| take_back(socket, rdmasock_core::stats::Reason::Resources));
                return SendStep::Again;
            }
        }
    }
}

fn reason_for(flags: c_int) -> rdmasock_core::stats::Reason {
    use rdmasock_core::stats::Reason;
    if flags & libc::MSG_OOB != 0 {
        Reason::OutOfBand
    } else if flags & libc::MSG_ZEROCOPY != 0 {
        Reason::ZeroCopy
    } else {
        Reason::Unsupported
    }
}

/// A call that only the kernel can serve, on a socket that is on its way back to TCP.
// Not inlined: as `send_slow`.
#[inline(never)]
pub fn send_on_tcp(socket: &'static Socket, fd: c_int, flags: c_int, real: &impl Fn(c_int) -> ssize_t) -> ssize_t {
    crate::notify::reclaim::reclaim(socket);
    let mut call = Call::new(Began::now(socket, fd), Direction::Send);
    let mut patience = wait::Patience::default();
    loop {
        if !call.is_held() && !call.is_named() {
            return outside(|| real(fd));
        }
        if socket.enter_tx() {
            let went = on_its_file(&call, |fd| plain(socket, false, || real(fd)));
            return went.unwrap_or_else(|| {
                leave(socket);
                errno::fail(libc::EBADF)
            });
        }
        if is_shut(socket) {
            match call.place_now() {
                Place::Here => return after_shutdown(0, flags),
                Place::Moved => {
                    closing::look_again(socket, fd);
                    continue;
                }
                Place::Lost => return errno::fail(libc::EBADF),
            }
        }
        if connection::flush(socket) {
            if socket.tx_mode.load(Acquire) == Mode::Link {
                // A handshake that was under way has ended in a promotion.
                take_back(socket, rdmasock_core::stats::Reason::Unsupported);
            }
            continue;
        }
        if let Err(error) = wait::may_wait(socket, 0) {
            return errno::fail(error);
        }
        match call.hold_now() {
            Place::Here => {}
            Place::Moved => {
                closing::look_again(socket, fd);
                continue;
            }
            Place::Lost => return errno::fail(libc::EBADF),
        }
        if let Err(error) = wait::wait_for::<Space>(socket, &mut patience) {
            return errno::fail(error);
        }
    }
}

/// Takes the socket back to TCP, because it is put to a use that the link does not serve.
#[cold]
pub fn take_back(socket: &'static Socket, reason: rdmasock_core::stats::Reason) {
    let errno = errno::get();
    if let Some(mut control) = socket.control.lock() {
        connection::leave(socket, &mut control, reason);
    }
    errno::set(errno);
}

/// Takes the socket back to TCP for other holders of it; see [`connection::return_to_tcp`].
pub fn hand_over(socket: &'static Socket, reason: rdmasock_core::stats::Reason) {
    if let Some(mut control) = socket.control.lock() {
        connection::return_to_tcp(socket, &mut control, reason);
    }
}

/// The peer broke the protocol: the link goes down.
#[cold]
pub fn violation(socket: &'static Socket, error: &rdmasock_core::fabric::ring::RingError) {
    tracing::warn!(target: "rdmasock", slot = socket.slot, %error, "link closed");
    Library::get().service.submit(Command::Violation(socket.into()));
    // Nothing more goes over it, whoever asks first.
    socket.wakes.set_dead();
}

/// A send is about to sleep for want of room. True if there is some by the ring in reserve, or in TCP.
#[cold]
pub fn make_room(socket: &'static Socket) -> bool {
    let room = room::before_sleep(socket);
    if let Room::Unbacked = room {
        within(|| take_back(socket, rdmasock_core::stats::Reason::Resources));
    }
    !matches!(room, Room::Full)
}

/// What a send waits for.
struct Space;

impl wait::Wanted for Space {
    const IS_DATA: bool = false;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        is_worth_a_look(socket)
    }

    fn avoid_sleep(socket: &'static Socket) -> bool {
        make_room(socket)
    }

    fn unread(socket: &'static Socket) -> Option<u64> {
        unread(socket)
    }
}

/// Whether a blocked send should look again, by what has been [taken in](ready::progress).
fn is_worth_a_look(socket: &'static Socket) -> bool {
    match socket.tx_mode.load(Acquire) {
        Mode::Link => {
            socket.wakes.is_dead()
                || socket.tx.lock().is_none_or(|mut tx| {
                    tx.producer
                        .as_mut()
                        .is_none_or(|p| p.has_space().unwrap_or(true) || ready::is_reader_gone(p))
                })
        }
        Mode::Marked => connection::flush(socket),
        _ => true,
    }
}
