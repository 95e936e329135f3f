//! libc's own versions of the functions that `preload/` exports under the same names. One table has their types. libc's
//! `dlsym(RTLD_NEXT)` finds them, and is itself found in libc's ELF tables.
//!
//! `real::recv()` is libc's `recv`. The table is for the pass-through of hooks, and for blocking calls of the shims
//! that have to stay cancellation points. The shims' other I/O goes through `rustix`, whose raw system calls never
//! enter the hooks.
//!
//! redhook's `real!` does not serve here. It initialises with `std::sync::Once`, which hangs when a signal handler or a
//! child forked in the middle enters it again. It also panics where libc lacks the symbol. Here a lookup is one relaxed
//! load, and a symbol that libc lacks fails with `ENOSYS`.
//!
//! There are two ways to call what the table gives:
//! - `real(…)` as the last thing that a pass-through does. The call becomes a jump, and the hook costs next to nothing.
//!   After a system call, x86-64 mispredicts the return of each further frame, at about 8 ns.
//! - [`real.cancellable()(…)`](Cancellable) for a call that can block anywhere else.

use core::ffi::CStr;
use core::slice;
use core::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    Elf64_Phdr, Elf64_Sym, FILE, aiocb, c_char, c_int, c_long, c_uint, c_ulong, c_void, dl_phdr_info, epoll_event,
    fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pid_t, pollfd, posix_spawn_file_actions_t, posix_spawnattr_t,
    sigevent, sighandler_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};

/// A symbol of libc, looked up at first use and kept.
struct Symbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Symbol {
    /// Returns a symbol that is not looked up yet. `name` ends in its only NUL.
    const fn new(name: &'static str) -> Self {
        let name = match CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => name,
            Err(_) => c"",
        };
        Self {
            name,
            address: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Looks the symbol up and returns its address; null if libc lacks it.
    ///
    /// `extern "C"`, because a function that may unwind would leave redhook's `catch_unwind` in the hooks of an
    /// unoptimised build, and with it the abort on `pthread_cancel`.
    ///
    /// A failure is not kept: the library that has the symbol (librt before glibc 2.34) may be loaded later.
    #[cold]
    #[inline(never)]
    extern "C" fn resolve(&self) -> *mut c_void {
        let address = if self.name == c"dlsym" {
            let mut is_behind = false;
            let next = find(|object| {
                let address = object.function(self.name).filter(|_| is_behind);
                is_behind |= object.is_own();
                address
            });
            next.unwrap_or_default()
        } else {
            // SAFETY: the name is a C string with static lifetime.
            unsafe { dlsym()(libc::RTLD_NEXT, self.name.as_ptr()) }
        };
        self.address.store(address, Ordering::Relaxed);
        address
    }
}

/// A type of result whose function reports a failure in errno.
pub trait Failure {
    /// The value that means "see errno".
    const FAILURE: Self;
}

impl Failure for c_int {
    const FAILURE: Self = -1;
}

impl Failure for c_long {
    const FAILURE: Self = -1;
}

impl Failure for ssize_t {
    const FAILURE: Self = -1;
}

impl Failure for sighandler_t {
    // SIG_ERR
    const FAILURE: Self = usize::MAX;
}

impl<T> Failure for *mut T {
    const FAILURE: Self = core::ptr::null_mut();
}

impl Failure for () {
    const FAILURE: Self = ();
}

/// The type of a function, with a stand-in that fails with `ENOSYS` where libc has none.
trait Absent {
    const ABSENT: Self;
}

/// The type of a function of libc, as `extern "C"`.
pub trait Cancellable {
    /// The type of the same function as `extern "C-unwind"`.
    type Unwinding;

