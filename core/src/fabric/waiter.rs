//! The waiters that can be woken through a link: their numbers, the wake-up words that name them, and the page by which
//! an instance's waiters sleep ([`FlagPage`]). The file also keeps account of the threads that sleep in the kernel when
//! the socket that they wait for moves to the library ([`Onlookers`], [`Gate`]), and of the threads that share the
//! polling of one descriptor ([`Pollers`]). Other modules assign numbers to threads, and make doorbells.
//!
//! A thread that sleeps in one call sleeps on a futex in the page. Peers map the page read only: they can wake the
//! thread and do nothing else, since they cannot change the word that the thread compares. So a peer's wake-up is lost
//! on a thread that is about to sleep and is not in the kernel yet. The peer detects the loss: the wake-up reached no
//! thread, and the sleep flag is still raised. It then tries again, up to `TRIES` times in all ([`FlagPage::wake`]). If
//! every try fails, it asks the owner of the page over the side channel. The owner can change the word
//! ([`FlagPage::ring`]).

#[cfg(not(loom))]
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;
#[cfg(not(loom))]
use std::sync::atomic::Ordering::SeqCst;

#[cfg(not(loom))]
use rustix::io::Errno;
#[cfg(not(loom))]
use rustix::thread::futex;

use crate::fabric::layout::READY_QUEUES;
#[cfg(not(loom))]
use crate::os::memfd::{Access, MapError, Mapping};
use crate::sync::{AtomicBool, AtomicU64, Presence, Published, SleepFlag};

/// The most waiters of an instance.
pub const MAX_WAITERS: u16 = 2048;

/// Waiters with numbers below this one sleep on a doorbell, in a system call that polls. The others sleep on a futex.
pub const POLLING: u16 = 1024;

/// Offset of the futexes in the page, in bytes.
const BELLS_OFFSET: usize = MAX_WAITERS as usize * size_of::<SleepFlag>();

/// The size in bytes of the file of flags and futexes.
pub const FLAGS_BYTES: u64 = (BELLS_OFFSET + MAX_WAITERS as usize * size_of::<AtomicU32>()) as u64;

/// The number of times that a peer tries to wake a thread whose sleep flag is raised. Such a thread enters the kernel
/// within a few instructions, or lowers its flag after all.
#[cfg(not(loom))]
const TRIES: u32 = 8;

/// The part of a wake-up word that names a sleeper, to be woken directly. The rest names a waiter by its ready queue.
pub const SLEEPER_MASK: u32 = 0x0000_ffff;

/// The number of a waiter, the same on all links of an instance. Waiters with numbers below `READY_QUEUES` have a ready
/// queue on each link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaiterId(pub u16);

impl WaiterId {
    /// Returns the number plus one, for a word in which 0 names no waiter.
    pub fn to_word(self) -> u32 {
        u32::from(self.0) + 1
    }

    /// Decodes a word that `to_word` has made; `None` if the word names no waiter.
    pub fn from_word(word: u32) -> Option<Self> {
        u16::try_from(word.checked_sub(1)?)
            .ok()
            .filter(|id| *id < MAX_WAITERS)
            .map(Self)
    }

    /// Returns the part of a wake-up word that asks for an entry in this waiter's ready queue; 0 if the waiter has no
    /// queue.
    pub fn queue_bits(self) -> u32 {
        if u32::from(self.0) < READY_QUEUES {
            self.to_word() << 16
        } else {
            0
        }
    }

    /// Returns the part of a wake-up word that asks to wake this waiter, without an entry in a ready queue.
    pub fn sleeper_bits(self) -> u32 {
        self.to_word()
    }

    /// Returns whether the waiter sleeps on a doorbell, not on a futex.
    pub fn is_polling(self) -> bool {
        self.0 < POLLING
    }

    /// Decodes the `queue_bits` of a whole wake-up word; `None` if they name no waiter.
    pub fn of_queue(word: u32) -> Option<Self> {
        Self::from_word(word >> 16)
    }

