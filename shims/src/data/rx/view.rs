//! Receiving without a copy: the program looks at the bytes where they lie in the ring, and says when it has done so.
//!
//! A view takes nothing from the ring, so its writer cannot write there, and every way that a direction leaves a link
//! finds the bytes unread: they are read where they are, or come again by TCP. What a view needs beside that is that
//! the ring stays where it is and is not given to another stream, also once this one has left it in that second way:
//! for that it [holds](crate::objects::link::held::Held) the stream's number.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use libc::ssize_t;
use rdmasock_core::fabric::ring::{Consumer, Wake};
use rdmasock_core::stream::connection;

use super::ring;
use super::step::RecvStep;
use super::{Data, at_nothing, recv};
use crate::data::tx;
use crate::notify::call::{Began, Call, Direction, Place};
use crate::notify::closing;
use crate::notify::ready;
use crate::notify::reclaim::reclaim;
use crate::notify::table;
use crate::notify::wait;
use crate::objects::link::held::Held;
use crate::objects::socket::{Mode, Rx, Socket, View};
use crate::signals::jump::within;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::real;

/// Where bytes lie: up to two pieces, the second perhaps empty.
pub type Pieces = [(*mut u8, usize); 2];

/// The next bytes that the link has brought, in at most `most` pieces, and how many there are: 0 at the end of the
/// stream. Waits for them as a receive with these flags does. `Err` is the errno, EOPNOTSUPP where TCP has what comes
/// next.
// Not inlined: the forced unwind of pthread_cancel runs the call's destructor here (see `hooks`).
#[inline(never)]
pub fn view(socket: &'static Socket, fd: c_int, most: usize, flags: c_int) -> Result<(Pieces, usize), c_int> {
    let mut call = Call::new(Began::now(socket, fd), Direction::Receive);
    reclaim(socket);
    let mut patience = wait::Patience::default();
    let mut is_again = false;
    loop {
        if socket.rx_mode.load(Acquire) != Mode::Link {
            if !call.is_held() && !call.is_named() {
                return Err(moved(socket, fd));
            }
            match tcp(socket, call.fd)? {
                true => return Ok(([(std::ptr::null_mut(), 0); 2], 0)),
                false if socket.rx_mode.load(Acquire) == Mode::Link => continue,
                false => return Err(libc::EOPNOTSUPP),
            }
        }
        let mut pieces = [(std::ptr::null_mut(), 0); 2];
        match look(&mut call, most, flags, &mut is_again, &mut pieces) {
            RecvStep::Got(n) | RecvStep::GotPart(n) => return Ok((pieces, n)),
            RecvStep::Again | RecvStep::Kernel | RecvStep::Leave => {}
            RecvStep::Fail(error) => return Err(error),
            RecvStep::Elsewhere(Place::Here) => {}
            RecvStep::Elsewhere(Place::Moved) => {
                closing::look_again(socket, call.fd);
                return Err(moved(socket, fd));
            }
            RecvStep::Elsewhere(Place::Lost) => {
                closing::look_again(socket, call.fd);
                return Err(libc::EBADF);
            }
            RecvStep::Empty => {
                wait::may_wait(socket, flags)?;
                if !call.is_held() && call.hold_now() != Place::Here {
                    closing::look_again(socket, call.fd);
                    return Err(libc::EBADF);
                }
                call.is_fresh = wait::wait_for::<Data>(socket, &mut patience)?;
            }
        }
    }
}

/// The number stands for something else by now: closed, or another file, of which there is no view.
fn moved(socket: &'static Socket, fd: c_int) -> c_int {
    if table::socket(fd).is_some_and(|now| !std::ptr::eq(now, socket)) {
        libc::EOPNOTSUPP
    } else {
        libc::EBADF
    }
}

/// Whether TCP, which has what comes next, has come to its end; an error that it has is this call's.
fn tcp(socket: &'static Socket, fd: c_int) -> Result<bool, c_int> {
    let mut byte = 0u8;
    let buf = (&raw mut byte).cast();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let before = errno::get();
    // SAFETY: a buffer of one byte.
    let kernel = |fd| unsafe { real::recv()(fd, buf, 1, flags) };
    // SAFETY: likewise.
    let n: ssize_t = unsafe { recv(socket, fd, &mut Iov::one(buf, 1), flags, &kernel) };
    let error = errno::get();
    errno::set(before);
    match n {
        0 => Ok(true),
        n if n < 0 && error != libc::EAGAIN => Err(error),
        _ => Ok(false),
    }
}

