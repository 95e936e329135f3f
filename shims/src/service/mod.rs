//! The service thread: every step of a promotion that no call of the program should wait for.
//!
//! The thread starts when the first connection may need it, sleeps otherwise, and has all signals blocked. It answers
//! ASKs, makes links, and watches the TCP sockets of connections that are being promoted or are on a link. It is also
//! the waiter that peers notify when a stream has more than one waiter.
//!
//! Calls of the program hand it [`Command`](crate::objects::mailbox::Command)s; all other work comes through its epoll
//! set. This file has the thread's start, loop and end; its state is in `state`.

mod alarms;
mod answer;
mod ask;
mod asking;
mod bulk;
mod bulks;
mod channels;
mod command;
mod control;
mod ends;
mod guard;
mod guests;
mod handshakes;
mod linger;
mod link_table;
mod links;
mod pairs;
mod remote;
mod retry;
mod rings;
mod signals;
mod standstill;
mod state;
mod timers;
mod watch;

use std::ops::ControlFlow;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicPtr};

use rdmasock_core::rendezvous::names;
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection::{self, SocketIo as _, Task};
use rustix::event::epoll as kernel;
pub use signals::SignalsBlocked;
use signals::spawn;
use state::Worker;

use crate::objects::library::Library;
use crate::objects::link::up;
use crate::objects::mailbox::{Thread, kind};
use crate::objects::socket;
use crate::objects::waiters::SERVICE;
use crate::polling::served;
use crate::sys::time::{self, wait_until};

/// The functions that a mailbox calls to start the thread and to wake it.
pub const THREAD: Thread = Thread {
    wake: wake_if_asleep,
    start,
};

fn wake_if_asleep() {
    Library::get().waiters.ring_if_sleeping(SERVICE);
}

/// Starts the thread; the caller makes sure that it does not run yet. Returns false if it cannot be made.
fn start() -> bool {
    let errno = crate::sys::errno::get();
    // The calling thread opens this socket, in the middle of the program's own call. So the socket's first fd is at no
    // moment the fd that the program's next file is to get.
    let name = names::Listener::instance(&Library::get().id).ok();
    let blocked = SignalsBlocked::new();
    let mask = blocked.0;
    let spawned = spawn(c"rdmasock", 512 * 1024, move || {
        let own = &Library::get().service;
        let id = rustix::thread::gettid().as_raw_nonzero().get();
        own.thread.store(id, SeqCst);
        match take_paused().or_else(|| Worker::new(mask, name).map(Box::new)) {
            Some(worker) => worker.run(),
            None => own.has_no_thread(),
        }
    });
    drop(blocked);
    match &spawned {
        // Until the thread runs, libc's record of it is incomplete. A child that the program makes by a bare clone(2)
        // keeps the record as it was. In that child setuid(2) would wait for ever for a thread that is about to begin.
        Ok(_) => {
            let own = &Library::get().service;
            wait_until(|| own.thread.load(Acquire) != 0);
        }
        Err(error) => {
            tracing::warn!(target: "rdmasock", %error, "no service thread: connections stay on TCP");
        }
    }
    crate::sys::errno::set(errno);
    spawned.is_ok()
}

/// Ends the thread for good, also one that has not begun, and waits until it is gone.
pub fn end(library: &Library) {
    let service = &library.service;
    service.ending.store(true, SeqCst);
    if !service.claim_start() {
        return;
    }
    Library::get().waiters.ring(SERVICE);
    wait_until(|| match service.thread.load(Acquire) {
        // The thread is about to run, or could not be made.
        0 => !service.is_started(),
        id => is_gone(id),
    });
}

/// Returns whether the process has no thread `id`. Does not read /proc, which may not be mounted.
fn is_gone(id: i32) -> bool {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let arguments = [process as usize, id as usize, 0, 0, 0, 0];
    // SAFETY: tgkill(2) takes no address, and signal 0 only checks that the thread exists.
    unsafe { rdmasock_core::os::kernel::call(libc::SYS_tgkill, arguments) }.is_err()
}

/// The worker of a paused thread, until the next thread takes it.
static PAUSED: AtomicPtr<Worker> = AtomicPtr::new(null_mut());

/// Takes the paused worker. `None` if there is none, or if it belongs to another instance: a fork child leaks its
/// parent's worker.
fn take_paused() -> Option<Box<Worker>> {
    let worker = PAUSED.swap(null_mut(), AcqRel);
    // SAFETY: the pointer is null, or a box that `run` has given up. The swap gives it to one caller only.
    unsafe {
        let library = worker.as_ref()?.library;
        let mut worker = std::ptr::eq(library, Library::get()).then(|| Box::from_raw(worker))?;
        worker.return_to_namespace();
        Some(worker)
    }
}

/// Returns whether a thread can be made now; the thread that it makes for that has ended on return. False for example
/// after unshare(CLONE_NEWPID).
///
/// The caller has blocked all signals, as for [`pause`] and [`resume`].
pub fn can_resume() -> bool {
    static THREAD: AtomicI32 = AtomicI32::new(0);
    THREAD.store(0, SeqCst);
    let made = spawn(c"rdmasock", 256 * 1024, || {
        THREAD.store(rustix::thread::gettid().as_raw_nonzero().get(), SeqCst);
    });
    if made.is_ok() {
        wait_until(|| match THREAD.load(SeqCst) {
            0 => false,
            id => is_gone(id),
        });
    }
    made.is_ok()
}

