//! A call that receives or sends: which connection it belongs to, whatever becomes of the number meanwhile.
//!
//! The kernel looks a number up once, and then holds the file until the call is over. So does this: until a call has
//! waited or moved a byte nobody can tell that it has begun, and it may as well begin anew on what the number stands
//! for by then; from its first wait on it is counted in the direction (`Rx::waiting`, `Tx::waiting`), and a close
//! leaves the connection as it is until the last such call is back (`close`). Calls inside the kernel's own receive
//! or send are counted by `Socket::enter_rx` and `enter_tx`.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::os::thread;

use crate::notify::closing;
use crate::notify::table;
use crate::objects::socket::{Socket, closed};
use crate::sys::identity::Seen;

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Receive,
    Send,
}

/// What a call began on: what the number led to then.
#[derive(Clone, Copy)]
pub struct Began {
    socket: &'static Socket,
    fd: c_int,
    generation: u64,
}

impl Began {
    /// A call on `fd`, which the table has just led from to `socket`.
    #[inline]
    pub fn now(socket: &'static Socket, fd: c_int) -> Self {
        Self {
            socket,
            fd,
            generation: socket.generation.load(Relaxed),
        }
    }

    pub fn socket(&self) -> &'static Socket {
        self.socket
    }

    /// The number still stands for the socket, as far as hooks have seen.
    #[inline]
    pub fn is_named(&self) -> bool {
        is_named(self.fd, self.socket, self.generation)
    }
}

#[inline]
fn is_named(fd: c_int, socket: &'static Socket, generation: u64) -> bool {
    table::still(fd, socket) && socket.generation.load(Relaxed) == generation
}

/// See the module.
pub struct Call {
    pub socket: &'static Socket,
    pub fd: c_int,
    direction: Direction,
    generation: u64,
    /// The direction counts this call among those that wait.
    is_counted: bool,
    /// The direction has counted this call among those that wait, now or before.
    was_counted: bool,
    /// The number was seen to stand for the socket when the call began to wait, and what it waited for came while it
    /// spun.
    pub is_fresh: bool,
}

/// What a call finds when it looks again whether the connection is its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The connection is still the call's own.
    Here,
    /// The number stands for something else, and the call may begin anew there.
    Moved,
    /// The number was closed where no hook saw it, while the call waited.
    Lost,
}

impl Call {
    /// A call that has not waited yet.
    #[inline]
    pub fn new(began: Began, direction: Direction) -> Self {
        Self {
            socket: began.socket,
            fd: began.fd,
            direction,
            generation: began.generation,
            is_counted: false,
            was_counted: false,
            is_fresh: false,
        }
    }

    /// Whether the socket is still what the call began on. The caller holds the direction's lock, with `seen` in it.
    #[inline]
    pub fn place(&self, seen: &Seen) -> Place {
        match self.place_by_name() {
            Place::Here => self.place_by_kernel(seen),
            place => place,
        }
    }

    /// The same, as far as hooks have seen.
    #[inline]
    pub fn place_by_name(&self) -> Place {
        if self.is_named() {
            Place::Here
        } else {
            self.place_without_number()
        }
    }

    /// The same, by the kernel's word, where the hooks have seen nothing; it is asked when the last answer is old.
    #[inline]
    pub fn place_by_kernel(&self, seen: &Seen) -> Place {
        if self.is_fresh {
            return Place::Here;
        }
        if seen.is_due(self.fd) {
            return self.place_when_due(seen);
        }
        Place::Here
    }

    #[cold]
    fn place_when_due(&self, seen: &Seen) -> Place {
        // A look of the other direction will do.
        let place = self.place_if(|| self.socket.numbers.is_seen(self.fd, crate::sys::time::tick()));
        if place != Place::Here {
            seen.forget();
        }
        place
    }

    /// The same, always asked: for what is about to wait on the kernel's word.
    #[cold]
    pub fn place_now(&self) -> Place {
        self.place_if(|| self.socket.numbers.is_behind(self.fd))
    }

    /// Whether the number stands for the socket says `is_behind`.
    #[inline]
    fn place_if(&self, is_behind: impl FnOnce() -> bool) -> Place {
        // The service thread may have found that the number is lost since this call has looked at the name.
        if !self.is_named() {
            return self.place_without_number();
        }
        match is_behind() {
            true => Place::Here,
            false if self.is_counted => Place::Lost,
            false => Place::Moved,
        }
    }

    /// The number stands for the socket, as far as hooks have seen.
    #[inline]
    pub fn is_named(&self) -> bool {
        is_named(self.fd, self.socket, self.generation)
    }

    #[cold]
    fn place_without_number(&self) -> Place {
        match self.socket.numbers.closed.load(Acquire) {
            _ if !self.is_counted => Place::Moved,
            closed::LOST => Place::Lost,
            _ => Place::Here,
        }
    }

    /// The call is about to wait: from now on it holds the connection. The caller holds the direction's lock, with
    /// `waiting` in it, and has just found the place.
    #[inline]
    pub fn hold(&mut self, waiting: &mut u32) {
        if !self.is_counted {
            if !self.was_counted {
                // Until the call is over: a jump out of a signal handler is not to leave it counted.
                thread::current().begin();
            }
            *waiting += 1;
            self.is_counted = true;
            self.was_counted = true;
        }
    }

    /// The call is about to return. Likewise.
    #[inline]
    pub fn let_go(&mut self, waiting: &mut u32) {
        if self.is_counted {
            *waiting = waiting.saturating_sub(1);
            self.is_counted = false;
        }
    }

    /// Whether the connection is held for this call.
    pub fn is_held(&self) -> bool {
        self.is_counted
    }

    /// [`Self::hold`] where no lock is held. Not `Here`: nothing is held.
    pub fn hold_now(&mut self) -> Place {
        let place = self.locked(|call, seen, waiting| {
            let place = call.place(seen);
            if place == Place::Here {
                call.hold(waiting);
            }
            place
        });
        place.unwrap_or(Place::Here)
    }

    /// Calls `f` with what is under the direction's lock. `None` in a signal handler above its holder.
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
}

/// Calls `f` with a number of the connection, for the kernel's own call. For one that has waited already that is not
/// the program's number, which may be closed and another's before the kernel looks it up. `None`: there is no anchor.
// Not inlined: the forced unwind of pthread_cancel runs the copy's destructor here (see `hooks`).
#[inline(never)]
pub fn on_its_file<R>(call: &Call, f: impl FnOnce(c_int) -> R) -> Option<R> {
    if !call.is_held() {
        return Some(f(call.fd));
    }
    let copy = {
        let _keeps_close_out = call.socket.control.lock();
        call.socket.numbers.anchor_fd().map(PrivateFd::duplicate)
    };
    match copy {
        Some(Ok(copy)) => Some(f(copy.as_raw_fd())),
        // No number left: the program's own, if it still is that.
        Some(Err(_)) => call.is_named().then(|| f(call.fd)),
        None => None,
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
            closing::on_call_back(self.socket);
        }
        thread::current().end();
    }
}

impl Call {
    #[cold]
    fn uncount(&mut self) {
        self.locked(|call, _, waiting| call.let_go(waiting));
    }
}
