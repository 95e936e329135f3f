//! Several processes: fork, exec, posix_spawn, and fds passed by SCM_RIGHTS.

use std::ffi::CString;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use libc::c_int;

use crate::ctx::Ctx;
use crate::sys::{Addr, Ret};
use crate::{data, sys};

/// The client's part of most scenarios: sends `rounds` requests of `len` bytes, which come back.
fn ask(c: &Ctx, fd: c_int, rounds: u64, len: usize) {
    for i in 0..rounds {
        sys::send_all(fd, &data::pattern(i, 0, len)).ok();
        assert!(sys::recv_exact(fd, len) == data::pattern(i, 0, len), "round {i}");
    }
    c.log(format_args!("{rounds} rounds of {len}"));
}

/// The counterpart of [`ask`].
fn answer(fd: c_int, rounds: u64, len: usize) {
    for _ in 0..rounds {
        sys::send_all(fd, &sys::recv_exact(fd, len)).ok();
    }
}

/// A child uses the inherited connection, ends, and the parent goes on.
pub fn fork_child_then_parent(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        answer(fd, 2, 500);
        let child = sys::fork_child(|| {
            answer(fd, 3, 500);
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        answer(fd, 5, 500);
        c.recv_to_end(fd);
    } else {
        ask(c, fd, 10, 500);
        c.shutdown(fd, libc::SHUT_WR);
        c.recv_to_end(fd);
    }
}

/// The child closes its copy (or just ends); the parent keeps the connection.
pub fn fork_child_closes(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        for close in [true, false] {
            let child = sys::fork_child(|| {
                if close {
                    sys::close(fd).ok();
                }
                0
            });
            c.log(format_args!("child {}", sys::wait_child(child)));
            answer(fd, 3, 20_000);
        }
        c.close(fd);
    } else {
        ask(c, fd, 6, 20_000);
        c.recv_to_end(fd);
    }
}

/// The parent closes; the child serves, and its end is the peer's EOF.
pub fn fork_parent_closes(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let child = sys::fork_child(|| {
            sys::pause_ms(30);
            answer(fd, 5, 2000);
            0
        });
        c.close(fd);
        c.log(format_args!("child {}", sys::wait_child(child)));
    } else {
        ask(c, fd, 5, 2000);
        c.recv_to_end(fd);
    }
}

