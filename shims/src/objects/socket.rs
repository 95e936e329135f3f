//! A TCP socket that the library knows: what its two directions run on, and which threads and epoll sets wait for it.
//! Also the parts of its state: the fds that stand for it, its promotion, its options and timeouts, what was reported
//! about it (to the program, and in `rdmasock stat`), and whether direct transfers pay.
//!
//! The *anchor* is the kernel's socket of the connection. The connection is *watched* while the library, and not the
//! kernel's epoll sets, reports its readiness. (The stage `Watching` has another meaning: below the threshold.) A
//! *direct transfer* moves the bytes of a large send or receive between the programs' memory on two hosts, past the
//! rings. A receive *advertises* its buffer when it offers the buffer to the peer for such a transfer.
//!
//! Objects are never freed, only reused for other connections (see `notify::table`). Lock order, outermost first: an
//! epoll set's lock, then `control`, `interest`, `rx`, `tx`. No thread blocks under any of these locks, or takes an
//! epoll set's lock while it holds a lock of a socket.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, fence};

use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::ids::{Tuple, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::thread;
use rdmasock_core::stats::{Direction, Reason, StatsPage, StreamInfo, StreamStats, Why};
use rdmasock_core::stream::connection::{self, ConnectionOf};
use rdmasock_core::stream::handshake::Role;
pub(crate) use rdmasock_core::stream::mode::{Mode, Move};
use rdmasock_core::stream::policy::Progress;
use rdmasock_core::sync::Published;
use smallvec::SmallVec;

use crate::config::spin::Spinner;
use crate::objects::holders::Holders;
use crate::objects::link::{Held, Link};
use crate::objects::listener::Listener;
use crate::objects::mailbox::Ref;
use crate::sys::identity::{Cookie, Seen};
use crate::sys::sockopt::{self, Keepalive};
use crate::sys::tcp_info::Ledger;
use crate::sys::time::now_ns;

/// Core's state of the sending direction. Its field `own` has this crate's part, [`TxOwn`].
pub(crate) type Tx = connection::TxOf<Socket>;
/// Core's state of the receiving direction. Its field `own` has this crate's part, [`RxOwn`].
pub(crate) type Rx = connection::RxOf<Socket>;
/// Core's state of both directions. Its field `own` has this crate's part, [`ControlOwn`].
pub(crate) type Control = connection::ControlOf<Socket>;

/// A notification of the peer that is due once the kernel has sent this end's FIN.
pub(crate) type Farewell = connection::Farewell<&'static Link>;

/// This crate's part of the sending direction's state: the field `own` of [`Tx`], under the same lock.
#[derive(Default)]
pub struct TxOwn {
    /// The [tick](crate::sys::time::tick) of the last bytes put on the link.
    pub last: u64,
    /// The bits of the wake-up word for space that name a waiter with a ready queue, in which the peer is to put the
    /// stream; 0 without such a waiter. It is the waiter of the only epoll set. If the peer cannot wake that waiter, or
    /// several waiters are to be notified, it is the service thread's. Other bits of the word name a sleeping thread.
    pub bits: u32,
    /// The value of TCP_CORK that the kernel's socket has. The program's value is in `Options::corked`.
    pub kernel_corked: bool,
    /// Whether a request to the service thread is open, to check if the reader stands still
    /// (`backpressure::report_blocked`). No second request is made meanwhile.
    pub blocked: bool,
    /// Number of calls that wait for room, or have waited for it and have not returned.
    pub waiting: u32,
    /// The last check that an fd stands for the kernel's socket (`sys::identity`).
    pub seen: Seen,
    /// Whether direct transfers from this end pay.
    pub direct: Sends,
}

/// This crate's part of the receiving direction's state: the field `own` of [`Rx`], under the same lock.
#[derive(Default)]
pub struct RxOwn {
    /// The reader's position, in bytes, when the ring was last checked for shrinking.
    pub seen_at: u64,
    /// The bits of the wake-up word for data that name a waiter with a ready queue, as `TxOwn::bits`.
    pub bits: u32,
    /// Whether the reader keeps up.
    pub pace: Pace,
    /// Number of calls that wait for data, or have waited for it and have not returned.
    pub waiting: u32,
    /// The last check that an fd stands for the kernel's socket (`sys::identity`).
    pub seen: Seen,
    /// The [tick](crate::sys::time::tick) of the last bytes taken from the link.
    pub last: u64,
    /// Whether direct transfers to this end pay, and whether a call waits for one.
    pub direct: Receives,
    /// The bytes in a ring that the program reads in place now.
    pub view: Option<View>,
}

/// Bytes in a ring that the program reads in place (`data::view`).
pub struct View {
    /// Keeps the ring mapped, and keeps other streams from getting it.
    pub _held: Held,
    /// The [stream](rdmasock_core::fabric::ring::Consumer::stream) of the ring.
    pub stream: usize,
    /// The position of the first byte that the program has not released. A receive may have read further.
    pub at: u64,
    /// The position behind the view's last byte.
    pub end: u64,
}

/// This crate's part of the state of both directions: the field `own` of [`Control`], under the same lock.
#[derive(Default)]
pub struct ControlOwn {
    /// The fds of this process that stand for the socket.
    pub fds: SmallVec<[c_int; 4]>,
}

/// The calls that a socket makes on an epoll set that it is in. `item` is the index of the socket's entry in the set.
pub trait EpollSet: Sync {
    /// Notes that the readiness of the item's socket may have changed.
    fn push(&'static self, item: usize, socket: &'static Socket);

    /// Moves an item from the kernel's set to the library's, which then reports the socket's readiness. False if that
    /// cannot be done now.
    fn take_over(&'static self, item: usize, socket: &'static Socket) -> bool;

    /// Moves an item back to the kernel's set, when its socket is on plain TCP again.
    fn hand_back(&'static self, item: usize, socket: &'static Socket);

    /// Removes the item: the socket's last fd was closed.
    fn forget(&self, item: usize, socket: &'static Socket);

    /// Returns the waiter that is woken when something is ready in the set; `None` if it has none.
    fn waiter(&self) -> Option<WaiterId>;

    /// Notes that for some item of the set the peer notifies the service thread, and not the set's waiter.
    fn be_served(&self);
}

/// An epoll set that an fd of this socket is in.
#[derive(Clone, Copy)]
pub struct Membership {
    /// The set.
    pub epoll: &'static dyn EpollSet,
    /// The fd by which the socket was added to the set.
    pub fd: c_int,
    /// The index of the socket's entry in the set.
    pub item: usize,
}

impl Membership {
    /// Returns whether the item is in this set.
    pub fn is_in<T>(&self, set: &T) -> bool {
        std::ptr::addr_eq(self.epoll, set)
    }
}

/// The epoll sets and threads to notify when the socket's readiness changes.
#[derive(Default)]
pub struct Interest {
    /// The epoll sets that the socket is in.
    pub members: SmallVec<[Membership; 2]>,
    /// Threads that sleep for the socket (blocking calls, poll, select).
    pub sleepers: SmallVec<[Sleeping; 2]>,
}

/// A thread that sleeps, or is about to.
#[derive(Clone, Copy)]
pub struct Sleeping {
    /// The waiter as which the thread sleeps.
    pub waiter: WaiterId,
    /// The thread waits for data to read.
    pub data: bool,
    /// The thread waits for room to write.
    pub space: bool,
}

/// The EPOLL* bits that the kernel reports for a connection on which nothing can be sent.
const DEAD: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// A bit in `Wakes::anchor` that EPOLL* does not use: the kernel may have an entry in the socket's error queue
/// (recvmsg(2)).
pub(crate) const ERROR_QUEUE: u32 = 1 << 24;

/// Which threads and epoll sets are notified of readiness, and how the last waits for readiness went.
#[derive(Default)]
pub struct Wakes {
    pub interest: Lock<Interest>,
    /// Whether the service thread watches the anchor, and the kernel's epoll sets have handed the socket to the
    /// library.
    pub watched: Published<AtomicBool>,
    /// The anchor's EPOLL* bits for an end or error, while it is watched; and [`ERROR_QUEUE`].
    pub anchor: AtomicU32,
    /// Whether the next receive waits a moment before it checks for data ([`Pace`]).
    pub rx_rests: AtomicBool,
    /// How the last spins (busy waits) for data and for space ended. The length of the next spin follows from that.
    pub rx_spin: Spinner,
    pub tx_spin: Spinner,
}

impl Wakes {
    /// Returns whether the anchor has reported that nothing can be sent.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.anchor.load(Acquire) & DEAD != 0
    }

    /// Makes [`Self::is_dead`] return true.
    pub fn set_dead(&self) {
        self.anchor.fetch_or(DEAD, SeqCst);
    }

    /// Returns the epoll sets that the socket is in now.
    pub fn members(&self) -> SmallVec<[Membership; 2]> {
        self.interest.lock().map(|i| i.members.clone()).unwrap_or_default()
    }

    /// Resets the state for a new connection. Only the caller has the object: epoll sets and threads have removed their
    /// interest in the earlier connection.
    fn reset(&self) {
        self.watched.reset(false);
        self.anchor.store(0, Relaxed);
        self.rx_rests.store(false, Relaxed);
    }
}

/// The object of one TCP socket.
#[derive(Default)]
#[repr(align(128))]
pub struct Socket {
    /// Core's connection: what its two directions run on, and the steps that move them.
    pub connection: ConnectionOf<Socket>,
    /// The peer's vQPN of the stream on the link.
    pub peer_vqpn: AtomicU32,
    pub link: AtomicPtr<Link>,
    pub numbers: Numbers,
    pub promotion: Promotion,
    pub wakes: Wakes,
    pub told: Told,
    /// Options that the program has set.
    pub options: Options,
    /// Whether calls on the socket wait, and for how long.
    pub blocking: Blocking,
    /// The library's own keepalive, for an anchor that carries no data while the stream is on a link.
    pub keepalive: Keepalive,
    pub generation: AtomicU64,
    pub slot: u32,
}

impl Ref {
    /// Names the connection that `socket` is now.
    pub(crate) fn new(socket: &Socket) -> Self {
        Self {
            slot: socket.slot,
            generation: socket.generation.load(Acquire),
        }
    }

    /// Returns the socket; `None` if its object has become another connection.
    pub(crate) fn get(self) -> Option<&'static Socket> {
        by_slot(self.slot).filter(|socket| socket.generation.load(Acquire) == self.generation)
    }
}

