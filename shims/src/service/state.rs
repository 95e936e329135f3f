//! The state of the service thread. Each part is in the file that is named after it, with what the thread does with it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::heap;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::control::QueryId;
use rdmasock_core::rendezvous::diag::{self, Owner};
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::DestinationCache;
use rdmasock_core::stream::handshake::Role;
use rustix::event::epoll as kernel;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::alarms::Alarms;
use super::asking::Asking;
use super::bulks::Bulks;
use super::control::taken::Control;
use super::ends::Ends;
use super::guests;
use super::handshakes::Handshakes;
use super::linger::Lingering;
use super::link_table::LinkTable;
use super::remote::hosts::Hosts;
use super::rings::Rings;
use super::standstill::Standstill;
use crate::config::reach::Devices;
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::listener::Listener;
use crate::objects::mailbox::{Command, Mailbox, Ref, kind, tag};
use crate::objects::socket::Socket;
use crate::objects::waiters::SERVICE;
use crate::signals::ending;

/// The purpose of a channel.
pub enum Peer {
    /// A peer has connected to one of this instance's names.
    Incoming {
        listener: Option<&'static Listener>,
        /// The nonce of the last YES that was sent there.
        offered: Option<Nonce>,
    },
    /// A question was sent there, to a service name or an instance's name.
    Asked {
        request: u64,
        by_name: bool,
        /// The connection that sends HELLO after the YES that came over this channel.
        greets: Option<Ref>,
    },
    /// A link was asked for there.
    Linking { peer: InstanceId },
    /// A link's side channel.
    Link(&'static Link),
    /// No channel: a question on the control port, to which the answer is sent.
    Remote(QueryId),
}

/// A channel in the service thread's epoll set.
pub struct Conn {
    /// `None` for a link's channel, which the link owns, and for another host's question.
    pub channel: Option<Channel>,
    pub peer: Peer,
    /// The channel that brings the next message, received apart. Until then the peer's channel is not read.
    pub apart: Option<Channel>,
}

impl Conn {
    pub fn new(channel: Option<Channel>, peer: Peer) -> Self {
        let apart = None;
        Self { channel, peer, apart }
    }
}

/// Whether the library reports a socket's readiness.
#[derive(PartialEq, Eq)]
pub enum Watched {
    Done,
    /// Not before the program has used epoll_ctl(EPOLL_CTL_MOD) on the socket (see `Epoll::take_over`).
    AfterMod,
    Impossible,
}

/// A cookie that no network namespace has.
const ELSEWHERE: u64 = u64::MAX;

/// The state of the service thread.
pub struct Worker {
    pub library: &'static Library,
    pub service: &'static Mailbox,
    pub instance_name: Option<names::Listener>,
    /// The cookie of the network namespace that this thread is in; 0 if the kernel does not have cookies. The value is
    /// [`ELSEWHERE`] if the thread is not in the namespace that it began in.
    pub namespace: u64,
    /// Returns the owner of the connector's socket.
    pub owner_of: fn(&Tuple) -> Owner,
    pub listeners: Vec<&'static Listener>,
    pub conns: HashMap<u64, Conn>,
    /// Links whose next message has descriptors that could not be received yet.
    pub unread: Vec<u64>,
    /// Channels that peers have opened to this instance's names.
    pub guests: guests::Guests,
    pub next_conn: u64,
    pub asks: HashMap<u64, Asking>,
    /// Connections that are asked for when earlier questions are over, in this order.
    pub to_ask: VecDeque<Ref>,
    /// Channels that were made for one question, with the time until which they are kept (monotonic ns), in that order.
    pub asked_until: VecDeque<(u64, u64)>,
    pub cache: DestinationCache,
    pub devices: Devices,
    pub handshakes: Handshakes,
    pub links: LinkTable,
    pub bulks: Bulks,
    pub lingering: Lingering,
    /// Questions of other hosts.
    pub control: Control,
    /// Questions to other hosts.
    pub hosts: Hosts,
    pub rings: Rings,
    pub standstill: Standstill,
    pub ends: Ends,
    pub alarms: Alarms,
    /// How many times in a row links to other hosts were maintained and in use, up to `MAINTAIN_DOUBLINGS`.
    pub maintained: u32,
    /// Watches whether this thread is the last one of a process that is ending.
    pub ending: ending::ThreadWatch,
    /// The count of requests of fork children seen so far.
    pub requests: u32,
    /// Commands that were taken from the mailbox and are not carried out yet.
    pub commands: VecDeque<Command>,
    /// Events of the epoll set that are not handled yet. Many of them are reported only once.
    pub events: VecDeque<kernel::Event>,
}

impl Worker {
    /// Returns the state of a new thread; `mask` is the signal mask of the thread that starts it. `None` without
    /// descriptors for it.
    pub fn new(mask: libc::sigset_t, instance_name: Option<names::Listener>) -> Option<Self> {
        let library = Library::get();
        crate::objects::cgroup::look();
        let worker = Self {
            library,
            service: &library.service,
            namespace: own_namespace(),
            instance_name,
            owner_of: diag::connector_owner,
            listeners: Vec::new(),
            conns: HashMap::new(),
            unread: Vec::new(),
            guests: guests::Guests::new(descriptors()),
            next_conn: 1,
            asks: HashMap::new(),
            to_ask: VecDeque::new(),
            asked_until: VecDeque::new(),
            cache: DestinationCache::new(4096),
            devices: Devices::default(),
            handshakes: Handshakes::new(),
            links: LinkTable::default(),
            bulks: Bulks::default(),
            lingering: Lingering::default(),
            control: Control::new(crate::sys::time::now_ns()),
            hosts: Hosts::new(),
            rings: Rings::default(),
            standstill: Standstill::default(),
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

    /// Returns whether there is memory for one more question, channel, attempt and link. Asked before the first step of
    /// each; later steps need little, which the reserve has.
    pub fn can_begin(&mut self) -> bool {
        heap::can_serve()
            && self.conns.try_reserve(1).is_ok()
            && self.asks.try_reserve(1).is_ok()
            && self.asked_until.try_reserve(1).is_ok()
            && self.links.pending.try_reserve(1).is_ok()
            && self.handshakes.has_room()
    }

    /// Returns a new id for a channel, or for another descriptor in the epoll set.
    pub fn new_conn(&mut self) -> u64 {
        let id = self.next_conn;
        self.next_conn += 1;
        id
    }

    /// Returns whether the connection is in this thread's network namespace. Names, and what the kernel reports of
    /// addresses, belong to this namespace.
    pub fn is_here(&self, socket: &'static Socket, tuple: &Tuple) -> bool {
        if self.namespace != 0 || tuple.namespace() != 0 {
            return tuple.namespace() == self.namespace;
        }
        let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
        let (local, remote) = match socket.promotion.role() {
            Role::Connector => (connector, acceptor),
            Role::Acceptor => (acceptor, connector),
        };
        let inode = socket.control.lock().and_then(|_control| {
            let anchor = socket.numbers.anchor_fd()?;
            Some(rustix::fs::fstat(anchor).ok()?.st_ino)
        });
        inode.is_some_and(|inode| diag::is_socket(local, remote, tuple.device(), inode))
    }

    /// Checks the namespace of a thread that was made again. Names and the control port stay in the first thread's
    /// namespace, so in another one no further connection is promoted.
    pub fn return_to_namespace(&mut self) {
        if own_namespace() != self.namespace {
            self.namespace = ELSEWHERE;
        }
    }

    /// Adds a descriptor to the thread's epoll set. Returns false if the kernel refuses it.
    pub fn add(&self, fd: BorrowedFd<'_>, data: u64, flags: kernel::EventFlags) -> bool {
        kernel::add(&self.service.epoll, fd, kernel::EventData::new_u64(data), flags).is_ok()
    }
}

/// Returns the cookie of this thread's network namespace; 0 without descriptors, or if the kernel has no cookies.
fn own_namespace() -> u64 {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = PrivateFd::open(|| socket_with(family, kind, SocketFlags::CLOEXEC, None));
    socket.map_or(0, |socket| crate::sys::sockopt::namespace(socket.as_fd()))
}

/// Returns how many descriptors this process may have, the library's own among them.
fn descriptors() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.maximum.unwrap_or(u64::MAX)
}