/// As [`fork_parent_closes`], on the connecting side.
pub fn fork_client(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        answer(fd, 9, 3000);
        c.recv_to_end(fd);
    } else {
        ask(c, fd, 3, 3000);
        let child = sys::fork_child(|| {
            ask(c, fd, 3, 3000);
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        ask(c, fd, 3, 3000);
        c.close(fd);
    }
}

/// A child cannot read the bytes that the peer sends to the parent: the child does not have the memory.
pub fn fork_child_has_no_arena(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        answer(fd, 2, 500);
        let child = sys::fork_child(|| {
            let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
            let ours = |line: &&str| {
                ["rdmasock-arena", "rdmasock-waiters"]
                    .iter()
                    .any(|name| line.contains(name))
            };
            maps.lines().filter(ours).count() as c_int
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        answer(fd, 2, 500);
        c.recv_to_end(fd);
    } else {
        ask(c, fd, 4, 500);
        c.shutdown(fd, libc::SHUT_WR);
        c.recv_to_end(fd);
    }
}

/// Bytes received before the fork and not read go to the first reader, once.
pub fn fork_with_unread_data(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        sys::wait_readable_bytes(fd, 5000);
        c.recv(fd, 1000, 0);
        let child = sys::fork_child(|| {
            c.recv(fd, 1000, 0);
            c.fionread(fd);
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.fionread(fd);
        c.recv_all(fd, 3000);
        c.sync("read");
        c.recv_to_end(fd);
    } else {
        c.send(fd, &data::pattern(1, 0, 5000), 0);
        c.sync("sent");
        c.sync("read");
        c.close(fd);
    }
}

/// Parent and child write alternately to one connection.
pub fn fork_both_write(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let mut turn = [0; 2];
        let mut back = [0; 2];
        call!(libc::pipe(turn.as_mut_ptr())).ok();
        call!(libc::pipe(back.as_mut_ptr())).ok();
        let mut b = [0; 1];
        let child = sys::fork_child(|| {
            let mut b = [0; 1];
            for i in 0..10 {
                sys::read(turn[0], &mut b).ok();
                sys::send_all(fd, format!("child {i};").as_bytes()).ok();
                sys::write(back[1], b"x").ok();
            }
            0
        });
        for i in 0..10 {
            sys::send_all(fd, format!("parent {i};").as_bytes()).ok();
            sys::write(turn[1], b"x").ok();
            sys::read(back[0], &mut b).ok();
        }
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.close(fd);
    } else {
        let (_, got) = c.recv_to_end(fd);
        c.log(String::from_utf8_lossy(&got));
    }
}

/// Two children of a listening parent accept and serve; the parent only waits.
pub fn prefork(c: &Ctx) {
    const N: u64 = 12;
    let (listener, port) = c.listener(32);
    if let Some(l) = listener {
        let children = [0, 1].map(|_| {
            sys::fork_child(|| {
                loop {
                    let fd = sys::accept4(l, 0).ok();
                    let rounds = sys::recv_exact(fd, 1)[0];
                    answer(fd, u64::from(rounds), 4000);
                    sys::close(fd).ok();
                    if rounds == 0 {
                        return 0;
                    }
                }
            })
        });
        c.log(format_args!("children {:?}", children.map(sys::wait_child)));
    } else {
        let fds: Vec<_> = (0..N).map(|_| sys::connected(&Addr::v4(port))).collect();
        for fd in fds {
            c.send(fd, &[6], 0);
            ask(c, fd, 6, 4000);
            c.close(fd);
        }
        for _ in 0..2 {
            let fd = sys::connected(&Addr::v4(port));
            c.send(fd, &[0], 0);
            c.recv_to_end(fd);
        }
    }
}

/// The server makes a child by plain clone(2), right after it has accepted; the child then changes its user. libc
/// waits for every other thread that it knows of, and the child has none of its parent's threads.
pub fn cloned_changes_user(c: &Ctx) {
    let (listener, port) = c.listener(32);
    for _ in 0..20 {
        let Some(listener) = listener else {
            let fd = sys::connected(&Addr::v4(port));
            c.recv_to_end(fd);
            c.close(fd);
            continue;
        };
        let fd = sys::accept4(listener, 0).ok();
        let child = call!(libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)).ok();
        if child == 0 {
            // The user id stays as it is.
            let unchanged = libc::uid_t::MAX;
            let changed = call!(libc::setresuid(unchanged, unchanged, unchanged));
            sys::leave_at_once(i32::from(changed.failed()));
        }
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.send(fd, b"done", 0);
        c.close(fd);
    }
}

/// A server makes a child by clone(2) as it is for each connection, which the child accepts, while the server has one
/// that is promoted.
pub fn cloned_accepts(c: &Ctx) {
    let fd = c.pair();
    let (listener, port) = c.listener(32);
    for round in 0..3 {
        let Some(listener) = listener else {
            let fd = sys::connected(&Addr::v4(port));
            ask(c, fd, 6, 4000);
            c.close(fd);
            c.sync("served");
            continue;
        };
        let child = call!(libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)).ok();
        if child == 0 {
            let fd = sys::accept4(listener, 0).ok();
            answer(fd, 6, 4000);
            sys::recv_to_end(fd);
            sys::leave_at_once(round);
        }
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.sync("served");
    }
    c.send(fd, b"still there", 0);
    c.recv_all(fd, 11);
    c.close(fd);
}

