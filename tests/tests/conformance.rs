//! The conformance suite on each fabric that one process can be both ends of: `mem`, and shared
//! memory with two mappings of each memfd, as two processes have them.

use std::os::fd::AsFd;

use libtest_mimic::{Arguments, Trial};
use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::fabric::mem::{self, Clock, Heap, Memory};
use rdmasock_core::os::memfd::{self, Access, Mapping};
use rdmasock_core::wire::Message;
use rdmasock_tests::conformance::{Harness, suite};
use std::sync::Arc;

/// Links on the heap.
struct Mem;

/// Links over memfds.
struct Shm;

/// What the two have in common: ends of [`mem`], over different memory.
macro_rules! over {
    ($harness:ty, $memory:ty, $link:expr) => {
        impl Harness for $harness {
            type End = mem::End<$memory>;

            fn link(data_bytes: u64) -> [Self::End; 2] {
                $link(data_bytes).expect("a size that arenas have")
            }

            fn recv(end: &Self::End) -> Option<Message> {
                end.recv()
            }

            fn begin_sleep(end: &Self::End, waiter: u32) {
                end.begin_sleep(waiter);
            }

            fn end_sleep(end: &Self::End, waiter: u32) -> bool {
                end.end_sleep(waiter)
            }
        }
    };
}

over!(Mem, Arc<Heap>, |bytes| mem::heap_pair(
    bytes,
    &Clock::default()
));
over!(Shm, Mapping, |bytes| {
    let layout = Layout::for_data(bytes)?;
    mem::pair(
        layout,
        mapped_twice(layout)?,
        mapped_twice(layout)?,
        &Clock::default(),
    )
});

/// An arena as its owner has it and as the peer maps it.
fn mapped_twice(layout: Layout) -> Option<[Mapping; 2]> {
    let (fd, mine) = memfd::create("rdmasock-conformance", layout.file_len()).ok()?;
    let theirs = memfd::map_received(fd.as_fd(), layout.file_len(), Access::ReadWrite).ok()?;
    assert_ne!(mine.base(), theirs.base());
    Some([mine, theirs])
}

fn main() {
    let args = Arguments::from_args();
    let trials = |fabric: &'static str, tests: Vec<(&'static str, fn())>| {
        tests.into_iter().map(move |(name, test)| {
            Trial::test(format!("{fabric}::{name}"), move || {
                test();
                Ok(())
            })
        })
    };
    let all = trials("mem", suite::<Mem>())
        .chain(trials("shm", suite::<Shm>()))
        .collect();
    libtest_mimic::run(&args, all).exit();
}