impl From<&Socket> for Ref {
    fn from(socket: &Socket) -> Self {
        Self::new(socket)
    }
}

/// Finds a link's sockets by their slots.
impl Link {
    /// Returns the socket of this end's stream `vqpn`; `None` if there is no such stream.
    pub fn socket(&self, vqpn: Vqpn) -> Option<&'static Socket> {
        by_slot(self.slot_of(vqpn)?)
    }

    /// Returns all sockets with a stream on this link.
    pub fn sockets(&self) -> Vec<&'static Socket> {
        self.slots().filter_map(by_slot).collect()
    }
}

/// All objects by slot. The service thread finds an object by its slot.
static ALL: [AtomicPtr<Socket>; MAX_SOCKETS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_SOCKETS];
/// The most connections of a process that can leave TCP at the same time.
const MAX_SOCKETS: usize = 65_536;

/// Returns the object with this slot; `None` if it was never made.
pub(crate) fn by_slot(slot: u32) -> Option<&'static Socket> {
    let ptr = ALL.get(slot as usize)?.load(Acquire);
    // SAFETY: null, or an object that is never freed.
    unsafe { ptr.as_ref() }
}

/// Returns all objects, whether in use or not.
pub(crate) fn all() -> impl Iterator<Item = &'static Socket> {
    (0..SLOTS.load(Acquire)).filter_map(by_slot)
}

/// Returns the objects that stand for a connection of this process, for events that concern all of them (exec, exit).
pub(crate) fn in_use() -> impl Iterator<Item = &'static Socket> {
    all().filter(|socket| socket.numbers.fd.load(Acquire) >= 0)
}

/// Objects without a connection, in the order in which they were recycled. The lock also protects the opening and
/// closing of slots in the statistics.
static FREE: Lock<VecDeque<Recycled>> = Lock::new(VecDeque::new());
static SLOTS: AtomicU32 = AtomicU32::new(0);

