//! Direct transfers, between hosts: a device moves the bytes of a large send or receive between the two programs'
//! memory (docs/protocol.md, P90–P99). Other bytes go *by the mirror*: they are copied into this end's picture of the
//! peer's ring, and sent from there. `config/ways.rs` decides which transfers are direct.
//!
//! - Put: this end's device writes the bytes of a blocking send into the buffer of the peer's blocked receive. The send
//!   waits for such a reader only for a moment, because kernel TCP would not wait at all.
//! - Get: the peer's device reads the bytes of a blocking send out of this program's memory, into the reader's ring.
//!   This is for a peer whose program does not wait with a buffer. The send waits a moment for room in the ring and
//!   then for the device, while kernel TCP would wait for neither. Each failure makes later tries rarer.
//!
//! Both *lend* the program's memory to a device. Lent bytes count as sent. By the time the call returns, the peer has
//! taken the lent bytes, or the rest of them was copied into the mirror, and no device can reach the program's memory
//! any more.
//!
//! A blocking receive gives its buffer to a device in the same way ([`Landing`]), by a message that names the buffer
//! (an *advert*). Direct transfers have a queue pair of their own beside the link's, the *bulk* queue pair. If it is
//! given up, its devices cannot reach the memory any more.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::remote::qp::Role;
use rdmasock_core::fabric::remote::{Buffer, Landed};
use rdmasock_core::fabric::ring::{Producer, Wake};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Event;

use crate::config::{Way, ZeroCopy, arenas, config};
use crate::data::backpressure::give_back;
use crate::data::tx::commit;
use crate::notify::call::{Call, Place};
use crate::notify::wait::Wanted;
use crate::notify::{ready, wait};
use crate::objects::library::Library;
use crate::objects::link::Remote;
use crate::objects::pinned::Pinned;
use crate::objects::socket::{Mode, Rx, Socket};
use crate::signals::handler;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::time::{Timeout, now_ns};

/// The smallest send that may go directly, bytes. A smaller `RDMASOCK_ZCOPY_MIN` does not lower it.
pub(super) const LEAST: usize = 4096;

/// How long a send waits for a reader with a buffer, ns. `READER_BACK_WITHIN` applies if the last such wait has
/// succeeded: the reader has just read a direct transfer, and may have to be woken.
const READER_WITHIN: u64 = 200_000;
const READER_BACK_WITHIN: u64 = 1_000_000;
/// A send that waits for a reader also waits while the reader reads earlier bytes. `READS_WITHIN` bounds the time
/// without progress, and `ALL_READ_WITHIN` the whole wait, ns.
const READS_WITHIN: u64 = 500_000;
const ALL_READ_WITHIN: u64 = 10_000_000;
/// How long the peer's program may take to accept the bytes that were written into its buffer, ns. After that the rest
/// goes by the mirror.
const WRITTEN_WITHIN: u64 = 100_000_000;
/// A send that wants to lend memory waits for room in the reader's ring. `ROOM_WITHIN` bounds the time without
/// progress, and `ALL_ROOM_WITHIN` the whole wait, ns. If the library at the reader's end is asked how far the reader
/// has read, `ANSWER_WITHIN` bounds the time until its answer, ns. The library answers without its program.
const ROOM_WITHIN: u64 = 500_000;
const ALL_ROOM_WITHIN: u64 = 5_000_000;
const ANSWER_WITHIN: u64 = 50_000_000;
/// How long a send sleeps while the peer's device reads the lent bytes, ns: `READ_WITHIN` until the device begins, and
/// `READ_BYTE_WITHIN` for each byte. After that the send polls for a while, and then gives up the bulk queue pair
/// (`Remote::await_word`).
const READ_WITHIN: u64 = 50_000_000;
const READ_BYTE_WITHIN: u64 = 50;

/// The result of an attempt to send directly, past the mirror.
pub(super) enum Went {
    /// This many bytes went directly.
    Directly(usize),
    /// No byte went directly. All bytes go by the mirror, except the last `first` bytes of the send: these begin with a
    /// large piece, which the next attempt may send directly. `first` is 0 if there is no such piece.
    Not { first: usize },
}

pub(super) const NOTHING: Went = Went::Not { first: 0 };