/// A child of a forking server per connection, the classic.
pub fn fork_per_connection(c: &Ctx) {
    let (listener, port) = c.listener(32);
    if let Some(l) = listener {
        let mut children = Vec::new();
        for _ in 0..5 {
            let fd = sys::accept4(l, 0).ok();
            children.push(sys::fork_child(|| {
                sys::close(l).ok();
                answer(fd, 5, 9000);
                0
            }));
            sys::close(fd).ok();
        }
        for child in children {
            c.log(format_args!("child {}", sys::wait_child(child)));
        }
    } else {
        for _ in 0..5 {
            let fd = sys::connected(&Addr::v4(port));
            ask(c, fd, 5, 9000);
            c.recv_to_end(fd);
            c.close(fd);
        }
    }
}

/// As [`fork_per_connection`], for many clients at once, so that each has to wait for its turn. A child's exit ends
/// the connection also in the middle of a promotion.
pub fn fork_per_connection_crowd(c: &Ctx) {
    const CLIENTS: usize = 24;
    const CONNECTIONS: usize = 10;
    let (listener, port) = c.listener(128);
    if let Some(l) = listener {
        let children = (0..CLIENTS * CONNECTIONS).map(|_| {
            let fd = sys::accept4(l, 0).ok();
            let child = sys::fork_child(|| {
                sys::close(l).ok();
                answer(fd, 5, 9000);
                0
            });
            sys::close(fd).ok();
            child
        });
        let children: Vec<_> = children.collect();
        let failed = children.into_iter().filter(|child| sys::wait_child(*child) != 0);
        c.log(format_args!("failed children: {}", failed.count()));
        return;
    }
    let resets = AtomicU32::new(0);
    std::thread::scope(|s| {
        for _ in 0..CLIENTS {
            s.spawn(|| {
                for _ in 0..CONNECTIONS {
                    let fd = sys::connected(&Addr::v4(port));
                    for i in 0..5 {
                        sys::send_all(fd, &data::pattern(i, 0, 9000)).ok();
                        assert!(sys::recv_exact(fd, 9000) == data::pattern(i, 0, 9000));
                    }
                    if sys::recv(fd, &mut [0], 0).is(libc::ECONNRESET) {
                        resets.fetch_add(1, Relaxed);
                    }
                    sys::close(fd).ok();
                }
            });
        }
    });
    c.log(format_args!("resets: {}", resets.into_inner()));
}

/// The children of a forking server run as another user, who may not open the log file; no error is printed.
pub fn fork_changes_user(c: &Ctx) {
    let (listener, port) = c.listener(32);
    for _ in 0..2 {
        if let Some(l) = listener {
            let fd = sys::accept4(l, 0).ok();
            let child = sys::fork_child(|| {
                let nobody = 65_534;
                let changed = call!(libc::setresuid(nobody, nobody, nobody));
                answer(fd, 40, 500);
                i32::from(changed.failed())
            });
            sys::close(fd).ok();
            c.log(format_args!("child {}", sys::wait_child(child)));
        } else {
            let fd = sys::connected(&Addr::v4(port));
            ask(c, fd, 40, 500);
            c.recv_to_end(fd);
            c.close(fd);
        }
    }
}

/// A child that may not open another file goes on with the connection that its parent has accepted, and with one
/// that it finds in a poll.
pub fn fork_without_descriptors(c: &Ctx) {
    let (listener, port) = c.listener(32);
    let Some(listener) = listener else {
        let fd = sys::connected(&Addr::v4(port));
        ask(c, fd, 40, 500);
        c.recv_to_end(fd);
        c.close(fd);
        return;
    };
    let fd = sys::accept4(listener, 0).ok();
    let child = sys::fork_child(|| {
        let mut limit: libc::rlimit = sys::zeroed();
        call!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit)).ok();
        limit.rlim_cur = 1;
        call!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)).ok();
        for _ in 0..40 {
            sys::wait_for(fd, libc::POLLIN);
            answer(fd, 1, 500);
        }
        0
    });
    sys::close(fd).ok();
    c.log(format_args!("child {}", sys::wait_child(child)));
}

