//! The calls by their numbers that make, duplicate, close and leave connections. Also fds that are closed by number, as
//! libuv does: the next file that gets the fd is not confused with the connection.

use std::ptr::null;

use libc::{POLLIN, c_int};

use super::numbers::{NONE, close, number, read, send};
use crate::ctx::Ctx;
use crate::sys::Addr;
use crate::{data, sys};

/// A connection made by number is promoted like others; its options.
pub fn sockets(c: &Ctx) {
    let (stream, none) = (libc::SOCK_STREAM, 0);
    let fd = number!(SYS_socket, libc::AF_INET, stream, none).ok();
    c.log(fd);
    let connection = if c.is_server() {
        let at = Addr::v4(0);
        sys::bind(fd, &at).ok();
        c.ret("listen", number!(SYS_listen, fd, 5));
        let port = Addr::local_of(fd).1.port();
        c.exchange("port", u64::from(port));
        let mut from = Addr::empty();
        let mut len: libc::socklen_t = 16;
        let new = number!(SYS_accept, fd, from.mut_ptr(), &mut len);
        c.log(format_args!("accept -> {new} {len}"));
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        c.sync("second");
        let second = number!(SYS_accept4, fd, NONE, NONE, flags);
        c.ret("accept4", second);
        c.log(call!(libc::fcntl(second.ok(), libc::F_GETFL)));
        read(c, second.ok(), 5);
        close(c, second.ok());
        close(c, fd);
        new.ok()
    } else {
        let at = Addr::v4(c.exchange("port", 0) as u16);
        c.ret("connect", number!(SYS_connect, fd, at.ptr(), at.len));
        let second = number!(SYS_socket, libc::AF_INET, stream, none).ok();
        c.ret("connect", number!(SYS_connect, second, at.ptr(), at.len));
        c.sync("second");
        // The other end's read, which does not wait, may come first; its close ends this wait.
        sys::wait_for(second, POLLIN);
        read(c, second, 5);
        close(c, second);
        fd
    };
    c.warm_up(connection);
    let (tcp, cork) = (libc::IPPROTO_TCP, libc::TCP_CORK);
    let option = |value: c_int| {
        let mut got: c_int = -1;
        let mut len: libc::socklen_t = 4;
        let value = &raw const value;
        c.ret("setsockopt", number!(SYS_setsockopt, connection, tcp, cork, value, 4));
        let at = &raw mut got;
        c.ret(
            "getsockopt",
            number!(SYS_getsockopt, connection, tcp, cork, at, &mut len),
        );
        c.log(format_args!("{got} {len}"));
    };
    option(1);
    option(0);
    if c.is_server() {
        c.ret("shutdown", number!(SYS_shutdown, connection, libc::SHUT_WR));
        read(c, connection, 5);
    } else {
        read(c, connection, 5);
        c.ret("shutdown", number!(SYS_shutdown, connection, libc::SHUT_WR));
    }
    c.sync("done");
    close(c, connection);
}

/// Duplicates made and closed by number are the connection until the last is closed.
pub fn descriptors(c: &Ctx) {
    let fd = c.pair();
    let exchange = |fd: c_int| {
        if c.is_server() {
            c.write(fd, b"a message");
        } else {
            c.recv_all(fd, 9);
        }
    };
    let all = [
        number!(SYS_dup, fd),
        number!(SYS_dup2, fd, 50),
        number!(SYS_dup3, fd, 51, libc::O_CLOEXEC),
        number!(SYS_fcntl, fd, libc::F_DUPFD, 60),
        number!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 60),
    ];
    for dup in all {
        c.ret("dup", dup);
        exchange(dup.ok());
    }
    c.ret("dup2 to itself", number!(SYS_dup2, fd, fd));
    c.ret("dup3 to itself", number!(SYS_dup3, fd, fd, 0));
    close(c, fd);
    close(c, fd);
    c.ret("close_range", number!(SYS_close_range, 50, 51, 0));
    c.ret("close_range", number!(SYS_close_range, 51, 50, 0));
    exchange(60);
    let own = libc::O_NONBLOCK | libc::O_RDWR;
    c.ret("nonblocking", number!(SYS_fcntl, 60, libc::F_SETFL, own));
    c.sync("quiet");
    read(c, 60, 5);
    let mut waiting: c_int = -1;
    c.sync("looked");
    if c.is_server() {
        c.ret("write", send(60, b"four"));
    } else {
        sys::wait_for(60, POLLIN);
        c.ret("FIONREAD", number!(SYS_ioctl, 60, libc::FIONREAD, &raw mut waiting));
        c.log(waiting);
    }
    c.sync("counted");
    close(c, all[0].ok());
    // The last copy but one is closed when another file takes its fd.
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    c.ret("over it", number!(SYS_dup2, pipe[1], 60));
    c.ret("into the pipe", send(60, b"not on the connection"));
    read(c, pipe[0], 30);
    if c.is_server() {
        // Without its last fd the connection is at its end.
        close(c, 61);
    } else {
        read(c, 61, 4);
        sys::wait_for(61, POLLIN);
        read(c, 61, 4);
    }
    c.sync("done");
}

/// The ways to get an fd that libuv has just closed.
const MAKERS: [&str; 7] = ["open", "memfd", "eventfd", "dup", "pipe", "mkstemp", "socketpair"];

