//! Tests of an end in shared memory: numbers, memory, and one link after another.

use std::cell::Cell;
use std::os::fd::AsFd;

use crate::fabric::layout::GROUP_STREAMS;
use crate::fabric::shm::*;
use crate::fabric::waiter::FLAGS_BYTES;
use crate::os::privatefd::PrivateFd;
use crate::os::{forked, memfd};

/// A side channel that is up or down, and a count of the calls of `ring`.
#[derive(Default)]
struct Outer {
    is_down: Cell<bool>,
    rung: Cell<u32>,
}

impl Outside for Outer {
    fn send(&self, _: &Message) -> Result<(), SendError> {
        (!self.is_down.get()).then_some(()).ok_or(SendError::Down)
    }

    fn ring(&self, _: WaiterId, _: &FlagPage) {
        self.rung.set(self.rung.get() + 1);
    }
}

/// The files of a link.
struct Files {
    layout: Layout,
    arenas: [PrivateFd; 2],
    flags: (PrivateFd, memfd::Mapping),
}

impl Files {
    fn new(data_bytes: u64) -> Self {
        let layout = Layout::for_data(data_bytes).unwrap();
        let arena = |_| memfd::create_file("test-arena", layout.file_len()).unwrap();
        Self {
            layout,
            arenas: [0, 1].map(arena),
            flags: memfd::create_read_only_for_peers("test-flags", FLAGS_BYTES).unwrap(),
        }
    }

    /// Returns the files as they are mapped by end `me`, which is 0 or 1.
    fn memory(&self, me: usize) -> Memory<'_> {
        Memory {
            mine: (self.arenas[me].as_fd(), self.layout),
            theirs: (self.arenas[1 - me].as_fd(), self.layout),
            flags: self.flags.0.as_fd(),
        }
    }

    /// Returns both ends of a link with these files.
    fn ends(&self) -> [End<Outer>; 2] {
        [0, 1].map(|me| {
            let end = blank();
            end.show(&self.memory(me)).unwrap();
            end
        })
    }

    /// Returns how many pages of memory the arena of end `me` takes.
    fn pages(&self, me: usize) -> i64 {
        rustix::fs::fstat(&self.arenas[me]).unwrap().st_blocks / 8
    }
}

fn blank() -> End<Outer> {
    // SAFETY: the tests drop or forget the cursors before they drop the end.
    unsafe { End::blank(Outer::default()) }.unwrap()
}

fn end() -> End<Outer> {
    let end = blank();
    end.show(&Files::new(1 << 16).memory(0)).unwrap();
    end
}

fn in_use(end: &End<Outer>) -> u64 {
    end.numbers.bytes_in_use()
}

#[test]
fn an_arena_is_not_shorter_than_its_layout() {
    let layout = Layout::for_data(1 << 16).unwrap();
    let short = memfd::Mapping::anonymous(layout.file_len() as usize - 1).unwrap();
    assert!(Side::new(short, layout).is_none());
}

#[test]
fn a_number_that_the_peer_could_not_be_told_of_stays_taken() {
    let end = end();
    let opened = end.open(12).unwrap();
    end.outside().is_down.set(true);
    end.close(opened.vqpn, Some(Vqpn(0)), Some(opened.consumer));
    end.on_closed(opened.vqpn);
    assert_ne!(end.open(12).unwrap().vqpn, opened.vqpn);
    assert_eq!((in_use(&end), end.numbers()), (2 * 4096, 2));
}

#[test]
fn a_number_whose_consumer_is_lost_is_free_but_its_ring_is_not() {
    let end = end();
    let opened = end.open(12).unwrap();
    end.close(opened.vqpn, None, None);
    assert_eq!(in_use(&end), 4096);
    assert_eq!(end.open(12).unwrap().vqpn, opened.vqpn);
}

#[test]
fn being_told_twice_that_the_peer_is_done_frees_a_number_once() {
    let end = end();
    let opened = end.open(12).unwrap();
    end.close(opened.vqpn, None, Some(opened.consumer));
    end.on_closed(opened.vqpn);
    assert_eq!(in_use(&end), 0);
    assert_ne!(end.open(12).unwrap().vqpn, end.open(12).unwrap().vqpn);
}

