//! Tests of queue pairs both of whose ends are in this process.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::serve::Connection;
use rdmasock_core::fabric::remote::qp::{Completed, Key, PostError, QueuePair, Read, Role, Write};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::settings::Settings;
use crate::within::{LocalQp, pair, pair_beside};

/// The settings to test: devices that execute work requests in the posting thread, and devices with a thread.
fn kinds() -> [Settings; 4] {
    ["roce", "iwarp", "roce,thread", "iwarp,delay=50"].map(|text| Settings::parse(text).unwrap())
}

/// A completion that one poll finds.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Seen {
    Message(Vec<u8>),
    Written(u32, u32),
    Room,
    Read,
    Probed,
}

fn look(qp: &LocalQp, seen: &mut Vec<Seen>) -> Result<usize, i32> {
    let count = qp.poll(&mut |completed| {
        seen.push(match completed {
            Completed::Received(bytes) => Seen::Message(bytes.to_vec()),
            Completed::Written { immediate, bytes } => Seen::Written(immediate, bytes),
            Completed::Room => Seen::Room,
            Completed::Read => Seen::Read,
            Completed::Probed => Seen::Probed,
        });
    });
    count.map_err(|down| down.0)
}

/// Polls until there are `count` completions.
fn await_seen(qp: &LocalQp, count: usize) -> Vec<Seen> {
    let until = Instant::now() + Duration::from_secs(20);
    let mut seen = Vec::new();
    while seen.len() < count {
        look(qp, &mut seen).unwrap();
        assert!(Instant::now() < until, "only {seen:?}");
    }
    seen
}

fn await_end(qp: &LocalQp) -> i32 {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        qp.conn().state();
        if let Err(errno) = look(qp, &mut Vec::new()) {
            return errno;
        }
        assert!(Instant::now() < until, "it does not end");
    }
}

/// Memory that is registered at one end. It is never freed, as the device may still access it when a test ends.
struct Registered {
    at: *mut u8,
    len: usize,
    key: Key,
}

impl Registered {
    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the memory is never freed. The test has waited for the writes to it, or compares it byte by byte.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }.to_vec()
    }
}

fn registered(qp: &LocalQp, memory: Vec<u8>) -> Registered {
    let memory = memory.leak();
    let (at, len) = (memory.as_mut_ptr(), memory.len());
    // SAFETY: the memory is never freed, and only this pointer refers to it.
    let key = unsafe { qp.register(at, len, Role::Both) }.unwrap().key;
    Registered { at, len, key }
}

fn write_of(from: &Registered, to: &Registered) -> Write {
    Write {
        from: from.at,
        local: from.key.local,
        len: from.len as u32,
        to: to.at.expose_provenance() as u64,
        remote: to.key.remote,
    }
}

fn post(qp: &LocalQp, write: &Write, immediate: Option<u32>) -> Result<(), PostError> {
    // SAFETY: the sources in these tests are registered, or the test expects that they are refused.
    unsafe { qp.write(write, immediate) }
}

#[test]
fn messages_and_writes_arrive_in_order() {
    for settings in kinds() {
        let [a, b] = pair(settings).unwrap();
        let from = registered(&a, (0..100_000u32).map(|n| n as u8).collect());
        let to = registered(&b, vec![0; 100_000]);
        a.send(b"one two").unwrap();
        post(&a, &write_of(&from, &to), None).unwrap();
        a.send(b"three").unwrap();
        let messages = [b"one two".to_vec(), b"three".to_vec()].map(Seen::Message);
        assert_eq!(await_seen(&b, 2), messages);
        assert!(to.bytes() == from.bytes(), "{settings:?}");
        let with_immediate = post(&a, &write_of(&from, &to), Some(7));
        if settings.is_iwarp {
            assert_eq!(with_immediate, Err(PostError::Down));
        } else {
            assert_eq!(await_seen(&b, 1), [Seen::Written(7, 100_000)]);
        }
        a.probe().unwrap();
        assert_eq!(await_seen(&a, 1), [Seen::Probed]);
    }
}