/// An object without a connection.
struct Recycled {
    socket: &'static Socket,
    /// The value of [`ROUNDS`] after the object was recycled.
    since: u64,
}

impl Recycled {
    /// Returns whether the service thread has finished with the object: it was recycled between two rounds, or the
    /// round in which it was recycled has ended.
    fn is_left(&self, rounds: u64) -> bool {
        self.since.is_multiple_of(2) || self.since != rounds
    }
}

/// Counts the beginnings and ends of the service thread's rounds: odd during a round, in which the thread may use
/// connections.
static ROUNDS: AtomicU64 = AtomicU64::new(0);

/// A round of the service thread. A connection that the thread finds during a round ([`Ref::get`], [`by_slot`]) does
/// not become another connection before the round has ended. The program may close it meanwhile.
pub(crate) struct Round(());

impl Round {
    /// Begins a round, before any connection is looked up. Service thread only.
    pub(crate) fn begin() -> Self {
        ROUNDS.fetch_add(1, SeqCst);
        // Either this thread sees the new generation of an object that another thread recycles, or the other thread
        // sees this round (`Socket::recycle`).
        fence(SeqCst);
        Self(())
    }
}

impl Drop for Round {
    fn drop(&mut self) {
        ROUNDS.fetch_add(1, SeqCst);
    }
}

impl Deref for Socket {
    type Target = ConnectionOf<Socket>;

    #[inline]
    fn deref(&self) -> &ConnectionOf<Socket> {
        &self.connection
    }
}

impl Socket {
    /// Makes one more object; `None` if there are [`MAX_SOCKETS`] already. The caller holds the lock of [`FREE`], so no
    /// other call hands out the same slot. Not inlined: a whole object is on the stack here, which would grow the stack
    /// of each call that gets one.
    #[cold]
    #[inline(never)]
    fn make() -> Option<&'static Self> {
        let slot = SLOTS.load(Relaxed);
        if slot as usize >= MAX_SOCKETS {
            return None;
        }
        let mut fresh = Box::<Socket>::default();
        fresh.slot = slot;
        let fresh: &'static Socket = Box::leak(fresh);
        ALL.get(slot as usize)?
            .store(std::ptr::from_ref(fresh).cast_mut(), Release);
        SLOTS.store(slot + 1, Release);
        Some(fresh)
    }

    /// Returns an object for a new connection with this fd. `None` if there are [`MAX_SOCKETS`] in use, or if a signal
    /// handler makes the call and has interrupted a use of the list of free objects.
    pub fn allocate(fd: c_int, nonblocking: bool) -> Option<&'static Socket> {
        let mut free = FREE.lock()?;
        let rounds = ROUNDS.load(SeqCst);
        let is_left = |recycled: Option<&Recycled>| recycled.is_some_and(|r| r.is_left(rounds));
        // The object that was recycled last is in the cache, so it is tried first. If the service thread may still use
        // it, the one that was recycled first is the likeliest to be free.
        let recycled = if is_left(free.back()) {
            free.pop_back()
        } else if is_left(free.front()) {
            free.pop_front()
        } else {
            None
        };
        let socket = recycled.map(|r| r.socket).or_else(Self::make)?;
        drop(free);
        socket.renew();
        socket.promotion.reset();
        socket.wakes.reset();
        socket.told.reset();
        socket.options.reset();
        socket.keepalive.reset();
        socket.blocking.reset(nonblocking);
        socket.peer_vqpn.store(0, Relaxed);
        socket.link.store(std::ptr::null_mut(), Relaxed);
        socket.rx_shut.store(false, Relaxed);
        socket.take_untold();
        if let Some(mut tx) = socket.tx.lock() {
            *tx = Tx::default();
        }
        if let Some(mut rx) = socket.rx.lock() {
            *rx = Rx::default();
        }
        socket.numbers.reset(fd);
        let mut control = socket.control.lock()?;
        *control = Control::default();
        control.own.fds.push(fd);
        Some(socket)
    }

    /// Opens a slot for the socket in this process's statistics, if one is left.
    pub fn open_statistics(&self, page: &'static StatsPage, direction: Direction) {
        let info = StreamInfo {
            fd: self.numbers.fd.load(Relaxed),
            direction,
            local: None,
            peer: None,
            why: Reason::BelowThreshold.into(),
        };
        let stats = FREE
            .lock()
            .and_then(|_one_at_a_time| page.open_stream(self.slot, &info));
        self.told.set_stats(stats);
    }

    /// Makes the object free for another connection, and closes its slot in the statistics. From now on only stale
    /// pointers lead to the object. Their users check its generation.
    pub fn recycle(&'static self, page: Option<&'static StatsPage>) {
        self.promotion.take_listener();
        self.told.set_stats(None);
        self.renew();
        self.numbers.fd.store(-1, Release);
        if let Some(mut free) = FREE.lock() {
            if let Some(page) = page {
                page.close_stream(self.slot);
            }
            fence(SeqCst);
            let recycled = Recycled {
                socket: self,
                since: ROUNDS.load(SeqCst),
            };
            // Without memory for the list, the object is never used again.
            let _ = free.try_reserve(1).map(|()| free.push_back(recycled));
        }
    }

    /// Changes the generation, so that stale pointers see that the object has become another connection. The caller
    /// alone has the object.
    fn renew(&self) {
        let next = self.generation.load(Relaxed).wrapping_add(1);
        self.generation.store(next, Release);
        // The fence keeps later stores, for the new connection, from being seen before the generation.
        fence(Release);
    }

    /// Resets the list of recycled objects, whose lock another thread of the parent may have held. The objects stay in
    /// `ALL`.
    ///
    /// # Safety
    /// In a fork child only, before any other use.
    pub unsafe fn after_fork() {
        // SAFETY: only this thread exists in the child. The vector is leaked and not read, since a thread of the parent
        // may have been changing it.
        unsafe {
            std::mem::forget(std::mem::take(FREE.get_unlocked()));
            FREE.reset();
        }
        // The child has no service thread yet.
        ROUNDS.store(0, SeqCst);
    }

    /// Returns the link that a direction runs on or is about to run on; `None` if there is none.
    #[inline]
    pub fn link(&self) -> Option<&'static Link> {
        // SAFETY: null, or a link object, which is never freed.
        unsafe { self.link.load(Acquire).as_ref() }
    }

    /// Returns whether the library, and not the kernel's epoll set, reports the socket's readiness.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.wakes.watched.load(Acquire)
    }

    /// Returns whether a promotion is under way or done, or the way back to TCP has not ended.
    pub fn may_be_on_link(&self) -> bool {
        self.promotion.stage() == Stage::Busy || !self.is_plain()
    }

    /// Counts a call as inside the kernel's send, which the call is about to enter. True if the direction is on plain
    /// TCP. A critical section of the thread is then open. The caller ends it after [`Self::leave_tx`], and after the
    /// work that the result of `leave_tx` asks for. If the direction is not on plain TCP, returns false: the call is
    /// not counted, and no section is open.
    #[inline]
    pub fn enter_tx(&self) -> bool {
        let thread = thread::current();
        thread.begin();
        // Either the thread that is about to write a marker sees this call inside, or this call sees the mode that the
        // thread has set.
        self.tx_inside.enter();
        if self.tx_mode.look() == Mode::Tcp {
            return true;
        }
        self.leave_tx();
        thread.end();
        false
    }

    /// Counts out a call that has left the kernel's send. True if it was the last call inside, and other threads may
    /// have left work to it: to write a marker, or to end a connection that the program has closed.
    #[inline]
    pub fn leave_tx(&self) -> bool {
        self.tx_inside.leave() && (self.tx_mode.look() == Mode::Marked || self.numbers.is_closed())
    }

    /// Does for the kernel's receive what [`Self::enter_tx`] does for the kernel's send.
    #[inline]
    pub fn enter_rx(&self) -> bool {
        let thread = thread::current();
        thread.begin();
        self.rx_inside.enter();
        if self.rx_mode.look() == Mode::Tcp {
            return true;
        }
        self.rx_inside.leave();
        thread.end();
        false
    }

    /// Returns whether a scan for markers has begun since the calling thread entered the kernel's receive.
    #[inline]
    pub fn rx_was_marked(&self) -> bool {
        self.rx_mode.look() != Mode::Tcp
    }

    /// Counts out a call that has left the kernel's receive. Returns true if it was the last call inside, and other
    /// threads have left work to it, for one of these reasons:
    ///
    /// - A scan for markers has begun during the call, and a marker among the call's bytes may even have moved the
    ///   direction to the link. No other thread scans TCP while a call is inside, so this caller does it now.
    /// - The program has closed the connection, and this caller has to end it.
    #[inline]
    pub fn leave_rx(&self) -> bool {
        self.rx_inside.leave() && (self.rx_was_marked() || self.numbers.is_closed())
    }
}

