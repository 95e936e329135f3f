//! libc's own versions of the functions that `preload/` exports under the same names. The table in `hooked.rs` has
//! their types. libc's `dlsym(RTLD_NEXT)` finds them. `dlsym` itself is found in libc's ELF tables.
//!
//! `real::recv()` is libc's `recv`. A hook calls these functions to pass a call through. The shims call them for
//! blocking calls that have to stay cancellation points. The shims' other I/O goes through `rustix`, whose raw system
//! calls never enter the hooks.
//!
//! redhook's `real!` does not serve here. It initialises with `std::sync::Once`. If a signal or a fork interrupts the
//! initialisation, a handler or child that enters the `Once` again hangs. `real!` also panics if libc lacks the symbol.
//! In this file a lookup is one relaxed load, and a function that libc lacks fails with `ENOSYS`.
//!
//! There are two ways to call a function of this file:
//! - `real(…)`, as the last action of a hook that passes through. The call becomes a jump, and the hook costs next to
//!   nothing. After a system call, x86-64 processors mispredict the return from each further frame, which costs about 8
//!   ns.
//! - [`real.cancellable()(…)`](Cancellable), at any other place, for a call that can block.

use core::ffi::CStr;
use core::slice;
use core::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    Elf64_Phdr, Elf64_Sym, FILE, aiocb, c_char, c_int, c_long, c_uint, c_ulong, c_void, dl_phdr_info, epoll_event,
    fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pid_t, pollfd, posix_spawn_file_actions_t, posix_spawnattr_t,
    sigevent, sighandler_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};

/// A symbol of libc. Its address is looked up at first use, and kept.
struct Symbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Symbol {
    /// Returns a symbol that is not looked up yet. `name` ends in its only NUL.
    const fn new(name: &'static str) -> Self {
        let name = match CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => name,
            Err(_) => c"",
        };
        Self {
            name,
            address: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Looks the symbol up and returns its address; null if libc lacks it.
    ///
    /// The function is `extern "C"`, which cannot unwind. Because of a function that may unwind, an unoptimised build
    /// would keep redhook's `catch_unwind` in the hooks. `pthread_cancel` would then abort the process.
    ///
    /// A failure is not kept: the library that has the symbol (librt before glibc 2.34) may be loaded later.
    #[cold]
    #[inline(never)]
    extern "C" fn resolve(&self) -> *mut c_void {
        let address = if self.name == c"dlsym" {
            let mut is_behind = false;
            let next = find(|object| {
                let address = object.function(self.name).filter(|_| is_behind);
                is_behind |= object.is_own();
                address
            });
            next.unwrap_or_default()
        } else {
            // SAFETY: the name is a C string with static lifetime.
            unsafe { dlsym()(libc::RTLD_NEXT, self.name.as_ptr()) }
        };
        self.address.store(address, Ordering::Relaxed);
        address
    }
}

/// A result type of libc functions that report a failure in errno.
pub trait Failure {
    /// The value that means "see errno".
    const FAILURE: Self;
}

impl Failure for c_int {
    const FAILURE: Self = -1;
}

impl Failure for c_long {
    const FAILURE: Self = -1;
}

impl Failure for ssize_t {
    const FAILURE: Self = -1;
}

impl Failure for sighandler_t {
    // SIG_ERR
    const FAILURE: Self = usize::MAX;
}

impl<T> Failure for *mut T {
    const FAILURE: Self = core::ptr::null_mut();
}

impl Failure for () {
    const FAILURE: Self = ();
}

/// The type of a libc function. `ABSENT` is called in place of a function that libc lacks: it fails with `ENOSYS`.
trait Absent {
    const ABSENT: Self;
}

/// The type of a libc function, as `extern "C"`.
pub trait Cancellable {
    /// The type of the same function as `extern "C-unwind"`.
    type Unwinding;