/// Sends from the next piece (buffer) of `iov` directly, if a reader waits with a buffer or does so within a moment. If
/// none does, offers the piece to the reader's device. The call began with `total` bytes.
pub(super) fn send(call: &mut Call, iov: &mut Iov, flags: c_int, total: usize) -> Went {
    let socket = call.socket;
    let Some((link, remote)) = socket.link().and_then(|link| Some((link, link.remote()?))) else {
        return NOTHING;
    };
    let (memory, len) = iov.head();
    let way = config().way;
    if total < remote.direct_min()
        || total < remote.threshold(arenas::is_kept(memory.addr()))
        || flags & libc::MSG_MORE != 0
        || !remote.goes_direct(link.slot())
        || way == Some(Way::Eager)
        || wait::may_wait(socket, flags).is_err()
        || iov.is_implausible()
    {
        return NOTHING;
    }
    if len < remote.direct_min() {
        let first = iov.left_at_large(remote.direct_min());
        return Went::Not { first };
    }
    // Registering memory allocates, which a signal handler must not do.
    if handler::is_in_one() || !call.is_held() && call.hold_now() != Place::Here {
        return NOTHING;
    }
    let errno = errno::get();
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let mut sent = 0;
    if way != Some(Way::Get) {
        let adverts = remote.end().adverts(theirs);
        let tx = socket.tx.lock();
        if tx.is_some_and(|mut tx| tx.own.direct.may_try(adverts, now_ns())) {
            sent = await_reader(call, remote, theirs, len).map_or(0, |wanted| {
                lend(call, (remote, theirs), (memory, wanted, len), Role::Source).0
            });
            if let Some(mut tx) = socket.tx.lock() {
                tx.own.direct.to_readers.on_tried(sent > 0, now_ns());
            }
        }
    }
    if sent == 0 && way != Some(Way::Put) {
        sent = offer(call, remote, theirs, memory, len);
    }
    // The call has not failed: restores the errno from before the attempts.
    errno::set(errno);
    iov.advance(sent);
    if sent > 0 { Went::Directly(sent) } else { NOTHING }
}

/// Waits for a reader with a buffer, and longer while the reader still reads earlier bytes. Returns how many of `len`
/// bytes the buffer takes; `None` if no buffer came in time.
fn await_reader(call: &Call, remote: &'static Remote, theirs: Vqpn, len: usize) -> Option<usize> {
    let (socket, end) = (call.socket, remote.end());
    let (sent, reader_within) = {
        let tx = socket.tx.lock()?;
        let within = if tx.own.direct.goes_well() {
            READER_BACK_WITHIN
        } else {
            READER_WITHIN
        };
        (tx.producer.as_ref()?.position(), within)
    };
    let begun = now_ns();
    let (mut moved, mut unread) = (begun, u64::MAX);
    loop {
        let wanted = (end.wanted(theirs) as usize).min(len);
        if wanted >= remote.direct_min() {
            return Some(wanted);
        }
        let now = now_ns();
        let before = std::mem::replace(&mut unread, end.untaken(theirs, sent));
        if unread < before {
            moved = now;
            if unread == 0 {
                // The earlier bytes may have gone by a send buffer of this end, which can be given back now.
                give_back(socket);
            }
        }
        let within = if unread == 0 { reader_within } else { READS_WITHIN };
        let left = (moved + within).min(begun + ALL_READ_WITHIN).saturating_sub(now);
        if left == 0 || is_over(socket) {
            return None;
        }
        // The wait ends when the time is up or when the reader notifies this end.
        let mut patience = wait::Patience::at_most(Timeout::Ns(left));
        if wait::wait_for::<Reader>(socket, &mut patience) == Err(libc::EINTR) {
            return None;
        }
    }
}

/// Offers `len` bytes at `memory` to the reader's device, if the reader's ring has enough room. Returns the bytes that
/// count as sent; 0 if the bytes have to go by the mirror.
fn offer(call: &mut Call, remote: &'static Remote, theirs: Vqpn, memory: *mut u8, len: usize) -> usize {
    let socket = call.socket;
    let tx = socket.tx.lock();
    if !tx.is_some_and(|mut tx| tx.own.direct.to_devices.may_try(false, now_ns())) {
        return 0;
    }
    let (sent, taken) = if has_room(socket, remote, theirs) {
        lend(call, (remote, theirs), (memory, len, len), Role::Offered)
    } else {
        (0, 0)
    };
    if let Some(mut tx) = socket.tx.lock() {
        let is_most = sent > 0 && taken >= sent / 2;
        tx.own.direct.to_devices.on_tried(is_most, now_ns());
    }
    sent
}

