//! Tests of the page of instances, by forked processes, of the absent destinations, and of the page of holders.

use std::collections::HashSet;

use proptest::prelude::*;

use crate::os::forked::in_child;
use crate::rendezvous::peers::*;

fn id(n: u8) -> InstanceId {
    InstanceId::from_bytes([n; 16])
}

fn own_pid() -> u32 {
    std::process::id()
}

impl PeerPage {
    /// Removes instance `id` of process `pid`. Has no effect if it is not there.
    fn unregister(&self, pid: u32, id: &InstanceId) {
        for slot in self.slots() {
            let owner = slot.owner.load(Relaxed);
            if pid_of(owner) == pid && read(slot).is_some_and(|(_, found)| found == *id) {
                // Fails only if another process took this one for dead. Then the slot is no longer this process's to
                // free.
                let _ = slot
                    .owner
                    .compare_exchange(owner, next_owner(owner, 0), Release, Relaxed);
            }
        }
    }
}

/// Returns the pid of a process that has just ended.
fn dead_pid() -> u32 {
    let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    pid
}

#[test]
fn an_instance_is_listed_until_it_leaves() {
    let page = PeerPage::new().unwrap();
    assert_eq!(page.list(), []);
    assert!(page.register(own_pid(), &id(1)));
    assert!(page.register(own_pid(), &id(2)));
    assert_eq!(page.list(), [id(1), id(2)]);
    page.unregister(own_pid(), &id(1));
    page.unregister(own_pid() + 1, &id(2));
    assert_eq!(page.list(), [id(2)]);
    assert!(page.register(own_pid(), &id(3)));
    assert_eq!(page.list(), [id(3), id(2)]);
}

#[test]
fn forked_workers_share_the_page() {
    let page = PeerPage::new().unwrap();
    assert!(page.register(own_pid(), &id(1)));
    in_child(|| {
        assert_eq!(page.list(), [id(1)]);
        assert!(page.register(own_pid(), &id(2)));
        assert_eq!(page.list().len(), 2);
    });
    // The worker has died without an unregister.
    assert_eq!(page.list(), [id(1)]);
}

#[test]
fn the_slots_of_the_dead_are_used_again_when_no_other_is_free() {
    let page = PeerPage::new().unwrap();
    let dead = dead_pid();
    assert!(page.register(dead, &id(100)));
    for n in 1..SLOTS {
        assert!(page.register(own_pid(), &id(n as u8)));
    }
    assert!(page.register(own_pid(), &id(200)));
    assert!(!page.register(own_pid(), &id(201)));
    assert_eq!(page.list().len(), SLOTS);
    assert_eq!(page.list()[0], id(200));
}

#[test]
fn a_process_that_died_while_entering_itself_leaves_nothing() {
    let page = PeerPage::new().unwrap();
    for slot in page.slots() {
        slot.owner.store(next_owner(0, dead_pid_once()), Relaxed);
    }
    assert_eq!(page.list(), []);
    assert!(page.register(own_pid(), &id(1)));
    assert_eq!(page.list(), [id(1)]);
}

fn dead_pid_once() -> u32 {
    static PID: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *PID.get_or_init(dead_pid)
}

#[test]
fn any_bits_in_the_page_are_survived() {
    let page = PeerPage::new().unwrap();
    for (n, slot) in page.slots().iter().enumerate() {
        slot.owner
            .store(u64::MAX.rotate_left(n as u32) ^ (n as u64) << 40, Relaxed);
    }
    let _ = page.list();
    page.register(own_pid(), &id(1));
    page.unregister(own_pid(), &id(1));
}

