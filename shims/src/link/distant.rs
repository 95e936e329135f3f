//! The end of a link to another host: the engine over the verbs plugin's queue pair, how it reaches the
//! waiters of this process, and who is woken by what completes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{AcqRel, Acquire, SeqCst},
};

use once_cell::race::OnceRef;
use rdmasock_core::fabric::LinkEnd;
use rdmasock_core::fabric::plugin::Info;
use rdmasock_core::fabric::remote::{End, Local};
use rdmasock_core::stats::Reason;
use rdmasock_core::wire::Message;

use super::Link;
use crate::library::Library;
use crate::service::Command;
use crate::verbs::{Pair, State};
use crate::wait::WaiterId;

/// The waiters of this process, as the engine tells them.
pub struct Here;

impl Local for Here {
    fn ring(&self, waiter: WaiterId) {
        Library::get().waiters.ring(waiter);
    }
}

/// See the module.
pub struct Distant {
    end: End<Pair, Here>,
    info: Info,
    link: OnceRef<'static, Link>,
    /// Threads that sleep on the completion descriptor themselves.
    watchers: AtomicU32,
    /// The service thread knows that the link has failed.
    told: AtomicBool,
}
