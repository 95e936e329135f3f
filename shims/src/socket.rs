//! One TCP socket that the library knows: what its two directions run on, and who waits for it.
//!
//! Objects are type-stable (see `table`). Lock order, outermost first: an epoll set's lock, then
//! `control`, `interest`, `rx`, `tx`. Nobody blocks under any of them, and nobody takes an epoll
//! set's lock while holding one of a socket's.

use std::ffi::c_int;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

use crossbeam_utils::CachePadded;
use rdmasock_core::fabric::ring::{Consumer, Producer};
use rdmasock_core::ids::{InstanceId, Nonce, Tuple, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::kernel;
use rdmasock_core::stats::{Direction, Reason, StatsPage, StreamInfo, StreamStats};
use rdmasock_core::stream::handshake::{Handshake, Role};
use rdmasock_core::stream::policy::Progress;
use rdmasock_core::thread;
use smallvec::SmallVec;

use crate::blocking::Blocking;
use crate::epoll::Epoll;
use crate::identity::{Cookie, Seen};
use crate::keepalive::Keepalive;
use crate::ledger::Ledger;
use crate::link::Link;
use crate::listener::Listener;
use crate::rx::carry::Carry;
use crate::rx::pace::Pace;
use crate::wait::{Spinner, WaiterId};

pub use rdmasock_core::stream::mode::{Mode, ModeCell, Receiving, Sending};

/// What has become of the numbers that stood for a socket.
pub mod closed {
    /// There is one; or the object is not in use.
    pub const OPEN: u8 = 0;
    /// The program has closed the last, and calls that began before are not back: until then all is as it was.
    pub const HELD: u8 = 1;
    /// The last was closed where no hook saw it, and calls that began before are not back: there is no anchor any more.
    pub const LOST: u8 = 2;
}

/// Whether the socket may be promoted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// Not connected yet, or not looked at.
    New = 0,
    /// Plain TCP below the threshold.
    Watching = 1,
    /// A promotion is under way, or done.
    Busy = 2,
    /// Stays on TCP for good, once the way back to it is over.
    Pinned = 3,
    /// Stays on TCP for good, and nothing of ours was ever in it: its calls are the kernel's alone.
    Plain = 4,
}

/// The sending direction.
#[derive(Default)]
pub struct Tx {
    /// Present while the direction is on the link.
    pub producer: Option<Producer>,
    /// What TCP has not taken yet: marker bytes, and behind them [`again`](Self::again) bytes of the program's.
    pub marker: Vec<u8>,
    /// How many bytes at the end of [`marker`](Self::marker) are the program's: what the peer has not read on the link is sent again.
    pub again: usize,
    /// How long the SWITCH was that the direction went to the link by: the last that TCP has of it.
    pub closing: usize,
    /// The [tick](crate::time::tick) at which something was last put on the link.
    pub last: u64,
    /// The pending marker is a SWITCH: once it is out the direction is on the link.
    pub then_link: bool,
    /// The direction has left a link between hosts, and the other's RESUME has not come: nothing but the marker
    /// goes out.
    pub is_suspended: bool,
    /// The program has shut the direction down: once the marker is out the kernel is told.
    pub then_shut: bool,
    /// The program has shut the direction down.
    pub is_shut: bool,
    /// Whom the peer is to tell of space, as an attention word: the epoll sets' part.
    pub bits: u32,
    /// Bytes are in the ring of which the peer was not told: more follows (`tx/cork.rs`).
    pub wake_delayed: bool,
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
}

/// The receiving direction.
#[derive(Default)]
pub struct Rx {
    /// Present from OPEN on; in use while the direction is on the link.
    pub consumer: Option<Consumer>,
    /// What markers to us start with, while we look for them.
    pub scan: Option<Nonce>,
    /// Bytes taken from TCP that may be the beginning of a marker, or that a call took which was in the
    /// kernel when the direction left TCP, or that were read ahead.
    pub carry: Carry,
    /// What came before all of that, while the connection is handed to another holder (`promote::aside`).
    pub aside: Vec<u8>,
    /// Bytes in front, in the carry and then in TCP, that a scan has found to be payload: small
    /// reads do not scan them again.
    pub scanned: usize,
    /// The ring is one of a link between hosts: it is not left before [`read_on`](Self::read_on).
    pub stays: bool,
    /// What follows the ring is in TCP: nothing more comes on a link between hosts.
    pub read_on: bool,
    /// After the ring comes ECONNRESET.
    pub is_lost: bool,
    /// Bytes that RESUME has announced and that TCP has not brought yet.
    pub owed: u64,
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
    /// The [tick](crate::time::tick) at which something was last taken from the link.
    pub last: u64,
}

