//! The library's work at a fork(): the child becomes a new instance (docs/design/processes.md).
//!
//! The sockets that the child inherits are marked as held by several processes (`objects/holders`). A stream that the
//! parent has on a link stays the parent's; in the child the socket is in mode Foreign. A child that uses such a socket
//! first waits until the parent has [taken the stream back](reclaim) to TCP.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use rdmasock_core::os::privatefd::{self, Settled};
use rdmasock_core::stream::connection;

use crate::notify::table::{self, Entry};
use crate::notify::{epoll::Epoll, reset};
use crate::objects::socket::{self, Mode, Move, Socket, Stage};
use crate::objects::{holders, library::Library, listener::Listener};
use crate::sys::{errno, vfork};

static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers the fork handlers and `at_exit`, once.
pub(crate) fn register(at_exit: extern "C" fn()) {
    if REGISTERED.swap(true, AcqRel) {
        return;
    }
    holders::prepare();
    // SAFETY: the handlers are functions, valid for the life of the process.
    unsafe {
        libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
        libc::atexit(at_exit);
    }
}

/// Runs before a fork. Counts the child as a holder of each connection. Until the fork is done, other threads make and
/// move no private fd (`Settled`).
pub(crate) extern "C" fn prepare() {
    if vfork::is_child() {
        return;
    }
    holders::begin_fork();
    count_holders();
    // From here to the fork no private fd is still at a low number, on the way to its private one. The child would take
    // such an fd for the program's, and keep it open.
    Settled::begin().hold();
}

/// Counts the child as a holder of each connection. Gives the child the button of a doorbell of this process, if the
/// child may need it.
fn count_holders() {
    if Library::has_retired() {
        return;
    }
    let errno = errno::get();
    let mut wants_button = false;
    table::for_each(0..=u32::MAX, |fd, entry| {
        // The child may consume an event of a shared epoll set that was meant for this process, and then wakes this
        // process by the button. The doorbell also reports to this process that a child that holds sockets is gone.
        wants_button |= matches!(entry, Entry::Epoll(_) | Entry::Socket(_));
        if let Entry::Socket(socket) = entry
            && socket.numbers.fd.load(Acquire) == fd
        {
            // In mode Foreign the stream belongs to an ancestor, and the child has to ask that ancestor for it, not
            // this process.
            let is_owned = || socket.may_be_on_link() && socket.tx_mode.load(Acquire) != Mode::Foreign;
            socket.promotion.holders.add_child(is_owned);
        }
    });
    // An epoch is a number that grows with each fork. The new epoch begins after the child was counted as a holder of
    // every socket in the table. Another thread may open a socket between here and the fork. The child gets that socket
    // too, so `hold_uncounted` marks as shared each socket that was not counted.
    let epoch = holders::begin_epoch();
    if wants_button {
        holders::equip_child(epoch, Library::current().map(|library| library.service.epoll.as_fd()));
    }
    errno::set(errno);
}

/// Runs after a fork, in the parent.
pub(crate) extern "C" fn parent() {
    if !vfork::is_child() {
        holders::end_fork();
        Settled::end();
        hold_uncounted();
        // Ends the epoch that `count_holders` began: the child does not have sockets that are opened from here on.
        holders::begin_epoch();
    }
}

