//! Whether a connection is promoted, or may be, and by whom that is decided.

use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use rdmasock_core::stream::handshake::Role;
use rdmasock_core::stream::policy::Progress;

use super::attempts::Attempts;
use crate::objects::holders::Holders;
use crate::objects::listener::Listener;

/// Whether the socket may be promoted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// Not connected yet, or not looked at.
    New = 0,
    /// Plain TCP below the threshold.
    Watching = 1,
    /// A promotion is under way, or done.
    Busy = 2,
    /// Stays on TCP for good, once the way back to it is over.
    Pinned = 3,
    /// Stays on TCP for good, and nothing of ours was ever in it: its calls are the kernel's alone.
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

/// See the module.
pub struct Promotion {
    stage: AtomicU8,
    role: AtomicU8,
    /// How far it is from being worth one.
    pub progress: Progress,
    /// How often it was to be promoted.
    pub attempts: Attempts,
    /// Which processes hold it.
    pub holders: Holders,
    /// The listening socket that it was accepted on.
    listener: AtomicPtr<Listener>,
    /// The connector asks, and the answer waits for this process's first use of the connection.
    pub asked: AtomicBool,
    /// In a fork child: it is this instance's by now.
    pub adopted: AtomicBool,
}

impl Promotion {
    /// Of a connection that is not looked at yet.
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

    /// For a new connection. The caller alone has it.
    pub fn reset(&self) {
        self.stage.store(Stage::New as u8, Relaxed);
        self.progress.reset();
        self.attempts.reset();
        self.holders.reset();
        self.listener.store(std::ptr::null_mut(), Relaxed);
        self.asked.store(false, Relaxed);
        self.adopted.store(false, Relaxed);
    }

    /// The stage.
    #[inline]
    pub fn stage(&self) -> Stage {
        Stage::of(self.stage.load(Acquire))
    }

    /// Sets the stage.
    pub fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Release);
    }

    /// Sets the stage if it is `from`. True if it was.
    pub fn exchange_stage(&self, from: Stage, to: Stage) -> bool {
        let (from, to) = (from as u8, to as u8);
        self.stage.compare_exchange(from, to, AcqRel, Acquire).is_ok()
    }

    /// The connection is on TCP after a failure, and may be promoted again in a while, which doubles each time.
    pub fn retry_later(&self) {
        self.attempts.on_failure();
        self.set_stage(Stage::Watching);
    }

    /// Which end of the connection this is.
    pub fn role(&self) -> Role {
        if self.role.load(Relaxed) == 0 {
            Role::Connector
        } else {
            Role::Acceptor
        }
    }

    /// This end has connected.
    pub fn set_connector(&self) {
        self.role.store(0, Relaxed);
    }

    /// This end has accepted, on `listener` if that is known.
    pub fn set_acceptor(&self, listener: Option<&'static Listener>) {
        self.role.store(1, Relaxed);
        if let Some(listener) = listener {
            self.listener.store(std::ptr::from_ref(listener).cast_mut(), Relaxed);
        }
    }

    /// The listener that it was accepted on.
    pub fn listener(&self) -> Option<&'static Listener> {
        // SAFETY: null, or a listener, which is never freed.
        unsafe { self.listener.load(Relaxed).as_ref() }
    }

    /// As [`Self::listener`], once.
    pub fn take_listener(&self) -> Option<&'static Listener> {
        // SAFETY: as there.
        unsafe { self.listener.swap(std::ptr::null_mut(), Relaxed).as_ref() }
    }
}
