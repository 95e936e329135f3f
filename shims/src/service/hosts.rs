//! The asker's part of the control port: questions to other hosts (docs/protocol.md, P60–P69).
//!
//! Each pair of a host and a local address has one connected UDP socket. A host that has not answered yet gets one
//! question at a time. The other questions wait for the stamp in its answer, which later proves this end's address to
//! the host. A host that does not answer, or whose port is closed, is not asked for a while. `Worker::accept_yes` goes
//! on after a YES.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use rdmasock_core::ids::{InstanceId, Nonce};
use rdmasock_core::os::datagram::Asker;
use rdmasock_core::rendezvous::control::{Body, DATAGRAM, Datagram, Memory, QueryId, Stamp};
use rdmasock_core::stats::Event;
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::objects::mailbox::{kind, tag};
use crate::service::Worker;
use crate::service::ask::{Asking, HOST_ABSENT_FOR, MOST_ABSENT};
use crate::service::control::{MS, count_refused};

/// The times from each sending of a question to the next, ns. Their sum is less than the time that an answer may take.
const AGAIN: [u64; 4] = [400 * MS, 700 * MS, 1500 * MS, 2000 * MS];
/// The number of refusals in a row (ICMP: port closed) after which a host counts as one without the library. One
/// refusal does not suffice: a program that has just accepted its first connection is about to bind the port.
const REFUSALS: u32 = 3;
/// How often one question is sent anew because its stamp was not good.
const RESTAMPS: u32 = 3;
/// The most hosts that have a socket at once.
const HOSTS: usize = 1024;
/// A host's socket is closed after this time without a datagram in either direction, ns. Longer than the time for which
/// the host repeats a YES (P67).
const QUIET: u64 = 150_000 * MS;
/// The most questions that are remembered, and for how long, ns. They are remembered so that a repeated YES gets the
/// same answer as the first.
const QUERIES: usize = 65_536;
const REMEMBERED: u64 = QUIET;
const NEVER: u64 = u64::MAX;

/// The state of the asker.
pub(super) struct Hosts {
    hosts: HashMap<u64, Host>,
    queries: Memory<QueryId, Query>,
    /// Hosts that are not asked now.
    absent: Memory<IpAddr, ()>,
}

struct Host {
    socket: Asker,
    /// The local address that questions come from, and the address of the host.
    address: (IpAddr, IpAddr),
    /// The stamp of the host's last answer. `None` if the host has not answered yet, or has not answered the last
    /// question.
    stamp: Option<Stamp>,
    /// Questions whose answer is outstanding.
    waiting: Vec<QueryId>,
    /// How many times in a row the kernel has reported that the port is closed.
    refused: u32,
    quiet_since: u64,
}

/// A question to another host.
struct Query {
    host: u64,
    request: u64,
    sent: usize,
    restamped: u32,
    /// When the question is sent next, monotonic ns.
    next: u64,
    fate: Fate,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Asked,
    /// The question's YES has led to a HELLO.
    Greeted,
    /// A YES to the question gets CANCEL.
    Unwanted,
}

impl Host {
    /// Returns the questions that may be sent: the first until the host has answered, then all.
    fn in_turn(&self) -> impl Iterator<Item = &QueryId> {
        let most = if self.stamp.is_some() { usize::MAX } else { 1 };
        self.waiting.iter().take(most)
    }
}

impl Hosts {
    pub(super) fn new() -> Self {
        Self {
            hosts: HashMap::new(),
            queries: Memory::new(QUERIES, REMEMBERED),
            absent: Memory::new(MOST_ABSENT, HOST_ABSENT_FOR),
        }
    }

    /// Returns a host and its id. `address` has the local address from which the host is asked, and the host's own
    /// address. `None` if this pair has no socket.
    fn at(&mut self, address: (IpAddr, IpAddr)) -> Option<(u64, &mut Host)> {
        let found = self.hosts.iter_mut().find(|(_, host)| host.address == address);
        found.map(|(id, host)| (*id, host))
    }

    /// Returns when a question is sent or a socket closed next, monotonic ns; `None` if nothing is due.
    pub(super) fn next_timeout(&self) -> Option<u64> {
        let idle = self.hosts.values().filter(|h| h.waiting.is_empty());
        let quiet = idle.map(|h| h.quiet_since + QUIET);
        let in_turn = self.hosts.values().flat_map(Host::in_turn);
        let sends = in_turn.filter_map(|id| Some(self.queries.get(id)?.next));
        sends.chain(quiet).min().filter(|at| *at != NEVER)
    }
}

impl Worker {
    /// Asks the host that the connection leads to. Does nothing if the host is known not to answer.
    pub(super) fn ask_host(&mut self, request: u64, asking: &mut Asking) {
        let now = crate::sys::time::now_ns();
        let address = (asking.tuple.connector().ip(), asking.tuple.acceptor().ip());
        let Some(id) = self.host(address, now) else {
            return;
        };
        let Ok(query) = QueryId::random() else { return };
        self.hosts.queries.expire(now);
        let Some(host) = self.hosts.hosts.get_mut(&id) else {
            return;
        };
        let entry = Query {
            host: id,
            request,
            sent: 0,
            restamped: 0,
            // `hosts_on_time` sends the question, once it is in `asks`.
            next: now,
            fate: Fate::Asked,
        };
        if !self.hosts.queries.insert(query, entry, now) {
            return;
        }
        host.waiting.push(query);
        asking.asked.insert(id);
        self.library.stats.count(Event::Ask);
        self.library.stats.count(Event::ControlAsk);
    }