#[test]
fn a_ring_has_its_memory_from_when_it_is_given_until_it_is_freed() {
    let files = Files::new(1 << 20);
    let end = blank();
    end.show(&files.memory(0)).unwrap();
    assert_eq!(files.pages(0), 0);
    let region = end.allocate(14).unwrap();
    assert_eq!(files.pages(0), 4);
    end.free(region);
    assert_eq!(files.pages(0), 0);
}

#[test]
fn a_few_streams_take_two_pages_and_their_rings() {
    let files = Files::new(1 << 30);
    let end = blank();
    end.show(&files.memory(0)).unwrap();
    let _few: Vec<_> = (0..16).map(|_| end.open(12).unwrap()).collect();
    assert_eq!(files.pages(0), 2 + 16);
    let _one_more = end.open(12).unwrap();
    assert_eq!(files.pages(0), 3 + 17);
}

#[test]
fn both_ends_follow_the_arenas_as_they_grow() {
    let files = Files::new(1 << 26);
    let ends = files.ends();
    let streams: Vec<_> = (0..3 * GROUP_STREAMS)
        .map(|n| {
            let opened = ends[0].open(12).unwrap();
            let mut producer = ends[1].producer(opened.vqpn).unwrap();
            let spans = producer.spans(4).unwrap();
            // SAFETY: the source is readable, and apart from the ring.
            unsafe { spans.copy_in(0, n.to_ne_bytes().as_ptr(), 4) };
            let _ = producer.commit(4);
            ends[1].notify(Wake(WaiterId(5).queue_bits()), opened.vqpn);
            opened
        })
        .collect();
    let mut told = Vec::new();
    ends[0].drain_ready(WaiterId(5), |vqpn| told.push(vqpn.0));
    assert_eq!(told, (0..3 * GROUP_STREAMS).collect::<Vec<_>>());
    for (n, mut opened) in streams.into_iter().enumerate() {
        let mut bytes = [0; 4];
        let spans = opened.consumer.spans(4).unwrap();
        // SAFETY: the target is writable, and apart from the ring.
        assert_eq!(unsafe { spans.copy_out(0, bytes.as_mut_ptr(), 4) }, 4);
        assert_eq!(u32::from_ne_bytes(bytes), n as u32);
    }
}

/// Returns the size of this process's address space in bytes.
fn addresses() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').next().unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_ring_beyond_the_allowance_is_not_mapped() {
    forked::in_child(|| {
        let files = Files::new(1 << 32);
        let ends = files.ends();
        let reach = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(1 << 25));
        let allowance = crate::fabric::ring::Allowance::new(22, reach);
        let mut opened = ends[0].open(12).unwrap();
        let producer = ends[1].producer(opened.vqpn).unwrap();
        let mut producer = producer.with_allowance(allowance.clone());
        assert!(producer.can_adopt());
        let _ = producer.spans(1).unwrap();
        assert_eq!(opened.consumer.take_retired(), Ok(None));
        let far = Region::new((3 << 30) / 4096, 12).unwrap();
        let _ = opened.consumer.offer(far).unwrap();
        let before = addresses();
        assert_eq!(producer.adopt(), Ok(false));
        assert!(addresses() < before + (1 << 26));
        // A new producer cannot use that region as its first ring either.
        let block = ends[0].mine.block(opened.vqpn).unwrap();
        let theirs = ends[1].theirs.block(opened.vqpn).unwrap();
        assert_ne!(block, theirs);
        // SAFETY: the block has no cursors but these two, and the test writes nothing through the second.
        let second = unsafe { Producer::new(theirs, ends[1].theirs.area()) };
        assert!(!second.with_allowance(allowance).can_adopt());
        assert!(addresses() < before + (1 << 26));
    });
}

#[test]
fn an_end_serves_one_link_after_another() {
    let end = blank();
    for _ in 0..3 {
        let files = Files::new(1 << 20);
        end.show(&files.memory(0)).unwrap();
        let other = blank();
        other.show(&files.memory(1)).unwrap();
        let mut opened = end.open(12).unwrap();
        assert_eq!((opened.vqpn, end.numbers()), (Vqpn(0), 1));
        assert_eq!(opened.consumer.has_data(), Ok(false));
        let mut producer = other.producer(opened.vqpn).unwrap();
        assert_eq!(producer.spans(10).map(|s| s.len()), Ok(4096));
        other.notify(Wake(WaiterId(2).queue_bits()), Vqpn(0));
        assert!(end.has_ready(WaiterId(2)));
        end.drain_ready(WaiterId(2), |_| {});
        let _ = (opened, producer);
        // SAFETY: no cursor is left.
        unsafe { end.release() };
        assert!(!end.has_ready(WaiterId(2)));
        // A wake-up that comes after the release reaches no waiter.
        end.notify(Wake(WaiterId(2).queue_bits()), Vqpn(0));
        assert_eq!(end.outside().rung.get(), 0);
    }
}