/// What the ring holds, as in a receive. `is_again`: this call has taken in what the peer has sent.
fn look(call: &mut Call, most: usize, flags: c_int, is_again: &mut bool, pieces: &mut Pieces) -> RecvStep {
    let socket = call.socket;
    let Some(mut rx) = socket.rx.lock() else {
        return RecvStep::Fail(libc::EINTR);
    };
    if socket.rx_mode.load(Acquire) != Mode::Link {
        return RecvStep::Again;
    }
    if !is_held(&rx) {
        drop(rx);
        return match within(|| hold(socket)) {
            true => RecvStep::Again,
            false => RecvStep::Fail(libc::EOPNOTSUPP),
        };
    }
    let place = call.place_by_name();
    if place != Place::Here {
        return RecvStep::Elsewhere(place);
    }
    // Before the look at the ring: what was sent before the end is in the ring when we see the end.
    let ended = connection::is_over(socket, &rx);
    let state = &mut *rx;
    let Some(consumer) = state.consumer.as_mut() else {
        return RecvStep::Again;
    };
    let found = match consumer.spans(usize::MAX) {
        Ok(spans) => spans.pieces(),
        Err(error) => {
            let _section = rx.unlock();
            tx::violation(socket, &error);
            return RecvStep::Fail(libc::ECONNRESET);
        }
    };
    let [(_, first), (_, second)] = found;
    let n = if most > 1 { first + second } else { first };
    if n > 0 && state.own.direct.is_waiting {
        // It is in the buffer of another call, which is about to take it.
        drop(rx);
        std::thread::yield_now();
        return RecvStep::Empty;
    }
    if n > 0 {
        let place = call.place_by_kernel(&state.own.seen);
        if place != Place::Here {
            return RecvStep::Elsewhere(place);
        }
        if let Some(view) = &mut state.own.view {
            let at = consumer.position();
            let end = at + n as u64;
            if (view.at, view.end) == (at, end) && !std::mem::replace(is_again, true) {
                // Who asks once more looks for what follows, which a link between hosts does not bring by itself.
                let _section = rx.unlock();
                ready::progress(socket);
                return RecvStep::Again;
            }
            (view.at, view.end) = (at, end);
        }
        *pieces = found;
        call.let_go(&mut rx.own.waiting);
        return RecvStep::Got(n);
    }
    at_nothing(call, rx, flags, ended)
}

/// Sees to it that the ring of the stream that the direction is on, if it is on one, is held for views. False if that
/// cannot be.
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
    // What was held before is let go of without the locks.
    drop(rx);
    drop(control);
    drop(before);
    can_be
}

fn is_held(rx: &Rx) -> bool {
    let stream = rx.consumer.as_ref().map(Consumer::stream);
    stream.is_some() && rx.own.view.as_ref().map(|view| view.stream) == stream
}

/// The program is done with the next `n` bytes of its view. `Err` is the errno: EINVAL, the view has fewer; ECANCELED,
/// the connection has left the link with them, and they come again by TCP.
pub fn release(socket: &'static Socket, n: usize) -> Result<(), c_int> {
    let mut rx = socket.rx.lock().ok_or(libc::EINTR)?;
    let is_here = socket.rx_mode.load(Acquire) == Mode::Link && is_held(&rx);
    let rx_stays = rx.stays;
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
        // The rest is not taken from the link any more.
        return Err(libc::ECANCELED);
    }
    if n == 0 {
        return Ok(());
    }
    let wake = consumer.consume(n);
    view.at = consumer.position();
    state.own.direct.on_read(n);
    state.own.last = state.own.seen.tick();
    if let Some(stats) = socket.told.stats() {
        stats.add_rx_link(n as u64);
        let rests = !rx_stays && state.own.pace.on_read(n as u64, consumer.known(), stats.sent_on_link());
        socket.wakes.rx_rests.store(rests, Relaxed);
    }
    ring::keep_fit(socket, consumer);
    let _section = rx.unlock();
    if wake != Wake::NONE {
        ready::notify_peer(socket, wake);
    }
    Ok(())
}

/// The stream has left the link for good. What nobody looks at is not held any longer.
pub fn settle(socket: &'static Socket) {
    let over = socket.rx.lock().and_then(|mut rx| {
        let is_over = !is_held(&rx) && rx.own.view.as_ref().is_some_and(|view| view.at >= view.end);
        is_over.then(|| rx.own.view.take()).flatten()
    });
    drop(over);
}

/// The connection is closed, and with it the view.
pub fn end(socket: &'static Socket) {
    let over = socket.rx.lock().and_then(|mut rx| rx.own.view.take());
    drop(over);
}
