//! One TCP socket that the library knows: what its two directions run on, and who waits for it.
//!
//! Objects are type-stable (see `table`). Lock order, outermost first: an epoll set's lock, then
//! `control`, `interest`, `rx`, `tx`. Nobody blocks under any of them, and nobody takes an epoll
//! set's lock while holding one of a socket's.

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

use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::ids::{Tuple, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::thread;
use rdmasock_core::stats::{Direction, Reason, StatsPage, StreamInfo};
use rdmasock_core::stream::connection::{self, Connection, ConnectionOf};
use rdmasock_core::stream::handshake::Role;
use rdmasock_core::sync::Published;
use smallvec::SmallVec;

use crate::config::spin::Spinner;
use crate::objects::link::Link;
use crate::objects::link::held::Held;
use crate::objects::mailbox::Ref;
use crate::sys::identity::Seen;
use crate::sys::keepalive::Keepalive;

use blocking::Blocking;
use numbers::Numbers;
use options::Options;
use pace::Pace;
use promotion::Promotion;
use told::Told;

pub use numbers::closed;
pub use promotion::Stage;

pub use rdmasock_core::stream::mode::{Mode, Receiving, Sending};

/// The connection that a socket is, as core has it.
pub type Tx = connection::TxOf<Socket>;
/// See [`Tx`].
pub type Rx = connection::RxOf<Socket>;
/// See [`Tx`].
pub type Control = connection::ControlOf<Socket>;

/// Who is to be told that this end has ended its direction.
pub type Farewell = connection::Farewell<&'static Link>;

/// What the process keeps with the sending direction.
#[derive(Default)]
pub struct TxOwn {
    /// The [tick](crate::sys::time::tick) at which something was last put on the link.
    pub last: u64,
    /// Whom the peer is to tell of space, as an attention word: the epoll sets' part.
    pub bits: u32,
    /// TCP_CORK as the kernel has it.
    pub kernel_corked: bool,
    /// The service thread watches whether the reader stands still (`tx::report_blocked`).
    pub blocked: bool,
    /// The service thread watches for how long the reader takes nothing (`service::standstill`).
    pub timed: bool,
    /// Calls that have waited for room, and are not back.
    pub waiting: u32,
    /// When a number was last seen to stand for the socket (`identity`).
    pub seen: Seen,
    /// Whether direct transfers pay.
    pub direct: direct::Sends,
}

/// What the process keeps with the receiving direction.
#[derive(Default)]
pub struct RxOwn {
    /// Bytes read when the ring was last looked at for shrinking.
    pub seen_at: u64,
    /// Whom the peer is to tell of data, as an attention word: the epoll sets' part.
    pub bits: u32,
    /// Whether the reader keeps up.
    pub pace: Pace,
    /// Calls that have waited for data, and are not back.
    pub waiting: u32,
    /// When a number was last seen to stand for the socket (`identity`).
    pub seen: Seen,
    /// The [tick](crate::sys::time::tick) at which something was last taken from the link.
    pub last: u64,
    /// Whether direct transfers pay, and whether one is awaited.
    pub direct: direct::Receives,
    /// The program has looked at bytes where they lie in a ring.
    pub view: Option<View>,
}

/// What the program looks at in a ring (`rx::view`).
pub struct View {
    /// The ring stays what it is.
    pub _held: Held,
    /// The [stream](rdmasock_core::fabric::ring::Consumer::stream) whose ring it is.
    pub stream: usize,
    /// Its next byte, as far as its own calls know: a receive may have read more.
    pub at: u64,
    /// The byte behind its last.
    pub end: u64,
}

/// What the process keeps with both.
#[derive(Default)]
pub struct ControlOwn {
    /// fd numbers of this process that stand for the socket.
    pub fds: SmallVec<[c_int; 4]>,
}

/// An epoll set, as connections know it that are in it.
pub trait EpollSet: Sync {
    /// Something may have changed for this item.
    fn push(&self, item: usize, socket: &'static Socket);

    /// Moves an item from the kernel's set to ours. False if that cannot be done now.
    fn take_over(&'static self, item: usize, socket: &'static Socket) -> bool;

    /// Moves an item back into the kernel's set, when its socket is on plain TCP again.
    fn hand_back(&'static self, item: usize, socket: &'static Socket);

    /// The socket's last number was closed.
    fn forget(&self, item: usize, socket: &'static Socket);

    /// Who is told of what is ready in the set.
    fn waiter(&self) -> Option<WaiterId>;

    /// The service thread is told of an item, in place of that (`served`).
    fn be_served(&self);
}

/// An epoll set that a number of this socket is in.
#[derive(Clone, Copy)]
pub struct Membership {
    /// The set.
    pub epoll: &'static dyn EpollSet,
    /// Under which number it was added.
    pub fd: c_int,
    /// Its place in the set.
    pub item: usize,
}

impl Membership {
    /// Whether it is one of this set.
    pub fn is_in<T>(&self, set: &T) -> bool {
        std::ptr::addr_eq(self.epoll, set)
    }
}

/// Who is to be told when the socket's readiness changes.
#[derive(Default)]
pub struct Interest {
    /// The epoll sets that it is in.
    pub members: SmallVec<[Membership; 2]>,
    /// Threads that sleep on it (blocking calls, poll, select).
    pub sleepers: SmallVec<[Sleeping; 2]>,
}

/// A thread that sleeps, or is about to.
#[derive(Clone, Copy)]
pub struct Sleeping {
    /// Its doorbell.
    pub waiter: WaiterId,
    /// It waits for something to read.
    pub data: bool,
    /// It waits for room to write.
    pub space: bool,
}

/// What an anchor reports of a connection on which nothing can be sent.
const DEAD: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// In `Wakes::anchor`, where EPOLL* has no bits: the kernel may have something in the error queue (recvmsg(2)).
pub const ERROR_QUEUE: u32 = 1 << 24;

/// Who hears of what is ready, and how that is waited for.
pub struct Wakes {
    pub interest: Lock<Interest>,
    /// Where it was put in the epoll set that it was added to last: a guess for `epoll/control.rs`.
    pub last_item: AtomicU32,
    /// The service thread watches the anchor, and epoll sets have handed the socket to us.
    pub watched: Published<AtomicBool>,
    /// What the anchor reported (EPOLL* bits that say end or error), while it is watched; and [`ERROR_QUEUE`].
    pub anchor: AtomicU32,
    /// The next look for data is to be put off a little.
    pub rx_rests: AtomicBool,
    /// How waits for data and for space went lately.
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

    /// Whether the anchor says that nothing can be sent.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.anchor.load(Acquire) & DEAD != 0
    }

    /// It counts as saying so.
    pub fn set_dead(&self) {
        self.anchor.fetch_or(DEAD, SeqCst);
    }

    /// The epoll sets that the socket is in, as they are now.
    pub fn members(&self) -> SmallVec<[Membership; 2]> {
        self.interest.lock().map(|i| i.members.clone()).unwrap_or_default()
    }

    /// For a new connection. The caller alone has it. (Who has an interest has let go of the one before.)
    fn reset(&self) {
        self.watched.reset(false);
        self.anchor.store(0, Relaxed);
        self.rx_rests.store(false, Relaxed);
    }
}

/// See the module.
#[repr(align(128))]
pub struct Socket {
    /// What its two directions run on, and what moves them.
    pub connection: ConnectionOf<Socket>,
    /// The peer's number for the stream on the link.
    pub peer_vqpn: AtomicU32,
    pub link: AtomicPtr<Link>,
    pub numbers: Numbers,
    pub promotion: Promotion,
    pub wakes: Wakes,
    pub told: Told,
    /// What the program has set.
    pub options: Options,
    /// Whether its calls wait.
    pub blocking: Blocking,
    /// The library's own keepalive, for a silent anchor.
    pub keepalive: Keepalive,
    pub generation: AtomicU64,
    pub slot: u32,
}

impl Ref {
    /// The connection that `socket` is now.
    pub fn new(socket: &Socket) -> Self {
        Self {
            slot: socket.slot,
            generation: socket.generation.load(Acquire),
        }
    }

    /// The socket, if it is still the same connection.
    pub fn get(self) -> Option<&'static Socket> {
        by_slot(self.slot).filter(|socket| socket.generation.load(Acquire) == self.generation)
    }
}

impl From<&Socket> for Ref {
    fn from(socket: &Socket) -> Self {
        Self::new(socket)
    }
}

/// The sockets that a link knows by their slots.
impl Link {
    /// The socket of our stream `vqpn`.
    pub fn socket(&self, vqpn: Vqpn) -> Option<&'static Socket> {
        by_slot(self.slot_of(vqpn)?)
    }

    /// All sockets with a stream on this link.
    pub fn sockets(&self) -> Vec<&'static Socket> {
        self.slots().filter_map(by_slot).collect()
    }
}