#[test]
fn memory_that_a_peer_could_take_away_is_refused() {
    let files = Files::new(1 << 20);
    let end = blank();
    let longer = Layout::for_data(1 << 21).unwrap();
    let mut memory = files.memory(0);
    memory.theirs.1 = longer;
    assert_eq!(end.show(&memory), Err(MapError::Size));
    let file = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, files.layout.file_len()).unwrap();
    memory = files.memory(0);
    memory.theirs.0 = file.as_fd();
    assert_eq!(end.show(&memory), Err(MapError::NotSealed));
    memory = files.memory(0);
    memory.theirs.0 = files.flags.0.as_fd();
    memory.theirs.1 = Layout::for_data(4096).unwrap();
    assert!(end.show(&memory).is_err());
    // The end can still be used after these errors.
    assert!(end.is_usable());
    end.show(&files.memory(0)).unwrap();
    assert!(end.open(12).is_ok());
}

#[test]
fn a_ring_that_cannot_be_mapped_is_not_adopted_and_none_is_given() {
    forked::in_child(|| {
        let files = Files::new(1 << 26);
        let ends = files.ends();
        let mut opened = ends[0].open(12).unwrap();
        let mut producer = ends[1].producer(opened.vqpn).unwrap();
        let _ = producer.spans(1).unwrap();
        assert_eq!(opened.consumer.take_retired(), Ok(None));
        let region = ends[0].allocate(20).unwrap();
        let _ = opened.consumer.offer(region).unwrap();
        let limit = rustix::process::Rlimit {
            current: Some(1 << 20),
            maximum: None,
        };
        rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
        // The ring's owner has mapped the ring before the limit was set. The producer's end cannot map it any more.
        assert_eq!(producer.spans(8192).map(|s| s.len()), Ok(4096));
        let _ = producer.commit(4096);
        assert_eq!(producer.has_space(), Ok(false), "it is not tried for ever");
        assert!(ends[1].allocate(22).is_none());
        assert_eq!(ends[1].open(22).err(), Some(OpenError::Arena));
        assert!(ends[1].open(12).is_ok());
        assert!(ends[1].producer(Vqpn(GROUP_STREAMS)).is_none());
        // The bytes sent before are still there.
        assert_eq!(opened.consumer.available(), Ok(4096));
    });
}

#[test]
fn a_fork_child_reads_zeroes_and_writes_to_nobody() {
    let files = Files::new(1 << 16);
    let ends = files.ends();
    let mut opened = ends[0].open(12).unwrap();
    let mut producer = ends[1].producer(opened.vqpn).unwrap();
    let spans = producer.spans(3).unwrap();
    // SAFETY: the source is readable, and apart from the ring.
    unsafe { spans.copy_in(0, b"yes".as_ptr(), 3) };
    let _ = producer.commit(3);
    forked::in_child(|| {
        // Without this the child would be killed at its first access, since it has not inherited the memory.
        ends.iter().for_each(End::after_fork);
        assert_eq!(opened.consumer.available(), Ok(0));
        let spans = producer.spans(3).unwrap();
        // SAFETY: the source is readable, and apart from the ring.
        unsafe { spans.copy_in(0, b"no!".as_ptr(), 3) };
        let _ = producer.commit(3);
        ends[1].notify(Wake(WaiterId(2).queue_bits()), opened.vqpn);
    });
    assert!(!ends[0].has_ready(WaiterId(2)));
    let mut bytes = [0; 6];
    let spans = opened.consumer.spans(6).unwrap();
    // SAFETY: the target is writable, and apart from the ring.
    assert_eq!(unsafe { spans.copy_out(0, bytes.as_mut_ptr(), 6) }, 3);
    assert_eq!(&bytes, b"yes\0\0\0");
}
