//! Memory of the program that a link's device reaches for as long as a call waits.

use rdmasock_core::fabric::remote::qp::{Key, QueuePair, Region, Role};
use rdmasock_core::os::thread;
use rdmasock_core::stats::Event;

use crate::budget;
use crate::library::Library;
use crate::link::Remote;

/// See the module. The registration ends when this is dropped.
pub struct Pinned {
    remote: &'static Remote,
    region: Region,
    len: usize,
    cost: u64,
    thread: u32,
}

impl Pinned {
    /// As much as may be, from the beginning of `len` bytes of memory, but at least `least` bytes. `None` if that is
    /// not to be had: the bytes go by the rings, as is counted.
    ///
    /// # Safety
    /// Until this is dropped the memory is the program's to give to the device, in this role.
    pub unsafe fn new(remote: &'static Remote, memory: *mut u8, len: usize, least: usize, role: Role) -> Option<Self> {
        let library = Library::get();
        let pinned = library
            .pinned
            .take(len, least, budget::limit())
            .and_then(|(len, cost)| {
                // SAFETY: by the contract.
                match unsafe { remote.end().qp().register(memory, len, role) } {
                    Ok(region) => Some(Self {
                        remote,
                        region,
                        len,
                        cost,
                        thread: thread::current().tid(),
                    }),
                    Err(_) => {
                        library.pinned.give_back(cost);
                        None
                    }
                }
            });
        if pinned.is_none() {
            library.stats.count(Event::DirectUnpinned);
        }
        pinned
    }

    /// By what the device knows it.
    pub fn key(&self) -> &Key {
        &self.region.key
    }

    /// Bytes that the device reaches.
    pub fn len(&self) -> usize {
        self.len
    }

    /// A fork child goes on with the call: it has neither the link nor the registration.
    pub fn is_of_a_parent(&self) -> bool {
        self.thread != thread::current().tid()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.is_of_a_parent() {
            self.remote.end().qp().deregister(self.region);
            Library::get().pinned.give_back(self.cost);
        }
    }
}
