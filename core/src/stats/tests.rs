//! Tests of the counter page: a reader finds all values that the owner writes.

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use crate::os::privatefd::PrivateFd;
use crate::stats::*;

fn create(pid: u32) -> (&'static StatsPage, Option<PrivateFd>) {
    StatsPage::create(pid, [7; 16], b"test\x1b[31m").unwrap()
}

fn stream_info(fd: i32) -> StreamInfo {
    StreamInfo {
        fd,
        direction: Direction::Accept,
        local: Some("127.0.0.1:6379".parse().unwrap()),
        peer: Some("[2001:db8::1]:4000".parse().unwrap()),
        why: Reason::BelowThreshold.into(),
    }
}

fn page() -> (&'static StatsPage, StatsReader, PrivateFd) {
    let (page, fd) = create(4242);
    let fd = fd.expect("a memfd");
    let path = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    (page, StatsReader::open(&path).unwrap(), fd)
}

#[test]
fn a_reader_sees_the_header_without_control_characters() {
    let (_page, reader, _fd) = page();
    let seen = reader.read().unwrap();
    assert_eq!(seen.pid, 4242);
    assert_eq!(seen.id, [7; 16]);
    assert_eq!(seen.program, "test\u{fffd}[31m");
    assert_eq!(seen.totals, Totals::default());
    assert!(seen.links.is_empty() && seen.streams.is_empty());
}

#[test]
fn a_reader_sees_streams_in_the_first_and_the_last_slot() {
    let (page, reader, _fd) = page();
    let first = page.open_stream(0, &stream_info(5)).unwrap();
    let last = page.open_stream(STREAM_SLOTS - 1, &stream_info(9)).unwrap();
    assert!(page.open_stream(STREAM_SLOTS, &stream_info(1)).is_none());
    first.tx.add_tcp(10);
    first.tx.add_tcp(5);
    last.rx.add_link(7);
    last.set_rx_path(Path::Shm);
    last.set_link(Some(0));
    last.set_why(Why::declined(Reason::ArenaFull));

    let seen = reader.read().unwrap();
    let [one, two] = seen.streams.as_slice() else {
        panic!("two streams, not {:?}", seen.streams);
    };
    assert_eq!((one.fd, one.tx.tcp_bytes, one.tx.tcp_calls), (5, 15, 2));
    assert_eq!(one.local, Some("127.0.0.1:6379".parse().unwrap()));
    assert_eq!(one.peer, Some("[2001:db8::1]:4000".parse().unwrap()));
    assert_eq!(one.direction, Some(Direction::Accept));
    assert_eq!(one.link, None);
    assert_eq!((two.fd, two.rx.link_bytes, two.rx.link_calls), (9, 7, 1));
    assert_eq!((two.tx_path, two.rx_path), (Some(Path::Tcp), Some(Path::Shm)));
    assert_eq!(two.link, Some(0));
    assert!(two.is_on_tcp() && !two.promoted);
    assert_eq!(two.why.unwrap().to_string(), "declined by peer: arena full");
    assert_eq!(seen.totals.tx.tcp_bytes, 15);
    assert_eq!(seen.totals.rx.link_bytes, 7);
    assert_eq!(seen.totals.streams, 2);
}

#[test]
fn totals_keep_what_closed_streams_counted() {
    let (page, reader, _fd) = page();
    for round in 1..=3 {
        let stream = page.open_stream(3, &stream_info(round)).unwrap();
        stream.tx.add_link(100);
        stream.set_tx_path(Path::Shm);
        stream.set_rx_path(Path::Shm);
        if round == 2 {
            stream.set_tx_path(Path::Tcp);
        }
        let seen = reader.read().unwrap();
        assert_eq!(seen.streams.len(), 1);
        assert_eq!(seen.streams[0].tx.link_bytes, 100);
    }
    let before = reader.read().unwrap().totals;
    page.close_stream(3);
    page.close_stream(3);
    let after = reader.read().unwrap();
    assert!(after.streams.is_empty());
    assert_eq!(before, after.totals);
    assert_eq!(after.totals.tx.link_bytes, 300);
    assert_eq!((after.totals.promoted, after.totals.demoted), (3, 1));
}

#[test]
fn a_reader_sees_links_and_events() {
    let (page, reader, _fd) = page();
    let link = page.open_link(LINK_SLOTS - 1, Path::Shm, [9; 16], 77).unwrap();
    link.set_streams(3);
    page.count(Event::Yes);
    page.count(Event::Yes);
    let seen = reader.read().unwrap();
    assert_eq!(seen.count(Event::Yes), 2);
    assert_eq!(seen.count(Event::No), 0);
    let up = seen.links[0];
    assert_eq!(
        (up.slot, up.peer, up.peer_pid, up.streams),
        (LINK_SLOTS - 1, [9; 16], 77, 3)
    );
    assert_eq!((up.state, up.fabric), (Some(LinkState::Up), Some(Path::Shm)));
    link.set_down(Reason::PeerGone);
    let down = reader.read().unwrap().links[0];
    assert_eq!(down.state, Some(LinkState::Down));
    assert_eq!(down.why, Ok(Reason::PeerGone.into()));
    page.close_link(LINK_SLOTS - 1);
    assert!(reader.read().unwrap().links.is_empty());
}

