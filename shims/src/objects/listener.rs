//! A listening TCP socket and the service name that goes with it.
//!
//! The name lives as long as some process holds the listening socket or a connection accepted on
//! it: forked workers inherit it,
//! together with the pages that list the instances which answer behind it, and who of them has which connection.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{AcqRel, Acquire, Release},
};

use rdmasock_core::ids::{InstanceId, Tuple};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::rendezvous::holders::HolderPage;
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::PeerPage;
use rustix::io::Errno;

use crate::objects::library::Library;
use crate::objects::mailbox::Command;
use crate::sys::registry::Registry;

/// See the module. Never freed, but one that nothing stands for any more becomes another listener.
#[repr(align(64))]
pub struct Listener {
    name: Lock<Option<names::Listener>>,
    pages: Lock<Pages>,
    /// From a parent process: others may answer on the name.
    inherited: AtomicBool,
    /// Numbers of this process that stand for the socket, and connections accepted on it.
    pub fds: AtomicU32,
    /// The service thread of this process answers on the name.
    served: AtomicBool,
    /// What is accepted on it is to stay on TCP.
    pub keeps_on_tcp: AtomicBool,
}

/// What a listener shares with the workers that inherit it.
#[derive(Default)]
struct Pages {
    peers: Option<PeerPage>,
    holders: Option<HolderPage>,
}

static ALL: Registry<Listener> = Registry::new();

/// Listeners that nothing stands for.
static FREE: Lock<Vec<&'static Listener>> = Lock::new(Vec::new());

