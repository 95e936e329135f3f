//! A cursor that treats the buffers of a program's call as one byte sequence, to copy from or into.
//!
//! The memory is the program's, so this code accesses it only through raw pointers. A bad address faults here as it
//! would in the program's own memcpy.

use std::ffi::{c_int, c_void};

use libc::iovec;

/// The most entries of an iovec array that the kernel accepts (UIO_MAXIOV).
pub(crate) const MAX: usize = 1024;

/// No program has memory below `LOWEST` (mmap_min_addr), or from `HIGHEST` on.
const LOWEST: usize = 65_536;
const HIGHEST: usize = 1 << 56;

/// Returns whether the program can have memory at the address `ptr`, which it has passed.
#[inline]
pub(crate) fn is_plausible<T>(ptr: *const T) -> bool {
    (LOWEST..HIGHEST).contains(&(ptr as usize))
}

/// Returns whether a length exceeds SSIZE_MAX, as -1 does. No buffer is that long. With such a length read(2) and
/// write(2) fail, and send(2) cuts it to `LONGEST`.
#[inline]
pub(crate) fn is_no_length(len: usize) -> bool {
    len > isize::MAX as usize
}

/// Returns the value behind a pointer that the program has passed; `None` if no memory can be there.
///
/// # Safety
/// `ptr` is valid, or an address where no memory can be.
pub(crate) unsafe fn plausible<'a, T>(ptr: *const T) -> Option<&'a T> {
    // SAFETY: a plausible `ptr` is valid by the contract.
    is_plausible(ptr).then(|| unsafe { &*ptr })
}

/// A cursor over the pieces, which are the program's buffers in their order.
#[derive(Clone, Copy)]
pub(crate) struct Iov {
    /// The rest of the piece that the cursor is in: its address and its length in bytes.
    base: *mut u8,
    here: usize,
    /// The number of bytes left in all pieces.
    left: usize,
    /// The pieces that follow, and their number.
    next: *const iovec,
    others: usize,
}

/// The most bytes that the kernel moves in one call (MAX_RW_COUNT).
pub(crate) const LONGEST: usize = 0x7fff_f000;

impl Iov {
    /// Returns a cursor over a single buffer.
    #[inline]
    pub(crate) fn one(base: *const c_void, len: usize) -> Self {
        Self {
            base: base.cast_mut().cast(),
            here: len,
            left: len.min(LONGEST),
            next: std::ptr::null(),
            others: 0,
        }
    }

    /// Returns a cursor over an array of buffers; `None` where the kernel answers EINVAL, EMSGSIZE or EFAULT.
    ///
    /// # Safety
    /// `pieces` is an array of `count` readable entries for as long as the returned value is used.
    pub(crate) unsafe fn many(pieces: *const iovec, count: usize) -> Option<Self> {
        if count > MAX || (count > 0 && !is_plausible(pieces)) {
            return None;
        }
        let mut left = 0usize;
        for i in 0..count {
            // SAFETY: `i` is less than `count`, so the entry is readable by this function's contract.
            let len = unsafe { (*pieces.add(i)).iov_len };
            if is_no_length(len) {
                return None;
            }
            left = left.saturating_add(len);
        }
        Some(Self {
            base: std::ptr::null_mut(),
            here: 0,
            left: left.min(LONGEST),
            next: pieces,
            others: count,
        })
    }

    /// Does what [`Self::many`] does, for the signed `count` of readv(2) and writev(2). `None` also for a negative
    /// `count`.
    ///
    /// # Safety
    /// As for [`Self::many`].
    pub(crate) unsafe fn vector(pieces: *const iovec, count: c_int) -> Option<Self> {
        let count = usize::try_from(count).ok()?;
        // SAFETY: the array has `count` readable entries by this function's contract.
        unsafe { Self::many(pieces, count) }
    }

    /// Returns the number of bytes left.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "a cursor, not a collection")]
    pub(crate) fn len(&self) -> usize {
        self.left
    }

    /// Returns the address and the length of the bytes left, if they are one piece; otherwise `None`.
    #[inline(always)]
    pub(crate) fn only(&self) -> Option<(*mut u8, usize)> {
        (self.here == self.left).then_some((self.base, self.left))
    }

    /// Returns whether the next piece lies where no memory can be; the kernel fails with EFAULT for such a piece. Any
    /// other bad address faults as it would in the program's own code.
    #[inline]
    pub(crate) fn is_implausible(&mut self) -> bool {
        let (base, len) = self.head();
        len > 0 && !is_plausible(base)
    }

    /// Returns the next contiguous piece; empty at the end.
    #[inline]
    pub(crate) fn head(&mut self) -> (*mut u8, usize) {
        if self.here == 0 {
            self.enter_next();
        }
        (self.base, self.here.min(self.left))
    }

