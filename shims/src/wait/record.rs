//! What `rdmasock stat` shows of a thread that sleeps until something comes over a link, or there is room on it.

use rdmasock_core::stats::{Asleep, Call, StatsPage};
use rdmasock_core::thread;

use super::WaiterId;
use crate::library::Library;
use crate::socket::Socket;

/// The thread is shown as asleep for as long as the value lives.
pub struct Record {
    page: &'static StatsPage,
    waiter: WaiterId,
    thread: u32,
}

impl Record {
    /// The thread is about to sleep as `waiter`, in a call on `socket` if it is on one.
    pub fn begin(waiter: WaiterId, call: Call, socket: Option<&'static Socket>) -> Self {
        let page = Library::get().stats;
        let thread = thread::current().tid();
        if let Some(sleeper) = page.sleeper(waiter.0) {
            let sends = socket.filter(|_| call == Call::Send);
            sleeper.begin(&Asleep {
                thread,
                call,
                stream: socket.map(|s| s.slot),
                since: crate::time::tick(),
                unread: sends.and_then(crate::tx::unread).unwrap_or(0),
            });
        }
        Self {
            page,
            waiter,
            thread,
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // In a child of a fork that has interrupted the sleep the record is the parent's.
        let is_ours = Library::current().is_some_and(|l| std::ptr::eq(l.stats, self.page));
        if is_ours && let Some(sleeper) = self.page.sleeper(self.waiter.0) {
            sleeper.end(self.thread);
        }
    }
}
