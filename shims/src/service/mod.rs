//! The service thread: everything of a promotion that no call of the program should wait for.
//!
//! Started when the first connection may need it, asleep otherwise, with all signals blocked. It
//! answers ASKs, makes links, watches the anchors of sockets that are being promoted or are on a
//! link, and is the waiter that peers tell when a stream has more than one.
//!
//! Calls of the program hand it [`Command`](crate::objects::mailbox::Command)s; all else comes through its epoll set. Here are
//! its beginning, its loop and its end; what it remembers is in `state`.

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

pub use signals::SignalsBlocked;
use signals::spawn;
use state::Worker;

use std::ops::ControlFlow;
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicI32, AtomicPtr,
    Ordering::{AcqRel, Acquire, Release, SeqCst},
};

use rdmasock_core::rendezvous::names;
use rdmasock_core::stats::Reason;
use rustix::event::epoll as kernel;

use rdmasock_core::stream::connection::{self, SocketIo as _, Task};

use crate::objects::library::Library;
use crate::objects::link::up;
use crate::objects::mailbox::{Thread, kind};
use crate::objects::socket;
use crate::objects::waiters::SERVICE;
use crate::polling::served;
use crate::sys::time::{self, wait_until};

/// What a mailbox is given.
pub const THREAD: Thread = Thread {
    wake: wake_if_asleep,
    start,
};

fn wake_if_asleep() {
    Library::get().waiters.ring_if_sleeping(SERVICE);
}

/// Starts the thread, which nobody has done yet. False if it cannot be made.
fn start() -> bool {
    let errno = crate::sys::errno::get();
    // Here, in the middle of the program's own call, so that what the thread begins with is at no moment the number
    // that the program's next file is to get.
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
        // Not until then does libc have the thread's record in order: in a child that the program makes by clone(2)
        // as it is, the record stays as it was, and setuid(2) would wait for ever for a thread that is about to
        // begin.
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
        // It is about to run, or could not be made.
        0 => !service.is_started(),
        id => is_gone(id),
    });
}

/// Whether the process has no thread `id`. Not by /proc, which need not be there.
fn is_gone(id: i32) -> bool {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let arguments = [process as usize, id as usize, 0, 0, 0, 0];
    // SAFETY: signal 0 is none.
    unsafe { rdmasock_core::os::kernel::call(libc::SYS_tgkill, arguments) }.is_err()
}

/// The worker of a thread that was paused, until the next thread takes it.
static PAUSED: AtomicPtr<Worker> = AtomicPtr::new(null_mut());

/// Takes the paused worker. A fork child leaks its parent's.
fn take_paused() -> Option<Box<Worker>> {
    let worker = PAUSED.swap(null_mut(), AcqRel);
    // SAFETY: null, or a box that its thread has given up and that is taken once.
    unsafe {
        let library = worker.as_ref()?.library;
        let mut worker = std::ptr::eq(library, Library::get()).then(|| Box::from_raw(worker))?;
        worker.return_to_namespace();
        Some(worker)
    }
}

/// Whether a thread can be made now, which is then gone again. Not after unshare(CLONE_NEWPID), for one.
///
/// All signals are blocked, as for the next two.
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

/// Ends the thread until [`resume`]. Commands and events wait for it meanwhile. False if there is none, or it does not
/// end in time.
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

/// Starts the paused thread again. If it cannot be made, the next command tries that again.
pub fn resume(library: &Library) {
    library.service.thread.store(0, SeqCst);
    if !start() {
        library.service.has_no_thread();
    }
}

/// Has the service thread, if there is one, look at what it does now and then.
pub fn wake() {
    if let Some(library) = Library::current() {
        library.waiters.ring(crate::objects::waiters::SERVICE);
    }
}

impl Worker {
    /// Works until the thread is to end. If that is for a pause, the worker is left in [`PAUSED`].
    fn run(mut self: Box<Self>) {
        let service = self.service;
        loop {
            guard::rounds(|| self.round(), std::thread::sleep);
            if service.ending.load(SeqCst) {
                return;
            }
            PAUSED.store(Box::into_raw(self), Release);
            // If not, the pause was given up meanwhile.
            if service.pausing.swap(false, AcqRel) {
                return;
            }
            match take_paused() {
                Some(worker) => self = worker,
                None => return,
            }
        }
    }

    /// What there is to do, a sleep, and what that brings.
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
        // Never without a look: commands may come faster than they are carried out.
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

    /// Commands, and streams whose peers told us something.
    fn drain(&mut self) {
        crate::process::close::end_orphans();
        // What is added meanwhile is for the next time: what is due at a time is not to wait for it. One by one: a
        // panic costs no other command.
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
        // Last: answers have come.
        self.ask_next();
    }

    /// What is to be done once, at a time.
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
