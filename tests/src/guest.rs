//! Both ends of a connection that lasts until the test ends it, for tests of a process's environment or past calls.
//! Each end is a `scenario helper guest …` whose messages are checked, and which the test can question meanwhile.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use rdmasock_core::os::kernel;

use crate::scenarios::{epoll, helper};
use crate::sys::{Addr, Ret};
use crate::{data, environment, filters, sys};

/// Bytes of a message.
const MESSAGE: usize = 64;

/// `server WHAT…` listens, prints its port, does each WHAT, and sends back the bytes of one connection. `early:WHAT` is
/// done before it makes a socket, `bound:WHAT` between bind() and listen(). `client PORT` sends one message after the
/// other until the command `end`. Both carry out the commands on their standard input.
///
/// `host` listens on one port of 127.0.0.1 and ::1, prints it, and sends back the bytes of one connection after the
/// other, until its standard input has something. `visitor PORT FAMILY` makes a connection at each command `call`,
/// sends one message after the other until the command `leave`, and ends at any other command.
///
/// True if all went well.
pub fn main(words: &[String]) -> bool {
    let port = words.get(1).and_then(|port| port.parse().ok());
    match (words.first().map(String::as_str), port) {
        (Some("server"), _) => server(&words[1..]),
        (Some("client"), Some(port)) => talk(sys::connected(&Addr::v4(port)), "end"),
        (Some("host"), _) => host(),
        (Some("visitor"), Some(port)) if words.get(2).is_some_and(|family| family == "v6") => visitor(&Addr::v6(port)),
        (Some("visitor"), Some(port)) => visitor(&Addr::v4(port)),
        _ => false,
    }
}

fn server(what: &[String]) -> bool {
    let acts = |when: &str| -> Vec<_> { what.iter().filter_map(|w| w.strip_prefix(when)).map(act).collect() };
    let mut said = acts("early:");
    // Another image of this program passes the listener.
    let given = what.iter().find_map(|word| word.strip_prefix("given:"));
    let listener = given.map_or_else(|| sys::tcp(libc::AF_INET), |fd| fd.parse().unwrap());
    if given.is_none() {
        sys::bind(listener, &Addr::v4(0)).ok();
        said.extend(acts("bound:"));
        call!(libc::listen(listener, 16)).ok();
        say(&Addr::local_of(listener).1.port().to_string());
    } else {
        say("done");
    }
    let set = EPOLL.load(SeqCst).then(epoll::create);
    said.iter().for_each(|said| say(said));
    let is_later = |word: &&String| !["early:", "bound:", "given:"].iter().any(|when| word.starts_with(when));
    for word in what.iter().filter(is_later) {
        match word.as_str() {
            "exec" => exec(listener),
            "stamps" => say(&outcome(sys::set_int(
                listener,
                libc::SOL_SOCKET,
                libc::SO_TIMESTAMP,
                1,
            ))),
            "low water" => say(&outcome(sys::set_int(listener, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 2))),
            word => say(&act(word)),
        }
    }
    let fd = sys::accept4(listener, 0).ok();
    if let Some(set) = set {
        epoll::ctl(set, libc::EPOLL_CTL_ADD, fd, epoll::IN, 1).ok();
    }
    let mut message = [0; MESSAGE];
    loop {
        if let Some(set) = set
            && epoll::wait(set, 4, sys::SOON).1 != [(1, epoll::IN)]
        {
            return false;
        }
        match sys::read(fd, &mut message).value {
            0 if STRICT.load(SeqCst) => {
                // Of the calls that end a process only this one is left. It ends the thread: the last one, if all is
                // well. SAFETY: does not return.
                let _ = unsafe { kernel::call(libc::SYS_exit, [0; 6]) };
            }
            0 => return true,
            n @ 1.. => {
                if sys::write(fd, &message[..n as usize]).value != n {
                    return false;
                }
            }
            _ => return false,
        }
        while !STRICT.load(SeqCst)
            && let Some(word) = command()
        {
            say(&act(&word));
        }
    }
}

/// Becomes another image of this program, and passes it the listener.
fn exec(listener: i32) {
    call!(libc::fcntl(listener, libc::F_SETFD, 0)).ok();
    let given = format!("given:{listener}");
    let error = Command::new("/proc/self/exe")
        .args(["helper", "guest", "server", &given])
        .exec();
    panic!("{error}");
}

fn host() -> bool {
    let ([v4, v6], port) = listeners();
    say(&port.to_string());
    loop {
        let mut p = [0, v4, v6].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        call!(libc::poll(p.as_mut_ptr(), 3, -1)).ok();
        if p[0].revents != 0 {
            return true;
        }
        for ready in p[1..].iter().filter(|p| p.revents != 0) {
            let fd = sys::accept4(ready.fd, 0).ok();
            if !helper::echo(fd) {
                return false;
            }
            sys::close(fd).ok();
        }
    }
}

/// Listens on one port of 127.0.0.1 and ::1. Returns both listeners and the port.
fn listeners() -> ([i32; 2], u16) {
    loop {
        let (v4, port) = sys::listener(&Addr::v4(0), 16);
        let v6 = sys::tcp(libc::AF_INET6);
        // Another program may have the port at ::1.
        if !sys::bind(v6, &Addr::v6(port)).failed() && !call!(libc::listen(v6, 16)).failed() {
            return ([v4, v6], port);
        }
        sys::close(v4).ok();
        sys::close(v6).ok();
    }
}

