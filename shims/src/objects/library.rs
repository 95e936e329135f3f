//! The instance: what one process image with the library has one of.
//!
//! Made at the first call that needs it (`instance`), never freed. A fork child is a new instance: it forgets
//! this one and makes its own at its own first need (`fork`).

use std::net::SocketAddr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use once_cell::race::{OnceBox, OnceRef};
use rdmasock_core::ids::InstanceId;
use rdmasock_core::os::heap;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stats::{Event, Reason, StatsPage};
use rdmasock_core::stream::handshake::Role;
use rdmasock_core::stream::policy::Threshold;

use crate::config::arenas::Pieces;
use crate::config::config;
use crate::config::reach::Reach;
use crate::config::rules::{Decision, Rules};
use crate::objects::mailbox::Mailbox;
use crate::objects::offers::Offers;
use crate::objects::waiters::Waiters;
use crate::sys::budget::Budget;
use crate::sys::kept_on_tcp;

/// See the module.
pub struct Library {
    /// Which connections may be moved; `None` if that cannot be known.
    pub rules: Option<&'static Rules>,
    /// Which other hosts are in reach.
    pub reach: &'static Reach,
    /// Base name of the program.
    pub program: String,
    /// This instance.
    pub id: InstanceId,
    /// Live counters.
    pub stats: &'static StatsPage,
    /// Keeps their file.
    pub _stats_fd: Option<PrivateFd>,
    /// Doorbells and sleeper flags.
    pub waiters: Waiters,
    /// Links that others may ask for.
    pub offers: Offers,
    /// Memory of the program that devices reach.
    pub pinned: Budget,
    /// What of it is the registered allocator's.
    pub arenas: Pieces,
    /// What is left to the service thread.
    pub service: Mailbox,
}

/// How an instance is made.
pub type Build = fn() -> Option<Library>;

static CURRENT: AtomicPtr<Library> = AtomicPtr::new(std::ptr::null_mut());
/// There is one, or the process that this one was forked from had one.
static HAD: AtomicBool = AtomicBool::new(false);
/// How one is made. Whoever has made the first has said so.
static BUILD: OnceRef<'static, Build> = OnceRef::new();
/// Nothing is accelerated: switched off, or the instance could not be made.
static OFF: AtomicBool = AtomicBool::new(false);
/// The library has let go of the process.
static RETIRED: AtomicBool = AtomicBool::new(false);

impl Library {
    /// The instance, which exists: objects that lead here are only made after it.
    ///
    /// In a fork child that has not made its own yet, this makes it.
    #[inline]
    pub fn get() -> &'static Library {
        let ptr = CURRENT.load(Acquire);
        // SAFETY: never freed.
        match unsafe { ptr.as_ref() } {
            Some(library) => library,
            None => Self::fallback(),
        }
    }

    /// The instance; makes it if need be. `None` if nothing is to be accelerated.
    #[inline]
    pub fn ensure() -> Option<&'static Library> {
        if OFF.load(Relaxed) {
            return None;
        }
        Self::current().or_else(Self::make)
    }

    /// Whether anything is to be accelerated, and there is memory for it. Makes the instance by `build` if neither this
    /// process nor one that it was forked from has ever made one.
    #[inline]
    pub fn is_on(build: &'static Build) -> bool {
        !OFF.load(Relaxed) && heap::can_serve() && (HAD.load(Relaxed) || Self::begin(build))
    }

    #[cold]
    fn begin(build: &'static Build) -> bool {
        let _ = BUILD.set(build);
        Self::ensure().is_some()
    }

    /// So many bytes of the allocator's memory are not registered any more.
    pub fn free_kept(&self, bytes: u64) {
        if bytes > 0 {
            self.pinned.give_back(bytes);
            self.stats.count_many(Event::AllocEnded, bytes);
        }
    }

    /// The instance, if it was made.
    #[inline]
    pub fn current() -> Option<&'static Library> {
        // SAFETY: never freed.
        unsafe { CURRENT.load(Acquire).as_ref() }
    }

    /// From now on nothing is accelerated, here and in fork children.
    pub fn retire() {
        RETIRED.store(true, Relaxed);
        OFF.store(true, Relaxed);
    }

    /// From now on no connection may leave TCP; those that have stay where they are.
    pub fn keep_on_tcp(reason: Reason) {
        kept_on_tcp::begin(reason);
        if let Some(library) = Self::current() {
            library.stats.set_kept_on_tcp(reason);
        }
    }

    /// Whether the library has let go of the process.
    pub fn has_retired() -> bool {
        RETIRED.load(Relaxed)
    }

    #[cold]
    fn fallback() -> &'static Library {
        loop {
            if let Some(library) = Self::make() {
                return library;
            }
            // Out of fds or memory in a fork child that uses an inherited stream: wait for some.
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            });
        }
    }

    #[cold]
    fn make() -> Option<&'static Library> {
        // SAFETY: libc's own variable.
        if unsafe { environ.is_null() } {
            // In a function that the linker calls before libc has begun: what the user asks for is not known yet.
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
            // SAFETY: now shared, never freed.
            Ok(_) => Some(unsafe { &*fresh }),
            Err(other) => {
                // Another thread was first. Ours holds a few fds, which go with it.
                // SAFETY: nobody has seen `fresh`.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: never freed.
                Some(unsafe { &*other })
            }
        }
    }

    /// Why this connection may not be accelerated, whatever its ends are ready for.
    pub fn refuses(
        &self,
        local: SocketAddr,
        peer: SocketAddr,
        direction: rdmasock_core::stats::Direction,
    ) -> Option<Reason> {
        let Some(rules) = self.rules else {
            return Some(Reason::NoRules);
        };
        match rules.decide(&self.program, local, peer, direction) {
            Decision::Leave => Some(Reason::Rule),
            Decision::Accelerate => kept_on_tcp::reason(),
        }
    }

    /// In a fork child: this is another instance from now on.
    pub fn forget() {
        let ptr = CURRENT.swap(std::ptr::null_mut(), AcqRel);
        // SAFETY: never freed.
        if let Some(library) = unsafe { ptr.as_ref() } {
            library.waiters.after_fork();
        }
    }
}

/// The thresholds as the user asked for them: of connections of this end, and of those that were accepted.
static THRESHOLDS: OnceBox<[Threshold; 2]> = OnceBox::new();

/// What a connection has to have carried before something is done about it.
#[inline]
pub fn threshold_of(role: Role) -> &'static Threshold {
    let [connectors, acceptors] = THRESHOLDS.get_or_init(|| {
        let threshold = config().promote_after.threshold();
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

/// As it is kept: one binary may be several programs.
static PROGRAM: [AtomicU8; 64] = [const { AtomicU8::new(0) }; 64];

/// Keeps the program's name, before main can write another title over it.
pub fn remember_program() {
    // SAFETY: set by libc before any code of a library runs; NUL-terminated.
    let name = unsafe { program_invocation_short_name };
    if !name.is_null() {
        // SAFETY: as above.
        let name = unsafe { std::ffi::CStr::from_ptr(name) };
        for (cell, byte) in PROGRAM.iter().zip(name.to_bytes()) {
            cell.store(*byte, Relaxed);
        }
    }
}

/// The name that the program was called by.
pub fn program_name() -> String {
    let bytes: Vec<u8> = PROGRAM
        .iter()
        .map(|b| b.load(Relaxed))
        .take_while(|b| *b != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A random number, for keys; of the clock where the kernel has none to give.
pub fn random_u64() -> u64 {
    let mut bytes = [0u8; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => crate::sys::time::now_ns().wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}
