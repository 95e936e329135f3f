//! The next allocator in the program's search order of symbols, which is usually libc's. `dlsym` finds it, but may
//! itself allocate memory. So until it is found, requests are served from *early memory*, a static array.

use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize};

use libc::size_t;

/// A function of the next library in the search order that has a function of this name.
pub(crate) struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    /// Makes a value for the function `name`, which is not looked up yet.
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            address: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Looks the function up. Returns null if there is none.
    #[cold]
    fn find(&self) -> *mut c_void {
        // SAFETY: the name ends with a zero byte.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Release);
        found
    }

    /// Returns the function's address; null if there is none.
    #[inline]
    pub(crate) fn get(&self) -> *mut c_void {
        let known = self.address.load(Acquire);
        if known.is_null() { self.find() } else { known }
    }
}

/// Declares functions of the C library's names. Each calls the function of its name in the next library that has one,
/// in the loader's search order (RTLD_NEXT). Returns `None` if no library has one.
macro_rules! next {
    ($($(#[$doc:meta])* $name:ident: fn($($arg:ident: $type:ty),*) -> $result:ty = $text:literal;)*) => {
        #[allow(non_upper_case_globals, reason = "named as what they stand for")]
        mod found {
            $(pub(super) static $name: $crate::next::Next = $crate::next::Next::new($text);)*
        }

        /// Looks all these functions up. A later call may be in a place where `dlsym` is not allowed.
        pub(crate) fn find_all() {
            $(found::$name.get();)*
        }

        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As the function of this name in C.
            #[inline]
            pub(crate) unsafe fn $name($($arg: $type),*) -> Option<$result> {
                let function = found::$name.get();
                if function.is_null() {
                    return None;
                }
                // SAFETY: the function of this name has this type.
                let function = unsafe {
                    core::mem::transmute_copy::<*mut c_void, unsafe extern "C" fn($($type),*) -> $result>(&function)
                };
                // SAFETY: by the contract.
                Some(unsafe { function($($arg),*) })
            }
        )*
    };
}
#[cfg(not(test))]
pub(crate) use next;

next! {
    /// malloc(3).
    malloc: fn(size: size_t) -> *mut c_void = c"malloc";
    /// calloc(3).
    calloc: fn(count: size_t, size: size_t) -> *mut c_void = c"calloc";
    /// realloc(3).
    realloc: fn(at: *mut c_void, size: size_t) -> *mut c_void = c"realloc";
    /// free(3).
    free: fn(at: *mut c_void) -> () = c"free";
    /// memalign(3).
    memalign: fn(align: size_t, size: size_t) -> *mut c_void = c"memalign";
    /// posix_memalign(3).
    posix_memalign: fn(to: *mut *mut c_void, align: size_t, size: size_t) -> c_int = c"posix_memalign";
    /// aligned_alloc(3).
    aligned_alloc: fn(align: size_t, size: size_t) -> *mut c_void = c"aligned_alloc";
    /// valloc(3).
    valloc: fn(size: size_t) -> *mut c_void = c"valloc";
    /// pvalloc(3).
    pvalloc: fn(size: size_t) -> *mut c_void = c"pvalloc";
    /// malloc_usable_size(3).
    malloc_usable_size: fn(at: *mut c_void) -> size_t = c"malloc_usable_size";
}

const UNKNOWN: u32 = 0;
const ASKED: u32 = 1;
const KNOWN: u32 = 2;
static STATE: AtomicU32 = AtomicU32::new(UNKNOWN);

/// Returns true if the next allocator can be called. The first call looks it up. Calls during that time, for example
/// from `dlsym`, get false, and have to use [early memory](early).
#[inline]
pub(crate) fn is_known() -> bool {
    STATE.load(Acquire) == KNOWN || find()
}

#[cold]
fn find() -> bool {
    if STATE.compare_exchange(UNKNOWN, ASKED, Acquire, Relaxed).is_err() {
        return STATE.load(Acquire) == KNOWN;
    }
    find_all();
    STATE.store(KNOWN, Release);
    true
}

/// The size of the early memory in bytes.
const EARLY: usize = 256 << 10;
/// The least alignment of a block, in bytes.
const ALIGNED: usize = 16;

#[repr(C, align(4096))]
struct Early(core::cell::UnsafeCell<[u8; EARLY]>);

// SAFETY: `GIVEN` only grows, so each byte belongs to at most one block.
unsafe impl Sync for Early {}

static MEMORY: Early = Early(core::cell::UnsafeCell::new([0; EARLY]));
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// Returns a block of early memory. The block is zeroed, and never freed. Null if not enough memory is left.
#[cold]
pub(crate) fn early(size: usize, align: usize) -> *mut c_void {
    let start = MEMORY.0.get().addr();
    // The word at `ALIGNED` bytes in front of a block holds the block's size.
    let place = |given: usize| {
        let at = (start + given + ALIGNED).checked_next_multiple_of(align.max(ALIGNED))? - start;
        let end = at.checked_add(size)?;
        (end <= EARLY).then_some((at, end))
    };
    let Ok(before) = GIVEN.fetch_update(Relaxed, Relaxed, |given| place(given).map(|(_, end)| end)) else {
        return core::ptr::null_mut();
    };
    let Some((at, _)) = place(before) else {
        return core::ptr::null_mut();
    };
    // SAFETY: the range lies in `MEMORY`, and `GIVEN` has reserved it for this call.
    unsafe {
        let block = MEMORY.0.get().cast::<u8>().add(at);
        block.sub(ALIGNED).cast::<usize>().write(size);
        block.cast()
    }
}

/// Returns the size of a block of early memory in bytes; `None` for any other block.
#[inline]
pub(crate) fn early_size(at: *mut c_void) -> Option<usize> {
    let start = MEMORY.0.get().addr();
    let is_early = at.addr().wrapping_sub(start) < EARLY;
    // SAFETY: the address is a block that `early` has returned, with its size in front.
    is_early.then(|| unsafe { at.cast::<u8>().sub(ALIGNED).cast::<usize>().read() })
}