/// The words of a helper's command line.
pub(super) fn helper_words(what: &str, fd: c_int, more: &[&str]) -> Vec<CString> {
    let exe = std::env::current_exe().unwrap();
    let mut words = [exe.to_str().unwrap(), "helper", what]
        .iter()
        .map(|w| CString::new(*w).unwrap())
        .collect::<Vec<_>>();
    words.push(CString::new(fd.to_string()).unwrap());
    words.extend(more.iter().map(|w| CString::new(*w).unwrap()));
    words
}

/// Returns null-terminated pointers to the words.
pub(super) fn argv(words: &[CString]) -> Vec<*mut libc::c_char> {
    let mut v: Vec<_> = words.iter().map(|w| w.as_ptr().cast_mut()).collect();
    v.push(std::ptr::null_mut());
    v
}

/// fork and execv of a program that echoes on the inherited connection; the parent goes on.
pub fn fork_exec(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let child = sys::fork_child(|| {
            let words = helper_words("echo", fd, &[]);
            call!(libc::execv(words[0].as_ptr(), argv(&words).as_ptr().cast()));
            127
        });
        c.close(fd);
        c.log(format_args!("child {}", sys::wait_child(child)));
    } else {
        ask(c, fd, 10, 3000);
        c.shutdown(fd, libc::SHUT_WR);
        c.recv_to_end(fd);
    }
}

/// execv without fork, with unread data waiting and bytes in flight.
pub fn exec_itself(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        sys::wait_readable_bytes(fd, 50_000);
        sys::send_all(fd, b"before exec").ok();
        let words = helper_words("echo", fd, &[]);
        call!(libc::execv(words[0].as_ptr(), argv(&words).as_ptr().cast()));
        c.log("exec failed");
    } else {
        c.send(fd, &data::pattern(1, 0, 50_000), 0);
        c.sync("sent");
        c.recv_all(fd, 11);
        c.recv_all(fd, 50_000);
        ask(c, fd, 5, 100);
        c.shutdown(fd, libc::SHUT_WR);
        c.recv_to_end(fd);
    }
}

/// An exec that fails leaves the connection as it was.
pub fn exec_fails(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        answer(fd, 2, 1000);
        let words = [c"/no/such/program".as_ptr(), std::ptr::null()];
        c.ret("execv", call!(libc::execv(words[0], words.as_ptr())));
        c.ret(
            "execvp",
            call!(libc::execvp(c"no-such-program".as_ptr(), words.as_ptr())),
        );
        answer(fd, 3, 1000);
        c.close(fd);
    } else {
        ask(c, fd, 5, 1000);
        c.recv_to_end(fd);
    }
}

/// posix_spawn of a program that echoes on the inherited connection, then the parent.
pub fn spawn(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        answer(fd, 2, 700);
        let words = helper_words("say", fd, &["from the spawned"]);
        let env = std::env::vars()
            .map(|(k, v)| CString::new(format!("{k}={v}")).unwrap())
            .collect::<Vec<_>>();
        let mut pid = 0;
        let r = call!(libc::posix_spawn(
            &mut pid,
            words[0].as_ptr(),
            std::ptr::null(),
            std::ptr::null(),
            argv(&words).as_ptr(),
            argv(&env).as_ptr()
        ));
        c.ret("posix_spawn", r);
        c.log(format_args!("child {}", sys::wait_child(pid)));
        answer(fd, 2, 700);
        c.close(fd);
    } else {
        ask(c, fd, 2, 700);
        c.recv_all(fd, 16);
        ask(c, fd, 2, 700);
        c.recv_to_end(fd);
    }
}

