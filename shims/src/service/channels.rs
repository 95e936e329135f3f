//! The channels to peers: the messages that come over them, their handlers, and the end of a channel.
//!
//! Any process on the host can connect to this instance's names. A *guest* is a channel from such a process that has
//! not become the side channel of a link. The guests are limited in number and time. A correct peer asks at once, waits
//! some seconds at most for the answer, and closes the channel. So evicting the oldest guest hits a peer that is done,
//! or that never sent a request.

use std::os::fd::{AsFd, BorrowedFd};

use rdmasock_core::os::channel::{Channel, RecvError};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::os::{apart, privatefd};
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::wire::{MAX_MESSAGE, Message};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::objects::link::Link;
use crate::objects::listener::Listener;
use crate::objects::mailbox::{kind, tag};
use crate::service::{Conn, Peer, Worker, keys};

/// The most waiting connections to a name that are accepted before other events have their turn.
const GUESTS_AT_ONCE: usize = 16;
/// How long names are not polled after this process had no descriptor left for a guest, ns.
const DEAF_FOR: u64 = 100_000_000;
/// Pause after a failure to receive or close descriptors in a separate thread (`os::apart`), ns.
const APART_AGAIN: u64 = 50_000_000;
/// The uid that the kernel shows for each user of another user namespace.
const OVERFLOW_UID: u32 = 65_534;
/// Time until a guest must send its first message, ns.
pub(super) const SILENT_FOR: u64 = 3_000_000_000;
/// Time that a guest may stay after its last message, ns. Longer than any asker waits for an answer.
const IDLE_FOR: u64 = 10_000_000_000;
/// The most guests, if the process may have enough descriptors.
const MOST: usize = 256;
/// A user's share of the guests, as a divisor: a quarter.
const SHARE: usize = 4;
/// The guests' share of the process's descriptors, as a divisor: an eighth.
const DESCRIPTORS: u64 = 8;
/// The least bound, for all guests and for one user's.
const LEAST: usize = 8;

impl Worker {
    /// Adds a channel to the epoll set and to `conns` for `life` ns, and returns its id. `None` if the kernel refuses.
    pub(super) fn register(&mut self, channel: Channel, peer: Peer, life: u64) -> Option<u64> {
        let id = self.new_conn();
        let flags = kernel::EventFlags::IN | kernel::EventFlags::RDHUP;
        if !self.add(channel.as_fd(), tag(kind::CHANNEL, id), flags) {
            return None;
        }
        let until = Some(crate::sys::time::now_ns() + life);
        self.conns.insert(id, Conn::new(Some(channel), peer, until));
        Some(id)
    }

    /// Accepts connections to the listener's name, or to this instance's own.
    pub(super) fn receive_guests(&mut self, listener: Option<&'static Listener>) {
        if privatefd::is_left_full() {
            return self.listen_to_names(false);
        }
        // A bounded number, so that channels that are open have their turn between the guests.
        for _ in 0..GUESTS_AT_ONCE {
            let accepted = match listener {
                Some(listener) => listener.accept_asker(),
                None => self.instance_name.as_ref().map_or(Ok(None), |name| name.accept()),
            };
            match accepted {
                Ok(Some(channel)) => self.receive_guest(channel, listener),
                Ok(None) => return,
                Err(_) => {
                    // No descriptor is left: the oldest guest is closed. If there is no guest, the names, which stay
                    // readable, are not polled for a moment.
                    match self.guests().into_iter().map(|guest| guest.id).min() {
                        Some(first) => self.hang_up(first, Reason::Resources),
                        None => return self.listen_to_names(false),
                    }
                }
            }
        }
    }

    fn receive_guest(&mut self, channel: Channel, listener: Option<&'static Listener>) {
        if !self.can_begin() {
            return;
        }
        // All users that the kernel cannot name count as one.
        let uid = channel.peer().map_or(u32::MAX, |c| c.uid);
        if let Some(leaves) = who_leaves(&self.guests(), self.most_guests, uid) {
            self.hang_up(leaves, Reason::LinkLimit);
        }
        let peer = Peer::Incoming {
            listener,
            uid,
            offered: None,
        };
        // As a rule the question has come already.
        if let Some(id) = self.register(channel, peer, SILENT_FOR) {
            self.on_channel(id);
        }
    }

