//! Links to other hosts: connecting, accepting, and the events of their descriptors. Also the bulk queue pairs, which
//! carry direct transfers beside the queue pairs of these links (docs/protocol.md, P90): when one is made, and what
//! follows when it is lost.
//!
//! A link is connected only to the address from the HELLO in the TCP connection, with the cookie from there. Connecting
//! can block in the kernel, so a separate thread does it.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::PRIVATE_BYTES;
use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::stats::{Event, Path, Reason};
use rdmasock_core::wire::{INTRODUCTION, Introduction, Message};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::config::verbs::{Acceptor, Dialled, Incoming, Pair, State};
use crate::config::{ZeroCopy, config, verbs};
use crate::objects::library::Library;
use crate::objects::link;
use crate::objects::link::{Link, Maintained, Remote};
use crate::objects::mailbox::{Command, Ref, kind, tag};
use crate::objects::socket::tuple_of;
use crate::objects::waiters::SERVICE;
use crate::service::links::{LINK_TIMEOUT, Pending};
use crate::service::{Conn, Peer, SignalsBlocked, Worker, ends_of, keys, link_at, spawn};

const _: () = assert!(INTRODUCTION == PRIVATE_BYTES);

/// The first interval between maintenances of links, ns. For that time the last head (a reader's position) of an idle
/// direction is held back. For that time, too, completions of a link may wake no thread, once the last thread that
/// slept on the link has gone on with its work. While links are in use the interval grows to four times as much, since
/// each maintenance takes a core from the program.
pub(super) const MAINTAIN_AFTER: u64 = 5_000_000;
const MAINTAIN_DOUBLINGS: u32 = 2;

/// How often links on which something was sent are checked, ns.
const WATCH_EVERY: u64 = 1_000_000_000;
/// The time after which an unanswered request to connect counts as lost, and is repeated. Each further request is given
/// twice as long, for the peer may only be slow.
///
/// RoCE's requests are datagrams, which the kernel repeats after more than 4 s (Linux, `CMA_CM_RESPONSE_TIMEOUT`). With
/// iWARP a request is a TCP connection, which the kernel tries at longer and longer intervals. The first request after
/// a failure of the network often comes too early.
const LOST_AFTER: Duration = Duration::from_secs(3);
/// How long making a bulk queue pair may take, ns.
const WITHIN: u64 = 40_000_000_000;
/// Time from the loss of one bulk queue pair to the next, ns. It doubles with each loss, at most `DOUBLINGS` times.
const AGAIN_AFTER: u64 = 1_000_000_000;
const DOUBLINGS: u32 = 6;

/// A queue pair that is accepted and not up yet.
pub(super) struct Arriving {
    pair: Pair,
    /// The introduction that the other end has sent.
    introduction: Introduction,
    /// The link for which this is to be the bulk queue pair; `None` if it is to be a new link.
    bulk: Option<&'static Link>,
}

/// Returns the time by which a link that is begun now has to be up, monotonic ns.
fn link_deadline() -> u64 {
    crate::sys::time::now_ns() + LINK_TIMEOUT.as_nanos() as u64
}

