//! The hooks that are ordinary functions, in tables with one row for each function of the shims. Other files have the
//! hooks that redhook cannot declare.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{
    FILE, aiocb, c_char, c_int, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t,
    pid_t, pollfd, posix_spawn_file_actions_t, posix_spawnattr_t, sigevent, sighandler_t, sigset_t, size_t, sockaddr,
    socklen_t, ssize_t, timespec, timeval,
};
use rdmasock_shims::config::environment;
use rdmasock_shims::hooks::{fd, io, process, ready, socket};
use rdmasock_shims::process::sigaction as signals;
use rdmasock_shims::sys::real;

/// Defines hooks:
///
/// ```text
/// hooks! { MODULE with real:
///     FUNCTION(ARGUMENT: TYPE, …) -> RESULT: SYMBOL, …;
/// }
/// ```
///
/// Each `SYMBOL` is exported with these arguments and this result. It calls `MODULE::FUNCTION` with libc's function of
/// its own name, `real::SYMBOL()`, and its arguments. In a table `with environment`, `environment::SYMBOL` stands in
/// libc's place.
macro_rules! hooks {
    (@libc real $symbol:ident) => { real::$symbol() };
    (@libc environment $symbol:ident) => { environment::$symbol };
    (@hook $symbol:ident ($($argument:ident: $type:ty),*) -> $result:ty, $module:ident $function:ident $libc:ident) => {
        // redhook defines items of fixed names for each hook, so each has a scope. `self` is the file: the scope has a
        // type with the symbol's name, which may be the module's too.
        const _: () = {
            redhook::hook! {
                unsafe fn $symbol($($argument: $type),*) -> $result => hook {
                    self::$module::$function(hooks!(@libc $libc $symbol) $(, $argument)*)
                }
            }
        };
    };
    ($module:ident with $libc:ident: $($function:ident $arguments:tt -> $result:ty: $($symbol:ident),+;)+) => {
        $($(hooks!(@hook $symbol $arguments -> $result, $module $function $libc);)+)+
    };
}

// The calls that move bytes.
hooks! { io with real:
    read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t: read, __read;
    read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t: __read_chk;
    readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t: readv;
    preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t: preadv2, preadv64v2;
    recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t: recv;
    recv_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int) -> ssize_t: __recv_chk;
    recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr,
        address_len: *mut socklen_t) -> ssize_t: recvfrom;
    recvfrom_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int, address: *mut sockaddr,
        address_len: *mut socklen_t) -> ssize_t: __recvfrom_chk;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t: recvmsg;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int: recvmmsg;
    write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t: write, __write;
    writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t: writev;
    pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t: pwritev2, pwritev64v2;
    send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t: send, __send;
    sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, address: *const sockaddr,
        address_len: socklen_t) -> ssize_t: sendto;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t: sendmsg;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int: sendmmsg;
    sendfile(out: c_int, input: c_int, offset: *mut off_t, count: size_t) -> ssize_t: sendfile, sendfile64;
    splice(input: c_int, input_offset: *mut off_t, out: c_int, out_offset: *mut off_t, len: size_t,
        flags: c_uint) -> ssize_t: splice;
}

// The calls that hand a descriptor to I/O inside libc. `dprintf` is variadic and so in `variadic.rs`.
hooks! { io with real:
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE: fdopen;
    vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int: vdprintf;
    vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int: __vdprintf_chk;
    aio(block: *mut aiocb) -> c_int: aio_read, aio_read64, aio_write, aio_write64;
    lio_listio(mode: c_int, blocks: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int:
        lio_listio, lio_listio64;
}

// The calls that wait for readiness.
hooks! { ready with real:
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int: poll, __poll;
    poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int: __poll_chk;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int: ppoll;
    ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, size: size_t) -> c_int:
        __ppoll_chk;
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int:
        select, __select;
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t) -> c_int: pselect;
    epoll_create(size: c_int) -> c_int: epoll_create, epoll_create1;
    epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int: epoll_ctl;
    epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int: epoll_wait;
    epoll_pwait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t) -> c_int:
        epoll_pwait;
    epoll_pwait2(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec,
        mask: *const sigset_t) -> c_int: epoll_pwait2;
}

