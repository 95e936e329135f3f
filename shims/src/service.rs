//! The service thread: everything of a promotion that no call of the program should wait for.
//!
//! Started when the first connection may need it, asleep otherwise, with all signals blocked. It
//! answers ASKs, makes links, watches the anchors of sockets that are being promoted or are on a
//! link, and is the waiter that peers tell when a stream has more than one.
//!
//! Calls of the program hand it [`Command`]s; all else comes through its epoll set. Here are the handle that
//! they use, the thread's state and its loop.

mod alone;
mod answer;
mod ask;
mod channels;
mod command;
mod control;
mod guard;
mod guests;
mod linger;
mod links;
mod offers;
mod pairs;
mod queue;
mod remote;
mod rings;
mod standstill;
mod watch;

pub use command::{Command, Ref};
pub use pairs::Dialled;

use channels::{Conn, Peer};
use offers::Offers;
use queue::Queue;
use watch::Watched;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32,
    Ordering::{AcqRel, Acquire, SeqCst},
};
use std::time::Duration;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::DestinationCache;
use rdmasock_core::stats::Reason;
use rdmasock_core::wire::{LinkAddress, LinkOffer, ShmName};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::ending;
use crate::handler;
use crate::library::Library;
use crate::link::Link;
use crate::listener::Listener;
use crate::reach::Devices;
use crate::ready::{self, Arm};
use crate::socket::{self, Socket, Stage};
use crate::verbs::Acceptor;
use crate::wait::{SERVICE, Waiters};

/// How long an answer may take.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an answer from another host may take: a busy machine has to open its RDMA device first, and nobody
/// waits.
const REMOTE_TIMEOUT: Duration = Duration::from_secs(6);
/// How long a link to another host may take; less than a cookie lives. Nobody waits: TCP carries what is sent meanwhile.
const LINK_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a cookie of ours may be presented, ns.
const COOKIE_LIFE: u64 = 40_000_000_000;
/// When a connection is looked at again that a signal handler would have had promoted, ns.
const NOT_IN_HANDLER: u64 = 100_000_000;

/// The handle that calls of the program use.
pub struct Service {
    queue: Queue,
    started: AtomicBool,
    /// The thread, once it runs.
    thread: AtomicI32,
    /// The thread is to end.
    ending: AtomicBool,
    /// The thread will send the wake-ups that are delayed.
    delaying: AtomicBool,
    /// The thread will look after links to other hosts.
    maintaining: AtomicBool,
    offers: Offers,
    /// Links that are up.
    links: Lock<Vec<&'static Link>>,
    /// Where links to other hosts can be made.
    acceptors: Lock<Vec<SocketAddr>>,
    epoll: PrivateFd,
}

impl Service {
    /// A service whose thread is not started.
    pub fn new() -> Result<Self, Errno> {
        let epoll = PrivateFd::open(|| kernel::create(kernel::CreateFlags::CLOEXEC))?;
        Ok(Self {
            queue: Queue::new(),
            started: AtomicBool::new(false),
            thread: AtomicI32::new(0),
            ending: AtomicBool::new(false),
            delaying: AtomicBool::new(false),
            maintaining: AtomicBool::new(false),
            offers: Offers::new(),
            links: Lock::new(Vec::new()),
            acceptors: Lock::new(Vec::new()),
            epoll,
        })
    }

    /// Hands over a command. Never waits, also in a signal handler that has interrupted this.
    pub fn submit(&self, command: Command) {
        self.queue.push(command);
        Library::get().waiters.ring_if_sleeping(SERVICE);
        self.start();
    }

    /// Before a fork: the child is to be able to wake the thread.
    pub fn before_fork(&self, waiters: &Waiters) {
        waiters.before_fork(self.epoll.as_fd());
    }

    /// In a while the peer is to be told of what a sender has just begun to hold back.
    #[inline]
    pub fn delay_wake(&self) {
        later(self, &self.delaying, Command::DelayedWakes);
    }

    /// In a while links to other hosts are to be maintained: what is owed on them, and who hears of what
    /// completes.
    #[inline]
    pub fn maintain_later(&self) {
        later(self, &self.maintaining, Command::Maintain);
    }

