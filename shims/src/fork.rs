//! fork: the child is a new instance (docs/design/processes.md).
//!
//! Its sockets are marked as held by several processes, in a table of counts that parent and
//! children share, until one holder is left. What the parent had on a link is the parent's.

use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
    fence,
};

use rdmasock_core::os::doorbell;
use rdmasock_core::os::memfd::Mapping;
use rdmasock_core::os::privatefd::{self, Settled};

use crate::epoll::Epoll;
use crate::library::Library;
use crate::listener::Listener;
use crate::socket::{self, Mode, Receiving, Sending, Socket, Stage};
use crate::table::{self, Entry};

/// One cell a socket that was ever held across a fork, in memory that parent and children share: the
/// number of holders, and whether its owner has it on a link. 0 is a free cell. Cell 0 is the
/// number of requests so far.
const CELLS: usize = 65_536;
const COUNT: u32 = 0xffff;
/// The owner has the stream on a link, or is about to.
const OWNED: u32 = 1 << 30;
/// Another holder wants to use it: the owner is to take it back to TCP.
const WANTED: u32 = 1 << 31;
/// How long a child waits for the owner, ns.
const PATIENCE: u64 = 5_000_000_000;
/// How often it asks, ns: at first, and at last.
const FIRST_PAUSE: i64 = 200_000;
const LONGEST_PAUSE: i64 = 20_000_000;
/// How long the end of a process waits for promotions under way, and then for other hosts to have what was sent to them, ns: for longer
/// than a busy machine keeps a peer's thread from running.
const LAST_WORDS: u64 = 2_000_000_000;
/// In a fork child: its button for the service thread that owns what was on links, and that one's process.
static OWNER_BELL: AtomicI32 = AtomicI32::new(-1);
static OWNER_PID: AtomicI32 = AtomicI32::new(0);

static EPOCH: AtomicU32 = AtomicU32::new(1);
static COUNTS: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers the handlers, once.
pub fn register() {
    if REGISTERED.swap(true, AcqRel) {
        return;
    }
    if let Ok(counts) = Mapping::anonymous(CELLS * size_of::<AtomicU32>()) {
        COUNTS.store(counts.as_ptr().cast(), Release);
        std::mem::forget(counts);
    }
    set_mark();
    // SAFETY: the handlers are functions for the life of the process.
    unsafe {
        libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
        libc::atexit(at_exit);
    }
}

/// Whether there is anything that a fork concerns.
pub fn is_registered() -> bool {
    REGISTERED.load(Acquire)
}

fn cell(index: u32) -> Option<&'static AtomicU32> {
    let base = COUNTS.load(Acquire);
    let at = index as usize;
    // SAFETY: CELLS words, mapped for good.
    (!base.is_null() && at < CELLS).then(|| unsafe { &*base.add(at) })
}

fn claim() -> Option<u32> {
    let first = (crate::library::random_u64() as usize) % CELLS;
    (0..CELLS)
        .map(|i| ((first + i) % (CELLS - 1)) as u32 + 1)
        .take(64)
        .find(|index| {
            cell(*index).is_some_and(|c| c.compare_exchange(0, 1, AcqRel, Relaxed).is_ok())
        })
}

/// Whether more than one process holds the socket.
pub fn is_shared(socket: &Socket) -> bool {
    match socket.holders.load(Acquire) {
        0 => false,
        u32::MAX => true,
        index => cell(index).is_none_or(|c| c.load(Acquire) & COUNT > 1),
    }
}

/// This process lets go of the socket. True if it was the last holder.
pub fn let_go(socket: &Socket) -> bool {
    match socket.holders.swap(0, AcqRel) {
        0 => true,
        index => cell(index).is_some_and(|c| {
            let last = c.fetch_sub(1, AcqRel) & COUNT == 1;
            if last {
                c.store(0, Release);
            }
            last
        }),
    }
}

/// An exec is about to close this process's numbers of the socket, where no hook sees it.
pub fn leave_for_exec(socket: &Socket) {
    if let index @ 1..=0xffff = socket.holders.load(Acquire)
        && let Some(c) = cell(index)
        && c.load(Acquire) & COUNT > 1
        && !socket.left_for_exec.swap(true, AcqRel)
    {
        c.fetch_sub(1, AcqRel);
    }
}

/// The exec has failed.
pub fn return_from_exec(socket: &'static Socket) {
    if socket.left_for_exec.swap(false, AcqRel)
        && let Some(c) = cell(socket.holders.load(Acquire))
    {
        c.fetch_add(1, AcqRel);
    }
}

