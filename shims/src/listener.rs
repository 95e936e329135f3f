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

use crate::library::Library;
use crate::mailbox::Command;
use crate::registry::Registry;

/// See the module. Never freed: there are few, and fork children inherit them.
#[repr(align(64))]
pub struct Listener {
    name: Lock<Option<names::Listener>>,
    page: Option<PeerPage>,
    holders: Option<HolderPage>,
    /// From a parent process: others may answer on the name.
    inherited: AtomicBool,
    /// Numbers of this process that stand for the socket, and connections accepted on it.
    pub fds: AtomicU32,
    /// The service thread of this process answers on the name.
    served: AtomicBool,
    /// What is accepted on it is to stay on TCP.
    pub keeps_on_tcp: AtomicBool,
}

static ALL: Registry<Listener> = Registry::new();

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
        ALL.add(Self {
            name: Lock::new(name),
            page: PeerPage::new().ok(),
            holders: HolderPage::new().ok(),
            inherited: AtomicBool::new(false),
            fds: AtomicU32::new(1),
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
        if let Some(page) = &self.page {
            page.register(own_pid(), id);
        }
    }

    /// The live instances.
    pub fn instances(&self) -> Vec<InstanceId> {
        self.page.as_ref().map(PeerPage::list).unwrap_or_default()
    }

    /// Whether other processes may be behind the name.
    pub fn is_inherited(&self) -> bool {
        self.inherited.load(Acquire)
    }

    /// An instance holds this connection.
    pub fn enter_holder(&self, tuple: &Tuple, id: &InstanceId) {
        if let Some(page) = &self.holders {
            page.enter(tuple, id);
        }
    }

    /// Who has said that he holds this connection.
    pub fn holder(&self, tuple: &Tuple) -> Option<InstanceId> {
        self.holders.as_ref()?.holder(tuple)
    }

    /// One more number stands for it.
    pub fn retain(&self) {
        self.fds.fetch_add(1, AcqRel);
    }

    /// A number was closed; with the last one the name is given up by this process.
    pub fn release(&self) {
        if self.fds.fetch_sub(1, AcqRel) == 1
            && let Some(mut name) = self.name.lock()
        {
            *name = None;
        }
    }

    /// In a fork child, for every listener: nobody answers yet. Who stands for it is counted anew, by
    /// [`Self::retain`].
    pub fn after_fork() {
        for listener in ALL.all() {
            listener.served.store(false, Release);
            listener.inherited.store(true, Release);
            listener.fds.store(0, Release);
            // SAFETY: only this thread exists in the child; a name in the middle of being closed is closed
            // either way.
            unsafe { listener.name.reset() };
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
