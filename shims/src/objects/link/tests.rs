//! Tests of link objects, in which the test plays the other end of the link. Also tests of `News`, which epoll sets
//! check, and of the counts in `Looks`.

use std::os::fd::AsFd;

use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::fabric::shm::Memory;
use rdmasock_core::fabric::waiter::FLAGS_BYTES;
use rdmasock_core::os::memfd;

use crate::objects::link::{Identity, *};

/// Returns a link, and the peer's end of its channel.
fn link() -> (&'static Link, Channel) {
    crate::service::tests::without_thread();
    let (channel, peer) = Channel::pair().unwrap();
    let layout = Layout::for_data(1 << 20).unwrap();
    let arena = || memfd::create_file("test-arena", layout.file_len()).unwrap();
    let (mine, theirs) = (arena(), arena());
    let (flags, _) = memfd::create_read_only_for_peers("test-flags", FLAGS_BYTES).unwrap();
    let memory = Memory {
        mine: (mine.as_fd(), layout),
        theirs: (theirs.as_fd(), layout),
        flags: flags.as_fd(),
    };
    let identity = Identity {
        slot: 0,
        peer: InstanceId::random().unwrap(),
        stats: None,
    };
    let link = Link::new(identity, &memory).unwrap();
    link.attach(channel);
    (link, peer)
}

#[test]
fn a_number_of_the_peers_is_one_streams_at_a_time() {
    let (link, _peer) = link();
    let (socket, _stream) = crate::service::tests::connected();
    let mine = link.open(socket.slot).unwrap().vqpn;
    let (theirs, other) = (Vqpn(77), Vqpn(78));
    assert!(link.producer(theirs).is_ok());
    assert_eq!(link.producer(theirs).err(), Some(NoProducer::NoSuch));
    assert!(link.producer(other).is_ok());
    link.close(mine, Some(theirs), None);
    assert!(link.producer(theirs).is_ok());
    link.done_with(other);
    assert!(link.producer(other).is_ok());
    let beyond = Vqpn(MAX_STREAMS);
    assert_eq!(link.producer(beyond).err(), Some(NoProducer::NoSuch));
}

#[test]
fn a_link_is_given_up_when_neither_stream_nor_producer_is_left() {
    let (link, peer) = link();
    let (socket, _stream) = crate::service::tests::connected();
    let opened = link.open(socket.slot).unwrap();
    assert!(link.producer(Vqpn(3)).is_ok());
    assert!(link.set_down(Reason::PeerGone) && link.close_channel() && !link.release());
    link.close(opened.vqpn, None, Some(opened.consumer));
    assert!(!link.release());
    link.done_with(Vqpn(3));
    link.done_with(Vqpn(3));
    assert!(link.release() && !link.release());
    // The link's channel is closed.
    let mut buf = [0; 16];
    assert!(peer.recv(&mut buf).is_err());
    // No stream or message begins on the link any more.
    assert_eq!(link.open(socket.slot).err(), Some(Reason::LinkFailed));
    assert_eq!(link.producer(Vqpn(3)).err(), Some(NoProducer::Limits));
    assert!(link.send(&Message::Closed { yours: Vqpn(0) }, &[]).is_err());
}

#[test]
fn an_object_has_the_descriptors_of_the_link_that_it_is() {
    let message = Message::Closed { yours: Vqpn(0) };
    for _ in 0..8 {
        let (link, peer) = link();
        let (bell, button) = rdmasock_core::os::doorbell::pair().unwrap();
        let button = PrivateFd::adopt(button.release()).unwrap();
        // The object has no button of an earlier link.
        assert_eq!(link.on_waiter(1, button), Ok(()));
        link.send(&message, &[]).unwrap();
        let mut buf = [0; 64];
        assert!(!peer.recv(&mut buf).unwrap().bytes.is_empty());
        assert!(link.set_down(Reason::PeerGone) && link.close_channel() && link.release());
        assert!(link.send(&message, &[]).is_err() && peer.recv(&mut buf).is_err());
        drop(bell);
    }
}

#[test]
fn each_is_its_own_and_those_made_together_lie_together() {
    let all: Vec<_> = (0..2 * AT_A_TIME).map(|_| new()).collect();
    for (at, news) in all.iter().enumerate() {
        assert!(!news.armed.swap(true, Relaxed), "{at}");
    }
    let place = |news: &News| news.armed.as_ptr().addr();
    let next = |pair: &&[&'static News]| matches!(pair, [a, b] if place(a) + size_of::<News>() == place(b));
    let together = all.windows(2).filter(next).count();
    assert!(together >= 2 * AT_A_TIME - 4, "{together}");
}

#[test]
fn a_waiter_hears_of_its_own_alone() {
    let (news, [first, last]) = (News::default(), [0, 63].map(WaiterId));
    news.on_queued(first);
    news.on_queued(last);
    news.on_take(first);
    assert!(news.is_queued(last) && !news.is_queued(first));
    // This waiter has no ready queue.
    news.on_queued(WaiterId(64));
    assert!(!news.is_queued(WaiterId(64)) && !news.is_queued(first));
}

/// Returns whether checks that come every `pause` ns are ever judged as noise (`Looks::are_noise`), if each
/// `find_every`th of them finds something.
fn is_noise(find_every: u32, pause: u64) -> bool {
    let looks = Looks::default();
    let mut now = 1 << 40;
    (1..200_000).any(|n| {
        now += pause;
        if n % find_every == 0 {
            bump(&looks.found);
            return false;
        }
        bump(&looks.vain).is_multiple_of(MOST_VAIN) && looks.are_noise(now)
    })
}

#[test]
fn looks_in_vain_are_noise_if_they_are_many_and_fast_and_hardly_anything_is_found() {
    assert!(is_noise(u32::MAX, 1_000));
    assert!(is_noise(1_000, 1_000));
    assert!(!is_noise(100, 1_000), "something is found");
    assert!(!is_noise(2, 10), "an event loop looks again at what it has reported");
    assert!(!is_noise(u32::MAX, 2_000_000), "they cost nothing");
}

#[test]
fn a_question_that_is_asked_twice_is_answered_once() {
    let looks = Looks::default();
    assert!((1..=MOST_VAIN).all(|_| bump(&looks.vain) > 0));
    looks.are_noise(1 << 40);
    assert!(!looks.are_noise((1 << 40) + 1));
    looks.vain.fetch_sub(1, Relaxed);
    bump(&looks.vain);
    assert!(!looks.are_noise((1 << 40) + 2));
}
