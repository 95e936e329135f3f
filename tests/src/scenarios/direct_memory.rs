//! Direct transfers (see `direct`) from and into memory that is other memory at each call, at the same address. A
//! device with a registration from the call before would read old bytes, or write new ones into the old pages.

use libc::c_int;

use super::direct::{FILL, Flow, LARGE, assert_filled};
use crate::ctx::Ctx;
use crate::data::Rng;
use crate::sys;

/// A range of addresses that stays the same.
pub struct Place {
    at: *mut u8,
    len: usize,
}

/// A change of the memory at a place.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// munmap, then mmap.
    Unmap,
    /// mmap in its place.
    Replace,
    /// Other memory is moved to the place.
    MoveHere,
    /// The memory is moved to another place, and other memory comes.
    MoveAway,
    /// The pages of the memory are dropped.
    Drop,
    /// Half of the pages are dropped.
    DropHalf,
    /// The memory cannot be reached for a moment.
    Protect,
    /// A file is mapped in its place; the test reads the file by another mapping.
    File,
}

pub const CHANGES: [Change; 8] = [
    Change::Unmap,
    Change::Replace,
    Change::MoveHere,
    Change::MoveAway,
    Change::Drop,
    Change::DropHalf,
    Change::Protect,
    Change::File,
];

const ACCESS: c_int = libc::PROT_READ | libc::PROT_WRITE;
const PRIVATE: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// The functions that change memory, by libc or past it.
#[derive(Clone, Copy)]
pub struct Calls {
    /// Whether the calls are made by `syscall`.
    pub is_raw: bool,
}

impl Calls {
    fn map(self, at: *mut u8, len: usize, how: c_int, fd: c_int) -> *mut u8 {
        let mapped = if self.is_raw {
            // These are 64 bits wide: a C int would leave half of its place as it was.
            let (access, how, fd) = (i64::from(ACCESS), i64::from(how), i64::from(fd));
            call!(libc::syscall(libc::SYS_mmap, at, len, access, how, fd, 0_i64))
        } else {
            call!(libc::mmap(at.cast(), len, ACCESS, how, fd, 0))
        };
        assert!(!mapped.failed(), "{mapped}");
        std::ptr::with_exposed_provenance_mut(mapped.value as usize)
    }

    /// munmap(2).
    pub fn unmap(self, at: *mut u8, len: usize) {
        if self.is_raw {
            call!(libc::syscall(libc::SYS_munmap, at, len)).ok();
        } else {
            call!(libc::munmap(at.cast(), len)).ok();
        }
    }

    fn move_to(self, from: *mut u8, len: usize, to: *mut u8) {
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if self.is_raw {
            assert!(!call!(libc::syscall(libc::SYS_mremap, from, len, len, i64::from(how), to)).failed());
        } else {
            assert!(!call!(libc::mremap(from.cast(), len, len, how, to)).failed());
        }
    }

    fn drop_pages(self, at: *mut u8, len: usize) {
        if self.is_raw {
            call!(libc::syscall(
                libc::SYS_madvise,
                at,
                len,
                i64::from(libc::MADV_DONTNEED)
            ))
            .ok();
        } else {
            call!(libc::madvise(at.cast(), len, libc::MADV_DONTNEED)).ok();
        }
    }

    fn protect(self, at: *mut u8, len: usize, access: c_int) {
        if self.is_raw {
            call!(libc::syscall(libc::SYS_mprotect, at, len, i64::from(access))).ok();
        } else {
            call!(libc::mprotect(at.cast(), len, access)).ok();
        }
    }
}

impl Place {
    fn new(len: usize) -> Self {
        let at = Calls { is_raw: false }.map(std::ptr::null_mut(), len, PRIVATE, -1);
        Self { at, len }
    }

    /// Returns the place of mapped memory.
    pub fn at(at: *mut u8, len: usize) -> Self {
        Self { at, len }
    }

    /// Returns the address of the place, and its bytes.
    pub fn span(&self) -> (*mut u8, usize) {
        (self.at, self.len)
    }

    /// Returns the memory at the place.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped, and no other reference leads there.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }

    /// Replaces the memory. Returns another place at which the new or old memory can be seen, if there is one.
    pub fn change(&mut self, change: Change, calls: Calls) -> Option<Place> {
        let Place { at, len } = *self;
        let anywhere = std::ptr::null_mut();
        match change {
            Change::Unmap => {
                calls.unmap(at, len);
                // If another thread has mapped memory there meanwhile, the place moves.
                self.at = calls.map(at, len, PRIVATE, -1);
                None
            }
            Change::Replace => {
                calls.map(at, len, PRIVATE | libc::MAP_FIXED, -1);
                None
            }
            Change::MoveHere => {
                let other = calls.map(anywhere, len, PRIVATE, -1);
                calls.move_to(other, len, at);
                None
            }
            Change::MoveAway => {
                let mut moved = Place::new(len);
                calls.move_to(at, len, moved.at);
                self.at = calls.map(at, len, PRIVATE, -1);
                moved.bytes().fill(FILL);
                // The caller checks it when the next call has returned.
                Some(moved)
            }
            Change::Drop => {
                calls.drop_pages(at, len);
                None
            }
            Change::DropHalf => {
                calls.drop_pages(at.wrapping_add(len / 2), len / 2);
                None
            }
            Change::Protect => {
                calls.protect(at, len, libc::PROT_NONE);
                calls.protect(at, len, ACCESS);
                None
            }
            Change::File => {
                let fd = call!(libc::memfd_create(c"scenario".as_ptr(), libc::MFD_CLOEXEC)).ok();
                call!(libc::ftruncate(fd, len as i64)).ok();
                calls.map(at, len, libc::MAP_SHARED | libc::MAP_FIXED, fd);
                let seen = calls.map(anywhere, len, libc::MAP_SHARED, fd);
                sys::close(fd).ok();
                Some(Place { at: seen, len })
            }
        }
    }
}

/// Makes a transfer of `len` bytes with this memory.
pub fn transfer(flow: &mut Flow<'_>, memory: &mut [u8]) {
    if !flow.reads {
        if !flow.is_lent {
            std::thread::sleep(std::time::Duration::from_micros(300));
        }
        flow.send_from(memory);
        return;
    }
    let len = memory.len();
    if flow.is_lent {
        return flow.receive_all(len);
    }
    let mut got = 0;
    memory.fill(FILL);
    while got < len {
        let r = sys::recv(flow.fd, &mut memory[..len - got], libc::MSG_WAITALL);
        assert!(r.value > 0, "{r}");
        flow.check(r, &*memory);
        memory[..r.count()].fill(FILL);
        got += r.count();
    }
}

/// Each call uses the same place, whose memory is replaced before each, on both ends.
pub fn same_place(c: &Ctx) {
    at_same_place(Flow::begin(c));
}

/// As [`same_place`], where the reader's device reads from the place.
pub fn same_place_lent(c: &Ctx) {
    at_same_place(Flow::lent(c));
}

fn at_same_place(mut flow: Flow<'_>) {
    let mut rng = Rng::new(if flow.reads { 31 } else { 37 });
    let mut lens = Rng::new(41);
    flow.play(|flow| {
        let mut place = Place::new(LARGE);
        for n in 0..240_usize {
            let calls = Calls { is_raw: n % 2 == 1 };
            let change = CHANGES[rng.below(CHANGES.len() as u64) as usize];
            let elsewhere = place.change(change, calls);
            let len = (LARGE >> lens.below(4)) - lens.below(5000) as usize;
            transfer(flow, &mut place.bytes()[..len]);
            if let Some(mut other) = elsewhere {
                if matches!(change, Change::File) {
                    assert!(place.bytes() == other.bytes(), "the file has what the call has left");
                } else {
                    assert_filled(other.bytes());
                }
                calls.unmap(other.at, other.len);
            }
        }
        Calls { is_raw: false }.unmap(place.at, place.len);
    });
    flow.end();
}

/// Each call uses memory of malloc, which malloc itself returns to the kernel.
pub fn heap(c: &Ctx) {
    in_heap(Flow::begin(c));
}

/// As [`heap`], where the reader's device reads from the memory.
pub fn heap_lent(c: &Ctx) {
    in_heap(Flow::lent(c));
}

fn in_heap(mut flow: Flow<'_>) {
    let mut lens = Rng::new(43);
    flow.play(|flow| {
        for n in 0..240_usize {
            if n % 60 == 0 {
                // The blocks lie in the heap that brk moves, and in mappings of their own.
                let least = if n % 120 == 0 { 64 << 20 } else { 64 << 10 };
                call!(libc::mallopt(libc::M_MMAP_THRESHOLD, least));
                call!(libc::mallopt(libc::M_TRIM_THRESHOLD, 4096));
            }
            let len = (LARGE >> lens.below(4)) - lens.below(5000) as usize;
            // SAFETY: malloc returned `len` bytes, and no other reference leads there.
            let memory = unsafe {
                let at = libc::malloc(len).cast::<u8>();
                assert!(!at.is_null());
                at.write_bytes(FILL, len);
                std::slice::from_raw_parts_mut(at, len)
            };
            transfer(flow, memory);
            // SAFETY: returned by malloc, and freed once.
            unsafe { libc::free(memory.as_mut_ptr().cast()) };
            if n % 3 == 0 {
                call!(libc::malloc_trim(0));
            }
        }
    });
    flow.end();
}
