//! A TCP socket that the library knows: what its two directions run on, and which threads and epoll sets wait for it.
//!
//! Objects are type-stable (see `table`). Lock order, outermost first: an epoll set's lock, then `control`, `interest`,
//! `rx`, `tx`. No thread blocks under any of these locks, or takes an epoll set's lock while it holds a lock of a
//! socket.

mod attempts;
pub(crate) mod blocking;
pub mod direct;
mod numbers;
mod options;
mod pace;
mod promotion;
mod told;

use std::ffi::c_int;
use std::ops::Deref;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, fence};

use blocking::Blocking;
use numbers::Numbers;
pub use numbers::closed;
use options::Options;
use pace::Pace;
use promotion::Promotion;
pub use promotion::Stage;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::ids::{Tuple, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::thread;
use rdmasock_core::stats::{Direction, Reason, StatsPage, StreamInfo};
use rdmasock_core::stream::connection::{self, Connection, ConnectionOf};
use rdmasock_core::stream::handshake::Role;
pub use rdmasock_core::stream::mode::{Mode, Receiving, Sending};
use rdmasock_core::sync::Published;
use smallvec::SmallVec;
use told::Told;

use crate::config::spin::Spinner;
use crate::objects::link::Link;
use crate::objects::link::held::Held;
use crate::objects::mailbox::Ref;
use crate::sys::identity::Seen;
use crate::sys::keepalive::Keepalive;

/// The sending direction's state in core's connection, with [`TxOwn`] of this process.
pub type Tx = connection::TxOf<Socket>;
/// The receiving direction's state in core's connection, with [`RxOwn`] of this process.
pub type Rx = connection::RxOf<Socket>;
/// The state of core's connection for both directions, with [`ControlOwn`] of this process.
pub type Control = connection::ControlOf<Socket>;

/// The waiter of the peer that is woken once the kernel has ended this end's sending direction.
pub type Farewell = connection::Farewell<&'static Link>;

/// State of this process for the sending direction.
#[derive(Default)]
pub struct TxOwn {
    /// The [tick](crate::sys::time::tick) of the last bytes put on the link.
    pub last: u64,
    /// The wake-up word for space, without sleeping threads: names the waiter of the epoll sets that the peer notifies.
    pub bits: u32,
    /// The kernel's value of TCP_CORK.
    pub kernel_corked: bool,
    /// The service thread checks whether the reader stands still (`tx::report_blocked`).
    pub blocked: bool,
    /// The service thread measures for how long the reader takes nothing (`service::standstill`).
    pub timed: bool,
    /// Number of calls that have waited for room and have not returned.
    pub waiting: u32,
    /// When an fd was last seen to stand for the socket (`identity`).
    pub seen: Seen,
    /// Whether direct transfers pay.
    pub direct: direct::Sends,
}

/// State of this process for the receiving direction.
#[derive(Default)]
pub struct RxOwn {
    /// Bytes read, by the reader's position, when the ring was last checked for shrinking.
    pub seen_at: u64,
    /// The wake-up word for data, without sleeping threads: names the waiter of the epoll sets that the peer notifies.
    pub bits: u32,
    /// Whether the reader keeps up.
    pub pace: Pace,
    /// Number of calls that have waited for data and have not returned.
    pub waiting: u32,
    /// When an fd was last seen to stand for the socket (`identity`).
    pub seen: Seen,
    /// The [tick](crate::sys::time::tick) of the last bytes taken from the link.
    pub last: u64,
    /// Whether direct transfers pay, and whether a call waits for one.
    pub direct: direct::Receives,
    /// The bytes in a ring that the program has been shown.
    pub view: Option<View>,
}

/// Bytes in a ring that the program reads in place (`rx::view`).
pub struct View {
    /// Keeps the ring mapped and out of other streams.
    pub _held: Held,
    /// The [stream](rdmasock_core::fabric::ring::Consumer::stream) of the ring.
    pub stream: usize,
    /// The view's next byte, after its own releases; a receive may have read further.
    pub at: u64,
    /// The byte behind the view's last.
    pub end: u64,
}

/// State of this process for both directions.
#[derive(Default)]
pub struct ControlOwn {
    /// The fds of this process that stand for the socket.
    pub fds: SmallVec<[c_int; 4]>,
}

/// An epoll set, as the connections in it use it.
pub trait EpollSet: Sync {
    /// Notes that this item may have changed.
    fn push(&self, item: usize, socket: &'static Socket);

    /// Moves an item from the kernel's set to the library's. False if that cannot be done now.
    fn take_over(&'static self, item: usize, socket: &'static Socket) -> bool;

    /// Moves an item back to the kernel's set, when its socket is on plain TCP again.
    fn hand_back(&'static self, item: usize, socket: &'static Socket);

    /// Removes the item: the socket's last fd was closed.
    fn forget(&self, item: usize, socket: &'static Socket);

    /// Returns the waiter that is woken when something is ready in the set; `None` if it has none.
    fn waiter(&self) -> Option<WaiterId>;

    /// Notes that the peer notifies the service thread of an item, and not the set's waiter (`served`).
    fn be_served(&self);
}

/// An epoll set that an fd of this socket is in.
#[derive(Clone, Copy)]
pub struct Membership {
    /// The set.
    pub epoll: &'static dyn EpollSet,
    /// The fd by which it was added.
    pub fd: c_int,
    /// Its place in the set.
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
    /// The waiter as which it sleeps.
    pub waiter: WaiterId,
    /// Waits for data to read.
    pub data: bool,
    /// Waits for room to write.
    pub space: bool,
}

/// The EPOLL* bits that the kernel reports for a connection on which nothing can be sent.
const DEAD: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// In `Wakes::anchor`, where EPOLL* has no bits: the kernel may have something in the error queue (recvmsg(2)).
pub const ERROR_QUEUE: u32 = 1 << 24;

/// Which threads and epoll sets are notified of readiness, and how waits for it went.
pub struct Wakes {
    pub interest: Lock<Interest>,
    /// The item's index in the epoll set that the socket was added to last: a guess for `epoll/control.rs`.
    pub last_item: AtomicU32,
    /// The service thread watches the anchor, and the kernel's epoll sets have handed the socket to the library.
    pub watched: Published<AtomicBool>,
    /// The anchor's EPOLL* bits for an end or error, while it is watched; and [`ERROR_QUEUE`].
    pub anchor: AtomicU32,
    /// The next receive is to wait a moment before it checks for data (`rx/pace.rs`).
    pub rx_rests: AtomicBool,
    /// How the last spins for data and for space ended, from which the length of the next one follows.
    pub rx_spin: Spinner,
    pub tx_spin: Spinner,
}

impl Wakes {
    fn new() -> Self {
        Self {
            interest: Lock::new(Interest::default()),
            last_item: AtomicU32::new(0),
            watched: Published::default(),
            anchor: AtomicU32::new(0),
            rx_rests: AtomicBool::new(false),
            rx_spin: Spinner::new(),
            tx_spin: Spinner::new(),
        }
    }

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

    /// Resets the state for a new connection. The caller alone has the object; sets and threads have already removed
    /// their interest in the connection before.
    fn reset(&self) {
        self.watched.reset(false);
        self.anchor.store(0, Relaxed);
        self.rx_rests.store(false, Relaxed);
    }
}

/// The object of one TCP socket.
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
    /// Whether its calls wait, and for how long.
    pub blocking: Blocking,
    /// The library's own keepalive, for a silent anchor.
    pub keepalive: Keepalive,
    pub generation: AtomicU64,
    pub slot: u32,
}

impl Ref {
    /// Names the connection that `socket` is now.
    pub fn new(socket: &Socket) -> Self {
        Self {
            slot: socket.slot,
            generation: socket.generation.load(Acquire),
        }
    }

    /// Returns the socket; `None` if its object has become another connection.
    pub fn get(self) -> Option<&'static Socket> {
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

/// Every object by its slot, from which the service thread finds it.
static ALL: [AtomicPtr<Socket>; MAX_SOCKETS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_SOCKETS];
/// The most connections of a process that can leave TCP at the same time.
const MAX_SOCKETS: usize = 65_536;

/// Returns the object with this slot; `None` if it was never made.
pub fn by_slot(slot: u32) -> Option<&'static Socket> {
    let ptr = ALL.get(slot as usize)?.load(Acquire);
    // SAFETY: null, or an object that is never freed.
    unsafe { ptr.as_ref() }
}

/// Returns all objects, whether in use or not.
pub fn all() -> impl Iterator<Item = &'static Socket> {
    (0..SLOTS.load(Acquire)).filter_map(by_slot)
}

/// Returns the objects that stand for a connection of this process, for events that concern all of them (exec, exit).
pub fn in_use() -> impl Iterator<Item = &'static Socket> {
    all().filter(|socket| socket.numbers.fd.load(Acquire) >= 0)
}

