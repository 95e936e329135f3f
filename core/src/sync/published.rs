//! A word that one side publishes, and the other looks at ([`Published`]).

use super::words::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence_after_rmw};

/// Two sides with a word each: who publishes and then [looks](Self::look) at the other's word sees what that side
/// published before it looked here, or is seen by it. What was written before is released to whoever looks.
///
/// As in memory: the atomic alone, 0 being nothing said.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Published<A>(A);

macro_rules! published {
    ($($atomic:ty: $value:ty),*) => {$(
        impl From<$value> for Published<$atomic> {
            /// A word with this value, of which nobody knows yet.
            fn from(value: $value) -> Self {
                Self(<$atomic>::new(value))
            }
        }

        impl Published<$atomic> {
            /// From now on it has this value; gives the one before. Then look.
            #[inline(always)]
            pub fn publish(&self, value: $value) -> $value {
                let before = self.0.swap(value, Ordering::SeqCst);
                fence_after_rmw();
                before
            }

            /// The same for whoever looks, but a look after this may come too soon: nobody is to be told.
            #[inline(always)]
            pub fn publish_quietly(&self, value: $value) {
                self.0.store(value, Ordering::Release);
            }

            /// What the other side has published: to be called after one's own word was. Acquires what was written
            /// before.
            #[inline(always)]
            pub fn look(&self) -> $value {
                self.0.load(Ordering::SeqCst)
            }

            /// The value, where nothing was published that the other side might miss.
            #[inline(always)]
            pub fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            /// Takes the value; leaves nothing said. Acquires what was written by all who have published here.
            #[inline]
            pub fn take(&self) -> $value {
                self.0.swap(<$value>::default(), Ordering::SeqCst)
            }

            /// Sets the value where nobody else uses the word.
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
            /// Publishes these bits, beside those that are set. Then look.
            #[inline(always)]
            pub fn add_bits(&self, bits: $value) {
                self.0.fetch_or(bits, Ordering::SeqCst);
                fence_after_rmw();
            }

            /// Takes these bits away; gives those of them that were set.
            #[inline(always)]
            pub fn take_bits(&self, bits: $value) -> $value {
                self.0.fetch_and(!bits, Ordering::SeqCst) & bits
            }
        }
    )*};
}

published_numbers!(AtomicU32: u32, AtomicU64: u64);

impl Published<AtomicU32> {
    /// Publishes the value if nothing was said; else gives what was, and nothing has changed. Then look.
    pub fn claim(&self, value: u32) -> Result<(), u32> {
        self.0.compare_exchange(0, value, Ordering::SeqCst, Ordering::SeqCst)?;
        fence_after_rmw();
        Ok(())
    }

    /// Publishes one more. Then look.
    pub fn add_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// One less, of those that were added.
    pub fn take_one(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What is published is where something is, which is released with it.
impl<T> Published<AtomicPtr<T>> {
    /// Publishes `new` if `before` is what was said; else gives what is. May fail without a reason. Then look.
    pub fn exchange(&self, before: *mut T, new: *mut T) -> Result<(), *mut T> {
        self.0
            .compare_exchange_weak(before, new, Ordering::SeqCst, Ordering::Relaxed)?;
        fence_after_rmw();
        Ok(())
    }

    /// As for words.
    pub fn look(&self) -> *mut T {
        self.0.load(Ordering::SeqCst)
    }

    /// As for words; null is nothing said.
    pub fn take(&self) -> *mut T {
        self.0.swap(std::ptr::null_mut(), Ordering::SeqCst)
    }
}
