//! fork: the child is a new instance (DESIGN §6).
//!
//! Its sockets are marked as held by several processes, in a table of counts that parent and
//! children share, until one holder is left. What the parent had on a link is the parent's.

use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use rdmasock_core::os::memfd::Mapping;
use rdmasock_core::os::privatefd;

use crate::library::Library;
use crate::socket::{self, Socket, Stage, mode};
use crate::table::{self, Entry};

/// Counts of holders, one cell a socket that was ever held across a fork; 0 is a free cell.
const CELLS: usize = 65_536;
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
    // SAFETY: the handlers are functions for the life of the process.
    unsafe {
        libc::pthread_atfork(Some(prepare), None, Some(child));
    }
}

fn cell(index: u32) -> Option<&'static AtomicU32> {
    let base = COUNTS.load(Acquire);
    let at = index.checked_sub(1)? as usize;
    // SAFETY: CELLS words, mapped for good.
    (!base.is_null() && at < CELLS).then(|| unsafe { &*base.add(at) })
}

fn claim() -> Option<u32> {
    let first = (crate::library::random_u64() as usize) % CELLS;
    (0..CELLS).map(|i| ((first + i) % CELLS) as u32 + 1).take(64).find(|index| {
        cell(*index).is_some_and(|c| c.compare_exchange(0, 1, AcqRel, Relaxed).is_ok())
    })
}

/// Whether more than one process holds the socket.
pub fn is_shared(socket: &Socket) -> bool {
    match socket.holders.load(Acquire) {
        0 => false,
        u32::MAX => true,
        index => cell(index).is_none_or(|c| c.load(Acquire) > 1),
    }
}

/// This process lets go of the socket. True if it was the last holder.
pub fn let_go(socket: &Socket) -> bool {
    match socket.holders.swap(0, AcqRel) {
        0 => true,
        index => cell(index).is_some_and(|c| c.fetch_sub(1, AcqRel) == 1),
    }
}

extern "C" fn prepare() {
    let errno = crate::errno::get();
    table::for_each(0..=u32::MAX, |fd, entry| {
        if let Entry::Socket(socket) = entry
            && socket.fd.load(Acquire) == fd
        {
            if socket.holders.load(Acquire) == 0 {
                socket.holders.store(claim().unwrap_or(u32::MAX), Release);
            }
            if let Some(c) = cell(socket.holders.load(Acquire)) {
                c.fetch_add(1, AcqRel);
            }
        }
    });
    crate::errno::set(errno);
}

extern "C" fn child() {
    let errno = crate::errno::get();
    crate::calls::vfork::on_fork_child();
    rdmasock_core::lock::forget_tid();
    let mut kept = [-1; 64];
    let mut n = 0;
    table::for_each(0..=u32::MAX, |_, entry| match entry {
        Entry::Listener(listener) => {
            listener.after_fork();
            if let (Some(number), Some(slot)) = (listener.name_number(), kept.get_mut(n)) {
                *slot = number;
                n += 1;
            }
        }
        // SAFETY: the only thread of the child.
        Entry::Epoll(epoll) => unsafe { epoll.after_fork() },
        Entry::Socket(socket) => {
            // SAFETY: as above.
            unsafe { forget_stream(socket) };
        }
        Entry::None | Entry::Fresh { .. } => {}
    });
    let log = crate::log::fd().unwrap_or(-1);
    // SAFETY: the old instance is forgotten, so nobody uses the fds that are closed.
    unsafe { privatefd::reset_in_fork_child(|fd| fd == log || kept.contains(&fd)) };
    // SAFETY: the only thread.
    unsafe { Socket::after_fork() };
    crate::log::after_fork_in_child();
    Library::forget();
    crate::errno::set(errno);
}

/// The parent's stream is not the child's.
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
        let fds = std::mem::take(&mut socket.control.get_unlocked().fds);
        std::mem::forget(std::mem::take(socket.control.get_unlocked()));
        socket.control.get_unlocked().fds = fds;
        socket.control.reset();
    }
    socket.tx_inside.store(0, Relaxed);
    socket.rx_inside.store(0, Relaxed);
    if socket.stage() == Stage::Busy {
        socket.set_stage(Stage::Pinned);
    }
    socket.tx_mode.store(mode::TCP, Relaxed);
    socket.rx_mode.store(mode::TCP, Relaxed);
    socket.watched.store(false, Relaxed);
    socket.link.store(std::ptr::null_mut(), Relaxed);
    socket.stats.store(std::ptr::null_mut(), Relaxed);
}

/// The sockets of this process, for what concerns all of them (exec, exit).
pub fn for_each_socket(mut f: impl FnMut(&'static Socket)) {
    for socket in socket::all() {
        if socket.fd.load(Acquire) >= 0 {
            f(socket);
        }
    }
}