fn asleep(thread: u32, call: Call, stream: Option<u32>) -> Asleep {
    Asleep {
        thread,
        call,
        stream,
        since: page::monotonic_ns(),
        unread: 5,
    }
}

#[test]
fn a_reader_sees_who_sleeps_on_which_stream() {
    let (page, reader, _fd) = page();
    let one = page.open_stream(1, &stream_info(5)).unwrap();
    page.open_stream(2, &stream_info(6)).unwrap();
    let last = u16::try_from(SLEEPER_SLOTS - 1).unwrap();
    let (receiver, poller) = (page.sleeper(last).unwrap(), page.sleeper(64).unwrap());
    assert!(page.sleeper(last + 1).is_none());
    receiver.begin(&asleep(11, Call::Receive, Some(1)));
    poller.begin(&asleep(12, Call::Poll, None));
    one.set_waiting(None, Some(64));

    let seen = reader.read().unwrap();
    let on = |slot: usize| -> Vec<_> {
        let sleepers = seen.asleep_on(&seen.streams[slot]);
        sleepers.map(|s| (s.thread, s.call, s.unread)).collect()
    };
    let both = [(Some(12), Some(Call::Poll), 5), (Some(11), Some(Call::Receive), 5)];
    assert_eq!((on(0), on(1)), (both.to_vec(), Vec::new()));

    receiver.end(11);
    one.set_waiting(None, None);
    let seen = reader.read().unwrap();
    assert_eq!(seen.asleep_on(&seen.streams[0]).count(), 0);
    assert_eq!(seen.sleepers.len(), 1, "it sleeps on something else");
}

#[test]
fn of_those_who_sleep_as_one_the_last_is_named_and_all_are_counted() {
    let (page, reader, _fd) = page();
    let set = page.sleeper(1).unwrap();
    let seen = || {
        let sleepers = reader.read().unwrap().sleepers;
        sleepers.first().map(|s| (s.count, s.thread))
    };
    set.begin(&asleep(11, Call::Epoll, None));
    set.begin(&asleep(12, Call::Epoll, None));
    assert_eq!(seen(), Some((2, Some(12))));
    set.end(12);
    assert_eq!(seen(), Some((1, None)));
    set.end(11);
    assert_eq!(seen(), None);
}

#[test]
fn what_is_sent_again_on_tcp_was_not_sent_over_the_link() {
    let (page, reader, _fd) = page();
    let stream = page.open_stream(0, &stream_info(5)).unwrap();
    stream.tx.add_link(100);
    stream.move_tx_to_tcp(30);
    let tx = reader.read().unwrap().totals.tx;
    assert_eq!((tx.link_bytes, tx.tcp_bytes), (70, 30));
    stream.move_tx_to_tcp(1000);
    assert_eq!(stream.tx.load().link_bytes, 0);
}

#[test]
fn reading_allocates_nothing_in_the_page() {
    let (page, reader, fd) = page();
    page.open_stream(1000, &stream_info(5)).unwrap();
    let blocks = |fd: &PrivateFd| rustix::fs::fstat(fd).unwrap().st_blocks;
    let before = blocks(&fd);
    reader.read().unwrap();
    assert_eq!(blocks(&fd), before);
    assert!(before * 512 <= 16 * 1024, "{before} blocks");
}

#[test]
fn what_is_not_a_sealed_page_is_refused() {
    let open =
        |fd: &rustix::fd::OwnedFd| StatsReader::open(&PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd())));
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let fake = rustix::fs::memfd_create("rdmasock-fake", flags).unwrap();
    assert!(matches!(open(&fake), Err(ReadError::NotAPage("not sealed"))));
    rustix::fs::ftruncate(&fake, size_of::<StatsPage>() as u64).unwrap();
    assert!(matches!(open(&fake), Err(ReadError::NotAPage("not sealed"))));
    let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fake, seals).unwrap();
    assert!(matches!(open(&fake), Err(ReadError::NotAPage("no magic number (yet)"))));
}

#[test]
fn an_instance_is_found_by_its_pid_only() {
    let own = std::process::id();
    let (_page, fd) = create(own);
    let (_other, other_fd) = create(4242);
    let found = instance_of(own).unwrap().expect("this process");
    assert_eq!(found.instance.pid, own);
    assert_eq!(found.uid, rustix::process::getuid().as_raw());
    assert!(instances().unwrap().iter().any(|p| p.pid == own));
    drop((fd, other_fd));
}

#[test]
fn reasons_have_a_code_and_a_text_each() {
    for (reason, next) in Reason::ALL.iter().zip(&Reason::ALL[1..]) {
        assert!((*reason as u16) < *next as u16);
        assert_eq!(Reason::from_code(*reason as u16), Some(*reason));
        let why = Why::declined(*next);
        assert_eq!(Why::from_bits(why.to_bits()), Ok(why));
        assert!(!next.text().is_empty());
    }
    assert_eq!(Reason::from_code(60_000), None);
}
