//! The victim, a server, and its other clients: plain programs, to be run with the library.

use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{Resource, setrlimit};

use super::{REQUEST, STREAM, end_with_stdin};

/// The time after which a missing answer counts as none.
const PATIENCE: Duration = Duration::from_secs(20);

/// `victim HOW FDS FILE`: answers requests, with `epoll` in one thread or with `threads`, each of which blocks; prints
/// its port. The victim has at most FDS descriptors unless FDS is 0, and a lock on FILE unless FILE is empty.
pub fn serve(how: &str, fds: u64, file: &str) -> bool {
    let file = (!file.is_empty()).then(|| std::fs::File::options().write(true).open(file).unwrap());
    if let Some(file) = &file {
        // SAFETY: zero is a valid value for each field.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as libc::c_short;
        call!(libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const lock)).ok();
    }
    if fds != 0 {
        setrlimit(Resource::RLIMIT_NOFILE, fds, fds).unwrap();
    }
    // The default action is in force, as for a program in C; Rust ignores the signal.
    call!(libc::signal(libc::SIGPIPE, libc::SIG_DFL));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    end_with_stdin();
    match how {
        "epoll" => by_epoll(&listener),
        "threads" => by_threads(&listener),
        _ => false,
    }
}

fn by_threads(listener: &TcpListener) -> bool {
    loop {
        let Ok((tcp, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        std::thread::spawn(move || {
            let mut tcp = tcp;
            let mut request = [0; REQUEST];
            while tcp.read_exact(&mut request).is_ok() && answer(&mut tcp, &request) {}
        });
    }
}

fn answer(tcp: &mut TcpStream, request: &[u8]) -> bool {
    if request.first() != Some(&STREAM) {
        return tcp.write_all(request).is_ok();
    }
    while tcp.write_all(&[7; 65536]).is_ok() {}
    false
}

fn by_epoll(listener: &TcpListener) -> bool {
    let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    let add = |fd: std::os::fd::BorrowedFd<'_>| {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, fd.as_raw_fd() as u64);
        set.add(fd, event).unwrap();
    };
    listener.set_nonblocking(true).unwrap();
    add(listener.as_fd());
    let mut guests: Vec<TcpStream> = Vec::new();
    let mut events = [EpollEvent::empty(); 16];
    loop {
        let n = set.wait(&mut events, EpollTimeout::NONE).unwrap_or(0);
        for event in &events[..n] {
            let fd = event.data() as i32;
            if fd == listener.as_raw_fd() {
                if let Ok((tcp, _)) = listener.accept() {
                    tcp.set_nonblocking(true).unwrap();
                    add(tcp.as_fd());
                    guests.push(tcp);
                }
                continue;
            }
            let Some(at) = guests.iter().position(|g| g.as_raw_fd() == fd) else {
                continue;
            };
            let mut request = [0; 4096];
            match guests[at].read(&mut request) {
                // This test does not cover an answer that has no room.
                Ok(n @ 1..) if guests[at].write_all(&request[..n]).is_ok() => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                _ => drop(guests.swap_remove(at)),
            }
        }
    }
}

/// `friend PORT`: opens two connections. Each line of stdin is a number of rounds. In each round both connections
/// send a request and wait for the answer. Prints `done` after the last.
pub fn visit(port: u16) -> bool {
    let mut guests = [(); 2].map(|()| {
        let tcp = TcpStream::connect(("127.0.0.1", port)).unwrap();
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        tcp
    });
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        for round in 0..line.parse().unwrap_or(0u32) {
            for tcp in &mut guests {
                let request = [round as u8 | 0x80; REQUEST];
                tcp.write_all(&request).expect("request");
                let mut got = [0; REQUEST];
                tcp.read_exact(&mut got).expect("answer");
                assert_eq!(got, request);
            }
        }
        println!("done");
    }
    true
}
