//! Links to other hosts: connecting, accepting, and the events of their descriptors.
//!
//! The address and the cookie come from the HELLO in the TCP connection; this file connects to nothing else. Connecting
//! can block in the kernel, so a thread of its own does it.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::PRIVATE_BYTES;
use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::stats::Reason;
use rdmasock_core::wire::{INTRODUCTION, Introduction};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use super::link_table::{Arriving, HalfOpen, LINK_TIMEOUT};
use super::signals::{SignalsBlocked, spawn};
use super::state::{Conn, Peer, Worker};
use crate::config::verbs::{self, Acceptor, Dialled, Incoming, Pair, State};
use crate::config::{ZeroCopy, config};
use crate::objects::link::life::Identity;
use crate::objects::link::{Link, Maintained, Remote, up};
use crate::objects::mailbox::{Command, kind, tag};
use crate::objects::waiters::SERVICE;

const _: () = assert!(INTRODUCTION == PRIVATE_BYTES);

/// The first interval of maintenance, ns. For that time the last head of an idle direction is held back. For that time
/// no thread need be notified of completions after the last one that slept on a link has gone on. While links are in
/// use the interval doubles up to four times as much, since each round takes a core from the program.
const MAINTAIN_AFTER: u64 = 5_000_000;
const MAINTAIN_DOUBLINGS: u32 = 2;

/// How often links on which something was sent are checked, ns.
const WATCH_EVERY: u64 = 1_000_000_000;

pub(super) fn introduce(instance: InstanceId, cookie: Cookie, is_bulk: bool) -> [u8; PRIVATE_BYTES] {
    let introduction = Introduction {
        pid: rustix::process::getpid().as_raw_nonzero().get() as u32,
        instance,
        cookie,
        is_direct: config().zcopy != ZeroCopy::Off,
        is_bulk,
    };
    introduction.encode()
}

impl Worker {
    /// Listens for links at this local address, the acceptor's end of a connection. Returns false if there is no device
    /// for it.
    pub(super) fn listen_for_links(&mut self, local: IpAddr) -> bool {
        if self.library.offers.place_at(local).is_some() || self.library.reach.pretends() {
            return true;
        }
        let reach = self.library.reach;
        if !reach.is_candidate(local, local, &mut self.devices) {
            return false;
        }
        let acceptor = match Acceptor::new(local) {
            Ok(acceptor) => acceptor,
            Err(error) => {
                tracing::warn!(target: "rdmasock", %local, %error, "no links from other hosts");
                return false;
            }
        };
        // SAFETY: the fd is open as long as the acceptor, which stays in `links.acceptors`; `drop_acceptor` ends the
        // registration.
        let fd = unsafe { BorrowedFd::borrow_raw(acceptor.fd) };
        let id = self.new_conn();
        if !self.add(fd, tag(kind::ACCEPTOR, id), kernel::EventFlags::IN) {
            return false;
        }
        tracing::info!(target: "rdmasock", address = %acceptor.address, "listens for links from other hosts");
        if let Some(mut known) = self.library.offers.places.lock() {
            known.push(acceptor.address);
        }
        self.links.acceptors.insert(id, acceptor);
        true
    }

    pub(super) fn on_acceptor(&mut self, id: u64) {
        // A bounded number, so that a flood of requests cannot keep the thread.
        for _ in 0..16 {
            match self.links.acceptors.get(&id).map(Acceptor::next) {
                Some(Ok(Some(incoming))) => self.on_incoming(incoming),
                Some(Err(error)) => return self.drop_acceptor(id, error),
                _ => return,
            }
        }
    }

    /// Drops a listener whose device has gone. The next connection that a device could serve may find another device.
    fn drop_acceptor(&mut self, id: u64, error: Errno) {
        let Some(acceptor) = self.links.acceptors.remove(&id) else {
            return;
        };
        tracing::info!(target: "rdmasock", address = %acceptor.address, %error, "no more links from other hosts");
        self.forget_fd(Ok(acceptor.fd));
        if let Some(mut known) = self.library.offers.places.lock() {
            known.retain(|address| *address != acceptor.address);
        }
    }