/// The owner has the stream back on TCP: the other holders can go on.
pub fn returned(socket: &Socket) {
    if let index @ 1..=0xffff = socket.holders.load(Acquire)
        && let Some(c) = cell(index)
        && c.fetch_and(!(OWNED | WANTED), AcqRel) & OWNED != 0
    {
        let _ =
            rustix::thread::futex::wake(c, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Whether some child has asked for a stream since `seen`; gives the new count.
pub fn requests() -> u32 {
    cell(0).map_or(0, |c| c.load(Acquire))
}

/// Whether another holder wants this stream.
pub fn is_wanted(socket: &Socket) -> bool {
    match socket.holders.load(Acquire) {
        0 | u32::MAX => false,
        index => cell(index).is_some_and(|c| c.load(Acquire) & WANTED != 0),
    }
}

/// Before a child uses a stream that another process has on a link: waits until that has taken it
/// back to TCP.
#[inline]
pub fn reclaim(socket: &'static Socket) {
    if socket.tx_mode.load(Acquire) == Mode::Foreign {
        reclaim_slow(socket);
    }
}

#[cold]
fn reclaim_slow(socket: &'static Socket) {
    let errno = crate::errno::get();
    if let Some(c) = cell(socket.holders.load(Acquire)) {
        let until = crate::time::now_ns() + PATIENCE;
        let mut word = c.fetch_or(WANTED, AcqRel) | WANTED;
        let (mut pause, mut ask_at) = (FIRST_PAUSE, 0);
        let owner = rustix::process::Pid::from_raw(OWNER_PID.load(Acquire));
        while word & OWNED != 0 && crate::time::now_ns() < until {
            let alive = owner.is_some_and(|p| rustix::process::test_kill_process(p).is_ok());
            if !alive {
                break;
            }
            // Again and again: what the owner waits for itself may have come. Not at each signal that ends the pause.
            let now = crate::time::now_ns();
            if now >= ask_at {
                ask_owner();
                ask_at = now + pause.unsigned_abs();
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            let step = rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: pause,
            };
            let _ = rustix::thread::futex::wait(
                c,
                rustix::thread::futex::Flags::empty(),
                word,
                Some(&step),
            );
            word = c.load(Acquire);
        }
        if word & OWNED != 0 && crate::time::now_ns() >= until {
            // A marker may come yet, or data be on the link: a gap would be worse than the end of the connection.
            tracing::warn!(target: "rdmasock", slot = socket.slot, "the process that has it on a link does not answer: reset");
            socket::reset(socket);
        }
    }
    socket.tx_mode.go(Sending::Reclaimed);
    socket.rx_mode.go(Receiving::Reclaimed);
    crate::errno::set(errno);
}

/// In a child: it has taken from a set that it shares with its parent what a thread of that was rung for. The parent rings again.
#[cold]
pub fn give_ring_back() {
    ask_owner();
}

/// Has the service thread of the parent look what is wanted of it. Without effect where there is none.
fn ask_owner() {
    if let Some(requests) = cell(0) {
        requests.fetch_add(1, AcqRel);
    }
    let bell = OWNER_BELL.load(Acquire);
    if bell >= 0 {
        // SAFETY: kept open for this across the fork.
        doorbell::press(unsafe { std::os::fd::BorrowedFd::borrow_raw(bell) });
    }
}

/// [`reclaim`] for all streams that were inherited.
pub fn reclaim_all() {
    for_each_socket(reclaim);
}

/// Before this process ends: what other processes hold too goes back to TCP.
pub extern "C" fn at_exit() {
    notice();
    let errno = crate::errno::get();
    let until = crate::time::now_ns() + LAST_WORDS;
    // The service thread, which lives on until the end, begins no more promotions.
    crate::hold::begin(rdmasock_core::stats::Reason::Closed);
    for_each_socket(|socket| {
        // A marker that is left unread would make the kernel reset the connection: a promotion that is
        // under way gets the moment that it needs.
        while !is_shared(socket) && crate::promote::is_scanning(socket) {
            crate::promote::readable(socket);
            // The last look comes after the last sleep, which may have been longer.
            if crate::time::now_ns() >= until {
                break;
            }
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 100_000,
            });
        }
        let shared = is_shared(socket);
        let is_foreign = socket.tx_mode.load(Acquire) == Mode::Foreign;
        if shared && !is_foreign && socket.may_be_on_link() {
            crate::pass::release(socket, rdmasock_core::stats::Reason::Inherited);
        }
        // Not what another process goes on with.
        if !shared && !socket.left_behind.load(Acquire) {
            crate::lifecycle::reset_if_unread(socket);
            if let Some(mut control) = socket.control.lock() {
                crate::promote::resume::end(socket, &mut control);
            }
        }
        let_go(socket);
    });
    // What is on its way to other hosts dies with the queue pair: until they have it, or TCP has.
    let is_owed = || {
        crate::socket::all().any(|socket| {
            let control = socket.control.lock();
            let is_staying = control.is_some_and(|c| crate::promote::resume::is_staying(&c));
            let is_open = socket.fd.load(Acquire) >= 0;
            is_open && is_staying
        })
    };
    let until = crate::time::now_ns() + LAST_WORDS;
    while is_owed() && crate::time::now_ns() < until {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 100_000,
        });
    }
    crate::errno::set(errno);
}

