//! Makes the instance from all its parts. [`lifecycle`] makes and releases the objects of fds, [`seccomp`] ends the
//! library's part in a process that restricts its system calls.

use once_cell::race::OnceBox;
use rdmasock_core::ids::InstanceId;
use rdmasock_core::stats::StatsPage;

use crate::config::arenas::{Budget, Pieces};
use crate::config::reach::Reach;
use crate::config::rules::Rules;
use crate::config::{Config, arenas, config};
use crate::objects::library::{Build, Library, program_name};
use crate::objects::mailbox::{Mailbox, Offers};
use crate::objects::waiters::Waiters;
use crate::service;

pub(crate) mod lifecycle;
pub(crate) mod seccomp;

/// Returns whether connections are accelerated in this process. Makes the instance if there is none, except in a fork
/// child whose ancestors had one. Many such children live for one short connection, and an instance costs as much as
/// such a connection. In a fork child [`Library::ensure`] makes the instance when a connection is worth it. Returns
/// false without memory, in a child that borrows its parent's memory, and in a child whose fork no hook has seen.
#[inline]
pub(crate) fn is_on() -> bool {
    const BUILD: &Build = &(build as Build);
    Library::is_on(BUILD) && !crate::sys::vfork::is_child()
}

fn build() -> Option<Library> {
    let config = config();
    if !config.enabled || config.fabrics.is_empty() {
        return None;
    }
    crate::notify::table::init().ok()?;
    arenas::warn_if_missing();
    crate::config::log::init(config);
    crate::notify::call::tell(&crate::process::close::TOLD);
    crate::notify::fork::register(crate::process::exit::at_exit);
    let program = program_name();
    let rules = RULES.get_or_init(|| Box::new(read_rules(config)));
    let id = InstanceId::random().ok()?;
    let pid = rustix::process::getpid().as_raw_nonzero().get() as u32;
    let (stats, stats_fd) = StatsPage::create(pid, *id.as_bytes(), program.as_bytes()).ok()?;
    let library = Library {
        rules: rules.as_ref(),
        reach: REACH.get_or_init(|| Box::new(Reach::new(config))),
        program,
        id,
        stats,
        _stats_fd: stats_fd,
        waiters: Waiters::new().ok()?,
        offers: Offers::default(),
        pinned: Budget::default(),
        arenas: Pieces::new(),
        service: Mailbox::new(service::start).ok()?,
    };
    tracing::info!(target: "rdmasock", instance = %library.id, program = %library.program, "instance made");
    Some(library)
}

/// The rules. They are read once, because a fork child may not be allowed to read the file.
static RULES: OnceBox<Option<Rules>> = OnceBox::new();

/// Reads the user's rules. `None` if that fails: the reason is written to stderr.
fn read_rules(config: &Config) -> Option<Rules> {
    let Some(path) = &config.rules else {
        return Some(Rules::default());
    };
    Rules::load(path)
        .inspect_err(|problem| crate::config::warn(problem))
        .ok()
}

/// Has the secret of the control port. It is read once, because a fork child may not be allowed to read the file.
static REACH: OnceBox<Reach> = OnceBox::new();
