//! A long array with few used values. It consists of chunks. A chunk gets memory when a value in it is first needed:
//! `make` allocates the memory, `get` never allocates.

use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

/// An array of `CHUNKS` times `LEN` values, which begin as their defaults.
pub struct Sparse<T, const CHUNKS: usize, const LEN: usize> {
    chunks: [AtomicPtr<[T; LEN]>; CHUNKS],
}

impl<T: Default + Sync, const CHUNKS: usize, const LEN: usize> Sparse<T, CHUNKS, LEN> {
    /// Returns an array of defaults, without memory for them.
    pub const fn new() -> Self {
        Self {
            chunks: [const { AtomicPtr::new(null_mut()) }; CHUNKS],
        }
    }

    /// Returns the value at `index`. `None` if `index` is out of range, or if the value's chunk was never
    /// [made](Self::make). In the second case the value is still its default.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&T> {
        let chunk = self.chunks.get(index / LEN)?.load(Acquire);
        // SAFETY: the pointer is null, or comes from a box that lives as long as `self`.
        unsafe { chunk.as_ref() }?.get(index % LEN)
    }

    /// Returns the value at `index`. Makes the value's chunk first if it does not exist; from then on
    /// [`get`](Self::get) returns the value too. `None` if `index` is out of range.
    pub fn make(&self, index: usize) -> Option<&T> {
        let chunk = self.chunks.get(index / LEN)?;
        if chunk.load(Acquire).is_null() {
            // The chunk is built on the heap, because the stack may be a signal handler's and small.
            let values: Box<[T]> = std::iter::repeat_with(T::default).take(LEN).collect();
            let fresh = Box::into_raw(values.try_into().ok()?);
            if chunk.compare_exchange(null_mut(), fresh, AcqRel, Acquire).is_err() {
                // SAFETY: another thread has stored its chunk first, so no other code has a pointer to this one.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
        self.get(index)
    }

    /// Returns all values of the chunks that exist.
    pub fn made(&self) -> impl Iterator<Item = &T> {
        self.chunks
            .iter()
            // SAFETY: as in `get`.
            .filter_map(|chunk| unsafe { chunk.load(Acquire).as_ref() })
            .flatten()
    }
}

impl<T: Default + Sync, const CHUNKS: usize, const LEN: usize> Default for Sparse<T, CHUNKS, LEN> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, const CHUNKS: usize, const LEN: usize> Drop for Sparse<T, CHUNKS, LEN> {
    fn drop(&mut self) {
        for chunk in &mut self.chunks {
            if !chunk.get_mut().is_null() {
                // SAFETY: the pointer comes from a box that `make` has made, and `&mut self` excludes other users.
                drop(unsafe { Box::from_raw(*chunk.get_mut()) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn values_are_there_once_they_are_made() {
        let all = Sparse::<AtomicU32, 4, 8>::new();
        assert!(all.get(9).is_none());
        all.make(9).unwrap().store(7, Relaxed);
        assert_eq!(all.get(9).unwrap().load(Relaxed), 7);
        assert_eq!(all.make(10).unwrap().load(Relaxed), 0);
        assert!(all.get(7).is_none() && all.get(16).is_none());
        assert_eq!(all.made().count(), 8);
    }

    #[test]
    fn there_is_nothing_beyond_the_last_chunk() {
        let all = Sparse::<AtomicU32, 4, 8>::new();
        assert!(all.make(31).is_some() && all.make(32).is_none());
        assert!(all.get(usize::MAX).is_none() && all.make(usize::MAX).is_none());
    }
}