impl Worker {
    /// Begins to listen for links at this local address, where the acceptor's end of a TCP connection is, unless this
    /// instance listens there already. Returns false if no device has the address, or if listening fails.
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
        // SAFETY: the fd is open as long as the acceptor, which stays in `acceptors`; `drop_acceptor` ends the
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
        self.acceptors.insert(id, acceptor);
        true
    }

    pub(super) fn on_acceptor(&mut self, id: u64) {
        // A bounded number, so that a flood of requests cannot keep the thread.
        for _ in 0..16 {
            match self.acceptors.get(&id).map(Acceptor::next) {
                Some(Ok(Some(incoming))) => self.on_incoming(incoming),
                Some(Err(error)) => return self.drop_acceptor(id, error),
                _ => return,
            }
        }
    }

    /// Drops a listener whose device has gone. A later connection that a device could serve may find another device.
    fn drop_acceptor(&mut self, id: u64, error: Errno) {
        let Some(acceptor) = self.acceptors.remove(&id) else {
            return;
        };
        tracing::info!(target: "rdmasock", address = %acceptor.address, %error, "no more links from other hosts");
        self.forget_fd(Ok(acceptor.fd));
        if let Some(mut known) = self.library.offers.places.lock() {
            known.retain(|address| *address != acceptor.address);
        }
    }

    fn on_incoming(&mut self, incoming: Incoming) {
        for id in keys(&self.conns, |conn| conn.cookie.is_some()) {
            self.spend_cookie(id);
        }
        let introduction = Introduction::decode(&incoming.private).ok();
        let (introduction, bulk, pair) = match introduction {
            Some(introduction) if introduction.is_bulk => match self.offered_bulk(&introduction) {
                Some((link, remote)) => (introduction, Some(link), self.accept_bulk(link, remote, incoming)),
                // The link may have gone meanwhile.
                None => return incoming.reject(),
            },
            Some(introduction) if self.library.offers.has(&introduction.cookie, &introduction.instance) => {
                // An earlier request with the same cookie is dropped. The sender has given that request up, and does
                // not know of the link that it has led to.
                let is_same = |cookie: Cookie| cookie.matches(&introduction.cookie);
                for id in keys(&self.conns, |conn| conn.cookie.is_some_and(is_same)) {
                    self.hang_up(id, Reason::LinkFailed);
                }
                let answer = introduce(self.library.id, Introduction::NO_COOKIE, false);
                (introduction, None, incoming.accept(&answer, None))
            }
            _ => {
                self.library.stats.count(Event::LinkViolation);
                tracing::warn!(target: "rdmasock", "a link without a cookie of ours is refused");
                return incoming.reject();
            }
        };
        let pair = match (pair, bulk) {
            (Ok(pair), _) => pair,
            (Err(_), Some(link)) => return self.on_bulk_arrived(link, None),
            (Err(error), None) => {
                tracing::warn!(target: "rdmasock", peer = %introduction.instance, %error, "a link cannot be accepted");
                return;
            }
        };
        let id = self.new_conn();
        let is_watched = pair.info().is_ok_and(|info| {
            // SAFETY: the fd is open as long as the pair, which stays in `conns` while the fd is in the epoll set.
            let fd = unsafe { BorrowedFd::borrow_raw(info.state_fd) };
            self.add(fd, tag(kind::PAIR_STATE, id), kernel::EventFlags::IN)
        });
        if !is_watched {
            if let Some(link) = bulk {
                self.on_bulk_arrived(link, None);
            }
            return;
        }
        let arriving = Arriving {
            pair,
            introduction,
            bulk,
        };
        let mut conn = Conn::new(None, Peer::Arriving(arriving), Some(link_deadline()));
        conn.cookie = bulk.is_none().then_some(introduction.cookie);
        self.conns.insert(id, conn);
        self.on_pair_state(id);
    }

    /// Asks an instance of another host for a link: connects to the address of its HELLO, in a new thread. `None` if
    /// there is no device or no thread for it.
    pub(super) fn dial_remote(&mut self, r: Ref, peer: InstanceId, remote: SocketAddr, cookie: &Cookie) -> Option<()> {
        let socket = r.get()?;
        let (local, there) = ends_of(socket, &tuple_of(socket)?);
        let local = local.ip();
        // Connects only to the host at the other end of the TCP connection.
        if there.ip() != remote.ip() || !self.devices.have(local) {
            return None;
        }
        let greeting = introduce(self.library.id, *cookie, false);
        let is_begun = in_thread(move || {
            let dialled = dial(peer, local, remote, &greeting, None);
            Library::get().service.submit(Command::Dialled(peer, dialled));
        });
        is_begun.then(|| {
            let asked = Peer::Linking(Pending::new(peer, r, None));
            let id = self.new_conn();
            self.conns.insert(id, Conn::new(None, asked, Some(link_deadline())));
        })
    }

    pub(super) fn on_dialled(&mut self, peer: InstanceId, dialled: Result<Dialled, Errno>) {
        let link = match dialled {
            // A link that comes late serves the next attempt.
            Ok(dialled) => {
                let id = self.new_conn();
                let place = Some((dialled.local, dialled.remote));
                self.establish_remote(id, &dialled.introduction, place, dialled.pair)
            }
            Err(error) => {
                tracing::warn!(target: "rdmasock", %peer, %error, "no link");
                None
            }
        };
        let is_it = |asked: &Peer| matches!(asked, Peer::Linking(p) if p.peer == peer && p.mine.is_none());
        let conn = self.conn_where(is_it).and_then(|id| self.conns.remove(&id));
        if let Some(Peer::Linking(pending)) = conn.map(|conn| conn.peer) {
            pending.end(link);
        }
    }

    /// Handles an event of a queue pair whose state may have changed.
    pub(super) fn on_pair_state(&mut self, id: u64) {
        if let Some((link, remote)) = self.remote_link(id) {
            if let State::Down(error) = remote.end().qp().state() {
                tracing::info!(target: "rdmasock", peer = %link.peer(), %error, "link lost");
                self.hang_up(id, Reason::LinkFailed);
            }
            return;
        }
        let state = match self.conns.get(&id).map(|conn| &conn.peer) {
            Some(Peer::Arriving(arriving)) => arriving.pair.state(),
            _ => return,
        };
        if state == State::Connecting {
            return;
        }
        let Some(arriving) = self.take_arriving(id) else { return };
        let (pair, introduction) = (arriving.pair, arriving.introduction);
        let peer = introduction.instance;
        match (state, arriving.bulk) {
            (State::Up, Some(link)) => self.on_bulk_arrived(link, Some(pair)),
            (_, Some(link)) => self.on_bulk_arrived(link, None),
            (State::Up, None) => {
                if self.establish_remote(id, &introduction, None, pair).is_some()
                    && let Some(conn) = self.conns.get_mut(&id)
                {
                    conn.until = Some(link_deadline());
                    conn.cookie = Some(introduction.cookie);
                    self.spend_cookie(id);
                }
            }
            (state, None) => tracing::debug!(target: "rdmasock", %peer, ?state, "a link did not come up"),
        }
    }

    /// Spends the cookie of an accepted link once something has come over it.
    fn spend_cookie(&mut self, id: u64) {
        let Some(cookie) = self.conns.get(&id).and_then(|conn| conn.cookie) else {
            return;
        };
        if let Some((link, remote)) = self.remote_link(id)
            && remote.end().counts().received > 0
            && let Some(conn) = self.conns.get_mut(&id)
        {
            self.library.offers.redeem(&cookie, &link.peer());
            (conn.until, conn.cookie) = (None, None);
        }
    }

    /// Removes a queue pair that was being accepted, and returns it.
    fn take_arriving(&mut self, id: u64) -> Option<Arriving> {
        let Some(Peer::Arriving(arriving)) = self.conns.remove(&id).map(|conn| conn.peer) else {
            return None;
        };
        self.forget_fd(arriving.pair.info().map(|i| i.state_fd));
        Some(arriving)
    }

    /// Gives up a queue pair that was being accepted.
    pub(super) fn give_up_arriving(&mut self, arriving: Arriving) {
        self.forget_fd(arriving.pair.info().map(|i| i.state_fd));
        if let Some(link) = arriving.bulk {
            self.on_bulk_arrived(link, None);
        }
    }

    /// Gives up the bulk queue pairs that are being accepted beside a link.
    pub(super) fn forget_arriving_beside(&mut self, link: &'static Link) {
        let is_beside = |conn: &Conn| matches!(&conn.peer, Peer::Arriving(arriving) if arriving.bulk == Some(link));
        for id in keys(&self.conns, is_beside) {
            self.take_arriving(id);
        }
    }

    fn forget_fd(&self, fd: Result<i32, Errno>) {
        if let Ok(fd) = fd {
            // SAFETY: the caller still has the pair or the acceptor, so the fd is open.
            self.service.forget(unsafe { BorrowedFd::borrow_raw(fd) });
        }
    }

    fn establish_remote(
        &mut self,
        id: u64,
        introduction: &Introduction,
        dialled: Option<(IpAddr, SocketAddr)>,
        pair: Pair,
    ) -> Option<&'static Link> {
        let (pid, peer) = (introduction.pid, introduction.instance);
        let info = pair.info().ok()?;
        let link = self.new_link(Path::Verbs, peer, pid, |identity| {
            Link::between_hosts(identity, pair, config().arena.bytes(), introduction, dialled)
        })?;
        let slot = link.slot();
        let fds = [
            (info.state_fd, kind::PAIR_STATE),
            (info.completion_fd, kind::COMPLETION),
        ];
        for (fd, kind) in fds {
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
        self.conns.insert(id, Conn::new(None, Peer::Link(link), None));
        link::add(link);
        tracing::info!(target: "rdmasock", %peer, pid, slot, "link to another host up");
        self.on_completion(id);
        Some(link)
    }

    fn remote_link(&self, id: u64) -> Option<(&'static Link, &'static Remote)> {
        let link = self.link_of(id)?;
        Some((link, link.remote()?))
    }

    /// Does the service thread's work on a link to another host.
    pub(super) fn poll_remote(&mut self, link: &'static Link) {
        let Some(remote) = link.remote() else {
            return;
        };
        self.retire_bulk(link, remote);
        if remote.end().is_watched() {
            let at = || crate::sys::time::now_ns() + WATCH_EVERY;
            self.alarms.watch.get_or_insert_with(at);
        }
        if link.has_ready(SERVICE)
            && let Some(id) = self.conn_of(link)
        {
            self.on_completion(id);
        }
    }

    /// Maintains the links to other hosts: sends the heads (readers' positions) that idle directions owe. If no thread
    /// of the program sleeps on a link any more, its completions wake this thread again.
    pub(super) fn maintain_links(&mut self) {
        // The request for maintenance is cleared first, so that a request from now on counts as a new one.
        self.service.maintaining.begin();
        let mut again = false;
        for link in link::all() {
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
        for remote in link::all().iter().filter_map(|l| l.remote()) {
            if remote.end().is_watched() {
                remote.end().tick(now);
            }
            if remote.end().is_watched() {
                self.alarms.watch = Some(now + WATCH_EVERY);
            }
        }
    }

    /// Handles a completion on a link's queue pair.
    pub(super) fn on_completion(&mut self, id: u64) {
        let Some((link, remote)) = self.remote_link(id) else {
            return;
        };
        // A completion between the last poll and the arming makes no event, so the link is polled once more after
        // arming. If a thread of the program sleeps on the descriptor itself, that thread has armed it.
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
        while let Some(message) = remote.end().take_message() {
            if message.fds() > 0 {
                return self.violation(id);
            }
            self.on_message(id, message, Vec::new());
        }
    }

    /// Takes the descriptors of a link out of the epoll set.
    pub(super) fn forget_link_fds(&self, link: &'static Link) {
        link.with_channel(|channel| self.service.forget(channel.as_fd()));
        if let Some(remote) = link.remote() {
            remote.fds().into_iter().for_each(|fd| self.forget_fd(Ok(fd)));
        }
    }
}

