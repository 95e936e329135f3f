//! What the program is to be told of its sends with MSG_ZEROCOPY, where the kernel alone cannot say it: which of them
//! were made on links, and are complete since, and which number the kernel's have to the program (`ids`). Not here: who
//! counts (`tx::zerocopy`), and who tells (`errqueue`).

mod ids;

pub use ids::{Completed, Ids};

use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::lock::Lock;

/// See the module.
pub struct Completions {
    /// Sends were made on links: the kernel's numbers may not be the program's any more.
    has_link_sends: AtomicBool,
    /// Another process may have made sends by the same socket, or something that no hook has seen: how many the kernel
    /// has numbered is not known.
    is_uncounted: AtomicBool,
    /// Something is to be read that the kernel does not have.
    is_unread: AtomicBool,
    /// How often the program has set SO_ZEROCOPY.
    sets: AtomicU32,
    kept: Lock<Kept>,
}

/// What is kept of a socket that uses MSG_ZEROCOPY.
#[derive(Default)]
pub struct Kept {
    /// From the first send on.
    ids: Option<Box<Ids>>,
    /// SO_ZEROCOPY, as it was at that epoch of forks, after so many `sets`.
    pub known: Option<(u32, u32, bool)>,
}

impl Kept {
    pub fn ids(&mut self) -> &mut Ids {
        self.ids.get_or_insert_default()
    }
}

impl Completions {
    pub const fn new() -> Self {
        Self {
            has_link_sends: AtomicBool::new(false),
            is_uncounted: AtomicBool::new(false),
            is_unread: AtomicBool::new(false),
            sets: AtomicU32::new(0),
            kept: Lock::new(Kept { ids: None, known: None }),
        }
    }

    /// For a new connection. The caller alone has it.
    pub fn reset(&self) {
        self.has_link_sends.store(false, Relaxed);
        self.is_uncounted.store(false, Relaxed);
        self.is_unread.store(false, Relaxed);
        if let Some(mut kept) = self.kept.lock() {
            *kept = Kept::default();
        }
    }

    /// Whether the kernel's numbers may not be the program's.
    #[inline]
    pub fn has_link_sends(&self) -> bool {
        self.has_link_sends.load(Acquire)
    }

    /// Whether something is to be read that the kernel does not have.
    #[inline]
    pub fn is_unread(&self) -> bool {
        self.is_unread.load(Acquire)
    }

    /// Whether sends have been counted, or may have been.
    pub fn is_in_use(&self) -> bool {
        self.is_uncounted() || self.kept.lock().is_none_or(|kept| kept.ids.is_some())
    }

    /// How many sends the kernel has numbered is not known from now on.
    pub fn set_uncounted(&self) {
        self.is_uncounted.store(true, Release);
    }

    /// Whether that is so.
    pub fn is_uncounted(&self) -> bool {
        self.is_uncounted.load(Acquire)
    }

    /// The program has set SO_ZEROCOPY.
    pub fn on_set(&self) {
        self.sets.fetch_add(1, Release);
    }

    /// How often it has.
    pub fn sets(&self) -> u32 {
        self.sets.load(Acquire)
    }

    /// What is kept. `None` in a signal handler above a use of it.
    pub fn change<R>(&self, change: impl FnOnce(&mut Kept) -> R) -> Option<R> {
        let mut kept = self.kept.lock()?;
        let result = change(&mut kept);
        self.is_unread
            .store(kept.ids.as_ref().is_some_and(|ids| ids.is_unread()), Release);
        Some(result)
    }

    /// As `change`, for a send that a link has taken.
    pub fn on_sent_by_link(&self) {
        self.has_link_sends.store(true, Release);
        if self.change(|kept| kept.ids().on_sent_by_link()).is_none() {
            self.set_uncounted();
        }
    }

    /// What is unread is lost. True if there was something.
    pub fn forget_unread(&self) -> bool {
        let was_unread = self.is_unread();
        self.change(|kept| kept.ids().forget_unread());
        was_unread
    }

    /// For the same socket in a fork child: what is unread is the parent's to read.
    ///
    /// # Safety
    /// The only thread.
    pub unsafe fn after_fork(&self) {
        self.set_uncounted();
        if let Some(mut kept) = self.kept.try_lock() {
            kept.known = None;
            if let Some(ids) = kept.ids.as_mut() {
                ids.forget_unread();
            }
        } else {
            // SAFETY: by the contract. The value is leaked, because another thread of the parent may have been changing
            // it.
            unsafe {
                std::mem::forget(std::mem::take(self.kept.get_unlocked()));
                self.kept.reset();
            }
        }
        self.is_unread.store(false, Relaxed);
    }
}