/// Changes with each fork, from 1 on: what holds for a socket that this process alone holds may not any more.
pub fn epoch() -> u32 {
    EPOCH.load(Acquire)
}

/// Before a fork.
pub extern "C" fn prepare() {
    count_holders();
    // From here to the fork nothing of ours has a low number, where the child would keep it.
    Settled::begin().hold();
}

/// Who will hold what.
fn count_holders() {
    if Library::has_retired() {
        return;
    }
    let errno = crate::errno::get();
    let mut wants_bell = false;
    table::for_each(0..=u32::MAX, |fd, entry| {
        // What wakes this process from a set the child may take.
        wants_bell |= matches!(entry, Entry::Epoll(_));
        if let Entry::Socket(socket) = entry
            && socket.fd.load(Acquire) == fd
        {
            if socket.holders.load(Acquire) == 0 {
                socket.holders.store(claim().unwrap_or(u32::MAX), Release);
            }
            if let Some(c) = cell(socket.holders.load(Acquire)) {
                c.fetch_add(1, AcqRel);
                // Who begins a promotion looks the other way round (`service/answer.rs`).
                fence(SeqCst);
                if socket.may_be_on_link() {
                    c.fetch_or(OWNED, AcqRel);
                    wants_bell = true;
                }
            }
        }
    });
    if wants_bell {
        Library::before_fork();
    }
    // Once they count as shared.
    EPOCH.fetch_add(1, AcqRel);
    crate::errno::set(errno);
}

/// After a fork, in the parent.
pub extern "C" fn parent() {
    Settled::end();
    hold_uncounted();
}

/// [`take_back`] where [`parent`] has not run.
pub fn failed(epoch: u32) {
    Settled::end();
    take_back(epoch);
}

/// There is no child of the fork that was prepared in the epoch after `epoch`: nobody but this process has got anything.
#[cold]
pub fn take_back(epoch: u32) {
    if !is_registered() || Library::has_retired() {
        return;
    }
    table::for_each(0..=u32::MAX, |fd, entry| {
        // What is younger was not counted.
        if let Entry::Socket(socket) = entry
            && socket.fd.load(Acquire) == fd
            && epoch.wrapping_sub(socket.born.load(Acquire)) < u32::MAX / 2
            && let index @ 1..=0xffff = socket.holders.load(Acquire)
            && let Some(c) = cell(index)
        {
            // Never below the one that is this process.
            let _ = c.fetch_update(AcqRel, Relaxed, |word| (word & COUNT > 1).then(|| word - 1));
        }
    });
}

/// What another thread has got between the count and the fork is held by both, and nobody knows by how many.
fn hold_uncounted() {
    table::for_each(0..=u32::MAX, |_, entry| {
        if let Entry::Socket(socket) = entry {
            let _ = socket
                .holders
                .compare_exchange(0, u32::MAX, AcqRel, Relaxed);
        }
    });
}

/// After a fork, in the child.
pub extern "C" fn child() {
    // What it would do may be forbidden, and there is nothing to be done.
    if Library::has_retired() {
        return;
    }
    let errno = crate::errno::get();
    // SAFETY: the only thread of the child.
    unsafe { begin_anew() };
    hold_uncounted();
    crate::errno::set(errno);
}

/// In a process that is a child of one with this memory, by a fork that no handler has seen (a raw system call): nobody
/// is left who could release the locks of its parent's threads. What the library has counted is the parent's.
///
/// Not in a child that shares the memory (vfork, clone with CLONE_VM): that page is not wiped there.
pub fn notice() {
    let mark = MARK.load(Acquire);
    // SAFETY: null, or a word that is mapped for good.
    if unsafe { mark.as_ref() }.is_some_and(|m| m.load(Acquire) == 0) {
        let errno = crate::errno::get();
        // SAFETY: a wiped page says that a fork was this thread's last, and its child has no other.
        unsafe { begin_anew() };
        for socket in socket::all() {
            socket.holders.store(0, Release);
        }
        crate::errno::set(errno);
    }
}

/// A word that is 1, and 0 in a child whom nobody has told that it is one.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