impl Rx {
    /// What was set aside is in front again.
    pub fn restore_aside(&mut self) {
        if !self.aside.is_empty() {
            let rest = self.carry.take();
            self.carry.push(&std::mem::take(&mut self.aside));
            self.carry.push(&rest);
        }
    }
}

/// The promotion under way and the link that it led to.
#[derive(Default)]
pub struct Control {
    /// fd numbers of this process that stand for the socket.
    pub fds: SmallVec<[c_int; 4]>,
    /// The attempt under way.
    pub handshake: Option<Handshake>,
    /// Whose ASK the attempt began with (acceptor).
    pub asked_by: Option<InstanceId>,
    /// Whose HELLO has come.
    pub greeted_by: Option<InstanceId>,
    /// Since when the socket is being handed to another holder, monotonic ns, if data or a marker was in the way.
    pub handed_since: Option<u64>,
    /// Whoever has sent that HELLO can take back what it has sent in TCP.
    pub takes_back: bool,
    /// Where that HELLO says that a link can be had.
    pub offer: Option<rdmasock_core::wire::LinkOffer>,
    /// The connector is on another host, and has reached us at this address (acceptor).
    pub reached_at: Option<IpAddr>,
    /// Our end of the stream on the link.
    pub opened: Option<Opened>,
    /// The other end's number for the stream, once it is open.
    pub peer: Option<Vqpn>,
    /// Go back to TCP as soon as the handshake is over.
    pub leave: Option<Reason>,
    /// The stay on a link between hosts, until the stream is given back.
    pub resume: Option<rdmasock_core::stream::resume::Resume>,
    /// Nothing but a failure of the link ends that stay: when it is over, the connection may be promoted again.
    pub returns: bool,
    /// What RESUME starts with, to us and to the other.
    pub nonces: Option<[Nonce; 2]>,
    /// The other end was asked to take its sending direction back to TCP.
    pub asked_back: bool,
}

/// Our end of a stream on a link.
#[derive(Clone, Copy)]
pub struct Opened {
    /// The link.
    pub link: &'static Link,
    /// Our number for the stream.
    pub mine: Vqpn,
    /// OPEN is out and not answered yet.
    pub asked: bool,
}

/// An epoll set that a number of this socket is in.
#[derive(Clone, Copy)]
pub struct Membership {
    /// The set.
    pub epoll: &'static Epoll,
    /// Under which number it was added.
    pub fd: c_int,
    /// Its place in the set.
    pub item: usize,
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

/// See the module.
#[repr(align(128))]
pub struct Socket {
    /// Sending: mode, calls inside the kernel's send, and the lock's data.
    pub tx_mode: ModeCell<Sending>,
    pub tx_inside: AtomicU32,
    pub tx: CachePadded<Lock<Tx>>,
    pub peer_vqpn: AtomicU32,
    /// Receiving, likewise.
    pub rx_mode: ModeCell<Receiving>,
    pub rx_inside: AtomicU32,
    /// The next look for data is to be put off a little.
    pub rx_rests: AtomicBool,
    pub rx: CachePadded<Lock<Rx>>,

