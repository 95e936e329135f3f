//! Whether the program's array of events can be written.
//!
//! If it cannot, the kernel returns EFAULT once there is an event. A store by the library would be a segmentation
//! fault, and an endless one if a handler of the program's jumps out of it (`jump`).

use std::sync::atomic::AtomicU32;

use rdmasock_core::os::{kernel, thread};
use rustix::io::Errno;

/// Arguments of a FUTEX_WAKE_OP that adds 0 to its second word. The word must be writable, and no thread is woken for
/// it. FUTEX_OP(ADD, 0, LT, 0) of <linux/futex.h>, and FUTEX_WAKE_OP with FUTEX_PRIVATE_FLAG.
const ADD_NOTHING: usize = 1 << 28 | 2 << 24;
const WAKE_OP: usize = 5 | 128;

/// Whether the first entry can be written. Asks the kernel only if the array is not the one of the thread's last wait.
pub(super) fn can_be_written(events: *mut libc::epoll_event) -> bool {
    let at = events.addr();
    let thread = thread::current();
    if thread.note_results(at) {
        return true;
    }
    let nobody = AtomicU32::new(0);
    let (word, other) = (kernel::address(&raw const nobody), at & !3);
    // SAFETY: the kernel checks both addresses, and changes neither word.
    let asked = unsafe { kernel::call(libc::SYS_futex, [word, WAKE_OP, 0, 0, other, ADD_NOTHING]) };
    let can = asked != Err(Errno::FAULT);
    if !can {
        thread.note_results(0);
    }
    can
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_is_looked_at_without_being_changed() {
        const PAGE: usize = 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let (write, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, write, flags, -1, 0) };
        let events = page.cast::<libc::epoll_event>();
        // SAFETY: the page was mapped above, readable and writable.
        unsafe { events.cast::<u64>().write(0x0123_4567_89ab_cdef) };
        assert!(can_be_written(events) && can_be_written(events));
        // SAFETY: the page was mapped above, readable and writable.
        let kept = unsafe { events.cast::<u64>().read() };
        assert_eq!(kept, 0x0123_4567_89ab_cdef);
        let other = events.wrapping_add(1);
        for protection in [libc::PROT_READ, none] {
            // SAFETY: the page was mapped above, and no reference into it is alive.
            assert_eq!(unsafe { libc::mprotect(page, PAGE, protection) }, 0);
            assert!(!can_be_written(other) && !can_be_written(other));
        }
        // SAFETY: the page was mapped above, and is not used any more.
        unsafe { libc::munmap(page, PAGE) };
    }
}