/// Returns the connection's addresses, network namespace and device, in the form that is the same at both ends. `None`
/// if it is not connected.
pub(crate) fn tuple_of(socket: &'static Socket) -> Option<Tuple> {
    let _control = socket.control.lock()?;
    let fd = socket.numbers.anchor_fd()?;
    let local = std::net::SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
    let peer = std::net::SocketAddr::try_from(rustix::net::getpeername(fd).ok()??).ok()?;
    let tuple = match socket.promotion.role() {
        Role::Connector => Tuple::new(local, peer),
        Role::Acceptor => Tuple::new(peer, local),
    };
    Some(tuple.at(crate::sys::sockopt::namespace(fd), crate::sys::sockopt::device(fd)?))
}

/// Whether the socket may be promoted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// Not connected yet, or not checked yet.
    New = 0,
    /// Plain TCP below the threshold.
    Watching = 1,
    /// A promotion is under way, or done.
    Busy = 2,
    /// Stays on TCP for good, once the way back to TCP has ended.
    Pinned = 3,
    /// Stays on TCP for good, and no byte of the library's was ever in it: all its calls go to the kernel.
    Plain = 4,
}

impl Stage {
    fn of(code: u8) -> Self {
        match code {
            0 => Self::New,
            1 => Self::Watching,
            2 => Self::Busy,
            4 => Self::Plain,
            _ => Self::Pinned,
        }
    }
}

/// The state of a connection's promotion. The first stage is `New`.
#[derive(Default)]
pub struct Promotion {
    /// The code of the [`Stage`].
    stage: AtomicU8,
    role: AtomicU8,
    /// How much the connection has carried, compared with the threshold.
    pub progress: Progress,
    /// Attempts so far, and when the next one may begin.
    pub attempts: Attempts,
    /// Which processes hold the socket.
    pub holders: Holders,
    /// The listener that the connection was accepted on.
    listener: AtomicPtr<Listener>,
    /// Whether the connector has asked for a promotion, and the answer waits until this process uses the connection.
    pub asked: AtomicBool,
    /// In a fork child: whether this instance has taken the connection into its statistics.
    pub adopted: AtomicBool,
}

impl Promotion {
    /// Resets the state for a new connection. Only the caller has the object.
    fn reset(&self) {
        self.stage.store(Stage::New as u8, Relaxed);
        self.progress.reset();
        self.attempts.reset();
        self.holders.reset();
        self.listener.store(std::ptr::null_mut(), Relaxed);
        self.asked.store(false, Relaxed);
        self.adopted.store(false, Relaxed);
    }

    /// Returns the stage.
    #[inline]
    pub fn stage(&self) -> Stage {
        Stage::of(self.stage.load(Acquire))
    }

    /// Sets the stage.
    pub fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Release);
    }

    /// Sets the stage if it is `from`. True if it was `from`.
    pub fn exchange_stage(&self, from: Stage, to: Stage) -> bool {
        let (from, to) = (from as u8, to as u8);
        self.stage.compare_exchange(from, to, AcqRel, Acquire).is_ok()
    }

    /// Notes that the connection is on TCP after a failure. It may be promoted again after a pause, which doubles with
    /// each failure.
    pub fn retry_later(&self) {
        self.attempts.on_failure();
        self.set_stage(Stage::Watching);
    }

    /// Returns which end of the connection this is.
    pub fn role(&self) -> Role {
        if self.role.load(Relaxed) == 0 {
            Role::Connector
        } else {
            Role::Acceptor
        }
    }

    /// Notes that this end has connected.
    pub fn set_connector(&self) {
        self.role.store(0, Relaxed);
    }

    /// Notes that this end was accepted, on `listener` if that is known.
    pub fn set_acceptor(&self, listener: Option<&'static Listener>) {
        self.role.store(1, Relaxed);
        if let Some(listener) = listener {
            self.listener.store(std::ptr::from_ref(listener).cast_mut(), Relaxed);
        }
    }

    /// Returns the listener that the connection was accepted on; `None` if there is none, or it is not known.
    pub fn listener(&self) -> Option<&'static Listener> {
        // SAFETY: null, or a listener, which is never freed.
        unsafe { self.listener.load(Relaxed).as_ref() }
    }

    /// Returns [`Self::listener`] and removes it.
    pub fn take_listener(&self) -> Option<&'static Listener> {
        // SAFETY: null, or a listener, which is never freed.
        unsafe { self.listener.swap(std::ptr::null_mut(), Relaxed).as_ref() }
    }
}

