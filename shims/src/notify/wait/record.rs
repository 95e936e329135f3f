//! The entry in `rdmasock stat` for a thread that sleeps until data or space comes over a link.

use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::os::thread;
use rdmasock_core::stats::{Asleep, Call, StatsPage};

/// Shows the thread as asleep, until the value is dropped.
pub struct Record {
    page: &'static StatsPage,
    waiter: WaiterId,
    thread: u32,
}

impl Record {
    /// Records that the thread is about to sleep as `waiter` in `call`. `stream`: the slot of the call's stream, if it
    /// is about one. `unread`: bytes of a sender that its reader has not read.
    pub fn begin(page: &'static StatsPage, waiter: WaiterId, call: Call, stream: Option<u32>, unread: u64) -> Self {
        let thread = thread::current().tid();
        if let Some(sleeper) = page.sleeper(waiter.0) {
            sleeper.begin(&Asleep {
                thread,
                call,
                stream,
                since: crate::sys::time::tick(),
                unread,
            });
        }
        Self { page, waiter, thread }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // A fork may have interrupted the sleep. In the child the record belongs to the parent's thread.
        let is_ours = thread::current().tid() == self.thread;
        if is_ours && let Some(sleeper) = self.page.sleeper(self.waiter.0) {
            sleeper.end(self.thread);
        }
    }
}
