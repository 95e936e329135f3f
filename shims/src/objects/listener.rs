//! A listening TCP socket and its *service name*. That is an abstract AF_UNIX name, made from the port, by which
//! connectors on the same host ask for promotions.
//!
//! The name lives as long as some process holds the listening socket, or a connection accepted on it. Forked workers
//! inherit the name and a page of shared memory, in which each instance records the connections that it holds.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rdmasock_core::ids::{InstanceId, Tuple};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::HolderPage;
use rustix::io::Errno;

use crate::objects::library::Library;
use crate::objects::mailbox::Command;
use crate::sys::registry::Registry;

/// A listener of this process, never freed. When [`Self::fds`] has come to 0, [`Self::new`] reuses the object for
/// another listening socket.
#[derive(Default)]
#[repr(align(64))]
pub struct Listener {
    name: Lock<Option<names::Listener>>,
    /// The page that the listener shares with the forked workers that inherit it.
    holders: Lock<Option<HolderPage>>,
    /// Number of this process's fds of the listening socket, plus the number of its open connections that were accepted
    /// on that socket.
    pub fds: AtomicU32,
    /// Whether the service thread of this process answers on the name, or is about to.
    served: AtomicBool,
    /// Whether connections accepted on this socket stay on TCP.
    pub keeps_on_tcp: AtomicBool,
}

static ALL: Registry<Listener> = Registry::new();

/// Listeners whose `fds` is 0, for reuse.
static FREE: Lock<Vec<&'static Listener>> = Lock::new(Vec::new());