/// A close-on-exec connection becomes the standard input and output of a program, which `start` starts with a copy of
/// it as descriptor 0. `unread`: bytes wait on it by then. `keeps`: the server closes its own copy when the program has
/// ended, and not before.
fn hand_to_program(c: &Ctx, unread: bool, keeps: bool, start: impl FnOnce(c_int, &[CString]) -> c_int) {
    const BYTES: usize = 5000;
    let fd = c.pair();
    call!(libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC)).ok();
    if c.is_server() {
        c.sync("sent");
        if unread {
            sys::wait_readable_bytes(fd, BYTES as c_int);
        }
        let child = start(fd, &helper_words("echo", 0, &[]));
        c.sync("started");
        if !keeps {
            sys::close(fd).ok();
        }
        c.log(format_args!("child {}", sys::wait_child(child)));
        if keeps {
            sys::close(fd).ok();
        }
        return;
    }
    let send = || sys::send_all(fd, &data::pattern(1, 0, BYTES)).ok();
    if unread {
        send();
    }
    c.sync("sent");
    c.sync("started");
    if !unread {
        send();
    }
    c.recv_all(fd, BYTES);
    ask(c, fd, 5, 700);
    c.shutdown(fd, libc::SHUT_WR);
    c.recv_to_end(fd);
    sys::close(fd).ok();
}

/// Returns this process's variables, or those of them that do not concern the library.
fn variables(is_bare: bool) -> Vec<CString> {
    std::env::vars()
        .filter(|(k, _)| !is_bare || (k != "LD_PRELOAD" && !k.starts_with("RDMASOCK")))
        .map(|(k, v)| CString::new(format!("{k}={v}")).unwrap())
        .collect()
}

/// Starts a program by posix_spawn's file actions.
fn spawn_on(fd: c_int, words: &[CString]) -> c_int {
    spawn_with(fd, words, &variables(false))
}

fn spawn_with(fd: c_int, words: &[CString], env: &[CString]) -> c_int {
    let mut actions = sys::zeroed();
    call!(libc::posix_spawn_file_actions_init(&mut actions)).ok();
    call!(libc::posix_spawn_file_actions_adddup2(&mut actions, fd, 0)).ok();
    let mut pid = 0;
    call!(libc::posix_spawn(
        &mut pid,
        words[0].as_ptr(),
        &actions,
        std::ptr::null(),
        argv(words).as_ptr(),
        argv(env).as_ptr()
    ))
    .ok();
    call!(libc::posix_spawn_file_actions_destroy(&mut actions)).ok();
    pid
}

/// Starts a program in a vfork child, as Python's subprocess does.
fn vfork_on(fd: c_int, words: &[CString]) -> c_int {
    vfork_with(fd, words, None)
}

/// As [`vfork_on`], with variables of its own if there are any.
#[inline(never)]
fn vfork_with(fd: c_int, words: &[CString], env: Option<&[CString]>) -> c_int {
    unsafe extern "C" {
        fn vfork() -> libc::pid_t;
    }
    let argv = argv(words);
    let env = env.map(self::argv);
    // SAFETY: the child makes three calls, all of whose arguments are there before it, and never returns from here.
    unsafe {
        let pid = vfork();
        if pid == 0 {
            libc::dup2(fd, 0);
            match &env {
                Some(env) => libc::execve(words[0].as_ptr(), argv.as_ptr().cast(), env.as_ptr().cast()),
                None => libc::execv(words[0].as_ptr(), argv.as_ptr().cast()),
            };
            libc::_exit(127);
        }
        pid
    }
}

/// [`hand_to_program`] by posix_spawn.
pub fn spawn_as_stdin(c: &Ctx) {
    hand_to_program(c, false, false, spawn_on);
}

/// [`hand_to_program`] by posix_spawn, with unread bytes and a copy that the server keeps.
pub fn spawn_as_stdin_unread(c: &Ctx) {
    hand_to_program(c, true, true, spawn_on);
}

/// [`hand_to_program`] by vfork, with a copy that the server keeps.
pub fn vfork_as_stdin(c: &Ctx) {
    hand_to_program(c, false, true, vfork_on);
}

/// [`hand_to_program`] by vfork, with unread bytes.
pub fn vfork_as_stdin_unread(c: &Ctx) {
    hand_to_program(c, true, false, vfork_on);
}

/// The number of scenarios of [`bare_child`].
pub const BARE: u32 = 16;