    /// TCP_CORK as the program set it.
    pub corked: AtomicBool,
    /// TCP_USER_TIMEOUT as the program set it, ms; 0: none.
    pub user_timeout: AtomicU32,
    /// TCP_USER_TIMEOUT has run out, and no call has said so yet.
    pub timed_out: AtomicBool,
    /// TCP_INQ as the program set it.
    pub tells_more: AtomicBool,
    /// What the kernel does not know of its traffic.
    pub ledger: Ledger,
    /// The library's own keepalive, for a silent anchor.
    pub keepalive: Keepalive,
    /// Whether its calls wait.
    pub blocking: Blocking,
    pub stage: AtomicU8,
    pub role: AtomicU8,
    pub progress: Progress,
    /// What the anchor reported (EPOLL* bits that say end or error), while it is watched.
    pub anchor: AtomicU32,
    /// The program has shut the receiving direction down.
    pub rx_shut: AtomicBool,
    /// The peer process died before it had read what we sent: TCP says ECONNRESET, once.
    pub lost_unread: AtomicBool,
    /// A call has told the program of the reset.
    pub reset_told: AtomicBool,
    /// The service thread watches the anchor, and epoll sets have handed the socket to us.
    pub watched: AtomicBool,
    pub link: AtomicPtr<Link>,
    /// One of the numbers that stand for it, -1 when closed.
    pub fd: AtomicI32,
    pub generation: AtomicU64,
    /// The kernel's socket behind the numbers.
    pub cookie: Cookie,
    /// When that was last seen, for calls that take no direction's lock.
    pub seen: Seen,
    /// The index of its cell in the table of holders that fork children share, plus one.
    pub holders: AtomicU32,
    /// After a failed attempt: not before this instant (monotonic ns).
    pub retry_at: AtomicU64,
    /// The statistics have its addresses.
    pub shown: AtomicBool,
    /// Attempts since it was last promoted.
    pub tries: AtomicU32,
    /// Attempts that came to nothing once they had begun, and links that failed under it, lately.
    pub failures: AtomicU32,
    /// How waits for data and for space went lately.
    pub rx_spin: Spinner,
    pub tx_spin: Spinner,
    /// The program has closed it; it lives on until the peer has all of it.
    pub left_behind: AtomicBool,
    /// What has become of its numbers ([`closed`]).
    pub closed: AtomicU8,
    /// Numbers were closed by a signal handler that interrupted a use of the object.
    pub orphaned: AtomicBool,
    /// The listening socket that it was accepted on.
    pub listener: AtomicPtr<Listener>,
    /// The connector asks, and the answer waits for this process's first use of the connection.
    pub asked: AtomicBool,
    /// An exec that is under way has let go of it.
    pub left_for_exec: AtomicBool,
    /// The epoch of forks in which the program got it.
    pub born: AtomicU32,
    /// In a fork child: it is this instance's by now.
    pub adopted: AtomicBool,
    pub control: Lock<Control>,
    /// Where it was put in the epoll set that it was added to last: a guess for `epoll::control`.
    pub last_item: AtomicU32,
    pub interest: Lock<Interest>,
    pub slot: u32,
    pub stats: AtomicPtr<StreamStats>,
}

/// Every object by its slot, for the service thread's look-ups.
static ALL: [AtomicPtr<Socket>; MAX_SOCKETS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_SOCKETS];
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

/// Recycled objects. Who opens or closes a slot of the statistics holds this lock.
static FREE: Lock<Vec<&'static Socket>> = Lock::new(Vec::new());
static SLOTS: AtomicU32 = AtomicU32::new(0);

impl Socket {
    /// The listener that it was accepted on.
    pub fn listener(&self) -> Option<&'static Listener> {
        // SAFETY: null, or a listener, which is never freed.
        unsafe { self.listener.load(Relaxed).as_ref() }
    }

