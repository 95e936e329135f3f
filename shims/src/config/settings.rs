//! The settings that a user may choose, and their defaults. `variables.rs` reads the choices.

use std::ffi::CString;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use super::value::{LogFilter, PromoteAfter, Size};

bitflags::bitflags! {
    /// The fabrics that may be used.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Fabrics: u8 {
        /// Shared memory, within a host.
        const SHM = 1;
        /// RDMA, between hosts.
        const VERBS = 2;
    }
}

/// The answer to a program that asks for an io_uring. No hook sees the calls of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoUring {
    /// [`Self::Hide`] for a program with libuv, which then uses epoll; else [`Self::Allow`].
    #[default]
    Auto,
    /// ENOSYS, as from a kernel without io_uring.
    Hide,
    /// The ring. From then on the program's connections are on TCP.
    Allow,
}

/// How an exec changes an environment that lacks `LD_PRELOAD`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExec {
    /// The exec adds `LD_PRELOAD` and the library's variables.
    #[default]
    Keep,
    /// The exec leaves the environment as the program has made it.
    Leave,
}

/// The smallest size from which on the device copies from program to program, between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// The device never does.
    #[default]
    Off,
    /// The size from which on a copy costs more than a registration.
    Auto,
    /// This size.
    From(Size),
}

/// A protocol that a developer fixes for large sends.
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

/// The settings of a process. Every combination that the parser can make is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// If false, every call passes through.
    pub enabled: bool,
    /// The fabrics that may be used.
    pub fabrics: Fabrics,
    /// The levels of the log.
    pub log: LogFilter,
    /// The path of the log file, with `%p` not yet replaced; `None` is stderr.
    pub log_file: Option<PathBuf>,
    /// When a stream has proved worth promoting.
    pub promote_after: PromoteAfter,
    /// The longest time that a waiting thread spins before it sleeps.
    pub spin: Duration,
    /// The size of a stream's first ring, bytes, a power of two.
    pub ring_min: Size,
    /// The size of a stream's largest ring, bytes, a power of two, at least `ring_min`, at most `arena`.
    pub ring_max: Size,
    /// The largest size of a link's arena on each side, bytes, a power of two.
    pub arena: Size,
    /// Whether, between hosts, the device itself reads and writes the memory of programs.
    pub zcopy: ZeroCopy,
    /// Where the large blocks of malloc come from.
    pub alloc: Alloc,
    /// The answer to a program that asks for an io_uring.
    pub io_uring: IoUring,
    /// How an exec changes an environment without `LD_PRELOAD`.
    pub on_exec: OnExec,
    /// The path of the rules file.
    pub rules: Option<PathBuf>,
    /// The UDP port on which hosts ask each other; 0 means none.
    pub control_port: u16,
    /// The path of the file with the control port's secret.
    pub secret_file: Option<PathBuf>,
    /// For tests: networks that count as reached by an RDMA device of this host.
    pub pretend_rdma: Vec<IpNet>,
    /// For tests: the path of a plugin that has queue pairs between processes of this host.
    pub local_device: Option<PathBuf>,
    /// For tests: the folder that the plugin reads in place of `/sys/class`.
    pub sys_class: Option<CString>,
    /// For developers: the protocol of large sends between hosts, where they can use it.
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