    /// Starts the thread if it does not run yet. Not from a signal handler, which may have interrupted the `malloc` that
    /// pthread_create calls: what was asked for then waits for the next who asks.
    pub fn start(&self) {
        if self.started.load(Acquire) || handler::is_in_one() || self.started.swap(true, AcqRel) {
            return;
        }
        let errno = crate::errno::get();
        // Here, in the middle of the program's own call, so that what the thread begins with is at no moment the number that the
        // program's next file is to get.
        let name = names::Listener::instance(&Library::get().id).ok();
        let blocked = SignalsBlocked::new();
        let mask = blocked.0;
        let spawned = std::thread::Builder::new()
            .name("rdmasock".into())
            .stack_size(512 * 1024)
            .spawn(move || {
                let own = &Library::get().service;
                let id = rustix::thread::gettid().as_raw_nonzero().get();
                own.thread.store(id, SeqCst);
                if let Some(mut worker) = Worker::new(mask, name) {
                    worker.run();
                }
            });
        drop(blocked);
        match spawned {
            // Not until then does libc have the thread's record in order: in a child that the program makes by clone(2) as it is, the
            // record stays as it was, and setuid(2) would wait for ever for a thread that is about to begin.
            Ok(_) => crate::pass::wait_until(|| self.thread.load(Acquire) != 0),
            Err(error) => {
                tracing::warn!(target: "rdmasock", %error, "no service thread: connections stay on TCP");
            }
        }
        crate::errno::set(errno);
    }

    /// Ends the thread for good, also one that has not begun, and waits until it is gone.
    pub fn end(&self) {
        self.ending.store(true, SeqCst);
        if !self.started.swap(true, AcqRel) {
            return;
        }
        Library::get().waiters.ring(SERVICE);
        crate::pass::wait_until(|| match self.thread.load(Acquire) {
            0 => false,
            // Not by /proc, which need not be there.
            id => {
                let process = rustix::process::getpid().as_raw_nonzero().get();
                let arguments = [process as usize, id as usize, 0, 0, 0, 0];
                // SAFETY: signal 0 is none.
                unsafe { rdmasock_core::os::kernel::call(libc::SYS_tgkill, arguments) }.is_err()
            }
        });
    }

    /// The connection is worth promoting: asks for it once.
    pub fn promote(&self, socket: &'static Socket) {
        use std::sync::atomic::Ordering::Relaxed;
        let retry_at = socket.retry_at.load(Relaxed);
        if retry_at != 0 && crate::time::now_ns() < retry_at {
            return;
        }
        if !self.started.load(Acquire) && handler::is_in_one() {
            // Later, perhaps by a request that is not a handler's.
            let again = crate::time::now_ns() + NOT_IN_HANDLER;
            socket.retry_at.store(again, Relaxed);
            return;
        }
        if socket
            .stage
            .compare_exchange(Stage::Watching as u8, Stage::Busy as u8, AcqRel, Acquire)
            .is_ok()
            && (self.started.load(Acquire) || !alone::settle(Library::get(), socket))
        {
            self.submit(Command::Promote(Ref::new(socket)));
        }
    }

    /// A one-time offer of a link for the instance `peer`, which is on another host if `local` is
    /// given, the address that it has reached us at; `None` if there is a link.
    pub fn offer_link(&self, peer: InstanceId, local: Option<IpAddr>) -> Option<LinkOffer> {
        if self.link_to(&peer).is_some() {
            return None;
        }
        let address = match local {
            Some(local) => LinkAddress::Verbs(self.acceptor_at(local)?),
            None => {
                let name = names::instance(&Library::get().id);
                LinkAddress::Shm(ShmName::new(name.as_bytes())?)
            }
        };
        let cookie = self.offers.make(peer, COOKIE_LIFE)?;
        Some(LinkOffer { address, cookie })
    }

    /// Where links can be made at this local address.
    fn acceptor_at(&self, local: IpAddr) -> Option<SocketAddr> {
        let acceptors = self.acceptors.lock()?;
        acceptors.iter().find(|a| a.ip() == local).copied()
    }

    /// The socket is being closed: its anchor is not watched any more. The caller holds the control
    /// lock.
    pub fn forget_anchor(&self, socket: &'static Socket) {
        if ready::is_watched(socket)
            && let Some(fd) = socket.anchor_fd()
        {
            let _ = kernel::delete(&self.epoll, fd);
        }
    }

