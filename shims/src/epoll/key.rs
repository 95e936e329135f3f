//! What is ours in a kernel's set, and must never be reported to the program: known by its data, in every set and in
//! every process. A set is one object for all who hold it: fork children, what they execute, whoever got its
//! descriptor. Each of them may find there what another has put in.

use std::ffi::c_int;

use crate::time::Timeout;

/// The upper bits of all keys. No address (it is not canonical), no small number; that a program has data of its own
/// that begin so is as likely as to guess 40 bits.
const OURS: u64 = 0xb5_e14f_9c6d;
/// The other bits say whose it is.
const OWNER_BITS: u32 = 24;

/// The data under which what is ours is in a kernel's set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key(pub u64);

impl Key {
    pub fn of_this_process() -> Self {
        let pid = rustix::process::getpid().as_raw_nonzero().get() as u64;
        Self(OURS << OWNER_BITS | pid & ((1 << OWNER_BITS) - 1))
    }

    /// The key that these data are, if they are one.
    pub fn from_data(data: u64) -> Option<Self> {
        (data >> OWNER_BITS == OURS).then_some(Self(data))
    }
}

/// What was among the entries that the kernel had filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stripped {
    /// The program's, which are in front now.
    pub kept: c_int,
    /// This key was there.
    pub own: bool,
    /// Another process's.
    pub foreign: bool,
}

/// Takes out what is ours; `own` is this process's key in the set, or 0.
///
/// # Safety
/// `n` entries are filled, if it is above 0.
pub unsafe fn strip(events: *mut libc::epoll_event, n: c_int, own: u64) -> Stripped {
    let mut stripped = Stripped {
        kept: 0,
        own: false,
        foreign: false,
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
            Some(key) if key.0 == own => stripped.own = true,
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
        let foreign = Key(own.0 ^ 1);
        assert_eq!(Key::from_data(own.0), Some(own));
        for data in [0, 5, 0x7fff_ffff_f000, u64::MAX, own.0 ^ 1 << OWNER_BITS] {
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
        };
        assert_eq!(stripped, expected);
        assert_eq!(events.map(|e| e.u64)[..2], [7, 8]);
        // SAFETY: nothing is filled.
        assert_eq!(unsafe { strip(std::ptr::null_mut(), -1, own.0) }.kept, 0);
    }
}
