//! The waiters of an instance: who has which number, and what each sleeps on.
//!
//! A *waiter* is what a peer can wake: a number that is the same on all links, what it sleeps on, and a
//! flag that says whether somebody does. The flags of an instance lie in a page that peers map
//! read-only. Waiter 0 is the service thread; 1..READY_QUEUES have a ready queue on each link and belong
//! to epoll sets, as the next do without one; those above belong to threads that sleep in one call, and are handed
//! round. A call for which there is none takes its connections back to TCP, where the kernel wakes it.
//!
//! Nothing that a waiter sleeps on is shared with a peer in a way that matters. A thread that sleeps in
//! one call has a futex (`core::fabric::waiter`). A waiter that polls has an epoll set of its own, which
//! stands for it in whatever it polls: the program's epoll set, or the descriptors of a poll(). In it are an eventfd
//! that nobody else has, for us, and of each link that is to wake the waiter a doorbell, to which the peer has
//! the button (`core::os::doorbell`). All are edge-triggered and none is ever drained: each ring makes the set
//! above report once. The service thread has only the eventfd, for its peers wake it by the side channel.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicI32, AtomicU8, AtomicU16,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::fabric::asleep::Onlookers;
use rdmasock_core::fabric::layout::READY_QUEUES;
use rdmasock_core::fabric::waiter::{FLAGS_BYTES, FlagPage, MAX_WAITERS, POLLING, WaiterId};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::doorbell::{self, Button, Doorbell};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sync::SleepFlag;
use rustix::event::{EventfdFlags, epoll as kernel};
use rustix::io::Errno;

/// Waiters of epoll sets are below this number.
const FURTHER_SETS: u16 = 256;

/// The service thread's.
pub const SERVICE: WaiterId = WaiterId(0);

/// The kinds of numbers, each with its range.
#[derive(Clone, Copy)]
enum Kind {
    /// With a ready queue on each link.
    Queue,
    /// Of an epoll set too, without one; sleeps on a doorbell. Where there are more sets, several share a number: a
    /// ring wakes all of them, and each looks.
    Set,
    /// Of a thread in poll or select.
    Polling,
    /// Sleeps on a futex.
    Thread,
}

impl Kind {
    const fn range(self) -> (u16, u16) {
        match self {
            // Number 0 is the service thread's.
            Self::Queue => (1, READY_QUEUES as u16),
            Self::Set => (READY_QUEUES as u16, FURTHER_SETS),
            Self::Polling => (FURTHER_SETS, POLLING),
            Self::Thread => (POLLING, MAX_WAITERS),
        }
    }
}

const KINDS: [Kind; 4] = [Kind::Queue, Kind::Set, Kind::Polling, Kind::Thread];

/// The numbers of one kind that are not in use.
struct Numbers {
    next: u16,
    free: Vec<u16>,
}

impl Numbers {
    fn new(kind: Kind) -> Lock<Self> {
        Lock::new(Self {
            next: kind.range().0,
            free: Vec::new(),
        })
    }
}

/// See the module.
pub struct Waiters {
    page: FlagPage,
    page_fd: PrivateFd,
    numbers: [Lock<Numbers>; 4],
    /// Times that an epoll set has got a number that another has too; wraps.
    shared: AtomicU16,
    /// By number: what the waiter polls, and our own eventfd. Once made they are kept for as long as the
    /// instance lives.
    polled: Box<[AtomicI32]>,
    events: Box<[AtomicI32]>,
    /// What the threads of polling waiters poll in the kernel.
    pub onlookers: Onlookers,
    /// Whether doorbells work on this kernel, once known: 1 no, 2 yes.
    doorbells: AtomicU8,
}

impl Waiters {
    /// Makes the page of flags, and what wakes the service thread.
    pub fn new() -> Result<Self, Errno> {
        let (page_fd, page) = rdmasock_core::os::memfd::create_read_only_for_peers("rdmasock-waiters", FLAGS_BYTES)?;
        let none = || (0..POLLING).map(|_| AtomicI32::new(-1)).collect();
        let this = Self {
            page: FlagPage::new(page).ok_or(Errno::INVAL)?,
            page_fd,
            numbers: KINDS.map(Numbers::new),
            shared: AtomicU16::new(0),
            polled: none(),
            events: none(),
            onlookers: Onlookers::new(POLLING),
            doorbells: AtomicU8::new(0),
        };
        let event = event()?;
        keep(&this.polled, SERVICE, event.as_raw_fd());
        keep(&this.events, SERVICE, event.release());
        Ok(this)
    }

