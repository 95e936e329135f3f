//! Sending: moves the program's bytes onto what the direction runs on, TCP or a link. This file has the call itself,
//! the direction's way back to TCP, and the wake-ups of the peer that MSG_MORE and TCP_CORK delay.
//!
//! Words of this file:
//!
//! - *piece*: one buffer of the program. `iov` is a cursor over the pieces of a call.
//! - *to enter* and *to leave* the kernel's send: to count the call in before, and out afterwards. A marker is written
//!   to TCP only while no call is inside.
//! - *to hold* the connection: a call that has waited keeps the connection, even if the fd is closed (`notify/call`).
//! - *kept error*: an error for the program's next call, which the kernel does not report.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::ssize_t;
use rdmasock_core::fabric::ring::{RingError, Spans, Wake};
use rdmasock_core::os::{kernel, thread};
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection::{self, SocketIo as _, Tcp as _};
use rdmasock_core::stream::policy::{Progress, Threshold};
use rdmasock_core::sync::store_load_fence;

use crate::data::backpressure::{Room, no_room, take_reserve};
pub(crate) use crate::data::backpressure::{
    ask_for_room, could_have_room, give_back, is_full, is_unread, on_buffer_size, reader_at, report_blocked, unread,
};
use crate::data::stop::{self, Stop, check_place};
use crate::data::zero_copy::{self, Went};
use crate::notify::call::{Began, Call, Direction, Place, on_call_back, on_its_file};
use crate::notify::threshold::worth_it;
use crate::notify::{ready, reset, table, wait};
use crate::objects::library::{Library, threshold_of};
use crate::objects::mailbox::Command;
use crate::objects::socket::{Mode, Move, Socket, Stage, Tx, TxOwn};
use crate::signals::jump::{about_or_if_cancelled, cancellation_point, outside, quick_or_if_cancelled, within};
use crate::sys::iov::{Iov, is_plausible};
use crate::sys::real::Cancellable;
use crate::sys::{errno, real, time};

/// Bytes that a long send commits to the ring at a time. The reader copies one piece out while the sender copies the
/// next one in.
const PIECE: usize = 64 * 1024;

/// The flags that a link serves. Any other flag takes the socket back to TCP.
const SERVED: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_MORE | libc::MSG_EOR | libc::MSG_CONFIRM;
/// The flags with which a send can go the short way ([`quick`]).
const QUICK: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
/// The flags that keep a connection on TCP for good. This is done before the send is passed to the kernel.
const FOR_GOOD: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY;

/// Serves send() and its kin. `real(fd)` is libc's own call with the program's other arguments. Returns what send(2)
/// returns, and sets errno as send(2) does.
///
/// # Safety
/// The pieces of `iov` are readable.
#[inline(always)]
pub(crate) unsafe fn send(
    socket: &'static Socket,
    fd: c_int,
    iov: &mut Iov,
    flags: c_int,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    if let Some((from, len)) = iov.only()
        // SAFETY: the piece is readable by this function's contract.
        && unsafe { quick(socket, fd, from, len, flags) }
    {
        return len as ssize_t;
    }
    // SAFETY: by this function's contract.
    unsafe { send_unless_quick(socket, fd, iov, flags, real) }
}

