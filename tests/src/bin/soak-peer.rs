//! The programs of `tests/soak.rs`, which preloads the library. They are a server that serves all connections, a server
//! that forks a child for each, and a client that opens connections one after the other. They know nothing of the
//! library but whether it has promoted a connection, which they wait for.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{ForkResult, fork};
use rdmasock_core::stats::{Event, instance_of};

/// The time limit of a wait. A machine that stands still for longer is not worth waiting for.
const LIMIT: Duration = Duration::from_secs(60);
const MESSAGE: usize = 64;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        ["serve"] => serve(),
        ["serve-forking"] => serve_forking(),
        ["serve-many"] => serve_many(),
        ["serve-every-way"] => serve_every_way(),
        ["dial-every-way", port, rounds] => dial_every_way(port.parse().unwrap(), rounds.parse().unwrap()),
        ["dial", port, connections] => dial(port.parse().unwrap(), connections.parse().unwrap()),
        ["dial-at-once", port, connections] => dial_at_once(port.parse().unwrap(), connections.parse().unwrap()),
        _ => {
            eprintln!("soak-peer serve | serve-forking | serve-every-way | serve-many | dial PORT CONNECTIONS");
            eprintln!("soak-peer dial-every-way PORT ROUNDS | dial-at-once PORT CONNECTIONS");
            std::process::exit(2);
        }
    }
}

fn listen() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    listener
}

/// Answers one message. Returns false at the end of the stream.
fn answer(stream: &mut TcpStream) -> bool {
    let mut message = [0; MESSAGE];
    match stream.read(&mut message) {
        Ok(n @ 1..) => stream.write_all(&message[..n]).is_ok(),
        _ => false,
    }
}

fn raise_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
}

/// Echoes on thousands of connections.
fn serve_many() {
    use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
    raise_limit();
    let listener = listen();
    let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    set.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, u64::MAX))
        .unwrap();
    let mut streams: Vec<Option<TcpStream>> = Vec::new();
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let count = set.wait(&mut events, nix::sys::epoll::EpollTimeout::NONE).unwrap();
        for event in &events[..count] {
            if event.data() == u64::MAX {
                let stream = listener.accept().unwrap().0;
                let event = EpollEvent::new(EpollFlags::EPOLLIN, streams.len() as u64);
                set.add(&stream, event).unwrap();
                streams.push(Some(stream));
            } else if let slot = &mut streams[event.data() as usize]
                && slot.as_mut().is_some_and(|stream| !answer(stream))
            {
                *slot = None;
            }
        }
    }
}

fn serve() {
    let listener = listen();
    let mut streams: Vec<TcpStream> = Vec::new();
    loop {
        let mut set: Vec<PollFd<'_>> = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        set.extend(streams.iter().map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN)));
        poll(&mut set, PollTimeout::NONE).unwrap();
        let ready: Vec<bool> = set.iter().map(|p| p.any() == Some(true)).collect();
        let mut each = ready[1..].iter();
        streams.retain_mut(|s| !each.next().unwrap() || answer(s));
        if ready[0] {
            streams.push(listener.accept().unwrap().0);
        }
    }
}

fn serve_forking() {
    // Children need not be waited for.
    // SAFETY: no handler is set.
    unsafe {
        let ignore = nix::sys::signal::SigHandler::SigIgn;
        nix::sys::signal::signal(nix::sys::signal::Signal::SIGCHLD, ignore).unwrap();
    }
    let listener = listen();
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        // SAFETY: this program has one thread of its own.
        if let ForkResult::Child = unsafe { fork() }.unwrap() {
            while answer(&mut stream) {}
            std::process::exit(0);
        }
    }
}

/// The ways in which [`serve_every_way`] serves connections, in turn.
const WAYS: [fn(TcpStream); 6] = [
    |mut stream| {
        let served = std::thread::spawn(move || while answer(&mut stream) {});
        served.join().unwrap();
    },
    serve_by_epoll,
    |mut stream| {
        // SAFETY: this program has one thread of its own by now.
        if let ForkResult::Child = unsafe { fork() }.unwrap() {
            while answer(&mut stream) {}
            std::process::exit(0);
        }
    },
    |mut stream| {
        // SAFETY: as above.
        let ForkResult::Parent { child } = unsafe { fork() }.unwrap() else {
            std::thread::sleep(LIMIT);
            std::process::exit(0);
        };
        answer(&mut stream);
        nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).unwrap();
        while answer(&mut stream) {}
    },
    serve_behind_another_listener,
    |mut stream| while answer(&mut stream) {},
];