    /// The anchor has another number from now on.
    pub fn watch_again(&self, socket: &'static Socket) {
        if let Some(fd) = socket.anchor_fd() {
            let data = kernel::EventData::new_u64(watch::anchor_tag(socket));
            let _ = kernel::add(&self.epoll, fd, data, watch::anchor_flags());
        }
    }

    /// Whether this thread is woken when something completes on a link to another host. False if it cannot be.
    pub fn subscribe(&self, completions: BorrowedFd<'_>, token: u64, on: bool) -> bool {
        // Taken out, not only muted: the kernel would still wake this thread for each event, and then let it sleep on.
        if !on {
            let _ = kernel::delete(&self.epoll, completions);
            return true;
        }
        let token = kernel::EventData::new_u64(token);
        let added = kernel::add(&self.epoll, completions, token, kernel::EventFlags::IN);
        matches!(added, Ok(()) | Err(rustix::io::Errno::EXIST))
    }

    fn link_to(&self, peer: &InstanceId) -> Option<&'static Link> {
        let links = self.links.lock()?;
        links
            .iter()
            .copied()
            .find(|l| l.peer() == *peer && l.is_alive())
    }

    fn all_links(&self) -> Vec<&'static Link> {
        self.links.lock().map(|l| l.clone()).unwrap_or_default()
    }
}

/// Has the service thread, if there is one, look at what it does now and then.
pub fn wake() {
    if let Some(library) = Library::current() {
        library.waiters.ring(crate::wait::SERVICE);
    }
}

/// Submits a command unless that was done and `asked` says so.
#[inline]
fn later(service: &Service, asked: &AtomicBool, command: Command) {
    if !asked.load(SeqCst) && !asked.swap(true, SeqCst) {
        service.submit(command);
    }
}

/// Blocks all signals of this thread while it lives, so that a new thread starts with them blocked.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> Self {
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
        // SAFETY: the set that was in force before.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut());
        }
    }
}

/// What an event of the service thread's epoll set is about, in the upper bits of its data.
mod kind {
    pub const DOORBELL: u64 = 0;
    pub const INSTANCE: u64 = 1;
    pub const NAME: u64 = 2;
    pub const CHANNEL: u64 = 3;
    pub const ANCHOR: u64 = 4;
    pub const LINGER: u64 = 5;
    pub const ACCEPTOR: u64 = 6;
    pub const PAIR_STATE: u64 = 7;
    pub const COMPLETION: u64 = 8;
    pub const CONTROL: u64 = 9;
    pub const HOST: u64 = 10;
}

fn tag(kind: u64, id: u64) -> u64 {
    kind << 56 | id & 0x00ff_ffff_ffff_ffff
}

/// The thread's own state.
struct Worker {
    library: &'static Library,
    service: &'static Service,
    instance_name: Option<names::Listener>,
    listeners: Vec<&'static Listener>,
    conns: HashMap<u64, Conn>,
    /// Channels that others have opened.
    guests: guests::Guests,
    /// When the names are listened on again after there was no descriptor for who came, ns; 0: they are.
    deaf_until: u64,
    next_conn: u64,
    asks: HashMap<u64, ask::Asking>,
    /// Channels that were made for one question, and until when they are kept (monotonic ns), in that order.
    asked_until: VecDeque<(u64, u64)>,
    cache: DestinationCache,
    devices: Devices,
    /// Sockets whose tuple has been looked up.
    tuples: HashMap<Tuple, Ref>,
    /// Handshakes under way, by our nonce.
    offered: HashMap<Nonce, Ref>,
    /// From how many of them on those that are over are looked for.
    offered_bound: usize,
    pending_links: HashMap<InstanceId, links::Pending>,
    /// Where other hosts connect.
    acceptors: HashMap<u64, Acceptor>,
    arriving: HashMap<u64, pairs::Arriving>,
    half_open: HashMap<u64, pairs::HalfOpen>,
    dead_links: Vec<&'static Link>,
    /// When those are looked at again that no socket uses, ns; 0: there are none.
    free_links_at: u64,
    lingering: HashMap<u64, linger::Lingering>,
    deferred: Vec<answer::Deferred>,
    /// What other hosts ask.
    control: control::Control,
    /// Other hosts that are asked.
    hosts: remote::Hosts,
    /// Senders that find no room.
    blocked: Vec<rings::Blocked>,
    /// Those that do not wait for ever.
    standing: Vec<standstill::Standing>,
    /// Connections whose other end was closed where its library did not see it, it seems.
    unmarked: Vec<watch::Unmarked>,
    dying: Vec<links::Dying>,
    /// Connections whose other end has sent its last, and is sent to over a link, by their slots.
    one_way: HashMap<u32, watch::OneWay>,
    /// When rings are next looked at for shrinking, ns; 0: nothing has grown.
    shrink_at: u64,
    /// When the wake-ups that are delayed are sent, ns; 0: there are none.
    delayed_until: u64,
    /// When links to other hosts are maintained, ns; 0: no need.
    maintain_at: u64,
    /// How often in a row that was done, and they were in use; counted as far as it matters.
    maintained: u32,
    /// When it is next seen whether links to other hosts still work, ns; 0: nothing is under way on any.
    watch_at: u64,
    /// Whether the process is at its end but for this thread.
    ending: ending::ThreadWatch,
    /// Requests of fork children seen so far.
    requests: u32,
    /// Commands that were taken over and are not carried out yet.
    commands: VecDeque<Command>,
    /// What the epoll set has reported and is not seen to yet. Much of it is reported once only.
    events: VecDeque<kernel::Event>,
}

