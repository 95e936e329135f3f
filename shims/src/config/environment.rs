//! libc's exec and spawn functions, with an environment in which `LD_PRELOAD` names the library. nginx, sshd and others
//! execute programs with an environment of their own. If that environment lacks `LD_PRELOAD`, these functions add it,
//! and the library's variables as this process began with them. In the new program the library removes the added
//! entries from `environ`, so that the program sees the environment that it was given.
//!
//! These functions may run in a signal handler, and in a vfork child, which borrows its parent's memory. So they
//! allocate and store nothing. The completed array is on the stack, where libc's own exec functions need room too.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;

use libc::{c_char, c_int, pid_t, posix_spawn_file_actions_t as Actions, posix_spawnattr_t};
use once_cell::race::OnceBox;

use crate::config::{Config, OnExec};
use crate::sys::real;

type Strings = *const *const c_char;

unsafe extern "C" {
    static environ: Strings;
}

const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// The entry that precedes the added ones, as a mark. Its name does not begin with `RDMASOCK`, so it is no variable of
/// the library.
const ADDED: &CStr = c"_RDMASOCK_ADDED=";
/// The most entries of an environment that is completed; a longer one is passed on unchanged.
const MOST: usize = 512;
/// The most entries that are added.
const MOST_KEPT: usize = 33;

/// The entries that an exec adds to an environment.
struct Kept {
    /// [`ADDED`], then `LD_PRELOAD`, then the library's own variables; each has a name and a value.
    entries: Vec<CString>,
    /// The path of the preloaded library. Nothing is added if this process cannot read it (another root, another user):
    /// the new program's loader would print an error.
    library: CString,
}

static KEPT: OnceBox<Kept> = OnceBox::new();

/// Stores the entries that an exec is to add. Also removes the entries that the exec of this program has added. Runs
/// when the library is loaded, before the program can change its environment.
pub fn remember() {
    // SAFETY: libc sets `environ` before any library's code runs; it is null before that.
    let all: Vec<&[u8]> = unsafe { strings(environ) }.map(CStr::to_bytes).collect();
    let is_ours = |path: &&[u8]| {
        path.rsplit(|b| *b == b'/')
            .next()
            .is_some_and(|n| n.starts_with(b"librdmasock"))
    };
    let Some(list) = all.iter().find_map(|entry| entry.strip_prefix(PRELOAD)) else {
        return;
    };
    let paths: Vec<&[u8]> = list.split(|b| matches!(b, b':' | b' ')).filter(is_ours).collect();
    let variables = || {
        all.iter()
            .filter(|entry| entry.starts_with(b"RDMASOCK"))
            .take(MOST_KEPT - 2)
    };
    let values = variables().filter_map(|entry| {
        let at = entry.iter().position(|b| *b == b'=')?;
        let (name, value) = entry.split_at(at);
        Some((
            OsStr::from_bytes(name).into(),
            OsStr::from_bytes(value.get(1..)?).into(),
        ))
    });
    let (config, _) = Config::from_vars(values);
    let preload = [PRELOAD, &paths.join(&b':')].concat();
    let entries = [ADDED.to_bytes(), &preload]
        .into_iter()
        .chain(variables().copied())
        .map(CString::new)
        .collect();
    if config.enabled
        && config.on_exec == OnExec::Keep
        && let Some(Ok(library)) = paths.first().map(|path| CString::new(*path))
        && let Ok(entries) = entries
    {
        let _ = KEPT.set(Box::new(Kept { entries, library }));
    }
    if let Some(at) = all.iter().position(|entry| *entry == ADDED.to_bytes()) {
        // Reads the configuration first, because its variables are removed next.
        crate::config::config();
        // SAFETY: `at` is the index of an entry, and no other thread runs before the program does.
        unsafe { *environ.cast_mut().add(at) = std::ptr::null() };
    }
}

/// Iterates over the strings of a null-terminated array. A null pointer counts as an empty array.
///
/// # Safety
/// The array and the strings stay as they are while the iterator is used.
unsafe fn strings<'a>(mut array: Strings) -> impl Iterator<Item = &'a CStr> {
    std::iter::from_fn(move || {
        // SAFETY: by the contract the entries up to the null pointer are readable, and the iterator stops there.
        unsafe {
            let string = *array.as_ref()?;
            array = array.add(usize::from(!string.is_null()));
            (!string.is_null()).then(|| CStr::from_ptr(string))
        }
    })
}