/// Serves by an epoll set of its own, with a duplicate of the fd.
fn serve_by_epoll(mut stream: TcpStream) {
    use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
    let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    let other = stream.try_clone().unwrap();
    set.add(&other, EpollEvent::new(EpollFlags::EPOLLIN, 1)).unwrap();
    let mut events = [EpollEvent::empty(); 4];
    loop {
        set.wait(&mut events, 20_000u16).unwrap();
        if !answer(&mut stream) {
            return;
        }
    }
}

/// Sends all bytes that arrive through a second connection, to a listener that is made for it.
fn serve_behind_another_listener(mut stream: TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut far = listener.accept().unwrap().0;
    let mut message = [0; MESSAGE];
    while let Ok(n @ 1..) = stream.read(&mut message) {
        near.write_all(&message[..n]).unwrap();
        answer(&mut far);
        near.read_exact(&mut message[..n]).unwrap();
        stream.write_all(&message[..n]).unwrap();
    }
}

/// Serves one connection after the other, each in another way.
fn serve_every_way() {
    // SAFETY: no handler is set.
    unsafe {
        let ignore = nix::sys::signal::SigHandler::SigIgn;
        nix::sys::signal::signal(nix::sys::signal::Signal::SIGCHLD, ignore).unwrap();
    }
    let listener = listen();
    for way in WAYS.iter().cycle() {
        way(listener.accept().unwrap().0);
    }
}

/// Opens `rounds` connections for each way of [`serve_every_way`], with as many messages each as promote one. Then
/// prints how many were promoted.
fn dial_every_way(port: u16, rounds: u64) {
    for _ in 0..rounds * WAYS.len() as u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut message = [5; MESSAGE];
        for n in 0..150 {
            stream.write_all(&message).unwrap();
            stream.read_exact(&mut message).unwrap();
            if n % 50 == 49 {
                // The pause gives the promotion time.
                std::thread::sleep(Duration::from_millis(3));
            }
        }
    }
    let own = instance_of(std::process::id()).unwrap();
    let promoted = own.map_or(0, |p| p.instance.totals.promoted);
    println!("{promoted}");
}

/// Opens `connections` connections, each until it is promoted, with a few messages behind that. Then prints "done", and
/// lives until its stdin ends.
fn dial(port: u16, connections: u64) {
    let promoted = || {
        let own = instance_of(std::process::id()).unwrap();
        own.map_or(0, |p| p.instance.totals.promoted)
    };
    for n in 1..=connections {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let end = Instant::now() + LIMIT;
        let mut message = [n as u8; MESSAGE];
        let mut is_promoted = false;
        while !is_promoted {
            is_promoted = promoted() >= n;
            for _ in 0..20 {
                stream.write_all(&message).unwrap();
                stream.read_exact(&mut message).unwrap();
                assert_eq!(message, [n as u8; MESSAGE]);
            }
            assert!(Instant::now() < end, "connection {n} is not promoted");
        }
    }
    println!("done");
    std::io::stdin().lock().lines().for_each(drop);
}

/// Opens `connections` connections at once, and uses all until all are promoted. Then prints how many questions that
/// took.
fn dial_at_once(port: u16, connections: u64) {
    raise_limit();
    let mut streams: Vec<TcpStream> = (0..connections)
        .map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap())
        .collect();
    let end = Instant::now() + LIMIT;
    let mut message = [7; MESSAGE];
    loop {
        for some in streams.chunks_mut(32) {
            some.iter_mut().for_each(|stream| stream.write_all(&message).unwrap());
            some.iter_mut()
                .for_each(|stream| stream.read_exact(&mut message).unwrap());
        }
        let own = instance_of(std::process::id()).unwrap();
        let (promoted, asks) = own.map_or((0, 0), |p| {
            let instance = p.instance;
            (instance.totals.promoted, instance.count(Event::Ask))
        });
        if promoted == connections {
            return println!("{asks}");
        }
        assert!(Instant::now() < end, "{promoted} are promoted, by {asks} questions");
    }
}
