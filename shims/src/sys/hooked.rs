//! The table of the hooked functions.
//!
//! A row is a hook: a function of `hooks`, in the module that its group names. The row lists the symbols of libc that
//! the hook replaces, and the numbers of the system calls that it serves:
//!
//! ```text
//! MODULE with LIBC {
//!     FUNCTION(ARGUMENT: TYPE, …) -> RESULT: SYMBOL, … | WAY NUMBER …;
//! }
//! ```
//!
//! Three files use the table: `sys/real.rs` finds libc's functions, `preload/src/hooks.rs` exports the symbols, and
//! `hooks/syscall.rs` serves the numbers. `WAY` is the function in `hooks/syscall.rs` by which a number is served.
//! `LIBC` is the module from which the hook gets the function with the symbol's name: `real`, or `environment`, whose
//! functions call libc with a completed environment.

/// Calls the macro `$with`. Its arguments are the words that follow its name here, then the table.
#[doc(hidden)]
#[macro_export]
macro_rules! hooked {
    ($with:ident $($before:tt)*) => { $with! { $($before)*

    // The calls that move bytes.
    io with real {
        read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t: read, __read | waits_on SYS_read;
        read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t: __read_chk;
        readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t: readv | waits_on SYS_readv;
        // With offset -1 these are readv and writev.
        preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t:
            preadv2, preadv64v2;
        recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t: recv;
        recv_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int) -> ssize_t: __recv_chk;
        recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr,
            address_len: *mut socklen_t) -> ssize_t: recvfrom | waits_on SYS_recvfrom;
        recvfrom_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int, address: *mut sockaddr,
            address_len: *mut socklen_t) -> ssize_t: __recvfrom_chk;
        recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t: recvmsg | waits_on SYS_recvmsg;
        recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int:
            recvmmsg | waits_on SYS_recvmmsg;
        write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t: write, __write | waits_on SYS_write;
        writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t: writev | waits_on SYS_writev;
        pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t:
            pwritev2, pwritev64v2;
        send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t: send, __send;
        sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, address: *const sockaddr,
            address_len: socklen_t) -> ssize_t: sendto | waits_on SYS_sendto;
        // `waits`, not `waits_on`: the system call is served also if the table has no entry for `fd`, because a message
        // on an AF_UNIX socket may pass the fd of a connection to another process.
        sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t: sendmsg | waits SYS_sendmsg;
        sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int:
            sendmmsg | waits SYS_sendmmsg;
        sendfile(out: c_int, input: c_int, offset: *mut off_t, count: size_t) -> ssize_t:
            sendfile, sendfile64 | waits_on SYS_sendfile;
        splice(input: c_int, input_offset: *mut off_t, out: c_int, out_offset: *mut off_t, len: size_t,
            flags: c_uint) -> ssize_t: splice | waits SYS_splice;
    }

    // The calls that hand a descriptor to I/O inside libc. `preload/src/variadic.rs` has `dprintf`, which is variadic.
    io with real {
        fdopen(fd: c_int, mode: *const c_char) -> *mut FILE: fdopen;
        // A `va_list` argument is passed as a pointer.
        vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int: vdprintf;
        vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int: __vdprintf_chk;
        aio(block: *mut aiocb) -> c_int: aio_read, aio_read64, aio_write, aio_write64;
        lio_listio(mode: c_int, blocks: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int:
            lio_listio, lio_listio64;
    }

    // The calls that wait for readiness.
    ready with real {
        poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int: poll, __poll | waits SYS_poll;
        poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int: __poll_chk;
        ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int: ppoll;
        ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
            size: size_t) -> c_int: __ppoll_chk;
        select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
            timeout: *mut timeval) -> c_int: select, __select | waits SYS_select;
        pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
            mask: *const sigset_t) -> c_int: pselect;
        epoll_create(size: c_int) -> c_int:
            epoll_create, epoll_create1 | owns SYS_epoll_create1 | owns SYS_epoll_create;
        epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int:
            epoll_ctl | owns SYS_epoll_ctl;
        epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int:
            epoll_wait | waits_on SYS_epoll_wait;
        epoll_pwait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int,
            mask: *const sigset_t) -> c_int: epoll_pwait;
        // From glibc 2.35 on.
        epoll_pwait2(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec,
            mask: *const sigset_t) -> c_int: epoll_pwait2;
    }

    // The calls that make, connect, configure and shut sockets.
    socket with real {
        socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int: socket | owns SYS_socket;
        listen(fd: c_int, backlog: c_int) -> c_int: listen | owns_fd SYS_listen;
        accept(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> c_int: accept | owns_made SYS_accept;
        accept4(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t, flags: c_int) -> c_int:
            accept4 | owns_made SYS_accept4;
        connect(fd: c_int, address: *const sockaddr, address_len: socklen_t) -> c_int:
            connect, __connect | owns SYS_connect;
        shutdown(fd: c_int, how: c_int) -> c_int: shutdown | direct SYS_shutdown;
        getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, value_len: *mut socklen_t) -> c_int:
            getsockopt | direct SYS_getsockopt;
        setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, value_len: socklen_t) -> c_int:
            setsockopt | direct SYS_setsockopt;
    }

    // The calls that close, duplicate and control descriptors.
    fd with real {
        close(fd: c_int) -> c_int: close, __close | owns_fd SYS_close;
        // The next two are from glibc 2.34 on.
        close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int: close_range | owns SYS_close_range;
        closefrom(first: c_int) -> (): closefrom;
        dup(fd: c_int) -> c_int: dup | owns_made SYS_dup;
        dup2(old: c_int, new: c_int) -> c_int: dup2, __dup2 | owns SYS_dup2;
        dup3(old: c_int, new: c_int, flags: c_int) -> c_int: dup3 | owns SYS_dup3;
        // The next two are variadic in C, with at most one argument of register size.
        fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int: fcntl, __fcntl, fcntl64 | owns_made SYS_fcntl;
        ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int: ioctl | direct SYS_ioctl;
    }

    // The calls that only make a descriptor. They are hooked so that it gets the lowest free number.
    fd with real {
        // Variadic in C, with at most one more argument, as is `openat`.
        open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int:
            open, open64, __open, __open64 | direct SYS_open;
        open_2(path: *const c_char, flags: c_int) -> c_int: __open_2, __open64_2;
        openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int:
            openat, openat64 | direct SYS_openat;
        openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int: __openat_2, __openat64_2;
        creat(path: *const c_char, mode: c_uint) -> c_int: creat, creat64 | direct SYS_creat;
        pipe(ends: *mut c_int) -> c_int: pipe, __pipe | direct SYS_pipe;
        pipe2(ends: *mut c_int, flags: c_int) -> c_int: pipe2 | direct SYS_pipe2;
        socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int:
            socketpair | direct SYS_socketpair;
        eventfd(value: c_uint, flags: c_int) -> c_int: eventfd | direct SYS_eventfd2;
        timerfd_create(clock: c_int, flags: c_int) -> c_int: timerfd_create | direct SYS_timerfd_create;
        signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int: signalfd;
        inotify_init() -> c_int: inotify_init;
        inotify_init1(flags: c_int) -> c_int: inotify_init1 | direct SYS_inotify_init1;
        memfd_create(name: *const c_char, flags: c_uint) -> c_int: memfd_create | direct SYS_memfd_create;
    }

    // The calls that replace or spawn a process. `preload/src/variadic.rs` has `execl*`.
    process with environment {
        execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int:
            execve, execvpe | owns SYS_execve;
        execv(path: *const c_char, argv: *const *const c_char) -> c_int: execv, execvp;
        fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int: fexecve;
        // From glibc 2.34 on.
        execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char,
            flags: c_int) -> c_int: execveat | owns SYS_execveat;
        // libc has each symbol in two versions. `dlsym` finds the default one (2.15 on x86-64), not the older one,
        // which tries `/bin/sh` on `ENOEXEC`.
        posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
            attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int:
            posix_spawn, posix_spawnp;
    }

    // The other calls that spawn, restrict, move or end a process. `preload/src/vfork.rs` has `vfork`, and the shims
    // handle `exit` by `atexit`.
    process with real {
        posix_spawn_file_actions_adddup2(actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int) -> c_int:
            posix_spawn_file_actions_adddup2;
        system(command: *const c_char) -> c_int: system;
        popen(command: *const c_char, mode: *const c_char) -> *mut FILE: popen;
        fork() -> pid_t: fork;
        // Fork without the handlers of `pthread_atfork`, from glibc 2.34 on.
        fork_bare() -> pid_t: _Fork;
        // In C, `clone` is variadic from `parent` on.
        clone(function: Option<unsafe extern "C" fn(*mut c_void) -> c_int>, stack: *mut c_void, flags: c_int,
            argument: *mut c_void, parent: *mut pid_t, storage: *mut c_void, child: *mut pid_t) -> c_int:
            clone, __clone;
        // `_exit`, `_Exit` and `quick_exit` do not return.
        exit_now(status: c_int) -> (): _exit, _Exit;
        quick_exit(status: c_int) -> (): quick_exit;
        // `prctl` is variadic in C.
        prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int: prctl | owns SYS_prctl;
        unshare(flags: c_int) -> c_int: unshare | owns SYS_unshare;
        setns(fd: c_int, kind: c_int) -> c_int: setns | owns SYS_setns;
    }

    // `seccomp` has no function in libc, only a number.
    process with nothing {
        seccomp(operation: c_uint, flags: c_uint, argument: *mut c_void) -> c_int: | owns SYS_seccomp;
    }

    // The calls that install signal handlers, and `pthread_cancel`. `siginterrupt` and `sigignore` need no hook: libc
    // changes the installed handler.
    signals with real {
        sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int:
            sigaction, __sigaction;
        signal(number: c_int, handler: sighandler_t) -> sighandler_t: signal, bsd_signal, ssignal;
        signal_once(number: c_int, handler: sighandler_t) -> sighandler_t: sigset, sysv_signal, __sysv_signal;
        pthread_cancel(thread: libc::pthread_t) -> c_int: pthread_cancel;
    }

    }};
}