    /// Decodes the `sleeper_bits` of a whole wake-up word; `None` if they name no waiter.
    pub fn of_sleeper(word: u32) -> Option<Self> {
        Self::from_word(word & SLEEPER_MASK)
    }
}

/// The sleep flags and futexes of the waiters of one instance: this instance or a peer.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct FlagPage(Mapping);

#[cfg(not(loom))]
impl FlagPage {
    /// Returns the page in `mapping`; `None` if it has fewer than [`FLAGS_BYTES`] bytes. A peer's page may be mapped
    /// read only.
    pub fn new(mapping: Mapping) -> Option<Self> {
        (mapping.bytes() as u64 >= FLAGS_BYTES).then_some(Self(mapping))
    }

    /// Returns a page that no peer uses yet, in which no flag is raised.
    pub fn blank() -> Result<Self, Errno> {
        Mapping::neutral(FLAGS_BYTES as usize).map(Self)
    }

    /// Maps the page that a peer has sent, in place of this page's memory.
    pub fn show_received(&self, fd: BorrowedFd<'_>) -> Result<(), MapError> {
        self.0.show_received(fd, Access::ReadOnly)
    }

    /// Replaces the page's memory by memory of this process alone. In it no flag is raised, and no other process sees a
    /// flag that is raised in it.
    pub fn neutralise(&self) -> Result<(), Errno> {
        self.0.neutralise()
    }

    /// Replaces the page's memory in a fork child, which has not inherited it, as [`neutralise`](Self::neutralise)
    /// does.
    pub fn after_fork(&self) {
        self.0.after_fork();
    }

    /// Returns the flag of a waiter; `None` if there is no such waiter. A peer's flag may only be read.
    #[inline]
    pub fn flag(&self, id: WaiterId) -> Option<&SleepFlag> {
        let at = usize::from(id.0) * size_of::<SleepFlag>();
        // SAFETY: the mapping has FLAGS_BYTES (`new`), room for MAX_WAITERS flags, is aligned to a page and lives as
        // long as `self`. A flag is an atomic word, valid with any content, so another process may write it.
        (id.0 < MAX_WAITERS).then(|| unsafe { &*self.0.as_ptr().add(at).cast::<SleepFlag>() })
    }

    /// Returns the futex of a waiter; `None` if there is no such waiter. A peer's futex may only be read.
    fn bell(&self, id: WaiterId) -> Option<&AtomicU32> {
        let at = BELLS_OFFSET + usize::from(id.0) * size_of::<AtomicU32>();
        // SAFETY: as in `flag`; `at` is behind all flags and aligned to a word.
        (id.0 < MAX_WAITERS).then(|| unsafe { &*self.0.as_ptr().add(at).cast::<AtomicU32>() })
    }

    /// Returns the ticket of one of this instance's waiters: the value of its futex. The waiter reads the ticket before
    /// it checks any reason not to sleep, and passes it to the sleep on [`Self::futex`]. The ticket is never 0, because
    /// a fork can interrupt a sleep, and the kernel may then restart the sleep in the child. The child [finds
    /// 0](Self::after_fork) in the futex, so a sleep with another ticket ends at once. No thread would end a sleep on
    /// 0.
    pub fn ticket(&self, id: WaiterId) -> u32 {
        let Some(bell) = self.bell(id) else { return 1 };
        match bell.load(SeqCst) {
            0 => bell
                .compare_exchange(0, 1, SeqCst, SeqCst)
                .map_or_else(|rung| rung, |_| 1),
            ticket => ticket,
        }
    }

    /// Returns the address of the futex on which one of this instance's waiters sleeps with its ticket. Other processes
    /// wake it, so the sleep must not use FUTEX_PRIVATE_FLAG. `None` if there is no such waiter.
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

