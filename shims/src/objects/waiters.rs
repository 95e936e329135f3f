//! The waiters of an instance: which waiter has which id, and what each sleeps on.
//!
//! A *waiter* stands for a thread, or for the threads on an epoll set, that a peer can wake. It has an id that is the
//! same on all links, an object to sleep on, and a flag that says whether a thread sleeps on it. The flags of an
//! instance lie in a page that peers map read-only.
//!
//! | ids | waiter | sleeps on |
//! |---|---|---|
//! | 0 | the service thread | an eventfd in its epoll set |
//! | from 1 | epoll sets that have a ready queue on each link | doorbells |
//! | from `READY_QUEUES` | further epoll sets | doorbells |
//! | from `FURTHER_SETS` | threads in poll or select | doorbells |
//! | from `POLLING`, below `MAX_WAITERS` | threads that sleep in one call | a futex |
//!
//! A *ready queue* lists the streams of a link that have become ready for one waiter. The peer adds to it.
//!
//! A thread gets its waiter for one call, and gives it back. If no waiter is free, the call takes its connections back
//! to TCP, where the kernel wakes the thread.
//!
//! By the object that a waiter sleeps on, a peer can wake the waiter and do no more. A thread that sleeps in one call
//! has a futex (`core::fabric::waiter`). A waiter that sleeps on doorbells, a *polling* waiter, has a private epoll
//! set. Its threads poll the private set together with the program's descriptors: in the program's epoll set, or in the
//! array of a poll(). The private set holds an eventfd, by which this process wakes the waiter, and a doorbell for each
//! link whose peer may wake it. That peer has the doorbell's button (`core::os::doorbell`). Eventfd and doorbells are
//! edge-triggered and never drained: each press makes the private set report once. The service thread has only the
//! eventfd, since its peers wake it by the side channel.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU16};

use once_cell::race::OnceBool;
use rdmasock_core::fabric::layout::READY_QUEUES;
use rdmasock_core::fabric::waiter::{FLAGS_BYTES, FlagPage, MAX_WAITERS, Onlookers, POLLING, WaiterId};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::doorbell::{self, Button};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sync::SleepFlag;
use rustix::event::{EventfdFlags, epoll as kernel};
use rustix::io::Errno;

/// The first id for threads in poll or select. Ids of epoll sets are below it.
const FURTHER_SETS: u16 = 256;

/// The waiter of the service thread.
pub(crate) const SERVICE: WaiterId = WaiterId(0);

/// The kinds of waiters, each with its range of ids.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// For an epoll set, with a ready queue on each link.
    Queue,
    /// For an epoll set, without a ready queue; sleeps on a doorbell. If there are more sets than ids, several sets
    /// share an id: a press wakes all of them, and each checks its sockets.
    Set,
    /// For a thread in poll or select.
    Polling,
    /// For a thread in one blocking call; sleeps on a futex.
    Thread,
}

impl Kind {
    const fn range(self) -> Range<u16> {
        match self {
            // Id 0 is the service thread's.
            Self::Queue => 1..READY_QUEUES as u16,
            Self::Set => READY_QUEUES as u16..FURTHER_SETS,
            Self::Polling => FURTHER_SETS..POLLING,
            Self::Thread => POLLING..MAX_WAITERS,
        }
    }
}

const KINDS: [Kind; 4] = [Kind::Queue, Kind::Set, Kind::Polling, Kind::Thread];

/// The waiters of an instance.
pub(crate) struct Waiters {
    page: FlagPage,
    page_fd: PrivateFd,
    /// By kind: the ids that are not in use. The last one is the next to be used.
    free: [Lock<Vec<u16>>; 4],
    /// How many times an epoll set got an id that other sets have too; wraps.
    shared: AtomicU16,
    /// By waiter id: the fd that the waiter polls, and its eventfd; -1 before they are made. They are never closed
    /// while the instance lives.
    polled: Box<[AtomicI32]>,
    events: Box<[AtomicI32]>,
    /// For each polling waiter: which sockets its thread polls in the kernel by poll or select.
    pub onlookers: Onlookers,
    /// Whether this kernel reports each press of a button.
    are_doorbells_reliable: OnceBool,
}