    fn on_incoming(&mut self, incoming: Incoming) {
        for id in self.links.half_open.keys().copied().collect::<Vec<_>>() {
            self.spend_cookie(id);
        }
        let introduction = Introduction::decode(&incoming.private).ok();
        let (introduction, bulk, pair) = match introduction {
            Some(introduction) if introduction.is_bulk => match self.accept_bulk(incoming, &introduction) {
                Ok((link, pair)) => (introduction, Some(link), pair),
                // The link may have gone meanwhile.
                Err(incoming) => return incoming.map_or((), Incoming::reject),
            },
            Some(introduction) if self.library.offers.has(&introduction.cookie, &introduction.instance) => {
                self.drop_request(&introduction.cookie);
                match incoming.accept(&introduce(self.library.id, Introduction::NO_COOKIE, false), None) {
                    Ok(pair) => (introduction, None, pair),
                    Err(error) => {
                        tracing::warn!(target: "rdmasock", peer = %introduction.instance, %error, "a link cannot be accepted");
                        return;
                    }
                }
            }
            _ => return self.refuse(incoming),
        };
        let id = self.new_conn();
        let is_watched = pair.info().is_ok_and(|info| {
            // SAFETY: the fd is open as long as the pair, which stays in `arriving` while the fd is in the epoll set.
            let fd = unsafe { BorrowedFd::borrow_raw(info.state_fd) };
            self.add(fd, tag(kind::PAIR_STATE, id), kernel::EventFlags::IN)
        });
        if !is_watched {
            if let Some(link) = bulk {
                self.on_bulk_arrived(link, None);
            }
            return;
        }
        let deadline = crate::sys::time::now_ns() + LINK_TIMEOUT.as_nanos() as u64;
        self.links.arriving.insert(
            id,
            Arriving {
                pair,
                introduction,
                bulk,
                deadline,
            },
        );
        self.on_pair_state(id);
    }

    /// Refuses a connection that shows no cookie of this instance.
    fn refuse(&self, incoming: Incoming) {
        self.library.stats.count(rdmasock_core::stats::Event::LinkViolation);
        tracing::warn!(target: "rdmasock", "a link without a cookie of ours is refused");
        incoming.reject();
    }

    /// Connects to the address of a HELLO, in a new thread. Returns false if there is no device or no thread for it.
    pub(super) fn dial_remote(&mut self, peer: InstanceId, local: IpAddr, remote: SocketAddr, cookie: &Cookie) -> bool {
        if !self.devices.have(local) {
            return false;
        }
        let greeting = introduce(self.library.id, *cookie, false);
        let blocked = SignalsBlocked::new();
        let spawned = spawn(c"rdmasock-dial", 256 * 1024, move || {
            let dialled = dial(peer, local, remote, &greeting, None);
            crate::objects::library::Library::get()
                .service
                .submit(Command::Dialled(peer, dialled));
        });
        drop(blocked);
        spawned.is_ok()
    }

    pub(super) fn on_dialled(&mut self, peer: InstanceId, dialled: Result<Dialled, Errno>) {
        match dialled {
            // A link that comes late serves the next attempt.
            Ok(dialled) => {
                let id = self.new_conn();
                let place = Some((dialled.local, dialled.remote));
                match self.establish_remote(id, &dialled.introduction, place, dialled.pair) {
                    Some(link) => self.link_made(peer, link),
                    None => self.link_failed(peer),
                }
            }
            Err(error) => {
                tracing::warn!(target: "rdmasock", %peer, %error, "no link");
                self.link_failed(peer);
            }
        }
    }

    /// Handles an event of a queue pair whose state may have changed.
    pub(super) fn on_pair_state(&mut self, id: u64) {
        if let Some((link, remote)) = self.remote_link(id) {
            if let State::Down(error) = remote.state() {
                tracing::info!(target: "rdmasock", peer = %link.peer(), %error, "link lost");
                self.hang_up(id, Reason::LinkFailed);
            }
            return;
        }
        let state = match self.links.arriving.get(&id) {
            Some(arriving) => arriving.pair.state(),
            None => return,
        };
        if state == State::Connecting {
            return;
        }
        let Some(Arriving {
            pair,
            introduction,
            bulk,
            ..
        }) = self.links.arriving.remove(&id)
        else {
            return;
        };
        self.forget_fd(pair.info().map(|i| i.state_fd));
        let peer = introduction.instance;
        match (state, bulk) {
            (State::Up, Some(link)) => self.on_bulk_arrived(link, Some(pair)),
            (_, Some(link)) => self.on_bulk_arrived(link, None),
            (State::Up, None) => {
                if self.establish_remote(id, &introduction, None, pair).is_some() {
                    let deadline = crate::sys::time::now_ns() + LINK_TIMEOUT.as_nanos() as u64;
                    let cookie = introduction.cookie;
                    let half_open = HalfOpen { peer, cookie, deadline };
                    self.links.half_open.insert(id, half_open);
                    self.spend_cookie(id);
                }
            }
            (state, None) => tracing::debug!(target: "rdmasock", %peer, ?state, "a link did not come up"),
        }
    }