/// Every object by its slot, for the service thread's look-ups.
static ALL: [AtomicPtr<Socket>; MAX_SOCKETS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_SOCKETS];
/// More connections than this at once are not accelerated.
const MAX_SOCKETS: usize = 65_536;

/// The object with this slot.
pub fn by_slot(slot: u32) -> Option<&'static Socket> {
    let ptr = ALL.get(slot as usize)?.load(Acquire);
    // SAFETY: null, or an object that is never freed.
    unsafe { ptr.as_ref() }
}

/// All objects, whether in use or not.
pub fn all() -> impl Iterator<Item = &'static Socket> {
    (0..SLOTS.load(Acquire)).filter_map(by_slot)
}

/// Those that stand for a connection of this process, for what concerns all of them (exec, exit).
pub fn in_use() -> impl Iterator<Item = &'static Socket> {
    all().filter(|socket| socket.numbers.fd.load(Acquire) >= 0)
}

/// Recycled objects. Who opens or closes a slot of the statistics holds this lock.
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
    /// One more object. The caller holds FREE's lock: nobody else hands out slots. Not inlined: a whole object is on
    /// the stack here, which is not to be so in each call that gets one.
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

    /// An object for a new connection behind `fd`.
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

    /// Gives it a slot in this process's statistics.
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

    /// Gives the object and its slot of the statistics back. Nothing may lead to it any more but stale pointers,
    /// which check.
    pub fn recycle(&'static self, page: Option<&'static StatsPage>) {
        self.promotion.take_listener();
        self.told.set_stats(None);
        self.renew();
        self.numbers.fd.store(-1, Release);
        if let Some(mut free) = FREE.lock() {
            if let Some(page) = page {
                page.close_stream(self.slot);
            }
            // Without memory for that the object is lost.
            let _ = free.try_reserve(1).map(|()| free.push(self));
        }
    }

    /// Stale pointers see that it is no longer what they led to. The caller alone has it.
    fn renew(&self) {
        let next = self.generation.load(Relaxed).wrapping_add(1);
        self.generation.store(next, Release);
        // What is stored for the new use is not seen before.
        fence(Release);
    }

    /// Every object ever made is reachable from the table; this frees the allocator after fork.
    ///
    /// # Safety
    /// In a fork child only, before any other use.
    pub unsafe fn after_fork() {
        // SAFETY: only this thread exists. If the vector was being changed its content cannot be
        // trusted: leak it.
        unsafe {
            std::mem::forget(std::mem::take(FREE.get_unlocked()));
            FREE.reset();
        }
    }

    /// The link that a direction runs on or is about to.
    #[inline]
    pub fn link(&self) -> Option<&'static Link> {
        // SAFETY: null, or a link object, which are type-stable.
        unsafe { self.link.load(Acquire).as_ref() }
    }

    /// Whether its readiness is for the library to say, not for the kernel's set.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.wakes.watched.load(Acquire)
    }

    /// A promotion is under way or done, or the way back is not at its end.
    pub fn may_be_on_link(&self) -> bool {
        self.promotion.stage() == Stage::Busy || !self.is_plain()
    }

    /// A call enters the kernel's send, which is a section of the thread's until the caller ends it, after
    /// [`Self::leave_tx`] and what follows from that. False if the direction is no longer plain.
    #[inline]
    pub fn enter_tx(&self) -> bool {
        let thread = thread::current();
        thread.begin();
        // Either the marker writer sees us inside (`is_tx_quiet`) or we see its mode.
        self.tx_inside.enter();
        if self.tx_mode.look() == Mode::Tcp {
            return true;
        }
        self.leave_tx();
        thread.end();
        false
    }

    /// The call is back; true if it was the last and something waits for that: a marker, or the end of a connection
    /// that the program has closed.
    #[inline]
    pub fn leave_tx(&self) -> bool {
        self.tx_inside.leave() && (self.tx_mode.look() == Mode::Marked || self.numbers.is_closed())
    }

    /// As [`Self::enter_tx`], for the kernel's receive.
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

    /// The call is back; true if a scan began meanwhile.
    #[inline]
    pub fn rx_was_marked(&self) -> bool {
        self.rx_mode.look() != Mode::Tcp
    }

    /// Ends what `enter_rx` began. Returns true if this was the last call inside and the caller has to look at TCP: a
    /// scan has begun meanwhile, or has led to the link, and other threads have left the markers to this call; or the
    /// program has closed the connection.
    #[inline]
    pub fn leave_rx(&self) -> bool {
        self.rx_inside.leave() && (self.rx_was_marked() || self.numbers.is_closed())
    }
}

/// The connection's addresses and where it is, as both ends see them; `None` if it is not connected.
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