    /// Returns the id of the host at `address`, and makes its socket if it has none. `None` if the host is not asked
    /// now, or if no socket can be made.
    fn host(&mut self, address: (IpAddr, IpAddr), now: u64) -> Option<u64> {
        let remote = SocketAddr::new(address.1, self.library.reach.port()?);
        self.hosts.absent.expire(now);
        if self.hosts.absent.get(&address.1).is_some() {
            return None;
        }
        let known = self.hosts.at(address).map(|(id, _)| id);
        if known.is_some() || self.hosts.hosts.len() >= HOSTS {
            return known;
        }
        let socket = Asker::connect(address.0, remote).ok()?;
        let id = self.new_conn();
        if !self.add(socket.as_fd(), tag(kind::HOST, id), kernel::EventFlags::IN) {
            return None;
        }
        let host = Host {
            socket,
            address,
            stamp: None,
            waiting: Vec::new(),
            refused: 0,
            quiet_since: now,
        };
        self.hosts.hosts.insert(id, host);
        Some(id)
    }

    /// Sends the questions that are due, and closes the sockets that have been quiet for `QUIET`.
    pub(super) fn hosts_on_time(&mut self, now: u64) {
        for id in self.hosts.hosts.keys().copied().collect::<Vec<_>>() {
            let Hosts { hosts, queries, .. } = &mut self.hosts;
            let Some(host) = hosts.get_mut(&id) else {
                continue;
            };
            // A YES to a question whose asker has given up is not wanted.
            host.waiting.retain(|query| {
                let Some(query) = queries.get_mut(query) else {
                    return false;
                };
                let wanted = self.asks.contains_key(&query.request);
                if !wanted {
                    query.fate = Fate::Unwanted;
                }
                wanted
            });
            if host.waiting.is_empty() {
                if now >= host.quiet_since + QUIET {
                    self.close_host(id);
                }
                continue;
            }
            let is_due = |q: &&QueryId| queries.get(q).is_some_and(|q| q.next <= now);
            let due: Vec<QueryId> = host.in_turn().filter(is_due).copied().collect();
            for query in due {
                if !self.send_query(id, query, now) {
                    self.host_absent(id);
                    break;
                }
            }
        }
    }

    /// Sends a question, for the first time or again. Returns false if the host is to count as one without the library.
    fn send_query(&mut self, id: u64, query: QueryId, now: u64) -> bool {
        let (Some(host), Some(entry)) = (self.hosts.hosts.get_mut(&id), self.hosts.queries.get_mut(&query)) else {
            return true;
        };
        let Some(asking) = self.asks.get(&entry.request) else {
            return true;
        };
        entry.next = AGAIN.get(entry.sent).map_or(NEVER, |after| now + after);
        entry.sent += 1;
        host.quiet_since = now;
        let datagram = Datagram {
            query,
            stamp: host.stamp.unwrap_or(Stamp::NONE),
            body: Body::Ask {
                request: entry.request,
                // Namespaces and interfaces of this host mean nothing to another host.
                tuple: asking.tuple.at(0, 0),
                nonce_c: asking.nonce,
                instance_c: self.library.id,
            },
        };
        match host.socket.send(&datagram.encode(self.library.reach.key())) {
            // If the kernel has no room for the datagram, it counts as lost on the way, and is sent again later.
            Ok(()) | Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => true,
            // An earlier datagram was refused. The kernel has not sent this one, which is sent again at its next time.
            Err(Errno::CONNREFUSED) => {
                host.refused += 1;
                host.refused < REFUSALS
            }
            Err(error) => {
                tracing::debug!(target: "rdmasock", host = %host.address.1, %error, "control port");
                false
            }
        }
    }

    /// Reads and handles the datagrams of a host, and the errors of its socket.
    pub(super) fn on_host(&mut self, id: u64) {
        let mut buf = [0u8; DATAGRAM + 1];
        for _ in 0..64 {
            let Some(host) = self.hosts.hosts.get_mut(&id) else {
                return;
            };
            match host.socket.recv(&mut buf) {
                Ok(None) => return,
                Ok(Some(length)) => {
                    host.refused = 0;
                    let bytes = buf.get(..length).unwrap_or(&buf);
                    match Datagram::decode(bytes, self.library.reach.key()) {
                        Ok(datagram) => self.on_host_datagram(id, &datagram),
                        Err(refused) => count_refused(self.library.stats, refused),
                    }
                }
                Err(error) => {
                    tracing::debug!(target: "rdmasock", host = %host.address.1, %error, "control port");
                    host.refused += 1;
                    if error != Errno::CONNREFUSED || host.refused >= REFUSALS {
                        return self.host_absent(id);
                    }
                }
            }
        }
    }