    fn guests(&self) -> Vec<Guest> {
        let guest = |(id, conn): (&u64, &Conn)| match conn.peer {
            Peer::Incoming { uid, .. } => Some(Guest {
                id: *id,
                uid,
                until: conn.until?,
            }),
            _ => None,
        };
        self.conns.iter().filter_map(guest).collect()
    }

    /// Ends the channels and attempts whose time is over.
    pub(super) fn expire_conns(&mut self, now: u64) {
        for id in keys(&self.conns, |conn| conn.until.is_some_and(|at| at <= now)) {
            match self.conns.get(&id).map(|conn| &conn.peer) {
                Some(Peer::Asked { .. }) => self.done_asking(id),
                _ => self.hang_up(id, Reason::LinkFailed),
            }
        }
    }

    pub(super) fn listen_to_names(&mut self, on: bool) {
        self.alarms.listen = (!on).then(|| crate::sys::time::now_ns() + DEAF_FOR);
        let instance = self.instance_name.as_ref().map(|name| name.as_fd());
        let instance = instance.map(|fd| (fd, tag(kind::INSTANCE, 0), kernel::EventFlags::IN));
        let exclusive = kernel::EventFlags::IN | kernel::EventFlags::EXCLUSIVE;
        let services = self.listeners.iter().enumerate();
        let services =
            services.filter_map(|(id, listener)| Some((listener.name()?, tag(kind::NAME, id as u64), exclusive)));
        for (fd, data, flags) in instance.into_iter().chain(services) {
            // The kernel does not modify an EXCLUSIVE entry, so the entry is removed and added again.
            self.service.forget(fd);
            if on {
                self.add(fd, data, flags);
            }
        }
    }

    /// Sets whether the link's side channel is polled for room.
    pub(super) fn await_room(&self, link: &'static Link, wanted: bool) {
        let Some(id) = self.conn_of(link) else { return };
        let mut flags = kernel::EventFlags::IN | kernel::EventFlags::RDHUP;
        flags.set(kernel::EventFlags::OUT, wanted);
        let data = kernel::EventData::new_u64(tag(kind::CHANNEL, id));
        link.with_channel(|channel| {
            let _ = kernel::modify(&self.service.epoll, channel.as_fd(), data, flags);
        });
    }

    /// Reads the messages that have come over a channel.
    pub(super) fn on_channel(&mut self, id: u64) {
        if let Some(link) = self.link_of(id)
            && link.has_outbox()
            && link.flush()
        {
            self.await_room(link, false);
        }
        let mut buf = [0u8; MAX_MESSAGE];
        // A bounded number, so that one peer cannot keep the thread to itself.
        for _ in 0..64 {
            if self.conns.get(&id).is_none_or(|conn| conn.apart.is_some()) {
                return;
            }
            let Some(next) = self.with_channel(id, |channel| channel.next(&mut buf)) else {
                return;
            };
            match next {
                Ok(next) if next.has_fds => match Message::decode(next.bytes) {
                    Ok(message) if self.may_have_fds(id, &message) => {
                        if !self.receive_fds(id) {
                            return;
                        }
                    }
                    // P10: this message may not have descriptors.
                    _ => return self.violation(id),
                },
                Ok(next) => self.on_received(id, next.bytes, Some(Vec::new())),
                Err(RecvError::WouldBlock) => return,
                Err(error) => return self.on_failed(id, error),
            }
        }
    }

    /// Calls `f` with the channel `id`, which may be a link's side channel. `None`, without a call, if there is no
    /// channel, or if it is closed.
    pub(super) fn with_channel<R>(&self, id: u64, f: impl FnOnce(&Channel) -> R) -> Option<R> {
        let conn = self.conns.get(&id)?;
        match (&conn.channel, &conn.peer) {
            (Some(channel), _) => Some(f(channel)),
            (None, Peer::Link(link)) => link.with_channel(f),
            _ => None,
        }
    }

