//! Tests of connections beside a first connection. They carry bulk data, share the first connection's registered memory
//! and completion fd, and end independently of it. Each step has a function for the server and one for the client.
//! `scenarios.rs` has the scenarios for a single connection.

use std::io::{PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdmasock_core::fabric::remote::qp;
use rdmasock_core::fabric::remote::qp::{Region, Role};

use crate::link::{Armer, Event, Link, PATIENCE, wait_readable};
use crate::memory::Memory;

const BYTES: usize = 1 << 20;
/// The number of messages that are echoed, and of connections that are made, while two threads compete for the events.
const ECHOES: u32 = 400;
const REMAKES: u32 = 20;

/// Runs the server's side; `next` accepts a connection beside the first one.
pub fn serve(first: &Link, next: &dyn Fn() -> Link) {
    let bulk = next();
    check_facts(first, &bulk);
    be_reached(first, &bulk, 11);
    bulk.probe();
    assert_eq!(bulk.event(), Event::Probed);
    be_woken_by_either(first, &bulk);
    echo(first, &bulk);
    // The client ends the connection.
    bulk.end();
    drop(bulk);

    end_under_another_thread(first, next);
    give_back(first, &next());
    let bulk = next();
    be_reached(first, &bulk, 12);
    bulk.end();
    first.send(&first.message());
}

/// Runs the client's side; `next` connects beside the first one.
pub fn run(first: &Link, next: &dyn Fn() -> Link) {
    let started = Instant::now();
    let say = |what: &str| println!("client: {what} after {} ms", started.elapsed().as_millis());
    register(first);
    let bulk = next();
    check_facts(first, &bulk);
    reach(first, &bulk, 11);
    say("memory of the first one was reached");
    wake_by_either(first, &bulk);
    say("either woke the peer");
    be_echoed(first, &bulk);
    say("all was sent back");
    drop(bulk);

    see_ends(next);
    say("others were made and ended");
    reach_in_vain(first, &next());
    say("what was given back was not reached");
    let bulk = next();
    reach(first, &bulk, 12);
    drop(bulk);
    first.send(b"bye");
    assert_eq!(first.message(), b"bye");
}

fn check_facts(first: &Link, bulk: &Link) {
    assert_eq!(bulk.info.completion_fd, first.info.completion_fd);
    assert_ne!(bulk.info.state_fd, first.info.state_fd);
    assert_eq!(bulk.info.limits.buffer_bytes, first.info.limits.buffer_bytes);
    let buffers = bulk.info.limits.receive_buffers;
    assert!((8..=32).contains(&buffers), "{buffers} buffers");
}

/// Registers memory of several kinds. Checks that a registration which must fail returns an errno and has no other
/// effect.
fn register(first: &Link) {
    let memory = Memory::read_only(BYTES, 1);
    assert!(first.register_as(&memory, Role::Target).is_err(), "read-only memory");
    first.deregister(first.register_as(&memory, Role::Source).expect("a read-only source"));
    memory.unmap();
    for role in [Role::Both, Role::Source, Role::Target] {
        let code = first.register_as(&memory, role).expect_err("nothing is there");
        assert!([-libc::EFAULT, -libc::ENOMEM].contains(&code), "{code}");
    }
    let memory = Memory::new(BYTES);
    let mut all: Vec<Region> = (0..500).map(|_| first.register(&memory)).collect();
    all.sort_unstable_by_key(|region| region.handle);
    assert!(all.windows(2).all(|two| two[0].handle != two[1].handle));
    // A second deregistration has no effect.
    all.iter().chain(&all).for_each(|region| first.deregister(*region));
    assert_eq!(first.state(), 1);
}

fn write_of(memory: &Memory, region: Region, (to, remote): (u64, u32)) -> qp::Write {
    qp::Write {
        from: memory.at,
        local: region.key.local,
        len: memory.len as u32,
        to,
        remote,
    }
}

/// Posts WRITEs on `bulk`. Their source is read-only memory that is registered with `first`, and their target is memory
/// that the peer has registered with its own first connection.
fn reach(first: &Link, bulk: &Link, seed: u32) {
    let source = Memory::read_only(BYTES, seed);
    let region = first.register_as(&source, Role::Source).expect("register");
    let write = write_of(&source, region, first.receive_keys());
    bulk.write_all(&write, None);
    fill(bulk, &qp::Write { len: 4096, ..write });
    bulk.send(b"written");
    assert_eq!(bulk.message(), b"right");
    first.deregister(region);
}

fn be_reached(first: &Link, bulk: &Link, seed: u32) {
    let target = Memory::new(BYTES);
    let region = first.register_as(&target, Role::Target).expect("register");
    first.send_keys(&target, region);
    assert_eq!(bulk.message(), b"written");
    target.check(seed);
    first.deregister(region);
    bulk.send(b"right");
}

/// Fills the short send queue of `bulk`, and checks that the full queue still has room for a probe.
fn fill(bulk: &Link, write: &qp::Write) {
    let mut posted = 0;
    let code = loop {
        match bulk.write(write, None) {
            0 => posted += 1,
            code => break code,
        }
        assert!(posted <= 64, "the queue is long");
    };
    assert_eq!(code, -libc::EAGAIN);
    assert!(posted >= 16, "only {posted} posted");
    bulk.probe();
    let mut rooms = 0;
    loop {
        match bulk.event() {
            Event::Room => rooms += 1,
            Event::Probed => break,
            other => panic!("{other:?}"),
        }
    }
    // `Room` is reported once for a time in which the queue was full, when a WRITE has completed. All WRITEs complete
    // before the probe, so `Room` has come before `Probed`.
    assert_eq!(rooms, 1, "after {posted}");
}

/// Sleeps on the first connection's completion fd alone.
fn be_woken_by_either(first: &Link, bulk: &Link) {
    for expected in [&b"bulk"[..], b"first"] {
        first.send(b"asleep");
        loop {
            first.arm();
            bulk.arm();
            if let Some((_, message)) = take(first, bulk) {
                assert_eq!(message, expected);
                break;
            }
            assert!(wait_readable(&[first.info.completion_fd], PATIENCE), "not woken");
        }
    }
    // Without new completions the fd does not become readable, in whichever order the two connections are armed.
    let settled = Instant::now() + Duration::from_secs(1);
    for order in [[first, bulk], [bulk, first]].into_iter().cycle() {
        order.iter().for_each(|link| link.arm());
        assert!(take(first, bulk).is_none());
        if !wait_readable(&[first.info.completion_fd], Duration::from_millis(50)) {
            break;
        }
        assert!(Instant::now() < settled, "woken by nothing");
    }
    first.send(b"quiet");
}

fn wake_by_either(first: &Link, bulk: &Link) {
    for (link, message) in [(bulk, &b"bulk"[..]), (first, b"first")] {
        assert_eq!(first.message(), b"asleep");
        std::thread::sleep(Duration::from_millis(100));
        link.send(message);
    }
    assert_eq!(first.message(), b"quiet");
}

/// Returns a message that has arrived on one of the two connections, and that connection; `None` if there is none.
fn take<'a>(first: &'a Link, bulk: &'a Link) -> Option<(&'a Link, Vec<u8>)> {
    [first, bulk].into_iter().find_map(|link| {
        link.poll().expect("poll");
        std::iter::from_fn(|| link.event_now()).find_map(|event| match event {
            Event::Message(bytes) => Some((link, bytes)),
            _ => None,
        })
    })
}

