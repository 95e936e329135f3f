//! What the attacker does with its link. Each attack goes on until stdin ends, or the victim wants no more of it.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rdmasock_core::fabric::layout::{self, Region};
use rdmasock_core::fabric::link::LinkEnd;
use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::os::channel::{Channel, RecvError};
use rdmasock_core::rendezvous::names;
use rdmasock_core::wire::Message;

use super::attacker::{Attacker, exchange, say};
use super::{REQUEST, STREAM, end_with_stdin};

/// The waiter that the victim is to wake: one that sleeps on what is sent, not on a futex.
const WAITER: u32 = 100;
/// Data area of the arena that the victim is offered.
const ARENA: u64 = 64 << 20;
const ARENA_OF_RINGS: u64 = 1 << 30;
/// For how long an attack goes on at least before it is said to be on.
const AT_LEAST: Duration = Duration::from_millis(300);

/// All of them, and the victim that each is for.
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

/// `attack PORT NAME`: as uid 65534 if it can. Prints `on`, and at the end, or when the victim has closed the link,
/// `out`.
pub fn run(port: u16, name: &str) -> bool {
    if call!(libc::geteuid()).value == 0 {
        call!(libc::setgid(65_534)).ok();
        call!(libc::setuid(65_534)).ok();
    }
    end_with_stdin();
    let result = attack(port, name);
    if let Err(error) = &result {
        eprintln!("{name}: {error:#}");
    }
    // What is left is held until the test has seen enough.
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn tell(word: &str) {
    println!("{word}");
    let _ = std::io::stdout().flush();
}

fn attack(port: u16, name: &str) -> Result<()> {
    match name {
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
            let (ours, _theirs) = socket_pair(libc::SOCK_STREAM);
            fill(ours.as_fd());
            be_rung(&mut a, ours.as_fd())
        }
        "regular_file" => {
            let file = std::fs::File::open("/proc/self/exe")?;
            be_rung(&mut a, file.as_fd())
        }
        "replaced" => be(&mut a, |a| {
            let (ours, _theirs) = socket_pair(libc::SOCK_STREAM);
            let event = EventFd::from_value_and_flags(0, EfdFlags::empty())?;
            a.announce(WAITER, ours.as_fd())?;
            a.announce(WAITER, event.as_fd())?;
            provoke(a)
        }),
        "too_many_buttons" => {
            let mut n = 0;
            be(&mut a, |a| {
                n += 1;
                let (ours, _theirs) = socket_pair(libc::SOCK_STREAM);
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
                // Drained, too.
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
                // As a correct peer wakes it.
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
        // It takes none of the victim's messages: `be` would.
        "unread_messages" => {
            tell("on");
            loop {
                let (ours, _theirs) = socket_pair(libc::SOCK_SEQPACKET);
                // Each is refused by a message.
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

/// Goes on with `step` until it, or the victim, has had enough.
fn be(a: &mut Attacker, mut step: impl FnMut(&mut Attacker) -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    let mut is_told = false;
    loop {
        // The victim may have no room for what is said.
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

/// Has the victim ring at this, again and again.
fn be_rung(a: &mut Attacker, fd: BorrowedFd<'_>) -> Result<()> {
    a.announce(WAITER, fd)?;
    be(a, provoke)
}

/// One request on the link, whose answer the victim has to tell several waiters of that are always about to sleep.
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
    // SAFETY: just made, and nobody else's.
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

/// What the attacker offers.
#[derive(Clone, Copy, PartialEq)]
enum Rings {
    /// One of 64 MiB.
    Large,
    /// Ever new ones, all over a large arena.
    AllOver,
    /// Small ones, and ever new ones in reserve.
    Reserves,
}

/// Offers rings to the victim, which sends all that there is room for. Prints how many bytes of the arena have memory.
fn rings(port: u16, which: Rings) -> Result<()> {
    let mut a = Attacker::connect(port, ARENA_OF_RINGS)?;
    let is_large = which == Rings::Large;
    let log2 = if is_large { 26 } else { 22 };
    let end = Instant::now() + Duration::from_secs(3);
    // Behind its first ring. Not from its allocator, which would see to the memory itself.
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
            // It reads, but gives no ring back.
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

/// Connects to the victim's names as often as it is let, and says nothing.
fn silent_channels(port: u16) -> Result<()> {
    // So that it has a name, and answers there.
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
            // In the place of those that the victim has closed.
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