    /// The memfd of the flags, to be given to peers.
    pub fn flags_fd(&self) -> BorrowedFd<'_> {
        self.page_fd.as_fd()
    }

    /// In a fork child, which does not have the parent's page: a call that was asleep when the fork interrupted it
    /// sleeps on no more, and lowers a flag that nobody sees.
    pub fn after_fork(&self) {
        self.page.after_fork();
    }

    /// By which the waiter sleeps.
    pub fn flag(&self, id: WaiterId) -> Option<&SleepFlag> {
        self.page.flag(id)
    }

    /// Returns a waiter for an epoll set: with a ready queue, if there is one left; else one without; else one that
    /// other sets have too. `None` where there are no descriptors even for the first without.
    pub fn acquire_for_set(&self) -> Option<WaiterId> {
        let own = self.take(Kind::Queue).or_else(|| self.take(Kind::Set));
        own.or_else(|| {
            let (first, end) = Kind::Set.range();
            let shared = self.shared.fetch_add(1, Relaxed);
            let mut ids = (0..end - first).map(|n| WaiterId(first + shared.wrapping_add(n) % (end - first)));
            ids.find(|id| self.doorbell(*id).is_some())
        })
    }

    /// A waiter for a thread that is about to poll.
    pub fn acquire_polling(&self) -> Option<WaiterId> {
        self.take(Kind::Polling)
    }

    /// A waiter for a thread that is about to sleep in one call.
    pub fn acquire(&self) -> Option<WaiterId> {
        self.take(Kind::Thread)
    }

    fn take(&self, kind: Kind) -> Option<WaiterId> {
        let id = {
            let mut numbers = self.numbers.get(kind as usize)?.lock()?;
            match numbers.free.pop() {
                Some(id) => id,
                None if numbers.next < kind.range().1 => {
                    numbers.next += 1;
                    numbers.next - 1
                }
                None => return None,
            }
        };
        let id = WaiterId(id);
        if id.is_polling() && self.equip(id).is_err() {
            self.release(id);
            return None;
        }
        Some(id)
    }

    /// Gives a waiter back. A late ring makes its next owner look once in vain.
    pub fn release(&self, id: WaiterId) {
        let kind = KINDS
            .into_iter()
            .find(|kind| (kind.range().0..kind.range().1).contains(&id.0));
        if let Some(numbers) = kind.and_then(|kind| self.numbers.get(kind as usize))
            && let Some(mut numbers) = numbers.lock()
        {
            numbers.free.push(id.0);
        }
    }

    /// Makes what a polling waiter sleeps on, if it was not made for an earlier owner of the number.
    fn equip(&self, id: WaiterId) -> Result<(), Errno> {
        if self.doorbell(id).is_some() {
            return Ok(());
        }
        let event = event()?;
        let set = PrivateFd::open(|| kernel::create(kernel::CreateFlags::CLOEXEC))?;
        hang(set.as_fd(), event.as_fd())?;
        keep(&self.events, id, event.release());
        keep(&self.polled, id, set.release());
        Ok(())
    }

    /// What a waiter that polls is to poll for input, edge-triggered or followed by [`Self::quiet`].
    pub fn doorbell(&self, id: WaiterId) -> Option<BorrowedFd<'static>> {
        kept(&self.polled, id)
    }

    /// Hangs up a doorbell of the waiter's, for a peer that is to have the button. EOPNOTSUPP where it would not work.
    pub fn add_doorbell(&self, id: WaiterId) -> Result<(Doorbell, Button), Errno> {
        let set = kept(&self.polled, id).filter(|_| id != SERVICE);
        let set = set.ok_or(Errno::INVAL)?;
        if !self.do_doorbells_work() {
            return Err(Errno::OPNOTSUPP);
        }
        let (bell, button) = doorbell::pair()?;
        hang(set, bell.as_fd())?;
        Ok((bell, button))
    }

    fn do_doorbells_work(&self) -> bool {
        match self.doorbells.load(Relaxed) {
            0 => {
                let works = doorbell::is_reliable();
                self.doorbells.store(1 + u8::from(works), Relaxed);
                works
            }
            known => known == 2,
        }
    }

    /// After a level-triggered poll of [`Self::doorbell`]: the rings so far are not reported again.
    pub fn quiet(&self, id: WaiterId) {
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut reported = [kernel::Event {
            flags: kernel::EventFlags::empty(),
            data: kernel::EventData::new_u64(0),
        }; 16];
        while let Some(set) = self.doorbell(id)
            && kernel::wait(set, &mut reported[..], Some(&now)) == Ok(reported.len())
        {}
    }

    /// Wakes whoever sleeps, or will next sleep, as this waiter.
    pub fn ring(&self, id: WaiterId) {
        if !id.is_polling() {
            self.page.ring(id);
        } else if let Some(event) = kept(&self.events, id) {
            // It is never full: nobody else writes to it, and it holds 2^64 - 2 rings.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    /// [`Self::ring`], if somebody sleeps.
    pub fn ring_if_sleeping(&self, id: WaiterId) {
        if self.flag(id).is_some_and(SleepFlag::is_sleeping) {
            self.ring(id);
        }
    }

    /// The caller looks at what could be a reason not to sleep once more after this, and then sleeps.
    pub fn enter_sleep(&self, id: WaiterId) {
        if let Some(flag) = self.flag(id) {
            flag.begin();
        }
    }

    /// The caller is awake.
    pub fn leave_sleep(&self, id: WaiterId) {
        if let Some(flag) = self.flag(id) {
            flag.end();
        }
    }

    /// What the waiter's futex holds, to be read before [`Self::enter_sleep`], and where it is.
    pub fn futex(&self, id: WaiterId) -> Option<(*const u32, u32)> {
        Some((self.page.futex(id)?, self.page.ticket(id)))
    }
}

fn event() -> Result<PrivateFd, Errno> {
    PrivateFd::open(|| rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK))
}