    /// Wakes a peer's waiter that sleeps on its futex. Returns false if the waiter's flag is raised and no thread
    /// sleeps on the futex, even after `TRIES` tries.
    pub fn wake(&self, id: WaiterId) -> bool {
        let (Some(flag), Some(bell)) = (self.flag(id), self.bell(id)) else {
            return true;
        };
        (0..TRIES).any(|_| !flag.is_sleeping() || futex::wake(bell, futex::Flags::empty(), 1) != Ok(0))
    }
}

// Threads may sleep in the kernel when the socket or epoll set that they wait for moves to the library. Later events do
// not come to the kernel, so these threads have to be woken. A thread that is about to sleep publishes that, then
// checks whether the kernel still serves its socket. A thread that moves a socket publishes the move, then checks for
// sleepers ([`crate::sync`]).

/// A set of sockets, which are named by their slots: the numbers of the library's objects for them. One bit stands for
/// all slots that are equal modulo 64, so the set may seem to have sockets that were not added. In return a thread
/// publishes its sockets by one exchange, however many it polls. A thread that is woken in vain checks its sockets once
/// more.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Slots(u64);

impl Slots {
    /// Returns the set with `slot` added.
    #[must_use]
    pub fn with(self, slot: u32) -> Self {
        Self(self.0 | 1 << (slot % u64::BITS))
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// For each waiter, the sockets that its thread waits for in the kernel by poll or select.
#[derive(Debug)]
pub struct Onlookers(Box<[Published<AtomicU64>]>);

impl Onlookers {
    /// Returns an empty list for waiters with numbers below `waiters`.
    pub fn new(waiters: u16) -> Self {
        Self((0..waiters).map(|_| Published::default()).collect())
    }

    /// Records that the thread of waiter `id` is about to poll the sockets in `slots`. Afterwards the thread checks
    /// once more whether one of these sockets has moved to the library.
    pub fn enter(&self, id: u16, slots: Slots) {
        if let Some(word) = self.0.get(usize::from(id)) {
            word.publish(slots.0);
        }
    }

    /// Records that the thread of waiter `id` has stopped polling.
    pub fn leave(&self, id: u16) {
        if let Some(word) = self.0.get(usize::from(id)) {
            word.publish_quietly(0);
        }
    }

    /// Returns the waiters whose threads may poll the socket in `slot`. The caller has [published](Published) before
    /// that this socket moves to the library.
    pub fn of(&self, slot: u32) -> impl Iterator<Item = u16> {
        let one = Slots::default().with(slot).0;
        let polls = move |word: &Published<AtomicU64>| word.look() & one != 0;
        let words = self.0.iter().zip(0u16..);
        words.filter_map(move |(word, id)| polls(word).then_some(id))
    }
}

/// A gate that a thread passes before it waits in the kernel on an epoll set. The gate is closed once the library
/// serves a member of the set. It is opened again only while no thread waits on the set.
#[derive(Debug, Default)]
pub struct Gate {
    closed: Published<AtomicBool>,
    inside: Presence,
}

impl Gate {
    /// Counts the thread in until it [leaves](Self::leave). Returns false if the gate is closed: the thread must leave
    /// at once.
    #[must_use]
    pub fn enter(&self) -> bool {
        self.inside.enter();
        !self.is_closed()
    }

    /// Counts the thread out. Returns true if other threads are inside. One ring of the epoll set's doorbell wakes only
    /// one of the threads inside. So if the gate is closed and this returns true, the caller rings the doorbell again,
    /// for the next thread.
    #[must_use]
    pub fn leave(&self) -> bool {
        !self.inside.leave()
    }

    /// Returns whether threads are inside.
    pub fn is_in_use(&self) -> bool {
        !self.inside.is_empty()
    }

    /// Closes the gate. Returns true if threads are inside: the caller rings for one of them.
    #[must_use]
    pub fn close(&self) -> bool {
        self.closed.publish(true);
        self.is_in_use()
    }

    /// Returns whether the gate is closed.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.look()
    }

    /// Opens the gate again, while no thread waits. Returns true if it was closed.
    pub fn reopen(&self) -> bool {
        self.closed.take()
    }

    /// Resets the gate in a fork child, where no thread is inside.
    pub fn reset(&self) {
        self.reopen();
        self.inside.reset();
    }
}

// Threads that sleep for the events of one descriptor. One of them polls it; if all did, each event would wake all. The
// others stand by, each on a futex or doorbell of its own. The last poller that leaves *calls* a thread on standby: it
// takes that thread off standby, and wakes it. The thread that was called then polls. So as long as a thread sleeps,
// one thread polls, or is called, or is about to poll. A thread that goes on standby first publishes that and then
// checks for pollers. A poller that leaves first counts itself out and then checks for threads on standby
// ([`Presence`]).

const WORD: u16 = u64::BITS as u16;

/// The pollers of one descriptor, and the threads on standby. A thread is named by the number of its waiter.
#[derive(Debug)]
pub struct Pollers {
    polling: Presence,
    standing_by: Box<[Published<AtomicU64>]>,
}

/// The result of a poller's leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "who is called sleeps"]
pub enum Left {
    /// Other threads still poll.
    Others,
    /// No thread polls any more. If threads stand by, one is called, and the value is its number: the caller wakes it.
    Last(Option<u16>),
}

impl Pollers {
    /// Returns a set with no pollers, for threads with numbers below `numbers`.
    pub fn new(numbers: u16) -> Self {
        let words = numbers.div_ceil(WORD);
        Self {
            polling: Presence::default(),
            standing_by: (0..words).map(|_| Published::default()).collect(),
        }
    }