    /// Gives up connections that did not come up in time, and accepted links over which nothing has come.
    pub(super) fn expire_arriving(&mut self, now: u64) {
        self.drop_arriving(|arriving| arriving.deadline <= now);
        self.drop_half_open(|half_open| half_open.deadline <= now);
    }

    /// Drops the connection or link of an earlier request with the same cookie. The sender has given that request up,
    /// and does not know of the link that it has led to.
    fn drop_request(&mut self, cookie: &Cookie) {
        self.drop_arriving(|arriving| arriving.introduction.cookie.matches(cookie));
        self.drop_half_open(|half_open| half_open.cookie.matches(cookie));
    }

    fn drop_half_open(&mut self, is_over: impl Fn(&HalfOpen) -> bool) {
        let over = self.links.half_open.iter().filter(|(_, u)| is_over(u));
        for id in over.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.hang_up(id, Reason::LinkFailed);
        }
    }

    /// Spends the cookie of an accepted link once something has come over it.
    fn spend_cookie(&mut self, id: u64) {
        let Some(HalfOpen { peer, cookie, .. }) = self.links.half_open.get(&id) else {
            return;
        };
        if self.remote_link(id).is_some_and(|(_, d)| d.has_received()) {
            self.library.offers.redeem(cookie, peer);
            self.links.half_open.remove(&id);
        }
    }

    fn drop_arriving(&mut self, is_over: impl Fn(&Arriving) -> bool) {
        let over = self.links.arriving.iter().filter(|(_, a)| is_over(a));
        for id in over.map(|(id, _)| *id).collect::<Vec<_>>() {
            if let Some(arriving) = self.links.arriving.remove(&id) {
                self.forget_fd(arriving.pair.info().map(|i| i.state_fd));
                if let Some(link) = arriving.bulk {
                    self.on_bulk_arrived(link, None);
                }
            }
        }
    }

    /// Gives up the bulk queue pairs that are being accepted beside a link.
    pub(super) fn forget_arriving_beside(&mut self, link: &'static Link) {
        let is_it = |arriving: &Arriving| arriving.bulk.is_some_and(|other| other == link);
        let ids = self.links.arriving.iter().filter(|(_, arriving)| is_it(arriving));
        for id in ids.map(|(id, _)| *id).collect::<Vec<_>>() {
            if let Some(arriving) = self.links.arriving.remove(&id) {
                self.forget_fd(arriving.pair.info().map(|i| i.state_fd));
            }
        }
    }

    fn forget_fd(&self, fd: Result<i32, Errno>) {
        if let Ok(fd) = fd {
            // SAFETY: the caller still has the pair or the acceptor, so the fd is open.
            let _ = kernel::delete(&self.service.epoll, unsafe { BorrowedFd::borrow_raw(fd) });
        }
    }

    fn establish_remote(
        &mut self,
        id: u64,
        introduction: &Introduction,
        dialled: Option<(IpAddr, SocketAddr)>,
        pair: Pair,
    ) -> Option<&'static Link> {
        let Introduction {
            pid, instance: peer, ..
        } = *introduction;
        let info = pair.info().ok()?;
        let slot = self.links.free_slot();
        let stats = self.open_stats(slot, rdmasock_core::stats::Path::Verbs, peer, pid);
        let identity = Identity { slot, peer, stats };
        let Some(link) = Link::between_hosts(identity, pair, config().arena.bytes(), introduction, dialled) else {
            self.library.stats.close_link(slot);
            return None;
        };
        for (fd, kind) in [
            (info.state_fd, kind::PAIR_STATE),
            (info.completion_fd, kind::COMPLETION),
        ] {
            // SAFETY: the fds are open as long as the pair, which the link has now. `hang_up` takes them out of the
            // epoll set before the link gives the pair up.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            if !self.add(fd, tag(kind, id), kernel::EventFlags::IN) {
                self.give_up(link);
                return None;
            }
        }
        if let Some(remote) = link.remote() {
            remote.set_token(tag(kind::COMPLETION, id));
        }
        self.conns.insert(id, Conn::new(None, Peer::Link(link)));
        up::add(link);
        tracing::info!(target: "rdmasock", %peer, pid, slot, qp = info.qp_number, "link to another host up");
        self.on_completion(id);
        Some(link)
    }

    fn remote_link(&self, id: u64) -> Option<(&'static Link, &'static Remote)> {
        match self.conns.get(&id).map(|c| &c.peer) {
            Some(Peer::Link(link)) => Some((link, link.remote()?)),
            _ => None,
        }
    }

    /// Handles the work for this thread on a link to another host.
    pub(super) fn poll_remote(&mut self, link: &'static Link) {
        let Some(remote) = link.remote() else {
            return;
        };
        self.retire_bulk(link, remote);
        if remote.is_watched() {
            self.alarms
                .watch
                .set_if_off(|| crate::sys::time::now_ns() + WATCH_EVERY);
        }
        if link.has_ready(SERVICE)
            && let Some(id) = self.conn_of(link)
        {
            self.on_completion(id);
        }
    }

    /// Returns the time from a request to maintain the links until that is done, ns.
    pub(super) fn maintain_after(&self) -> u64 {
        MAINTAIN_AFTER << self.maintained
    }

    /// Maintains the links to other hosts: sends the heads that idle directions owe. Where no thread sleeps on a link
    /// any more, this thread is notified of its completions again.
    pub(super) fn maintain_links(&mut self) {
        // First, so that a request that comes from now on is a new one.
        self.service.maintaining.begin();
        let mut again = false;
        for link in up::all() {
            let Some(remote) = link.remote() else {
                continue;
            };
            match remote.maintain() {
                Maintained::Quiet => {}
                Maintained::Busy => again = true,
                Maintained::TakenBack => {
                    if let Some(id) = self.conn_of(link) {
                        self.on_completion(id);
                    }
                }
            }
        }
        if again {
            self.maintained = (self.maintained + 1).min(MAINTAIN_DOUBLINGS);
            self.service.maintain_later();
        } else {
            self.maintained = 0;
        }
    }

    /// Checks whether the peers' devices still answer, on links on which something was sent. `poll_remote` handles the
    /// links that have failed.
    pub(super) fn watch_links(&mut self, now: u64) {
        for remote in up::all().iter().filter_map(|l| l.remote()) {
            if remote.is_watched() {
                remote.tick(now);
            }
            if remote.is_watched() {
                self.alarms.watch.set(now + WATCH_EVERY);
            }
        }
    }

    /// Handles a completion on a link's queue pair.
    pub(super) fn on_completion(&mut self, id: u64) {
        let Some((link, remote)) = self.remote_link(id) else {
            return;
        };
        // Polls once more after arming, since a completion in between makes no event. A thread that sleeps on the
        // descriptor itself has armed it.
        loop {
            remote.progress();
            self.take_messages(id, remote);
            if !remote.service_hears_on() || !remote.arm() {
                break;
            }
        }
        self.take_messages(id, remote);
        self.spend_cookie(id);
        if let Some(reason) = remote.fault() {
            tracing::info!(target: "rdmasock", peer = %link.peer(), %reason, "link lost");
            self.hang_up(id, reason);
        }
    }

    /// Handles the messages that have come over the link's side channel.
    fn take_messages(&mut self, id: u64, remote: &'static Remote) {
        while let Some(message) = remote.take_message() {
            if message.fds() > 0 {
                return self.violation(id);
            }
            self.on_message(id, message, Vec::new());
        }
    }

    /// Takes the descriptors of a link that goes down out of the epoll set.
    pub(super) fn forget_remote(&mut self, link: &'static Link) {
        if let Some(remote) = link.remote() {
            remote.fds().into_iter().for_each(|fd| self.forget_fd(Ok(fd)));
        }
    }
}

