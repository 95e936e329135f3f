//! Whether a connection is promoted, or may be, and the state on which that decision depends.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8};

use rdmasock_core::stream::handshake::Role;
use rdmasock_core::stream::policy::Progress;

use super::attempts::Attempts;
use crate::objects::holders::Holders;
use crate::objects::listener::Listener;

/// Whether the socket may be promoted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// Not connected yet, or not checked yet.
    New = 0,
    /// Plain TCP below the threshold.
    Watching = 1,
    /// A promotion is under way, or done.
    Busy = 2,
    /// Stays on TCP for good, once the way back to TCP has ended.
    Pinned = 3,
    /// Stays on TCP for good, and no byte of the library's was ever in it: all its calls go to the kernel.
    Plain = 4,
}

impl Stage {
    fn of(code: u8) -> Self {
        match code {
            0 => Self::New,
            1 => Self::Watching,
            2 => Self::Busy,
            4 => Self::Plain,
            _ => Self::Pinned,
        }
    }
}

/// The state of a connection's promotion.
pub struct Promotion {
    stage: AtomicU8,
    role: AtomicU8,
    /// How much the connection has carried, compared with the threshold.
    pub progress: Progress,
    /// Attempts so far, and when the next one may begin.
    pub attempts: Attempts,
    /// Which processes hold the socket.
    pub holders: Holders,
    /// The listener that the connection was accepted on.
    listener: AtomicPtr<Listener>,
    /// The connector has asked, and the answer waits for this process's first use of the connection.
    pub asked: AtomicBool,
    /// In a fork child: this instance has taken the connection into its statistics.
    pub adopted: AtomicBool,
}

impl Promotion {
    /// Returns the state of a connection that was not checked yet.
    pub fn new() -> Self {
        Self {
            stage: AtomicU8::new(Stage::New as u8),
            role: AtomicU8::new(0),
            progress: Progress::default(),
            attempts: Attempts::default(),
            holders: Holders::default(),
            listener: AtomicPtr::new(std::ptr::null_mut()),
            asked: AtomicBool::new(false),
            adopted: AtomicBool::new(false),
        }
    }

    /// Resets the state for a new connection. The caller alone has it.
    pub fn reset(&self) {
        self.stage.store(Stage::New as u8, Relaxed);
        self.progress.reset();
        self.attempts.reset();
        self.holders.reset();
        self.listener.store(std::ptr::null_mut(), Relaxed);
        self.asked.store(false, Relaxed);
        self.adopted.store(false, Relaxed);
    }

    /// Returns the stage.
    #[inline]
    pub fn stage(&self) -> Stage {
        Stage::of(self.stage.load(Acquire))
    }

    /// Sets the stage.
    pub fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Release);
    }

    /// Sets the stage if it is `from`. True if it was `from`.
    pub fn exchange_stage(&self, from: Stage, to: Stage) -> bool {
        let (from, to) = (from as u8, to as u8);
        self.stage.compare_exchange(from, to, AcqRel, Acquire).is_ok()
    }

    /// Notes that the connection is on TCP after a failure. It may be promoted again after a pause, which doubles with
    /// each failure.
    pub fn retry_later(&self) {
        self.attempts.on_failure();
        self.set_stage(Stage::Watching);
    }

    /// Returns which end of the connection this is.
    pub fn role(&self) -> Role {
        if self.role.load(Relaxed) == 0 {
            Role::Connector
        } else {
            Role::Acceptor
        }
    }

    /// Notes that this end has connected.
    pub fn set_connector(&self) {
        self.role.store(0, Relaxed);
    }

    /// Notes that this end was accepted, on `listener` if that is known.
    pub fn set_acceptor(&self, listener: Option<&'static Listener>) {
        self.role.store(1, Relaxed);
        if let Some(listener) = listener {
            self.listener.store(std::ptr::from_ref(listener).cast_mut(), Relaxed);
        }
    }

    /// Returns the listener that the connection was accepted on; `None` if there is none, or it is not known.
    pub fn listener(&self) -> Option<&'static Listener> {
        // SAFETY: null, or a listener, which is never freed.
        unsafe { self.listener.load(Relaxed).as_ref() }
    }

    /// Returns [`Self::listener`] and removes it.
    pub fn take_listener(&self) -> Option<&'static Listener> {
        // SAFETY: null, or a listener, which is never freed.
        unsafe { self.listener.swap(std::ptr::null_mut(), Relaxed).as_ref() }
    }
}