fn set_mark() {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    const BYTES: usize = 4096;
    let mut mark = MARK.load(Acquire);
    if mark.is_null() {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh private mapping, which stays for good.
        let made = unsafe {
            mmap_anonymous(std::ptr::null_mut(), BYTES, access, MapFlags::PRIVATE)
                .and_then(|at| madvise(at, BYTES, Advice::LinuxWipeOnFork).map(|()| at))
        };
        let Ok(page) = made else { return };
        mark = page.cast();
    }
    // SAFETY: a mapped page.
    if let Some(word) = unsafe { mark.as_ref() } {
        word.store(1, Release);
        MARK.store(mark, Release);
    }
}

/// The child is a new instance. Other threads of the parent may have been anywhere: every object that was ever made is
/// put right, whether or not a number leads to it, and what stands for what is read from the table, each word of
/// which is always true.
///
/// # Safety
/// In a fork child, whose only thread this is, before any other use of the library.
unsafe fn begin_anew() {
    crate::calls::vfork::on_fork_child();
    rdmasock_core::lock::forget_tid();
    set_mark();
    // SAFETY: by the contract, throughout.
    unsafe {
        Listener::after_fork();
        Epoll::after_fork();
        Socket::after_fork();
        for socket in socket::all() {
            forget_stream(socket);
        }
    }
    table::for_each(0..=u32::MAX, |fd, entry| match entry {
        Entry::Listener(listener) => listener.retain(),
        Entry::Epoll(epoll) => epoll.inherit(fd),
        Entry::Socket(socket) => {
            if socket.fd.swap(fd, AcqRel) < 0
                && let Some(listener) = socket.listener()
            {
                listener.retain();
            }
            // SAFETY: by the contract.
            unsafe { socket.control.get_unlocked() }.fds.push(fd);
        }
        Entry::None | Entry::Fresh { .. } => {}
    });
    let bell = match OWNER_BELL.load(Acquire) {
        // A grandchild: the streams still belong to the first.
        bell @ 0.. => bell,
        _ => {
            OWNER_PID.store(
                rustix::process::getppid().map_or(0, |p| p.as_raw_nonzero().get()),
                Release,
            );
            Library::button_before_fork()
        }
    };
    OWNER_BELL.store(bell, Release);
    // Before its descriptors are closed here.
    crate::verbs::after_fork();
    crate::wait::after_fork();
    let log = crate::log::fd().unwrap_or(-1);
    // SAFETY: by the contract, and the old instance is forgotten, so nobody uses the fds that are closed.
    unsafe {
        Listener::forget_unused();
        privatefd::reset_in_fork_child(|fd| fd == log || fd == bell || Listener::has_name(fd));
    }
    crate::log::after_fork_in_child();
    // SAFETY: the only thread.
    unsafe { crate::link::after_fork() };
    crate::rx::carry::after_fork();
    Library::forget();
}

/// The parent's stream is not the child's, nor is, until the table says so, any number.
///
/// # Safety
/// In a fork child only, before any other use of the socket.
unsafe fn forget_stream(socket: &'static Socket) {
    // SAFETY: by the contract. The values are leaked, because another thread of the parent may
    // have been changing them.
    unsafe {
        std::mem::forget(std::mem::take(socket.tx.get_unlocked()));
        socket.tx.reset();
        std::mem::forget(std::mem::take(socket.rx.get_unlocked()));
        socket.rx.reset();
        std::mem::forget(std::mem::take(socket.interest.get_unlocked()));
        socket.interest.reset();
        std::mem::forget(std::mem::take(socket.control.get_unlocked()));
        socket.control.reset();
        socket.blocking.after_fork();
    }
    let foreign = socket.may_be_on_link();
    socket.tx_inside.store(0, Relaxed);
    socket.rx_inside.store(0, Relaxed);
    if foreign {
        socket.set_stage(Stage::Pinned);
    }
    if foreign {
        socket.tx_mode.go(Sending::Inherited);
        socket.rx_mode.go(Receiving::Inherited);
    } else {
        socket.tx_mode.go(Sending::Closed);
        socket.rx_mode.go(Receiving::Closed);
    }
    socket.watched.store(false, Relaxed);
    socket.link.store(std::ptr::null_mut(), Relaxed);
    socket.ledger.keep(socket.stats());
    socket.stats.store(std::ptr::null_mut(), Relaxed);
    socket.adopted.store(false, Relaxed);
    socket.asked.store(false, Relaxed);
    // What the parent has closed, and still has to bring to its end, is the parent's alone.
    socket.left_behind.store(false, Relaxed);
    socket.closed.store(socket::closed::OPEN, Relaxed);
    socket.orphaned.store(false, Relaxed);
    socket.fd.store(-1, Release);
}

/// The sockets of this process, for what concerns all of them (exec, exit).
pub fn for_each_socket(mut f: impl FnMut(&'static Socket)) {
    for socket in socket::all() {
        if socket.fd.load(Acquire) >= 0 {
            f(socket);
        }
    }
}