    /// Handles a message. `fds` is `None` if its descriptors were lost because this process has no fd left.
    fn on_received(&mut self, id: u64, bytes: &[u8], fds: Option<Vec<PrivateFd>>) {
        match Message::decode(bytes) {
            Ok(message) => {
                if let Some(conn) = self.conns.get_mut(&id)
                    && matches!(conn.peer, Peer::Incoming { .. })
                {
                    conn.until = Some(crate::sys::time::now_ns() + IDLE_FOR);
                }
                match fds {
                    Some(fds) => self.on_message(id, message, fds),
                    None => self.on_lost_fds(id, &message),
                }
            }
            Err(error) => {
                tracing::warn!(target: "rdmasock", %error, "bad message");
                self.hang_up(id, Reason::Violation);
            }
        }
    }

    fn on_failed(&mut self, id: u64, error: RecvError) {
        if error == RecvError::Closed {
            return self.hang_up(id, Reason::PeerGone);
        }
        tracing::debug!(target: "rdmasock", %error, "channel failed");
        self.hang_up(id, Reason::LinkFailed);
    }

    /// Returns whether the message may carry descriptors, and its sender has proved that it knows the TCP connection.
    fn may_have_fds(&self, id: u64, message: &Message) -> bool {
        use Message as M;
        match (self.conns.get(&id).map(|c| &c.peer), message) {
            (Some(Peer::Incoming { .. }), M::Link { cookie, instance_c, .. }) => {
                self.library.offers.has(cookie, instance_c)
            }
            (Some(Peer::Linking(_)), M::LinkAccept { .. })
            | (Some(Peer::Link(_)), M::Waiter { .. } | M::TakeBack { .. }) => true,
            _ => false,
        }
    }

