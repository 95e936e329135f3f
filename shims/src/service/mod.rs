//! The service thread, which takes every step of a promotion that no call of the program should wait for.
//!
//! The thread starts when the first connection may need it, sleeps otherwise, and has all signals blocked. It answers
//! ASKs, makes links, and watches the TCP sockets of connections that are being promoted or are on a link. It is also
//! the waiter that peers notify when a stream has more than one waiter.
//!
//! Calls of the program hand it [`Command`](crate::objects::mailbox::Command)s; all other work comes through its epoll
//! set. This file has the thread's state, its start, loop and end, the commands and the timers.
//!
//! Words of this folder (ARCHITECTURE.md shows the messages of a promotion):
//!
//! - *question*: an ASK. To *ask for* a connection is to send its peer an ASK. The sender is the *asker*.
//! - *attempt*: one handshake for a promotion, from the ASK on. Each end draws a *nonce* for it.
//! - *name*: an abstract AF_UNIX name. A *service name* belongs to a TCP port, and an instance has a name of its own.
//! - *channel*: a connection to a name, over which messages are exchanged. A *guest* is a channel that a peer has
//!   opened.
//! - *control port*: the UDP port by which other hosts ask.
//! - *bulk queue pair*: a second queue pair of a link to another host, for direct transfers.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr};
use std::time::Duration;

use rdmasock_core::ids::{Cookie, Nonce, Tuple};
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::heap;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::os::thread::spawn;
use rdmasock_core::rendezvous::control::{Memory, QueryId};
use rdmasock_core::rendezvous::diag::Owner;
use rdmasock_core::rendezvous::{diag, names};
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::stream::connection;
use rdmasock_core::stream::connection::{SocketIo as _, Task};
use rdmasock_core::stream::handshake::Role;
use rustix::event::epoll as kernel;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::time::Timespec;

use crate::config::reach::Devices;
use crate::config::verbs::Acceptor;
use crate::notify::ready;
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::listener::Listener;
use crate::objects::mailbox::{Command, Mailbox, Ref, Remains, kind, tag};
use crate::objects::socket::Socket;
use crate::objects::waiters::SERVICE;
use crate::objects::{link, socket};
use crate::polling::readiness;
use crate::service::answer::Handshakes;
use crate::service::ask::Asking;
use crate::service::control::Control;
use crate::service::hosts::Hosts;
use crate::service::links::{Blocked, Pending};
use crate::service::pairs::{Arriving, Bulk};
use crate::service::watch::Ends;
use crate::signals::ending;
use crate::sys::time;
use crate::sys::time::wait_until;

mod answer;
mod ask;
mod channels;
mod control;
mod hosts;
mod links;
mod pairs;
mod watch;