/// Ends the thread until [`resume`]; commands and events wait meanwhile. Returns false if no thread runs, or if it does
/// not end in time.
pub fn pause(library: &Library) -> bool {
    let service = &library.service;
    if !service.is_started() || service.pausing.swap(true, SeqCst) {
        return false;
    }
    library.waiters.ring(SERVICE);
    wait_until(|| !service.pausing.load(Acquire));
    if service.pausing.swap(false, AcqRel) {
        return false;
    }
    wait_until(|| is_gone(service.thread.load(Acquire)));
    true
}

/// Starts the paused thread again. If it cannot be made, the next command tries again.
pub fn resume(library: &Library) {
    library.service.thread.store(0, SeqCst);
    if !start() {
        library.service.has_no_thread();
    }
}

/// Wakes the service thread, if there is one, so that it checks its timers and conditions.
pub fn wake() {
    if let Some(library) = Library::current() {
        library.waiters.ring(crate::objects::waiters::SERVICE);
    }
}

impl Worker {
    /// Works until the thread is to end. If it ends for a pause, the worker stays in [`PAUSED`].
    fn run(mut self: Box<Self>) {
        let service = self.service;
        loop {
            guard::rounds(|| self.round(), std::thread::sleep);
            if service.ending.load(SeqCst) {
                return;
            }
            PAUSED.store(Box::into_raw(self), Release);
            // False if the pause was given up meanwhile: then this thread goes on.
            if service.pausing.swap(false, AcqRel) {
                return;
            }
            match take_paused() {
                Some(worker) => self = worker,
                None => return,
            }
        }
    }

    /// Carries out what is pending, sleeps, and handles the events that the sleep has brought. Returns `Break` when the
    /// thread is to end.
    fn round(&mut self) -> ControlFlow<()> {
        if self.service.ending.load(SeqCst) || self.service.pausing.load(SeqCst) {
            return ControlFlow::Break(());
        }
        let mut reported = [kernel::Event {
            flags: kernel::EventFlags::empty(),
            data: kernel::EventData::new_u64(0),
        }; 64];
        self.drain();
        let timeout = timers::next(self).map(|at| at.saturating_sub(time::now_ns()));
        self.library.waiters.enter_sleep(SERVICE);
        let idle = self.events.is_empty()
            && self.commands.is_empty()
            && self.service.is_empty()
            && !up::all().iter().any(|l| l.has_ready(SERVICE));
        // The epoll set is polled even while commands are queued: they may come faster than they are carried out.
        let timeout = if idle { timeout } else { Some(0) };
        let timeout = timeout.map(|ns| rustix::time::Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        });
        let n = kernel::wait(&self.service.epoll, &mut reported[..], timeout.as_ref()).unwrap_or(0);
        self.library.waiters.leave_sleep(SERVICE);
        self.events.extend(reported.iter().take(n).copied());
        while let Some(event) = self.events.pop_front() {
            self.on_event(event);
        }
        timers::run(self, time::now_ns());
        self.close_left();
        ControlFlow::Continue(())
    }

    /// Carries out commands, and handles notifications of peers.
    fn drain(&mut self) {
        crate::process::close::end_orphans();
        // Commands that are added meanwhile are left for the next round, so that timers do not wait for them. They are
        // taken one by one, so that a panic costs no other command.
        self.service.take_all(&mut self.commands);
        while let Some(command) = self.commands.pop_front() {
            self.on_command(command);
        }
        let requests = crate::objects::holders::requests();
        if std::mem::replace(&mut self.requests, requests) != requests {
            crate::notify::epoll::Epoll::ring_all_who_sleep();
            for socket in socket::in_use() {
                if socket.promotion.holders.is_wanted() && connection::press_on(socket) {
                    crate::data::tx::hand_over(socket, Reason::OtherProcess);
                    socket.later(Task::Settle);
                }
            }
        }
        for link in up::all() {
            link.progress();
            served::tell(link);
            self.poll_remote(link);
        }
        // Last, after answers have been read.
        self.ask_next();
    }

    /// Does the one-time work whose alarms are due.
    fn on_alarms(&mut self, now: u64) {
        if self.alarms.listen.rings(now) {
            self.listen_to_names(true);
        }
        if self.alarms.maintain.rings(now) {
            self.maintain_links();
        }
        if self.alarms.watch.rings(now) {
            self.watch_links(now);
        }
        if self.alarms.apart.rings(now) {
            for id in std::mem::take(&mut self.unread) {
                self.listen_to(id);
                self.on_channel(id);
            }
        }
        if self.alarms.free_links.rings(now) {
            self.free_dead_links();
        }
        if self.alarms.wake.rings(now) {
            self.service.delaying.begin();
            for socket in socket::all() {
                crate::data::tx::send_delayed_wake(socket);
            }
        }
    }

    fn on_event(&mut self, event: kernel::Event) {
        let data = event.data.u64();
        let id = data & 0x00ff_ffff_ffff_ffff;
        match data >> 56 {
            kind::INSTANCE => {
                let accept = |worker: &Self| match &worker.instance_name {
                    Some(name) => name.accept(),
                    None => Ok(None),
                };
                self.receive_guests(None, accept);
            }
            kind::NAME => {
                let Some(listener) = self.listeners.get(id as usize).copied() else {
                    return;
                };
                self.receive_guests(Some(listener), |_| listener.accept_asker());
            }
            kind::CHANNEL => self.on_channel(id),
            kind::APART => self.on_apart(id),
            kind::ANCHOR => self.on_anchor(id),
            kind::LINGER => self.lingering.on_event(id),
            kind::ACCEPTOR => self.on_acceptor(id),
            kind::PAIR_STATE => self.on_pair_state(id),
            kind::COMPLETION => self.on_completion(id),
            kind::CONTROL => self.on_control(),
            kind::HOST => self.on_host(id),
            _ => {}
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