fn visitor(to: &Addr) -> bool {
    loop {
        sys::poll_one(0, libc::POLLIN, -1);
        if command().as_deref() != Some("call") {
            return true;
        }
        if !talk(sys::connected(to), "leave") {
            return false;
        }
        say("left");
    }
}

/// Sends one message after the other, whose answers are checked, until the command `last`. Carries out other commands.
/// Then closes the connection. True if the answers were right, and the peer ends the connection too.
fn talk(fd: i32, last: &str) -> bool {
    for round in 0.. {
        let message = data::pattern(round, 0, MESSAGE);
        sys::send_all(fd, &message).ok();
        if sys::recv_exact(fd, MESSAGE) != message {
            return false;
        }
        match command().as_deref() {
            Some(word) if word == last => break,
            Some(word) => say(&act(word)),
            None => sys::pause_ms(1),
        }
    }
    call!(libc::shutdown(fd, libc::SHUT_WR)).ok();
    let (end, rest) = sys::recv_to_end(fd);
    sys::close(fd).ok();
    end.value == 0 && rest.is_empty()
}

/// Prints a line for the test.
fn say(line: &str) {
    let line = format!("{line}\n");
    sys::write(1, line.as_bytes());
}

/// Returns a line from the test, or `None` if there is none.
fn command() -> Option<String> {
    if sys::poll_one(0, libc::POLLIN, 0) & libc::POLLIN == 0 {
        return None;
    }
    let mut line = [0; 200];
    let n = usize::try_from(sys::read(0, &mut line).value).ok()?;
    let text = String::from_utf8_lossy(&line[..n]);
    (n > 0).then(|| text.trim().to_owned())
}

/// Carries out one command, and returns its result as text.
fn act(word: &str) -> String {
    match word {
        // The reply proves that the guest still runs.
        "say" => "said".into(),
        "deep bind" => {
            let name = c"libm.so.6";
            let flags = libc::RTLD_NOW | libc::RTLD_DEEPBIND;
            // SAFETY: a library of libc's, without constructors of its own.
            let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
            if library.is_null() { "none" } else { "done" }.to_owned()
        }
        "io_uring" => {
            let mut parameters = [0u64; 32];
            let ring = call!(libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()));
            outcome(ring)
        }
        // Check that the limit of open files changes.
        "watch the limit" => {
            std::thread::spawn(|| {
                let before = open_files();
                while !WATCHED.load(SeqCst) {
                    if open_files() != before {
                        CHANGED.store(true, SeqCst);
                    }
                }
            });
            "watching".into()
        }
        "watched" => {
            WATCHED.store(true, SeqCst);
            let how = if CHANGED.load(SeqCst) { "changed" } else { "kept" };
            how.into()
        }
        // Returns locked memory, resident memory, and resident memory that no program's or library's file backs, in
        // KiB.
        "memory" => {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let field = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name)).unwrap();
                line.split_whitespace().nth(1).unwrap()
            };
            let shared: u64 = field("RssShmem:").parse().unwrap();
            let unnamed = shared + field("RssAnon:").parse::<u64>().unwrap();
            format!("{} {} {unnamed}", field("VmLck:"), field("VmRSS:"))
        }
        // Wait before each read; only the connection may be reported.
        "wait by epoll" => {
            EPOLL.store(true, SeqCst);
            "done".into()
        }
        "strict" => {
            STRICT.store(true, SeqCst);
            outcome(filters::strict())
        }
        // Keep the hard limit, so that the soft limit could be raised again.
        "1024 open files for now" => {
            let limit = libc::rlimit {
                rlim_cur: 1024,
                rlim_max: open_files().1,
            };
            outcome(call!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)))
        }
        // Take all descriptors that are left, and check that the last number is among them.
        "take all open files" => {
            let taken: Vec<i32> = std::iter::from_fn(|| Some(call!(libc::dup(0))).filter(|r| !r.failed()))
                .map(Ret::ok)
                .collect();
            let last = open_files().0 as i32 - 1;
            let has_last = taken.contains(&last);
            taken.into_iter().for_each(|fd| _ = sys::close(fd).ok());
            if has_last { "done".into() } else { format!("not {last}") }
        }
        _ => outcome(environment::enter(word)),
    }
}

/// The server waits by an epoll set.
static EPOLL: AtomicBool = AtomicBool::new(false);
/// Only read and write are allowed.
static STRICT: AtomicBool = AtomicBool::new(false);
static WATCHED: AtomicBool = AtomicBool::new(false);
static CHANGED: AtomicBool = AtomicBool::new(false);

/// Returns the soft and the hard limit of open files.
fn open_files() -> (u64, u64) {
    let mut limit: libc::rlimit = sys::zeroed();
    call!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit)).ok();
    (limit.rlim_cur, limit.rlim_max)
}

fn outcome(of: Ret) -> String {
    if of.failed() { of.to_string() } else { "done".into() }
}