/// [`hand_to_program`] with a program that does not have the library. The bits of the scenario's number: it is started
/// by vfork; bytes are unread; the server keeps a copy; it is statically linked, in place of an environment without
/// `LD_PRELOAD`.
pub fn bare_child(c: &Ctx) {
    let [by_vfork, unread, keeps, is_static] = [1, 2, 4, 8].map(|bit| c.param & bit != 0);
    let words = match (is_static, c.is_server()) {
        (true, true) => vec![static_echo(c)],
        _ => helper_words("bare", 0, &[]),
    };
    let env = variables(!is_static);
    hand_to_program(c, unread, keeps, |fd, _| match by_vfork {
        true => vfork_with(fd, &words, Some(&env)),
        false => spawn_with(fd, &words, &env),
    });
}

/// Compiles a statically linked program that sends back what it reads from descriptor 0. Returns its path.
fn static_echo(c: &Ctx) -> CString {
    const SOURCE: &str = "
        #include <unistd.h>
        int main(void)
        {
            static char b[5000];
            for (;;) {
                long n = read(0, b, sizeof b), sent = 0;
                if (n <= 0)
                    return n != 0;
                while (sent < n) {
                    long more = write(0, b + sent, n - sent);
                    if (more < 0)
                        return 2;
                    sent += more;
                }
            }
        }";
    let (source, program) = (c.dir.join("echo.c"), c.dir.join("echo"));
    std::fs::write(&source, SOURCE).unwrap();
    let status = std::process::Command::new("cc")
        .args(["-static", "-o"])
        .args([&program, &source])
        .env_remove("LD_PRELOAD")
        .status();
    assert!(
        status.is_ok_and(|s| s.success()),
        "cc (Debian: apt install gcc libc6-dev)"
    );
    CString::new(program.to_str().unwrap()).unwrap()
}

/// system() and a close-on-exec connection: the program does not get it, the parent keeps it.
pub fn system(c: &Ctx) {
    let fd = c.pair();
    call!(libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC)).ok();
    if c.is_server() {
        answer(fd, 2, 700);
        let words: Vec<_> = helper_words("gone", fd, &[])
            .iter()
            .map(|w| w.to_str().unwrap().to_owned())
            .collect();
        let line = CString::new(words.join(" ")).unwrap();
        c.ret("system", call!(libc::system(line.as_ptr())));
        answer(fd, 2, 700);
        c.close(fd);
    } else {
        ask(c, fd, 4, 700);
        c.recv_to_end(fd);
    }
}

/// A pair of AF_UNIX sockets.
pub fn socketpair() -> [c_int; 2] {
    let mut fds = [0; 2];
    call!(libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, fds.as_mut_ptr())).ok();
    fds
}

/// Room for one fd's control message.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Passes `fd` over the AF_UNIX socket `over`.
pub fn pass_fd(over: c_int, fd: c_int) -> Ret {
    let mut byte = [b'f'];
    let mut v = [sys::iov(&mut byte)];
    let mut m = sys::msghdr(&mut v);
    let mut control = Control([0; 64]);
    m.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: the control buffer is aligned and has room for the one header and fd.
    unsafe {
        m.msg_controllen = libc::CMSG_SPACE(4) as _;
        let h = libc::CMSG_FIRSTHDR(&m);
        (*h).cmsg_level = libc::SOL_SOCKET;
        (*h).cmsg_type = libc::SCM_RIGHTS;
        (*h).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(h).cast::<c_int>().write_unaligned(fd);
    }
    call!(libc::sendmsg(over, &m, 0))
}

/// Receives the fd that [`pass_fd`] has passed.
pub fn take_fd(over: c_int) -> c_int {
    let mut byte = [0];
    let mut v = [sys::iov(&mut byte)];
    let mut m = sys::msghdr(&mut v);
    let mut control = Control([0; 64]);
    m.msg_control = control.0.as_mut_ptr().cast();
    m.msg_controllen = control.0.len() as _;
    call!(libc::recvmsg(over, &mut m, 0)).ok();
    // SAFETY: recvmsg has filled the control buffer, which is checked for a header first.
    unsafe {
        let h = libc::CMSG_FIRSTHDR(&m);
        assert!(!h.is_null(), "no control message");
        libc::CMSG_DATA(h).cast::<c_int>().read_unaligned()
    }
}