/// Sends `len` bytes over a link by the short way, which is no more than a copy. Does nothing and returns false unless
/// all of this holds:
///
/// - no other thread holds the direction's lock;
/// - the fd was checked at this tick of the clock;
/// - the ring is known to have room in one piece;
/// - no option, shutdown, error or cancellation is pending, `flags` allow it, and no direct transfer would be tried.
///
/// # Safety
/// `from` is readable for `len` bytes.
#[inline]
unsafe fn quick(socket: &'static Socket, fd: c_int, from: *const u8, len: usize, flags: c_int) -> bool {
    if socket.tx_mode.load(Relaxed) != Mode::Link
        || flags & !QUICK != 0
        || !(1..zero_copy::LEAST).contains(&len)
        || !is_plausible(from)
        || thread::current().is_cancelled()
    {
        return false;
    }
    let Some(mut guard) = socket.tx.try_lock() else {
        return false;
    };
    let tx = &mut *guard;
    if socket.tx_mode.load(Acquire) != Mode::Link
        || tx.end.is_shut()
        || tx.wake_delayed
        || socket.options.corked.load(Relaxed)
        || socket.wakes.is_dead()
        || !table::still(fd, socket)
        || !tx.own.seen.is_at(fd, time::tick())
    {
        return false;
    }
    let Some(producer) = tx.producer.as_mut() else {
        return false;
    };
    // SAFETY: `from` is readable for `len` bytes by this function's contract.
    if ready::is_reader_gone(producer) || !unsafe { producer.put(from, len) } {
        return false;
    }
    let wake = producer.commit(len);
    on_sent(socket, &mut tx.own, len);
    let section = guard.unlock();
    ready::notify_peer(socket, wake);
    drop(section);
    true
}

/// Does what [`send`] does, if the short way is not possible.
///
/// # Safety
/// The pieces of `iov` are readable.
#[inline(never)]
unsafe fn send_unless_quick(
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
    if let Some(n) = on_tcp(&began, Some(flags), || real(fd)) {
        return n;
    }
    // SAFETY: the pieces of `iov` are readable by this function's contract.
    unsafe { send_slow(began, fd, iov, flags, real) }
}

/// Keeps the connection on TCP for good, or takes it back there, before a send with one of the flags [`FOR_GOOD`].
/// Without this, the send itself might reach the threshold and begin a promotion.
///
/// No marker may follow urgent data in TCP: a read beyond the mark takes the urgent byte from the kernel (tcp(7)). The
/// kernel numbers and reports sends with MSG_ZEROCOPY, and it sees none of the sends that go over a link.
#[cold]
fn keep_on_tcp(socket: &'static Socket, flags: c_int) {
    let is_kept = matches!(socket.promotion.stage(), Stage::Pinned | Stage::Plain);
    if !is_kept || flags & libc::MSG_OOB != 0 {
        within(|| take_back(socket, reason_for(flags)));
    }
}

/// Makes the program's call and returns its result, if the direction is on plain TCP. Otherwise returns `None` without
/// a call, as also if the fd stands for another file by now. `flags` are the flags of a send; they are `None` for a
/// call that may take long even on a non-blocking socket.
#[inline]
pub(super) fn on_tcp(began: &Began, flags: Option<c_int>, real: impl FnOnce() -> ssize_t) -> Option<ssize_t> {
    let socket = began.socket;
    if socket.tx_mode.load(Acquire) != Mode::Tcp {
        return None;
    }
    if socket.promotion.stage() == Stage::Plain {
        let n = real();
        if n > 0 && began.is_named() {
            socket.told.count(|stats| stats.tx.add_tcp(n as u64));
        }
        return Some(n);
    }
    if !socket.enter_tx() {
        return None;
    }
    if began.is_named() {
        let is_quick = flags.is_some_and(|flags| wait::is_quick(socket, flags));
        return Some(plain(socket, is_quick, real));
    }
    leave(socket);
    None
}

/// Makes the program's call on a plain direction, or fails with the kept error if there is one. The caller has entered
/// the kernel's send (`enter_tx`); this function leaves it.
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

/// Makes the kernel's call on a plain direction and counts the bytes. The caller has entered the kernel's send
/// (`enter_tx`); this function leaves it.
#[inline]
fn in_kernel(socket: &'static Socket, is_quick: bool, real: impl FnOnce() -> ssize_t) -> ssize_t {
    let n = if is_quick {
        quick_or_if_cancelled(real, || leave(socket))
    } else {
        about_or_if_cancelled(about(socket), real, || leave(socket))
    };
    if n > 0 {
        account(socket, n as u64);
    }
    leave(socket);
    n
}