/// Waits a moment for room in the peer's ring. Returns false if there is none in time, if the next bytes have to go
/// another way, or if a signal handler has ended the wait.
fn has_room(socket: &'static Socket, remote: &'static Remote, theirs: Vqpn) -> bool {
    let begun = now_ns();
    let (mut moved, mut unread) = (begun, u64::MAX);
    // Until when the send waits for the answer of the library at the reader's end.
    let mut answer_until = None::<u64>;
    loop {
        let position = socket.tx.lock().and_then(|tx| Some(tx.producer.as_ref()?.position()));
        let sent = position.unwrap_or(0);
        let (before, now) = (unread, now_ns());
        unread = remote.end().untaken(theirs, sent);
        if unread < before {
            moved = now;
        }
        if is_over(socket) {
            return false;
        }
        if unread == 0 && !give_back(socket) {
            // The earlier bytes have gone by a send buffer of this end, so the next bytes have to go there too.
            return false;
        }
        if free(socket) >= remote.direct_min() {
            return true;
        }
        if remote.end().confirmed(theirs).is_none_or(|until| until >= sent) {
            // The peer has confirmed all bytes, so the answer has come if one was asked for. The reader may be about to
            // read, so the send waits for it a little longer.
            answer_until = answer_until.map(|until| until.min(now + ROOM_WITHIN));
        }
        let until = (moved + ROOM_WITHIN).min(begun + ALL_ROOM_WITHIN);
        let left = until.max(answer_until.unwrap_or(0)).saturating_sub(now);
        if left == 0 && answer_until.is_none() && aside(socket).is_some() {
            // Asks the library at the reader's end to confirm, which also reports how far the reader has read. Without
            // being asked, it reports only every quarter of the ring (P55). The producer cannot leave the send buffer
            // before all bytes in it are known to be read.
            remote.end().unconfirmed(theirs);
            // The peer answers behind the bytes that this end has not sent yet. If there are any, they wait for the
            // reader to make room, and so does the answer.
            let depends_on_reader = remote.end().unsent(theirs) > 0;
            let within = if depends_on_reader { ROOM_WITHIN } else { ANSWER_WITHIN };
            answer_until = Some(now + within);
            continue;
        }
        if left == 0 {
            return false;
        }
        // The answer wakes this thread only if the reader has read more, so each sleep is short.
        let mut patience = wait::Patience::at_most(Timeout::Ns(left.min(ROOM_WITHIN)));
        if wait::wait_for::<RoomToLend>(socket, &mut patience) == Err(libc::EINTR) {
            return false;
        }
    }
}

/// Returns how many bytes the peer's ring has room for; 0 if the next bytes do not go into that ring.
fn free(socket: &Socket) -> usize {
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return 0;
    }
    let mut tx = socket.tx.lock();
    let producer = tx.as_mut().and_then(|tx| tx.producer.as_mut());
    let producer = producer.filter(|producer| !producer.is_aside());
    producer.map_or(0, |producer| producer.free().unwrap_or(0) as usize)
}

/// Returns the producer's position if it writes into a send buffer of this end, because the peer's ring had no room.
/// `None` if it does not.
fn aside(socket: &Socket) -> Option<u64> {
    let tx = socket.tx.lock()?;
    let producer = tx.producer.as_ref().filter(|producer| producer.is_aside());
    producer.map(Producer::position)
}