    /// Moves the cursor to the next piece that is not empty, if there is one.
    fn enter_next(&mut self) {
        while self.here == 0 && self.others > 0 {
            // SAFETY: `others` counts at least one more entry, and the array is readable by `many`'s contract.
            let piece = unsafe { *self.next };
            self.next = self.next.wrapping_add(1);
            self.others -= 1;
            self.base = piece.iov_base.cast();
            self.here = piece.iov_len;
        }
    }

    /// Returns how many bytes will be left when the first piece of `least` bytes or more begins; 0 if there is no such
    /// piece.
    pub(crate) fn left_at_large(mut self, least: usize) -> usize {
        loop {
            match self.head() {
                (_, 0) => return 0,
                (_, len) if len >= least => return self.left,
                (_, len) => self.advance(len),
            }
        }
    }

    /// Moves the cursor on by `n` bytes, at most to the end of the current piece.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        let n = n.min(self.here).min(self.left);
        self.base = self.base.wrapping_add(n);
        self.here -= n;
        self.left -= n;
    }

    /// Copies at most `len` bytes from the pieces to `to`. Returns the number of copied bytes.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes.
    #[inline]
    pub(crate) unsafe fn copy_to(&mut self, to: *mut u8, len: usize) -> usize {
        // SAFETY: the program's contract with its call makes the piece readable for `n` bytes. `to` is writable by this
        // function's contract.
        self.walk(len, |piece, done, n| unsafe {
            piece.copy_to_nonoverlapping(to.add(done), n)
        })
    }

    /// Copies at most `len` bytes from `from` into the pieces. Returns the number of copied bytes.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    #[inline]
    pub(crate) unsafe fn copy_from(&mut self, from: *const u8, len: usize) -> usize {
        // SAFETY: the program's contract with its call makes the piece writable for `n` bytes. `from` is readable by
        // this function's contract.
        self.walk(len, |piece, done, n| unsafe {
            piece.copy_from_nonoverlapping(from.add(done), n)
        })
    }

    /// Moves the cursor on by `len` bytes, or to the end. Returns the number of passed bytes. Calls `copy` for each
    /// piece on the way, with its address, the number of bytes passed before it, and its length.
    #[inline]
    pub(crate) fn walk(&mut self, len: usize, mut copy: impl FnMut(*mut u8, usize, usize)) -> usize {
        let mut done = 0;
        while done < len {
            let (piece, n) = self.head();
            if n == 0 {
                break;
            }
            let n = n.min(len - done);
            copy(piece, done, n);
            self.advance(n);
            done += n;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_walked_in_order_and_empty_ones_skipped() {
        let (mut a, mut b) = ([0u8; 3], [0u8; 4]);
        let pieces = [
            iovec {
                iov_base: a.as_mut_ptr().cast(),
                iov_len: 3,
            },
            iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            },
            iovec {
                iov_base: b.as_mut_ptr().cast(),
                iov_len: 4,
            },
        ];
        // SAFETY: the array outlives the cursor.
        let mut iov = unsafe { Iov::many(pieces.as_ptr(), 3) }.unwrap();
        let data = *b"abcdefgh";
        // SAFETY: `data` is 8 bytes long.
        assert_eq!(unsafe { iov.copy_from(data.as_ptr(), 5) }, 5);
        // SAFETY: the last 3 of the 8 bytes of `data`.
        assert_eq!(unsafe { iov.copy_from(data.as_ptr().add(5), 3) }, 2);
        assert_eq!((&a, &b), (b"abc", b"defg"));
        assert_eq!(iov.len(), 0);
        assert_eq!(iov.head().1, 0);
    }

    #[test]
    fn a_large_piece_is_seen_behind_small_ones() {
        let mut bytes = [0u8; 100];
        let mut piece = |len| iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: len,
        };
        let pieces = [piece(3), piece(0), piece(5), piece(90), piece(2)];
        // SAFETY: the array outlives the cursor.
        let iov = unsafe { Iov::many(pieces.as_ptr(), 5) }.unwrap();
        assert_eq!([1, 5, 90, 91].map(|least| iov.left_at_large(least)), [100, 97, 92, 0]);
        assert_eq!(Iov::one(bytes.as_ptr().cast(), 90).left_at_large(50), 90);
    }

    #[test]
    fn no_more_than_the_kernel_takes_is_taken() {
        let mut iov = Iov::one(std::ptr::dangling(), usize::MAX);
        assert_eq!(iov.head().1, LONGEST);
        iov.advance(LONGEST);
        assert_eq!((iov.len(), iov.head().1), (0, 0));
    }
}
