//! Receiving without a copy: the program reads the bytes where they lie in the ring, and releases them afterwards.
//!
//! The bytes of a view count as unread, so the writer does not overwrite them. When the direction leaves the link, the
//! program reads them where they are, or the peer sends them again by TCP. In the second case the stream leaves its
//! ring while the program still reads there. The ring must then stay mapped, and no other stream may get it. So a view
//! [holds](crate::objects::link::Held) the ring by the stream's number.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Acquire;

use libc::ssize_t;
use rdmasock_core::fabric::ring::Consumer;
use rdmasock_core::stream::connection;

use crate::data::rx::{Data, RecvStep, at_nothing, broken, on_read, recv};
use crate::data::stop::{self, Stop, check_place};
use crate::notify::call::{Began, Call, Direction};
use crate::notify::fork::reclaim;
use crate::notify::{ready, table, wait};
use crate::objects::link::Held;
use crate::objects::socket::{Mode, Rx, Socket, View};
use crate::signals::jump::within;
use crate::sys::iov::Iov;
use crate::sys::{errno, real};

/// Where the bytes lie: up to two pieces. The second may be empty.
pub(crate) type Pieces = [(*mut u8, usize); 2];

/// Returns the next bytes that the link has brought, in at most `most` pieces, and their count: 0 at the end of the
/// stream. Waits for them as a receive with these flags does. `Err` is the errno; EOPNOTSUPP means that the next bytes
/// are in TCP.
// Not inlined: the forced unwind of pthread_cancel runs destructors in this frame (see `hooks`).
#[inline(never)]
pub(crate) fn view(socket: &'static Socket, fd: c_int, most: usize, flags: c_int) -> Result<(Pieces, usize), c_int> {
    let mut call = Call::new(Began::now(socket, fd), Direction::Receive);
    reclaim(socket);
    // On a link between hosts, bytes reach the ring only when this end polls the link's completions.
    ready::progress(socket);
    let found = find(&mut call, most, flags);
    found.map_err(|stop| {
        stop.error(&call, 0).unwrap_or_else(|| match table::socket(fd) {
            // The fd stands for another connection by now. EOPNOTSUPP makes the program call recv(), which serves that
            // connection.
            Some(now) if !std::ptr::eq(now, socket) => libc::EOPNOTSUPP,
            _ => libc::EBADF,
        })
    })
}

fn find(call: &mut Call, most: usize, flags: c_int) -> Result<(Pieces, usize), Stop> {
    let socket = call.socket;
    let mut patience = wait::Patience::default();
    loop {
        let mut pieces = [(std::ptr::null_mut(), 0); 2];
        if socket.rx_mode.load(Acquire) != Mode::Link {
            if !call.is_held() && !call.is_named() {
                return Err(Stop::Anew);
            }
            match tcp(socket, call.fd)? {
                true => return Ok((pieces, 0)),
                false if socket.rx_mode.load(Acquire) == Mode::Link => continue,
                false => return Err(Stop::Failed(libc::EOPNOTSUPP)),
            }
        }
        match look(call, most, flags, &mut pieces)? {
            RecvStep::Got(n, _) => return Ok((pieces, n)),
            RecvStep::Again | RecvStep::Kernel | RecvStep::Leave => {}
            RecvStep::Empty => {
                wait::may_wait(socket, flags)?;
                stop::hold(call)?;
                call.is_fresh = stop::wait::<Data>(call, &mut patience, 0)?;
            }
        }
    }
}

/// Returns whether TCP, from which the next bytes have to come, is at its end. `Err` is TCP's pending error, which this
/// call reports to the program.
fn tcp(socket: &'static Socket, fd: c_int) -> Result<bool, c_int> {
    let mut byte = 0u8;
    let buf = (&raw mut byte).cast();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let before = errno::get();
    // SAFETY: `buf` is one writable byte.
    let kernel = |fd| unsafe { real::recv()(fd, buf, 1, flags) };
    // SAFETY: `buf` is one writable byte.
    let n: ssize_t = unsafe { recv(socket, fd, &mut Iov::one(buf, 1), flags, &kernel) };
    let error = errno::get();
    errno::set(before);
    match n {
        0 => Ok(true),
        n if n < 0 && error != libc::EAGAIN => Err(error),
        _ => Ok(false),
    }
}