/// Calls `exec` with `envp`, or with a completed copy of the array if `envp` lacks `LD_PRELOAD`.
///
/// # Safety
/// `envp` is null or a null-terminated array of strings.
unsafe fn with(envp: Strings, exec: impl FnOnce(Strings) -> c_int) -> c_int {
    // SAFETY: `envp` is null or a null-terminated array of strings, by the contract.
    let mut given = unsafe { strings(envp) };
    match KEPT.get() {
        // SAFETY: `envp` is null or a null-terminated array of strings, by the contract.
        Some(kept) if given.all(|e| !e.to_bytes().starts_with(PRELOAD)) && is_readable(&kept.library) => unsafe {
            with_kept(kept, envp, exec)
        },
        _ => exec(envp),
    }
}

/// # Safety
/// `envp` is null or a null-terminated array of strings.
#[cold]
#[inline(never)]
unsafe fn with_kept(kept: &Kept, envp: Strings, exec: impl FnOnce(Strings) -> c_int) -> c_int {
    // SAFETY: `envp` is null or a null-terminated array of strings, by the contract.
    let given = || unsafe { strings(envp) };
    let mut longer = [std::ptr::null(); MOST + MOST_KEPT + 1];
    let name = |entry: &CStr| entry.to_bytes().iter().position(|b| *b == b'=').unwrap_or_default();
    let is_given =
        |entry: &CStr| given().any(|e| e.to_bytes().get(..=name(entry)) == entry.to_bytes().get(..=name(entry)));
    let added = kept
        .entries
        .iter()
        .map(CString::as_c_str)
        .filter(|entry| !is_given(entry));
    if given().nth(MOST).is_some() {
        return exec(envp);
    }
    for (place, entry) in longer.iter_mut().zip(given().chain(added)) {
        *place = entry.as_ptr();
    }
    if !crate::sys::vfork::is_child() {
        tracing::info!(target: "rdmasock", "LD_PRELOAD is kept over an exec whose environment lacks it (RDMASOCK_EXEC)");
    }
    exec(longer.as_ptr())
}

/// Returns whether this process may read the file, by the system call that the loader makes for it too.
fn is_readable(file: &CStr) -> bool {
    rustix::fs::access(file, rustix::fs::Access::READ_OK).is_ok()
}

macro_rules! exec {
    ($($name:ident($($argument:ident: $type:ty),*): $envp:expr => |$longer:ident| $call:expr;)*) => {$(
        #[doc = concat!("libc's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As libc's.
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            // SAFETY: the caller's arguments are valid by libc's contract, so `envp` is an array of strings.
            unsafe { with($envp, |$longer| $call) }
        }
    )*};
}

exec! {
    execve(path: *const c_char, argv: Strings, envp: Strings): envp => |envp| real::execve()(path, argv, envp);
    execv(path: *const c_char, argv: Strings): environ => |envp| real::execve()(path, argv, envp);
    execvp(file: *const c_char, argv: Strings): environ => |envp| real::execvpe()(file, argv, envp);
    execvpe(file: *const c_char, argv: Strings, envp: Strings): envp => |envp| real::execvpe()(file, argv, envp);
    fexecve(fd: c_int, argv: Strings, envp: Strings): envp => |envp| real::fexecve()(fd, argv, envp);
    execveat(dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int): envp =>
        |envp| real::execveat()(dir, path, argv, envp, flags);
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const Actions, how: *const posix_spawnattr_t,
        argv: *const *mut c_char, envp: *const *mut c_char): envp.cast() =>
        |envp| real::posix_spawn()(pid, path, actions, how, argv, envp.cast());
    posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const Actions, how: *const posix_spawnattr_t,
        argv: *const *mut c_char, envp: *const *mut c_char): envp.cast() =>
        |envp| real::posix_spawnp()(pid, file, actions, how, argv, envp.cast());
}