impl Listener {
    /// Makes the service name for the listening socket `fd`. If that fails, the socket listens all the same, and no
    /// connection accepted on it is promoted.
    pub fn new(fd: c_int) -> &'static Self {
        let name = local_port(fd).and_then(|port| match names::Listener::service(port) {
            Ok((listener, k)) => {
                tracing::debug!(target: "rdmasock", port, k, "service name");
                Some(listener)
            }
            Err(error) => {
                tracing::warn!(target: "rdmasock", port, %error, "no service name");
                None
            }
        });
        let listener = FREE.lock().and_then(|mut free| free.pop());
        let listener = listener.unwrap_or_else(|| ALL.add(Self::default()));
        listener.served.store(false, Release);
        listener.keeps_on_tcp.store(false, Release);
        if let Some(mut holders) = listener.holders.lock() {
            *holders = HolderPage::new().ok();
        }
        if let Some(mut place) = listener.name.lock() {
            *place = name;
        }
        // Stored last. Until then `retain` returns false to a caller with a pointer from an earlier use of the object.
        listener.fds.store(1, Release);
        listener
    }

    /// Returns all listener objects of this process, in use or not.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        ALL.all()
    }

    /// Returns the fd of the service name; `None` if there is no name.
    pub fn name(&self) -> Option<BorrowedFd<'static>> {
        let name = self.name.lock()?;
        // SAFETY: only `release` and `forget_unused` give the name up, when no fd or connection of this process is
        // left. Before `release` closes the name's fd, it removes the fd from the service thread's epoll set.
        name.as_ref()
            .map(|n| unsafe { BorrowedFd::borrow_raw(n.as_fd().as_raw_fd()) })
    }

    /// Accepts the next connection to the name, from a process that asks for a promotion. `None`: there is no name, or
    /// no connection waits. `Err` is the errno of `accept4`.
    pub fn accept_asker(&self) -> Result<Option<Channel>, Errno> {
        let name = self.name.lock();
        let name = name.as_ref().and_then(|name| name.as_ref());
        name.map_or(Ok(None), |name| name.accept())
    }

    /// Notes that this process has accepted a connection. The first such call makes the service thread answer on the
    /// names of all listeners. If the thread cannot be started, the next call tries again.
    #[inline]
    pub fn on_accept(&'static self) {
        if !self.served.load(Acquire)
            && let Some(library) = Library::ensure()
            && !self.served.swap(true, AcqRel)
            && !library.service.submit(Command::Listen)
        {
            self.served.store(false, Release);
        }
    }

    /// Records that the instance `id` holds the connection `tuple`.
    pub fn enter_holder(&self, tuple: &Tuple, id: &InstanceId) {
        if let Some(page) = self.holders.lock().as_deref().and_then(Option::as_ref) {
            page.enter(tuple, id);
        }
    }

    /// Returns the instance that has recorded itself as the holder of the connection. `None` if the shared page has no
    /// entry for it.
    pub fn holder(&self, tuple: &Tuple) -> Option<InstanceId> {
        self.holders.lock()?.as_ref()?.holder(tuple)
    }

    /// Counts one more fd or accepted connection. False, without counting it, if the listener is no longer in use.
    pub fn retain(&self) -> bool {
        let one_more = |fds: u32| (fds > 0).then_some(fds + 1);
        self.fds.fetch_update(AcqRel, Acquire, one_more).is_ok()
    }

    /// Counts one more fd or accepted connection in a fork child, where all counts start again at 0.
    pub fn count(&self) {
        self.fds.fetch_add(1, AcqRel);
    }

    /// Counts one fd or accepted connection less. With the last one, this process gives up the name and the page.
    pub fn release(&'static self) {
        if self.fds.fetch_sub(1, AcqRel) != 1 {
            return;
        }
        if let Some(mut name) = self.name.lock() {
            // Closing alone would not remove the name from the service thread's epoll set: a fork child may keep the
            // name open.
            if let (Some(name), Some(library)) = (name.as_ref(), Library::current()) {
                library.service.forget(name.as_fd());
            }
            *name = None;
        }
        if let Some(mut holders) = self.holders.lock() {
            *holders = None;
        }
        if let Some(mut free) = FREE.lock() {
            // Without memory for the list, the object is never used again.
            let _ = free.try_reserve(1).map(|()| free.push(self));
        }
    }

    /// Resets every listener in a fork child, where no thread answers on the names yet. [`Self::count`] then counts the
    /// fds again.
    pub fn after_fork() {
        ALL.all().for_each(Self::inherit);
        // SAFETY: only this thread exists in the child. The vector is leaked, since a thread of the parent may have
        // been changing it.
        unsafe {
            std::mem::forget(std::mem::take(FREE.get_unlocked()));
            FREE.reset();
        }
    }

    fn inherit(&self) {
        let is_used = self.fds.swap(0, AcqRel) > 0;
        self.served.store(false, Release);
        // SAFETY: only this thread exists in the child, so no other thread holds the lock. A thread changes the name
        // only while `fds` is 0. If a thread of the parent did so at the fork, the child has no fd of the listener
        // either, and `forget_unused` gives the name up without reading it.
        unsafe { self.name.reset() };
        if self.holders.try_lock().is_none() {
            // SAFETY: only this thread exists in the child. At the fork a thread of the parent held the lock. It was
            // reading the page of a listener in use, or changing the page of an unused listener. The page of an unused
            // listener is leaked and not read.
            unsafe {
                if !is_used {
                    std::mem::forget(std::mem::take(self.holders.get_unlocked()));
                }
                self.holders.reset();
            }
        }
    }

    /// Gives up the names and pages of all listeners whose count is still 0. To be called in a fork child once all fds
    /// are counted.
    ///
    /// # Safety
    /// The caller is the only thread, and closes the fds of the given-up names next.
    pub unsafe fn forget_unused() {
        for listener in ALL.all().filter(|l| l.fds.load(Acquire) == 0) {
            // SAFETY: by the contract, no other thread uses the lock. The name is leaked and not read, since a thread
            // of the parent may have been dropping it.
            unsafe { std::mem::forget(std::mem::take(listener.name.get_unlocked())) };
            if let (Some(mut holders), Some(mut free)) = (listener.holders.lock(), FREE.lock()) {
                *holders = None;
                let _ = free.try_reserve(1).map(|()| free.push(listener));
            }
        }
    }

    /// Returns whether `number` is the fd of a name that the fork child keeps.
    ///
    /// # Safety
    /// The caller is the only thread.
    pub unsafe fn has_name(number: c_int) -> bool {
        ALL.all().any(|listener| {
            // SAFETY: by the contract, no other thread uses the lock.
            let name = unsafe { listener.name.get_unlocked() };
            name.as_ref().is_some_and(|n| n.as_fd().as_raw_fd() == number)
        })
    }
}

/// Returns the local port of a TCP socket; `None` for any other fd.
fn local_port(fd: c_int) -> Option<u16> {
    // SAFETY: the program passes the fd to the call that is under way, and so keeps it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let local = std::net::SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
    Some(local.port())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_closed_listener_keeps_nothing_and_becomes_another() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let used = (0..100).map(|_| {
            let listener = Listener::new(socket.as_fd().as_raw_fd());
            assert!(listener.retain() && listener.name().is_some());
            listener.release();
            assert!(listener.holders.lock().unwrap().is_some());
            listener.release();
            std::ptr::from_ref(listener).addr()
        });
        // Tests that run in parallel may hold some of the objects.
        assert!(used.collect::<HashSet<_>>().len() < 50);
    }

    #[test]
    fn a_fork_child_keeps_a_page_that_another_thread_was_reading() {
        let listener = ALL.add(Listener::default());
        for (fds, has_page) in [(1, true), (0, false)] {
            listener.fds.store(fds, Release);
            let mut holders = listener.holders.lock().unwrap();
            *holders = HolderPage::new().ok();
            std::mem::forget(holders);
            listener.inherit();
            assert_eq!(listener.holders.lock().unwrap().is_some(), has_page);
        }
    }

    #[test]
    fn nothing_stands_for_a_closed_listener_again() {
        let listener = ALL.add(Listener::default());
        assert!(!listener.retain());
        listener.count();
        assert!(listener.retain());
    }
}
