//! Turns SIGINT, SIGTERM and SIGHUP into a flag, so that every wait ends early and every `Drop` still kills its
//! children and removes its files. The programs under test do not use this module.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Installs the handlers. System calls in progress return EINTR.
///
/// # Errors
/// If sigaction(2) fails.
pub fn catch() -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// Returns whether one of these signals has arrived.
pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Raises the soft limit on open files to the hard one, and returns the limit. Children inherit it.
///
/// # Errors
/// If setrlimit(2) fails.
pub fn raise_nofile() -> nix::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}