    /// As [`Self::listener`], once.
    pub fn take_listener(&self) -> Option<&'static Listener> {
        // SAFETY: as there.
        unsafe { self.listener.swap(std::ptr::null_mut(), Relaxed).as_ref() }
    }

    /// One more object. The caller holds FREE's lock: nobody else hands out slots. Not inlined: a whole object is on the stack
    /// here, which is not to be so in each call that gets one.
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
            tx_mode: ModeCell::default(),
            tx_inside: AtomicU32::new(0),
            tx: CachePadded::new(Lock::new(Tx::default())),
            peer_vqpn: AtomicU32::new(0),
            rx_mode: ModeCell::default(),
            rx_inside: AtomicU32::new(0),
            rx_rests: AtomicBool::new(false),
            rx: CachePadded::new(Lock::new(Rx::default())),
            corked: AtomicBool::new(false),
            user_timeout: AtomicU32::new(0),
            timed_out: AtomicBool::new(false),
            tells_more: AtomicBool::new(false),
            ledger: Ledger::default(),
            keepalive: Keepalive::default(),
            blocking: Blocking::new(),
            stage: AtomicU8::new(Stage::New as u8),
            role: AtomicU8::new(0),
            progress: Progress::default(),
            anchor: AtomicU32::new(0),
            rx_shut: AtomicBool::new(false),
            lost_unread: AtomicBool::new(false),
            reset_told: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            link: AtomicPtr::new(std::ptr::null_mut()),
            fd: AtomicI32::new(-1),
            generation: AtomicU64::new(0),
            cookie: Cookie::default(),
            seen: Seen::default(),
            holders: AtomicU32::new(0),
            retry_at: AtomicU64::new(0),
            shown: AtomicBool::new(false),
            tries: AtomicU32::new(0),
            failures: AtomicU32::new(0),
            rx_spin: Spinner::new(),
            tx_spin: Spinner::new(),
            left_behind: AtomicBool::new(false),
            closed: AtomicU8::new(closed::OPEN),
            orphaned: AtomicBool::new(false),
            listener: AtomicPtr::new(std::ptr::null_mut()),
            asked: AtomicBool::new(false),
            left_for_exec: AtomicBool::new(false),
            born: AtomicU32::new(0),
            adopted: AtomicBool::new(false),
            control: Lock::new(Control::default()),
            last_item: AtomicU32::new(0),
            interest: Lock::new(Interest::default()),
            slot,
            stats: AtomicPtr::new(std::ptr::null_mut()),
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
        socket.progress.reset();
        socket.corked.store(false, Relaxed);
        socket.user_timeout.store(0, Relaxed);
        socket.timed_out.store(false, Relaxed);
        socket.tells_more.store(false, Relaxed);
        socket.ledger.reset();
        socket.keepalive.reset();
        socket.blocking.reset(nonblocking);
        socket.stage.store(Stage::New as u8, Relaxed);
        socket.anchor.store(0, Relaxed);
        socket.rx_rests.store(false, Relaxed);
        socket.rx_shut.store(false, Relaxed);
        socket.lost_unread.store(false, Relaxed);
        socket.reset_told.store(false, Relaxed);
        socket.watched.store(false, Relaxed);
        socket.closed.store(closed::OPEN, Relaxed);
        socket.orphaned.store(false, Relaxed);
        socket.peer_vqpn.store(0, Relaxed);
        socket.link.store(std::ptr::null_mut(), Relaxed);
        socket.holders.store(0, Relaxed);
        socket.retry_at.store(0, Relaxed);
        socket.tries.store(0, Relaxed);
        socket.failures.store(0, Relaxed);
        socket.shown.store(false, Relaxed);
        socket.listener.store(std::ptr::null_mut(), Relaxed);
        socket.asked.store(false, Relaxed);
        socket.left_for_exec.store(false, Relaxed);
        socket.born.store(crate::fork::epoch(), Relaxed);
        socket.adopted.store(false, Relaxed);
        if let Some(mut tx) = socket.tx.lock() {
            tx.wake_delayed = false;
            tx.is_suspended = false;
            tx.is_shut = false;
            tx.kernel_corked = false;
            tx.again = 0;
            tx.closing = 0;
            tx.last = 0;
            tx.blocked = false;
            tx.timed = false;
            tx.seen.forget();
        }
        if let Some(mut rx) = socket.rx.lock() {
            rx.last = 0;
        }
        // SAFETY: the program's number, in the middle of the call that has made it.
        match (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }) {
            Some(fd) => {
                socket.cookie.record(fd);
                // That was a look. A connection of a few calls, which is most of a short one, need not ask once more.
                socket.seen.note(fd.as_raw_fd());
            }
            None => {
                socket.cookie.clear();
                socket.seen.forget();
            }
        }
        socket.fd.store(fd, Release);
        let mut control = socket.control.lock()?;
        *control = Control::default();
        control.fds.push(fd);
        Some(socket)
    }

    /// Gives it a slot in this process's statistics.
    pub fn open_statistics(&self, page: &'static StatsPage, direction: Direction) {
        let info = StreamInfo {
            fd: self.fd.load(Relaxed),
            direction,
            local: None,
            peer: None,
            why: Reason::BelowThreshold.into(),
        };
        let stats = FREE
            .lock()
            .and_then(|_one_at_a_time| page.open_stream(self.slot, &info));
        self.stats.store(
            stats.map_or(std::ptr::null_mut(), |s| std::ptr::from_ref(s).cast_mut()),
            Relaxed,
        );
    }

    /// Gives the object and its slot of the statistics back. Nothing may lead to it any more but stale pointers,
    /// which check.
    pub fn recycle(&'static self, page: Option<&'static StatsPage>) {
        self.listener.store(std::ptr::null_mut(), Relaxed);
        self.stats.store(std::ptr::null_mut(), Relaxed);
        self.renew();
        self.fd.store(-1, Release);
        if let Some(mut free) = FREE.lock() {
            if let Some(page) = page {
                page.close_stream(self.slot);
            }
            free.push(self);
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

    /// The stage.
    #[inline]
    pub fn stage(&self) -> Stage {
        match self.stage.load(Acquire) {
            0 => Stage::New,
            1 => Stage::Watching,
            2 => Stage::Busy,
            4 => Stage::Plain,
            _ => Stage::Pinned,
        }
    }

    /// Sets the stage.
    pub fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Release);
    }

    /// Which end of the connection this is.
    pub fn role(&self) -> Role {
        if self.role.load(Relaxed) == 0 {
            Role::Connector
        } else {
            Role::Acceptor
        }
    }

    /// Counters, if the socket has a slot in the statistics.
    #[inline]
    pub fn stats(&self) -> Option<&'static StreamStats> {
        // SAFETY: null, or a slot of a page that is never unmapped.
        unsafe { self.stats.load(Relaxed).as_ref() }
    }

    /// The link that a direction runs on or is about to.
    #[inline]
    pub fn link(&self) -> Option<&'static Link> {
        // SAFETY: null, or a link object, which are type-stable.
        unsafe { self.link.load(Acquire).as_ref() }
    }

    /// The anchor, for a call that does not block. The caller holds one of the socket's locks, so
    /// that the number cannot be closed and reused meanwhile. `None` also where that has happened unseen.
    pub fn anchor_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = self.fd.load(Acquire);
        // SAFETY: a non-negative number is open as long as the caller's lock keeps close() out; one that was closed
        // past the hooks is only asked what it stands for.
        let fd = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })?;
        self.cookie.is_behind(fd).then_some(fd)
    }

    /// Whether calls are inside the kernel's receive or send.
    pub fn is_inside(&self) -> bool {
        self.rx_inside.load(SeqCst) > 0 || self.tx_inside.load(SeqCst) > 0
    }

    /// Whether neither direction needs anything but the kernel's call.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.tx_mode.load(Acquire) == Mode::Tcp && self.rx_mode.load(Acquire) == Mode::Tcp
    }

    /// A promotion is under way or done, or the way back is not at its end.
    pub fn may_be_on_link(&self) -> bool {
        self.stage() == Stage::Busy || !self.is_plain()
    }

    /// A call enters the kernel's send, which is a section of the thread's until the caller ends it, after
    /// [`Self::leave_tx`] and what follows from that. False if the direction is no longer plain.
    #[inline]
    pub fn enter_tx(&self) -> bool {
        let thread = thread::current();
        thread.begin();
        // SeqCst on both sides (see `is_tx_quiet`): either the marker writer sees us inside or we
        // see its mode.
        self.tx_inside.fetch_add(1, SeqCst);
        if self.tx_mode.load(SeqCst) == Mode::Tcp {
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
        self.tx_inside.fetch_sub(1, SeqCst) == 1
            && (self.tx_mode.load(SeqCst) == Mode::Marked || self.is_closed())
    }

    /// No number stands for it any more.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.load(SeqCst) != closed::OPEN
    }

    /// With the mode set to MARKED: no call is inside the kernel's send.
    pub fn is_tx_quiet(&self) -> bool {
        self.tx_inside.load(SeqCst) == 0
    }

    /// As [`Self::enter_tx`], for the kernel's receive.
    #[inline]
    pub fn enter_rx(&self) -> bool {
        let thread = thread::current();
        thread.begin();
        self.rx_inside.fetch_add(1, SeqCst);
        if self.rx_mode.load(SeqCst) == Mode::Tcp {
            return true;
        }
        self.rx_inside.fetch_sub(1, SeqCst);
        thread.end();
        false
    }

    /// The call is back; true if a scan began meanwhile.
    #[inline]
    pub fn rx_was_marked(&self) -> bool {
        self.rx_mode.load(SeqCst) != Mode::Tcp
    }

    /// Ends what `enter_rx` began. True if it was the last call inside, and something waits for that: what TCP has is
    /// scanned by now, and who has looked for markers meanwhile found the direction occupied; or the program has
    /// closed the connection.
    #[inline]
    pub fn leave_rx(&self) -> bool {
        self.rx_inside.fetch_sub(1, SeqCst) == 1
            && (self.rx_mode.load(SeqCst) == Mode::Marked || self.is_closed())
    }
}

