//! The waiters that can be woken through a link: their numbers, the attention words that name them, and the page by
//! which an instance's waiters sleep. Not for which thread has which number, nor for doorbells.
//!
//! A thread that sleeps in one call sleeps on a futex in the page. Peers map the page read only: they can wake the
//! thread and do nothing else. So a peer cannot change the word that the thread compares. Its wake-up is lost on a
//! thread that is about to sleep and not yet in the kernel. The peer detects that by the sleep flag: it is still raised
//! although the wake-up reached no thread. Then the peer tries again, up to `TRIES` times in all ([`FlagPage::wake`]).
//! At last it asks the owner over the side channel, and the owner can change the word ([`FlagPage::ring`]).

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use rustix::io::Errno;
use rustix::thread::futex;

use super::layout::READY_QUEUES;
use crate::os::memfd::{Access, MapError, Mapping};
use crate::sync::SleepFlag;

/// The most waiters of an instance.
pub const MAX_WAITERS: u16 = 2048;

/// Waiters below this number sleep in a system call that polls, on a doorbell. The others sleep on a futex.
pub const POLLING: u16 = 1024;

/// Offset of the futexes in the page, in bytes.
const BELLS_OFFSET: usize = MAX_WAITERS as usize * size_of::<SleepFlag>();

/// Bytes of the file of flags and futexes.
pub const FLAGS_BYTES: u64 = (BELLS_OFFSET + MAX_WAITERS as usize * size_of::<AtomicU32>()) as u64;

/// How often a peer tries to wake a thread whose sleep flag is raised. Such a thread is a few instructions and the way
/// into the kernel from sleeping, or about to lower its flag after all.
const TRIES: u32 = 8;

/// The part of an attention word that names a sleeper; the rest names a ready queue.
pub const SLEEPER_MASK: u32 = 0x0000_ffff;

/// The number of a waiter, the same on all links of an instance. Those below `READY_QUEUES` have a
/// ready queue on each link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaiterId(pub u16);

impl WaiterId {
    /// Returns the number for an atomic word where 0 means none.
    pub fn to_word(self) -> u32 {
        u32::from(self.0) + 1
    }

    /// Decodes a word of `to_word`; `None` if it names no waiter.
    pub fn from_word(word: u32) -> Option<Self> {
        u16::try_from(word.checked_sub(1)?)
            .ok()
            .filter(|id| *id < MAX_WAITERS)
            .map(Self)
    }

    /// Returns the part of an attention word that asks for an entry in this waiter's ready queue; 0 if it has none.
    pub fn queue_bits(self) -> u32 {
        if u32::from(self.0) < READY_QUEUES {
            self.to_word() << 16
        } else {
            0
        }
    }

    /// Returns the part of an attention word that asks for this waiter's doorbell alone.
    pub fn sleeper_bits(self) -> u32 {
        self.to_word()
    }

    /// Returns whether the waiter sleeps on a doorbell, not on a futex.
    pub fn is_polling(self) -> bool {
        self.0 < POLLING
    }

    /// Decodes the `queue_bits` of a whole attention word; `None` if they name no waiter.
    pub fn of_queue(word: u32) -> Option<Self> {
        Self::from_word(word >> 16)
    }

    /// Decodes the `sleeper_bits` of a whole attention word; `None` if they name no waiter.
    pub fn of_sleeper(word: u32) -> Option<Self> {
        Self::from_word(word & SLEEPER_MASK)
    }
}

/// The sleep flags and futexes of the waiters of one instance, this one or a peer.
#[derive(Debug)]
pub struct FlagPage(Mapping);

impl FlagPage {
    /// Returns the page in `mapping`; `None` if it has fewer than [`FLAGS_BYTES`] bytes. A peer's page may be mapped
    /// read only.
    pub fn new(mapping: Mapping) -> Option<Self> {
        (mapping.bytes() as u64 >= FLAGS_BYTES).then_some(Self(mapping))
    }

    /// Returns a page that belongs to no peer yet: no flag in it is raised.
    pub fn blank() -> Result<Self, Errno> {
        Mapping::neutral(FLAGS_BYTES as usize).map(Self)
    }

    /// Maps the page that a peer has sent in place of this one.
    pub fn show_received(&self, fd: BorrowedFd<'_>) -> Result<(), MapError> {
        self.0.show_received(fd, Access::ReadOnly)
    }

    /// Replaces the page by one that belongs to no instance: no flag is raised, and no process sees a flag that is
    /// raised.
    pub fn neutralise(&self) -> Result<(), Errno> {
        self.0.neutralise()
    }

    /// Replaces the page in a fork child, which does not have it, as [`neutralise`](Self::neutralise) does.
    pub fn after_fork(&self) {
        self.0.after_fork();
    }

    /// Returns the flag of a waiter; `None` if there is no such waiter. A peer's flag may only be read.
    #[inline]
    pub fn flag(&self, id: WaiterId) -> Option<&SleepFlag> {
        let at = usize::from(id.0) * size_of::<SleepFlag>();
        // SAFETY: the mapping has FLAGS_BYTES (`new`), room for MAX_WAITERS flags, is aligned to a page and lives as
        // long as `self`; a flag is an atomic word, valid with any content, and another process may write it.
        (id.0 < MAX_WAITERS).then(|| unsafe { &*self.0.as_ptr().add(at).cast::<SleepFlag>() })
    }

    /// Returns the futex of a waiter; `None` if there is no such waiter. A peer's futex may only be read.
    fn bell(&self, id: WaiterId) -> Option<&AtomicU32> {
        let at = BELLS_OFFSET + usize::from(id.0) * size_of::<AtomicU32>();
        // SAFETY: as in `flag`; `at` is behind all flags and aligned to a word.
        (id.0 < MAX_WAITERS).then(|| unsafe { &*self.0.as_ptr().add(at).cast::<AtomicU32>() })
    }

