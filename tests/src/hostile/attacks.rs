//! The attacks. Each goes on until stdin ends, or until the victim closes the link.

use std::io::Write;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rdmasock_core::fabric::layout::Region;
use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::fabric::{LinkEnd, layout};
use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::os::channel::{Channel, RecvError};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::control::Body;
use rdmasock_core::rendezvous::names;
use rdmasock_core::wire::{MAX_MARKER, Message};

use super::attacker::{Attacker, exchange, say};
use super::{REQUEST, STREAM, attacker, end_with_stdin};

/// The waiter that the victim has to wake. It sleeps on a socket, not on a futex.
const WAITER: u32 = 100;
/// Bytes of the data area of the arena that the victim is offered.
const ARENA: u64 = 64 << 20;
const ARENA_OF_RINGS: u64 = 1 << 30;
/// The least time for which an attack goes on before it prints `on`.
const AT_LEAST: Duration = Duration::from_millis(300);

/// The control port of a server that is asked about connections of other processes.
pub const ASKED_PORT: u16 = 4790;

/// All attacks, and the victim that each is for.
pub const ALL: &[(&str, &str)] = &[
    ("full_pipe", "epoll"),
    ("full_pipe", "threads"),
    ("pipe_without_reader", "epoll"),
    ("pipe_without_reader", "threads"),
    ("saturated_eventfd", "epoll"),
    ("full_socket", "epoll"),
    ("regular_file", "epoll"),
    ("replaced", "epoll"),
    ("too_many_buttons", "epoll"),
    ("changed_flags", "threads"),
    ("changed_flags", "epoll"),
    ("saturated_bells", "threads"),
    ("saturated_bells", "epoll"),
    ("ready_bits", "epoll"),
    ("service_bits", "epoll"),
    ("rings_at_all", "epoll"),
    ("rings_at_all", "threads"),
    ("unknown_messages", "epoll"),
    ("unread_messages", "epoll"),
    ("large_ring", "threads"),
    ("rings_all_over", "threads"),
    ("reserves_all_over", "threads"),
    ("silent_channels", "epoll"),
    ("silent_channels", "threads"),
];

/// Attacks that do nothing to a process of the same user, which the library trusts this far.
pub const OF_ANOTHER_USER: &[(&str, &str)] = &[
    ("lock_by_guest", "epoll"),
    ("lock_by_link", "epoll"),
    ("linger_by_guest", "epoll"),
    ("linger_by_link", "epoll"),
];

