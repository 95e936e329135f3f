//! Environments of a process: limits, locked memory, small stacks, filters of system calls, another root, user or
//! cgroup. Each environment is a word. A launcher enters it before the program begins (`scenario helper within`), or
//! the program enters it itself.
//!
//! `tests/environment_matrix.rs` lists the environments that the scenarios run in.

pub mod cgroup;
mod roots;

use std::ffi::CString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::filters::By;
use crate::sys::Ret;
use crate::{filters, sys};

/// The least size in bytes that pthread_attr_setstacksize accepts.
const SMALL_STACK: usize = 16 * 1024;

/// The environment of both sides of a scenario. In the words `{dir}` is the run's directory, `{side}` the side, and
/// `{program}` and `{library}` the files under test.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The environment's name in a test's name.
    pub name: &'static str,
    /// Words for the launcher, which does not have the library yet.
    pub before: Vec<String>,
    /// Words for the program before it makes a socket.
    pub inside: Vec<String>,
    /// Words for the program when its listener listens, or before it connects.
    pub listening: Vec<String>,
    /// The outcome for a connection that would be promoted elsewhere.
    pub outcome: Outcome,
}

/// Whether a connection is promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The connection is promoted, as without any environment.
    Promoted,
    /// The connection stays on TCP, and `rdmasock stat` gives this reason at one end at least.
    Plain(&'static str),
    /// The connection stays on TCP, and `rdmasock stat` lists neither process: the library could not start there.
    Unknown,
    /// Either outcome: it may depend on how much the process has done by then.
    Any,
}

/// Enters the environment of `word`, and returns the result. Panics if there is no such word.
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
        // Only root may call this.
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

/// Lowers a limit to `to`, or keeps it if it is lower already.
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

/// Sets the stack size of all threads whose maker names none. (Rust's own name one: see [`launch`].)
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

/// `LIBRARY WORD… -- PROGRAM ARGUMENT…`: enters each word, then becomes the program, with the library unless that is
/// `none`. Returns only if a step has failed.
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