    fn on_host_datagram(&mut self, id: u64, datagram: &Datagram) {
        let now = crate::sys::time::now_ns();
        let (Some(host), Some(query)) = (
            self.hosts.hosts.get_mut(&id),
            self.hosts.queries.get_mut(&datagram.query).filter(|q| q.host == id),
        ) else {
            return self.library.stats.count(Event::ControlMisplaced);
        };
        let (request, fate) = (query.request, query.fate);
        match datagram.body {
            Body::Stamp if fate == Fate::Asked => {
                if query.restamped >= RESTAMPS {
                    return self.library.stats.count(Event::ControlMisplaced);
                }
                query.restamped += 1;
                query.next = now;
                host.stamp = Some(datagram.stamp);
            }
            Body::Stamp => {}
            Body::Yes {
                request: repeated,
                nonce_s,
                instance_s,
            } if repeated == request => {
                host.stamp = Some(datagram.stamp);
                self.on_host_yes((id, datagram.query), (request, fate), nonce_s, instance_s);
            }
            Body::No {
                request: repeated,
                reason,
            } if repeated == request => {
                host.stamp = Some(datagram.stamp);
                if fate == Fate::Asked {
                    self.close_query(id, datagram.query, Fate::Unwanted);
                    if let Some(asking) = self.take_asking(request, id) {
                        self.library.stats.count(Event::No);
                        self.declined(request, asking, reason);
                    }
                }
            }
            _ => self.library.stats.count(Event::ControlMisplaced),
        }
    }

    /// Ends the wait for a question's answer; `fate` is how a repeated YES is answered.
    fn close_query(&mut self, id: u64, query: QueryId, fate: Fate) {
        if let Some(host) = self.hosts.hosts.get_mut(&id) {
            host.waiting.retain(|q| *q != query);
            host.quiet_since = crate::sys::time::now_ns();
        }
        if let Some(query) = self.hosts.queries.get_mut(&query) {
            query.fate = fate;
        }
    }

    /// Answers a YES, the first or a repeated one.
    fn on_host_yes(
        &mut self,
        (id, query): (u64, QueryId),
        (request, fate): (u64, Fate),
        nonce_s: Nonce,
        instance_s: InstanceId,
    ) {
        let fate = if fate != Fate::Asked {
            fate
        } else if let Some(asking) = self.asks.remove(&request)
            && self.accept_yes(&asking, nonce_s, instance_s)
        {
            Fate::Greeted
        } else {
            Fate::Unwanted
        };
        self.close_query(id, query, fate);
        let body = if fate == Fate::Greeted {
            Body::Got
        } else {
            Body::Cancel { nonce_s, instance_s }
        };
        if let Some(host) = self.hosts.hosts.get(&id) {
            let stamp = host.stamp.unwrap_or(Stamp::NONE);
            let datagram = Datagram { query, stamp, body };
            let _ = host.socket.send(&datagram.encode(self.library.reach.key()));
        }
    }

    /// Returns whether the host of an expired question is silent: it has not answered at all, or not since its last
    /// expired question. A silent host is not asked for `HOST_ABSENT_FOR`.
    pub(super) fn is_host_silent(&mut self, asking: &Asking) -> bool {
        let address = (asking.tuple.connector().ip(), asking.tuple.acceptor().ip());
        let Some((id, host)) = self.hosts.at(address) else {
            return self.hosts.absent.get(&address.1).is_some();
        };
        // The host has answered before, but may be gone now. Without a stamp it gets one question at a time again.
        if host.stamp.take().is_some() {
            return false;
        }
        // The socket stays open for now. A host that was only slow repeats its YES until CANCEL reaches it. Until then
        // it answers NO to another question about that connection.
        self.leave_alone(id);
        true
    }

    /// Handles a host whose port is closed, or that cannot be reached.
    fn host_absent(&mut self, id: u64) {
        self.leave_alone(id);
        self.close_host(id);
    }

    /// Stops questions to the host for `HOST_ABSENT_FOR`. The connections whose questions wait for its answer stay on
    /// TCP.
    fn leave_alone(&mut self, id: u64) {
        let Some(host) = self.hosts.hosts.get_mut(&id) else {
            return;
        };
        let waiting = std::mem::take(&mut host.waiting);
        host.stamp = None;
        self.library.stats.count(Event::ControlAbsent);
        let now = crate::sys::time::now_ns();
        self.hosts.absent.insert(host.address.1, (), now);
        for query in waiting {
            let Some(query) = self.hosts.queries.get_mut(&query) else {
                continue;
            };
            query.fate = Fate::Unwanted;
            let request = query.request;
            if let Some(asking) = self.take_asking(request, id) {
                self.go_on(request, asking);
            }
        }
    }

    fn close_host(&mut self, id: u64) {
        if let Some(host) = self.hosts.hosts.remove(&id) {
            self.service.forget(host.socket.as_fd());
        }
    }
}