/// Pause after the first failure, ns, and how many times later failures double it: up to four minutes.
const RETRY_AFTER: u64 = 1_000_000_000;
const RETRY_DOUBLINGS: u32 = 8;
/// Time without a failure, counted from the end of the last pause, after which the pause starts small again, ns.
const FORGIVEN_AFTER: u64 = 60_000_000_000;

/// The attempts to promote one connection.
#[derive(Default)]
pub struct Attempts {
    /// Earliest time of the next attempt, monotonic ns; 0: at any time.
    retry_at: AtomicU64,
    /// Attempts since the connection was last promoted.
    tries: AtomicU32,
    /// Number of recent failures. An attempt counts if it failed after it had begun, and a link if it failed while it
    /// carried the connection.
    failures: AtomicU32,
}

impl Attempts {
    /// Resets the counts for a new connection.
    fn reset(&self) {
        self.retry_at.store(0, Relaxed);
        self.tries.store(0, Relaxed);
        self.failures.store(0, Relaxed);
    }

    /// Returns whether it is too early for another attempt.
    pub fn is_early(&self) -> bool {
        let retry_at = self.retry_at.load(Relaxed);
        retry_at != 0 && now_ns() < retry_at
    }

    /// Puts the next attempt off by `pause` ns from now.
    pub fn put_off(&self, pause: u64) {
        self.retry_at.store(now_ns() + pause, Relaxed);
    }

    /// Returns whether there was no attempt since the connection was made or last promoted.
    pub fn is_first(&self) -> bool {
        self.tries.load(Relaxed) == 0
    }

    /// Counts one more attempt. Returns the number of attempts before it.
    pub fn count(&self) -> u32 {
        self.tries.fetch_add(1, Relaxed)
    }

    /// Notes that the connection is promoted.
    pub fn on_promoted(&self) {
        self.tries.store(0, Relaxed);
    }

    /// Returns whether an attempt or link has failed lately.
    pub fn have_failed(&self) -> bool {
        self.failures.load(Relaxed) > 0
    }

    /// Counts a failure and puts the next attempt off, for a pause that doubles with each failure.
    fn on_failure(&self) {
        let now = now_ns();
        if now.saturating_sub(self.retry_at.load(Relaxed)) > FORGIVEN_AFTER {
            self.failures.store(0, Relaxed);
        }
        let failures = self.failures.fetch_add(1, Relaxed).min(RETRY_DOUBLINGS);
        self.retry_at.store(now + (RETRY_AFTER << failures), Relaxed);
    }
}

#[cfg(test)]
impl Attempts {
    /// Returns for how long the next attempt is put off, ns.
    pub fn pause(&self) -> u64 {
        self.retry_at.load(Relaxed).saturating_sub(now_ns())
    }
}

/// O_NONBLOCK, SO_RCVTIMEO and SO_SNDTIMEO of a socket, as far as this process knows: whether its calls wait, and for
/// how long. The kernel is asked in `notify::wait`.
#[derive(Default)]
pub struct Blocking {
    /// O_NONBLOCK as this process last saw it.
    nonblocking: AtomicBool,
    /// Whether a hook has seen the program ask for the socket's readiness: by epoll, poll or select.
    polled: AtomicBool,
    /// A number that changes whenever the program sets one of the timeouts, and for each new connection of the object.
    pub sets: AtomicU32,
    pub known: Lock<Known>,
}

/// The timeouts that the kernel has reported.
#[derive(Default)]
pub struct Known {
    /// The epoch of forks and the value of `sets` when the kernel was asked; `None` if it has to be asked.
    pub at: Option<(u32, u32)>,
    /// SO_RCVTIMEO and SO_SNDTIMEO in ns; 0: no timeout.
    pub receive: u64,
    pub send: u64,
}

impl Blocking {
    /// Resets the values for a new socket.
    fn reset(&self, nonblocking: bool) {
        self.set_nonblocking(nonblocking);
        self.polled.store(false, Relaxed);
        self.sets.fetch_add(1, Release);
    }

    /// Forgets the timeouts of the same socket in a fork child.
    ///
    /// # Safety
    /// The caller is the only thread.
    pub unsafe fn after_fork(&self) {
        // SAFETY: by the contract, no other thread uses the lock.
        unsafe {
            *self.known.get_unlocked() = Known::default();
            self.known.reset();
        }
    }

    /// Notes that the program has set or cleared O_NONBLOCK.
    pub fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Relaxed);
    }

    /// Returns O_NONBLOCK as this process last saw it.
    pub fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Relaxed)
    }

    /// Notes that the program asks for the socket's readiness in a call that has a hook.
    #[inline]
    pub fn set_polled(&self) {
        if !self.polled.load(Relaxed) {
            self.polled.store(true, Relaxed);
        }
    }

    /// Returns whether the socket is non-blocking, and no hook has seen the program ask for its readiness. Such a
    /// program may ask by inline system calls (`rustix`), which report the readiness of the TCP socket alone.
    pub fn is_polled_unseen(&self) -> bool {
        self.is_nonblocking() && !self.polled.load(Relaxed)
    }

    /// Notes that the program has set a socket option. If the option is a timeout, the kernel is asked for it again.
    pub fn on_set(&self, level: c_int, name: c_int) {
        /// SO_RCVTIMEO_NEW and SO_SNDTIMEO_NEW, for a 64-bit time_t on 32-bit machines (linux/socket.h). Every kernel
        /// takes them.
        const NEW: [c_int; 2] = [66, 67];
        if level == libc::SOL_SOCKET && (name == libc::SO_RCVTIMEO || name == libc::SO_SNDTIMEO || NEW.contains(&name))
        {
            self.sets.fetch_add(1, Release);
        }
    }
}