    /// Returns whether no thread polls.
    pub fn is_empty(&self) -> bool {
        self.polling.is_empty()
    }

    /// Returns whether at most one thread polls.
    pub fn is_at_most_one(&self) -> bool {
        self.polling.count() <= 1
    }

    /// Counts one more poller.
    pub fn enter(&self) {
        self.polling.enter();
    }

    /// Counts one poller out. The last poller calls a thread on standby.
    pub fn leave(&self) -> Left {
        if self.polling.leave() {
            Left::Last(self.call())
        } else {
            Left::Others
        }
    }

    /// Puts thread `number` on standby and returns true. Returns false, and changes nothing, if no thread polls or
    /// there is no such number.
    #[must_use]
    pub fn stand_by(&self, number: u16) -> bool {
        let Some((word, bit)) = self.place(number) else {
            return false;
        };
        word.add_bits(bit);
        let is_polled = !self.polling.is_empty();
        if !is_polled {
            word.take_bits(bit);
        }
        is_polled
    }

    /// Ends the standby of thread `number`. Returns true if the thread was called: it polls next, or
    /// [calls](Self::call) another thread.
    #[must_use]
    pub fn stand_down(&self, number: u16) -> bool {
        self.place(number).is_some_and(|(word, bit)| word.take_bits(bit) == 0)
    }

    /// Calls a thread on standby if no thread polls. Returns the number of the thread, which the caller of this
    /// function wakes. `None` if no thread was called.
    #[must_use = "who is called sleeps"]
    pub fn call(&self) -> Option<u16> {
        for (at, word) in (0..).zip(&self.standing_by) {
            let mut bits = word.look();
            while bits != 0 && self.polling.is_empty() {
                let lowest = bits & bits.wrapping_neg();
                if word.take_bits(lowest) != 0 {
                    return Some(at * WORD + lowest.trailing_zeros() as u16);
                }
                bits &= !lowest;
            }
        }
        None
    }