// The calls that make, connect, configure and shut sockets.
hooks! { socket with real:
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int: socket;
    listen(fd: c_int, backlog: c_int) -> c_int: listen;
    accept(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> c_int: accept;
    accept4(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t, flags: c_int) -> c_int: accept4;
    connect(fd: c_int, address: *const sockaddr, address_len: socklen_t) -> c_int: connect, __connect;
    shutdown(fd: c_int, how: c_int) -> c_int: shutdown;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, value_len: *mut socklen_t) -> c_int:
        getsockopt;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, value_len: socklen_t) -> c_int: setsockopt;
}

// The calls that close, duplicate and control descriptors.
hooks! { fd with real:
    close(fd: c_int) -> c_int: close, __close;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int: close_range;
    closefrom(first: c_int) -> (): closefrom;
    dup(fd: c_int) -> c_int: dup;
    dup2(old: c_int, new: c_int) -> c_int: dup2, __dup2;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int: dup3;
    fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int: fcntl, __fcntl, fcntl64;
    ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int: ioctl;
}

// The calls that only make a descriptor. It gets the lowest free number.
hooks! { fd with real:
    open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int: open, open64, __open, __open64;
    open_2(path: *const c_char, flags: c_int) -> c_int: __open_2, __open64_2;
    openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int: openat, openat64;
    openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int: __openat_2, __openat64_2;
    creat(path: *const c_char, mode: c_uint) -> c_int: creat, creat64;
    pipe(ends: *mut c_int) -> c_int: pipe, __pipe;
    pipe2(ends: *mut c_int, flags: c_int) -> c_int: pipe2;
    socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int: socketpair;
    eventfd(value: c_uint, flags: c_int) -> c_int: eventfd;
    timerfd_create(clock: c_int, flags: c_int) -> c_int: timerfd_create;
    signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int: signalfd;
    inotify_init() -> c_int: inotify_init;
    inotify_init1(flags: c_int) -> c_int: inotify_init1;
    memfd_create(name: *const c_char, flags: c_uint) -> c_int: memfd_create;
}

// The calls that replace or spawn a process. `variadic.rs` has `execl*`.
hooks! { process with environment:
    execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int: execve, execvpe;
    execv(path: *const c_char, argv: *const *const c_char) -> c_int: execv, execvp;
    fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int: fexecve;
    execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char,
        flags: c_int) -> c_int: execveat;
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int:
        posix_spawn, posix_spawnp;
}

// The other calls that spawn, restrict, move or end a process. `vfork.rs` has `vfork`, and the shims handle `exit` by
// `atexit`.
hooks! { process with real:
    posix_spawn_file_actions_adddup2(actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int) -> c_int:
        posix_spawn_file_actions_adddup2;
    system(command: *const c_char) -> c_int: system;
    popen(command: *const c_char, mode: *const c_char) -> *mut FILE: popen;
    fork() -> pid_t: fork;
    fork_bare() -> pid_t: _Fork;
    clone(function: Option<real::CloneChildFn>, stack: *mut c_void, flags: c_int, argument: *mut c_void,
        parent: *mut pid_t, storage: *mut c_void, child: *mut pid_t) -> c_int: clone, __clone;
    exit_now(status: c_int) -> (): _exit, _Exit;
    quick_exit(status: c_int) -> (): quick_exit;
    prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int: prctl;
    unshare(flags: c_int) -> c_int: unshare;
    setns(fd: c_int, kind: c_int) -> c_int: setns;
}

// The calls that install signal handlers, and `pthread_cancel`. `siginterrupt` and `sigignore` need no hook: libc
// changes the installed handler.
hooks! { signals with real:
    sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int: sigaction, __sigaction;
    signal(number: c_int, handler: sighandler_t) -> sighandler_t: signal, bsd_signal, ssignal;
    signal_once(number: c_int, handler: sighandler_t) -> sighandler_t: sigset, sysv_signal, __sysv_signal;
    pthread_cancel(thread: libc::pthread_t) -> c_int: pthread_cancel;
}
