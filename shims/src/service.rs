//! The service thread: everything of a promotion that no call of the program should wait for.
//!
//! Started when the first connection may need it, asleep otherwise, with all signals blocked. It
//! answers ASKs, makes links, watches the anchors of sockets that are being promoted or are on a
//! link, and is the waiter that peers tell when a stream has more than one.
//!
//! Calls of the program hand it [`Command`]s; all else comes through its epoll set.

mod answer;
mod ask;
mod linger;
mod links;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Acquire, SeqCst},
};
use std::time::Duration;

use dashmap::DashMap;
use rdmasock_core::ids::{Cookie, InstanceId, Nonce, Tuple};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::{Channel, RecvError};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::DestinationCache;
use rdmasock_core::stats::Reason;
use rdmasock_core::wire::{LinkAddress, LinkOffer, MAX_MESSAGE};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::library::Library;
use crate::link::Link;
use crate::listener::Listener;
use crate::promote;
use crate::ready;
use crate::socket::{self, Socket, Stage, mode};
use crate::wait::SERVICE;

/// A socket as it was when something was asked for it.
#[derive(Clone, Copy)]
pub struct Ref {
    socket: &'static Socket,
    generation: u64,
}

impl Ref {
    fn new(socket: &'static Socket) -> Self {
        Self {
            socket,
            generation: socket.generation.load(Acquire),
        }
    }

    fn is_same(self, other: Self) -> bool {
        std::ptr::eq(self.socket, other.socket) && self.generation == other.generation
    }

    /// The socket, if it is still the same connection.
    fn get(self) -> Option<&'static Socket> {
        (self.socket.generation.load(Acquire) == self.generation).then_some(self.socket)
    }
}