/// Has whoever polls `set` see each press of the button.
pub fn hang(set: BorrowedFd<'_>, bell: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = kernel::EventFlags::IN | kernel::EventFlags::ET;
    kernel::add(set, bell, kernel::EventData::new_u64(0), flags)
}

fn keep(all: &[AtomicI32], id: WaiterId, fd: i32) {
    if let Some(slot) = all.get(usize::from(id.0)) {
        slot.store(fd, Release);
    }
}

fn kept(all: &[AtomicI32], id: WaiterId) -> Option<BorrowedFd<'static>> {
    let fd = all.get(usize::from(id.0))?.load(Acquire);
    // SAFETY: what is entered is never closed while the instance lives.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use super::*;

    fn is_rung(waiters: &Waiters, id: WaiterId) -> bool {
        let doorbell = waiters.doorbell(id).unwrap();
        crate::notify::ready::anchor(doorbell, rustix::event::PollFlags::IN) != 0
    }

    #[test]
    fn a_number_is_not_lost_when_there_is_no_descriptor_for_it() {
        // SAFETY: the child makes system calls and uses what it has made itself, then ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let waiters = Waiters::new().unwrap();
            let limit = rustix::process::Rlimit {
                current: Some(64),
                maximum: Some(64),
            };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
            let all: Vec<_> = std::iter::from_fn(|| event().ok()).collect();
            let none = (0..2 * MAX_WAITERS).all(|_| waiters.acquire_polling().is_none());
            drop(all);
            let some = waiters.acquire_polling().is_some();
            // SAFETY: ends the child alone.
            unsafe { libc::_exit(c_int::from(!(none && some))) };
        }
        let mut status = 0;
        // SAFETY: a place for the status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_polling_waiter_is_rung_by_us_and_by_who_has_a_button() {
        let waiters = Waiters::new().unwrap();
        let id = waiters.acquire_polling().unwrap();
        let (_bell, button) = waiters.add_doorbell(id).unwrap();
        assert!(!is_rung(&waiters, id));
        for _ in 0..3 {
            button.press();
            assert!(is_rung(&waiters, id));
            waiters.quiet(id);
            assert!(!is_rung(&waiters, id));
            waiters.ring(id);
            assert!(is_rung(&waiters, id));
            waiters.quiet(id);
            assert!(!is_rung(&waiters, id));
        }
    }

    #[test]
    fn numbers_are_of_their_kind_and_end() {
        let waiters = Waiters::new().unwrap();
        let queues: Vec<_> = (1..READY_QUEUES).map(|_| waiters.acquire_for_set().unwrap()).collect();
        assert!(queues.iter().all(|id| id.queue_bits() != 0));
        let further: Vec<_> = (READY_QUEUES as u16..FURTHER_SETS)
            .map(|_| waiters.acquire_for_set().unwrap().0)
            .collect();
        assert!(further.iter().copied().eq(READY_QUEUES as u16..FURTHER_SETS));
        // Then they are shared, one after the other.
        let shared: Vec<_> = further.iter().map(|_| waiters.acquire_for_set().unwrap().0).collect();
        assert_eq!(shared, further);
        assert_eq!(waiters.acquire_polling(), Some(WaiterId(FURTHER_SETS)));
        let threads: Vec<_> = std::iter::from_fn(|| waiters.acquire()).collect();
        assert_eq!(threads.len(), usize::from(MAX_WAITERS - POLLING));
        assert!(threads.iter().all(|id| !id.is_polling()));
        threads.into_iter().for_each(|id| waiters.release(id));
        assert!(waiters.acquire().is_some());
    }
}