/// A child reads bytes that its parent has on a link while the parent is stopped. It gets the bytes, or an error, and
/// does not wait for ever.
pub fn child_of_a_stopped_parent(c: &Ctx) {
    const BYTES: usize = 3000;
    let fd = c.pair();
    if c.is_server() {
        let parent = std::process::id();
        let child = sys::fork_child(|| {
            let state = || std::fs::read_to_string(format!("/proc/{parent}/stat")).unwrap();
            while !state().contains(") T ") {
                sys::pause_ms(1);
            }
            let (last, got) = sys::recv_up_to(fd, BYTES);
            // SAFETY: no memory is involved.
            unsafe { libc::kill(parent as libc::pid_t, libc::SIGCONT) };
            data::verify(1, 0, &got);
            assert!(got.len() == BYTES || last.value < 0, "{last}");
            0
        });
        call!(libc::raise(libc::SIGSTOP)).ok();
        c.log(format_args!("child {}", sys::wait_child(child)));
    } else {
        sys::send_all(fd, &data::pattern(1, 0, BYTES)).ok();
        sys::recv_to_end(fd);
    }
    sys::close(fd).ok();
}

/// A parent becomes another program, which does not get the connection: the child has all of it.
pub fn child_of_a_replaced_parent(c: &Ctx) {
    const BYTES: usize = 3000;
    let fd = c.pair();
    if c.is_server() {
        sys::wait_readable_bytes(fd, BYTES as c_int);
        call!(libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC)).ok();
        let mut ends = [0; 2];
        call!(libc::pipe(ends.as_mut_ptr())).ok();
        let [end, replaced] = ends;
        call!(libc::fcntl(replaced, libc::F_SETFD, libc::FD_CLOEXEC)).ok();
        sys::fork_child(|| {
            sys::close(replaced).ok();
            sys::wait_for(end, libc::POLLHUP);
            answer(fd, 3, BYTES);
            0
        });
        let words = [c"sleep".as_ptr(), c"1".as_ptr(), std::ptr::null()];
        call!(libc::execvp(words[0], words.as_ptr()));
        c.log("exec failed");
    } else {
        ask(c, fd, 3, BYTES);
        c.recv_to_end(fd);
    }
}

/// A grandchild uses a connection of its parent and one of its grandparent; each of these has its own on a link.
pub fn grandchild(c: &Ctx) {
    const BYTES: usize = 3000;
    let (listener, port) = c.listener(2);
    let Some(listener) = listener else {
        let fds = [(); 2].map(|()| {
            let fd = sys::connected(&Addr::v4(port));
            ask(c, fd, 20, BYTES);
            sys::pause_ms(20);
            fd
        });
        for fd in fds {
            ask(c, fd, 5, BYTES);
        }
        fds.into_iter().for_each(|fd| {
            c.recv_to_end(fd);
        });
        return;
    };
    let oldest = sys::accept4(listener, 0).ok();
    answer(oldest, 20, BYTES);
    let child = sys::fork_child(|| {
        let fd = sys::accept4(listener, 0).ok();
        answer(fd, 20, BYTES);
        sys::pause_ms(30);
        let grandchild = sys::fork_child(|| {
            answer(oldest, 5, BYTES);
            answer(fd, 5, BYTES);
            0
        });
        sys::wait_child(grandchild)
    });
    c.log(format_args!("child {}", sys::wait_child(child)));
    sys::close(oldest).ok();
}

