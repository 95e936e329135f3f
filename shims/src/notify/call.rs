//! Ties a receive or send of the program to its connection, even if the fd is closed or reused during the call.
//!
//! The kernel looks an fd up once, and holds the file until the call returns. This module does the same in two phases:
//!
//! - Until a call has waited or moved a byte, no other thread can observe that it has begun. If its fd comes to stand
//!   for another file before that, the call begins again on that file.
//! - From its first wait on, the call *holds* the connection: the direction counts the call as waiting
//!   (`RxOwn::waiting`, `TxOwn::waiting`). A close then leaves the connection as it is until the last counted call has
//!   returned (`process/close`).
//!
//! Calls inside the kernel's own receive or send are counted by `Socket::enter_rx` and `enter_tx`.
//!
//! This module also detects that a connection has ended: its fd was closed without a hook, or a close was waiting for
//! calls to return and the last of them has returned. The work of a close is in `process/close`, in a layer above,
//! which registers its functions here ([`tell`]).

use std::ffi::c_int;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use once_cell::race::OnceRef;
use rdmasock_core::os::{privatefd::PrivateFd, thread};

use crate::notify::table;
use crate::objects::socket::{Socket, closed};
use crate::sys::{identity::Seen, time};

/// The direction in which the bytes move.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Receive,
    Send,
}

/// The connection on which a call began: the fd, and the socket to which the table led.
#[derive(Clone, Copy)]
pub(crate) struct Began {
    pub socket: &'static Socket,
    pub fd: c_int,
    generation: u64,
}

impl Began {
    /// Records that a call on `fd` begins; the table has just returned `socket` for it.
    #[inline]
    pub(crate) fn now(socket: &'static Socket, fd: c_int) -> Self {
        Self {
            socket,
            fd,
            generation: socket.generation.load(Relaxed),
        }
    }

    /// Whether `fd` still stands for the connection, by the table alone: the table has the same socket object, and that
    /// has not been reused for another connection.
    #[inline]
    pub(crate) fn is_named(&self) -> bool {
        table::still(self.fd, self.socket) && self.socket.generation.load(Relaxed) == self.generation
    }
}

/// A receive or send of the program.
pub(crate) struct Call {
    began: Began,
    direction: Direction,
    /// The direction counts this call as waiting now.
    is_counted: bool,
    /// The direction counts this call as waiting, or has done so before.
    was_counted: bool,
    /// The fd was checked when the call began to wait, and data or space came while the thread spun. So the fd need not
    /// be checked again.
    pub is_fresh: bool,
}

/// The fd and the socket on which the call began.
impl Deref for Call {
    type Target = Began;

    #[inline]
    fn deref(&self) -> &Began {
        &self.began
    }
}

/// The result of a check whether the call may go on with its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The connection is still the call's own: the fd stands for it, or the call holds it.
    Here,
    /// The fd stands for another file, and the call may begin again on that file.
    Moved,
    /// The fd was closed without a hook while the call waited.
    Lost,
}

impl Call {
    /// Creates a call that has not waited yet.
    #[inline]
    pub(crate) fn new(began: Began, direction: Direction) -> Self {
        Self {
            began,
            direction,
            is_counted: false,
            was_counted: false,
            is_fresh: false,
        }
    }

    /// Checks whether the call may go on with its connection, by the table and then by the kernel. The caller holds the
    /// direction's lock, which protects `seen` (when an fd was last seen to stand for the socket).
    #[inline]
    pub(crate) fn place(&self, seen: &Seen) -> Place {
        match self.place_by_name() {
            Place::Here => self.place_by_kernel(seen),
            place => place,
        }
    }

    /// Makes the check of `place` by the fd table alone, which knows the closes that hooks have seen.
    #[inline]
    pub(crate) fn place_by_name(&self) -> Place {
        if self.is_named() {
            Place::Here
        } else {
            self.place_without_number()
        }
    }

    /// Makes the check of `place` by the kernel, for closes without a hook. Returns `Here` without asking the kernel if
    /// the fd was checked at the present clock tick, or `is_fresh` is set.
    #[inline]
    pub(crate) fn place_by_kernel(&self, seen: &Seen) -> Place {
        match !self.is_fresh && seen.is_due(self.fd) {
            true => self.place_when_due(seen),
            false => Place::Here,
        }
    }

    #[cold]
    fn place_when_due(&self, seen: &Seen) -> Place {
        // `is_seen` does not ask the kernel if a call in the other direction has checked the fd at the same clock tick.
        let place = self.place_if(|| self.socket.numbers.is_seen(self.fd, time::tick()));
        if place != Place::Here {
            seen.forget();
        }
        place
    }

    /// Makes the check by the kernel, however recent the last check was. For a call that is about to wait in the
    /// kernel.
    #[cold]
    pub(crate) fn place_now(&self) -> Place {
        self.place_if(|| self.socket.numbers.is_behind(self.fd))
    }

    /// Makes the check of `place` by the table, then by `is_behind`, which says whether for the kernel the fd still
    /// stands for the socket.
    #[inline]
    fn place_if(&self, is_behind: impl FnOnce() -> bool) -> Place {
        // The service thread may have found, after this call's last check of the table, that the fd was closed without
        // a hook.
        if !self.is_named() {
            return self.place_without_number();
        }
        match is_behind() {
            true => Place::Here,
            false if self.is_counted => Place::Lost,
            false => Place::Moved,
        }
    }

    #[cold]
    fn place_without_number(&self) -> Place {
        match self.socket.numbers.closed.load(Acquire) {
            _ if !self.is_counted => Place::Moved,
            closed::LOST => Place::Lost,
            _ => Place::Here,
        }
    }

