//! What is ours in a kernel's set, and must never be reported to the program: known by its data, in every set and in
//! every process. A set is one object for all who hold it: fork children, what they execute, whoever got its
//! descriptor. Each of them may find there what another has put in.

use std::ffi::c_int;

use crate::sys::time::Timeout;

/// The upper bits of all keys. No address (it is not canonical), no small number; that a program has data of its own
/// that begin so is as likely as to guess 34 bits.
const OURS: u64 = 0x2_d785_3e71;
/// Then follows whose it is, a process's number (Linux has none above 2^22),
const OWNER_BITS: u32 = 22;
/// and what it is of that process's.
const TAG_BITS: u32 = 8;

/// How many tags there are for links. Several links may have the same.
const LINK_TAGS: u32 = (1 << TAG_BITS) - 1;

/// The data under which what is ours is in a kernel's set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key(pub u64);

impl Key {
    /// A doorbell's.
    pub fn of_this_process() -> Self {
        let pid = rustix::process::getpid().as_raw_nonzero().get() as u64;
        Self((OURS << OWNER_BITS | pid & ((1 << OWNER_BITS) - 1)) << TAG_BITS)
    }

    /// The same process's, of the link with this slot.
    pub fn of_link(self, slot: u32) -> Self {
        Self(self.owner().0 | u64::from(1 + slot % LINK_TAGS))
    }

    fn owner(self) -> Self {
        Self(self.0 >> TAG_BITS << TAG_BITS)
    }

    fn tag(self) -> u8 {
        self.0 as u8
    }

    /// The key that these data are, if they are one.
    pub fn from_data(data: u64) -> Option<Self> {
        (data >> (OWNER_BITS + TAG_BITS) == OURS).then_some(Self(data))
    }
}

/// Links that a kernel's set has named, by their tags.
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

    /// Whether the link with this slot may be one of them.
    pub fn has(&self, slot: u32) -> bool {
        let tag = 1 + slot % LINK_TAGS;
        self.0
            .get(tag as usize / 64)
            .is_some_and(|word| word >> (tag % 64) & 1 != 0)
    }
}

/// What was among the entries that the kernel had filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stripped {
    /// The program's, which are in front now.
    pub kept: c_int,
    /// Something of this process's was there.
    pub own: bool,
    /// Another process's.
    pub foreign: bool,
    /// Those of this process's links that were.
    pub named: Named,
}

/// Takes out what is ours; `own` is the doorbell's key in the set, or 0.
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
    // SAFETY: by the contract.
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

/// A wait on a set that the library does not know, from another process perhaps: `real(left)` is the kernel's.
///
/// # Safety
/// `events` is what `real` fills.
pub unsafe fn without_ours(events: *mut libc::epoll_event, timeout: Timeout, real: impl Fn(Timeout) -> c_int) -> c_int {
    let deadline = timeout.deadline();
    let mut left = timeout;
    loop {
        let n = real(left);
        if n <= 0 {
            return n;
        }
        // SAFETY: by the contract.
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
        // SAFETY: an array of that length.
        let stripped = unsafe { strip(events.as_mut_ptr(), 5, own.0) };
        let expected = Stripped {
            kept: 2,
            own: true,
            foreign: true,
            named: Named::default(),
        };
        assert_eq!(stripped, expected);
        assert_eq!(events.map(|e| e.u64)[..2], [7, 8]);
        // SAFETY: nothing is filled.
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
        // SAFETY: an array of that length.
        let stripped = unsafe { strip(events.as_mut_ptr(), 4, own.0) };
        assert!(stripped.own && stripped.foreign && stripped.kept == 0);
        let named = |slot| stripped.named.has(slot);
        assert!(named(3) && named(254) && !named(0) && !named(7) && !named(4));
        assert!(named(3 + LINK_TAGS), "several links have the same tag");
        let mut bell = [event(own.0)];
        // SAFETY: an array of that length.
        assert!(unsafe { strip(bell.as_mut_ptr(), 1, own.0) }.named.is_none());
    }
}