fn introduce(instance: InstanceId, cookie: Cookie, is_bulk: bool) -> [u8; PRIVATE_BYTES] {
    let introduction = Introduction {
        pid: rustix::process::getpid().as_raw_nonzero().get() as u32,
        instance,
        cookie,
        is_direct: config().zcopy != ZeroCopy::Off,
        is_bulk,
    };
    introduction.encode()
}

/// Runs `dial` in a new thread, since it may block. Returns false if no thread can be made.
fn in_thread(dial: impl FnOnce() + Send + 'static) -> bool {
    let _blocked = SignalsBlocked::new();
    spawn(c"rdmasock-dial", 256 * 1024, dial).is_ok()
}

fn dial(
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
    // P23: only the instance that the TCP connection leads to may answer.
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

// Bulk queue pairs: how they are made, and what follows when one is lost. core's engine makes the transfers over them.
//
// The end that has connected the link also connects the bulk queue pair, with a cookie that the other end sends over
// the link. After a loss the link gets another one only when both ends have reported the loss, and some time later.

/// The state of a link's bulk queue pair.
enum Stage {
    /// No queue pair exists, and this end begins none before this time, monotonic ns. It pauses after a loss, or waits
    /// until then for the other end to use, or to send, a cookie.
    None { before: u64 },
    /// The queue pair is being connected.
    Connecting,
    /// Both ends have the queue pair, as far as this end knows.
    Up,
    /// The queue pair is lost. `here`: this end has reported that; `there`: the other end has.
    Lost { here: bool, there: bool },
}

/// The bulk queue pair of one link.
pub(super) struct Bulk {
    stage: Stage,
    /// The cookie that the other end was given last. The other end may use it in several requests, as for a link.
    cookie: Option<Cookie>,
    /// How many bulk queue pairs of the link were lost, or failed to come up.
    lost: u32,
}

impl Worker {
    /// Begins to make a bulk queue pair for the link in this slot, since a call wants a direct transfer. Does nothing
    /// if one exists, is being made, or may not be made yet.
    pub(super) fn want_bulk(&mut self, slot: u32) {
        let Some((link, remote)) = link_at(slot).and_then(|link| Some((link, link.remote()?))) else {
            return;
        };
        let now = crate::sys::time::now_ns();
        if !remote.is_direct() || !self.bulk_of(link).may_begin(now) {
            return;
        }
        if remote.dialled().is_none() {
            return self.offer_bulk(link);
        }
        if link.send(&Message::BulkWanted, &[]).is_ok() {
            self.bulk_of(link).stage = Stage::None { before: now + WITHIN };
        }
    }

    /// Returns the state of the link's bulk queue pair.
    fn bulk_of(&mut self, link: &Link) -> &mut Bulk {
        self.bulks.entry(link.slot()).or_insert(Bulk::NONE)
    }

    /// Returns the link for whose bulk queue pair this cookie was given out; `None` if there is none.
    fn offered_bulk(&self, introduction: &Introduction) -> Option<(&'static Link, &'static Remote)> {
        let is_it = |link: &&'static Link| {
            let cookie = self.bulks.get(&link.slot()).and_then(|bulk| bulk.cookie.as_ref());
            cookie.is_some_and(|cookie| cookie.matches(&introduction.cookie)) && link.peer() == introduction.instance
        };
        let link = link::all().into_iter().find(is_it)?;
        Some((link, link.remote()?))
    }

    fn offer_bulk(&mut self, link: &'static Link) {
        let now = crate::sys::time::now_ns();
        let Ok(fresh) = Cookie::random() else { return };
        let cookie = self.bulk_of(link).to_offer(now, fresh);
        if link.send(&Message::Bulk { cookie }, &[]).is_ok() {
            self.bulk_of(link).on_offered(cookie, now + WITHIN);
        }
    }

    /// Handles a message about the link's bulk queue pair. Returns false if the message breaks the protocol or is
    /// another one; the caller then takes the link down.
    pub(super) fn on_bulk_message(&mut self, link: &'static Link, message: &Message) -> bool {
        let Some(remote) = link.remote().filter(|remote| remote.is_direct()) else {
            return false;
        };
        let now = crate::sys::time::now_ns();
        match (message, remote.dialled()) {
            (Message::BulkWanted, None) => {
                // The other end may not have received the earlier cookie yet.
                let bulk = self.bulk_of(link);
                if bulk.may_begin(now) || matches!(bulk.stage, Stage::None { .. }) && bulk.cookie.is_some() {
                    self.offer_bulk(link);
                }
            }
            (Message::Bulk { cookie }, Some(place)) => {
                let bulk = self.bulk_of(link);
                if matches!(bulk.stage, Stage::None { .. }) {
                    bulk.stage = Stage::Connecting;
                    if !dial_beside(link, remote, place, self.library.id, *cookie) {
                        self.bulk_of(link).end(now);
                    }
                }
            }
            (Message::BulkGone, _) => {
                let bulk = self.bulk_of(link);
                match bulk.stage {
                    // The other end has lost the queue pair before it is up at this end.
                    Stage::Connecting => bulk.on_lost(now, false),
                    Stage::Up | Stage::Lost { .. } => {
                        bulk.on_lost(now, false);
                        remote.drop_bulk();
                        self.retire_bulk(link, remote);
                    }
                    // This end has no queue pair, and answers BULK-GONE all the same.
                    Stage::None { .. } => {
                        let _ = link.send(&Message::BulkGone, &[]);
                    }
                }
            }
            _ => return false,
        }
        true
    }

    pub(super) fn on_bulk_dialled(&mut self, serial: u64, dialled: Result<Pair, Errno>) {
        let link = link::all().into_iter().find(|link| link.serial() == serial);
        let Some((link, remote)) = link.and_then(|link| Some((link, link.remote()?))) else {
            return;
        };
        match dialled {
            Ok(pair) => self.attach_bulk(link, remote, pair),
            Err(error) => {
                tracing::debug!(target: "rdmasock::link", peer = %link.peer(), %error, "no bulk queue pair");
                self.bulk_of(link).end(crate::sys::time::now_ns());
            }
        }
    }

    /// Accepts a bulk queue pair beside the link that has offered it.
    fn accept_bulk(&mut self, link: &'static Link, remote: &Remote, incoming: Incoming) -> Result<Pair, Errno> {
        // The other end has given up its last request, and does not know of a queue pair that this end has accepted for
        // it.
        self.forget_arriving_beside(link);
        remote.drop_bulk();
        remote.end_retired();
        let answer = introduce(self.library.id, Introduction::NO_COOKIE, true);
        let accepted = remote.with_pair(|pair| incoming.accept(&answer, Some(pair)));
        let pair = accepted.unwrap_or(Err(Errno::NOTCONN))?;
        self.bulk_of(link).stage = Stage::Connecting;
        Ok(pair)
    }

    /// Handles the end of the set-up of an accepted bulk queue pair: `pair` if it is up, `None` if it did not come up.
    fn on_bulk_arrived(&mut self, link: &'static Link, pair: Option<Pair>) {
        match (pair, link.remote().filter(|_| link.is_alive())) {
            (Some(pair), Some(remote)) => self.attach_bulk(link, remote, pair),
            (None, Some(_)) => self.bulk_of(link).end(crate::sys::time::now_ns()),
            (_, None) => {}
        }
    }

    fn attach_bulk(&mut self, link: &'static Link, remote: &'static Remote, pair: Pair) {
        let bulk = self.bulk_of(link);
        let is_lost_there = matches!(bulk.stage, Stage::Lost { .. });
        if !is_lost_there {
            bulk.stage = Stage::Up;
        }
        tracing::debug!(target: "rdmasock::link", peer = %link.peer(), "bulk queue pair up");
        drop(remote.attach_bulk(pair));
        if is_lost_there {
            remote.drop_bulk();
        }
        self.retire_bulk(link, remote);
    }

    /// Ends the bulk queue pairs that were lost, and reports each to the peer.
    fn retire_bulk(&mut self, link: &'static Link, remote: &'static Remote) {
        for _ in 0..remote.end_retired() {
            self.library.stats.count(Event::BulkLost);
            tracing::debug!(target: "rdmasock::link", peer = %link.peer(), "bulk queue pair lost");
            let _ = link.send(&Message::BulkGone, &[]);
            self.bulk_of(link).on_lost(crate::sys::time::now_ns(), true);
        }
    }
}

