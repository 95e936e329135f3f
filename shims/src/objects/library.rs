//! The instance: all state that exists once in a process image with the library. Also the program's name, and the
//! reason why further connections of the process stay on TCP, if there is one.
//!
//! The instance is made at the first call that needs it (`startup`), and is never freed. A fork child forgets its
//! parent's instance, and makes its own at the first call that needs one (`notify::fork`).

use std::net::SocketAddr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU16};

use once_cell::race::{OnceBox, OnceRef};
use rdmasock_core::ids::InstanceId;
use rdmasock_core::os::heap;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stats::{Direction, Event, Reason, StatsPage};
use rdmasock_core::stream::handshake::Role;
use rdmasock_core::stream::policy::Threshold;

use crate::config::arenas::{Budget, Pieces};
use crate::config::config;
use crate::config::reach::Reach;
use crate::config::rules::{Decision, Rules};
use crate::objects::mailbox::{Mailbox, Offers};
use crate::objects::waiters::Waiters;

/// The instance of this process.
pub(crate) struct Library {
    /// Rules that say which connections may leave TCP; `None` if they could not be read.
    pub rules: Option<&'static Rules>,
    /// Which other hosts can be reached by RDMA.
    pub reach: &'static Reach,
    /// Base name of the program.
    pub program: String,
    /// The instance's random id.
    pub id: InstanceId,
    /// The counters that `rdmasock stat` shows.
    pub stats: &'static StatsPage,
    /// Keeps the file of the counters open.
    pub _stats_fd: Option<PrivateFd>,
    /// The waiters of this process: their doorbells and sleep flags.
    pub waiters: Waiters,
    /// The one-time offers of links to other instances.
    pub offers: Offers,
    /// The budget for memory of the program that devices access, bytes.
    pub pinned: Budget,
    /// The pieces of the memory of the registered allocator (librdmasock_alloc.so) that devices know. Their bytes count
    /// in `pinned`.
    pub arenas: Pieces,
    /// The commands for the service thread.
    pub service: Mailbox,
}

/// A function that makes an instance. `None` if that fails, or if no connection is to be accelerated.
pub(crate) type Build = fn() -> Option<Library>;

static CURRENT: AtomicPtr<Library> = AtomicPtr::new(std::ptr::null_mut());
/// Whether this process, or one that it was forked from, has made an instance.
static HAD: AtomicBool = AtomicBool::new(false);
/// The function that makes an instance, set by the first call of [`Library::is_on`] that has to make an instance.
static BUILD: OnceRef<'static, Build> = OnceRef::new();
/// Whether acceleration is off: the user or `Library::retire` has switched it off, or the instance could not be made.
static OFF: AtomicBool = AtomicBool::new(false);
/// [`Library::retire`] was called.
static RETIRED: AtomicBool = AtomicBool::new(false);