/// Returns the address by which a thread records that it is in the kernel's send on this socket
/// ([`is_above_own_send`]).
fn about(socket: &'static Socket) -> *const () {
    (&raw const socket.tx_inside).cast()
}

/// Returns whether the caller is a signal handler that has interrupted its own thread in the kernel's send on this
/// socket. A marker waits until that send returns, and the send waits for the handler. So no byte of the marker has
/// gone yet, and the bytes that the handler sends may precede the marker.
#[cold]
pub(crate) fn is_above_own_send(socket: &'static Socket) -> bool {
    thread::current().is_inside(about(socket))
}

/// Leaves the kernel's send: counts the call out, and closes the thread's critical section. The last call inside also
/// does what other threads could not do meanwhile (`go_on`).
#[inline]
fn leave(socket: &'static Socket) {
    if socket.leave_tx() {
        go_on(socket);
    }
    thread::current().end();
}

/// Calls `f` as [`on_its_file`] does; `f` leaves the kernel's send, which the caller has entered (`enter_tx`). If there
/// is no fd for the call, leaves the kernel's send and returns `None`.
fn on_its_file_or_leave(call: &Call, f: impl FnOnce(c_int) -> ssize_t) -> Option<ssize_t> {
    let went = on_its_file(call, f);
    if went.is_none() {
        leave(call.socket);
    }
    went
}

/// Does what had to wait until no call was inside the kernel's send: writes the marker that is due, and ends a
/// connection that the program has closed.
#[cold]
fn go_on(socket: &'static Socket) {
    let errno = errno::get();
    if socket.tx_mode.load(Acquire) == Mode::Marked && connection::flush(socket) {
        ready::notify_local(socket);
    }
    if socket.numbers.is_closed() {
        on_call_back(socket);
    }
    errno::set(errno);
}

/// Counts `n` bytes that TCP has taken, and begins a promotion at the threshold.
#[inline]
pub(crate) fn account(socket: &'static Socket, n: u64) {
    socket.told.count(|stats| stats.tx.add_tcp(n));
    advance(socket, |progress, threshold| progress.on_sent(n, threshold));
}

