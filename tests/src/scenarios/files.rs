//! sendfile and splice between files, pipes and connections.

use std::io::Write;
use std::os::fd::AsRawFd;

use libc::c_int;

use crate::ctx::Ctx;
use crate::{data, sys};

const SIZE: usize = 1 << 20;

/// A file with `SIZE` bytes of stream 1, at offset 0.
fn file(c: &Ctx) -> std::fs::File {
    let path = c.dir.join(format!("{}.data", c.side.name()));
    std::fs::File::create(&path)
        .and_then(|mut f| f.write_all(&data::pattern(1, 0, SIZE)))
        .unwrap();
    std::fs::File::open(path).unwrap()
}

/// Calls sendfile() in a loop until `count` bytes were sent. Returns the last result.
fn sendfile_all(fd: c_int, from: c_int, mut offset: Option<&mut i64>, mut count: usize) -> sys::Ret {
    loop {
        let at = offset.as_deref_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
        let r = call!(libc::sendfile(fd, from, at, count));
        if r.is(libc::EAGAIN) {
            sys::wait_for(fd, libc::POLLOUT);
            continue;
        }
        if r.value <= 0 || r.count() == count {
            return r;
        }
        count -= r.count();
    }
}

/// sendfile with a null and with a given offset, past the end, of a part.
pub fn sendfile(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        c.recv_to_end(fd);
        c.close(fd);
        return;
    }
    let f = file(c);
    let from = f.as_raw_fd();
    let position = || c.ret("position", call!(libc::lseek(from, 0, libc::SEEK_CUR)));
    c.ret(
        "1000, null offset",
        call!(libc::sendfile(fd, from, std::ptr::null_mut(), 1000)),
    );
    position();
    let mut at = 5000;
    c.ret("1000, offset", call!(libc::sendfile(fd, from, &mut at, 1000)));
    c.log(at);
    position();
    at = SIZE as i64 - 10;
    c.ret("at the end", call!(libc::sendfile(fd, from, &mut at, 1000)));
    c.log(at);
    c.ret("past the end", call!(libc::sendfile(fd, from, &mut at, 1000)));
    at = -1;
    c.ret("negative offset", call!(libc::sendfile(fd, from, &mut at, 1000)));
    c.ret("none", call!(libc::sendfile(fd, from, std::ptr::null_mut(), 0)));
    c.ret("bad source", call!(libc::sendfile(fd, 888, std::ptr::null_mut(), 10)));
    c.ret("socket source", call!(libc::sendfile(fd, fd, std::ptr::null_mut(), 10)));
    c.ret("64", call!(libc::sendfile64(fd, from, std::ptr::null_mut(), 100)));
    position();
    at = 0;
    c.done("all", sendfile_all(fd, from, Some(&mut at), SIZE));
    c.log(at);
    c.shutdown(fd, libc::SHUT_WR);
    c.ret("after shutdown", {
        call!(libc::signal(libc::SIGPIPE, libc::SIG_IGN));
        call!(libc::sendfile(fd, from, std::ptr::null_mut(), 10))
    });
    c.close(fd);
}

/// sendfile on a nonblocking connection to a reader that starts late; headers by MSG_MORE.
pub fn sendfile_nonblocking(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let f = file(c);
        sys::set_nonblocking(fd, true);
        for i in 0..8 {
            c.send(fd, format!("header {i}").as_bytes(), libc::MSG_MORE);
            let mut at = 0;
            c.done("file", sendfile_all(fd, f.as_raw_fd(), Some(&mut at), SIZE));
            c.log(at);
            if i == 0 {
                c.sync("started");
            }
        }
    } else {
        c.sync("started");
        for i in 0..8 {
            let got = sys::recv_exact(fd, 8);
            assert_eq!(got, format!("header {i}").as_bytes());
            data::verify(1, 0, &sys::recv_exact(fd, SIZE));
        }
        c.log("8 files");
    }
    c.sync("done");
    c.close(fd);
}

/// splice: connection → pipe → connection, echoing all bytes.
pub fn splice(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let mut pipe = [0; 2];
        call!(libc::pipe(pipe.as_mut_ptr())).ok();
        let null = std::ptr::null_mut;
        let mut sum = 0;
        loop {
            let r = call!(libc::splice(fd, null(), pipe[1], null(), 32_768, libc::SPLICE_F_MOVE));
            let mut left = r.count();
            if left == 0 {
                break;
            }
            sum += left;
            while left > 0 {
                left -= call!(libc::splice(pipe[0], null(), fd, null(), left, libc::SPLICE_F_MORE)).count();
            }
        }
        c.log(format_args!("{sum} bytes"));
        c.shutdown(fd, libc::SHUT_WR);
    } else {
        std::thread::scope(|s| {
            s.spawn(|| {
                for i in 0..40u64 {
                    sys::send_all(fd, &data::pattern(2, i * 10_000, 10_000)).ok();
                }
                c.shutdown(fd, libc::SHUT_WR);
            });
            let (end, got) = sys::recv_to_end(fd);
            data::verify(2, 0, &got);
            assert_eq!(got.len(), 400_000, "{end}");
        });
        c.log("400000 bytes back");
    }
    c.sync("done");
    c.close(fd);
}

/// splice's refusals and nonblocking forms.
pub fn splice_errors(c: &Ctx) {
    let fd = c.pair();
    let mut pipe = [0; 2];
    call!(libc::pipe2(pipe.as_mut_ptr(), 0)).ok();
    let null = std::ptr::null_mut;
    let go = |what: &str, from: c_int, to: c_int, len: usize, flags: u32| {
        c.ret(what, call!(libc::splice(from, null(), to, null(), len, flags)));
    };
    sys::set_nonblocking(fd, true);
    go("no data", fd, pipe[1], 10, libc::SPLICE_F_NONBLOCK);
    go("no pipe", fd, fd, 10, 0);
    go("wrong end", fd, pipe[0], 10, 0);
    go("bad fd", 777, pipe[1], 10, 0);
    go("nothing", fd, pipe[1], 0, 0);
    let mut at = 0i64;
    c.ret("offset", call!(libc::splice(fd, &mut at, pipe[1], null(), 10, 0)));
    c.ret("offset", call!(libc::splice(fd, null(), pipe[1], &mut at, 10, 0)));
    go("empty pipe", pipe[0], fd, 10, libc::SPLICE_F_NONBLOCK);
    c.sync("send");
    c.send(fd, b"0123456789", 0);
    sys::wait_readable_bytes(fd, 10);
    go("part", fd, pipe[1], 4, libc::SPLICE_F_NONBLOCK);
    c.fionread(fd);
    go("rest", fd, pipe[1], 100, libc::SPLICE_F_NONBLOCK);
    let mut b = [0; 20];
    let r = sys::read(pipe[0], &mut b);
    c.bytes("read", r, &b);
    c.sync("close");
    c.shutdown(fd, libc::SHUT_WR);
    sys::wait_for(fd, libc::POLLRDHUP);
    go("EOF", fd, pipe[1], 10, 0);
    c.sync("done");
    c.close(fd);
}