/// The connection's addresses, as both ends see them; `None` if it is not connected.
pub fn tuple_of(socket: &'static Socket) -> Option<Tuple> {
    let _control = socket.control.lock()?;
    let fd = socket.anchor_fd()?;
    let local = std::net::SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
    let peer = std::net::SocketAddr::try_from(rustix::net::getpeername(fd).ok()??).ok()?;
    Some(match socket.role() {
        Role::Connector => Tuple::new(local, peer),
        Role::Acceptor => Tuple::new(peer, local),
    })
}

/// The local port of a TCP socket; `None` for any other.
pub fn local_port(fd: c_int) -> Option<u16> {
    // SAFETY: the program's own fd, in the middle of its call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let local = std::net::SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
    Some(local.port())
}

/// The peer has not read what we sent, or has lost what it sent, and is gone: the next receive is to fail. If
/// TCP has had a RST it says so itself, to whichever call asks first. `is_shut`: the program has shut
/// sending down, and both ends together look like a RST.
pub fn report_reset(socket: &Socket, is_shut: bool) {
    let events = crate::ready::kernel(socket, rustix::event::PollFlags::empty());
    if is_shut || events & libc::EPOLLHUP as u32 == 0 {
        socket.lost_unread.store(true, SeqCst);
    }
}

/// What the link still held is lost: the connection is reset, at both ends. The caller holds the
/// control lock.
pub fn reset(socket: &'static Socket) {
    if let Some(fd) = socket.anchor_fd() {
        let _ = rustix::net::sockopt::set_socket_linger(fd, Some(std::time::Duration::ZERO));
        break_off(fd);
    }
}