/// Recycled objects. The lock also protects the opening and closing of slots in the statistics.
static FREE: Lock<Vec<&'static Socket>> = Lock::new(Vec::new());
static SLOTS: AtomicU32 = AtomicU32::new(0);

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
        let fresh: &'static Socket = Box::leak(Box::new(Socket::new(slot)));
        ALL.get(slot as usize)?
            .store(std::ptr::from_ref(fresh).cast_mut(), Release);
        SLOTS.store(slot + 1, Release);
        Some(fresh)
    }

    fn new(slot: u32) -> Self {
        Self {
            connection: Connection::default(),
            peer_vqpn: AtomicU32::new(0),
            link: AtomicPtr::new(std::ptr::null_mut()),
            numbers: Numbers::new(),
            promotion: Promotion::new(),
            wakes: Wakes::new(),
            told: Told::new(),
            options: Options::default(),
            blocking: Blocking::new(),
            keepalive: Keepalive::default(),
            generation: AtomicU64::new(0),
            slot,
        }
    }

    /// Returns an object for a new connection with this fd. `None` if there are [`MAX_SOCKETS`] in use, or in a signal
    /// handler that has interrupted a use of the list.
    pub fn allocate(fd: c_int, nonblocking: bool) -> Option<&'static Socket> {
        let mut free = FREE.lock()?;
        let socket = match free.pop() {
            Some(s) => s,
            None => Self::make()?,
        };
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
            tx.wake_delayed = false;
            tx.is_suspended = false;
            tx.is_shut = false;
            tx.then_shut = false;
            tx.own.kernel_corked = false;
            tx.again = 0;
            tx.ours = Default::default();
            tx.own.last = 0;
            tx.own.blocked = false;
            tx.own.timed = false;
            tx.own.direct = direct::Sends::default();
            tx.own.seen.forget();
        }
        if let Some(mut rx) = socket.rx.lock() {
            rx.own.last = 0;
            rx.own.direct.bytes = 0;
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

    /// Gives the object and its slot of the statistics back. Only stale pointers may still lead to it, which check its
    /// generation.
    pub fn recycle(&'static self, page: Option<&'static StatsPage>) {
        self.promotion.take_listener();
        self.told.set_stats(None);
        self.renew();
        self.numbers.fd.store(-1, Release);
        if let Some(mut free) = FREE.lock() {
            if let Some(page) = page {
                page.close_stream(self.slot);
            }
            // Without memory for the list, the object is never used again.
            let _ = free.try_reserve(1).map(|()| free.push(self));
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

    /// Counts a call into the kernel's send. True if the direction is on plain TCP. A critical section of the thread is
    /// then open, which the caller ends after [`Self::leave_tx`] and what follows from its result. False, with no
    /// section open, if the direction is not on plain TCP.
    #[inline]
    pub fn enter_tx(&self) -> bool {
        let thread = thread::current();
        thread.begin();
        // Either the writer of a marker sees this call inside (`is_tx_quiet`), or this call sees the mode that it has
        // set.
        self.tx_inside.enter();
        if self.tx_mode.look() == Mode::Tcp {
            return true;
        }
        self.leave_tx();
        thread.end();
        false
    }

    /// Counts a call out of the kernel's send. True if it was the last one and something waits for that: a marker, or
    /// the end of a connection that the program has closed.
    #[inline]
    pub fn leave_tx(&self) -> bool {
        self.tx_inside.leave() && (self.tx_mode.look() == Mode::Marked || self.numbers.is_closed())
    }

    /// Counts a call into the kernel's receive, like [`Self::enter_tx`].
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

    /// Returns whether a scan for markers has begun since the call entered the kernel's receive.
    #[inline]
    pub fn rx_was_marked(&self) -> bool {
        self.rx_mode.look() != Mode::Tcp
    }

    /// Counts a call out of the kernel's receive. True if it was the last one and the caller has to check TCP, for one
    /// of these reasons:
    ///
    /// - A scan for markers has begun meanwhile, or has led to the link, and other threads have left the markers to
    ///   this call.
    /// - The program has closed the connection.
    #[inline]
    pub fn leave_rx(&self) -> bool {
        self.rx_inside.leave() && (self.rx_was_marked() || self.numbers.is_closed())
    }
}

/// Returns the connection's addresses, network namespace and device, in the form that is the same at both ends. `None`
/// if it is not connected.
pub fn tuple_of(socket: &'static Socket) -> Option<Tuple> {
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
