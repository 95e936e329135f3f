//! fork: the child is a new instance (docs/design/processes.md).
//!
//! Its sockets are marked as held by several processes (`holders`). What the parent had on a link is the parent's.

use std::os::fd::AsFd;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use rdmasock_core::os::privatefd::{self, Settled};

use rdmasock_core::stream::connection;

use crate::notify::epoll::Epoll;
use crate::notify::table::{self, Entry};
use crate::objects::ancestors;
use crate::objects::holders;
use crate::objects::library::Library;
use crate::objects::listener::Listener;
use crate::objects::socket::{self, Mode, Receiving, Sending, Socket, Stage};
use crate::sys::vfork;

static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers the handlers, once. `at_exit` is what an exit does.
pub fn register(at_exit: extern "C" fn()) {
    if REGISTERED.swap(true, AcqRel) {
        return;
    }
    holders::prepare();
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

/// Before a fork.
pub extern "C" fn prepare() {
    if vfork::is_child() {
        return;
    }
    ancestors::begin_fork();
    count_holders();
    // From here to the fork nothing of ours has a low number, where the child would keep it.
    Settled::begin().hold();
}

/// Who will hold what.
fn count_holders() {
    if Library::has_retired() {
        return;
    }
    let errno = crate::sys::errno::get();
    let mut wants_button = false;
    table::for_each(0..=u32::MAX, |fd, entry| {
        // The child may take an event that wakes this process from a set, and it may be killed as a holder.
        wants_button |= matches!(entry, Entry::Epoll(_) | Entry::Socket(_));
        if let Entry::Socket(socket) = entry
            && socket.numbers.fd.load(Acquire) == fd
        {
            // What an ancestor has on a link, or had, is not this process's to give back.
            let is_owned = || socket.may_be_on_link() && socket.tx_mode.load(Acquire) != Mode::Foreign;
            socket.promotion.holders.add_child(is_owned);
        }
    });
    // Once they count as shared. The child may get sockets of the new epoch too.
    let epoch = holders::begin_epoch();
    if wants_button {
        ancestors::equip_child(epoch, Library::current().map(|library| library.service.epoll.as_fd()));
    }
    crate::sys::errno::set(errno);
}

/// After a fork, in the parent.
pub extern "C" fn parent() {
    if !vfork::is_child() {
        ancestors::end_fork();
        Settled::end();
        hold_uncounted();
        // The child does not have the sockets that are made from here on.
        holders::begin_epoch();
    }
}

/// Makes a child by `call`, which gives its id, 0 in the child, or something negative, where no handler of
/// `pthread_atfork` runs.
pub fn around(call: impl FnOnce() -> isize) -> isize {
    if !is_registered() {
        return call();
    }
    prepare();
    let pid = call();
    if pid == 0 {
        child();
    } else {
        parent();
    }
    pid
}

/// Of what another thread has got between the count and the fork.
fn hold_uncounted() {
    table::for_each(0..=u32::MAX, |_, entry| {
        if let Entry::Socket(socket) = entry {
            socket.promotion.holders.hold_uncounted();
        }
    });
}

/// After a fork, in the child.
pub extern "C" fn child() {
    // None has begun in a process that no handler has seen, nor is what this forks the library's.
    if !ancestors::is_forking() {
        return;
    }
    vfork::restore_table();
    // What it would do may be forbidden, and there is nothing to be done.
    if !Library::has_retired() {
        let errno = crate::sys::errno::get();
        // SAFETY: the only thread of the child.
        unsafe { begin_anew() };
        hold_uncounted();
        crate::sys::errno::set(errno);
    }
    Settled::end();
}

/// The child is a new instance. Other threads of the parent may have been anywhere: every object that was ever made is
/// put right, whether or not a number leads to it, and what stands for what is read from the table, each word of
/// which is always true.
///
/// # Safety
/// In a fork child, whose only thread this is, before any other use of the library.
unsafe fn begin_anew() {
    vfork::on_fork_child();
    rdmasock_core::lock::forget_tid();
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
        Entry::Listener(listener) => listener.count(),
        Entry::Epoll(epoll) => epoll.inherit(fd),
        Entry::Socket(socket) => {
            if socket.numbers.fd.swap(fd, AcqRel) < 0
                && let Some(listener) = socket.promotion.listener()
            {
                listener.count();
            }
            // SAFETY: by the contract.
            unsafe { socket.control.get_unlocked() }.own.fds.push(fd);
        }
        Entry::None | Entry::Fresh { .. } => {}
    });
    // SAFETY: the only thread, and what is private is closed further down.
    if !unsafe { ancestors::remember_parent() } {
        holders::lose_sight();
    }
    holders::begin_life();
    // Before its descriptors are closed here.
    crate::config::verbs::after_fork();
    crate::config::load::after_fork();
    crate::sys::remains::after_fork();
    let log = crate::config::log::fd().unwrap_or(-1);
    // SAFETY: by the contract, and the old instance is forgotten, so nobody uses the fds that are closed.
    unsafe {
        Listener::forget_unused();
        privatefd::reset_in_fork_child(|fd| fd == log || ancestors::is_button(fd) || Listener::has_name(fd));
    }
    crate::config::log::after_fork_in_child();
    // SAFETY: the only thread.
    unsafe { crate::objects::link::life::after_fork() };
    connection::after_fork();
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
        std::mem::forget(std::mem::take(socket.wakes.interest.get_unlocked()));
        socket.wakes.interest.reset();
        std::mem::forget(std::mem::take(socket.control.get_unlocked()));
        socket.control.reset();
        socket.keepalive.reset_in_child();
        socket.blocking.after_fork();
    }
    let foreign = socket.may_be_on_link();
    socket.tx_inside.reset();
    socket.rx_inside.reset();
    if foreign {
        socket.promotion.set_stage(Stage::Pinned);
    }
    if foreign {
        socket.tx_mode.go(Sending::Inherited);
        socket.rx_mode.go(Receiving::Inherited);
    } else {
        socket.tx_mode.go(Sending::Closed);
        socket.rx_mode.go(Receiving::Closed);
    }
    socket.wakes.watched.reset(false);
    socket.link.store(std::ptr::null_mut(), Relaxed);
    socket.told.ledger.keep(socket.told.stats());
    socket.told.set_stats(None);
    socket.promotion.adopted.store(false, Relaxed);
    socket.promotion.asked.store(false, Relaxed);
    // What the parent has closed, and still has to bring to its end, is the parent's alone.
    socket.numbers.left_behind.store(false, Relaxed);
    socket.numbers.closed.reset(socket::closed::OPEN);
    socket.numbers.orphaned.store(false, Relaxed);
    socket.numbers.fd.store(-1, Release);
}