/// Lends as many as possible of the next `wanted` bytes, which lie at `memory` in a piece of `len` bytes. Then waits
/// for a bounded time until the peer has them. This end's device writes them ([`Role::Source`]), or the peer's device
/// reads them ([`Role::Offered`]). Returns how many bytes count as sent, and how many of those a device is known to
/// have moved past the mirror.
fn lend(
    call: &mut Call,
    (remote, theirs): (&'static Remote, Vqpn),
    (memory, wanted, len): (*mut u8, usize, usize),
    role: Role,
) -> (usize, usize) {
    let (socket, end) = (call.socket, remote.end());
    let least = remote.direct_min();
    let is_written = role == Role::Source;
    // SAFETY: the memory is the program's buffer, which the device only reads. `pinned`, or the `Lent` that `pinned` is
    // moved into, is dropped before the call returns.
    let Some(pinned) = (unsafe { Pinned::new(remote, memory, wanted, least, role) }) else {
        return (0, 0);
    };
    let lent = socket.tx.lock().and_then(|mut tx| {
        let state = &mut *tx;
        let producer = state.producer.as_mut()?;
        // Since the peer's number was read, the stream may have left the link, and come back to it as another stream.
        let is_same = socket.tx_mode.load(Acquire) == Mode::Link && socket.peer_vqpn.load(Relaxed) == theirs.0;
        let is_open = is_same && !state.end.is_shut() && !socket.wakes.is_dead();
        if !is_open || call.place(&state.own.seen) != Place::Here || ready::is_reader_gone(producer) {
            return None;
        }
        // At most half a ring is offered, so that the peer's program can read one half while its device fetches the
        // next.
        let half = producer.ring_size() as usize / 2;
        let most = if is_written { wanted } else { wanted.min(half) };
        // `spans` is asked for the whole piece: if the ring is too small for that, it grows later. No more is lent than
        // the ring has room for, though nothing is copied into it.
        let room = producer.spans(len).map_or(0, |spans| spans.len()).min(most);
        let (from, bytes) = (producer.position(), pinned.len.min(room));
        let (address, key) = (memory.expose_provenance(), pinned.key);
        let is_lent = bytes >= least
            && match is_written {
                true => end.lend_source(theirs, from, address, bytes as u64, key.local),
                false => end.offer_source(theirs, from, address, bytes as u64, key.remote),
            };
        if !is_lent {
            return None;
        }
        call.hold(&mut state.own.waiting);
        let wake = commit(socket, state, bytes, false);
        if is_written {
            Library::get().stats.count_many(Event::DirectSent, bytes as u64);
            state.own.direct.bytes += bytes as u64;
        }
        Some((wake, bytes, from))
    });
    let Some((wake, bytes, from)) = lent else {
        return (0, 0);
    };
    let until = from + bytes as u64;
    let mut lent = Lent {
        remote,
        theirs,
        until,
        role,
        is_ended: false,
        memory: pinned,
    };
    ready::notify_peer(socket, wake);
    let within = match is_written {
        true => WRITTEN_WITHIN,
        false => READ_WITHIN + bytes as u64 * READ_BYTE_WITHIN,
    };
    let mut patience = wait::Patience::at_most(Timeout::Ns(within));
    while !Taken::is_worth_a_look(socket) && wait::wait_for::<Taken>(socket, &mut patience).is_ok() {}
    lent.await_end();
    let taken = match is_written {
        true => bytes,
        false => end.taken(theirs).clamp(from, until).abs_diff(from) as usize,
    };
    drop(lent);
    if !is_written && let Some(mut tx) = socket.tx.lock() {
        tx.own.direct.bytes += taken as u64;
    }
    (bytes, taken)
}

/// Memory that is lent to a device, until the call takes it back.
struct Lent {
    remote: &'static Remote,
    theirs: Vqpn,
    /// The stream's position behind the last lent byte.
    until: u64,
    role: Role,
    /// `await_end` was called.
    is_ended: bool,
    /// Dropped after `Lent::drop` has run, so that the registration ends last.
    memory: Pinned,
}

impl Lent {
    /// Waits until the peer's device does not read the memory any more: the peer's end has confirmed that, or the
    /// device can no longer reach the memory.
    fn await_end(&mut self) {
        let (end, theirs) = (self.remote.end(), self.theirs);
        let was_ended = std::mem::replace(&mut self.is_ended, true);
        if self.role == Role::Offered && !was_ended && !end.is_source_done(theirs) {
            end.cancel_source(theirs);
            self.remote.await_word(|| end.is_source_done(theirs));
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.memory.is_of_a_parent() {
            return;
        }
        let (end, theirs) = (self.remote.end(), self.theirs);
        self.await_end();
        // SAFETY: the lent memory is the program's buffer, which stays readable until the call returns. The call drops
        // this value first.
        let left = unsafe { end.take_source(theirs) };
        if self.role == Role::Source && left.is_some_and(|left| left > 0) {
            self.remote.await_word(|| end.untaken(theirs, self.until) == 0);
        }
    }
}

/// Returns whether `is_met` holds for the link and the peer's stream, or can never hold: the connection or the link is
/// down, or the direction has left the link.
fn is_over_or(socket: &Socket, is_met: impl FnOnce(&Remote, Vqpn) -> bool) -> bool {
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let remote = socket.link().and_then(|link| link.remote());
    socket.wakes.is_dead()
        || socket.tx_mode.load(Acquire) != Mode::Link
        || remote.is_none_or(|remote| remote.is_down() || is_met(remote, theirs))
}

/// Returns whether the peer can get no more bytes over this link.
fn is_over(socket: &Socket) -> bool {
    is_over_or(socket, |_, _| false)
}

/// The condition of a large send that waits for a reader with a buffer.
struct Reader;

impl Wanted for Reader {
    fn is_worth_a_look(socket: &'static Socket) -> bool {
        is_over_or(socket, |remote, theirs| {
            remote.end().wanted(theirs) >= remote.direct_min() as u64
        })
    }
}

/// The condition of a send that waits for room in the peer's ring, to lend memory.
struct RoomToLend;

impl Wanted for RoomToLend {
    fn is_worth_a_look(socket: &'static Socket) -> bool {
        is_over_or(socket, |remote, theirs| {
            free(socket) >= remote.direct_min() || aside(socket).is_some_and(|at| remote.end().untaken(theirs, at) == 0)
        })
    }
}

/// The condition of a send that waits until its lent memory is no longer needed.
struct Taken;

impl Wanted for Taken {
    fn is_worth_a_look(socket: &'static Socket) -> bool {
        is_over_or(socket, |remote, theirs| remote.end().is_source_done(theirs))
    }
}

/// The wait of a receive into whose buffer a device may write. The peer's device does so after this end has sent an
/// advert (docs/protocol.md, P90–P95). This end's device does so by a READ of memory that the peer's program lends
/// (P97). Bytes in the buffer count as the ring's next bytes, though the ring does not have them.
///
/// The buffer is registered with the device for one wait. Before the call returns, in any way, the peer has confirmed
/// that it writes no more, and all READs have completed. If the peer does not answer, the bulk queue pair is given up
/// instead. Then the registration ends too.
pub(crate) struct Landing {
    /// The socket whose call waits.
    pub(super) socket: &'static Socket,
    remote: &'static Remote,
    mine: Vqpn,
    serial: u32,
    memory: *mut u8,
    /// Dropped after `Landing::drop` has run, so that the registration ends last.
    pinned: Pinned,
    /// The call has taken the bytes from the buffer.
    is_taken: bool,
}

impl Landing {
    /// Advertises the next piece of `iov` to the peer, for a call that is about to wait, holds the connection, and has
    /// found the ring empty. Returns `None` if an advert does not pay or is not possible. Preserves errno.
    pub(crate) fn new(socket: &'static Socket, iov: &mut Iov) -> Option<Self> {
        let errno = errno::get();
        let landing = Self::advertise(socket, iov);
        errno::set(errno);
        landing
    }

    fn advertise(socket: &'static Socket, iov: &mut Iov) -> Option<Self> {
        let link = socket.link()?;
        let remote = link.remote()?;
        let (memory, len) = iov.head();
        let least = remote.threshold(false);
        if len < least || !remote.goes_direct(link.slot()) {
            return None;
        }
        let is_fixed = config().zcopy != ZeroCopy::Auto;
        let may_try = socket.rx.lock()?.own.direct.may_try(least, is_fixed, now_ns());
        // Registering memory allocates, which a signal handler must not do.
        if !may_try || handler::is_in_one() {
            return None;
        }
        let is_on_link = || socket.rx_mode.load(Acquire) == Mode::Link;
        // The advert is for the bytes behind all that was read, so the peer has to know first how far this end has
        // read.
        let (theirs, wake) = {
            let mut rx = socket.rx.lock().filter(|_| is_on_link())?;
            (socket.peer_vqpn.load(Relaxed), rx.consumer.as_mut()?.publish())
        };
        ready::notify_peer(socket, wake);
        let end = remote.end();
        let (mine, room) = end.room_to_land(Vqpn(theirs))?;
        let len = len.min(room as usize);
        if len < least {
            return None;
        }
        // SAFETY: the memory is the program's buffer, which no other code uses before the call returns. This value is
        // dropped before that.
        let pinned = unsafe { Pinned::new(remote, memory, len, least, Role::Target) }?;
        let address = memory.expose_provenance() as u64;
        let serial = socket.rx.lock().and_then(|mut rx| {
            // Since `mine` was looked up, the stream may have left the link, and come back to it as another stream.
            let is_same = is_on_link() && link.slot_of(mine) == Some(socket.slot);
            let is_free = is_same && !rx.own.direct.is_waiting && rx.consumer.as_ref().is_some_and(|c| !c.is_frozen());
            let buffer = Buffer {
                address,
                length: pinned.len as u32,
                key: pinned.key,
            };
            let advert = is_free.then(|| end.advertise(mine, buffer))?;
            rx.own.direct.is_waiting = advert.is_some();
            Some(advert?.serial)
        })?;
        Some(Self {
            socket,
            remote,
            mine,
            serial,
            memory,
            pinned,
            is_taken: false,
        })
    }

    /// If the transfer is over, returns the bytes in the buffer, and the event that counts them. `None` if the transfer
    /// goes on.
    fn look(&self) -> Option<(usize, Event)> {
        // The link's state is read first: bytes that have not come when the link is down never come.
        let is_down = self.remote.is_down();
        match self.remote.end().landed(self.mine, self.serial) {
            Some(Landed::Over(bytes)) => Some((bytes as usize, Event::DirectReceived)),
            Some(Landed::Read(bytes)) => Some((bytes as usize, Event::RendezvousLanded)),
            Some(Landed::Waits) if is_down => Some((0, Event::DirectReceived)),
            Some(Landed::Waits) | None => None,
        }
    }

    /// Returns whether the transfer is over.
    pub(crate) fn is_over(&self) -> bool {
        self.look().is_some()
    }

    /// Takes the bytes in the buffer. Returns how many, and the wake-up that [`tell`](Self::tell) has to send. The
    /// caller holds the direction's lock, and drops this value only after it has released the lock.
    pub(crate) fn take(&mut self, rx: &mut Rx) -> (usize, Wake) {
        let (landed, event) = self.look().unwrap_or((0, Event::DirectReceived));
        rx.own.direct.on_landed(landed, now_ns());
        self.is_taken = true;
        // No more bytes are taken than the ring counts. After RESUME the others come by TCP.
        let Some(consumer) = rx.consumer.as_mut().filter(|_| landed > 0) else {
            return (0, Wake::NONE);
        };
        let taken = consumer.spans(landed).map_or(0, |spans| spans.len()).min(landed);
        self.socket.told.count(|stats| stats.rx.add_link(taken as u64));
        Library::get().stats.count_many(event, taken as u64);
        rx.own.direct.bytes += taken as u64;
        let wake = consumer.consume(taken);
        let other = consumer.publish();
        (taken, if wake.is_none() { other } else { wake })
    }

    /// Notifies the peer that the bytes were taken.
    pub(crate) fn tell(&self, wake: Wake) {
        ready::notify_peer(self.socket, wake);
        self.remote.end().settle_head(self.mine);
    }

    /// Ends a wait whose transfer may still go on, because the call returns or continues in another way. Withdraws the
    /// advert and waits until the peer confirms. Returns how many bytes are in the buffer. Preserves errno, which may
    /// be the one that the call fails with.
    #[cold]
    pub(crate) fn leave(mut self) -> usize {
        if self.pinned.is_of_a_parent() {
            return 0;
        }
        let errno = errno::get();
        self.end_wait();
        let socket = self.socket;
        let landed = socket.rx.lock().map(|mut rx| self.take(&mut rx));
        if let Some((_, wake)) = landed {
            self.tell(wake);
        }
        // The drop ends the registration.
        drop(self);
        errno::set(errno);
        landed.map_or(0, |(taken, _)| taken)
    }

    fn end_wait(&self) {
        if !self.is_over() {
            self.remote.end().withdraw(self.mine, self.serial);
            self.remote.await_word(|| self.is_over());
        }
    }

    /// Copies the bytes from the buffer into the ring, where the next call finds them. This call cannot return them,
    /// because its thread is being cancelled and unwinds.
    #[cold]
    fn put_back(&mut self) {
        self.end_wait();
        let landed = self.look().map_or(0, |(landed, _)| landed);
        if let Some(mut rx) = self.socket.rx.lock() {
            rx.own.direct.on_landed(landed, now_ns());
            if let Some(Ok(spans)) = rx.consumer.as_mut().map(|consumer| consumer.spans(landed)) {
                // SAFETY: a device has written at least `landed` bytes to the buffer. The ring's spans at these
                // positions hold no bytes, and the producer does not write there before the bytes are consumed.
                unsafe { spans.copy_in(0, self.memory, landed.min(spans.len())) };
            }
        }
        self.remote.end().put_back(self.mine);
        ready::notify_local(self.socket);
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if !self.pinned.is_of_a_parent() && !self.is_taken {
            self.put_back();
        }
    }
}