// Direct transfers between hosts: a device moves the bytes of a large send or receive between the programs' memory,
// past the rings. This part decides by the results of earlier tries whether a direction tries another. The size from
// which on a direct transfer pays at all is in `config::ways`.

/// A receive counts as part of a bulk transfer if it has read at least 1/`LARGE` of the least direct transfer.
const LARGE: usize = 4;
/// The longest pause after failures: 2^(`MOST` - 1) calls or `LONGEST` ns, whichever ends first. A failed try takes
/// some ms.
const MOST: u8 = 8;
const LONGEST: u64 = 1_000_000_000;

/// The results of direct transfers in the receiving direction.
#[derive(Default)]
pub struct Receives {
    /// Whether a call waits with a buffer that was advertised to the peer. The next bytes of the stream may be in that
    /// buffer, and not in the ring.
    pub is_waiting: bool,
    /// Bytes that direct transfers have received.
    pub bytes: u64,
    /// Bytes that the last call has read.
    pub last_read: usize,
    /// The tries to receive with an advertised buffer.
    tries: Tries,
}

impl Receives {
    /// Returns whether a call that is about to wait is to advertise its buffer to the peer. `least` is the least size
    /// of a direct transfer, bytes. `is_fixed`: the user has set that size, and earlier failures do not count. `now` is
    /// the time, monotonic ns.
    pub fn may_try(&mut self, least: usize, is_fixed: bool, now: u64) -> bool {
        let is_bulk = self.last_read >= least / LARGE && !self.is_waiting;
        is_bulk && (is_fixed || self.tries.may_try(false, now))
    }

    /// Notes that the wait with an advertised buffer has ended, with `bytes` bytes in the buffer.
    pub fn on_landed(&mut self, bytes: usize, now: u64) {
        self.is_waiting = false;
        self.tries.on_tried(bytes > 0, now);
        if bytes > 0 {
            self.last_read = bytes;
        }
    }
}

/// The results of earlier tries of one kind of direct transfer. A failed try costs time: a receive has advertised its
/// buffer to a peer that did not use it, or a send has waited for a reader that did not come.
///
/// From the second failure in a row on, each failure doubles the number of calls that do not try. A try is allowed
/// earlier if a reader has advertised a buffer meanwhile, or if `LONGEST` has passed since the last try: one try in
/// that time costs next to nothing. The logic is pure: the caller passes the time.
#[derive(Default)]
pub struct Tries {
    /// Failures in a row, at most `MOST`.
    misses: u8,
    /// The number of calls that may not try yet, and the time from which on any call may try, monotonic ns.
    pause: u16,
    until: u64,
}

impl Tries {
    /// Returns whether a call may try; `is_new`: a reader has advertised a buffer since the last call.
    pub fn may_try(&mut self, is_new: bool, now: u64) -> bool {
        let may = self.pause == 0 || is_new || now >= self.until;
        self.pause = self.pause.saturating_sub(1);
        may
    }

    /// Notes whether a try has helped, at the time `now`, monotonic ns.
    pub fn on_tried(&mut self, has_helped: bool, now: u64) {
        self.until = now + LONGEST;
        self.misses = if has_helped { 0 } else { (self.misses + 1).min(MOST) };
        // The first failure causes no pause: a reader that is only late comes a moment later.
        self.pause = if self.misses > 1 { 1 << (self.misses - 1) } else { 0 };
    }
}

/// The results of direct transfers in the sending direction.
#[derive(Default)]
pub struct Sends {
    /// The tries to find a reader that waits with a buffer. A try has helped if bytes went into the buffer.
    pub to_readers: Tries,
    /// The tries to let the reader's device read the sender's memory. A try has helped if the device has read at least
    /// half of the bytes in time.
    pub to_devices: Tries,
    /// Number of buffers that readers had advertised at the last call of `may_try`.
    adverts: u32,
    /// Bytes that direct transfers have sent.
    pub bytes: u64,
}

impl Sends {
    /// Returns whether a large send is to wait for a reader with a buffer. `adverts` is the number of buffers that
    /// readers have advertised so far.
    pub fn may_try(&mut self, adverts: u32, now: u64) -> bool {
        let is_new = std::mem::replace(&mut self.adverts, adverts) != adverts;
        self.to_readers.may_try(is_new, now)
    }

    /// Returns whether the last send that waited for a reader has found one.
    pub fn goes_well(&self) -> bool {
        self.to_readers.misses == 0
    }
}

/// How the fds that stood for a socket were closed.
pub(crate) mod closed {
    /// An fd is open, or the object is not in use.
    pub(crate) const OPEN: u8 = 0;
    /// The program has closed the last fd, and calls that began before have not returned. Until they return, the
    /// connection stays as it is.
    pub(crate) const HELD: u8 = 1;
    /// The last fd was closed where no hook saw it, and calls that began before have not returned. No fd of the anchor
    /// is left.
    pub(crate) const LOST: u8 = 2;
}

/// The fds of one connection.
pub struct Numbers {
    /// An fd of the kernel's socket; -1 if there is none. If the connection lives on after the program's close, for its
    /// last bytes, the fd is a private one of the library's.
    pub fd: AtomicI32,
    /// The cookie of the kernel's socket behind the fds.
    pub cookie: Cookie,
    /// The last check that an fd stands for the kernel's socket (`is_seen`). Calls under a direction's lock look first
    /// at that direction's own record (`TxOwn::seen`, `RxOwn::seen`).
    pub seen: Seen,
    /// The fd that the program is closing, if `close::hide_markers` has put a dead socket behind it already; else -1.
    /// The fd counts as the connection's until the fd table has removed it.
    pub hidden: AtomicI32,
    /// How the fds were closed ([`closed`]).
    pub closed: Published<AtomicU8>,
    /// Whether a signal handler has closed fds while it had interrupted a use of the object. The service thread
    /// completes the close.
    pub orphaned: AtomicBool,
    /// Whether the program has closed all fds while the connection lives on, until the peer has all bytes.
    pub left_behind: AtomicBool,
}