/// Looks once for the next bytes in the ring, as a receive does, and stores where they lie in `pieces`.
fn look(call: &mut Call, most: usize, flags: c_int, pieces: &mut Pieces) -> Result<RecvStep, Stop> {
    let socket = call.socket;
    let mut rx = socket.rx.lock().ok_or(libc::EINTR)?;
    if socket.rx_mode.load(Acquire) != Mode::Link {
        return Ok(RecvStep::Again);
    }
    if !is_held(&rx) {
        drop(rx);
        return match within(|| hold(socket)) {
            true => Ok(RecvStep::Again),
            false => Err(Stop::Failed(libc::EOPNOTSUPP)),
        };
    }
    check_place(call.place_by_name())?;
    // `ended` is read before the ring: when the end is seen, all bytes that precede it are in the ring.
    let ended = connection::is_over(socket, &rx);
    let state = &mut *rx;
    let Some(consumer) = state.consumer.as_mut() else {
        return Ok(RecvStep::Again);
    };
    let found = match consumer.spans(usize::MAX) {
        Ok(spans) => spans.pieces(),
        Err(error) => return Err(broken(rx, socket, &error)),
    };
    let [(_, first), (_, second)] = found;
    let n = if most > 1 { first + second } else { first };
    if n > 0 && state.own.direct.is_waiting {
        // A device has written the bytes into the buffer of another call, which is about to take them.
        drop(rx);
        std::thread::yield_now();
        return Ok(RecvStep::Empty);
    }
    if n > 0 {
        check_place(call.place_by_kernel(&state.own.seen))?;
        if let Some(view) = &mut state.own.view {
            view.at = consumer.position();
            view.end = view.at + n as u64;
        }
        *pieces = found;
        call.let_go(&mut rx.own.waiting);
        return Ok(RecvStep::Got(n, false));
    }
    at_nothing(call, rx, flags, ended)
}

/// Holds the ring of the direction's stream for views, if the direction has a stream. Returns false if the ring cannot
/// be held; true also if there is no stream.
fn hold(socket: &'static Socket) -> bool {
    let Some(control) = socket.control.lock() else {
        return false;
    };
    let Some(opened) = &control.opened else { return true };
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    let Some(stream) = rx.consumer.as_ref().map(Consumer::stream) else {
        return true;
    };
    let before = rx.own.view.take();
    rx.own.view = Held::new(opened.link, opened.mine).map(|held| View {
        _held: held,
        stream,
        at: 0,
        end: 0,
    });
    let can_be = rx.own.view.is_some();
    // The former hold is dropped once the locks are released.
    drop(rx);
    drop(control);
    drop(before);
    can_be
}

fn is_held(rx: &Rx) -> bool {
    let stream = rx.consumer.as_ref().map(Consumer::stream);
    stream.is_some() && rx.own.view.as_ref().map(|view| view.stream) == stream
}

/// Releases the next `n` bytes of the view: they count as received. `Err` is the errno. EINVAL: the view has fewer
/// bytes. ECANCELED: the connection has left the link with the bytes, and they come again by TCP.
pub(crate) fn release(socket: &'static Socket, n: usize) -> Result<(), c_int> {
    let mut rx = socket.rx.lock().ok_or(libc::EINTR)?;
    let is_here = socket.rx_mode.load(Acquire) == Mode::Link && is_held(&rx);
    let rx_stays = rx.stays();
    let state = &mut *rx;
    let Some(view) = &mut state.own.view else {
        return if n == 0 { Ok(()) } else { Err(libc::EINVAL) };
    };
    let Some(consumer) = state.consumer.as_mut().filter(|_| is_here) else {
        let was_open = view.at < view.end;
        let over = rx.own.view.take();
        drop(rx);
        drop(over);
        return match n {
            0 => Ok(()),
            _ if was_open => Err(libc::ECANCELED),
            _ => Err(libc::EINVAL),
        };
    };
    let left = view.end.saturating_sub(consumer.position());
    if n as u64 > left {
        return Err(libc::EINVAL);
    }
    if n as u64 > consumer.known() {
        // The consumer does not read these bytes from the ring any more: they come again by TCP.
        return Err(libc::ECANCELED);
    }
    if n == 0 {
        return Ok(());
    }
    let wake = consumer.consume(n);
    view.at = consumer.position();
    on_read(socket, rx_stays, consumer, &mut state.own, n);
    let _section = rx.unlock();
    ready::notify_peer(socket, wake);
    Ok(())
}

/// Drops a view that has no unreleased bytes, if its stream has left the link for good.
pub(crate) fn settle(socket: &'static Socket) {
    drop(socket.rx.lock().and_then(|mut rx| {
        let is_over = !is_held(&rx) && rx.own.view.as_ref().is_some_and(|view| view.at >= view.end);
        is_over.then(|| rx.own.view.take()).flatten()
    }));
}

/// Ends the view of a connection that is being closed.
pub(crate) fn end(socket: &'static Socket) {
    drop(socket.rx.lock().and_then(|mut rx| rx.own.view.take()));
}