impl Listener {
    /// Makes the name for a socket that has just begun to listen on `fd`. Where that is not
    /// possible the listener works as ever, and nobody is promoted.
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
        let listener = FREE.lock().and_then(|mut free| free.pop()).unwrap_or_else(Self::blank);
        listener.inherited.store(false, Release);
        listener.served.store(false, Release);
        listener.keeps_on_tcp.store(false, Release);
        if let Some(mut pages) = listener.pages.lock() {
            *pages = Pages {
                peers: PeerPage::new().ok(),
                holders: HolderPage::new().ok(),
            };
        }
        if let Some(mut place) = listener.name.lock() {
            *place = name;
        }
        // Last: whoever has the object from before does nothing with it until then.
        listener.fds.store(1, Release);
        listener
    }

    /// One that nothing stands for.
    fn blank() -> &'static Self {
        ALL.add(Self {
            name: Lock::new(None),
            pages: Lock::new(Pages::default()),
            inherited: AtomicBool::new(false),
            fds: AtomicU32::new(0),
            served: AtomicBool::new(false),
            keeps_on_tcp: AtomicBool::new(false),
        })
    }

    /// All of this process.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        ALL.all()
    }

    /// The name's fd.
    pub fn name(&self) -> Option<BorrowedFd<'static>> {
        let name = self.name.lock()?;
        // SAFETY: closed only when the last number of the listener is, and the service thread's
        // epoll forgets it then by itself.
        name.as_ref()
            .map(|n| unsafe { BorrowedFd::borrow_raw(n.as_fd().as_raw_fd()) })
    }

    /// The next connection of somebody who asks.
    pub fn accept_asker(&self) -> Result<Option<Channel>, Errno> {
        let name = self.name.lock();
        let name = name.as_ref().and_then(|name| name.as_ref());
        name.map_or(Ok(None), |name| name.accept())
    }

    /// This process has accepted a connection: its service thread answers for this listener, and for the others.
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

    /// Enters an instance as one that may hold connections of this listener.
    pub fn enter(&self, id: &InstanceId) {
        if let Some(page) = self.pages.lock().as_ref().and_then(|pages| pages.peers.as_ref()) {
            page.register(own_pid(), id);
        }
    }

    /// The live instances.
    pub fn instances(&self) -> Vec<InstanceId> {
        let pages = self.pages.lock();
        let page = pages.as_ref().and_then(|pages| pages.peers.as_ref());
        page.map(PeerPage::list).unwrap_or_default()
    }

    /// Whether other processes may be behind the name.
    pub fn is_inherited(&self) -> bool {
        self.inherited.load(Acquire)
    }

    /// An instance holds this connection.
    pub fn enter_holder(&self, tuple: &Tuple, id: &InstanceId) {
        if let Some(page) = self.pages.lock().as_ref().and_then(|pages| pages.holders.as_ref()) {
            page.enter(tuple, id);
        }
    }

    /// Who has said that he holds this connection.
    pub fn holder(&self, tuple: &Tuple) -> Option<InstanceId> {
        self.pages.lock()?.holders.as_ref()?.holder(tuple)
    }

    /// One more number stands for it. False, and none does, if it was given up meanwhile.
    pub fn retain(&self) -> bool {
        let one_more = |fds: u32| (fds > 0).then_some(fds + 1);
        self.fds.fetch_update(AcqRel, Acquire, one_more).is_ok()
    }

    /// In a fork child, where all are counted anew.
    pub fn count(&self) {
        self.fds.fetch_add(1, AcqRel);
    }

    /// A number was closed; with the last one this process gives up the name and what goes with it.
    pub fn release(&'static self) {
        if self.fds.fetch_sub(1, AcqRel) != 1 {
            return;
        }
        if let Some(mut name) = self.name.lock() {
            // A fork child may keep the name open, and with it the service thread's registration.
            if let (Some(name), Some(library)) = (name.as_ref(), Library::current()) {
                library.service.forget(name.as_fd());
            }
            *name = None;
        }
        if let Some(mut pages) = self.pages.lock() {
            *pages = Pages::default();
        }
        if let Some(mut free) = FREE.lock() {
            free.push(self);
        }
    }

    /// In a fork child, for every listener: nobody answers yet. Who stands for it is counted anew, by
    /// [`Self::count`].
    pub fn after_fork() {
        ALL.all().for_each(Self::inherit);
        // SAFETY: as above.
        unsafe {
            std::mem::forget(std::mem::take(FREE.get_unlocked()));
            FREE.reset();
        }
    }

    fn inherit(&self) {
        let is_used = self.fds.swap(0, AcqRel) > 0;
        self.served.store(false, Release);
        self.inherited.store(true, Release);
        // SAFETY: only this thread exists in the child; a name in the middle of being closed is closed
        // either way.
        unsafe { self.name.reset() };
        if self.pages.try_lock().is_none() {
            // SAFETY: as above. A thread of the parent was looking at the pages, or changing those of an unused one:
            // then they are leaked, not used.
            unsafe {
                if !is_used {
                    std::mem::forget(std::mem::take(self.pages.get_unlocked()));
                }
                self.pages.reset();
            }
        }
    }

    /// In a fork child, once all are counted: the names that stay are those that something stands for.
    ///
    /// # Safety
    /// The only thread; and the numbers of the other names are closed next.
    pub unsafe fn forget_unused() {
        for listener in ALL.all().filter(|l| l.fds.load(Acquire) == 0) {
            // SAFETY: by the contract. It may have been in the middle of being dropped: leaked, not used.
            unsafe { std::mem::forget(std::mem::take(listener.name.get_unlocked())) };
            if let (Some(mut pages), Some(mut free)) = (listener.pages.lock(), FREE.lock()) {
                *pages = Pages::default();
                free.push(listener);
            }
        }
    }

    /// In a fork child: whether this is the number of a name that stays.
    ///
    /// # Safety
    /// The only thread.
    pub unsafe fn has_name(number: c_int) -> bool {
        ALL.all().any(|listener| {
            // SAFETY: by the contract.
            let name = unsafe { listener.name.get_unlocked() };
            name.as_ref().is_some_and(|n| n.as_fd().as_raw_fd() == number)
        })
    }
}

/// The local port of a TCP socket; `None` for any other.
fn local_port(fd: c_int) -> Option<u16> {
    // SAFETY: the program's own fd, in the middle of its call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let local = std::net::SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
    Some(local.port())
}

fn own_pid() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
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
            assert!(listener.pages.lock().unwrap().peers.is_some());
            listener.release();
            std::ptr::from_ref(listener).addr()
        });
        // Other tests may have some at the same time.
        assert!(used.collect::<HashSet<_>>().len() < 50);
        let listener = Listener::new(socket.as_fd().as_raw_fd());
        assert!(listener.instances().is_empty() && !listener.is_inherited());
    }

    #[test]
    fn a_fork_child_keeps_pages_that_another_thread_was_reading() {
        let listener = Listener::blank();
        for (fds, has_pages) in [(1, true), (0, false)] {
            listener.fds.store(fds, Release);
            let mut pages = listener.pages.lock().unwrap();
            pages.peers = PeerPage::new().ok();
            std::mem::forget(pages);
            listener.inherit();
            assert_eq!(listener.pages.lock().unwrap().peers.is_some(), has_pages);
        }
    }

    #[test]
    fn nothing_stands_for_a_closed_listener_again() {
        let listener = Listener::blank();
        assert!(!listener.retain());
        listener.count();
        assert!(listener.retain());
    }
}