/// A parent that is killed when its connection is on a link, or on the way there. With the library its child may
/// get a reset, but only bytes that the peer has sent.
pub fn child_of_a_killed_parent(c: &Ctx) {
    const BYTES: usize = 3000;
    let (listener, port) = c.listener(1);
    for connection in 0..6 {
        let Some(listener) = listener else {
            ask_until_reset(&Addr::v4(port), BYTES);
            continue;
        };
        let mut ends = [0; 2];
        call!(libc::pipe(ends.as_mut_ptr())).ok();
        let [end, alive] = ends;
        let parent = sys::fork_child(|| {
            let fd = sys::accept4(listener, 0).ok();
            answer(fd, 5, BYTES);
            sys::pause_ms(connection);
            let parent = std::process::id();
            sys::fork_child(|| {
                // SAFETY: no memory is involved.
                unsafe { libc::kill(parent as libc::pid_t, libc::SIGKILL) };
                let mut rounds = 5;
                while rounds > 0 {
                    let (last, got) = sys::recv_up_to(fd, BYTES);
                    if got.len() < BYTES {
                        assert!(last.is(libc::ECONNRESET), "{last} after {} bytes", got.len());
                        break;
                    }
                    if sys::send_all(fd, &got).failed() {
                        break;
                    }
                    rounds -= 1;
                }
                0
            });
            loop {
                sys::pause_ms(1000);
            }
        });
        sys::close(alive).ok();
        c.log(format_args!("parent {}", sys::wait_child(parent)));
        sys::wait_for(end, libc::POLLHUP);
        sys::close(end).ok();
    }
}

/// As [`ask`], with ten rounds, the last five of which may end in a reset.
fn ask_until_reset(to: &Addr, len: usize) {
    let fd = sys::connected(to);
    for round in 0..10 {
        let sent = sys::send_all(fd, &data::pattern(round, 0, len));
        if sent.failed() {
            assert!(round >= 5 && sent.is(libc::ECONNRESET), "{sent} in round {round}");
            break;
        }
        let (last, got) = sys::recv_up_to(fd, len);
        data::verify(round, 0, &got);
        if got.len() < len {
            assert!(round >= 5 && last.is(libc::ECONNRESET), "{last} in round {round}");
            break;
        }
    }
    sys::close(fd).ok();
}

/// A connection passed to a child by SCM_RIGHTS; the child goes on, the parent closes it.
pub fn pass_to_child(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        answer(fd, 2, 3000);
        let [ours, theirs] = socketpair();
        let child = sys::fork_child(|| {
            // The inherited copy is closed: the child only has the fd that is passed.
            sys::close(fd).ok();
            answer(take_fd(theirs), 5, 3000);
            0
        });
        c.ret("pass", pass_fd(ours, fd));
        c.close(fd);
        c.log(format_args!("child {}", sys::wait_child(child)));
    } else {
        ask(c, fd, 7, 3000);
        c.recv_to_end(fd);
    }
}

/// A connection accepted here, not used yet, and passed to a worker that was forked before.
pub fn pass_fresh(c: &Ctx) {
    let [ours, theirs] = socketpair();
    let (listener, port) = c.listener(4);
    if let Some(l) = listener {
        let child = sys::fork_child(|| {
            answer(take_fd(theirs), 8, 10_000);
            0
        });
        let fd = sys::accept4(l, 0).ok();
        c.ret("pass", pass_fd(ours, fd));
        c.close(fd);
        c.log(format_args!("child {}", sys::wait_child(child)));
    } else {
        let fd = sys::connected(&Addr::v4(port));
        ask(c, fd, 8, 10_000);
        c.recv_to_end(fd);
    }
}

/// A connection passed to the same process, with unread data and data in flight; both fds are the connection.
pub fn pass_to_itself(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        sys::wait_readable_bytes(fd, 5000);
        c.recv(fd, 1000, 0);
        let [a, b] = socketpair();
        c.ret("pass", pass_fd(a, fd));
        let other = take_fd(b);
        c.recv(other, 1000, 0);
        c.recv(fd, 1000, 0);
        c.recv_all(other, 2000);
        c.close(fd);
        answer(other, 4, 6000);
        c.close(other);
    } else {
        c.send(fd, &data::pattern(1, 0, 5000), 0);
        c.sync("sent");
        ask(c, fd, 4, 6000);
        c.recv_to_end(fd);
    }
}