fn make(c: &Ctx, how: &str) -> c_int {
    let path = c.dir.join(format!("{}.{how}", c.side.name()));
    let name = |path: &std::path::Path| std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let mut two = [0; 2];
    match how {
        "open" => {
            let flags = libc::O_RDWR | libc::O_CREAT;
            call!(libc::open(name(&path).as_ptr(), flags, 0o600)).ok()
        }
        "memfd" => call!(libc::memfd_create(c"a file".as_ptr(), 0)).ok(),
        "eventfd" => call!(libc::eventfd(0, libc::EFD_NONBLOCK)).ok(),
        "dup" => {
            let file = call!(libc::memfd_create(c"a file".as_ptr(), 0)).ok();
            let high = call!(libc::fcntl(file, libc::F_DUPFD, 200)).ok();
            call!(libc::close(file)).ok();
            call!(libc::dup(high)).ok()
        }
        "pipe" => {
            call!(libc::pipe(two.as_mut_ptr())).ok();
            two[0]
        }
        "mkstemp" => {
            let template = name(&c.dir.join("XXXXXX")).into_raw();
            let fd = call!(libc::mkstemp(template)).ok();
            // SAFETY: `into_raw` returned the pointer, and the length is unchanged.
            drop(unsafe { std::ffi::CString::from_raw(template) });
            fd
        }
        _ => {
            let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
            call!(libc::socketpair(libc::AF_UNIX, kind, 0, two.as_mut_ptr())).ok();
            two[0]
        }
    }
}

/// A connection is closed by number, and the next file gets that fd. Written bytes go into the file, read bytes come
/// from it, and the peer sees the end of its stream.
pub fn closed_number(c: &Ctx) {
    let mut fd = c.pair();
    let (listener, port) = c.listener(8);
    for how in MAKERS {
        if c.is_server() {
            close(c, fd);
            let next = make(c, how);
            c.log(format_args!("{how}: the same number {}", next == fd));
            let r = sys::write(next, &[1, 0, 0, 0, 0, 0, 0, 0]);
            c.ret("write", r);
            call!(libc::lseek(next, 0, libc::SEEK_SET));
            if how != "pipe" && how != "socketpair" {
                let mut buf = [0; 20];
                let r = sys::read(next, &mut buf);
                c.log(format_args!("read -> {r} {:?}", &buf[..8]));
            }
            call!(libc::lseek(next, 0, libc::SEEK_SET));
            let mut size: libc::stat = sys::zeroed();
            call!(libc::fstat(next, &mut size)).ok();
            c.log(format_args!("size {}", size.st_size));
            c.sync("read");
            call!(libc::close(next)).ok();
            fd = sys::accept4(listener.unwrap(), 0).ok();
        } else {
            c.recv_to_end(fd);
            c.sync("read");
            // The end that closed first has ended the connection for this end too.
            sys::pause_ms(1);
            call!(libc::signal(libc::SIGPIPE, libc::SIG_IGN));
            sys::send(fd, b"x", 0);
            close(c, fd);
            fd = sys::connected(&Addr::v4(port));
        }
        // The new connection is promoted again.
        for _ in 0..40 {
            if c.is_server() {
                let request = sys::recv_exact(fd, 500);
                sys::send_all(fd, &request).ok();
            } else {
                sys::send_all(fd, &data::pattern(3, 0, 500)).ok();
                assert!(sys::recv_exact(fd, 500) == data::pattern(3, 0, 500), "other bytes");
            }
        }
        c.sync("again");
    }
    close(c, fd);
}

/// A signal's handler that interrupts a receive answers by number.
pub fn in_handler(c: &Ctx) {
    use std::sync::atomic::AtomicI32;
    use std::sync::atomic::Ordering::SeqCst;
    static FD: AtomicI32 = AtomicI32::new(-1);
    extern "C" fn handler(_: c_int) {
        // SAFETY: async-signal-safe.
        unsafe { libc::syscall(libc::SYS_write, FD.load(SeqCst), b"rung".as_ptr(), 4usize) };
    }
    let fd = c.pair();
    FD.store(fd, SeqCst);
    if c.is_server() {
        sys::on_signal(libc::SIGUSR1, handler, true);
        let id = sys::thread_id();
        std::thread::spawn(move || {
            sys::wait_asleep(id);
            let group = std::process::id();
            number!(SYS_tgkill, group, id, libc::SIGUSR1).ok();
        });
        read(c, fd, 20);
    } else {
        c.recv(fd, 20, 0);
        c.write(fd, b"heard");
    }
    c.sync("done");
    close(c, fd);
}

/// exec by number: the program goes on with the connection.
pub fn exec(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let missing = c"/no/such/program".as_ptr();
        let words = [missing, null()];
        c.ret("execve", number!(SYS_execve, missing, words.as_ptr(), NONE));
        c.ret("write", send(fd, b"before"));
        let words = super::process::helper_words("echo", fd, &[]);
        let argv = super::process::argv(&words);
        // SAFETY: libc's own variable.
        let environment = unsafe { environ };
        number!(SYS_execve, words[0].as_ptr(), argv.as_ptr(), environment);
        c.log("exec failed");
    } else {
        c.recv_all(fd, 6);
        c.write(fd, b"through the new program");
        c.recv_all(fd, 23);
        c.shutdown(fd, libc::SHUT_WR);
        c.recv_to_end(fd);
    }
}

unsafe extern "C" {
    static environ: *const *const libc::c_char;
}

/// exit_group by number, with bytes that were just sent.
pub fn exit(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let child = sys::fork_child(|| {
            sys::send_all(fd, &data::pattern(1, 0, 9000)).ok();
            number!(SYS_exit_group, 5);
            6
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.ret("write", send(fd, b"from the parent"));
        c.sync("written");
        number!(SYS_exit_group, 7);
    } else {
        c.recv_all(fd, 9000);
        c.recv_all(fd, 15);
        c.sync("written");
        c.recv_to_end(fd);
    }
}