    /// Returns the same function, for a call that can block and is not the last action of the caller. The forced unwind
    /// of `pthread_cancel` then runs the destructors of the frames that it passes. If the call were `extern "C"`, and
    /// its caller had a destructor, the unwind would abort the process.
    fn cancellable(self) -> Self::Unwinding;
}

macro_rules! arity {
    ($($arg:ident)*) => {
        impl<R, $($arg),*> Cancellable for unsafe extern "C" fn($($arg),*) -> R {
            type Unwinding = unsafe extern "C-unwind" fn($($arg),*) -> R;

            #[inline]
            fn cancellable(self) -> Self::Unwinding {
                // SAFETY: function pointers of the same signature, whose ABIs differ only in
                // whether the call may unwind; "C-unwind" assumes less.
                unsafe { core::mem::transmute::<Self, Self::Unwinding>(self) }
            }
        }

        impl<R: Failure, $($arg),*> Absent for unsafe extern "C" fn($($arg),*) -> R {
            const ABSENT: Self = {
                unsafe extern "C" fn absent<R: Failure, $($arg),*>($(_: $arg),*) -> R {
                    crate::sys::errno::set(libc::ENOSYS);
                    R::FAILURE
                }
                absent::<R, $($arg),*>
            };
        }
    };
}

arity!();
arity!(A);
arity!(A B);
arity!(A B C);
arity!(A B C D);
arity!(A B C D E);
arity!(A B C D E F);
arity!(A B C D E F G);

/// Defines a type for each row of the table (`hooked.rs`), and for each symbol a function that returns libc's function
/// for it.
macro_rules! functions {
    ($($module:ident with $libc:ident {$(
        $name:ident $arguments:tt -> $result:ty: $($symbol:ident),* $(| $way:ident $number:ident)*;
    )*})*) => {
        $($(
            #[doc = concat!("The type of libc's function for `", stringify!($name), "`.")]
            #[allow(non_camel_case_types, reason = "the function's name")]
            pub type $name = unsafe extern "C" fn $arguments -> $result;

            $(
                #[doc = concat!("libc's `", stringify!($symbol), "`.")]
                #[inline]
                #[allow(non_snake_case, reason = "libc's name")]
                pub fn $symbol() -> $name {
                    static SYMBOL: Symbol = Symbol::new(concat!(stringify!($symbol), "\0"));

                    // Relaxed is enough: every thread that looks the symbol up finds the same address, and the code
                    // there does not change.
                    let mut address = SYMBOL.address.load(Ordering::Relaxed);
                    if address.is_null() {
                        address = SYMBOL.resolve();
                        if address.is_null() {
                            return <$name as Absent>::ABSENT;
                        }
                    }
                    // SAFETY: libc's function of this name has this signature, and libc is never
                    // unloaded.
                    unsafe { core::mem::transmute::<*mut c_void, $name>(address) }
                }
            )*
        )*)*

        /// Looks up every function. Otherwise a hook might have to do so in a signal handler or a fork child, where
        /// `dlsym` is not allowed.
        pub fn resolve_all() {
            $($($( $symbol(); )*)*)*
        }
    };
}

/// `Lmid_t` of dlfcn.h: a namespace of loaded objects.
pub type Lmid = c_long;

// The functions that are hooked without a row in `hooked.rs`.
crate::hooked! { functions
    preload with real {
        dlopen(path: *const c_char, flags: c_int) -> *mut c_void: dlopen;
        dlmopen(namespace: Lmid, path: *const c_char, flags: c_int) -> *mut c_void: dlmopen;
        dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void: dlsym;
        dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void: dlvsym;
        // The `longjmp` functions do not return.
        longjmp(environment: *mut c_void, value: c_int) -> (): longjmp, _longjmp, siglongjmp, __longjmp_chk;
        // Variadic in C.
        syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long: syscall;
    }
}

// Finds functions in the ELF tables of loaded objects. The library hooks `dlsym`, so it cannot find libc's `dlsym` by
// `dlsym`. Nor does `dlsym` report whether an address belongs to glibc's function.

/// An entry of the dynamic section.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// The value of `st_info & 15` for a function.
const STT_FUNC: u8 = 2;
/// A bit in DT_VERSYM: the symbol is not the default version of its name.
const HIDDEN: u16 = 0x8000;

/// A loaded ELF object: the program or a shared library.
pub struct Object<'a> {
    base: usize,
    headers: &'a [Elf64_Phdr],
    path: &'a CStr,
}

/// Calls `visit` with each object of this namespace, in the order in which they were loaded, until it returns `Some`.
/// Returns that value; `None` if there is none. Allocates nothing. `visit` must not load or unload objects.
pub fn find<T, V: FnMut(&Object) -> Option<T>>(visit: V) -> Option<T> {
    unsafe extern "C" fn each<T, V: FnMut(&Object) -> Option<T>>(
        info: *mut dl_phdr_info,
        _: usize,
        state: *mut c_void,
    ) -> c_int {
        // SAFETY: `state` is the pair that `find` passes to dl_iterate_phdr, which calls this only while `find` waits
        // for it.
        let (visit, found) = unsafe { &mut *state.cast::<(V, Option<T>)>() };
        // SAFETY: `info` is the dynamic linker's entry, which it keeps during this call, with the object's headers and
        // path.
        let object = unsafe {
            Object {
                base: (*info).dlpi_addr as usize,
                headers: slice::from_raw_parts((*info).dlpi_phdr, (*info).dlpi_phnum.into()),
                path: CStr::from_ptr((*info).dlpi_name),
            }
        };
        *found = visit(&object);
        found.is_some().into()
    }
    let mut state = (visit, None);
    // SAFETY: `each` gets a pointer to `state` with the type that it expects, and `state` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(each::<T, V>), (&raw mut state).cast()) };
    state.1
}