#[test]
fn what_is_offered_is_read_and_nothing_else() {
    for settings in kinds() {
        for is_offered in [true, false] {
            let [a, b] = pair(settings).unwrap();
            let to = registered(&a, vec![0; 100_000]);
            let mut bytes: Vec<u8> = (0..100_000u32).map(|n| n as u8).collect();
            let role = if is_offered { Role::Offered } else { Role::Both };
            // SAFETY: the memory lives until both ends are dropped, below.
            let offered = unsafe { b.register(bytes.as_mut_ptr(), bytes.len(), role) }.unwrap();
            let read = Read {
                to: to.at,
                local: to.key.local,
                len: to.len as u32,
                from: bytes.as_ptr().expose_provenance() as u64,
                remote: offered.key.remote,
            };
            // SAFETY: no other code accesses the target.
            let posted = unsafe { a.read(&read) };
            if is_offered {
                assert_eq!(posted, Ok(()));
                assert_eq!(await_seen(&a, 1), [Seen::Read]);
                assert!(to.bytes() == bytes, "{settings:?}");
            } else {
                assert_eq!(await_end(&a), libc::EACCES);
                assert!(to.bytes().iter().all(|byte| *byte == 0));
            }
            drop((a, b));
        }
    }
}

#[test]
fn a_full_send_queue_says_when_there_is_room() {
    for settings in kinds() {
        let [a, b] = pair(settings).unwrap();
        let from = registered(&a, vec![1; 64]);
        let to = registered(&b, vec![0; 64]);
        let posted = (0..1000)
            .take_while(|_| post(&a, &write_of(&from, &to), None).is_ok())
            .count();
        assert!((100..1000).contains(&posted));
        assert_eq!(post(&a, &write_of(&from, &to), None), Err(PostError::Full));
        assert_eq!(await_seen(&a, 1), [Seen::Room]);
        post(&a, &write_of(&from, &to), None).unwrap();
    }
}

#[test]
fn a_message_without_a_buffer_ends_the_connection_and_what_came_before_is_there() {
    for settings in kinds() {
        let [a, b] = pair(settings).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while a.send(b"x") != Err(PostError::Down) {
            look(&a, &mut Vec::new()).ok();
            assert!(Instant::now() < until);
        }
        let mut seen = Vec::new();
        b.conn().state();
        look(&b, &mut seen).unwrap();
        assert_eq!(seen.len(), 144);
        assert_eq!(await_end(&b), libc::ECONNRESET);
    }
}

#[test]
fn a_write_out_of_registered_memory_ends_the_connection() {
    for settings in kinds() {
        for spoil in [
            (|w: &mut Write| w.len += 1) as fn(&mut Write),
            |w| w.to -= 1,
            |w| w.to = u64::MAX,
            |w| w.remote = w.local,
            |w| w.local = w.remote,
            |w| w.remote ^= 1 << 16,
            |w| w.remote = 0,
        ] {
            let [a, b] = pair(settings).unwrap();
            let (from, to) = (registered(&a, vec![1; 64]), registered(&b, vec![0; 64]));
            let mut write = write_of(&from, &to);
            spoil(&mut write);
            let _ = post(&a, &write, None);
            await_end(&a);
            assert_eq!(await_end(&b), libc::ECONNRESET);
            assert!(to.bytes().iter().all(|byte| *byte == 0));
        }
    }
}

#[test]
fn nobody_reaches_the_memory_of_a_connection_that_was_dropped() {
    let [a, b] = pair(Settings::default()).unwrap();
    let (from, to) = (registered(&a, vec![1; 64]), registered(&b, vec![0; 64]));
    let write = write_of(&from, &to);
    drop(b);
    assert_eq!(post(&a, &write, None), Err(PostError::Down));
    assert_eq!(await_end(&a), libc::ECONNRESET);
}