/// `attack PORT NAME FILE`: as uid 65534 if it can. Prints `on`, and at the end, or when the victim has closed the
/// link, `out`.
pub fn run(port: u16, name: &str, file: &str) -> bool {
    if call!(libc::geteuid()).value == 0 {
        call!(libc::setgid(65_534)).ok();
        call!(libc::setuid(65_534)).ok();
    }
    end_with_stdin();
    let result = attack(port, name, file);
    if let Err(error) = &result {
        eprintln!("{name}: {error:#}");
    }
    // The attack's remains stay open until the test has seen enough.
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// `ask PORT OTHER UID`: as that user, asks the server on PORT about another process's connection from the port OTHER,
/// by the server's name and by the control port. Prints `no`, or the HELLO that the server then scans for.
/// Holds the channel until a line comes on stdin, then prints `gone`.
pub fn ask_about(port: u16, other: u16, uid: u32) -> bool {
    call!(libc::setgid(uid)).ok();
    call!(libc::setuid(uid)).ok();
    let here = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let tuple = Tuple::new(here(other), here(port)).at(attacker::namespace().unwrap(), 0);
    let (nonce, me) = (Nonce::random().unwrap(), InstanceId::random().unwrap());
    let by_name = attacker::ask_by_name(port, tuple, nonce, me).unwrap();
    let by_port = attacker::ask_by_control_port(ASKED_PORT, tuple, nonce, me).unwrap();
    let nonce_s = match (&by_name.1, &by_port) {
        (Message::Yes { nonce_s, .. }, _) | (_, Some(Body::Yes { nonce_s, .. })) => *nonce_s,
        (Message::No { .. }, Some(Body::No { .. })) => {
            tell("no");
            return true;
        }
        other => panic!("{other:?}"),
    };
    let mut buf = [0; MAX_MARKER];
    let hello = attacker::hello(me).encode(&nonce_s, &mut buf).unwrap();
    tell(&hello.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(by_name);
    tell("gone");
    true
}

fn tell(word: &str) {
    println!("{word}");
    let _ = std::io::stdout().flush();
}

fn attack(port: u16, name: &str, file: &str) -> Result<()> {
    let what = || match name.starts_with("lock") {
        true => Ok(std::fs::File::open(file)?.into()),
        false => lingering(),
    };
    match name {
        "lock_by_guest" | "linger_by_guest" => return descriptors_of_guests(port, what),
        "lock_by_link" | "linger_by_link" => return descriptors_of_links(port, what),
        "silent_channels" => return silent_channels(port),
        "large_ring" => return rings(port, Rings::Large),
        "rings_all_over" => return rings(port, Rings::AllOver),
        "reserves_all_over" => return rings(port, Rings::Reserves),
        _ => {}
    }
    let mut a = Attacker::connect(port, ARENA)?;
    a.switch()?;
    match name {
        "full_pipe" => {
            let (_reader, writer) = nix::unistd::pipe()?;
            call!(libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK)).ok();
            while nix::unistd::write(&writer, &[0; 4096]).is_ok() {}
            call!(libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, 0)).ok();
            be_rung(&mut a, writer.as_fd())
        }
        "pipe_without_reader" => {
            let (reader, writer) = nix::unistd::pipe()?;
            drop(reader);
            be_rung(&mut a, writer.as_fd())
        }
        "saturated_eventfd" => {
            let event = EventFd::from_value_and_flags(0, EfdFlags::empty())?;
            event.write(u64::MAX - 1)?;
            be_rung(&mut a, event.as_fd())
        }
        "full_socket" => {
            let (ours, _theirs) = socket_pair(libc::SOCK_SEQPACKET);
            fill(ours.as_fd());
            be_rung(&mut a, ours.as_fd())
        }
        "regular_file" => {
            let file = std::fs::File::open("/proc/self/exe")?;
            be_rung(&mut a, file.as_fd())
        }
        "replaced" => be(&mut a, |a| {
            let (ours, _theirs) = socket_pair(libc::SOCK_SEQPACKET);
            let event = EventFd::from_value_and_flags(0, EfdFlags::empty())?;
            a.announce(WAITER, ours.as_fd())?;
            a.announce(WAITER, event.as_fd())?;
            provoke(a)
        }),
        "too_many_buttons" => {
            let mut n = 0;
            be(&mut a, |a| {
                n += 1;
                let (ours, _theirs) = socket_pair(libc::SOCK_SEQPACKET);
                if n < 512 {
                    a.announce(n, ours.as_fd())?;
                }
                provoke(a)
            })
        }
        "changed_flags" => be(&mut a, |a| {
            for bell in &a.bells {
                call!(libc::fcntl(bell.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK)).ok();
            }
            let more = provoke(a);
            for bell in &a.bells {
                // The bell is drained, too.
                let _ = nix::unistd::read(bell, &mut [0; 4096]);
            }
            more
        }),
        "saturated_bells" => be(&mut a, |a| {
            for bell in &a.bells {
                call!(libc::fcntl(bell.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK)).ok();
                let _ = nix::unistd::write(bell, &(u64::MAX - 1).to_ne_bytes());
                fill(bell.as_fd());
                call!(libc::fcntl(bell.as_raw_fd(), libc::F_SETFL, 0)).ok();
            }
            provoke(a)
        }),
        "ready_bits" => {
            let theirs = a.theirs;
            be(&mut a, |a| {
                for _ in 0..1000 {
                    for queue in 1..64 {
                        a.end.notify(Wake(WaiterId(queue).queue_bits()), theirs);
                    }
                }
                Ok(true)
            })
        }
        "service_bits" => {
            let theirs = a.theirs;
            be(&mut a, |a| {
                for _ in 0..1000 {
                    a.end.notify(Wake(WaiterId(0).queue_bits()), theirs);
                }
                // Wakes the victim as a correct peer does.
                say(&a.channel, &Message::Ring { id: 0 }, &[])?;
                Ok(true)
            })
        }
        "rings_at_all" => be(&mut a, |a| {
            for id in (0..1536).step_by(7) {
                if say(&a.channel, &Message::Ring { id }, &[]).is_err() {
                    break;
                }
            }
            provoke(a)
        }),
        "unknown_messages" => be(&mut a, |a| {
            a.channel.send(b"rsok\x02\x63\x00\x00", &[])?;
            provoke(a)
        }),
        // This attack receives none of the victim's messages: `be` would.
        "unread_messages" => {
            tell("on");
            loop {
                let (ours, _theirs) = socket_pair(libc::SOCK_STREAM);
                // The victim refuses each by a message.
                if a.announce(WAITER, ours.as_fd()).is_err() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if !provoke(&mut a)? {
                    return Ok(());
                }
            }
        }
        other => bail!("no attack {other}"),
    }
}

