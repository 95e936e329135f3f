//! What `rdmasock stat` shows of a thread that sleeps until something comes over a link, or there is room on it.

use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::os::thread;
use rdmasock_core::stats::{Asleep, Call, StatsPage};

/// The thread is shown as asleep for as long as the value lives.
pub struct Record {
    page: &'static StatsPage,
    waiter: WaiterId,
    thread: u32,
}

impl Record {
    /// The thread is about to sleep as `waiter`, in a call on the stream with this slot if it is on one, of which the
    /// reader has not read `unread` bytes if it is a sender.
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
        // In a child of a fork that has interrupted the sleep the record is the parent's thread's.
        let is_ours = thread::current().tid() == self.thread;
        if is_ours && let Some(sleeper) = self.page.sleeper(self.waiter.0) {
            sleeper.end(self.thread);
        }
    }
}
