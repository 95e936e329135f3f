//! `LOCALNIC=pins`: checks whether memory is still the memory that was registered. A real device keeps the pages from
//! the registration on, and knows no addresses of the process. This device reaches memory by addresses. So without this
//! check it would also reach memory that the program maps in place of registered memory, and would hide that mistake.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
/// Bits of an entry of pagemap(5): the page is in memory, and its frame number.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Makes the pages present, as pinning does, and returns a hash of their frames (never 0). `None` if the process may
/// not read frame numbers (it needs CAP_SYS_ADMIN).
pub fn pin(start: u64, len: u64) -> Option<u64> {
    let (from, end) = (start / PAGE * PAGE, (start + len).next_multiple_of(PAGE));
    let at = std::ptr::with_exposed_provenance_mut::<libc::c_void>(from as usize);
    // SAFETY: the call only makes pages present. Pages that cannot be written are made present for reading.
    unsafe {
        if libc::madvise(at, (end - from) as usize, libc::MADV_POPULATE_WRITE) != 0 {
            libc::madvise(at, (end - from) as usize, libc::MADV_POPULATE_READ);
        }
    }
    pages(None, start, len)
}

/// Returns a hash of the page frames there, in the process `pid` or in this one; `None` if they cannot be read.
pub fn pages(pid: Option<i32>, start: u64, len: u64) -> Option<u64> {
    let path = pid.map_or("/proc/self/pagemap".to_owned(), |pid| format!("/proc/{pid}/pagemap"));
    let (first, end) = (start / PAGE, (start + len).div_ceil(PAGE));
    let mut entries = vec![0; (end - first) as usize * size_of::<u64>()];
    File::open(path)
        .ok()?
        .read_exact_at(&mut entries, first * size_of::<u64>() as u64)
        .ok()?;
    let mut hasher = DefaultHasher::new();
    let mut is_known = true;
    for entry in entries.chunks_exact(size_of::<u64>()) {
        let entry = u64::from_ne_bytes(entry.try_into().ok()?);
        let frame = if entry & PRESENT == 0 { 0 } else { entry & FRAME };
        is_known &= entry & PRESENT == 0 || frame != 0;
        hasher.write_u64(frame);
    }
    // 0 stands for memory without a hash.
    is_known.then(|| hasher.finish() | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_memory_at_the_same_place_is_told_from_what_was_there() {
        const LEN: usize = 8 * PAGE as usize;
        let map = |at: *mut libc::c_void, how| {
            let (access, how) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | how,
            );
            // SAFETY: at an address that the kernel chooses, or in place of a mapping that this closure has made.
            unsafe { libc::mmap(at, LEN, access, how, -1, 0) }
        };
        let at = map(std::ptr::null_mut(), 0);
        let start = at.expose_provenance() as u64;
        let me = Some(std::process::id() as i32);
        let before = pin(start + 100, 5 * PAGE).expect("root may know pages");
        // SAFETY: mapped just before.
        unsafe { at.cast::<u8>().add(5000).write(1) };
        assert_eq!(pages(me, start + 100, 5 * PAGE), Some(before));
        map(at, libc::MAP_FIXED);
        assert_ne!(pages(me, start + 100, 5 * PAGE), Some(before));
        assert_ne!(pin(start + 100, 5 * PAGE), Some(before));
    }
}