/// Breaks the association: a RST goes out, and this end sees ECONNRESET, once. What is unread is dropped.
fn break_off(fd: BorrowedFd<'_>) {
    let unspecified = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    // SAFETY: a valid address.
    let _ = unsafe {
        kernel::call(
            libc::SYS_connect,
            [
                std::os::fd::AsRawFd::as_raw_fd(&fd) as usize,
                kernel::address(&raw const unspecified),
                size_of::<libc::sockaddr>(),
                0,
                0,
                0,
            ],
        )
    };
}

/// The peer has taken nothing for as long as the program lets it: the connection is over at both ends, as where the kernel has
/// found that. Of the reset that this is to the kernel, calls say ETIMEDOUT.
pub fn time_out(socket: &Socket) {
    let Some(_control) = socket.control.lock() else {
        return;
    };
    let Some(fd) = socket.anchor_fd() else { return };
    socket.timed_out.store(true, SeqCst);
    break_off(fd);
    // As in `on_reader_died`.
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
}

/// What a call on a connection that was [timed out](time_out) says in place of `error`: it is said once.
pub fn as_timed_out(socket: &Socket, error: c_int) -> c_int {
    let is_reset = error == libc::ECONNRESET;
    if is_reset && socket.timed_out.swap(false, SeqCst) {
        libc::ETIMEDOUT
    } else {
        error
    }
}

/// The same, for a call that has just failed.
#[cold]
pub fn say_timed_out(socket: &Socket) {
    crate::errno::set(as_timed_out(socket, crate::errno::get()));
}

/// The peer's process has ended, which TCP shows as the end of its direction, as a rule, and has not read what the link held for
/// it. Had that been in its socket a reset would have come in place of the end, to be seen by every call: so the
/// anchor is made what that would have made of it.
pub fn on_reader_died(socket: &Socket, is_shut: bool) {
    let Some(fd) = socket.anchor_fd() else { return };
    let has_ended = |bits: c_int| {
        crate::ready::kernel(socket, rustix::event::PollFlags::RDHUP) & bits as u32 != 0
    };
    // What TCP has yet to give would be lost.
    let is_read = rustix::io::ioctl_fionread(fd).is_ok_and(|n| n == 0);
    if is_shut || !is_read || !has_ended(libc::EPOLLRDHUP | libc::EPOLLHUP) {
        return report_reset(socket, is_shut);
    }
    if !has_ended(libc::EPOLLHUP) {
        break_off(fd);
        // Nothing is connected any more, so it fails; but both directions are shut from now on, as after a reset.
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
    }
    socket.lost_unread.store(false, SeqCst);
    if socket.reset_told.load(SeqCst) {
        let _ = rustix::net::sockopt::socket_error(fd);
    }
}
