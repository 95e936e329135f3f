//! Who can be woken through a link: the numbers of waiters, the attention words that name them, and
//! the page of sleep flags that an instance shows its peers. Not for sleeping, nor for who has which
//! number.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use super::layout::READY_QUEUES;
use super::ready::SleepFlag;
use crate::os::memfd::{Access, MapError, Mapping};

/// Most waiters that an instance has.
pub const MAX_WAITERS: u16 = 1024;

/// Bytes of the file of flags.
pub const FLAGS_BYTES: u64 = MAX_WAITERS as u64 * size_of::<SleepFlag>() as u64;

/// The part of an attention word that names a sleeper; the rest names a ready queue.
pub const SLEEPER_MASK: u32 = 0x0000_ffff;

/// The number of a waiter, the same on all links of an instance. Those below `READY_QUEUES` have a
/// ready queue on each link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaiterId(pub u16);

impl WaiterId {
    /// For an atomic word where 0 means none.
    pub fn to_word(self) -> u32 {
        u32::from(self.0) + 1
    }

    /// The reverse of `to_word`.
    pub fn from_word(word: u32) -> Option<Self> {
        u16::try_from(word.checked_sub(1)?)
            .ok()
            .filter(|id| *id < MAX_WAITERS)
            .map(Self)
    }

    /// The part of an attention word that asks for an entry in this waiter's ready queue; 0 if it
    /// has none.
    pub fn queue_bits(self) -> u32 {
        if u32::from(self.0) < READY_QUEUES {
            self.to_word() << 16
        } else {
            0
        }
    }

    /// The part of an attention word that asks for this waiter's doorbell alone.
    pub fn sleeper_bits(self) -> u32 {
        self.to_word()
    }

    /// The reverse of `queue_bits`, in a whole attention word.
    pub fn of_queue(word: u32) -> Option<Self> {
        Self::from_word(word >> 16)
    }

    /// The reverse of `sleeper_bits`, in a whole attention word.
    pub fn of_sleeper(word: u32) -> Option<Self> {
        Self::from_word(word & SLEEPER_MASK)
    }
}

/// The flags of the waiters of one instance, ours or a peer's.
#[derive(Debug)]
pub struct FlagPage(Mapping);

impl FlagPage {
    /// `None` if that is less than [`FLAGS_BYTES`]. A peer's may be mapped to be read only.
    pub fn new(mapping: Mapping) -> Option<Self> {
        (mapping.bytes() as u64 >= FLAGS_BYTES).then_some(Self(mapping))
    }

    /// The page of no peer yet: nobody sleeps.
    pub fn blank() -> Result<Self, Errno> {
        Mapping::neutral(FLAGS_BYTES as usize).map(Self)
    }

    /// Becomes the page that a peer has sent.
    pub fn show_received(&self, fd: BorrowedFd<'_>) -> Result<(), MapError> {
        self.0.show_received(fd, Access::ReadOnly)
    }

    /// Becomes nobody's: no flag is raised, and raising one is not seen by anybody.
    pub fn neutralise(&self) -> Result<(), Errno> {
        self.0.neutralise()
    }

    /// In a fork child, which does not have the page: as by [`neutralise`](Self::neutralise).
    pub fn after_fork(&self) {
        self.0.after_fork();
    }

    /// The flag of a waiter; of a peer's only to be looked at.
    #[inline]
    pub fn flag(&self, id: WaiterId) -> Option<&SleepFlag> {
        let at = usize::from(id.0) * size_of::<SleepFlag>();
        // SAFETY: the mapping has FLAGS_BYTES (`new`), room for MAX_WAITERS flags, is aligned to a
        // page and lives as long as `self`; a flag is an atomic word, valid whatever it holds, and
        // another process may write it.
        (id.0 < MAX_WAITERS).then(|| unsafe { &*self.0.as_ptr().add(at).cast::<SleepFlag>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_names_a_queue_and_a_sleeper() {
        let word = WaiterId(63).queue_bits() | WaiterId(MAX_WAITERS - 1).sleeper_bits();
        assert_eq!(WaiterId::of_queue(word), Some(WaiterId(63)));
        assert_eq!(WaiterId::of_sleeper(word), Some(WaiterId(MAX_WAITERS - 1)));
        assert_eq!(
            (WaiterId::of_queue(0), WaiterId::of_sleeper(0)),
            (None, None)
        );
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
    }
}