impl Library {
    /// Returns the instance. There is one, since each caller has a socket, a link or another object that is made only
    /// after the instance. The exception is a fork child with an inherited object: it makes its own instance here, and
    /// waits for fds or memory if there are none.
    #[inline]
    pub(crate) fn get() -> &'static Library {
        Self::current().unwrap_or_else(Self::fallback)
    }

    /// Returns the instance, and makes it if there is none. `None` if no connection is to be accelerated.
    #[inline]
    pub(crate) fn ensure() -> Option<&'static Library> {
        if OFF.load(Relaxed) {
            return None;
        }
        Self::current().or_else(Self::make)
    }

    /// Returns whether connections are to be accelerated and there is memory for that. If neither this process nor one
    /// that it was forked from has made an instance, first makes one by `build`.
    #[inline]
    pub(crate) fn is_on(build: &'static Build) -> bool {
        !OFF.load(Relaxed) && heap::can_serve() && (HAD.load(Relaxed) || Self::begin(build))
    }

    #[cold]
    fn begin(build: &'static Build) -> bool {
        let _ = BUILD.set(build);
        Self::ensure().is_some()
    }

    /// Gives `bytes` back to the budget, after registrations of the registered allocator's memory have ended.
    pub(crate) fn free_kept(&self, bytes: u64) {
        if bytes > 0 {
            self.pinned.give_back(bytes);
            self.stats.count_many(Event::AllocEnded, bytes);
        }
    }

    /// Returns the instance; `None` if it was not made yet.
    #[inline]
    pub(crate) fn current() -> Option<&'static Library> {
        // SAFETY: null, or an instance, which is never freed.
        unsafe { CURRENT.load(Acquire).as_ref() }
    }

    /// Switches acceleration off for good, in this process and its later fork children.
    pub(crate) fn retire() {
        RETIRED.store(true, Relaxed);
        OFF.store(true, Relaxed);
    }

    /// Keeps all connections on TCP that are there now, and all later ones. Connections that are on links stay on their
    /// links. `REASON` keeps the first reason, and the statistics show the last one.
    pub(crate) fn keep_on_tcp(reason: Reason) {
        let _ = REASON.compare_exchange(Reason::None as u16, reason as u16, SeqCst, SeqCst);
        if let Some(library) = Self::current() {
            library.stats.set_kept_on_tcp(reason);
        }
    }

    /// Returns whether [`Self::retire`] was called.
    pub(crate) fn has_retired() -> bool {
        RETIRED.load(Relaxed)
    }

    #[cold]
    fn fallback() -> &'static Library {
        loop {
            if let Some(library) = Self::make() {
                return library;
            }
            // A fork child that uses an inherited stream has no fds or memory: waits until it has some.
            crate::sys::time::sleep(10_000_000);
        }
    }

    #[cold]
    fn make() -> Option<&'static Library> {
        // SAFETY: libc defines this variable, and it is only read.
        if unsafe { environ.is_null() } {
            // This call comes from the dynamic linker, before libc has started, so the user's variables cannot be read
            // yet.
            return None;
        }
        let errno = crate::sys::errno::get();
        let made = BUILD.get().and_then(|build| build());
        crate::sys::errno::set(errno);
        let Some(library) = made else {
            OFF.store(true, Relaxed);
            return None;
        };
        HAD.store(true, Relaxed);
        let fresh = Box::into_raw(Box::new(library));
        match CURRENT.compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire) {
            // SAFETY: `fresh` came from a `Box`, and an instance in `CURRENT` is never freed.
            Ok(_) => Some(unsafe { &*fresh }),
            Err(other) => {
                // Another thread was first: this thread's instance is dropped, with the fds that it owns.
                // SAFETY: `fresh` came from a `Box`, and no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: not null, since the exchange failed; an instance in `CURRENT` is never freed.
                Some(unsafe { &*other })
            }
        }
    }

    /// Returns why this connection may not leave TCP even if both ends support a link; `None` if it may.
    pub(crate) fn refuses(&self, local: SocketAddr, peer: SocketAddr, direction: Direction) -> Option<Reason> {
        let Some(rules) = self.rules else {
            return Some(Reason::NoRules);
        };
        match rules.decide(&self.program, local, peer, direction) {
            Decision::Leave => Some(Reason::Rule),
            Decision::Accelerate => reason(),
        }
    }

    /// Forgets the parent's instance in a fork child, which makes its own when it needs one.
    pub(crate) fn forget() {
        let ptr = CURRENT.swap(std::ptr::null_mut(), AcqRel);
        // SAFETY: null, or an instance, which is never freed.
        if let Some(library) = unsafe { ptr.as_ref() } {
            library.waiters.after_fork();
        }
    }
}

/// The thresholds that the user has set: for connections that this end has made, and for those that it has accepted.
static THRESHOLDS: OnceBox<[Threshold; 2]> = OnceBox::new();

/// Returns the threshold at which an end with this role acts: a connector asks for a promotion, an acceptor prepares to
/// answer.
#[inline]
pub(crate) fn threshold_of(role: Role) -> &'static Threshold {
    let [connectors, acceptors] = THRESHOLDS.get_or_init(|| {
        let threshold = config().promote_after;
        Box::new([threshold, threshold.just_before()])
    });
    match role {
        Role::Connector => connectors,
        Role::Acceptor => acceptors,
    }
}

unsafe extern "C" {
    static environ: *const *const std::ffi::c_char;
    static program_invocation_short_name: *const std::ffi::c_char;
}

/// The name that the program was called by, cut at 64 bytes. It may differ from the name of the binary, which may be
/// run under several names.
static PROGRAM: [AtomicU8; 64] = [const { AtomicU8::new(0) }; 64];

/// Copies the program's name. To be called before main, which may overwrite the name with a title for ps(1).
pub(crate) fn remember_program() {
    // SAFETY: libc sets the variable before any code of a library runs.
    let name = unsafe { program_invocation_short_name };
    if !name.is_null() {
        // SAFETY: the name is not null, and libc ends it with a zero byte.
        let name = unsafe { std::ffi::CStr::from_ptr(name) };
        for (cell, byte) in PROGRAM.iter().zip(name.to_bytes()) {
            cell.store(*byte, Relaxed);
        }
    }
}

/// Returns the name that the program was called by.
pub(crate) fn program_name() -> String {
    let bytes: Vec<u8> = PROGRAM
        .iter()
        .map(|b| b.load(Relaxed))
        .take_while(|b| *b != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns a random number. If the kernel gives no random bytes, makes the number from the clock.
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0u8; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => crate::sys::time::now_ns().wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// The code of the first reason that keeps all further connections of this process on TCP: the process has done
/// something after which a link cannot serve them. [`Reason::None`]: there is none. A fork child inherits the reason,
/// which holds for it too.
static REASON: AtomicU16 = AtomicU16::new(Reason::None as u16);

/// Returns why no connection may leave TCP any more; `None` if connections may.
pub(crate) fn reason() -> Option<Reason> {
    Reason::from_code(REASON.load(SeqCst)).filter(|reason| *reason != Reason::None)
}