impl Worker {
    fn new(mask: libc::sigset_t, instance_name: Option<names::Listener>) -> Option<Self> {
        let library = Library::get();
        let worker = Self {
            library,
            service: &library.service,
            instance_name,
            listeners: Vec::new(),
            conns: HashMap::new(),
            guests: guests::Guests::new(descriptors()),
            deaf_until: 0,
            next_conn: 1,
            asks: HashMap::new(),
            asked_until: VecDeque::new(),
            cache: DestinationCache::new(4096),
            devices: Devices::default(),
            tuples: HashMap::new(),
            offered: HashMap::new(),
            offered_bound: answer::OFFERED_MIN,
            pending_links: HashMap::new(),
            acceptors: HashMap::new(),
            arriving: HashMap::new(),
            half_open: HashMap::new(),
            dead_links: Vec::new(),
            free_links_at: 0,
            lingering: HashMap::new(),
            deferred: Vec::new(),
            control: control::Control::new(crate::time::now_ns()),
            hosts: remote::Hosts::new(),
            blocked: Vec::new(),
            standing: Vec::new(),
            unmarked: Vec::new(),
            dying: Vec::new(),
            one_way: HashMap::new(),
            shrink_at: 0,
            delayed_until: 0,
            maintain_at: 0,
            maintained: 0,
            watch_at: 0,
            ending: ending::ThreadWatch::new(mask),
            requests: crate::fork::requests(),
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

    fn add(&self, fd: BorrowedFd<'_>, data: u64, flags: kernel::EventFlags) -> bool {
        kernel::add(
            &self.service.epoll,
            fd,
            kernel::EventData::new_u64(data),
            flags,
        )
        .is_ok()
    }

    fn run(&mut self) {
        guard::rounds(|| self.round(), std::thread::sleep);
    }

    /// What there is to do, a sleep, and what that brings.
    fn round(&mut self) -> ControlFlow<()> {
        if self.service.ending.load(SeqCst) {
            return ControlFlow::Break(());
        }
        let mut reported = [kernel::Event {
            flags: kernel::EventFlags::empty(),
            data: kernel::EventData::new_u64(0),
        }; 64];
        self.drain();
        let timeout = self.next_timeout();
        self.library.waiters.enter_sleep(SERVICE);
        let idle = self.events.is_empty()
            && self.commands.is_empty()
            && self.service.queue.is_empty()
            && !self
                .service
                .all_links()
                .iter()
                .any(|l| l.has_ready(SERVICE));
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
        self.on_time();
        ControlFlow::Continue(())
    }

    /// Commands, and streams whose peers told us something.
    fn drain(&mut self) {
        crate::lifecycle::end_orphans();
        // What is added meanwhile is for the next time: what is due at a time is not to wait for it. One by one: a panic
        // costs no other command.
        self.service.queue.take_all(&mut self.commands);
        while let Some(command) = self.commands.pop_front() {
            self.on_command(command);
        }
        let requests = crate::fork::requests();
        if std::mem::replace(&mut self.requests, requests) != requests {
            crate::epoll::Epoll::ring_all_who_sleep();
            crate::fork::for_each_socket(|socket| {
                if crate::fork::is_wanted(socket) && crate::promote::press_on(socket) {
                    crate::tx::hand_over(socket, Reason::OtherProcess);
                    self.service.submit(Command::settle(socket));
                }
            });
        }
        for link in self.service.all_links() {
            let mut sockets = Vec::new();
            link.drain_ready(SERVICE, |socket, at| sockets.push((at, socket)));
            sockets.sort_by_key(|(at, _)| *at);
            for (_, socket) in sockets {
                // Its sender may wait for a reader that has closed the number past the hooks.
                crate::lifecycle::look_at_anchor(socket);
                link.judge(ready::readable(socket, Arm::No) != 0);
                crate::rx::relieve(socket, link);
                self.look_for_confirmation(socket, link);
                ready::notify_local(socket);
            }
            self.poll_remote(link);
        }
    }

    fn next_timeout(&self) -> Option<u64> {
        let now = crate::time::now_ns();
        let asks = self.asks.values().map(|a| a.deadline);
        let asked = self.asked_until.front().map(|(until, _)| *until);
        let links = self.pending_links.values().map(|p| p.deadline);
        let arriving = self.arriving.values().map(|a| a.deadline);
        let deaf = (self.deaf_until != 0).then_some(self.deaf_until);
        let half_open = self.half_open.values().map(|u| u.deadline);
        let shrink = (self.shrink_at != 0).then_some(self.shrink_at);
        let maintain = (self.maintain_at != 0).then_some(self.maintain_at);
        let watch = (self.watch_at != 0).then_some(self.watch_at);
        let free_links = (self.free_links_at != 0).then_some(self.free_links_at);
        let alone = (self.ending.at != 0).then_some(self.ending.at);
        let delayed = (self.delayed_until != 0).then_some(self.delayed_until);
        let blocked = self.blocked.iter().map(|p| p.deadline);
        let standing = self.standing.iter().map(|s| s.deadline);
        let unmarked = self.unmarked.iter().map(|u| u.deadline);
        let dying = self.dying.iter().map(|d| d.deadline);
        let one_way = self.one_way.values().map(|o| o.deadline);
        let deferred = self.deferred.iter().map(|d| d.deadline);
        let lingering = self.lingering.values().map(|l| l.deadline);
        asks.chain(asked)
            .chain(links)
            .chain(arriving)
            .chain(half_open)
            .chain(self.guests.next_timeout())
            .chain(deaf)
            .chain(maintain)
            .chain(watch)
            .chain(free_links)
            .chain(lingering)
            .chain(deferred)
            .chain(shrink)
            .chain(blocked)
            .chain(standing)
            .chain(unmarked)
            .chain(dying)
            .chain(one_way)
            .chain(self.control.next_timeout())
            .chain(self.hosts.next_timeout())
            .chain(delayed)
            .chain(alone)
            .min()
            .map(|at| at.saturating_sub(now))
    }

    fn on_time(&mut self) {
        let now = crate::time::now_ns();
        self.expire_asks(now);
        self.expire_asked(now);
        self.expire_links(now);
        self.expire_guests(now);
        self.expire_arriving(now);
        self.maintain_links(now);
        self.watch_links(now);
        if self.free_links_at != 0 && now >= self.free_links_at {
            self.free_dead_links();
        }
        self.expire_lingering(now);
        self.deferred.retain(|d| d.deadline > now);
        self.relieve(now);
        self.end_standing(now);
        self.leave_unmarked(now);
        self.leave_dying(now);
        self.look_for_readers(now);
        self.control_on_time(now);
        self.hosts_on_time(now);
        self.ending.on_time(now);
        if self.delayed_until != 0 && now >= self.delayed_until {
            self.delayed_until = 0;
            self.service.delaying.store(false, SeqCst);
            for socket in socket::all() {
                crate::tx::send_delayed_wake(socket);
            }
        }
        if self.shrink_at != 0 && now >= self.shrink_at {
            self.shrink_at = 0;
            self.shrink(now);
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
            kind::ANCHOR => self.on_anchor(id),
            kind::LINGER => self.on_lingering(id),
            kind::ACCEPTOR => self.on_acceptor(id),
            kind::PAIR_STATE => self.on_pair_state(id),
            kind::COMPLETION => self.on_completion(id),
            kind::CONTROL => self.on_control(),
            kind::HOST => self.on_host(id),
            _ => {}
        }
    }
}

/// How many descriptors this process may have, ours among them.
fn descriptors() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.maximum.unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(crate) mod tests;
