//! The programs of `tests/soak.rs`, which preloads the library: a server that serves all connections, one that
//! forks a child for each, and a client that opens connections one after the other. They know nothing of the
//! library but whether it has promoted a connection, which is what they wait for.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{ForkResult, fork};
use rdmasock_core::stats::{Event, instance_of};

/// A machine that stands still for so long is not worth waiting for.
const LIMIT: Duration = Duration::from_secs(20);
const MESSAGE: usize = 64;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        ["serve"] => serve(),
        ["serve-forking"] => serve_forking(),
        ["dial", port, connections] => dial(port.parse().unwrap(), connections.parse().unwrap()),
        ["dial-at-once", port, connections] => dial_at_once(port.parse().unwrap(), connections.parse().unwrap()),
        _ => {
            eprintln!("soak-peer serve | serve-forking | dial PORT CONNECTIONS | dial-at-once PORT CONNECTIONS");
            std::process::exit(2);
        }
    }
}

fn listen() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    listener
}

/// False at the end of the stream.
fn answer(stream: &mut TcpStream) -> bool {
    let mut message = [0; MESSAGE];
    match stream.read(&mut message) {
        Ok(n @ 1..) => stream.write_all(&message[..n]).is_ok(),
        _ => false,
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

/// So many connections, each until it is promoted, with a few messages behind that; then says "done", and lives until
/// its stdin ends.
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

/// So many connections at once, all used until all are promoted; then says how many questions that took.
fn dial_at_once(port: u16, connections: u64) {
    let mut streams: Vec<TcpStream> = (0..connections)
        .map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap())
        .collect();
    let end = Instant::now() + LIMIT;
    let mut message = [7; MESSAGE];
    loop {
        for stream in &mut streams {
            stream.write_all(&message).unwrap();
            stream.read_exact(&mut message).unwrap();
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