/// Repeats `step` until `step` returns false, or the victim closes the link.
fn be(a: &mut Attacker, mut step: impl FnMut(&mut Attacker) -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    let mut is_told = false;
    loop {
        // The victim may have no room for the message.
        let goes_on = step(a).unwrap_or(true) && a.listen();
        if !is_told && (begun.elapsed() > AT_LEAST || !goes_on) {
            is_told = true;
            tell("on");
        }
        if !goes_on {
            tell("out");
            return Ok(());
        }
    }
}

/// Has the victim ring at `fd`, again and again.
fn be_rung(a: &mut Attacker, fd: BorrowedFd<'_>) -> Result<()> {
    a.announce(WAITER, fd)?;
    be(a, provoke)
}

/// Sends one request on the link. The victim has to notify several waiters of its answer, all about to sleep.
fn provoke(a: &mut Attacker) -> Result<bool> {
    let waiter = WaiterId(WAITER as u16);
    for id in [0, 1, WAITER as u16] {
        if let Some(flag) = a.flags.flag(WaiterId(id)) {
            flag.begin();
        }
    }
    let bits = WaiterId(1).queue_bits() | waiter.sleeper_bits();
    if let Ok(armed) = a.consumer.arm_data(bits) {
        a.end.notify(armed.wake, a.theirs);
    }
    a.request(b'a')?;
    let end = Instant::now() + Duration::from_millis(20);
    while a.swallow() == 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(true)
}

fn socket_pair(kind: i32) -> (OwnedFd, OwnedFd) {
    use std::os::fd::FromRawFd;
    let mut pair = [-1; 2];
    call!(libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr())).ok();
    // SAFETY: just made, and owned by no other code.
    pair.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).into()
}

fn fill(fd: BorrowedFd<'_>) {
    while call!(libc::send(
        fd.as_raw_fd(),
        [0u8; 4096].as_ptr().cast(),
        4096,
        libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL
    ))
    .value
        > 0
    {}
}

/// The rings that the attacker offers.
#[derive(Clone, Copy, PartialEq)]
enum Rings {
    /// A single ring of 64 MiB.
    Large,
    /// New rings again and again, all over a large arena.
    AllOver,
    /// Small rings, and new ones in reserve again and again.
    Reserves,
}