    /// Returns the value of the futex of one of this instance's waiters. The waiter reads it before it checks any
    /// reason not to sleep, and passes it to the sleep on [`Self::futex`]. The value is never 0, which a fork child
    /// [finds there](Self::after_fork). The kernel may restart in the child a sleep that the fork has interrupted; with
    /// 0 no thread would end it.
    pub fn ticket(&self, id: WaiterId) -> u32 {
        let Some(bell) = self.bell(id) else { return 1 };
        match bell.load(SeqCst) {
            0 => bell
                .compare_exchange(0, 1, SeqCst, SeqCst)
                .map_or_else(|rung| rung, |_| 1),
            ticket => ticket,
        }
    }

    /// Returns the address on which one of this instance's waiters sleeps with its ticket. Other processes wake it, so
    /// the futex is not a private one.
    pub fn futex(&self, id: WaiterId) -> Option<*const u32> {
        self.bell(id).map(|bell| bell.as_ptr().cast_const())
    }

    /// Wakes a waiter of this instance that sleeps on its futex, or is about to.
    pub fn ring(&self, id: WaiterId) {
        if let Some(bell) = self.bell(id) {
            bell.fetch_add(1, SeqCst);
            let _ = futex::wake(bell, futex::Flags::empty(), 1);
        }
    }

    /// Wakes a peer's waiter that sleeps on its futex. False if its flag is raised but no thread sleeps there.
    pub fn wake(&self, id: WaiterId) -> bool {
        let (Some(flag), Some(bell)) = (self.flag(id), self.bell(id)) else {
            return true;
        };
        (0..TRIES).any(|_| !flag.is_sleeping() || futex::wake(bell, futex::Flags::empty(), 1) != Ok(0))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::os::{forked, memfd};

    #[test]
    fn a_word_names_a_queue_and_a_sleeper() {
        let word = WaiterId(63).queue_bits() | WaiterId(MAX_WAITERS - 1).sleeper_bits();
        assert_eq!(WaiterId::of_queue(word), Some(WaiterId(63)));
        assert_eq!(WaiterId::of_sleeper(word), Some(WaiterId(MAX_WAITERS - 1)));
        assert_eq!((WaiterId::of_queue(0), WaiterId::of_sleeper(0)), (None, None));
        assert_eq!(WaiterId::of_sleeper(u32::from(MAX_WAITERS) + 1), None);
        assert_eq!(WaiterId(READY_QUEUES as u16).queue_bits(), 0);
    }

    #[test]
    fn a_page_has_a_flag_for_each_waiter_and_no_more() {
        let short = Mapping::anonymous(FLAGS_BYTES as usize - 1).unwrap();
        assert!(FlagPage::new(short).is_none());
        let page = FlagPage::new(Mapping::anonymous(FLAGS_BYTES as usize).unwrap()).unwrap();
        let last = page.flag(WaiterId(MAX_WAITERS - 1)).unwrap();
        last.begin();
        assert!(last.is_sleeping());
        assert!(page.flag(WaiterId(MAX_WAITERS)).is_none());
        assert_eq!(page.ticket(WaiterId(MAX_WAITERS - 1)), 1);
        assert_eq!(page.ticket(WaiterId(MAX_WAITERS - 1)), 1);
        assert!(page.futex(WaiterId(MAX_WAITERS)).is_none());
    }

    /// Returns a page as its owner has it, and as a peer has it.
    fn pages() -> [FlagPage; 2] {
        let (fd, mine) = memfd::create_read_only_for_peers("test-flags", FLAGS_BYTES).unwrap();
        let theirs = memfd::map_received(fd.as_fd(), FLAGS_BYTES, memfd::Access::ReadOnly);
        [mine, theirs.unwrap()].map(|mapping| FlagPage::new(mapping).unwrap())
    }

    #[test]
    fn a_peer_that_can_only_read_wakes_who_sleeps_and_notices_who_does_not_yet() {
        let [mine, theirs] = pages();
        let id = WaiterId(POLLING);
        assert!(theirs.wake(id), "nobody says that he sleeps");
        let flag = mine.flag(id).unwrap();
        flag.begin();
        assert!(!theirs.wake(id), "not there yet");
        let ticket = mine.ticket(id);
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| futex::wait(mine.bell(id).unwrap(), futex::Flags::empty(), ticket, None));
            while !theirs.wake(id) {
                std::thread::yield_now();
            }
            assert_eq!(sleeper.join().unwrap(), Ok(()));
        });
        flag.end();
    }

    #[test]
    fn a_ring_before_the_sleep_is_not_lost() {
        let [mine, _] = pages();
        let id = WaiterId(MAX_WAITERS - 1);
        let ticket = mine.ticket(id);
        mine.ring(id);
        let slept = futex::wait(mine.bell(id).unwrap(), futex::Flags::empty(), ticket, None);
        assert_eq!(slept, Err(Errno::AGAIN));
    }

    #[test]
    fn a_sleep_that_a_fork_interrupts_ends_in_the_child() {
        let [mine, _] = pages();
        let id = WaiterId(POLLING);
        let ticket = mine.ticket(id);
        forked::in_child(|| {
            mine.after_fork();
            // Repeats the call, as the kernel does when it restarts it.
            let slept = futex::wait(mine.bell(id).unwrap(), futex::Flags::empty(), ticket, None);
            assert_eq!(slept, Err(Errno::AGAIN));
        });
    }
}