/// If the connection is still below the promotion threshold, updates its progress by `count`. Begins a promotion if
/// `count` returns true, which means that the threshold is reached. With the first bytes, also answers an ASK that has
/// waited for them. Does nothing for other connections.
#[inline]
pub(crate) fn advance(socket: &'static Socket, count: impl FnOnce(&Progress, &Threshold) -> bool) {
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

/// Makes the service thread answer an ASK that has waited for this process to use the connection.
#[cold]
pub(crate) fn answer_if_asked(socket: &'static Socket) {
    // The service thread sets `asked`, then checks whether the connection has been used. This thread has counted the
    // use, and reads `asked` next. So at least one of the two threads sees the other's store.
    store_load_fence();
    if socket.promotion.asked.load(SeqCst) && socket.promotion.asked.swap(false, SeqCst) {
        Library::get().service.submit(Command::Used(socket.into()));
    }
}

/// The source of a send's bytes.
pub(super) trait Source {
    /// If the socket is non-blocking, the kernel's own call for this source returns at once.
    const MAY_BE_QUICK: bool = false;
    /// The source's bytes have to go by TCP.
    const IS_FOR_TCP: bool = false;

    /// Returns the bytes left.
    fn len(&self) -> usize;

    /// Returns whether the next bytes have an address at which no program has memory.
    fn is_implausible(&mut self) -> bool {
        false
    }

    /// Sends bytes past the ring, if that is worth it. The call began with `total` bytes.
    fn send_directly(&mut self, _: &mut Call, _flags: c_int, _total: usize) -> Went {
        zero_copy::NOTHING
    }

    /// Moves the next `n` bytes into the ring's free part, `spans`. Returns how many were moved: fewer than `n` if the
    /// source has ended. `None` if only the kernel can read the source.
    ///
    /// # Safety
    /// The source's memory is readable, and the first `n` bytes of `spans` belong to the caller.
    unsafe fn fill(&mut self, spans: &Spans<'_>, n: usize) -> Result<Option<usize>, Stop>;

    /// Passes the rest to the kernel by `fd`. Returns how many bytes TCP has taken.
    fn send_rest(&mut self, _: &'static Socket, _fd: c_int, _flags: c_int) -> ssize_t {
        0
    }
}

impl Source for Iov {
    const MAY_BE_QUICK: bool = true;

    #[inline]
    fn len(&self) -> usize {
        Self::len(self)
    }

    #[inline]
    fn is_implausible(&mut self) -> bool {
        Self::is_implausible(self)
    }

    #[inline]
    fn send_directly(&mut self, call: &mut Call, flags: c_int, total: usize) -> Went {
        if total < zero_copy::LEAST || call.socket.tx_mode.load(Acquire) != Mode::Link {
            return zero_copy::NOTHING;
        }
        zero_copy::send(call, self, flags, total)
    }

    #[inline]
    unsafe fn fill(&mut self, spans: &Spans<'_>, n: usize) -> Result<Option<usize>, Stop> {
        // SAFETY: the pieces are readable, and the ring's part belongs to the caller, by this function's contract.
        Ok(Some(self.walk(n, |from, done, n| unsafe {
            spans.copy_in(done, from, n);
        })))
    }

    fn send_rest(&mut self, socket: &'static Socket, fd: c_int, flags: c_int) -> ssize_t {
        // A send that has taken bytes raises no SIGPIPE.
        let flags = flags | libc::MSG_NOSIGNAL;
        let mut taken = 0;
        loop {
            let (piece, len) = self.head();
            if len == 0 {
                return taken;
            }
            let more = if len < self.len() { libc::MSG_MORE } else { 0 };
            // SAFETY: a piece of the program's memory, readable during the program's call.
            let n = unsafe { real::send().cancellable()(fd, piece.cast(), len, flags | more) };
            if n < 0 {
                // The failed send has taken the error from the TCP socket, so the error is kept.
                reset::keep(socket, errno::get());
                return taken;
            }
            self.advance(n.cast_unsigned());
            taken += n;
            if n.cast_unsigned() < len {
                return taken;
            }
        }
    }
}

/// A send that only the kernel can make.
struct ForKernel;

impl Source for ForKernel {
    const IS_FOR_TCP: bool = true;

    fn len(&self) -> usize {
        1
    }

    unsafe fn fill(&mut self, _: &Spans<'_>, _: usize) -> Result<Option<usize>, Stop> {
        Ok(None)
    }
}

/// The outcome of one attempt of a send.
enum SendStep {
    /// The direction has changed: try again.
    Again,
    /// Only the kernel can serve the send: make its call.
    Kernel,
    /// Make the kernel's call, though a marker is due: the send's bytes may precede the marker ([`is_above_own_send`]).
    Ahead,
    /// The ring or TCP has no room.
    Full,
    /// The attempt has sent all bytes.
    Done,
    /// The program has shut the direction down, and the direction has not left the link yet.
    Shut,
    /// The link cannot serve the send, for this reason: take the connection back to TCP, and try again.
    Leave(Reason),
}

/// Ends a send that has moved `sent` bytes in a direction that the program has shut down. Between hosts the direction
/// stays on the link until the peer has all bytes, and the kernel does not know of the shutdown before that. So this
/// function raises SIGPIPE as the kernel does, unless bytes were sent or MSG_NOSIGNAL is set (send(2)).
#[cold]
fn after_shutdown(sent: usize, flags: c_int) -> Stop {
    if sent == 0 && flags & libc::MSG_NOSIGNAL == 0 {
        let (process, thread) = (rustix::process::getpid(), rustix::thread::gettid());
        let [process, thread] = [process, thread].map(|id| id.as_raw_nonzero().get() as usize);
        // SAFETY: tgkill takes numbers alone, no memory.
        let _ = unsafe { kernel::call(libc::SYS_tgkill, [process, thread, libc::SIGPIPE as usize, 0, 0, 0]) };
    }
    Stop::Failed(libc::EPIPE)
}

// Not inlined: the forced unwind of pthread_cancel runs destructors in this frame (see `hooks`).
#[inline(never)]
unsafe fn send_slow(began: Began, fd: c_int, iov: &mut Iov, flags: c_int, real: &impl Fn(c_int) -> ssize_t) -> ssize_t {
    cancellation_point();
    // SAFETY: the pieces of `iov` are readable by `send`'s contract.
    let result = unsafe { send_from(began, iov, flags, real) };
    result.unwrap_or_else(|| match table::socket(fd) {
        // SAFETY: the pieces of `iov` are readable by `send`'s contract.
        Some(socket) => unsafe { send(socket, fd, iov, flags, real) },
        None => real(fd),
    })
}

/// Makes a call that only the kernel can serve, on a socket that is on its way back to TCP. First waits until the
/// direction is on TCP.
// Not inlined, for the reason at `send_slow`.
#[inline(never)]
pub(crate) fn send_on_tcp(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    // SAFETY: the source has no memory.
    let result = unsafe { send_from(Began::now(socket, fd), &mut ForKernel, flags, real) };
    result.unwrap_or_else(|| outside(|| real(fd)))
}

/// Sends the bytes of `source`. Returns the call's result. `None` if the fd stands for another file by now, and the
/// call has to begin anew, from the fd table.
///
/// # Safety
/// The source's memory is readable.
#[inline]
pub(super) unsafe fn send_from<S: Source>(
    began: Began,
    source: &mut S,
    flags: c_int,
    real: &impl Fn(c_int) -> ssize_t,
) -> Option<ssize_t> {
    let mut call = Call::new(began, Direction::Send);
    let mut sent = 0;
    // SAFETY: by this function's contract.
    let went = unsafe { send_loop(&mut call, source, flags, &mut sent, real) };
    Stop::result(went, &call, sent)
}

/// Sends until all bytes are gone, and waits for room if the call may wait. `sent` counts the bytes.
///
/// # Safety
/// The source's memory is readable.
#[inline]
unsafe fn send_loop<S: Source>(
    call: &mut Call,
    source: &mut S,
    flags: c_int,
    sent: &mut usize,
    real: &impl Fn(c_int) -> ssize_t,
) -> Result<(), Stop> {
    let socket = call.socket;
    crate::notify::fork::reclaim(socket);
    let is_beyond = flags & !SERVED != 0;
    if is_beyond {
        within(|| take_back(socket, reason_for(flags)));
    }
    let total = source.len();
    let mut patience = wait::Patience::default();
    loop {
        if is_beyond || S::IS_FOR_TCP {
            // The direction leaves a link between hosts only after the peer has answered.
            connection::wait_for_tcp(socket);
        }
        let until = match source.send_directly(call, flags, total) {
            Went::Directly(bytes) => {
                *sent += bytes;
                if source.len() == 0 {
                    return Ok(());
                }
                // The reader may wait with a buffer for the rest, so the next bytes are tried directly too.
                continue;
            }
            Went::Not { first } => first,
        };
        // SAFETY: the memory is readable by this function's contract.
        match unsafe { step(call, source, flags, until, sent)? } {
            SendStep::Again => {}
            SendStep::Done => return Ok(()),
            SendStep::Shut => return Err(after_shutdown(*sent, flags)),
            SendStep::Leave(reason) => within(|| take_back(socket, reason)),
            SendStep::Ahead => {
                let went = on_its_file(call, |fd| outside(|| real(fd)));
                let n = went.ok_or(libc::EBADF)?;
                if n > 0 {
                    account(socket, n as u64);
                }
                *sent = stop::moved::<Space>(call, &mut patience, n)?.unwrap_or(0);
                return Ok(());
            }
            SendStep::Kernel if *sent > 0 => {
                if !goes_on(call, flags) {
                    return Ok(());
                }
                if socket.enter_tx() {
                    let before = errno::get();
                    let rest = |fd| in_kernel(socket, false, || source.send_rest(socket, fd, flags));
                    *sent += on_its_file_or_leave(call, rest).unwrap_or(0).max(0).cast_unsigned();
                    // The call as a whole has not failed, so errno stays as it was.
                    errno::set(before);
                    return Ok(());
                }
            }
            SendStep::Kernel => {
                if !call.is_held() && !call.is_named() {
                    return Err(Stop::Anew);
                }
                if socket.enter_tx() {
                    let is_quick = S::MAY_BE_QUICK && wait::is_quick(socket, flags);
                    let real = |fd| stop::unless_interrupted(call.is_held(), &patience, || real(fd));
                    let went = on_its_file_or_leave(call, |fd| plain(socket, is_quick, || real(fd)));
                    if let Some(n) = stop::moved::<Space>(call, &mut patience, went.ok_or(libc::EBADF)?)? {
                        *sent = n;
                        return Ok(());
                    }
                }
            }
            SendStep::Full => {
                wait::may_wait(socket, flags)?;
                stop::hold(call)?;
                stop::wait::<Space>(call, &mut patience, *sent)?;
            }
        }
    }
}

/// Returns whether the rest of a call, whose first bytes went over the link, is sent by TCP. It is if the call may wait
/// and the peer can still take the rest. The call then holds the connection, because all its bytes belong to one
/// connection. The peer's program cannot make a blocking send on kernel TCP return short, and few programs check for a
/// short return.
fn goes_on(call: &mut Call, flags: c_int) -> bool {
    let socket = call.socket;
    if wait::may_wait(socket, flags).is_err() || call.hold_now() != Place::Here {
        return false;
    }
    let Some(_control) = socket.control.lock() else {
        return false;
    };
    // False if the peer has ended its direction or the connection is over: the call then returns the number of bytes
    // sent so far, as a blocking send on kernel TCP does. The program's next call gets the error. The program's next
    // call then gets the error.
    let tcp = socket.tcp();
    !socket.wakes.is_dead() && !socket.has_untold() && tcp.is_some_and(|tcp| !tcp.has_failed() && !tcp.has_peer_ended())
}

/// Makes one attempt to send the bytes of `source`, except its last `until` bytes. Adds the bytes that were sent to
/// `sent`.
///
/// # Safety
/// The source's memory is readable.
#[inline]
unsafe fn step<S: Source>(
    call: &mut Call,
    source: &mut S,
    flags: c_int,
    until: usize,
    sent: &mut usize,
) -> Result<SendStep, Stop> {
    let socket = call.socket;
    if socket.tx_mode.load(Acquire) == Mode::Marked {
        let is_shut = socket.tx.lock().is_some_and(|tx| tx.end.is_shut());
        if !is_shut && within(|| connection::flush(socket)) {
            return Ok(SendStep::Again);
        }
        // If the fd stands for another connection by now, the call must not fail with EPIPE here, nor wait for room: no
        // wake-up would come.
        check_place(call.place_now())?;
        return Ok(match is_shut {
            true => SendStep::Shut,
            false if is_above_own_send(socket) => SendStep::Ahead,
            false => SendStep::Full,
        });
    }
    loop {
        // A signal handler that has interrupted its own thread's send on this stream cannot get the lock.
        let mut tx = socket.tx.lock().ok_or(libc::EINTR)?;
        match socket.tx_mode.load(Acquire) {
            Mode::Link => {}
            Mode::Tcp => return Ok(SendStep::Kernel),
            _ => return Ok(SendStep::Again),
        }
        let tx_now = &mut *tx;
        let Some(producer) = tx_now.producer.as_mut() else {
            return Ok(SendStep::Kernel);
        };
        check_place(call.place(&tx_now.own.seen))?;
        if tx_now.end.is_shut() {
            return Ok(SendStep::Shut);
        }
        if source.is_implausible() {
            return Err(Stop::Failed(libc::EFAULT));
        }
        if socket.wakes.is_dead() || ready::is_reader_gone(producer) {
            // The anchor is dead or the reader is gone: the kernel decides the result of a send whose bytes stay
            // unread.
            socket.tx_mode.go(Move::Left);
            return Ok(SendStep::Kernel);
        }
        let want = (source.len() - until).min(PIECE);
        let spans = match producer.spans(want) {
            Ok(spans) => spans,
            Err(error) => {
                let _section = tx.unlock();
                violation(socket, &error);
                return Ok(SendStep::Again);
            }
        };
        let room = spans.len().min(want);
        // SAFETY: the memory is readable by this function's contract. The first `room` bytes of the ring's free part
        // belong to the producer, which this thread holds by the direction's lock.
        let Some(copied) = (unsafe { source.fill(&spans, room)? }) else {
            return Ok(SendStep::Leave(Reason::Unsupported));
        };
        *sent += copied;
        let holds = copied == want && is_more_to_come(socket, flags, copied);
        let wake = commit(socket, &mut tx, copied, holds);
        let room = if room < want && source.len() > 0 {
            no_room(socket, &mut tx, wait::may_wait(socket, flags).is_ok())
        } else {
            Room::There
        };
        if source.len() == 0 {
            call.let_go(&mut tx.own.waiting);
        }
        let section = tx.unlock();
        ready::notify_peer(socket, wake);
        drop(section);
        if source.len() == 0 {
            return Ok(SendStep::Done);
        }
        if source.len() == until {
            return Ok(SendStep::Again);
        }
        match room {
            Room::There => {}
            Room::Full if ready::progress(socket) => {}
            Room::Full => return Ok(SendStep::Full),
            Room::Unbacked => return Ok(SendStep::Leave(Reason::Resources)),
        }
    }
}

fn reason_for(flags: c_int) -> Reason {
    if flags & libc::MSG_OOB != 0 {
        Reason::OutOfBand
    } else if flags & libc::MSG_ZEROCOPY != 0 {
        Reason::ZeroCopy
    } else {
        Reason::Unsupported
    }
}

/// Takes the socket back to TCP because a call needs what the link does not serve. Preserves errno.
#[cold]
pub(crate) fn take_back(socket: &'static Socket, reason: Reason) {
    let errno = errno::get();
    if let Some(mut control) = socket.control.lock() {
        connection::leave(socket, &mut control, reason);
    }
    errno::set(errno);
}

/// Takes the socket back to TCP so that its other holders can use it; see [`connection::return_to_tcp`].
pub(crate) fn hand_over(socket: &'static Socket, reason: Reason) {
    if let Some(mut control) = socket.control.lock() {
        connection::return_to_tcp(socket, &mut control, reason);
    }
}

/// Closes the link, because the peer has broken the protocol.
#[cold]
pub(crate) fn violation(socket: &'static Socket, error: &RingError) {
    tracing::warn!(target: "rdmasock", slot = socket.slot, %error, "link closed");
    Library::get().service.submit(Command::Violation(socket.into()));
    // Keeps this socket's calls off the link from now on, before the service thread has closed it.
    socket.wakes.set_dead();
}

/// The condition of a call that waits for room to send.
pub(super) struct Space;

impl wait::Wanted for Space {
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

    /// Tries to make room by the reserve ring (`backpressure`). Without memory for that ring, takes the connection back
    /// to TCP. Returns true if either was done.
    #[cold]
    fn avoid_sleep(socket: &'static Socket) -> bool {
        if socket.tx_mode.load(Acquire) != Mode::Link {
            return false;
        }
        let room = socket
            .tx
            .lock()
            .map_or(Room::Full, |mut tx| take_reserve(socket, &mut tx));
        if let Room::Unbacked = room {
            within(|| take_back(socket, Reason::Resources));
        }
        !matches!(room, Room::Full)
    }

    fn unread(socket: &'static Socket) -> Option<u64> {
        unread(socket)
    }
}

// MSG_MORE and TCP_CORK: delay the peer's wake-up, not the bytes.

/// Returns whether the peer's wake-up for these `n` bytes can wait. It can if the program has announced more (MSG_MORE,
/// TCP_CORK): the kernel too would hold back less than a full segment (tcp(7)).
#[inline]
pub(super) fn is_more_to_come(socket: &Socket, flags: c_int, n: usize) -> bool {
    /// The least size of a send that wakes the peer at once, bytes.
    const SEGMENT: usize = 16 * 1024;
    (flags & libc::MSG_MORE != 0 || socket.options.corked.load(Relaxed)) && n < SEGMENT
}

/// Commits the next `n` bytes of the ring, counts them, and returns the peer's wake-up for them. If `holds` is true,
/// the wake-up is left to the next send or to the service thread ([`send_delayed_wake`]), and none is returned.
#[inline(always)]
pub(super) fn commit(socket: &Socket, tx: &mut Tx, n: usize, holds: bool) -> Wake {
    let Some(producer) = tx.producer.as_mut() else {
        return Wake::NONE;
    };
    let wake = if holds {
        producer.commit_quietly(n);
        Wake::NONE
    } else {
        producer.commit(n)
    };
    let was_delayed = std::mem::replace(&mut tx.wake_delayed, holds);
    if holds && !was_delayed {
        Library::get().service.delay_wake();
    }
    if n > 0 {
        on_sent(socket, &mut tx.own, n);
    }
    wake
}

/// Counts `n` bytes that were committed to the ring.
#[inline(always)]
fn on_sent(socket: &Socket, own: &mut TxOwn, n: usize) {
    own.last = own.seen.tick();
    socket.told.count(|stats| stats.tx.add_link(n as u64));
}

/// Wakes the peer for bytes whose wake-up was delayed.
pub(crate) fn send_delayed_wake(socket: &'static Socket) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    if !std::mem::take(&mut tx.wake_delayed) {
        return;
    }
    let wake = tx.producer.as_mut().map_or(Wake::NONE, |p| p.wake());
    drop(tx);
    ready::notify_peer(socket, wake);
}

/// Serves setsockopt(TCP_CORK). Returns true if the kernel's call is not to be made: on the link the library itself
/// holds wake-ups back. The kernel gets the option when the direction is back on TCP ([`pass_cork`]).
pub(crate) fn cork(socket: &'static Socket, on: bool) -> bool {
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    socket.options.corked.store(on, Relaxed);
    let on_link = socket.tx_mode.load(Acquire) == Mode::Link;
    if !on_link {
        tx.own.kernel_corked = on;
    }
    drop(tx);
    if !on {
        send_delayed_wake(socket);
    }
    on_link
}

/// Passes the program's TCP_CORK to the kernel when the direction is back on TCP. The caller holds the direction's
/// lock.
pub(crate) fn pass_cork(socket: &Socket, tx: &mut Tx) {
    let corked = socket.options.corked.load(Relaxed);
    if tx.own.kernel_corked != corked
        && let Some(fd) = socket.numbers.anchor_fd()
    {
        tx.own.kernel_corked = corked;
        let _ = rustix::net::sockopt::set_tcp_cork(fd, corked);
    }
    tx.wake_delayed = false;
}
