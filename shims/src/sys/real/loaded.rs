//! The symbols of loaded objects, read from their ELF tables. The library hooks `dlsym`, so it cannot find libc's
//! `dlsym` by `dlsym`. Nor does `dlsym` tell which function an address is.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::slice;

use libc::{Elf64_Phdr, Elf64_Sym, dl_phdr_info};

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
/// The value of `st_info & 15` of a function.
const STT_FUNC: u8 = 2;
/// A bit in DT_VERSYM: the symbol is not the default version of its name.
const HIDDEN: u16 = 0x8000;

/// A loaded object.
pub struct Object<'a> {
    base: usize,
    headers: &'a [Elf64_Phdr],
    path: &'a CStr,
}

/// Calls `visit` with the objects of this namespace in the order in which they were loaded. Returns the first value
/// that `visit` returns, `None` if there is none. Allocates nothing. `visit` must not load or unload objects.
pub fn find<T, V: FnMut(&Object) -> Option<T>>(visit: V) -> Option<T> {
    unsafe extern "C" fn each<T, V: FnMut(&Object) -> Option<T>>(
        info: *mut dl_phdr_info,
        _: usize,
        state: *mut c_void,
    ) -> c_int {
        // SAFETY: `state` is the pair that `find` passes to dl_iterate_phdr, which calls this only while `find` waits
        // for it.
        let (visit, found) = unsafe { &mut *state.cast::<(V, Option<T>)>() };
        // SAFETY: the dynamic linker's own entry, which it keeps during the call; its headers and path stay with it.
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
    // SAFETY: `each` takes the state as the pair that it is, and the pair outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(each::<T, V>), (&raw mut state).cast()) };
    state.1
}

impl Object<'_> {
    /// Returns whether the address lies in the object.
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

    /// Returns the address of the function `name` in its default version; `None` if the object does not export it.
    pub fn function(&self, name: &CStr) -> Option<*mut c_void> {
        let dynamic = self.headers.iter().find(|h| h.p_type == libc::PT_DYNAMIC)?;
        let [mut names, mut symbols, mut hashes, mut versions] = [0; 4];
        let mut entry = self.base.wrapping_add(dynamic.p_vaddr as usize) as *const Dynamic;
        // SAFETY: the dynamic section of a loaded object, which ends in a tag of 0.
        while let Dynamic { tag: 1.., value } = *unsafe { &*entry } {
            // SAFETY: as above.
            let place = match unsafe { (*entry).tag } {
                DT_STRTAB => &mut names,
                DT_SYMTAB => &mut symbols,
                DT_GNU_HASH => &mut hashes,
                DT_VERSYM => &mut versions,
                _ => &mut 0,
            };
            // glibc relocates these addresses in place, but not in the vDSO's table.
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
            // SAFETY: a word of the hash table, within the table's own counts.
            unsafe { *(hashes as *const u32).add(at) }
        };
        // Four words, the Bloom filter in 64-bit words, the buckets, then a chain word for each symbol from `first` on.
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