/// Returns whether the connection's completion fd becomes readable within a time.
fn is_readable(qp: &LocalQp, time: Duration) -> bool {
    let info = qp.conn().info().unwrap();
    // SAFETY: the fd is open as long as the connection.
    let bell = unsafe { std::os::fd::BorrowedFd::borrow_raw(info.completion_fd) };
    let timeout = Timespec::try_from(time).unwrap();
    poll(&mut [PollFd::new(&bell.as_fd(), PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

#[test]
fn the_descriptor_is_readable_after_what_came_since_it_was_armed() {
    for settings in kinds() {
        let [a, b] = pair(settings).unwrap();
        let wait = |ms| is_readable(&b, Duration::from_millis(ms));
        for _ in 0..3 {
            assert!(!wait(0));
            b.arm().unwrap();
            a.send(b"x").unwrap();
            assert!(wait(20_000));
            a.send(b"y").unwrap();
            await_seen(&b, 2);
            b.arm().unwrap();
            assert!(!wait(0), "what has come was seen before");
        }
    }
}

#[test]
fn a_cut_ends_both_ends_in_the_middle_of_a_write() {
    let [a, b] = pair(Settings::parse("cut=5,thread").unwrap()).unwrap();
    let (from, to) = (registered(&a, vec![1; 64]), registered(&b, vec![0; 64]));
    let until = Instant::now() + Duration::from_secs(20);
    while post(&a, &write_of(&from, &to), None) != Err(PostError::Down) {
        look(&a, &mut Vec::new()).ok();
        assert!(Instant::now() < until);
    }
    assert_eq!((await_end(&a), await_end(&b)), (libc::EIO, libc::ECONNRESET));
}

#[test]
fn silence_ends_nothing_and_nothing_comes() {
    let [a, b] = pair(Settings::parse("silence=5").unwrap()).unwrap();
    (0..20).for_each(|_| a.send(b"x").unwrap());
    let before = await_seen(&b, 5).len();
    assert!((5..10).contains(&before));
    a.probe().unwrap();
    b.send(b"y").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let mut seen = Vec::new();
    for qp in [&a, &b] {
        qp.conn().state();
        assert_eq!(look(qp, &mut seen), Ok(0));
    }
}

#[test]
fn the_answer_of_a_late_peer_comes_late() {
    let begun = Instant::now();
    pair(Settings::parse("late=50").unwrap()).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(50));
}

#[test]
fn one_beside_another_has_its_descriptor_and_its_memory_and_ends_alone() {
    for settings in kinds() {
        let [a, b] = pair(settings).unwrap();
        let [bulk_a, bulk_b] = pair_beside(settings, Some([&a, &b])).unwrap();
        let bell = |qp: &LocalQp| qp.conn().info().unwrap().completion_fd;
        assert_eq!((bell(&bulk_a), bell(&bulk_b)), (bell(&a), bell(&b)));
        let (from, to) = (registered(&a, vec![7; 64]), registered(&b, vec![0; 64]));
        let write = Write {
            from: from.at,
            local: from.key.local,
            len: 64,
            to: to.at as u64,
            remote: to.key.remote,
        };
        b.arm().unwrap();
        bulk_b.arm().unwrap();
        // SAFETY: registered above, and never freed.
        unsafe { bulk_a.write(&write, None) }.unwrap();
        bulk_a.send(b"done").unwrap();
        assert!(is_readable(&b, Duration::from_secs(20)));
        assert_eq!(await_seen(&bulk_b, 1), [Seen::Message(b"done".to_vec())]);
        assert_eq!(to.bytes(), [7; 64]);
        // Memory that was deregistered ends the connection that accesses it.
        let memory = vec![0u8; 64].leak();
        // SAFETY: the memory is never freed, and no other code accesses it.
        let region = unsafe { b.register(memory.as_mut_ptr(), 64, Role::Target) }.unwrap();
        b.deregister(region);
        let write = Write {
            to: memory.as_ptr() as u64,
            remote: region.key.remote,
            ..write
        };
        // SAFETY: the source is registered.
        let _ = unsafe { bulk_a.write(&write, None) };
        assert_eq!(await_end(&bulk_a), libc::EACCES);
        await_end(&bulk_b);
        assert_eq!(memory, [0; 64]);
        a.send(b"still here").unwrap();
        assert_eq!(await_seen(&b, 1), [Seen::Message(b"still here".to_vec())]);
    }
}
