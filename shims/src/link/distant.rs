//! The end of a link to another host: the engine over the verbs plugin's queue pair, how it reaches the
//! waiters of this process, and who is woken by what completes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Release, SeqCst},
};

use once_cell::race::OnceRef;
use rdmasock_core::fabric::plugin::Info;
use rdmasock_core::fabric::remote::{End, Fault, Local};
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
    /// By which the service thread's epoll set knows the completion descriptor.
    token: AtomicU64,
    /// Threads that sleep on the completion descriptor themselves.
    watchers: AtomicU32,
    /// The service thread knows that the link has failed.
    told: AtomicBool,
}

impl Distant {
    /// The end over a connected pair, with arenas of this size. `None` without memory for it.
    pub(super) fn new(pair: Pair, arena_bytes: u64) -> Option<Self> {
        let info = pair.info().ok()?;
        // SAFETY: the link, with the end, is never freed; see `Link::new`.
        let end = unsafe { End::new(pair, Here, arena_bytes) }?;
        Some(Self {
            end,
            info,
            link: OnceRef::new(),
            token: AtomicU64::new(0),
            watchers: AtomicU32::new(0),
            told: AtomicBool::new(false),
        })
    }

    pub(super) fn set_link(&self, link: &'static Link) {
        // Nobody else has the link yet, so it is not set.
        let _ = self.link.set(link);
    }

    pub(super) fn end(&self) -> &End<Pair, Here> {
        &self.end
    }

    /// Facts about the queue pair.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// How the queue pair is.
    pub fn state(&self) -> State {
        self.end.queue_pair().state()
    }

    /// Takes in what has come, and sends what can be sent. True if there was something.
    #[inline]
    pub fn progress(&self) -> bool {
        match self.end.progress() {
            Ok(something) => {
                if something && self.end.has_message() {
                    self.ask_service();
                }
                something
            }
            Err(_) => {
                if !self.told.swap(true, AcqRel) {
                    self.ask_service();
                }
                false
            }
        }
    }

    /// The next completion makes the descriptor readable. False if the link is down.
    pub fn arm(&self) -> bool {
        self.end.arm().is_ok()
    }

    fn ask_service(&self) {
        if let Some(link) = self.link.get() {
            Library::get().service.submit(Command::Attend(link));
        }
    }

    /// From now on until the value is dropped this thread is woken by completions, and the service
    /// thread is not. Looks once more after this, then sleeps on the descriptor too. `None` if the link is
    /// down.
    pub fn take_duty(&self) -> Option<Duty<'_>> {
        self.link.get().filter(|l| l.is_alive())?;
        if self.watchers.fetch_add(1, SeqCst) == 0 {
            self.let_service_hear(false);
        }
        let duty = Duty(self);
        self.arm().then_some(duty)
    }

    fn let_service_hear(&self, on: bool) {
        let token = self.token.load(Acquire);
        Library::get().service.hear(self.fd(), token, on);
    }

    /// The number under which the service thread has the completion descriptor in its epoll set.
    pub fn set_token(&self, token: u64) {
        self.token.store(token, Release);
    }

    /// The next message on the side channel.
    pub fn take_message(&self) -> Option<Message> {
        self.end.take_message()
    }

    /// Why the link cannot be used further, if so.
    pub fn fault(&self) -> Option<Reason> {
        self.end.fault().map(|fault| match fault {
            Fault::Down(_) => Reason::LinkFailed,
            Fault::Violation(_) => Reason::Violation,
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the queue pair, which is given up only when no stream uses the link.
        unsafe { BorrowedFd::borrow_raw(self.info.completion_fd) }
    }

    /// Whether the service thread is to sleep on the completion descriptor.
    pub fn is_unwatched(&self) -> bool {
        self.watchers.load(Acquire) == 0
    }
}

/// See [`Distant::take_duty`].
pub struct Duty<'a>(&'a Distant);

impl Duty<'_> {
    /// Readable when something has completed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

impl Drop for Duty<'_> {
    fn drop(&mut self) {
        if self.0.watchers.fetch_sub(1, SeqCst) == 1 {
            self.0.let_service_hear(true);
        }
    }
}