#[test]
fn a_reader_never_sees_half_of_an_id() {
    let page = PeerPage::new().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for first in [1, 101] {
            let (page, stop) = (&page, &stop);
            scope.spawn(move || {
                for n in (0..100u8).cycle().take(50_000) {
                    assert!(page.register(own_pid(), &id(first + n)));
                    page.unregister(own_pid(), &id(first + n));
                }
                stop.store(true, Relaxed);
            });
        }
        while !stop.load(Relaxed) {
            // Without the check of the process, which costs a system call.
            for (_, found) in page.slots().iter().filter_map(read) {
                let bytes = found.as_bytes();
                assert!(bytes.iter().all(|b| *b == bytes[0]), "{found}");
            }
        }
    });
    assert_eq!(page.list(), []);
}

fn addr(n: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], n))
}

#[test]
fn an_absence_expires() {
    let (mut absent, now, second) = (Absent::new(8), Instant::now(), Duration::from_secs(1));
    absent.insert(addr(1), now, second);
    absent.insert(addr(2), now, 2 * second);
    assert!(absent.has(&addr(1), now));
    assert!(!absent.has(&addr(1), now + second) && absent.has(&addr(2), now + second));
    absent.insert(addr(1), now + second, second);
    assert!(absent.has(&addr(1), now + second));
    absent.insert(addr(3), now, Duration::MAX);
    assert!(!absent.has(&addr(3), now));
}

proptest! {
    #[test]
    fn absences_are_bounded_and_the_newest_kept(
        inserts in proptest::collection::vec((0u16..20, 0u64..10), 1..60),
        capacity in 1usize..6,
    ) {
        let (mut absent, mut now) = (Absent::new(capacity), Instant::now());
        for (n, lifetime) in inserts {
            now += Duration::from_secs(1);
            let known: HashSet<_> = absent.until.keys().copied().collect();
            absent.insert(addr(n), now, Duration::from_secs(lifetime));
            prop_assert!(absent.until.len() <= capacity);
            prop_assert_eq!(absent.has(&addr(n), now), lifetime > 0);
            if known.len() < capacity || known.contains(&addr(n)) {
                prop_assert!(known.iter().all(|k| absent.until.contains_key(k)));
            }
        }
    }
}

fn tuple(port: u16) -> Tuple {
    let client = SocketAddr::from(([127, 0, 0, 1], port));
    Tuple::new(client, SocketAddr::from(([127, 0, 0, 1], 5432)))
}

fn holder(n: u16) -> InstanceId {
    InstanceId::from_words([n.into(), 7])
}

#[test]
fn the_last_who_said_so_holds_a_connection() {
    let page = HolderPage::new().unwrap();
    assert_eq!(page.holder(&tuple(1)), None);
    page.enter(&tuple(1), &holder(1));
    page.enter(&tuple(2), &holder(2));
    page.enter(&tuple(1), &holder(3));
    assert_eq!(page.holder(&tuple(1)), Some(holder(3)));
    assert_eq!(page.holder(&tuple(2)), Some(holder(2)));
    assert_eq!(page.holder(&tuple(3)), None);
}

#[test]
fn many_connections_are_remembered_and_more_are_never_taken_for_others() {
    let page = HolderPage::new().unwrap();
    (1..=1000).for_each(|n| page.enter(&tuple(n), &holder(n)));
    let found = (1..=1000).filter(|n| page.holder(&tuple(*n)) == Some(holder(*n)));
    assert!(found.count() > 980);
    (1..=50_000).for_each(|n| page.enter(&tuple(n), &holder(n)));
    let wrong = (1..=50_000).filter(|n| page.holder(&tuple(*n)).is_some_and(|h| h != holder(*n)));
    assert_eq!(wrong.count(), 0);
    let found = (1..=50_000).filter(|n| page.holder(&tuple(*n)).is_some());
    assert!(found.count() > BUCKETS);
}

#[test]
fn what_was_half_written_is_not_believed() {
    let page = HolderPage::new().unwrap();
    page.enter(&tuple(1), &holder(1));
    let connection = name_of(&tuple(1));
    let bucket = page.bucket(connection);
    let entry = bucket.iter().find(|e| e.connection.load(Relaxed) == connection);
    entry.unwrap().holder[0].store(99, Relaxed);
    assert_eq!(page.holder(&tuple(1)), None);
}