/// Makes a child by `call`, and runs the fork handlers before and after it. For calls at which libc runs no handler of
/// `pthread_atfork`. `call` returns the child's id, 0 in the child, or a negative value on failure.
pub(crate) fn around(call: impl FnOnce() -> isize) -> isize {
    // The handlers are registered with the first instance. Before that, the library has no object that a fork has to
    // change.
    if !REGISTERED.load(Acquire) {
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

/// Marks as shared the sockets that `count_holders` has not counted: another thread opened them between the count and
/// the fork.
fn hold_uncounted() {
    table::for_each(0..=u32::MAX, |_, entry| {
        if let Entry::Socket(socket) = entry {
            socket.promotion.holders.hold_uncounted();
        }
    });
}

/// Runs after a fork, in the child.
pub(crate) extern "C" fn child() {
    // If `prepare` has not counted this fork (`begin_fork`), there is nothing to do. That is so if libc ran no
    // handlers, or if the forking process only borrows the library's memory (`vfork`).
    if !holders::is_forking() {
        return;
    }
    vfork::restore_table();
    // A retired library has nothing to do here, and its system calls may be forbidden by a filter.
    if !Library::has_retired() {
        let errno = errno::get();
        // SAFETY: this is the only thread of the child.
        unsafe { begin_anew() };
        hold_uncounted();
        errno::set(errno);
    }
    Settled::end();
}

/// Makes the child a new instance.
///
/// Other threads of the parent may have been at any instruction when it forked. So every object that was ever made is
/// reset, whether or not an fd leads to it. Then the fds of each object are read from the table, whose words are valid
/// at any moment.
///
/// # Safety
/// In a fork child, whose only thread this is, before any other use of the library.
unsafe fn begin_anew() {
    vfork::on_fork_child();
    rdmasock_core::os::thread::current().forget_tid();
    // SAFETY: this function's contract is each callee's contract: the only thread, before any other use.
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
        Entry::Epoll(epoll) => epoll.retain(fd),
        Entry::Socket(socket) => {
            if socket.numbers.fd.swap(fd, AcqRel) < 0
                && let Some(listener) = socket.promotion.listener()
            {
                listener.count();
            }
            // SAFETY: this is the only thread, by the contract.
            unsafe { socket.control.get_unlocked() }.own.fds.push(fd);
        }
        Entry::None | Entry::Fresh { .. } => {}
    });
    // SAFETY: this is the only thread. The buttons of the ancestors' doorbells are still open: private fds are closed
    // further down.
    if !unsafe { holders::remember_parent() } {
        holders::note(holders::LOST);
    }
    holders::begin_life();
    // The plugin is notified while the child's copies of its descriptors are still open: they are closed further down.
    crate::config::verbs::after_fork();
    crate::config::spin::after_fork();
    crate::objects::mailbox::after_fork();
    let log = crate::config::log::fd().unwrap_or(-1);
    // SAFETY: this is the only thread, by the contract. The child does not use the parent's instance any more, so no
    // code uses the fds that are closed.
    unsafe {
        Listener::forget_unused();
        privatefd::reset_in_fork_child(|fd| fd == log || holders::is_button(fd) || Listener::has_name(fd));
    }
    // SAFETY: this is the only thread.
    unsafe { crate::objects::link::after_fork() };
    connection::after_fork();
    Library::forget();
}

/// Forgets the stream and the fds of one socket. The stream is the parent's. `begin_anew` then reads the child's fds of
/// the socket from the table.
///
/// # Safety
/// In a fork child only, before any other use of the socket.
unsafe fn forget_stream(socket: &'static Socket) {
    // SAFETY: this is the only thread, before any other use, by the contract.
    unsafe {
        socket.tx.renew();
        socket.rx.renew();
        socket.wakes.interest.renew();
        socket.control.renew();
        socket.keepalive.reset_in_child();
        socket.blocking.after_fork();
    }
    let foreign = socket.may_be_on_link();
    socket.tx_inside.reset();
    socket.rx_inside.reset();
    if foreign {
        socket.promotion.set_stage(Stage::Pinned);
        socket.tx_mode.go(Move::Inherited);
        socket.rx_mode.go(Move::Inherited);
    } else {
        socket.tx_mode.go(Move::Closed);
        socket.rx_mode.go(Move::Closed);
    }
    socket.wakes.watched.reset(false);
    socket.link.store(std::ptr::null_mut(), Relaxed);
    socket.told.ledger.keep(socket.told.stats());
    socket.told.set_stats(None);
    socket.told.shown.store(false, Relaxed);
    socket.promotion.adopted.store(false, Relaxed);
    socket.promotion.asked.store(false, Relaxed);
    // If the program has closed a connection that the library still has to finish, the parent finishes it, and the
    // child does not.
    socket.numbers.left_behind.store(false, Relaxed);
    socket.numbers.closed.reset(socket::closed::OPEN);
    socket.numbers.orphaned.store(false, Relaxed);
    socket.numbers.fd.store(-1, Release);
}

/// Waits until no other process has the socket's stream on a link: the owner takes the stream back to TCP. If the owner
/// does not answer, resets the connection. Returns at once if the stream is not another process's.
#[inline]
pub(crate) fn reclaim(socket: &'static Socket) {
    if socket.tx_mode.load(Acquire) == Mode::Foreign {
        reclaim_slow(socket);
    }
}

#[cold]
fn reclaim_slow(socket: &'static Socket) {
    let errno = errno::get();
    if !socket.promotion.holders.await_return() {
        // The owner may still write a marker, or data may be on the link. If this process continued on TCP, the data
        // would have a gap, which is worse than a reset.
        tracing::warn!(target: "rdmasock", slot = socket.slot, "the process that has it on a link does not answer, or was killed: reset");
        reset::reset_after_unsent(socket);
    }
    socket.tx_mode.go(Move::Reclaimed);
    socket.rx_mode.go(Move::Reclaimed);
    errno::set(errno);
}