/// The two connections. The thread that holds the lock around this value may use them.
struct Both<'a>([&'a Link; 2]);

// SAFETY: the lock lets one thread at a time use the links.
unsafe impl Send for Both<'_> {}

/// Two threads sleep on the completion fd, and arm the connections at any time. One thread at a time polls and sends
/// the messages back.
fn echo(first: &Link, bulk: &Link) {
    let both = Mutex::new(Both([first, bulk]));
    let armers = [first.armer(), bulk.armer()];
    let (over, end) = std::io::pipe().unwrap();
    let end = Mutex::new(Some(end));
    let fds = [first.info.completion_fd, over.as_raw_fd()];
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| send_back(&both, &armers, &end, &fds));
        }
    });
    first.send(b"stopped");
}

fn send_back(both: &Mutex<Both<'_>>, armers: &[Armer<'_>; 2], end: &Mutex<Option<PipeWriter>>, fds: &[i32; 2]) {
    loop {
        armers.iter().for_each(Armer::arm);
        {
            let both = both.lock().unwrap();
            if let Some((link, message)) = take(both.0[0], both.0[1]) {
                if message == b"stop" {
                    // This also wakes the other thread.
                    end.lock().unwrap().take().unwrap().write_all(b"!").unwrap();
                    return;
                }
                link.send(&message);
                continue;
            }
        }
        if end.lock().unwrap().is_none() {
            return;
        }
        // The client sends again as soon as it has an answer. So if a wake-up is lost, the client's wait of `PATIENCE`
        // expires before this one.
        assert!(wait_readable(fds, 2 * PATIENCE), "not woken");
    }
}