/// The time after which an unanswered request to connect counts as lost, and is made anew. Each further one is given
/// twice as long, for the peer may only be slow.
///
/// RoCE's requests are datagrams, which the kernel repeats after more than 4 s (Linux, `CMA_CM_RESPONSE_TIMEOUT`). With
/// iWARP a request is a TCP connection, which the kernel tries at longer and longer intervals. The first request after
/// a failure of the network often comes too early.
const LOST_AFTER: Duration = Duration::from_secs(3);

pub(super) fn dial(
    peer: InstanceId,
    local: IpAddr,
    remote: SocketAddr,
    greeting: &[u8],
    beside: Option<&Pair>,
) -> Result<Dialled, Errno> {
    tracing::debug!(target: "rdmasock::link", %remote, "dialling");
    let started = Instant::now();
    let mut patience = LOST_AFTER;
    let pair = loop {
        let left = LINK_TIMEOUT.saturating_sub(started.elapsed());
        let millis = patience.min(left).as_millis() as u32;
        match verbs::connect(local, remote, greeting, millis, beside) {
            Err(Errno::TIMEDOUT) if left > patience => patience *= 2,
            other => break other?,
        }
        tracing::debug!(target: "rdmasock::link", %remote, "dialling again");
    };
    tracing::debug!(target: "rdmasock::link", %remote, "connected");
    let info = pair.info()?;
    let introduction = Introduction::decode(&info.private).map_err(|_| Errno::PROTO)?;
    // P23: the instance that the TCP connection leads to, and no other.
    if introduction.instance != peer {
        return Err(Errno::PERM);
    }
    Ok(Dialled {
        pair,
        introduction,
        local,
        remote,
    })
}