/// Connects a bulk queue pair beside a link, in a new thread. Returns false if no thread can be made.
fn dial_beside(
    link: &'static Link,
    remote: &'static Remote,
    (local, address): (IpAddr, SocketAddr),
    me: rdmasock_core::ids::InstanceId,
    cookie: Cookie,
) -> bool {
    let greeting = introduce(me, cookie, true);
    let (peer, serial) = (link.peer(), link.serial());
    in_thread(move || {
        let dialled = remote.with_pair(|pair| dial(peer, local, address, &greeting, Some(pair)));
        let dialled = dialled.unwrap_or(Err(Errno::NOTCONN)).map(|dialled| dialled.pair);
        Library::get().service.submit(Command::BulkDialled(serial, dialled));
    })
}

impl Bulk {
    /// No queue pair was wanted yet.
    const NONE: Self = Self {
        stage: Stage::None { before: 0 },
        cookie: None,
        lost: 0,
    };

    /// Returns whether a queue pair may be made now: none exists or is being made, and the pause is over.
    fn may_begin(&self, now: u64) -> bool {
        matches!(self.stage, Stage::None { before } if now >= before)
    }

    /// Returns the cookie for the other end: the same as before if the other end may be about to use that one. Both
    /// ends may want a queue pair at the same moment, and their messages cross.
    fn to_offer(&self, now: u64, fresh: Cookie) -> Cookie {
        match self.stage {
            Stage::None { before } if now < before => self.cookie.unwrap_or(fresh),
            _ => fresh,
        }
    }

