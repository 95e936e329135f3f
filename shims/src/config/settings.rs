//! What the user may ask for, and what holds where nothing was asked for. How it is asked for is `variables.rs`'s
//! business.

use std::ffi::CString;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use super::value::{LogFilter, PromoteAfter, Size};

bitflags::bitflags! {
    /// Fabrics that may be used.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Fabrics: u8 {
        /// Shared memory, same host.
        const SHM = 1;
        /// RDMA, between hosts.
        const VERBS = 2;
    }
}

/// What a program gets that asks for an io_uring, whose calls no hook sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoUring {
    /// [`Self::Hide`] for a program with libuv, which uses epoll then, else [`Self::Allow`].
    #[default]
    Auto,
    /// ENOSYS, as of a kernel without it.
    Hide,
    /// The ring; from then on its connections are on TCP.
    Allow,
}

/// What becomes of `LD_PRELOAD` where a program is executed with an environment that lacks it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExec {
    /// It is added, and the library's variables.
    #[default]
    Keep,
    /// The environment is as the program has made it.
    Leave,
}

/// From which size on the device copies from program to program, between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// It never does.
    #[default]
    Off,
    /// From where a copy costs more than a registration.
    Auto,
    /// From so many bytes on.
    From(Size),
}

/// A protocol that a developer fixes for what is large enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a ring.
    Eager,
    /// Into a buffer that the receiver has posted; else by a ring.
    Put,
    /// From memory that the sender offers; else by a ring.
    Get,
}

/// Where the large blocks of malloc come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alloc {
    /// From wherever the program's malloc has them.
    #[default]
    Off,
    /// From arenas that stay registered: `librdmasock_alloc.so` is preloaded too.
    Registered,
}

/// What the user has asked for; every combination that exists is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// False: every call passes through.
    pub enabled: bool,
    /// Fabrics that may be used.
    pub fabrics: Fabrics,
    /// What is logged.
    pub log: LogFilter,
    /// Where it is logged (`%p` not yet replaced); `None` is stderr.
    pub log_file: Option<PathBuf>,
    /// When a stream has proved worth promoting.
    pub promote_after: PromoteAfter,
    /// Longest time that a waiting thread spins before it sleeps.
    pub spin: Duration,
    /// A stream's first ring, bytes, a power of two.
    pub ring_min: Size,
    /// A stream's largest ring, bytes, a power of two, at least `ring_min`, at most `arena`.
    pub ring_max: Size,
    /// Largest size of a link's arena on each side, bytes, a power of two.
    pub arena: Size,
    /// Whether the memory of programs is read and written by the device itself, between hosts.
    pub zcopy: ZeroCopy,
    /// Where the large blocks of malloc come from.
    pub alloc: Alloc,
    /// What becomes of a program that asks for an io_uring.
    pub io_uring: IoUring,
    /// What becomes of an environment without `LD_PRELOAD`.
    pub on_exec: OnExec,
    /// The rules file.
    pub rules: Option<PathBuf>,
    /// The UDP port on which hosts ask each other; 0: none.
    pub control_port: u16,
    /// The file with the secret of the control port.
    pub secret_file: Option<PathBuf>,
    /// For tests: networks that count as reached by an RDMA device of this host.
    pub pretend_rdma: Vec<IpNet>,
    /// For tests: the plugin that has queue pairs between processes of this host.
    pub local_device: Option<PathBuf>,
    /// For tests: what the plugin has in place of `/sys/class`.
    pub sys_class: Option<CString>,
    /// For developers: the way that large sends between hosts go, where they can.
    pub way: Option<Way>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            enabled: true,
            fabrics: Fabrics::SHM | Fabrics::VERBS,
            log: LogFilter::default(),
            log_file: None,
            promote_after: PromoteAfter::default(),
            spin: Duration::from_micros(200),
            ring_min: Size::kib(4),
            ring_max: Size::mib(4),
            arena: Size::gib(1),
            zcopy: ZeroCopy::default(),
            alloc: Alloc::default(),
            io_uring: IoUring::default(),
            on_exec: OnExec::default(),
            rules: None,
            control_port: 4797,
            secret_file: None,
            pretend_rdma: Vec::new(),
            local_device: None,
            sys_class: None,
            way: None,
        }
    }
}