    /// Counts the call as waiting: from now on the call holds the connection. `waiting` is the direction's count. The
    /// caller holds the direction's lock, and has just checked that the place is `Here`.
    #[inline]
    pub(crate) fn hold(&mut self, waiting: &mut u32) {
        if !self.is_counted {
            if !self.was_counted {
                // This critical section lasts until the `Call` is dropped. So a `longjmp` out of a signal handler
                // waits, and cannot leave the call counted.
                thread::current().begin();
            }
            *waiting += 1;
            self.is_counted = true;
            self.was_counted = true;
        }
    }

    /// Stops counting the call as waiting: it is about to return. `waiting` is the direction's count, and the caller
    /// holds the direction's lock.
    #[inline]
    pub(crate) fn let_go(&mut self, waiting: &mut u32) {
        if self.is_counted {
            *waiting = waiting.saturating_sub(1);
            self.is_counted = false;
        }
    }

    /// Whether the call holds the connection.
    pub(crate) fn is_held(&self) -> bool {
        self.is_counted
    }

    /// Checks the place, and if it is `Here` makes the call hold the connection ([`Self::hold`]). The caller holds no
    /// lock. In a signal handler that has interrupted the lock's holder, returns `Here`, and the call holds nothing.
    pub(crate) fn hold_now(&mut self) -> Place {
        let place = self.locked(|call, seen, waiting| {
            let place = call.place(seen);
            if place == Place::Here {
                call.hold(waiting);
            }
            place
        });
        place.unwrap_or(Place::Here)
    }

    /// Calls `f` with the direction's values under its lock. `None` in a signal handler that has interrupted the lock's
    /// holder.
    fn locked<R>(&mut self, f: impl FnOnce(&mut Self, &Seen, &mut u32) -> R) -> Option<R> {
        let socket = self.socket;
        Some(match self.direction {
            Direction::Receive => {
                let own = &mut socket.rx.lock()?.own;
                f(self, &own.seen, &mut own.waiting)
            }
            Direction::Send => {
                let own = &mut socket.tx.lock()?.own;
                f(self, &own.seen, &mut own.waiting)
            }
        })
    }

    #[cold]
    fn uncount(&mut self) {
        self.locked(|call, _, waiting| call.let_go(waiting));
    }
}

impl Drop for Call {
    #[inline]
    fn drop(&mut self) {
        if !self.was_counted {
            return;
        }
        if self.is_counted {
            self.uncount();
        }
        if self.socket.numbers.closed.look() != closed::OPEN {
            on_call_back(self.socket);
        }
        thread::current().end();
    }
}

/// Calls `f` with an fd of the connection, for the kernel's own call. Returns `None` if the TCP socket is gone, or if
/// no fd is left for a duplicate and the program's fd stands for another file. If the call holds the connection, the fd
/// is a duplicate: the program may close its own fd, and another file may get the same number, before the kernel looks
/// the number up.
// Not inlined: the forced unwind of pthread_cancel runs destructors in this frame (see `hooks`).
#[inline(never)]
pub(crate) fn on_its_file<R>(call: &Call, f: impl FnOnce(c_int) -> R) -> Option<R> {
    if !call.is_held() {
        return Some(f(call.fd));
    }
    let copy = {
        let _keeps_close_out = call.socket.control.lock();
        call.socket.numbers.anchor_fd().map(PrivateFd::duplicate)
    };
    match copy {
        Some(Ok(copy)) => Some(f(copy.as_raw_fd())),
        // No fd is left for a duplicate, so the program's own fd is used, if it still stands for the socket.
        Some(Err(_)) => call.is_named().then(|| f(call.fd)),
        None => None,
    }
}

/// The functions that [`tell`] registers.
pub(crate) struct Told {
    /// Called when a receive or send that began before the connection was closed has returned.
    pub on_call_back: fn(&'static Socket),
    /// Called when an fd was closed without a hook, and may stand for another file already. The table has no entry for
    /// the fd any more.
    pub lose: fn(&'static Socket, c_int),
}

static TOLD: OnceRef<'static, Told> = OnceRef::new();

/// Registers the functions, once, before there is a connection.
pub(crate) fn tell(told: &'static Told) {
    let _ = TOLD.set(told);
}

/// Reports that a call that began before the connection was closed has returned. The last such call ends the
/// connection.
#[cold]
pub(crate) fn on_call_back(socket: &'static Socket) {
    if let Some(told) = TOLD.get() {
        (told.on_call_back)(socket);
    }
}

/// Checks once more an fd that did not stand for `socket` at an earlier check. If the table still has `socket` for the
/// fd, and the kernel has another file or none, removes the entry and reports the fd as lost (`Told::lose`).
#[cold]
pub(crate) fn look_again(socket: &'static Socket, fd: c_int) {
    if table::still(fd, socket) && !socket.numbers.is_behind(fd) {
        table::remove(fd, socket);
        if let Some(told) = TOLD.get() {
            (told.lose)(socket, fd);
        }
    }
}

/// Calls [`look_again`] for the fd by which the library reaches the TCP socket.
pub(crate) fn look_at_anchor(socket: &'static Socket) {
    look_again(socket, socket.numbers.fd.load(Acquire));
}

/// Returns the connection behind `fd`, for a caller that holds no lock of the connection. `None` also if the fd was
/// closed without a hook.
pub(crate) fn connection(fd: c_int) -> Option<&'static Socket> {
    table::socket(fd).and_then(|_| connection_at(fd, time::tick()))
}

/// Does the same as [`connection`], with a [tick](time::tick) that the caller has just read.
#[inline]
pub(crate) fn connection_at(fd: c_int, tick: u64) -> Option<&'static Socket> {
    let socket = table::socket(fd)?;
    if !socket.numbers.is_seen(fd, tick) {
        look_again(socket, fd);
        return table::socket(fd);
    }
    Some(socket)
}