    /// Receives a message with its descriptors. Descriptors from another user's process are received in a separate
    /// thread (`os::apart`). A close of them in this thread could drop fcntl(2) locks of the program, or last as long
    /// as the sender has arranged. Returns false if the message comes from that thread later, or cannot be received
    /// now.
    fn receive_fds(&mut self, id: u64) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let peer = self.with_channel(id, Channel::peer).and_then(Result::ok);
        // A process of root or of the same user is trusted, since it may trace and end this process anyway.
        if peer.is_some_and(|peer| peer.pid.is_some() && [0, own].contains(&peer.uid) && peer.uid != OVERFLOW_UID) {
            let mut buf = [0; MAX_MESSAGE];
            match self.with_channel(id, |channel| channel.recv(&mut buf)) {
                Some(Ok(received)) => {
                    let fds = (!received.fds_lost).then_some(received.fds);
                    self.on_received(id, received.bytes, fds);
                }
                Some(Err(error)) => self.on_failed(id, error),
                None => {}
            }
            return true;
        }
        self.with_channel(id, |channel| self.service.forget(channel.as_fd()));
        match self.with_channel(id, |channel| apart::receive(channel.as_fd())) {
            Some(Ok(apart)) => {
                if self.add(apart.as_fd(), tag(kind::APART, id), kernel::EventFlags::IN)
                    && let Some(conn) = self.conns.get_mut(&id)
                {
                    conn.apart = Some(apart);
                    return false;
                }
                self.hang_up(id, Reason::Resources);
            }
            Some(Err(error)) => self.on_none_apart(id, error),
            None => {}
        }
        false
    }

    /// Handles a failure to make a thread that receives the descriptors of a message.
    fn on_none_apart(&mut self, id: u64, error: Errno) {
        tracing::debug!(target: "rdmasock", %error, "descriptors of another user's process cannot be received now");
        match self.link_of(id) {
            Some(link) => {
                // The streams leave the link by marks in their rings and in TCP; messages of the channel wait.
                self.unread.push(id);
                let again = crate::sys::time::now_ns() + APART_AGAIN;
                self.alarms.apart.get_or_insert(again);
                self.prefer_tcp(link, Reason::Resources);
            }
            None => self.hang_up(id, Reason::Resources),
        }
    }

    /// Handles a message that a separate thread has received. If the thread's channel ends without a message, the
    /// message had descriptors that it may not have: a violation.
    pub(super) fn on_apart(&mut self, id: u64) {
        let Some(apart) = self.conns.get_mut(&id).and_then(|conn| conn.apart.take()) else {
            return;
        };
        let mut buf = [0; MAX_MESSAGE];
        match apart.recv(&mut buf) {
            Ok(received) => {
                let fds = (!received.fds_lost).then_some(received.fds);
                self.on_received(id, received.bytes, fds);
            }
            Err(_) => return self.violation(id),
        }
        self.listen_to(id);
        self.on_channel(id);
    }

    /// Polls a channel again after a separate thread has received its message.
    pub(super) fn listen_to(&mut self, id: u64) {
        let mut flags = kernel::EventFlags::IN | kernel::EventFlags::RDHUP;
        if let Some(link) = self.link_of(id) {
            flags.set(kernel::EventFlags::OUT, link.has_outbox());
        }
        self.with_channel(id, |channel| self.add(channel.as_fd(), tag(kind::CHANNEL, id), flags));
    }

    /// Makes a separate thread close the sockets whose close may block, because unread messages in them have
    /// descriptors. If that fails, this thread tries again after `APART_AGAIN`.
    pub(super) fn close_left(&mut self) {
        if privatefd::is_any_left() && self.alarms.apart.is_none() && !apart::close_left() {
            self.alarms.apart = Some(crate::sys::time::now_ns() + APART_AGAIN);
        }
    }

    /// Handles a message that came without its descriptors, because this process has no fd left.
    fn on_lost_fds(&mut self, id: u64, message: &Message) {
        use Message as M;
        match (message, self.conns.get(&id).map(|c| &c.peer)) {
            // P27: this instance wakes that waiter by RING.
            (M::Waiter { .. }, Some(Peer::Link(_))) => {}
            (M::TakeBack { yours, .. }, Some(Peer::Link(link))) => {
                if let Some(socket) = link.socket(*yours) {
                    crate::notify::reset::reset(socket);
                }
            }
            _ => self.hang_up(id, Reason::Resources),
        }
    }

    pub(super) fn on_message(&mut self, id: u64, message: Message, fds: Vec<PrivateFd>) {
        use Message as M;
        // P10: a message comes with exactly the number of fds that belongs to its kind.
        if fds.len() != message.fds() {
            return self.violation(id);
        }
        // P21: a link carries no question.
        if let Some(link) = self.link_of(id) {
            return self.on_link_message(link, message, fds);
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
            M::Redirect { request, instance } => self.on_redirect(id, request, instance),
            M::Cancel { nonce_s } => self.on_cancel(nonce_s),
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
            _ => self.violation(id),
        }
    }

    /// Sends an answer on a channel, or by the control port.
    pub(super) fn reply(&mut self, conn: u64, message: &Message) {
        if let Some(Peer::Remote(query)) = self.conns.get(&conn).map(|c| &c.peer) {
            return self.answer_remote(*query, message);
        }
        // A channel for one question has room for its answer.
        let is_sent = self.with_channel(conn, |channel| send(channel, message, &[]));
        if is_sent != Some(true)
            && let Message::Yes { nonce_s, .. } = message
        {
            // The asker's channel is closed, so no message of the asker will end this attempt.
            self.on_cancel(*nonce_s);
        }
    }

    /// Returns the channel of a link; `None` if it has none any more.
    pub(super) fn conn_of(&self, link: &'static Link) -> Option<u64> {
        self.conn_where(|peer| matches!(peer, Peer::Link(l) if *l == link))
    }

    /// Closes a channel whose other end breaks the protocol.
    pub(super) fn violation(&mut self, id: u64) {
        tracing::warn!(target: "rdmasock", "a peer breaks the protocol");
        self.library.stats.count(Event::LinkViolation);
        self.hang_up(id, Reason::Violation);
    }

    /// Closes a channel that has ended, or must not be used any more, and ends what depends on it.
    pub(super) fn hang_up(&mut self, id: u64, why: Reason) {
        let Some(conn) = self.conns.remove(&id) else {
            return;
        };
        if let Some(channel) = &conn.channel {
            self.service.forget(channel.as_fd());
        }
        match conn.peer {
            Peer::Incoming {
                offered: Some(nonce), ..
            } if why == Reason::PeerGone => self.handshakes.on_asker_gone(nonce, crate::sys::time::now_ns()),
            Peer::Incoming { .. } | Peer::Remote(_) | Peer::Closed(_) => {}
            Peer::Asked { request, .. } => self.on_silence(id, request),
            Peer::Linking(pending) => pending.end(None),
            Peer::Arriving(arriving) => self.give_up_arriving(arriving),
            Peer::Link(link) => self.link_down(link, why),
        }
    }
}

