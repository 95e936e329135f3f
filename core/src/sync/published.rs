//! A word that one side publishes and the other reads ([`Published`]).

use super::words::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence_after_rmw};

/// Two sides with a word each. A side publishes its word, and then [reads](Self::look) the other's word. So it sees
/// what the other side published before reading here, or the other side sees its publication. Writes before a
/// publication are released to the side that reads it.
///
/// In memory: the atomic alone, where 0 means that nothing is published.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Published<A>(A);

macro_rules! published {
    ($($atomic:ty: $value:ty),*) => {$(
        impl From<$value> for Published<$atomic> {
            /// Returns a word with this value, which no other thread can access yet.
            fn from(value: $value) -> Self {
                Self(<$atomic>::new(value))
            }
        }

        impl Published<$atomic> {
            /// Publishes the value; returns the one before. Then look.
            #[inline(always)]
            pub fn publish(&self, value: $value) -> $value {
                let before = self.0.swap(value, Ordering::SeqCst);
                fence_after_rmw();
                before
            }

            /// Publishes the value without the order towards a later look, which may come too early. For a side that
            /// need not notify the other. A look that sees the value acquires the writes before it.
            #[inline(always)]
            pub fn publish_quietly(&self, value: $value) {
                self.0.store(value, Ordering::Release);
            }

            /// Returns what the other side has published. To be called after the own word was published. Acquires the
            /// writes before that publication.
            #[inline(always)]
            pub fn look(&self) -> $value {
                self.0.load(Ordering::SeqCst)
            }

            /// Returns the value, where the other side cannot miss a publication.
            #[inline(always)]
            pub fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            /// Takes the value; leaves the word with nothing published. Acquires the writes of all threads that have
            /// published here.
            #[inline]
            pub fn take(&self) -> $value {
                self.0.swap(<$value>::default(), Ordering::SeqCst)
            }

            /// Sets the value where no other thread uses the word.
            pub fn reset(&self, value: $value) {
                self.0.store(value, Ordering::Relaxed);
            }
        }
    )*};
}

published!(AtomicBool: bool, AtomicU8: u8, AtomicU32: u32, AtomicU64: u64);

macro_rules! published_numbers {
    ($($atomic:ty: $value:ty),*) => {$(
        impl Published<$atomic> {
            /// Publishes these bits, in addition to the bits that are set. Then look.
            #[inline(always)]
            pub fn add_bits(&self, bits: $value) {
                self.0.fetch_or(bits, Ordering::SeqCst);
                fence_after_rmw();
            }

            /// Clears these bits; returns those of them that were set.
            #[inline(always)]
            pub fn take_bits(&self, bits: $value) -> $value {
                self.0.fetch_and(!bits, Ordering::SeqCst) & bits
            }
        }
    )*};
}

published_numbers!(AtomicU32: u32, AtomicU64: u64);

impl Published<AtomicU32> {
    /// Publishes the value if nothing is published. Otherwise returns the word's value as the error, and changes
    /// nothing. Then look.
    pub fn claim(&self, value: u32) -> Result<(), u32> {
        self.0.compare_exchange(0, value, Ordering::SeqCst, Ordering::SeqCst)?;
        fence_after_rmw();
        Ok(())
    }

    /// Adds one to a count, and so publishes it. Then look.
    pub fn add_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Subtracts one that [`add_one`](Self::add_one) has added.
    pub fn take_one(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Publishes a pointer, which releases the value that it points to.
impl<T> Published<AtomicPtr<T>> {
    /// Publishes `new` if the word is `before`; otherwise returns the word's value as the error. May fail without a
    /// reason. Then look.
    pub fn exchange(&self, before: *mut T, new: *mut T) -> Result<(), *mut T> {
        self.0
            .compare_exchange_weak(before, new, Ordering::SeqCst, Ordering::Relaxed)?;
        fence_after_rmw();
        Ok(())
    }

    /// Returns the pointer that the other side has published, and acquires the writes before that.
    pub fn look(&self) -> *mut T {
        self.0.load(Ordering::SeqCst)
    }

    /// Takes the pointer and leaves null, which means that nothing is published.
    pub fn take(&self) -> *mut T {
        self.0.swap(std::ptr::null_mut(), Ordering::SeqCst)
    }
}