impl Object<'_> {
    /// Returns whether the address lies in one of the object's loaded segments.
    pub fn contains(&self, address: usize) -> bool {
        self.headers.iter().any(|h| {
            let start = self.base.wrapping_add(h.p_vaddr as usize);
            h.p_type == libc::PT_LOAD && address.wrapping_sub(start) < h.p_memsz as usize
        })
    }

    /// Returns whether the object is the one that holds this library's own code.
    pub fn is_own(&self) -> bool {
        self.contains(is_glibc as *const () as usize)
    }

    /// Returns whether the object is a part of glibc that has functions with hooks.
    pub fn is_glibc(&self) -> bool {
        is_glibc(self.path.to_bytes())
    }

    /// Returns the path by which the object was loaded; empty for the program itself.
    pub fn path(&self) -> &CStr {
        self.path
    }

    /// Returns the address of the function `name` in its default version; `None` if the object does not export it.
    pub fn function(&self, name: &CStr) -> Option<*mut c_void> {
        let dynamic = self.headers.iter().find(|h| h.p_type == libc::PT_DYNAMIC)?;
        let [mut names, mut symbols, mut hashes, mut versions] = [0; 4];
        let mut entry = self.base.wrapping_add(dynamic.p_vaddr as usize) as *const Dynamic;
        // SAFETY: `entry` is in the dynamic section of a loaded object, which ends in a tag of 0.
        while let Dynamic { tag: 1.., value } = *unsafe { &*entry } {
            // SAFETY: as above.
            let place = match unsafe { (*entry).tag } {
                DT_STRTAB => &mut names,
                DT_SYMTAB => &mut symbols,
                DT_GNU_HASH => &mut hashes,
                DT_VERSYM => &mut versions,
                _ => &mut 0,
            };
            // glibc has added `base` to these addresses, except in the vDSO's dynamic section.
            *place = if value < self.base { value + self.base } else { value };
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
        }
        if names == 0 || symbols == 0 || hashes == 0 {
            return None;
        }
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add((*byte).into()));
        let word = |at: usize| -> u32 {
            // SAFETY: `at` is within the hash table, by the counts in the table itself.
            unsafe { *(hashes as *const u32).add(at) }
        };
        // The hash table has a header of four words, the Bloom filter in 64-bit words, and the buckets. Then comes a
        // chain word for each symbol from `first` on.
        let [count, first, bloom] = [word(0), word(1), word(2)].map(|word| word as usize);
        let buckets = 4 + 2 * bloom;
        let mut index = word(buckets + hash.checked_rem(count as u32)? as usize) as usize;
        while index >= first && index > 0 {
            let link = word(buckets + count + index - first);
            // SAFETY: the hash table counts the symbols, so `index` is one of them. Each has a version word, and its
            // name ends in a NUL.
            let (symbol, version) = unsafe {
                let versions = versions as *const u16;
                let version = if versions.is_null() { 0 } else { *versions.add(index) };
                (&*(symbols as *const Elf64_Sym).add(index), version)
            };
            // SAFETY: as above.
            let is_it = || unsafe { CStr::from_ptr((names + symbol.st_name as usize) as *const c_char) } == name;
            let is_defined = symbol.st_shndx != 0 && symbol.st_info & 15 == STT_FUNC && version & HIDDEN == 0;
            if link | 1 == hash | 1 && is_defined && is_it() {
                return Some(self.base.wrapping_add(symbol.st_value as usize) as *mut c_void);
            }
            if link & 1 != 0 {
                break;
            }
            index += 1;
        }
        None
    }
}

fn is_glibc(path: &[u8]) -> bool {
    let file = path.rsplit(|byte| *byte == b'/').next();
    [&b"libc.so.6"[..], b"libpthread.so.0", b"librt.so.1"]
        .map(Some)
        .contains(&file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_of_libc_is_where_dlsym_finds_it() {
        for name in [
            c"recv",
            c"send",
            c"dlsym",
            c"posix_spawn",
            c"syscall",
            c"no_such_function",
        ] {
            // SAFETY: a C string.
            let expected = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            let mut seen = Vec::new();
            find(|object| {
                if object.is_glibc() {
                    seen.extend(object.function(name));
                }
                None::<()>
            });
            assert_eq!(seen.first().copied().unwrap_or_default(), expected, "{name:?}");
        }
    }

    #[test]
    fn own_object_is_found_once() {
        let mut own = 0;
        find(|object| {
            own += usize::from(object.is_own());
            None::<()>
        });
        assert_eq!(own, 1);
    }
}