/// A cookie that no network namespace has.
const ELSEWHERE: u64 = u64::MAX;
/// How long a wake-up is held back for a sender that has announced more bytes (MSG_MORE, TCP_CORK), ns: as long as
/// TCP_CORK holds data (tcp(7)).
const DELAYED_FOR: u64 = 200_000_000;
/// The first pause after a panic; each is twice as long as the one before, up to `LAST_PAUSE`. So a panic that repeats
/// costs little.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The purpose of an entry in `Worker::conns`.
enum Peer {
    /// A guest: a peer has connected to one of this instance's names.
    Incoming {
        listener: Option<&'static Listener>,
        uid: u32,
        /// The nonce of the last YES that was sent on the channel.
        offered: Option<Nonce>,
    },
    /// A channel to a service name or an instance's name, on which this instance has sent a question.
    Asked {
        request: u64,
        by_name: bool,
        /// Once YES has come on this channel: the connection that sends HELLO.
        greets: Option<Ref>,
    },
    /// A channel on which this instance has asked for a link. Between hosts there is no channel: a thread connects a
    /// queue pair.
    Linking(Pending),
    /// A queue pair that another host connects.
    Arriving(Arriving),
    /// A link's side channel; between hosts its queue pair.
    Link(&'static Link),
    /// No channel: a question that came by the control port, and is answered by it.
    Remote(QueryId),
    /// No channel: a connection that the program has closed, and that TCP cannot end yet.
    Closed(Remains),
}

/// An entry in `Worker::conns`: a channel in the service thread's epoll set, or other work that has an id and may time
/// out.
struct Conn {
    /// `None` for a link's channel, which the link owns, and for an entry without a channel.
    channel: Option<Channel>,
    peer: Peer,
    /// When the entry is removed if nothing has come of it by then, monotonic ns; `None` if it may stay.
    until: Option<u64>,
    /// The cookie with which another host has asked for the link, until something has come over the link. On iWARP a
    /// link is up at this end as soon as this end's answer has been sent. The other end may not know of the link yet,
    /// and ask with the same cookie again.
    cookie: Option<Cookie>,
    /// A channel to a separate thread of this process, which receives the peer's next message because that message has
    /// descriptors (`os::apart`). Until the thread has passed the message on, the peer's own channel is not read.
    apart: Option<Channel>,
}

impl Conn {
    fn new(channel: Option<Channel>, peer: Peer, until: Option<u64>) -> Self {
        let (cookie, apart) = (None, None);
        Self {
            channel,
            peer,
            until,
            cookie,
            apart,
        }
    }
}

/// The result of `Worker::watch`: whether the library reports the socket's readiness.
#[derive(PartialEq, Eq)]
enum Watched {
    Done,
    /// Not before the program calls epoll_ctl(EPOLL_CTL_MOD) on the socket (see `Epoll::take_over`).
    AfterMod,
    Impossible,
}

/// The state of the service thread.
struct Worker {
    library: &'static Library,
    service: &'static Mailbox,
    instance_name: Option<names::Listener>,
    /// The cookie of the network namespace that this thread is in; 0 if the kernel does not have such cookies. It is
    /// [`ELSEWHERE`] if the thread is not in the namespace that the first service thread was in.
    namespace: u64,
    /// Returns the owner of the connector's socket. Tests set another function.
    owner_of: fn(&Tuple) -> Owner,
    listeners: Vec<&'static Listener>,
    conns: HashMap<u64, Conn>,
    /// The ids of links' channels whose next message has descriptors that could not be received yet.
    unread: Vec<u64>,
    /// How many channels peers may keep open to this instance's names.
    most_guests: usize,
    next_conn: u64,
    asks: HashMap<u64, Asking>,
    /// Connections for which this instance has yet to ask, in that order. They wait until earlier questions are
    /// answered.
    to_ask: VecDeque<Ref>,
    /// Destinations where no program with the library answers. An entry lasts for `ask::ABSENT_FOR`, so such a server
    /// costs one question in that time, and not one for each connection.
    absent: Memory<SocketAddr, ()>,
    devices: Devices,
    handshakes: Handshakes,
    /// Dead links that are not freed yet. Live links are in `objects::link`.
    dead_links: Vec<&'static Link>,
    /// The listeners for links from other hosts.
    acceptors: HashMap<u64, Acceptor>,
    /// The bulk queue pairs, by the slots of their links.
    bulks: HashMap<u32, Bulk>,
    /// Questions of other hosts.
    control: Control,
    /// Questions to other hosts.
    hosts: Hosts,
    /// Senders that find no room.
    blocked: Vec<Blocked>,
    ends: Ends,
    alarms: Alarms,
    /// How many maintenances of links to other hosts in a row have found a link in use, up to `MAINTAIN_DOUBLINGS`.
    maintained: u32,
    /// Watches whether this thread is the last one of a process that is ending.
    ending: ending::ThreadWatch,
    /// The number of requests of fork children (`holders::requests`) when this thread last read it.
    requests: u32,
    /// Commands that were taken from the mailbox and are not carried out yet.
    commands: VecDeque<Command>,
    /// Events of the epoll set that are not handled yet. Many of them are edge-triggered, and so reported only once.
    events: VecDeque<kernel::Event>,
}

/// Starts the thread; the caller makes sure that it does not run yet. Returns false if it cannot be made.
pub(crate) fn start() -> bool {
    let errno = crate::sys::errno::get();
    // The calling thread opens this socket, in the middle of the program's own call. If the service thread opened it,
    // the socket could for a moment have the fd that the program's next file is to get.
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
pub(crate) fn end(library: &Library) {
    let service = &library.service;
    service.ending.store(true, SeqCst);
    if !service.claim_start() {
        return;
    }
    Library::get().waiters.ring(SERVICE);
    wait_until(|| match service.thread.load(Acquire) {
        // There is no id yet: the thread is about to run. Or it could not be made, and counts as not started.
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

/// Returns whether a thread can be made now. Makes one to find out, and waits until it has ended. False for example
/// after unshare(CLONE_NEWPID).
///
/// The caller has blocked all signals, as for [`pause`] and [`resume`].
pub(crate) fn can_resume() -> bool {
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
pub(crate) fn pause(library: &Library) -> bool {
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
pub(crate) fn resume(library: &Library) {
    library.service.thread.store(0, SeqCst);
    if !start() {
        library.service.has_no_thread();
    }
}

/// Wakes the service thread, if there is one, so that it checks its timers and conditions.
pub(crate) fn wake() {
    if let Some(library) = Library::current() {
        library.waiters.ring(SERVICE);
    }
}

impl Worker {
    /// Works until the thread is to end. If it ends for a pause, the worker stays in [`PAUSED`].
    fn run(mut self: Box<Self>) {
        let service = self.service;
        loop {
            rounds(|| self.round(), std::thread::sleep);
            if service.ending.load(SeqCst) {
                return;
            }
            PAUSED.store(Box::into_raw(self), Release);
            // The swap returns false if the caller of `pause` has given up meanwhile: then this thread goes on.
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
        let round = socket::Round::begin();
        self.drain();
        drop(round);
        let alarm = ALARMS.iter().filter_map(|(at, _)| *at(self)).min();
        let next = TIMERS.iter().filter_map(|(next, _)| next(self)).chain(alarm).min();
        let timeout = next.map(|at| at.saturating_sub(time::now_ns()));
        self.library.waiters.enter_sleep(SERVICE);
        let idle = self.events.is_empty()
            && self.commands.is_empty()
            && self.service.queue.is_empty()
            && !link::all().iter().any(|l| l.has_ready(SERVICE));
        // The epoll set is polled even while commands are queued: they may come faster than they are carried out.
        let timeout = if idle { timeout } else { Some(0) };
        let timeout = timeout.and_then(|ns| Timespec::try_from(Duration::from_nanos(ns)).ok());
        let n = kernel::wait(&self.service.epoll, &mut reported[..], timeout.as_ref()).unwrap_or(0);
        self.library.waiters.leave_sleep(SERVICE);
        let _round = socket::Round::begin();
        self.events.extend(reported.iter().take(n).copied());
        while let Some(event) = self.events.pop_front() {
            self.on_event(event);
        }
        let now = time::now_ns();
        for (_, run) in TIMERS {
            run(self, now);
        }
        for (at, run) in ALARMS {
            if rings(at(self), now) {
                run(self, now);
            }
        }
        self.close_left();
        ControlFlow::Continue(())
    }

    /// Carries out commands, and handles notifications of peers.
    fn drain(&mut self) {
        crate::process::close::end_orphans();
        // Commands that are added meanwhile are left for the next round, so that timers do not wait for them. Each
        // command is taken out by itself, so that a panic costs no other command.
        self.service.queue.take_all(&mut self.commands);
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
        for link in link::all() {
            link.progress();
            readiness::tell(link);
            self.poll_remote(link);
        }
        // Called last, since answers that were read in this round may have made room for further questions.
        self.ask_next();
    }

    fn on_event(&mut self, event: kernel::Event) {
        let data = event.data.u64();
        let id = data & 0x00ff_ffff_ffff_ffff;
        match data >> 56 {
            kind::INSTANCE => self.receive_guests(None),
            kind::NAME => {
                if let Some(listener) = self.listeners.get(id as usize).copied() {
                    self.receive_guests(Some(listener));
                }
            }
            kind::CHANNEL => self.on_channel(id),
            kind::APART => self.on_apart(id),
            kind::ANCHOR => self.on_anchor(id),
            kind::LINGER => self.on_closed(id),
            kind::ACCEPTOR => self.on_acceptor(id),
            kind::PAIR_STATE => self.on_pair_state(id),
            kind::COMPLETION => self.on_completion(id),
            kind::CONTROL => self.on_control(),
            kind::HOST => self.on_host(id),
            _ => {}
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Promote(r) => self.ask_in_turn(r),
            Command::Do(r, task) => self.do_for(r, task),
            Command::Used(r) => self.answer_deferred(r),
            Command::NeedLink(r, peer, offer) => self.need_link(r, peer, offer),
            Command::Dialled(peer, dialled) => self.on_dialled(peer, dialled),
            Command::WantBulk(slot) => self.want_bulk(slot),
            Command::BulkDialled(serial, dialled) => self.on_bulk_dialled(serial, dialled),
            // The slot may belong to another link by now, or to none.
            Command::Outbox(slot) => match link_at(slot) {
                Some(link) if link.is_overfull() => self.break_off(link),
                Some(link) if link.has_outbox() => self.await_room(link, true),
                _ => {}
            },
            Command::Violation(r) => {
                let link = r
                    .get()
                    .and_then(|socket| Some(socket.control.lock()?.opened.as_ref()?.link));
                if let Some(link) = link {
                    self.library.stats.count(Event::LinkViolation);
                    self.link_down(link, Reason::Violation);
                }
            }
            Command::FreeLinks => self.free_dead_links(),
            Command::Vain(slot) => self.look_for_noise(slot),
            Command::Linger(remains) => {
                let id = self.new_conn();
                if self.add(remains.fd.as_fd(), tag(kind::LINGER, id), watch::EVENTS) {
                    let is_sent = remains.unsent.is_empty();
                    let patience = if is_sent {
                        watch::PATIENCE
                    } else {
                        watch::PATIENCE_UNSENT
                    };
                    let until = Some(time::now_ns() + patience);
                    self.conns.insert(id, Conn::new(None, Peer::Closed(remains), until));
                    self.on_closed(id);
                }
            }
            Command::Listen => Listener::all().for_each(|listener| self.listen(listener)),
            Command::Blocked(r) => self.on_blocked(r),
            Command::Lost(r) => {
                if let Some(socket) = r.get() {
                    crate::notify::call::look_at_anchor(socket);
                }
            }
            Command::DelayedWakes => self.alarms.wake = Some(time::now_ns() + DELAYED_FOR),
            Command::Grown => self.on_grown(),
            Command::Maintain => {
                self.alarms.maintain = Some(time::now_ns() + (pairs::MAINTAIN_AFTER << self.maintained))
            }
        }
    }

    /// Does a task for a connection, unless the socket object has become another connection since.
    fn do_for(&mut self, r: Ref, task: Task) {
        let Some(socket) = r.get() else { return };
        let has_changed = match task {
            Task::Notify => true,
            Task::Flush => connection::flush(socket),
            Task::ReadAhead => connection::read_ahead(socket, false),
            Task::Settle => return self.settle(r),
            Task::Drained => {
                // Sends no notification: an edge-triggered set would report once more what it has reported already.
                self.close_if_over(socket);
                false
            }
        };
        if has_changed {
            ready::notify_local(socket);
        }
    }

    /// Returns the state of a new thread; `mask` is the signal mask of the thread that starts it. `None` without
    /// descriptors for it.
    fn new(mask: libc::sigset_t, instance_name: Option<names::Listener>) -> Option<Self> {
        let library = Library::get();
        crate::objects::cgroup::look();
        // How many descriptors this process may have, the library's own among them.
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        let worker = Self {
            library,
            service: &library.service,
            namespace: own_namespace(),
            instance_name,
            owner_of: diag::connector_owner,
            listeners: Vec::new(),
            conns: HashMap::new(),
            unread: Vec::new(),
            most_guests: channels::most_guests(descriptors.unwrap_or(u64::MAX)),
            next_conn: 1,
            asks: HashMap::new(),
            to_ask: VecDeque::new(),
            absent: Memory::new(ask::MOST_ABSENT, ask::ABSENT_FOR),
            devices: Devices::default(),
            handshakes: Handshakes::default(),
            dead_links: Vec::new(),
            acceptors: HashMap::new(),
            bulks: HashMap::new(),
            control: Control::new(time::now_ns())?,
            hosts: Hosts::new(),
            blocked: Vec::new(),
            ends: Ends::default(),
            alarms: Alarms::default(),
            maintained: 0,
            ending: ending::ThreadWatch::new(mask),
            requests: crate::objects::holders::requests(),
            commands: VecDeque::new(),
            events: VecDeque::new(),
        };
        worker.add(
            library.waiters.doorbell(SERVICE)?,
            tag(kind::DOORBELL, 0),
            kernel::EventFlags::IN | kernel::EventFlags::ET,
        );
        if let Some(name) = &worker.instance_name {
            worker.add(name.as_fd(), tag(kind::INSTANCE, 0), kernel::EventFlags::IN);
        }
        Some(worker)
    }

    /// Returns whether there is memory for one more question, channel, attempt and link. The thread checks this before
    /// the first step of each. Later steps need little memory, which the heap's reserve has.
    fn can_begin(&mut self) -> bool {
        heap::can_serve()
            && self.conns.try_reserve(2).is_ok()
            && self.asks.try_reserve(1).is_ok()
            && self.handshakes.offered.try_reserve(1).is_ok()
    }

    /// Returns a new id for a channel, or for another descriptor in the epoll set.
    fn new_conn(&mut self) -> u64 {
        let id = self.next_conn;
        self.next_conn += 1;
        id
    }

    /// Returns the id of an entry whose purpose satisfies `is_it`; `None` if there is none.
    fn conn_where(&self, is_it: impl Fn(&Peer) -> bool) -> Option<u64> {
        let found = self.conns.iter().find(|(_, conn)| is_it(&conn.peer));
        found.map(|(id, _)| *id)
    }

    /// Returns the link that this channel belongs to; `None` if it belongs to none.
    fn link_of(&self, id: u64) -> Option<&'static Link> {
        match self.conns.get(&id)?.peer {
            Peer::Link(link) => Some(link),
            _ => None,
        }
    }

    /// Returns whether the connection is in this thread's network namespace. Names, and what the kernel reports of
    /// addresses, belong to this namespace.
    fn is_here(&self, socket: &'static Socket, tuple: &Tuple) -> bool {
        if self.namespace != 0 || tuple.namespace() != 0 {
            return tuple.namespace() == self.namespace;
        }
        let (local, remote) = ends_of(socket, tuple);
        let inode = socket.control.lock().and_then(|_control| {
            let anchor = socket.numbers.anchor_fd()?;
            Some(rustix::fs::fstat(anchor).ok()?.st_ino)
        });
        inode.is_some_and(|inode| diag::is_socket(local, remote, tuple.device(), inode))
    }

    /// Checks the namespace of a thread that has taken over a paused worker. The names and the control port stay in the
    /// first thread's namespace. If this thread is in another one, no further connection is promoted.
    fn return_to_namespace(&mut self) {
        if own_namespace() != self.namespace {
            self.namespace = ELSEWHERE;
        }
    }

    /// Adds a descriptor to the thread's epoll set. Returns false if the kernel refuses it.
    fn add(&self, fd: BorrowedFd<'_>, data: u64, flags: kernel::EventFlags) -> bool {
        kernel::add(&self.service.epoll, fd, kernel::EventData::new_u64(data), flags).is_ok()
    }
}

/// Returns the keys of the entries for which `is_it` holds.
fn keys<'a, K: Copy + 'a, V: 'a>(map: impl IntoIterator<Item = (&'a K, &'a V)>, is_it: impl Fn(&V) -> bool) -> Vec<K> {
    let found = map.into_iter().filter(|(_, value)| is_it(value));
    found.map(|(key, _)| *key).collect()
}

/// Returns the live link with this slot; `None` if there is none.
fn link_at(slot: u32) -> Option<&'static Link> {
    link::all().into_iter().find(|link| link.slot() == slot)
}

/// Returns the two addresses of a connection, the local one first.
fn ends_of(socket: &Socket, tuple: &Tuple) -> (SocketAddr, SocketAddr) {
    match socket.promotion.role() {
        Role::Connector => (tuple.connector(), tuple.acceptor()),
        Role::Acceptor => (tuple.acceptor(), tuple.connector()),
    }
}

/// Returns the cookie of this thread's network namespace; 0 without descriptors, or if the kernel has no cookies.
fn own_namespace() -> u64 {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = PrivateFd::open(|| socket_with(family, kind, SocketFlags::CLOEXEC, None));
    socket.map_or(0, |socket| crate::sys::sockopt::namespace(socket.as_fd()))
}

/// A part of the thread's work that has deadlines. The first function returns the next deadline, monotonic ns; `None`
/// if nothing is scheduled. The second does what is due at the time that it gets. It is called after every sleep, even
/// if no deadline has passed.
type Timer = (fn(&Worker) -> Option<u64>, fn(&mut Worker, u64));

/// The thread's timers, in the order in which they are handled.
const TIMERS: &[Timer] = &[
    (|w| w.asks.values().map(|a| a.deadline).min(), Worker::expire_asks),
    (|w| w.conns.values().filter_map(|c| c.until).min(), Worker::expire_conns),
    (|w| w.handshakes.next_timeout(), |w, now| w.handshakes.on_timeout(now)),
    (|w| w.blocked.iter().map(|b| b.deadline).min(), Worker::relieve),
    (
        |w| w.ends.next_timeout(),
        |w, now| {
            w.ends.leave_unmarked(now);
            w.ends.look_for_readers(now);
            w.leave_dying(now);
        },
    ),
    (|w| w.control.next_timeout(), Worker::control_on_time),
    (|w| w.hosts.next_timeout(), Worker::hosts_on_time),
    (|w| w.ending.next_timeout(), |w, now| w.ending.on_timeout(now)),
];

/// A kind of work that the thread does once when it is due. The first function returns the field of `Alarms` with the
/// time, the second does the work. Alarms are handled after the timers.
type Alarm = (fn(&mut Worker) -> &mut Option<u64>, fn(&mut Worker, u64));

const ALARMS: &[Alarm] = &[
    (|w| &mut w.alarms.listen, |w, _| w.listen_to_names(true)),
    (|w| &mut w.alarms.maintain, |w, _| w.maintain_links()),
    (|w| &mut w.alarms.watch, Worker::watch_links),
    (
        |w| &mut w.alarms.apart,
        |w, _| {
            for id in std::mem::take(&mut w.unread) {
                w.listen_to(id);
                w.on_channel(id);
            }
        },
    ),
    (|w| &mut w.alarms.free_links, |w, _| w.free_dead_links()),
    (
        |w| &mut w.alarms.wake,
        |w, _| {
            w.service.delaying.begin();
            socket::all().for_each(crate::data::tx::send_delayed_wake);
        },
    ),
    (|w| &mut w.alarms.shrink, Worker::shrink_rings),
];

/// Returns whether the alarm is due at `now`; if so, turns it off.
fn rings(alarm: &mut Option<u64>, now: u64) -> bool {
    alarm.take_if(|at| *at <= now).is_some()
}

/// The times at which the thread does each kind of one-time work, monotonic ns; `None` if the work is not scheduled.
#[derive(Default)]
struct Alarms {
    /// Listens again on the names that were not polled for want of descriptors.
    listen: Option<u64>,
    /// Checks again whether dead links that no socket uses can be freed.
    free_links: Option<u64>,
    /// Sends the wake-ups that were delayed.
    wake: Option<u64>,
    /// Maintains the links to other hosts.
    maintain: Option<u64>,
    /// Checks whether links to other hosts still work.
    watch: Option<u64>,
    /// Tries again to receive or close descriptors in a separate thread (`os::apart`).
    apart: Option<u64>,
    /// Searches for idle rings.
    shrink: Option<u64>,
}

// Panics of the thread are caught. A panic is a defect of the library; neither the program nor its other connections
// are to suffer from it.

thread_local! {
    /// Whether `rounds` catches this thread's panics. Has no destructor, so it may be read at any time.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `round` until it returns `Break`. A panic ends only the round in which it occurs. The next round begins after
/// a `pause`.
///
/// The command or event that has caused the panic is lost. Its connection may stay on TCP, or wait until its
/// promotion's time is up. The next round handles the other commands and events. Locks are released as their guards
/// unwind.
fn rounds(mut round: impl FnMut() -> ControlFlow<()>, mut pause: impl FnMut(Duration)) {
    log_caught_panics();
    let mut rest = FIRST_PAUSE;
    loop {
        match catch_unwind(AssertUnwindSafe(&mut round)) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => return,
            Err(_) => {
                pause(rest);
                rest = (rest * 2).min(LAST_PAUSE);
            }
        }
    }
}

/// Logs a panic that this thread's [`rounds`] will catch. The standard library would write it to fd 2, which is the
/// program's. Any other panic ends the process, and is reported as usual. The hook belongs to this library's own copy
/// of the standard library: a program in Rust has another copy, with another hook.
fn log_caught_panics() {
    IS_GUARDED.set(true);
    // No `Once`: a fork child must not wait for a thread that it does not have.
    static IS_SET: AtomicBool = AtomicBool::new(false);
    if IS_SET.swap(true, Relaxed) {
        return;
    }
    let others = take_hook();
    set_hook(Box::new(move |panic| {
        if IS_GUARDED.get() {
            tracing::error!(target: "rdmasock", %panic, "a defect of the library; please report it");
        } else {
            others(panic);
        }
    }));
}

/// Blocks all signals of the calling thread until it is dropped, so that a new thread starts with them blocked. Holds
/// the mask from before.
pub(crate) struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    pub(crate) fn new() -> Self {
        // SAFETY: the sets are plain memory, filled before they are read.
        unsafe {
            let mut all = std::mem::zeroed();
            let mut old = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
            Self(old)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `self.0` is the signal mask that pthread_sigmask(3) filled in `new`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, null_mut());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
