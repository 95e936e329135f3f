//! What a process can be in: limits, locked memory, small stacks, filters of system calls, another root, user or
//! cgroup. Each is a word, which a launcher carries out before the program begins (`scenario helper within`), or the
//! program itself.
//!
//! Which environments the scenarios run in says `tests/environment_matrix.rs`.

pub mod cgroup;
mod roots;

use std::ffi::CString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::filters::{self, By};
use crate::sys::{self, Ret};

/// The least that pthread_attr_setstacksize takes.
const SMALL_STACK: usize = 16 * 1024;

/// What the two sides of a scenario are in. In the words stand `{dir}` for the run's directory, `{side}` for the side,
/// and `{program}` and `{library}` for the files under test.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The name in a test's name.
    pub name: &'static str,
    /// What the launcher does, which has no library yet.
    pub before: Vec<String>,
    /// What the program does before it makes a socket.
    pub inside: Vec<String>,
    /// What the program does when its listener listens, or before it connects.
    pub listening: Vec<String>,
    /// What becomes of a connection that would be promoted elsewhere.
    pub outcome: Outcome,
}

/// Whether a connection is promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As without any environment.
    Promoted,
    /// It stays on TCP, and `rdmasock stat` gives this reason at one end at least.
    Plain(&'static str),
    /// It stays on TCP, and `rdmasock stat` knows of neither process: what the library begins with could not be had.
    Unknown,
    /// Either: it may depend on how much the process has done by then.
    Any,
}

/// What `word` gave; a panic where there is no such word.
pub fn enter(word: &str) -> Ret {
    let (what, how) = word.split_once(':').unwrap_or((word, ""));
    match what {
        "address space" => limited(libc::RLIMIT_AS, how),
        "file size" => limited(libc::RLIMIT_FSIZE, how),
        "open files" => limited(libc::RLIMIT_NOFILE, how),
        "locked memory" => limited(libc::RLIMIT_MEMLOCK, how),
        "stack" => limited(libc::RLIMIT_STACK, how),
        "lock memory" => call!(libc::mlockall(libc::MCL_FUTURE)),
        "lock all memory" => call!(libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE)),
        "lock present memory" => call!(libc::mlockall(libc::MCL_CURRENT)),
        "small stacks" => small_stacks(),
        // Of root only.
        "nobody" => {
            call!(libc::setgid(65_534)).ok();
            call!(libc::setuid(65_534))
        }
        "root" => {
            let root = CString::new(how).unwrap();
            call!(libc::chroot(root.as_ptr())).ok();
            call!(libc::chdir(c"/".as_ptr()))
        }
        "root of its own" => roots::own(how),
        "read-only root" => roots::read_only(how),
        "full shared memory" => roots::full_shared_memory(),
        "cgroup" => {
            std::fs::write(format!("{how}/cgroup.procs"), "0").unwrap();
            Ret::of(0)
        }
        "sandbox" => filters::load(filters::SANDBOX, by(how)),
        "worker" => filters::load(&[filters::SANDBOX, filters::WORKER].concat(), by(how)),
        "system service" => filters::load(filters::SYSTEM_SERVICE, by(how)),
        "no memfds" => filters::refuse(&[(libc::SYS_memfd_create, None)], libc::ENOMEM),
        "no memory to share" => filters::refuse(&[(libc::SYS_madvise, Some(libc::MADV_POPULATE_WRITE))], libc::ENOMEM),
        "no threads" => filters::refuse(&[(libc::SYS_clone3, None), (libc::SYS_clone, None)], libc::EAGAIN),
        _ => panic!("no environment has the word {word}"),
    }
}

fn by(how: &str) -> By {
    match how {
        "" => By::Prctl,
        "all threads" => By::Seccomp,
        _ => panic!("a filter is not loaded by {how}"),
    }
}

/// Sets a limit, to what it is if it is lower already.
fn limited(what: libc::__rlimit_resource_t, to: &str) -> Ret {
    let mut present: libc::rlimit = sys::zeroed();
    call!(libc::getrlimit(what, &mut present)).ok();
    let to = present.rlim_max.min(to.parse().unwrap());
    let limit = libc::rlimit {
        rlim_cur: to,
        rlim_max: to,
    };
    call!(libc::setrlimit(what, &limit))
}

unsafe extern "C" {
    fn pthread_setattr_default_np(attributes: *const libc::pthread_attr_t) -> libc::c_int;
}

/// Of all threads whose maker names no size. (Rust's own name one: see [`launch`].)
fn small_stacks() -> Ret {
    let mut attributes: libc::pthread_attr_t = sys::zeroed();
    // SAFETY: a live local, initialised by the first call, and copied by the last.
    let error = unsafe {
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setstacksize(&raw mut attributes, SMALL_STACK);
        pthread_setattr_default_np(&raw const attributes)
    };
    assert_eq!(error, 0, "pthread_setattr_default_np");
    Ret::of(0)
}

/// `LIBRARY WORD… -- PROGRAM ARGUMENT…`: enters each, and becomes the program, with the library unless that is `none`.
/// Returns only if something has failed.
pub fn launch(words: &[String]) -> bool {
    let Some(end) = words.iter().position(|word| word == "--") else {
        return false;
    };
    let (library, environment) = words[..end].split_first().unwrap();
    let mut command = Command::new(&words[end + 1]);
    command.args(&words[end + 2..]);
    if library != "none" {
        command.env("LD_PRELOAD", library);
    }
    for word in environment {
        if word == "small stacks" {
            command.env("RUST_MIN_STACK", SMALL_STACK.to_string());
        } else {
            enter(word).ok();
        }
    }
    eprintln!("{}: {}", words[end + 1], command.exec());
    false
}
