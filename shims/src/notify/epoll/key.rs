//! Keys: the data under which the library's own fds are in a kernel's set, so that they are never reported to the
//! program.
//!
//! All holders of a set share one kernel object: fork children, the programs that they execute, and receivers of its
//! fd. So each process may find the fds of another process in a set. Every process knows them by their keys.

use std::ffi::c_int;

use crate::sys::time::Timeout;

/// The upper 34 bits of all keys. No address begins so (it would not be canonical), and no small number. A program's
/// random data has this prefix with a probability of 2^-34.
const OURS: u64 = 0x2_d785_3e71;
/// Bits of the owner's process id, below the prefix (Linux has none above 2^22).
const OWNER_BITS: u32 = 22;
/// Bits of the tag, the lowest: 0 for the owner's bell, else one of its links.
const TAG_BITS: u32 = 8;

/// The number of tags for links. Several links may share a tag.
const LINK_TAGS: u32 = (1 << TAG_BITS) - 1;

/// The data of one of the library's fds in a kernel's set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key(pub u64);

impl Key {
    /// Returns the key of this process's bells.
    pub fn of_this_process() -> Self {
        let pid = rustix::process::getpid().as_raw_nonzero().get() as u64;
        Self((OURS << OWNER_BITS | pid & ((1 << OWNER_BITS) - 1)) << TAG_BITS)
    }

    /// Returns the same process's key for the link with this slot.
    pub fn of_link(self, slot: u32) -> Self {
        Self(self.owner().0 | u64::from(1 + slot % LINK_TAGS))
    }

    fn owner(self) -> Self {
        Self(self.0 >> TAG_BITS << TAG_BITS)
    }

    fn tag(self) -> u8 {
        self.0 as u8
    }

    /// Returns the key in these data. `None` if they are the program's own.
    pub fn from_data(data: u64) -> Option<Self> {
        (data >> (OWNER_BITS + TAG_BITS) == OURS).then_some(Self(data))
    }
}

/// The links that a kernel's set has reported, by their tags.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Named([u64; 1 << (TAG_BITS - 6)]);

impl Named {
    fn add(&mut self, tag: u8) {
        if let Some(word) = self.0.get_mut(usize::from(tag / 64)) {
            *word |= 1 << (tag % 64);
        }
    }

    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the link with this slot may be among them; another link may have the same tag.
    pub fn has(&self, slot: u32) -> bool {
        let tag = 1 + slot % LINK_TAGS;
        self.0
            .get(tag as usize / 64)
            .is_some_and(|word| word >> (tag % 64) & 1 != 0)
    }
}

/// The result of [`strip`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stripped {
    /// The number of entries that are the program's, which are in front now.
    pub kept: c_int,
    /// This process's bell, or one of its links, was among the entries.
    pub own: bool,
    /// An fd of another process's library was among the entries.
    pub foreign: bool,
    /// The links of this process that were among the entries.
    pub named: Named,
}

/// Removes the entries of library fds, of any process, and moves the program's to the front. `own` is the key of the
/// set's bell, or 0.
///
/// # Safety
/// `n` entries are filled, if it is above 0.
pub unsafe fn strip(events: *mut libc::epoll_event, n: c_int, own: u64) -> Stripped {
    let mut stripped = Stripped {
        kept: 0,
        own: false,
        foreign: false,
        named: Named::default(),
    };
    if n <= 0 {
        return stripped;
    }
    // SAFETY: `n` entries are filled, by the contract.
    let filled = unsafe { std::slice::from_raw_parts_mut(events, n as usize) };
    for at in 0..filled.len() {
        let Some(event) = filled.get(at).copied() else {
            break;
        };
        match Key::from_data(event.u64) {
            Some(key) if key.owner().0 == own => {
                stripped.own = true;
                if key.tag() != 0 {
                    stripped.named.add(key.tag());
                }
            }
            Some(_) => stripped.foreign = true,
            None => {
                if let Some(slot) = filled.get_mut(stripped.kept as usize) {
                    *slot = event;
                }
                stripped.kept += 1;
            }
        }
    }
    stripped
}

/// Waits on a set that the library does not know, and removes library fds of other processes from the result.
/// `real(left)` is the kernel's wait with the time that is left.
///
/// # Safety
/// `events` is the array that `real` fills, with as many entries as `real` returns.
pub unsafe fn without_ours(events: *mut libc::epoll_event, timeout: Timeout, real: impl Fn(Timeout) -> c_int) -> c_int {
    let deadline = timeout.deadline();
    let mut left = timeout;
    loop {
        let n = real(left);
        if n <= 0 {
            return n;
        }
        // SAFETY: `real` has filled `n` entries, by the contract.
        let kept = unsafe { strip(events, n, 0) }.kept;
        if kept > 0 || deadline.is_zero() {
            return kept;
        }
        left = deadline.left();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ours_is_taken_out_and_the_rest_keeps_its_order() {
        let own = Key::of_this_process();
        let foreign = Key(own.0 ^ 1 << TAG_BITS);
        assert_eq!(Key::from_data(own.0), Some(own));
        for data in [0, 5, 0x7fff_ffff_f000, u64::MAX, own.0 ^ 1 << (OWNER_BITS + TAG_BITS)] {
            assert_eq!(Key::from_data(data), None);
        }
        let event = |u64| libc::epoll_event { events: 1, u64 };
        let mut events = [own.0, 7, foreign.0, 8, own.0].map(event);
        // SAFETY: `events` has five entries.
        let stripped = unsafe { strip(events.as_mut_ptr(), 5, own.0) };
        let expected = Stripped {
            kept: 2,
            own: true,
            foreign: true,
            named: Named::default(),
        };
        assert_eq!(stripped, expected);
        assert_eq!(events.map(|e| e.u64)[..2], [7, 8]);
        // SAFETY: no entry is filled.
        assert_eq!(unsafe { strip(std::ptr::null_mut(), -1, own.0) }.kept, 0);
    }

    #[test]
    fn links_are_told_apart_and_from_the_doorbell() {
        let own = Key::of_this_process();
        let event = |u64| libc::epoll_event { events: 1, u64 };
        let mut events = [
            own.of_link(3),
            own,
            own.of_link(254),
            Key(own.0 ^ 1 << TAG_BITS).of_link(7),
        ]
        .map(|k| event(k.0));
        // SAFETY: `events` has four entries.
        let stripped = unsafe { strip(events.as_mut_ptr(), 4, own.0) };
        assert!(stripped.own && stripped.foreign && stripped.kept == 0);
        let named = |slot| stripped.named.has(slot);
        assert!(named(3) && named(254) && !named(0) && !named(7) && !named(4));
        assert!(named(3 + LINK_TAGS), "several links have the same tag");
        let mut bell = [event(own.0)];
        // SAFETY: `bell` has one entry.
        assert!(unsafe { strip(bell.as_mut_ptr(), 1, own.0) }.named.is_none());
    }
}