/// Sends a message over a channel that is not a link's. Returns false if that fails.
pub(super) fn send(channel: &Channel, message: &Message, fds: &[BorrowedFd<'_>]) -> bool {
    let mut buf = [0u8; MAX_MESSAGE];
    let bytes = message.encode(&mut buf);
    bytes.is_ok_and(|bytes| channel.send(bytes, fds).is_ok())
}

/// The facts about a guest that decide whether it is closed to make room for another.
struct Guest {
    id: u64,
    uid: u32,
    /// When the guest's time is over, monotonic ns.
    until: u64,
}

/// Returns the most guests of a process that may have `descriptors` descriptors.
pub(super) fn most_guests(descriptors: u64) -> usize {
    usize::try_from(descriptors / DESCRIPTORS).map_or(MOST, |most| most.clamp(LEAST, MOST))
}

/// Returns the guest that has to be closed to make room for another one of `uid`; `None` if there is room. If `uid` has
/// reached its share, a guest of `uid` is closed, else one of the user with the most guests: the one whose time ends
/// first.
fn who_leaves(guests: &[Guest], most: usize, uid: u32) -> Option<u64> {
    let of_user = |uid| guests.iter().filter(move |guest| guest.uid == uid);
    let loser = if of_user(uid).count() >= (most / SHARE).max(LEAST) {
        uid
    } else if guests.len() >= most {
        let users = guests.iter().map(|guest| guest.uid);
        users.max_by_key(|uid| of_user(*uid).count())?
    } else {
        return None;
    };
    of_user(loser)
        .min_by_key(|guest| (guest.until, guest.id))
        .map(|guest| guest.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::tests::{guest, say, worker};

    /// The guests of a process, in the order in which they came.
    struct Guests {
        all: Vec<Guest>,
        most: usize,
    }

    impl Guests {
        fn new(descriptors: u64) -> Self {
            let most = most_guests(descriptors);
            Self { all: Vec::new(), most }
        }

        /// Adds a guest that has until `until` to send a message. Returns the guest that leaves.
        fn admit(&mut self, id: u64, uid: u32, until: u64) -> Option<u64> {
            let leaves = who_leaves(&self.all, self.most, uid);
            self.all.retain(|guest| Some(guest.id) != leaves);
            self.all.push(Guest { id, uid, until });
            leaves
        }
    }

    #[test]
    fn a_user_with_too_many_loses_his_own_the_silent_first() {
        let mut guests = Guests::new(2048);
        assert_eq!(guests.most, 256);
        assert_eq!(guests.admit(1, 7, 0), None);
        assert_eq!(guests.admit(2, 5, 1), None);
        for id in 3..66 {
            assert_eq!(guests.admit(id, 5, 0), None);
        }
        assert_eq!(guests.admit(66, 5, 0), Some(3));
        assert_eq!(guests.admit(67, 7, 0), None);
    }

    #[test]
    fn of_many_users_those_with_few_keep_theirs() {
        let mut guests = Guests::new(u64::MAX);
        assert_eq!(guests.admit(0, 0, 0), None);
        let mut gone = Vec::new();
        for id in 1..2000 {
            gone.extend(guests.admit(id, 1 + id as u32 % 40, 0));
        }
        assert_eq!(guests.all.len(), 256);
        assert!(!gone.contains(&0));
    }

    #[test]
    fn few_descriptors_are_few_guests() {
        let mut guests = Guests::new(64);
        let gone: Vec<_> = (0..20).filter_map(|id| guests.admit(id, 0, 0)).collect();
        assert_eq!(gone, (0..12).collect::<Vec<u64>>());
    }

    #[test]
    fn who_says_nothing_has_less_time() {
        let mut worker = worker();
        let [(silent, _first), (other, second)] = [(); 2].map(|()| guest(&mut worker));
        let nonce_s = rdmasock_core::ids::Nonce::random().unwrap();
        say(&second, &Message::Cancel { nonce_s });
        worker.on_channel(other);
        let now = crate::sys::time::now_ns();
        worker.expire_conns(now + SILENT_FOR);
        assert!(!worker.conns.contains_key(&silent) && worker.conns.contains_key(&other));
        worker.expire_conns(now + IDLE_FOR);
        assert!(!worker.conns.contains_key(&other));
    }
}