/// A record without fds.
impl Default for Numbers {
    fn default() -> Self {
        Self {
            fd: AtomicI32::new(-1),
            cookie: Cookie::default(),
            seen: Seen::default(),
            hidden: AtomicI32::new(-1),
            closed: Published::from(closed::OPEN),
            orphaned: AtomicBool::new(false),
            left_behind: AtomicBool::new(false),
        }
    }
}

impl Numbers {
    /// Resets the record for a new connection. `fd` stands for it, or is negative if it has no fd yet. Only the caller
    /// has the object.
    fn reset(&self, fd: c_int) {
        self.closed.reset(closed::OPEN);
        self.hidden.store(-1, Relaxed);
        self.orphaned.store(false, Relaxed);
        // SAFETY: the fd comes from the program's call that has just made it or that uses it, and is open meanwhile.
        match (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }) {
            Some(fd) => {
                self.cookie.record(fd);
                // `record` has asked the kernel. So a short connection need not ask again in its few calls.
                self.seen.note_at(fd.as_raw_fd(), crate::sys::time::tick());
            }
            None => {
                self.cookie.clear();
                self.seen.forget();
            }
        }
        self.fd.store(fd, Release);
    }

    /// Returns the anchor, for a system call that does not block. The caller holds one of the socket's locks, so that
    /// the fd cannot be closed and reused meanwhile. `None` if no fd is left, or the fd was closed unseen and reused.
    pub fn anchor_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = self.fd.load(Acquire);
        // SAFETY: the caller holds a lock that `close` takes, so the fd stays open. If the fd was closed where no hook
        // saw it, it may stand for another file. That file is only asked for its socket cookie.
        let fd = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })?;
        self.cookie.is_behind(fd).then_some(fd)
    }

    /// Asks the kernel whether `fd` stands for the connection.
    pub fn is_behind(&self, fd: c_int) -> bool {
        // SAFETY: the fd is only asked for the socket behind it, which is harmless for any number.
        let is_it = || self.cookie.is_behind(unsafe { BorrowedFd::borrow_raw(fd) });
        fd >= 0 && (self.hidden.load(Acquire) == fd || is_it())
    }

    /// Returns whether `fd` stands for the connection. `tick` is the [tick](crate::sys::time::tick) that the caller has
    /// just read. Asks the kernel unless it was asked at the same tick. The result is recorded only after the kernel's
    /// answer, since other calls rely on the record.
    #[inline]
    pub fn is_seen(&self, fd: c_int, tick: u64) -> bool {
        if self.seen.is_at(fd, tick) {
            return true;
        }
        let is_it = self.is_behind(fd);
        if is_it {
            self.seen.note_at(fd, tick);
        }
        is_it
    }

    /// Returns whether no fd stands for the connection any more.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.look() != closed::OPEN
    }

    /// Returns whether an fd still stands for the connection, by an answer of the kernel's that is at most a tick old.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.is_seen(self.fd.load(Acquire), crate::sys::time::tick())
    }
}

/// The options that the program has set on one socket and that change what a link does.
#[derive(Default)]
pub struct Options {
    /// TCP_CORK.
    pub corked: AtomicBool,
    /// TCP_USER_TIMEOUT, ms; 0: no timeout.
    pub user_timeout: AtomicU32,
    /// TCP_INQ.
    pub tells_more: AtomicBool,
    /// Whether SO_TIMESTAMP or a similar option is set. 0: not known yet; 1: no; 2: yes.
    stamps: AtomicU8,
}

impl Options {
    /// Resets the options for a new connection.
    fn reset(&self) {
        self.corked.store(false, Relaxed);
        self.user_timeout.store(0, Relaxed);
        self.tells_more.store(false, Relaxed);
        self.forget_stamps();
    }

    /// Forgets whether SO_TIMESTAMP or a similar option is set, since the program has set one. The next receive that
    /// depends on it asks the kernel.
    pub fn forget_stamps(&self) {
        self.stamps.store(0, Relaxed);
    }

    /// Returns whether receives report when data came. Asks the kernel once.
    pub fn stamps(&self, fd: BorrowedFd<'_>) -> bool {
        let mut known = self.stamps.load(Relaxed);
        if known == 0 {
            known = 1 + u8::from(sockopt::stamps(fd));
            self.stamps.store(known, Relaxed);
        }
        known == 2
    }
}

/// The reader counts as keeping up after this many checks in a row that each found at most `LITTLE` bytes.
const KEEPS_UP: u8 = 16;
/// A check that found more bytes than this came late enough: the next one is not delayed.
const LITTLE: u64 = 256;

/// How the reader of one direction has kept up lately. A reader that keeps up with a writer of small messages checks
/// its ring a little less often.
///
/// Each check takes the cache lines of the ring's tail and of the payload away from the writer. The writer then pays
/// two cache misses for the next message. If the time between two checks is several misses long, the writer sends many
/// messages for those two misses. The reader waits only if the peer's program cannot be waiting for an answer: the
/// reader has sent nothing during its last `KEEPS_UP` checks.
#[derive(Default)]
pub struct Pace {
    /// Checks in a row that found at most `LITTLE` bytes, while nothing was sent in the other direction.
    kept_up: u8,
    /// Bytes read since the last check began.
    found: u64,
    /// Bytes sent in the other direction up to the last check.
    sent: u64,
}

impl Pace {
    /// Notes that `got` bytes were read, and that `left` bytes are known to be unread. `sent` is the number of bytes
    /// sent so far in the other direction. True if the reader is to wait before its next check.
    #[inline]
    pub fn on_read(&mut self, got: u64, left: u64, sent: u64) -> bool {
        self.found = self.found.saturating_add(got);
        if left > 0 {
            return false;
        }
        let is_stream = std::mem::replace(&mut self.sent, sent) == sent;
        let is_little = std::mem::take(&mut self.found) <= LITTLE;
        let one_more = self.kept_up.saturating_add(1);
        self.kept_up = if is_stream && is_little { one_more } else { 0 };
        self.kept_up >= KEEPS_UP
    }
}