impl Waiters {
    /// Makes the page of flags, and the eventfd that wakes the service thread. Fails with the kernel's errno.
    pub(crate) fn new() -> Result<Self, Errno> {
        let (page_fd, page) = rdmasock_core::os::memfd::create_read_only_for_peers("rdmasock-waiters", FLAGS_BYTES)?;
        let none = || (0..POLLING).map(|_| AtomicI32::new(-1)).collect();
        let this = Self {
            page: FlagPage::new(page).ok_or(Errno::INVAL)?,
            page_fd,
            free: KINDS.map(|kind| Lock::new(kind.range().rev().collect())),
            shared: AtomicU16::new(0),
            polled: none(),
            events: none(),
            onlookers: Onlookers::new(POLLING),
            are_doorbells_reliable: OnceBool::new(),
        };
        let event = event()?;
        keep(&this.polled, SERVICE, event.as_raw_fd());
        keep(&this.events, SERVICE, event.release());
        Ok(this)
    }

    /// Returns the memfd of the flags, which is sent to peers.
    pub(crate) fn flags_fd(&self) -> BorrowedFd<'_> {
        self.page_fd.as_fd()
    }

    /// Replaces the page of flags in a fork child, which has not inherited the parent's page. A signal handler may have
    /// forked in the middle of a call that sleeps. In the child that sleep ends at once, and the call lowers its flag
    /// in the new page, which no peer sees.
    pub(crate) fn after_fork(&self) {
        self.page.after_fork();
    }

    /// Returns the sleep flag of a waiter; `None` if there is no such waiter.
    pub(crate) fn flag(&self, id: WaiterId) -> Option<&SleepFlag> {
        self.page.flag(id)
    }

    /// Returns a waiter for an epoll set: one with a ready queue, else one without, else one that other sets have too.
    /// `None` if the process has no fds left for a new waiter, and none without a ready queue was made before.
    pub(crate) fn acquire_for_set(&self) -> Option<WaiterId> {
        let own = self.acquire(Kind::Queue).or_else(|| self.acquire(Kind::Set));
        own.or_else(|| {
            let Range { start, end } = Kind::Set.range();
            let shared = self.shared.fetch_add(1, Relaxed);
            let mut ids = (0..end - start).map(|n| WaiterId(start + shared.wrapping_add(n) % (end - start)));
            ids.find(|id| self.doorbell(*id).is_some())
        })
    }

    /// Returns a waiter of this kind; `None` if all are in use, or the process has no fds left for one that polls.
    pub(crate) fn acquire(&self, kind: Kind) -> Option<WaiterId> {
        let id = WaiterId(self.free.get(kind as usize)?.lock()?.pop()?);
        if id.is_polling() && self.equip(id).is_err() {
            self.release(id);
            return None;
        }
        Some(id)
    }

    /// Gives a waiter back. If a wake-up for the caller comes later, the waiter's next owner checks once in vain.
    pub(crate) fn release(&self, id: WaiterId) {
        let kind = KINDS.into_iter().find(|kind| kind.range().contains(&id.0));
        if let Some(mut free) = kind.and_then(|kind| self.free.get(kind as usize)?.lock()) {
            free.push(id.0);
        }
    }

    /// Makes the private epoll set and the eventfd of a polling waiter, unless they were made for an earlier owner of
    /// the id.
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

    /// Returns the fd that a polling waiter polls for input. The caller polls it edge-triggered, or calls
    /// [`Self::quiet`] after the poll. `None` if the fd was never made.
    pub(crate) fn doorbell(&self, id: WaiterId) -> Option<BorrowedFd<'static>> {
        kept(&self.polled, id)
    }

    /// Makes a doorbell, adds it to the epoll set that the waiter polls, and returns it with the button for a peer.
    /// Fails with EINVAL if the waiter has no private epoll set, with EOPNOTSUPP if this kernel does not report each
    /// press, and else with the kernel's errno.
    pub(crate) fn add_doorbell(&self, id: WaiterId) -> Result<(PrivateFd, Button), Errno> {
        let set = kept(&self.polled, id).filter(|_| id != SERVICE);
        let set = set.ok_or(Errno::INVAL)?;
        if !self.are_doorbells_reliable.get_or_try_init(doorbell::is_reliable)? {
            return Err(Errno::OPNOTSUPP);
        }
        let (bell, button) = doorbell::pair()?;
        hang(set, bell.as_fd())?;
        Ok((bell, button))
    }

    /// Consumes the presses so far, so that the next poll reports only later ones. To be called after a level-triggered
    /// poll of [`Self::doorbell`].
    pub(crate) fn quiet(&self, id: WaiterId) {
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut reported = [kernel::Event {
            flags: kernel::EventFlags::empty(),
            data: kernel::EventData::new_u64(0),
        }; 16];
        while let Some(set) = self.doorbell(id)
            && kernel::wait(set, &mut reported[..], Some(&now)) == Ok(reported.len())
        {}
    }

    /// Wakes the threads that sleep as this waiter. Also ends the sleep of a thread that is about to sleep.
    pub(crate) fn ring(&self, id: WaiterId) {
        if !id.is_polling() {
            self.page.ring(id);
        } else if let Some(event) = kept(&self.events, id) {
            // The write never blocks: only this process writes to the eventfd, which holds 2^64 - 2 wake-ups.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    /// Calls [`Self::ring`] if the waiter's flag says that a thread sleeps.
    pub(crate) fn ring_if_sleeping(&self, id: WaiterId) {
        if self.flag(id).is_some_and(SleepFlag::is_sleeping) {
            self.ring(id);
        }
    }

    /// Raises the waiter's sleep flag. The caller then checks once more for reasons not to sleep, and sleeps if there
    /// are none.
    pub(crate) fn enter_sleep(&self, id: WaiterId) {
        if let Some(flag) = self.flag(id) {
            flag.begin();
        }
    }

    /// Lowers the waiter's sleep flag: the caller is awake.
    pub(crate) fn leave_sleep(&self, id: WaiterId) {
        if let Some(flag) = self.flag(id) {
            flag.end();
        }
    }

    /// Returns the address of the waiter's futex, and its value, which is to be read before [`Self::enter_sleep`].
    pub(crate) fn futex(&self, id: WaiterId) -> Option<(*const u32, u32)> {
        Some((self.page.futex(id)?, self.page.ticket(id)))
    }
}

fn event() -> Result<PrivateFd, Errno> {
    PrivateFd::open(|| rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK))
}