    fn place(&self, number: u16) -> Option<(&Published<AtomicU64>, u64)> {
        let word = self.standing_by.get(usize::from(number / WORD))?;
        Some((word, 1 << (number % WORD)))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

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
    fn whoever_polls_a_socket_is_named_until_he_is_back() {
        let onlookers = Onlookers::new(100);
        let named = |slot| onlookers.of(slot).collect::<Vec<_>>();
        let (first, last) = (0, 99);
        onlookers.enter(first, Slots::default().with(3).with(64));
        onlookers.enter(last, Slots::default().with(67));
        assert_eq!(named(3), [first, last]);
        assert_eq!(named(64), [first]);
        assert_eq!(named(4), []);
        onlookers.leave(first);
        assert_eq!((named(67), named(64)), (vec![last], vec![]));
    }

    #[test]
    fn a_gate_is_closed_until_it_is_opened_again() {
        let gate = Gate::default();
        assert!(gate.enter() && gate.is_in_use());
        assert!(gate.close(), "one is inside");
        assert!(!gate.enter());
        assert!(gate.leave());
        assert!(!gate.leave() && !gate.is_in_use());
        assert!(gate.reopen() && !gate.reopen() && !gate.is_closed());
    }

    #[test]
    fn one_of_those_who_stand_by_is_called_when_nobody_polls_any_more() {
        let pollers = Pollers::new(130);
        assert!(!pollers.stand_by(7), "nobody polls");
        pollers.enter();
        pollers.enter();
        assert!(pollers.stand_by(129) && pollers.stand_by(64));
        assert_eq!(pollers.leave(), Left::Others);
        assert_eq!(pollers.call(), None);
        assert_eq!(pollers.leave(), Left::Last(Some(64)));
        assert!(pollers.stand_down(64), "it was called");
        assert!(!pollers.stand_down(129), "it was not");
        pollers.enter();
        assert_eq!(pollers.leave(), Left::Last(None));
    }

    #[test]
    fn there_is_no_number_beyond_the_last() {
        let pollers = Pollers::new(64);
        pollers.enter();
        assert!(!pollers.stand_by(64) && pollers.stand_by(63));
    }
}

/// Tests that make system calls, which Miri does not run.
#[cfg(test)]
#[cfg(not(loom))]
mod kernel_tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::os::{forked, memfd};

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

    /// Returns a page twice: as its owner maps it, and as a peer maps it.
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
            // Repeats the call as the kernel does when it restarts an interrupted call.
            let slept = futex::wait(mine.bell(id).unwrap(), futex::Flags::empty(), ticket, None);
            assert_eq!(slept, Err(Errno::AGAIN));
        });
    }
}

#[cfg(all(test, loom))]
mod loom_models;

#[cfg(all(test, loom))]
mod pollers_loom_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::loom_models::{Doorbell, check};

    struct Model {
        pollers: Pollers,
        bells: [Doorbell; 2],
    }

    impl Model {
        fn leave(&self) {
            if let Left::Last(Some(next)) = self.pollers.leave() {
                self.bells[usize::from(next)].ring();
            }
        }

        /// Sleeps on standby until the thread is called, or until no other thread polls. Then polls, and leaves.
        fn sleeper(&self, number: u16) {
            while !self.pollers.is_empty() && self.pollers.stand_by(number) {
                self.bells[usize::from(number)].wait();
                assert!(self.pollers.stand_down(number));
            }
            self.pollers.enter();
            self.leave();
        }
    }

    /// A thread that is never called sleeps on, which loom reports as a deadlock.
    #[test]
    fn loom_as_long_as_one_sleeps_one_polls_or_is_called() {
        check(|| {
            let model = Arc::new(Model {
                pollers: Pollers::new(2),
                bells: [Doorbell::new(), Doorbell::new()],
            });
            model.pollers.enter();
            let sleepers = [0, 1].map(|number| {
                let model = model.clone();
                thread::spawn(move || model.sleeper(number))
            });
            model.leave();
            for sleeper in sleepers {
                sleeper.join().unwrap();
            }
        });
    }
}