    /// Returns the same function, for a call that can block and is not the last thing that the caller does. The forced
    /// unwind of `pthread_cancel` then runs the destructors of the frames that it passes. An `extern "C"` call in a
    /// function that has any would abort the process.
    fn cancellable(self) -> Self::Unwinding;
}

macro_rules! arity {
    ($($arg:ident)*) => {
        impl<R, $($arg),*> Cancellable for unsafe extern "C" fn($($arg),*) -> R {
            type Unwinding = unsafe extern "C-unwind" fn($($arg),*) -> R;

            #[inline]
            fn cancellable(self) -> Self::Unwinding {
                // SAFETY: function pointers of the same signature, whose ABIs differ only in
                // whether the call may unwind; "C-unwind" assumes less.
                unsafe { core::mem::transmute::<Self, Self::Unwinding>(self) }
            }
        }

        impl<R: Failure, $($arg),*> Absent for unsafe extern "C" fn($($arg),*) -> R {
            const ABSENT: Self = {
                unsafe extern "C" fn absent<R: Failure, $($arg),*>($(_: $arg),*) -> R {
                    crate::sys::errno::set(libc::ENOSYS);
                    R::FAILURE
                }
                absent::<R, $($arg),*>
            };
        }
    };
}

arity!();
arity!(A);
arity!(A B);
arity!(A B C);
arity!(A B C D);
arity!(A B C D E);
arity!(A B C D E F);
arity!(A B C D E F G);

macro_rules! functions {
    ($( $(#[$doc:meta])* $alias:ident = $args:tt -> $ret:ty: $($name:ident),+; )+) => {
        $(
            $(#[$doc])*
            pub type $alias = unsafe extern "C" fn $args -> $ret;

            $(
                #[doc = concat!("libc's `", stringify!($name), "`.")]
                #[inline]
                #[allow(non_snake_case, reason = "libc's name")]
                pub fn $name() -> $alias {
                    static SYMBOL: Symbol = Symbol::new(concat!(stringify!($name), "\0"));

                    // Relaxed is enough: the code at the address was there before any code of this library ran, and
                    // every thread that looks it up finds the same address.
                    let mut address = SYMBOL.address.load(Ordering::Relaxed);
                    if address.is_null() {
                        address = SYMBOL.resolve();
                        if address.is_null() {
                            return <$alias as Absent>::ABSENT;
                        }
                    }
                    // SAFETY: libc's function of this name has this signature, and libc is never
                    // unloaded.
                    unsafe { core::mem::transmute::<*mut c_void, $alias>(address) }
                }
            )+
        )+

        /// Looks up every function, so that no hook has to do it later in a signal handler or a fork child, where
        /// `dlsym` is not allowed.
        pub fn resolve_all() {
            $($( $name(); )+)+
        }
    };
}

/// The function that a child of `clone` runs, with its argument.
pub type CloneChildFn = unsafe extern "C" fn(*mut c_void) -> c_int;

/// `seccomp(operation, flags, argument)`, a system call without a function in libc
pub type SeccompFn = unsafe extern "C" fn(c_uint, c_uint, *mut c_void) -> c_int;

/// `Lmid_t` of dlfcn.h: a namespace of loaded objects.
pub type Lmid = c_long;

functions! {
    /// `dlopen(path, flags)`
    DlopenFn = (*const c_char, c_int) -> *mut c_void: dlopen;
    /// `dlmopen(namespace, path, flags)`
    DlmopenFn = (Lmid, *const c_char, c_int) -> *mut c_void: dlmopen;
    /// `dlsym(handle, name)`
    DlsymFn = (*mut c_void, *const c_char) -> *mut c_void: dlsym;
    /// `dlvsym(handle, name, version)`
    DlvsymFn = (*mut c_void, *const c_char, *const c_char) -> *mut c_void: dlvsym;

    // Signals.

    /// `sigaction(signal, new action, old action)`
    SigactionFn = (c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int: sigaction, __sigaction;
    /// `signal(signal, handler)`, and its kin
    SignalFn = (c_int, sighandler_t) -> sighandler_t:
        signal, bsd_signal, ssignal, sigset, sysv_signal, __sysv_signal;

    /// `pthread_cancel(thread)`
    PthreadCancelFn = (libc::pthread_t) -> c_int: pthread_cancel;

    // Bytes in and out.

    /// `read(fd, buf, len)`
    ReadFn = (c_int, *mut c_void, size_t) -> ssize_t: read, __read;
    /// `__read_chk(fd, buf, len, size of buf)`
    ReadChkFn = (c_int, *mut c_void, size_t, size_t) -> ssize_t: __read_chk;
    /// `readv(fd, iov, count)` and `writev`
    VectorFn = (c_int, *const iovec, c_int) -> ssize_t: readv, writev;
    /// `preadv2(fd, iov, count, offset, flags)` and `pwritev2`; offset -1 makes them `readv` and `writev`
    VectorFlagsFn = (c_int, *const iovec, c_int, off_t, c_int) -> ssize_t:
        preadv2, preadv64v2, pwritev2, pwritev64v2;
    /// `recv(fd, buf, len, flags)`
    RecvFn = (c_int, *mut c_void, size_t, c_int) -> ssize_t: recv;
    /// `__recv_chk(fd, buf, len, size of buf, flags)`
    RecvChkFn = (c_int, *mut c_void, size_t, size_t, c_int) -> ssize_t: __recv_chk;
    /// `recvfrom(fd, buf, len, flags, address, address length)`
    RecvFromFn = (c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t: recvfrom;
    /// `__recvfrom_chk(fd, buf, len, size of buf, flags, address, address length)`
    RecvFromChkFn = (c_int, *mut c_void, size_t, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t:
        __recvfrom_chk;
    /// `recvmsg(fd, message, flags)`
    RecvMsgFn = (c_int, *mut msghdr, c_int) -> ssize_t: recvmsg;
    /// `recvmmsg(fd, messages, count, flags, timeout)`
    RecvMmsgFn = (c_int, *mut mmsghdr, c_uint, c_int, *mut timespec) -> c_int: recvmmsg;
    /// `write(fd, buf, len)`
    WriteFn = (c_int, *const c_void, size_t) -> ssize_t: write, __write;
    /// `send(fd, buf, len, flags)`
    SendFn = (c_int, *const c_void, size_t, c_int) -> ssize_t: send, __send;
    /// `sendto(fd, buf, len, flags, address, address length)`
    SendToFn = (c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t: sendto;
    /// `sendmsg(fd, message, flags)`
    SendMsgFn = (c_int, *const msghdr, c_int) -> ssize_t: sendmsg;
    /// `sendmmsg(fd, messages, count, flags)`
    SendMmsgFn = (c_int, *mut mmsghdr, c_uint, c_int) -> c_int: sendmmsg;
    /// `sendfile(out, in, offset, count)`
    SendFileFn = (c_int, c_int, *mut off_t, size_t) -> ssize_t: sendfile, sendfile64;
    /// `splice(in, in offset, out, out offset, len, flags)`
    SpliceFn = (c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t: splice;

    // Sockets.

    /// `socket(domain, type, protocol)`
    SocketFn = (c_int, c_int, c_int) -> c_int: socket;
    /// `listen(fd, backlog)` and `shutdown(fd, how)`
    SocketIntFn = (c_int, c_int) -> c_int: listen, shutdown;
    /// `accept(fd, address, address length)`
    AcceptFn = (c_int, *mut sockaddr, *mut socklen_t) -> c_int: accept;
    /// `accept4(fd, address, address length, flags)`
    Accept4Fn = (c_int, *mut sockaddr, *mut socklen_t, c_int) -> c_int: accept4;
    /// `connect(fd, address, address length)`
    ConnectFn = (c_int, *const sockaddr, socklen_t) -> c_int: connect, __connect;
    /// `getsockopt(fd, level, name, value, value length)`
    GetSockOptFn = (c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int: getsockopt;
    /// `setsockopt(fd, level, name, value, value length)`
    SetSockOptFn = (c_int, c_int, c_int, *const c_void, socklen_t) -> c_int: setsockopt;

    // Descriptors.

    /// `open(path, flags, mode)`; variadic in C, with at most one more argument
    OpenFn = (*const c_char, c_int, c_uint) -> c_int: open, open64, __open, __open64;
    /// `__open_2(path, flags)`
    Open2Fn = (*const c_char, c_int) -> c_int: __open_2, __open64_2;
    /// `openat(at, path, flags, mode)`, as `open`
    OpenatFn = (c_int, *const c_char, c_int, c_uint) -> c_int: openat, openat64;
    /// `__openat_2(at, path, flags)`
    Openat2Fn = (c_int, *const c_char, c_int) -> c_int: __openat_2, __openat64_2;
    /// `creat(path, mode)`
    CreatFn = (*const c_char, c_uint) -> c_int: creat, creat64;
    /// `pipe(ends)`
    PipeFn = (*mut c_int) -> c_int: pipe, __pipe;
    /// `pipe2(ends, flags)`
    Pipe2Fn = (*mut c_int, c_int) -> c_int: pipe2;
    /// `socketpair(domain, type, protocol, ends)`
    SocketpairFn = (c_int, c_int, c_int, *mut c_int) -> c_int: socketpair;
    /// `eventfd(value, flags)`
    EventfdFn = (c_uint, c_int) -> c_int: eventfd;
    /// `timerfd_create(clock, flags)`
    TimerfdFn = (c_int, c_int) -> c_int: timerfd_create;
    /// `signalfd(fd, mask, flags)`
    SignalfdFn = (c_int, *const sigset_t, c_int) -> c_int: signalfd;
    /// `inotify_init()`
    InotifyInitFn = () -> c_int: inotify_init;
    /// `inotify_init1(flags)`
    InotifyFn = (c_int) -> c_int: inotify_init1;
    /// `memfd_create(name, flags)`
    MemfdFn = (*const c_char, c_uint) -> c_int: memfd_create;
    /// `close(fd)`
    CloseFn = (c_int) -> c_int: close, __close;
    /// `close_range(first, last, flags)`, from glibc 2.34 on
    CloseRangeFn = (c_uint, c_uint, c_int) -> c_int: close_range;
    /// `closefrom(first)`, from glibc 2.34 on
    CloseFromFn = (c_int) -> (): closefrom;
    /// `dup(fd)`
    DupFn = (c_int) -> c_int: dup;
    /// `dup2(old, new)`
    Dup2Fn = (c_int, c_int) -> c_int: dup2, __dup2;
    /// `dup3(old, new, flags)`
    Dup3Fn = (c_int, c_int, c_int) -> c_int: dup3;
    /// `fcntl(fd, command, argument)`; variadic in C, with at most one argument of register size
    FcntlFn = (c_int, c_int, c_ulong) -> c_int: fcntl, __fcntl, fcntl64;
    /// `ioctl(fd, request, argument)`; variadic in C, with at most one argument of register size
    IoctlFn = (c_int, c_ulong, *mut c_void) -> c_int: ioctl;

    // Readiness.

    /// `poll(fds, count, timeout in ms)`
    PollFn = (*mut pollfd, nfds_t, c_int) -> c_int: poll, __poll;
    /// `__poll_chk(fds, count, timeout in ms, size of fds in bytes)`
    PollChkFn = (*mut pollfd, nfds_t, c_int, size_t) -> c_int: __poll_chk;
    /// `ppoll(fds, count, timeout, signal mask)`
    PpollFn = (*mut pollfd, nfds_t, *const timespec, *const sigset_t) -> c_int: ppoll;
    /// `__ppoll_chk(fds, count, timeout, signal mask, size of fds in bytes)`
    PpollChkFn = (*mut pollfd, nfds_t, *const timespec, *const sigset_t, size_t) -> c_int: __ppoll_chk;
    /// `select(count, read, write, except, timeout)`
    SelectFn = (c_int, *mut fd_set, *mut fd_set, *mut fd_set, *mut timeval) -> c_int: select, __select;
    /// `pselect(count, read, write, except, timeout, signal mask)`
    PselectFn = (c_int, *mut fd_set, *mut fd_set, *mut fd_set, *const timespec, *const sigset_t) -> c_int: pselect;
    /// `epoll_create(size)` and `epoll_create1(flags)`
    EpollCreateFn = (c_int) -> c_int: epoll_create, epoll_create1;
    /// `epoll_ctl(epoll, operation, fd, event)`
    EpollCtlFn = (c_int, c_int, c_int, *mut epoll_event) -> c_int: epoll_ctl;
    /// `epoll_wait(epoll, events, count, timeout in ms)`
    EpollWaitFn = (c_int, *mut epoll_event, c_int, c_int) -> c_int: epoll_wait;
    /// `epoll_pwait(epoll, events, count, timeout in ms, signal mask)`
    EpollPwaitFn = (c_int, *mut epoll_event, c_int, c_int, *const sigset_t) -> c_int: epoll_pwait;
    /// `epoll_pwait2(epoll, events, count, timeout, signal mask)`, from glibc 2.35 on
    EpollPwait2Fn = (c_int, *mut epoll_event, c_int, *const timespec, *const sigset_t) -> c_int: epoll_pwait2;

    // Processes.

    /// `execve(path, argv, envp)` and `execvpe`
    ExecEnvFn = (*const c_char, *const *const c_char, *const *const c_char) -> c_int: execve, execvpe;
    /// `execv(path, argv)` and `execvp`
    ExecFn = (*const c_char, *const *const c_char) -> c_int: execv, execvp;
    /// `fexecve(fd, argv, envp)`
    FexecveFn = (c_int, *const *const c_char, *const *const c_char) -> c_int: fexecve;
    /// `execveat(dirfd, path, argv, envp, flags)`, from glibc 2.34 on
    ExecveatFn = (c_int, *const c_char, *const *const c_char, *const *const c_char, c_int) -> c_int: execveat;
    /// `posix_spawn_file_actions_adddup2(file actions, fd, new fd)`
    PosixSpawnDup2Fn = (*mut posix_spawn_file_actions_t, c_int, c_int) -> c_int: posix_spawn_file_actions_adddup2;
    /// `posix_spawn(pid, path, file actions, attributes, argv, envp)`. Two symbol versions: `dlsym`
    /// finds the default one (2.15 on x86-64), not the old one that tried `/bin/sh` on `ENOEXEC`.
    PosixSpawnFn = (
        *mut pid_t,
        *const c_char,
        *const posix_spawn_file_actions_t,
        *const posix_spawnattr_t,
        *const *mut c_char,
        *const *mut c_char
    ) -> c_int: posix_spawn, posix_spawnp;
    /// `system(command)`
    SystemFn = (*const c_char) -> c_int: system;
    /// `popen(command, mode)`
    PopenFn = (*const c_char, *const c_char) -> *mut FILE: popen;
    /// `fork()`; `_Fork()`: fork without the handlers of `pthread_atfork`, from glibc 2.34 on
    ForkFn = () -> pid_t: fork, _Fork;
    /// `clone(function, stack, flags, argument, parent_tid, tls, child_tid)`; the last three are variable arguments
    CloneFn = (Option<CloneChildFn>, *mut c_void, c_int, *mut c_void, *mut pid_t, *mut c_void, *mut pid_t) -> c_int:
        clone, __clone;
    /// `_exit(status)`, `_Exit` and `quick_exit`; none of them returns
    ExitFn = (c_int) -> (): _exit, _Exit, quick_exit;

    // Out of signal handlers.

    /// `longjmp(environment, value)`; does not return
    LongjmpFn = (*mut c_void, c_int) -> (): longjmp, _longjmp, siglongjmp, __longjmp_chk;
    /// `unshare(flags)`
    UnshareFn = (c_int) -> c_int: unshare;
    /// `setns(fd, kind)`
    SetnsFn = (c_int, c_int) -> c_int: setns;
    /// `prctl(option, four arguments)`; variadic in C
    PrctlFn = (c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int: prctl;

    // System calls by number.

    /// `syscall(number, six arguments)`; variadic in C
    SyscallFn = (c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long: syscall;

    // Calls in which libc itself does the I/O, where no hook sees it.

    /// `fdopen(fd, mode)`
    FdopenFn = (c_int, *const c_char) -> *mut FILE: fdopen;
    /// `vdprintf(fd, format, va_list)`; a `va_list` argument is passed as a pointer
    VdprintfFn = (c_int, *const c_char, *mut c_void) -> c_int: vdprintf;
    /// `__vdprintf_chk(fd, flag, format, va_list)`
    VdprintfChkFn = (c_int, c_int, *const c_char, *mut c_void) -> c_int: __vdprintf_chk;
    /// `aio_read(control block)` and `aio_write`
    AioFn = (*mut aiocb) -> c_int: aio_read, aio_read64, aio_write, aio_write64;
    /// `lio_listio(mode, control blocks, count, notification)`
    LioFn = (c_int, *const *mut aiocb, c_int, *mut sigevent) -> c_int: lio_listio, lio_listio64;
}

// The symbols of loaded objects, read from their ELF tables. The library hooks `dlsym`, so it cannot find libc's
// `dlsym` by `dlsym`. Nor does `dlsym` tell which function an address is.

/// An entry of the dynamic section.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// The value of `st_info & 15` of a function.
const STT_FUNC: u8 = 2;
/// A bit in DT_VERSYM: the symbol is not the default version of its name.
const HIDDEN: u16 = 0x8000;

/// A loaded object.
pub struct Object<'a> {
    base: usize,
    headers: &'a [Elf64_Phdr],
    path: &'a CStr,
}

/// Calls `visit` with the objects of this namespace in the order in which they were loaded. Returns the first value
/// that `visit` returns, `None` if there is none. Allocates nothing. `visit` must not load or unload objects.
pub fn find<T, V: FnMut(&Object) -> Option<T>>(visit: V) -> Option<T> {
    unsafe extern "C" fn each<T, V: FnMut(&Object) -> Option<T>>(
        info: *mut dl_phdr_info,
        _: usize,
        state: *mut c_void,
    ) -> c_int {
        // SAFETY: `state` is the pair that `find` passes to dl_iterate_phdr, which calls this only while `find` waits
        // for it.
        let (visit, found) = unsafe { &mut *state.cast::<(V, Option<T>)>() };
        // SAFETY: the dynamic linker's own entry, which it keeps during the call; its headers and path stay with it.
        let object = unsafe {
            Object {
                base: (*info).dlpi_addr as usize,
                headers: slice::from_raw_parts((*info).dlpi_phdr, (*info).dlpi_phnum.into()),
                path: CStr::from_ptr((*info).dlpi_name),
            }
        };
        *found = visit(&object);
        found.is_some().into()
    }
    let mut state = (visit, None);
    // SAFETY: `each` takes the state as the pair that it is, and the pair outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(each::<T, V>), (&raw mut state).cast()) };
    state.1
}

impl Object<'_> {
    /// Returns whether the address lies in the object.
    pub fn contains(&self, address: usize) -> bool {
        self.headers.iter().any(|h| {
            let start = self.base.wrapping_add(h.p_vaddr as usize);
            h.p_type == libc::PT_LOAD && address.wrapping_sub(start) < h.p_memsz as usize
        })
    }

    /// Returns whether the object is the one that holds this library's own code.
    pub fn is_own(&self) -> bool {
        self.contains(is_glibc as *const () as usize)
    }

    /// Returns whether the object is a part of glibc that has functions with hooks.
    pub fn is_glibc(&self) -> bool {
        is_glibc(self.path.to_bytes())
    }

    /// Returns the path by which the object was loaded; empty for the program itself.
    pub fn path(&self) -> &CStr {
        self.path
    }

    /// Returns the address of the function `name` in its default version; `None` if the object does not export it.
    pub fn function(&self, name: &CStr) -> Option<*mut c_void> {
        let dynamic = self.headers.iter().find(|h| h.p_type == libc::PT_DYNAMIC)?;
        let [mut names, mut symbols, mut hashes, mut versions] = [0; 4];
        let mut entry = self.base.wrapping_add(dynamic.p_vaddr as usize) as *const Dynamic;
        // SAFETY: the dynamic section of a loaded object, which ends in a tag of 0.
        while let Dynamic { tag: 1.., value } = *unsafe { &*entry } {
            // SAFETY: as above.
            let place = match unsafe { (*entry).tag } {
                DT_STRTAB => &mut names,
                DT_SYMTAB => &mut symbols,
                DT_GNU_HASH => &mut hashes,
                DT_VERSYM => &mut versions,
                _ => &mut 0,
            };
            // glibc relocates these addresses in place, but not in the vDSO's table.
            *place = if value < self.base { value + self.base } else { value };
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
        }
        if names == 0 || symbols == 0 || hashes == 0 {
            return None;
        }
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add((*byte).into()));
        let word = |at: usize| -> u32 {
            // SAFETY: a word of the hash table, within the table's own counts.
            unsafe { *(hashes as *const u32).add(at) }
        };
        // Four words, the Bloom filter in 64-bit words, the buckets, then a chain word for each symbol from `first` on.
        let [count, first, bloom] = [word(0), word(1), word(2)].map(|word| word as usize);
        let buckets = 4 + 2 * bloom;
        let mut index = word(buckets + hash.checked_rem(count as u32)? as usize) as usize;
        while index >= first && index > 0 {
            let link = word(buckets + count + index - first);
            // SAFETY: the hash table counts the symbols, so `index` is one of them. Each has a version word, and its
            // name ends in a NUL.
            let (symbol, version) = unsafe {
                let versions = versions as *const u16;
                let version = if versions.is_null() { 0 } else { *versions.add(index) };
                (&*(symbols as *const Elf64_Sym).add(index), version)
            };
            // SAFETY: as above.
            let is_it = || unsafe { CStr::from_ptr((names + symbol.st_name as usize) as *const c_char) } == name;
            let is_defined = symbol.st_shndx != 0 && symbol.st_info & 15 == STT_FUNC && version & HIDDEN == 0;
            if link | 1 == hash | 1 && is_defined && is_it() {
                return Some(self.base.wrapping_add(symbol.st_value as usize) as *mut c_void);
            }
            if link & 1 != 0 {
                break;
            }
            index += 1;
        }
        None
    }
}

fn is_glibc(path: &[u8]) -> bool {
    let file = path.rsplit(|byte| *byte == b'/').next();
    [&b"libc.so.6"[..], b"libpthread.so.0", b"librt.so.1"]
        .map(Some)
        .contains(&file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_of_libc_is_where_dlsym_finds_it() {
        for name in [
            c"recv",
            c"send",
            c"dlsym",
            c"posix_spawn",
            c"syscall",
            c"no_such_function",
        ] {
            // SAFETY: a C string.
            let expected = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            let mut seen = Vec::new();
            find(|object| {
                if object.is_glibc() {
                    seen.extend(object.function(name));
                }
                None::<()>
            });
            assert_eq!(seen.first().copied().unwrap_or_default(), expected, "{name:?}");
        }
    }

    #[test]
    fn own_object_is_found_once() {
        let mut own = 0;
        find(|object| {
            own += usize::from(object.is_own());
            None::<()>
        });
        assert_eq!(own, 1);
    }
}