/// The reports about one connection: errors that the kernel would have reported, and the counts for `rdmasock stat`.
#[derive(Default)]
pub struct Told {
    /// Whether a call has reported the reset to the program.
    pub reset_told: AtomicBool,
    /// Traffic of the connection that the kernel does not know.
    pub ledger: Ledger,
    /// Whether the statistics show the connection's addresses.
    pub shown: AtomicBool,
    /// Whether the link that a direction is on, or was on last, leads to another host.
    pub was_between_hosts: AtomicBool,
    stats: AtomicPtr<StreamStats>,
}

impl Told {
    /// Resets the record for a new connection. Only the caller has the object.
    fn reset(&self) {
        self.reset_told.store(false, Relaxed);
        self.ledger.reset();
        self.shown.store(false, Relaxed);
    }

    /// Returns the connection's counters; `None` if it has no slot in the statistics.
    #[inline]
    pub fn stats(&self) -> Option<&'static StreamStats> {
        // SAFETY: null, or a slot of a page that is never unmapped.
        unsafe { self.stats.load(Relaxed).as_ref() }
    }

    /// Calls `f` with the connection's counters, if it has a slot in the statistics.
    #[inline(always)]
    pub fn count(&self, f: impl FnOnce(&StreamStats)) {
        if let Some(stats) = self.stats() {
            f(stats);
        }
    }

    /// Sets the connection's slot in the statistics; `None` if it has none.
    pub fn set_stats(&self, stats: Option<&'static StreamStats>) {
        let stats = stats.map_or(std::ptr::null_mut(), |s| std::ptr::from_ref(s).cast_mut());
        self.stats.store(stats, Relaxed);
    }

    /// Sets the reason why the socket is on TCP, for `rdmasock stat`.
    pub fn set_why(&self, why: impl Into<Why>) {
        self.count(|stats| stats.set_why(why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_not_used_again_in_the_round_in_which_it_was_recycled() {
        let socket = Socket::allocate(-1, false).unwrap();
        let is_left = |since, rounds| Recycled { socket, since }.is_left(rounds);
        assert!(!is_left(3, 3), "in the round");
        assert!(is_left(3, 4) && is_left(3, 5), "after it");
        assert!(is_left(4, 4) && is_left(4, 5), "between two rounds");
        let begun = ROUNDS.load(SeqCst);
        drop(Round::begin());
        assert!(ROUNDS.load(SeqCst) >= begun + 2);
    }

    #[test]
    fn failures_in_a_row_are_tried_less_and_less_often_and_a_success_makes_up_for_them() {
        let mut sends = Sends::default();
        let mut tries = |calls: u32, success: bool| {
            let mut tried = 0;
            for _ in 0..calls {
                if sends.may_try(7, 0) {
                    tried += 1;
                    sends.to_readers.on_tried(success, 0);
                }
            }
            tried
        };
        assert_eq!(tries(10, true), 10);
        let few = tries(1000, false);
        assert!((8..20).contains(&few), "{few}");
        assert!(tries(200, true) > 50);
        assert_eq!(tries(10, true), 10);
    }

    #[test]
    fn a_reader_that_has_told_of_a_buffer_is_tried_at_once() {
        let mut sends = Sends::default();
        for _ in 0..5 {
            sends.to_readers.on_tried(false, 0);
        }
        let mut may_try = |adverts| sends.may_try(adverts, 0);
        assert!(may_try(1) && !may_try(1) && may_try(2) && !may_try(2));
        // The pause of `to_readers` does not apply to `to_devices`.
        assert!(sends.to_devices.may_try(false, 0));
        for _ in 0..5 {
            sends.to_devices.on_tried(false, 0);
        }
        assert!(!sends.to_devices.may_try(false, 0));
    }

    #[test]
    fn who_sends_now_and_then_tries_again_after_a_while() {
        let mut sends = Sends::default();
        let mut tried = 0;
        for second in 0..60 {
            for piece in 0..10 {
                let now = second * LONGEST + piece * 1000;
                if sends.to_devices.may_try(false, now) {
                    tried += 1;
                    sends.to_devices.on_tried(false, now);
                }
            }
        }
        assert!((60..100).contains(&tried), "{tried}");
    }

    #[test]
    fn only_bulk_is_worth_it() {
        let mut receives = Receives::default();
        assert!(!receives.may_try(4096, false, 0));
        receives.last_read = 1024;
        assert!(receives.may_try(4096, false, 0));
        receives.on_landed(4096, 0);
        assert!(receives.may_try(4096, false, 0));
        receives.last_read = 64;
        assert!(!receives.may_try(4096, false, 0));
    }

    #[test]
    fn receive_whose_sender_writes_nothing_is_rarely_posted() {
        let mut receives = Receives {
            last_read: 4096,
            ..Receives::default()
        };
        let posted = (0..1000).filter(|_| {
            let may = receives.may_try(4096, false, 0);
            if may {
                receives.on_landed(0, 0);
            }
            may
        });
        assert!((8..20).contains(&posted.count()));
    }

    fn reads(pace: &mut Pace, times: u8, got: u64) -> bool {
        (0..times).fold(false, |_, _| pace.on_read(got, 0, 7))
    }

    #[test]
    fn only_a_row_of_small_looks_puts_the_next_off() {
        let mut pace = Pace::default();
        assert!(!reads(&mut pace, KEEPS_UP, 8), "the first follows a send");
        assert!(reads(&mut pace, 1, 8));
        assert!(!reads(&mut pace, 1, LITTLE + 1), "found much");
        assert!(!reads(&mut pace, KEEPS_UP - 1, 8));
        assert!(reads(&mut pace, 1, 8));
    }

    #[test]
    fn what_one_look_has_found_is_read_without_a_rest() {
        let mut pace = Pace::default();
        reads(&mut pace, KEEPS_UP, 8);
        assert!(!pace.on_read(8, 16, 7));
        assert!(!pace.on_read(8, 8, 7));
        assert!(pace.on_read(8, 0, 7));
        assert!(!pace.on_read(LITTLE, 8, 7));
        assert!(!pace.on_read(8, 0, 7), "more than a little in two reads");
    }

    #[test]
    fn whoever_answers_does_not_rest() {
        let mut pace = Pace::default();
        let mut sent = 0;
        for _ in 0..100 {
            sent += 8;
            assert!(!pace.on_read(8, 0, sent));
        }
    }
}