/// Offers rings to the victim, which sends all that there is room for. Prints how many bytes of the arena have memory.
fn rings(port: u16, which: Rings) -> Result<()> {
    let mut a = Attacker::connect(port, ARENA_OF_RINGS)?;
    let is_large = which == Rings::Large;
    let log2 = if is_large { 26 } else { 22 };
    let end = Instant::now() + Duration::from_secs(3);
    // The rings lie behind the first. They do not come from the allocator, which would handle the memory itself.
    let mut next = 1;
    let mut offer = |a: &mut Attacker| -> Result<()> {
        let is_there = (next + 1) << log2 <= ARENA_OF_RINGS;
        let region = Region::new(((next << log2) / layout::PAGE as u64) as u32, log2);
        let region = region.filter(|_| is_there).context("the arena is used up")?;
        next += 1;
        let ring = match which {
            Rings::Large | Rings::AllOver => region,
            Rings::Reserves => {
                a.consumer.offer_reserve(region)?;
                let page = 8 + (next % 8) as u32;
                Region::new(page, 12).context("a small ring")?
            }
        };
        let wake = a.consumer.offer(ring)?;
        a.end.notify(wake, a.theirs);
        Ok(())
    };
    a.tcp.write_all(&[b'a'; REQUEST])?;
    while a.swallow() == 0 && Instant::now() < end {}
    offer(&mut a)?;
    a.tcp.write_all(&[STREAM; REQUEST])?;
    let mut most = 0;
    tell("on");
    while Instant::now() < end {
        most = most.max(backed(&a)?);
        if !a.listen() {
            break;
        }
        if !is_large {
            // The attacker reads, but returns no ring.
            while a.swallow() > 0 {}
            while let Ok(Some(_)) = a.consumer.take_retired() {}
            if !a.consumer.is_switching() && offer(&mut a).is_err() {
                break;
            }
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    tell(&format!("backed {}", most >> 20));
    Ok(())
}

fn backed(a: &Attacker) -> Result<i64> {
    Ok(nix::sys::stat::fstat(&a.arena)?.st_blocks * 512)
}

/// Connects to the victim's names as often as the victim lets it, and sends nothing.
fn silent_channels(port: u16) -> Result<()> {
    // The victim then has a name, and answers there.
    let mut tcp = std::net::TcpStream::connect(("127.0.0.1", port))?;
    exchange(&mut tcp)?;
    let mut all: Vec<Channel> = Vec::new();
    let begun = Instant::now();
    let mut is_told = false;
    loop {
        if all.len() < 900 {
            let more = names::connect_to_services(port).filter_map(Result::ok);
            all.extend(more.take(8));
        } else {
            // New channels replace those that the victim has closed.
            let is_open = |c: &Channel| matches!(c.recv(&mut [0; 8]), Err(RecvError::WouldBlock));
            all.retain(is_open);
        }
        if !is_told && (all.len() >= 800 || begun.elapsed() > Duration::from_secs(2)) {
            is_told = true;
            tell("on");
        }
        std::thread::sleep(Duration::from_micros(if is_told { 500 } else { 50 }));
    }
}

/// A TCP connection with unsent bytes whose last close takes an hour.
fn lingering() -> Result<OwnedFd> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let tcp = std::net::TcpStream::connect(listener.local_addr()?)?;
    // The peer never reads.
    std::mem::forget(listener.accept()?);
    tcp.set_nonblocking(true)?;
    while (&tcp).write(&[0; 65_536]).is_ok() {}
    tcp.set_nonblocking(false)?;
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 3600,
    };
    let len = size_of_val(&linger) as libc::socklen_t;
    let at = (&raw const linger).cast();
    call!(libc::setsockopt(
        tcp.as_raw_fd(),
        libc::SOL_SOCKET,
        libc::SO_LINGER,
        at,
        len
    ))
    .ok();
    Ok(tcp.into())
}