fn be_echoed(first: &Link, bulk: &Link) {
    for number in 0..ECHOES {
        let message = number.to_le_bytes();
        let links: &[&Link] = match number % 5 {
            0 | 3 => &[bulk],
            1 => &[first],
            2 => &[first, bulk],
            _ => &[bulk, first],
        };
        links.iter().for_each(|link| link.send(&message));
        links.iter().for_each(|link| assert_eq!(link.message(), message));
    }
    first.send(b"stop");
    // The server sends this when both threads have ended.
    assert_eq!(first.message(), b"stopped");
}

/// Sets the flag when it is dropped, also if a panic drops it.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Ends connections with messages in flight and events that are still in the channel, while another thread removes
/// events from the channel.
fn end_under_another_thread(first: &Link, next: &dyn Fn() -> Link) {
    let is_over = AtomicBool::new(false);
    let armer = first.armer();
    std::thread::scope(|scope| {
        let _end = SetAtEnd(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                armer.arm();
                std::thread::yield_now();
            }
        });
        for _ in 0..REMAKES {
            let bulk = next();
            let until = Instant::now() + PATIENCE;
            // This thread does not sleep, because the other thread removes the events that would wake it.
            loop {
                bulk.arm();
                if take(first, &bulk).is_some() {
                    break;
                }
                assert!(Instant::now() < until, "no message");
                std::thread::yield_now();
            }
            bulk.arm();
        }
    });
}

fn see_ends(next: &dyn Fn() -> Link) {
    for _ in 0..REMAKES {
        let bulk = next();
        bulk.send(b"one");
        // The peer ends the connection when it has one message (`end_under_another_thread`). So these messages may not
        // arrive, and may fail to be posted.
        for _ in 0..4 {
            bulk.send_parts(&[b"\x01more"]);
        }
        bulk.end();
    }
}

/// Checks that an access to memory that was deregistered ends the connection that makes it, and no other connection.
fn give_back(first: &Link, bulk: &Link) {
    let target = Memory::new(BYTES);
    let region = first.register_as(&target, Role::Target).expect("register");
    first.deregister(region);
    first.send_keys(&target, region);
    let reason = bulk.end();
    println!("server: over with {reason}");
    assert!(target.is_empty());
    first.send(b"still here");
    assert_eq!(first.message(), b"and here");
}

fn reach_in_vain(first: &Link, bulk: &Link) {
    let source = Memory::new(BYTES);
    source.fill(13);
    let region = first.register_as(&source, Role::Source).expect("register");
    // The connection may have ended before this post, so its result is not checked.
    bulk.write(&write_of(&source, region, first.receive_keys()), None);
    let reason = bulk.end();
    println!("client: over with {reason}");
    bulk.disconnect();
    assert_eq!(first.message(), b"still here");
    first.send(b"and here");
    first.deregister(region);
}