    /// Notes the cookie that the other end was given, and until when this end waits for a request with it, monotonic
    /// ns.
    fn on_offered(&mut self, cookie: Cookie, until: u64) {
        self.cookie = Some(cookie);
        self.stage = Stage::None { before: until };
    }

    /// Ends an attempt that has failed, or a queue pair that is over. The next may begin after a pause.
    fn end(&mut self, now: u64) {
        let after = AGAIN_AFTER << self.lost.min(DOUBLINGS);
        self.lost = self.lost.saturating_add(1);
        self.cookie = None;
        self.stage = Stage::None { before: now + after };
    }

    /// Notes that an end has reported the loss. Once both have, the next queue pair may begin after a pause.
    fn on_lost(&mut self, now: u64, is_here: bool) {
        let (here, there) = match self.stage {
            Stage::Lost { here, there } => (here || is_here, there || !is_here),
            _ => (is_here, !is_here),
        };
        if here && there {
            self.end(now);
        } else {
            self.stage = Stage::Lost { here, there };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_while_an_offer_is_on_its_way_is_offered_the_same() {
        let [first, second] = [1, 2].map(|n| Cookie::from_bytes([n; 16]));
        let mut bulk = Bulk::NONE;
        let given = bulk.to_offer(0, first);
        bulk.on_offered(given, 100);
        assert!(bulk.to_offer(50, second).matches(&first));
        // No request has come with the first cookie.
        assert!(bulk.to_offer(100, second).matches(&second));
        bulk.end(60);
        assert!(bulk.to_offer(70, second).matches(&second));
    }
}