/// Sends a message with these descriptors, whose last copies are then the victim's as a rule. The send has its own
/// thread: it may lose that race, and wait for its own close.
fn give(channel: &Channel, message: &[u8], fds: Vec<OwnedFd>) {
    let (number, message) = (channel.as_fd().as_raw_fd(), message.to_vec());
    std::thread::spawn(move || {
        if let Some(fd) = PrivateFd::adopt(number) {
            let channel = ManuallyDrop::new(Channel::new(fd));
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            // Where the kernel refuses such a message to a name, there is no attack.
            let _ = channel.send(&message, &fds);
        }
        drop(fds);
    });
}

/// Waits long enough for the victim to have seen the messages.
fn be_seen() {
    std::thread::sleep(AT_LEAST);
}

fn encoded(message: &Message) -> Result<Vec<u8>> {
    let mut buf = [0; rdmasock_core::wire::MAX_MESSAGE];
    Ok(message.encode(&mut buf).map_err(|e| anyhow::anyhow!("{e}"))?.to_vec())
}

/// Rounds of an attack that may lose a race.
const TRIES: usize = 3;

/// Sends such descriptors with messages of all kinds, to all names of the victim, from channels without a link.
fn descriptors_of_guests(port: u16, what: impl Fn() -> Result<OwnedFd>) -> Result<()> {
    let a = Attacker::connect(port, ARENA)?;
    let ring = encoded(&Message::Ring { id: 0 })?;
    for _ in 0..TRIES {
        let to_instance = || names::connect_to(names::instance(&a.victim).as_bytes());
        let to_service = names::connect_to_services(port).next().context("a name")??;
        let all = [to_instance()?, to_instance()?, to_instance()?, to_service];
        give(&all[0], &ring, vec![what()?]);
        give(&all[1], &encoded(&link_without_cookie()?)?, vec![what()?, what()?]);
        // The junk is unread when the channel is hung up.
        all[2].send(b"junk", &[])?;
        give(&all[2], &ring, vec![what()?]);
        give(&all[3], &ring, vec![what()?]);
        be_seen();
    }
    tell("on");
    std::mem::forget(a);
    Ok(())
}

fn link_without_cookie() -> Result<Message> {
    let geometry = rdmasock_core::wire::Geometry {
        arena_bytes: 1 << 20,
        max_ring: 4096,
    };
    Ok(Message::Link {
        cookie: rdmasock_core::ids::Cookie::random()?,
        instance_c: rdmasock_core::ids::InstanceId::random()?,
        pid: std::process::id(),
        geometry,
    })
}

/// Sends such descriptors over links, in each place where a peer may send descriptors, and where it may not.
fn descriptors_of_links(port: u16, what: impl Fn() -> Result<OwnedFd>) -> Result<()> {
    for _ in 0..TRIES {
        let mut links = Vec::new();
        for _ in 0..4 {
            let mut a = Attacker::connect(port, ARENA)?;
            a.switch()?;
            links.push(a);
        }
        let waiter = encoded(&Message::Waiter { id: WAITER })?;
        let yours = links[1].theirs;
        let take_back = encoded(&Message::TakeBack { yours, bytes: 1 })?;
        give(&links[0].channel, &waiter, vec![what()?]);
        give(&links[1].channel, &take_back, vec![what()?]);
        give(&links[2].channel, &encoded(&Message::Ring { id: 0 })?, vec![what()?]);
        // The socket takes the place of a button.
        let (ours, theirs) = socket_pair(libc::SOCK_SEQPACKET);
        let theirs = Channel::new(PrivateFd::place(theirs)?);
        give(&theirs, b"x", vec![what()?]);
        std::thread::sleep(Duration::from_millis(10));
        give(&links[3].channel, &waiter, vec![ours]);
        be_seen();
        let flags = what()?;
        let _ = Attacker::connect_with(port, ARENA, Some(flags.as_fd()));
        // The drop has its own thread, as in `give`.
        std::thread::spawn(move || drop(flags));
        drop(links);
        be_seen();
    }
    tell("on");
    Ok(())
}