/// Adds `bell`, a doorbell or an eventfd, to the epoll set `set`, which then reports each press once.
pub(crate) fn hang(set: BorrowedFd<'_>, bell: BorrowedFd<'_>) -> Result<(), Errno> {
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
    // SAFETY: `keep` stores only fds that are released into the instance, and no code closes them while the instance
    // lives.
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
        // SAFETY: the child makes system calls and uses only objects that it has made itself, then ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let waiters = Waiters::new().unwrap();
            let limit = rustix::process::Rlimit {
                current: Some(64),
                maximum: Some(64),
            };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
            let all: Vec<_> = std::iter::from_fn(|| event().ok()).collect();
            let none = (0..2 * MAX_WAITERS).all(|_| waiters.acquire(Kind::Polling).is_none());
            drop(all);
            let some = waiters.acquire(Kind::Polling).is_some();
            // SAFETY: the call ends the child alone.
            unsafe { libc::_exit(c_int::from(!(none && some))) };
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the child's status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_polling_waiter_is_rung_by_us_and_by_who_has_a_button() {
        let waiters = Waiters::new().unwrap();
        let id = waiters.acquire(Kind::Polling).unwrap();
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
        // Further sets share these ids in turn.
        let shared: Vec<_> = further.iter().map(|_| waiters.acquire_for_set().unwrap().0).collect();
        assert_eq!(shared, further);
        assert_eq!(waiters.acquire(Kind::Polling), Some(WaiterId(FURTHER_SETS)));
        let threads: Vec<_> = std::iter::from_fn(|| waiters.acquire(Kind::Thread)).collect();
        assert_eq!(threads.len(), usize::from(MAX_WAITERS - POLLING));
        assert!(threads.iter().all(|id| !id.is_polling()));
        threads.into_iter().for_each(|id| waiters.release(id));
        assert!(waiters.acquire(Kind::Thread).is_some());
    }
}