/// What calls of the program leave to the service thread.
pub enum Command {
    /// The connection has reached the threshold (connector).
    Promote(Ref),
    /// Tell those who wait on the socket.
    Notify(Ref),
    /// Marker bytes wait for TCP to take them.
    Flush(Ref),
    /// A direction has changed: put the socket where it belongs.
    Settle(Ref),
    /// The receiving direction is back on TCP; who waits has been told, or is the one who saw it.
    Drained(Ref),
    /// An ASK waited for the program's first use of the connection, or for its close.
    Used(Ref),
    /// The handshake needs a link.
    NeedLink(Ref, InstanceId, Option<LinkOffer>),
    /// The link's side channel is full.
    AwaitRoom(&'static Link),
    /// The peer broke the protocol.
    Violation(&'static Link),
    /// A listener has accepted its first connection in this process.
    Listen(&'static Listener),
    /// A connection that was closed in the middle of a promotion: what markers to it start with, and
    /// what is to be sent yet.
    Linger(PrivateFd, Option<Nonce>, Vec<u8>),
    /// A ring has grown: shrink it when it is idle.
    Grown,
    /// A sender finds no room.
    Pressed(Ref),
    /// A sender holds something back of which the peer is to be told in a while.
    Held,
}

impl Command {
    /// See [`Command::Notify`].
    pub fn notify(socket: &'static Socket) -> Self {
        Self::Notify(Ref::new(socket))
    }

    /// See [`Command::Flush`].
    pub fn flush(socket: &'static Socket) -> Self {
        Self::Flush(Ref::new(socket))
    }

    /// See [`Command::Settle`].
    pub fn settle(socket: &'static Socket) -> Self {
        Self::Settle(Ref::new(socket))
    }

    /// See [`Command::Used`].
    pub fn used(socket: &'static Socket) -> Self {
        Self::Used(Ref::new(socket))
    }

    /// See [`Command::Drained`].
    pub fn drained(socket: &'static Socket) -> Self {
        Self::Drained(Ref::new(socket))
    }

    /// See [`Command::Pressed`].
    pub fn pressed(socket: &'static Socket) -> Self {
        Self::Pressed(Ref::new(socket))
    }

    /// See [`Command::NeedLink`].
    pub fn need_link(socket: &'static Socket, peer: InstanceId, offer: Option<LinkOffer>) -> Self {
        Self::NeedLink(Ref::new(socket), peer, offer)
    }
}

/// How long a peer is not told of bytes that more is to follow, ns: as TCP_CORK (tcp(7)).
const HELD_FOR: u64 = 200_000_000;
/// How long a cookie of ours may be presented, ns.
const COOKIE_LIFE: u64 = 10_000_000_000;
/// How often an offer is tried to be written down, against another thread that writes one.
const COOKIE_ATTEMPTS: usize = 1000;

/// The handle that calls of the program use.
pub struct Service {
    queue: Lock<VecDeque<Command>>,
    started: AtomicBool,
    /// The thread will look for what senders hold back.
    holding: AtomicBool,
    /// Offers of links by whom they are for, and until when they are good (monotonic ns).
    cookies: DashMap<InstanceId, Vec<(Cookie, u64)>>,
    /// Links that are up.
    links: Lock<Vec<&'static Link>>,
    epoll: PrivateFd,
}

impl Service {
    /// A service whose thread is not started.
    pub fn new() -> Result<Self, Errno> {
        let epoll = kernel::create(kernel::CreateFlags::CLOEXEC)?;
        Ok(Self {
            queue: Lock::new(VecDeque::new()),
            started: AtomicBool::new(false),
            holding: AtomicBool::new(false),
            cookies: DashMap::new(),
            links: Lock::new(Vec::new()),
            epoll: PrivateFd::place(epoll)?,
        })
    }

    /// Hands over a command. Never waits for it to be carried out.
    pub fn submit(&self, command: Command) {
        let Some(mut queue) = self.queue.lock() else {
            return;
        };
        queue.push_back(command);
        drop(queue);
        Library::get().waiters.ring_if_sleeping(SERVICE);
        self.start();
    }

    /// In a while the peer is to be told of what a sender has just begun to hold back.
    #[inline]
    pub fn release_later(&self) {
        if !self.holding.load(SeqCst) && !self.holding.swap(true, SeqCst) {
            self.submit(Command::Held);
        }
    }

    /// Starts the thread if it does not run yet.
    pub fn start(&self) {
        if self.started.load(Acquire) || self.started.swap(true, AcqRel) {
            return;
        }
        let errno = crate::errno::get();
        let blocked = SignalsBlocked::new();
        let spawned = std::thread::Builder::new()
            .name("rdmasock".into())
            .stack_size(512 * 1024)
            .spawn(|| {
                if let Some(mut worker) = Worker::new() {
                    worker.run();
                }
            });
        drop(blocked);
        if let Err(error) = spawned {
            tracing::warn!(target: "rdmasock", %error, "no service thread: connections stay on TCP");
        }
        crate::errno::set(errno);
    }

    /// The connection is worth promoting: asks for it once.
    pub fn promote(&self, socket: &'static Socket) {
        use std::sync::atomic::Ordering::Relaxed;
        let retry_at = socket.retry_at.load(Relaxed);
        if retry_at != 0 && crate::time::now_ns() < retry_at {
            return;
        }
        if socket
            .stage
            .compare_exchange(Stage::Watching as u8, Stage::Busy as u8, AcqRel, Acquire)
            .is_ok()
        {
            self.submit(Command::Promote(Ref::new(socket)));
        }
    }

    /// A one-time offer of a link for the instance `peer`; `None` if there is a link.
    pub fn offer_link(&self, peer: InstanceId) -> Option<LinkOffer> {
        if self.link_to(&peer).is_some() {
            return None;
        }
        let cookie = Cookie::random().ok()?;
        let until = crate::time::now_ns() + COOKIE_LIFE;
        // Never waits: a signal handler may have interrupted this very thread in here.
        let entry = (0..COOKIE_ATTEMPTS).find_map(|_| self.cookies.try_entry(peer))?;
        entry.or_default().push((cookie, until));
        Some(LinkOffer {
            address: LinkAddress::new(names::instance(&Library::get().id).as_bytes())?,
            cookie,
        })
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

    /// Takes a cookie in; good once, for whom it was made, in time. Service thread only.
    fn redeem(&self, cookie: &Cookie, peer: &InstanceId) -> bool {
        let now = crate::time::now_ns();
        self.cookies.retain(|_, offers| {
            offers.retain(|(_, until)| *until > now);
            !offers.is_empty()
        });
        let Some(mut offers) = self.cookies.get_mut(peer) else {
            return false;
        };
        let at = offers.iter().position(|(c, _)| c.matches(cookie));
        at.map(|at| offers.swap_remove(at)).is_some()
    }

    fn link_to(&self, peer: &InstanceId) -> Option<&'static Link> {
        let links = self.links.lock()?;
        links
            .iter()
            .copied()
            .find(|l| l.peer == *peer && l.is_alive())
    }

    fn all_links(&self) -> Vec<&'static Link> {
        self.links.lock().map(|l| l.clone()).unwrap_or_default()
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
}

fn tag(kind: u64, id: u64) -> u64 {
    kind << 56 | id & 0x00ff_ffff_ffff_ffff
}

/// A channel that is not a link's.
enum Peer {
    /// Somebody connected to one of our names.
    Incoming { listener: Option<&'static Listener> },
    /// We asked there, by a service name or an instance's.
    Asked { request: u64, by_name: bool },
    /// We asked for a link there.
    Linking { peer: InstanceId },
    /// A link's side channel.
    Link(&'static Link),
}

struct Conn {
    /// `None` for a link's, which owns it.
    channel: Option<Channel>,
    peer: Peer,
}

/// The thread's own state.
struct Worker {
    library: &'static Library,
    service: &'static Service,
    instance_name: Option<names::Listener>,
    listeners: Vec<&'static Listener>,
    conns: HashMap<u64, Conn>,
    next_conn: u64,
    asks: HashMap<u64, ask::Asking>,
    cache: DestinationCache,
    /// Sockets whose tuple has been looked up.
    tuples: HashMap<Tuple, Ref>,
    /// Handshakes under way, by our nonce.
    offered: HashMap<Nonce, Ref>,
    /// From how many of them on those that are over are looked for.
    offered_bound: usize,
    pending_links: HashMap<InstanceId, links::Pending>,
    dead_links: Vec<&'static Link>,
    lingering: HashMap<u64, linger::Lingering>,
    deferred: Vec<answer::Deferred>,
    /// Senders that find no room.
    pressed: Vec<Pressed>,
    /// When rings are next looked at for shrinking, ns; 0: nothing has grown.
    shrink_at: u64,
    held_until: u64,
    /// Requests of fork children seen so far.
    requests: u32,
}

/// A sender that found no room, and how far its reader had got then.
struct Pressed {
    r: Ref,
    reader_at: u64,
    /// Monotonic ns.
    deadline: u64,
}

/// A reader that has not read for this long, ns, stands still: its ring grows without it.
const STILL_FOR: u64 = 2_000_000;

/// How often idle rings are looked for after one has grown.
const SHRINK_EVERY: u64 = 1_000_000_000;

impl Worker {
    fn new() -> Option<Self> {
        let library = Library::get();
        let worker = Self {
            library,
            service: &library.service,
            instance_name: names::Listener::instance(&library.id).ok(),
            listeners: Vec::new(),
            conns: HashMap::new(),
            next_conn: 1,
            asks: HashMap::new(),
            cache: DestinationCache::new(4096),
            tuples: HashMap::new(),
            offered: HashMap::new(),
            offered_bound: answer::OFFERED_MIN,
            pending_links: HashMap::new(),
            dead_links: Vec::new(),
            lingering: HashMap::new(),
            deferred: Vec::new(),
            pressed: Vec::new(),
            shrink_at: 0,
            held_until: 0,
            requests: crate::fork::requests(),
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
        let mut events = [kernel::Event {
            flags: kernel::EventFlags::empty(),
            data: kernel::EventData::new_u64(0),
        }; 64];
        loop {
            self.drain();
            let timeout = self.next_timeout();
            self.library.waiters.enter_sleep(SERVICE);
            let idle = self.service.queue.lock().is_none_or(|q| q.is_empty())
                && !self
                    .service
                    .all_links()
                    .iter()
                    .any(|l| l.has_ready(SERVICE));
            let n = if idle {
                let timeout = timeout.map(|ns| rustix::time::Timespec {
                    tv_sec: (ns / 1_000_000_000) as i64,
                    tv_nsec: (ns % 1_000_000_000) as i64,
                });
                kernel::wait(&self.service.epoll, &mut events[..], timeout.as_ref()).unwrap_or(0)
            } else {
                0
            };
            self.library.waiters.leave_sleep(SERVICE);
            for event in events.iter().take(n).copied().collect::<Vec<_>>() {
                self.on_event(event);
            }
            self.on_time();
        }
    }

    /// Commands, and streams whose peers told us something.
    fn drain(&mut self) {
        loop {
            let command = self.service.queue.lock().and_then(|mut q| q.pop_front());
            match command {
                Some(command) => self.on_command(command),
                None => break,
            }
        }
        let requests = crate::fork::requests();
        if std::mem::replace(&mut self.requests, requests) != requests {
            crate::fork::for_each_socket(|socket| {
                if crate::fork::is_wanted(socket) {
                    crate::tx::hand_over(socket, Reason::OtherProcess);
                    self.service.submit(Command::settle(socket));
                }
            });
        }
        for link in self.service.all_links() {
            let mut sockets = Vec::new();
            link.drain_ready(SERVICE, |s| sockets.push(s));
            for socket in sockets {
                crate::rx::relieve(socket, link);
                ready::notify_local(socket);
            }
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Promote(r) => self.ask(r),
            Command::Notify(r) => {
                if let Some(socket) = r.get() {
                    ready::notify_local(socket);
                }
            }
            Command::Flush(r) => {
                if let Some(socket) = r.get()
                    && promote::flush(socket)
                {
                    ready::notify_local(socket);
                }
            }
            Command::Settle(r) => self.settle(r),
            Command::Used(r) => self.answer_deferred(r),
            Command::Drained(r) => {
                // No notification: an edge-triggered set would report what it has reported.
                if let Some(socket) = r.get() {
                    self.close_if_over(socket);
                }
            }
            Command::NeedLink(r, peer, offer) => self.need_link(r, peer, offer),
            Command::AwaitRoom(link) => self.await_room(link, true),
            Command::Violation(link) => {
                self.library
                    .stats
                    .count(rdmasock_core::stats::Event::LinkViolation);
                self.link_down(link, Reason::Violation);
            }
            Command::Linger(fd, nonce, unsent) => self.linger(fd, nonce, unsent),
            Command::Listen(listener) => self.listen(listener),
            Command::Pressed(r) => self.on_pressed(r),
            Command::Held => self.held_until = crate::time::now_ns() + HELD_FOR,
            Command::Grown => {
                if self.shrink_at == 0 {
                    self.shrink_at = crate::time::now_ns() + SHRINK_EVERY;
                }
            }
        }
    }

    fn next_timeout(&self) -> Option<u64> {
        let now = crate::time::now_ns();
        let asks = self.asks.values().map(|a| a.deadline);
        let links = self.pending_links.values().map(|p| p.deadline);
        let shrink = (self.shrink_at != 0).then_some(self.shrink_at);
        let held = (self.held_until != 0).then_some(self.held_until);
        let pressed = self.pressed.iter().map(|p| p.deadline);
        let deferred = self.deferred.iter().map(|d| d.deadline);
        let lingering = self.lingering.values().map(|l| l.deadline);
        asks.chain(links)
            .chain(lingering)
            .chain(deferred)
            .chain(shrink)
            .chain(pressed)
            .chain(held)
            .min()
            .map(|at| at.saturating_sub(now))
    }

    fn on_time(&mut self) {
        let now = crate::time::now_ns();
        self.expire_asks(now);
        self.expire_links(now);
        self.expire_lingering(now);
        self.deferred.retain(|d| d.deadline > now);
        self.relieve(now);
        if self.held_until != 0 && now >= self.held_until {
            self.held_until = 0;
            self.service.holding.store(false, SeqCst);
            for socket in socket::all() {
                crate::tx::release_held(socket);
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
                while let Some(Ok(Some(channel))) =
                    self.instance_name.as_ref().map(names::Listener::accept)
                {
                    self.register(channel, Peer::Incoming { listener: None });
                }
            }
            kind::NAME => {
                let Some(listener) = self.listeners.get(id as usize).copied() else {
                    return;
                };
                while let Some(channel) = listener.accept_asker() {
                    self.register(
                        channel,
                        Peer::Incoming {
                            listener: Some(listener),
                        },
                    );
                }
            }
            kind::CHANNEL => self.on_channel(id),
            kind::ANCHOR => self.on_anchor(id),
            kind::LINGER => self.on_lingering(id),
            _ => {}
        }
    }

    /// Takes a channel into the set; gives its number.
    fn register(&mut self, channel: Channel, peer: Peer) -> Option<u64> {
        let id = self.next_conn;
        self.next_conn += 1;
        let flags = kernel::EventFlags::IN | kernel::EventFlags::RDHUP;
        if !self.add(channel.as_fd(), tag(kind::CHANNEL, id), flags) {
            return None;
        }
        self.conns.insert(
            id,
            Conn {
                channel: Some(channel),
                peer,
            },
        );
        Some(id)
    }

    /// Whether to look for room on the link's side channel.
    fn await_room(&self, link: &'static Link, wanted: bool) {
        let Some(id) = self.conn_of(link) else { return };
        let mut flags = kernel::EventFlags::IN | kernel::EventFlags::RDHUP;
        flags.set(kernel::EventFlags::OUT, wanted);
        let data = kernel::EventData::new_u64(tag(kind::CHANNEL, id));
        let _ = kernel::modify(&self.service.epoll, link.channel().as_fd(), data, flags);
    }

    fn on_channel(&mut self, id: u64) {
        if let Some(Peer::Link(link)) = self.conns.get(&id).map(|c| &c.peer)
            && link.has_outbox()
            && link.flush()
        {
            self.await_room(link, false);
        }
        let mut buf = [0u8; MAX_MESSAGE];
        // A bounded number, so that one peer cannot keep the thread to itself.
        for _ in 0..64 {
            let Some(conn) = self.conns.get(&id) else {
                return;
            };
            let received = match (&conn.channel, &conn.peer) {
                (Some(channel), _) => channel.recv(&mut buf),
                (None, Peer::Link(link)) => link.channel().recv(&mut buf),
                _ => return,
            };
            match received {
                Ok(received) => match rdmasock_core::wire::Message::decode(received.bytes) {
                    Ok(message) => {
                        let fds = received.fds;
                        if received.fds_lost {
                            self.on_lost_fds(id, &message);
                        } else {
                            self.on_message(id, message, fds);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(target: "rdmasock", %error, "bad message");
                        self.hang_up(id, Reason::Violation);
                        return;
                    }
                },
                Err(RecvError::WouldBlock) => return,
                Err(RecvError::Closed) => {
                    self.hang_up(id, Reason::PeerGone);
                    return;
                }
                Err(error) => {
                    tracing::debug!(target: "rdmasock", %error, "channel failed");
                    self.hang_up(id, Reason::LinkFailed);
                    return;
                }
            }
        }
    }

    /// A message came without its fds, because this process has no number left.
    fn on_lost_fds(&mut self, id: u64, message: &rdmasock_core::wire::Message) {
        use rdmasock_core::wire::Message as M;
        match (message, self.conns.get(&id).map(|c| &c.peer)) {
            // P27: we cannot ring there.
            (M::Waiter { id }, Some(Peer::Link(link))) => {
                let _ = link.send(&M::WaiterGone { id: *id }, &[]);
            }
            _ => self.hang_up(id, Reason::Resources),
        }
    }

    fn on_message(&mut self, id: u64, message: rdmasock_core::wire::Message, fds: Vec<PrivateFd>) {
        use rdmasock_core::wire::Message as M;
        // P10: a message comes with exactly its own fds.
        if fds.len() != message.fds() {
            return self.violation(id);
        }
        match message {
            M::Ask {
                request,
                tuple,
                nonce_c,
                instance_c,
            } => self.on_ask(id, request, tuple, nonce_c, instance_c),
            M::Yes {
                request,
                nonce_s,
                instance_s,
            } => self.on_yes(id, request, nonce_s, instance_s),
            M::No { request, reason } => self.on_no(id, request, reason),
            M::Redirect { request, instances } => self.on_redirect(id, request, instances),
            M::Cancel { nonce_s, .. } => self.on_cancel(nonce_s),
            M::Link {
                cookie,
                instance_c,
                pid,
                geometry,
            } => self.on_link(id, cookie, instance_c, pid, &geometry, fds),
            M::LinkAccept {
                instance_s,
                pid,
                geometry,
            } => self.on_link_accept(id, instance_s, pid, &geometry, fds),
            M::LinkRefuse { reason } => {
                tracing::debug!(target: "rdmasock", %reason, "link refused");
                self.hang_up(id, Reason::LinkFailed);
            }
            other => {
                let link = match self.conns.get(&id).map(|c| &c.peer) {
                    Some(Peer::Link(link)) => Some(*link),
                    _ => None,
                };
                match link {
                    Some(link) => self.on_link_message(link, other, fds),
                    None => self.violation(id),
                }
            }
        }
    }

    /// The channel of a link.
    fn conn_of(&self, link: &'static Link) -> Option<u64> {
        let found = self
            .conns
            .iter()
            .find(|(_, c)| matches!(c.peer, Peer::Link(l) if std::ptr::eq(l, link)));
        found.map(|(id, _)| *id)
    }

    /// The other end of a channel does not keep to the protocol.
    fn violation(&mut self, id: u64) {
        tracing::warn!(target: "rdmasock", "a peer breaks the protocol");
        self.library
            .stats
            .count(rdmasock_core::stats::Event::LinkViolation);
        self.hang_up(id, Reason::Violation);
    }

    /// A channel has ended, or is not to be used further.
    fn hang_up(&mut self, id: u64, why: Reason) {
        let Some(conn) = self.conns.remove(&id) else {
            return;
        };
        if let Some(channel) = &conn.channel {
            let _ = kernel::delete(&self.service.epoll, channel.as_fd());
        }
        match conn.peer {
            Peer::Incoming { .. } => {}
            Peer::Asked { request, .. } => self.on_silence(id, request),
            Peer::Linking { peer } => self.link_failed(peer),
            Peer::Link(link) => {
                let _ = kernel::delete(&self.service.epoll, link.channel().as_fd());
                self.on_link_silence(id);
                self.link_down(link, why);
            }
        }
    }

    // ---- sockets ----

    /// From now on this thread watches the anchor, and the library reports the socket's readiness.
    fn watch(&mut self, socket: &'static Socket) -> Watch {
        {
            let Some(_control) = socket.control.lock() else {
                return Watch::Impossible;
            };
            let Some(fd) = socket.anchor_fd() else {
                return Watch::Impossible;
            };
            let data = tag(
                kind::ANCHOR,
                u64::from(socket.slot) << 32 | socket.generation.load(Acquire) & 0xffff_ffff,
            );
            let flags = kernel::EventFlags::IN
                | kernel::EventFlags::OUT
                | kernel::EventFlags::RDHUP
                | kernel::EventFlags::PRI
                | kernel::EventFlags::ET;
            if !self.add(fd, data, flags) {
                return Watch::Impossible;
            }
            socket.watched.store(true, SeqCst);
        }
        let members = socket
            .interest
            .lock()
            .map(|i| i.members.clone())
            .unwrap_or_default();
        if members.iter().all(|m| m.epoll.take_over(m.item, socket)) {
            return Watch::Done;
        }
        self.unwatch(socket);
        Watch::AfterMod
    }

    fn unwatch(&mut self, socket: &'static Socket) {
        {
            let Some(_control) = socket.control.lock() else {
                return;
            };
            if !socket.watched.swap(false, SeqCst) {
                return;
            }
            if let Some(fd) = socket.anchor_fd() {
                let _ = kernel::delete(&self.service.epoll, fd);
            }
            socket.anchor.store(0, SeqCst);
        }
        ready::hand_back(socket);
        // Those who sleep on our doorbells sleep on the kernel's object from now on.
        ready::notify_local(socket);
    }

    fn on_anchor(&mut self, id: u64) {
        let Some(socket) = socket::by_slot((id >> 32) as u32) else {
            return;
        };
        if socket.generation.load(Acquire) & 0xffff_ffff != id & 0xffff_ffff {
            return;
        }
        {
            let Some(_rx) = socket.rx.lock() else { return };
            use rustix::event::PollFlags;
            let now = ready::kernel(socket, PollFlags::IN | PollFlags::RDHUP | PollFlags::PRI);
            socket
                .anchor
                .fetch_or(now & (ready::ENDED | libc::EPOLLPRI as u32), SeqCst);
        }
        if socket.tx_mode.load(Acquire) == mode::MARKED {
            promote::flush(socket);
        }
        if socket.rx_mode.load(Acquire) == mode::MARKED {
            // Meets markers even if the program does not read now.
            promote::readable(socket);
        }
        ready::notify_local(socket);
    }

    /// Puts a socket where its directions say that it belongs.
    fn settle(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        if !self.close_if_over(socket) {
            ready::change_interest(socket, |_| {});
            ready::notify_local(socket);
        }
    }

    /// With both directions on TCP and no handshake under way the kernel's sets have the socket
    /// again. False if that is not so.
    fn close_if_over(&mut self, socket: &'static Socket) -> bool {
        {
            let Some(mut control) = socket.control.lock() else {
                return true;
            };
            if control.handshake.is_some() || !socket.is_plain() {
                return false;
            }
            promote::close_stream(socket, &mut control);
        }
        self.forget_asks(socket);
        self.unwatch(socket);
        crate::fork::returned(socket);
        true
    }

    fn on_pressed(&mut self, r: Ref) {
        if let Some(socket) = r.get()
            && let Some(reader_at) = crate::tx::reader_at(socket)
        {
            self.pressed.push(Pressed {
                r,
                reader_at,
                deadline: crate::time::now_ns() + STILL_FOR,
            });
        }
    }

    /// Sees to the senders that have found no room for a while.
    fn relieve(&mut self, now: u64) {
        let late: Vec<Pressed> = self.pressed.extract_if(.., |p| p.deadline <= now).collect();
        for Pressed { r, reader_at, .. } in late {
            let Some(socket) = r.get() else { continue };
            if let Some(reader_at) = crate::tx::ask_for_room(socket, reader_at) {
                self.pressed.push(Pressed {
                    r,
                    reader_at,
                    deadline: now + STILL_FOR,
                });
            }
        }
    }

    fn shrink(&mut self, now: u64) {
        let mut again = false;
        for socket in socket::all() {
            if socket.rx_mode.load(Acquire) != mode::LINK {
                continue;
            }
            let Some(link) = socket.link() else { continue };
            match crate::rx::shrink(socket, link) {
                crate::rx::Shrunk::Small => {}
                crate::rx::Shrunk::Busy => again = true,
                crate::rx::Shrunk::Offered => {
                    again = true;
                    let peer = socket.control.lock().and_then(|c| c.peer);
                    if let Some(yours) = peer {
                        let _ = link.send(&rdmasock_core::wire::Message::Adopt { yours }, &[]);
                    }
                }
            }
        }
        if again {
            self.shrink_at = now + SHRINK_EVERY;
        }
    }
}

/// Whether the library reports a socket's readiness.
#[derive(PartialEq, Eq)]
enum Watch {
    Done,
    /// Not before the program has used epoll_ctl(EPOLL_CTL_MOD) on it (see `Epoll::take_over`).
    AfterMod,
    Impossible,
}

/// How long an answer may take.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
