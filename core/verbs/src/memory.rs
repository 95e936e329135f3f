//! The plugin's own memory for buffers. The mapping is shared. In a private mapping, a write after a fork would copy
//! the page, and the device would go on with the old page. A fork child does not inherit the mapping.

use crate::error::{Errno, Result};

/// A zeroed mapping.
#[derive(Debug)]
pub(crate) struct Slab {
    at: *mut u8,
    len: usize,
}

// SAFETY: a slab is plain memory. Its users access it by raw pointers, and argue at each access why there is no race.
unsafe impl Send for Slab {}
// SAFETY: as for Send.
unsafe impl Sync for Slab {}

impl Slab {
    pub(crate) fn new(len: usize) -> Result<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        // SAFETY: this makes a new mapping, which replaces no other.
        let at = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )?
        };
        // SAFETY: the range is exactly the mapping that was just made. If the call fails, fork children inherit the
        // memory, which does no harm.
        let _ = unsafe { madvise(at, len, Advice::LinuxDontFork) };
        Ok(Self { at: at.cast(), len })
    }

    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the `size` bytes from `index * size` on; EINVAL if they exceed the slab.
    pub(crate) fn piece(&self, index: usize, size: usize) -> Result<*mut u8> {
        let from = index.checked_mul(size).ok_or(Errno(libc::EINVAL))?;
        let within = from.checked_add(size).is_some_and(|end| end <= self.len);
        if !within {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the address is within the mapping, by the check above.
        Ok(unsafe { self.at.add(from) })
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping that `new` made, and its users are gone.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_within_the_slab() {
        let slab = Slab::new(8192).unwrap();
        assert_eq!(slab.piece(0, 4096), Ok(slab.at()));
        assert_eq!(slab.piece(1, 4096).map(|at| at.addr() - slab.at().addr()), Ok(4096));
        for (index, size) in [(2, 4096), (1, 4097), (usize::MAX, 2), (1, usize::MAX)] {
            assert_eq!(slab.piece(index, size), Err(Errno(libc::EINVAL)));
        }
    }
}
