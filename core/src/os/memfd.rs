//! Shared memory between instances: sealed, sparse memfds and their mappings.
//!
//! A peer's fd is not trusted. Before a process maps it, the process checks that it is shared memory of the kernel's
//! own, sealed against shrinking, with at least as many bytes as the peer claims. So reading the mapping cannot raise
//! SIGBUS. `fabric` defines the content, and has to copy it before checking it.
//!
//! This module has functions that create and check memfds, and [`Extent`], a range of addresses with a file's mapping.
//! It also has [`map`], which maps a file or anonymous memory so that only touched pages take memory.

use core::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, mremap,
    mremap_fixed, munlock, munmap,
};
use rustix::process::{Resource, getrlimit};

use crate::os::privatefd::PrivateFd;

/// The size of a page in bytes, the unit of mappings.
pub const PAGE: usize = 4096;

/// The type of the file system that holds memfds without huge pages (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The seals that make a mapping safe: the size of the file can never change.
const FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// The accesses that a mapping permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Read only; writing raises SIGSEGV.
    ReadOnly,
}

/// The reason why a peer's fd was not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The fd is not shared memory, so the peer misbehaves.
    #[error("not a memfd")]
    NotMemfd,
    /// The peer could still change the size, so it misbehaves.
    #[error("memfd without the seals")]
    NotSealed,
    /// The file is smaller than the peer claims, or the claimed size cannot be mapped: the peer misbehaves.
    #[error("memfd smaller than claimed")]
    Size,
    /// The kernel refused the mapping because of this process's own limits.
    #[error("mapping failed: {0}")]
    Kernel(#[from] Errno),
}

/// Mapped shared memory, unmapped when dropped. Other processes write to it at any time, so methods return a pointer
/// and no reference. A fork child inherits the mapping only if the memory is anonymous, not a file's.
#[derive(Debug)]
pub struct Mapping(Extent);

impl Mapping {
    /// Returns the address of the first byte, aligned to a page. The pointer is valid as long as the mapping lives.
    pub const fn as_ptr(&self) -> *mut u8 {
        self.0.start().as_ptr()
    }

    /// Returns the size in bytes, as the mapping's creator asked for it.
    pub const fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Frees the whole pages within `range` (bytes), as [`Extent::punch_hole`] does.
    pub fn punch_hole(&self, range: Range<usize>) -> Result<(), Errno> {
        self.0.punch_hole(range)
    }

    /// Releases the memory but keeps the addresses, as [`Extent::neutralise`] does.
    pub fn neutralise(&self) -> Result<(), Errno> {
        // SAFETY: exactly this mapping. Only references to atomics exist into its memory, and atomics may change at any
        // time.
        unsafe { self.0.neutralise() }
    }

    /// Maps zeroes at these addresses in a fork child, as [`Extent::after_fork`] does.
    pub fn after_fork(&self) {
        // SAFETY: as in `neutralise`.
        unsafe { self.0.after_fork() };
    }

    /// Replaces this mapping by memory that a peer has sent, after the checks of [`map_received`].
    pub fn show_received(&self, fd: BorrowedFd<'_>, access: Access) -> Result<(), MapError> {
        check_received(fd, self.bytes() as u64, access)?;
        // SAFETY: as in `neutralise`.
        Ok(unsafe { self.0.show(fd, 0, access) }?)
    }

    /// Maps private anonymous memory, zeroed. Fails with EINVAL for 0 bytes.
    pub fn neutral(bytes: usize) -> Result<Self, Errno> {
        Extent::neutral(bytes).map(Self)
    }

    /// Maps anonymous memory that fork children share, zeroed. Fails with EINVAL for 0 bytes.
    pub fn anonymous(bytes: usize) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        Extent::of(map(bytes, protection, flags, None)?, bytes).map(Self)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owned the mapping, and every user of its pointer borrowed this value.
        unsafe { self.0.unmap() };
    }
}

/// Creates sealed shared memory of `bytes` that peers may write to. Pages are allocated when they are touched.
///
/// `name` shows in /proc/PID/maps. Fails with the kernel's errno (EMFILE, ENOMEM, EINVAL for 0 bytes), and with EFBIG
/// if files of this process [may not be](file_limit) that large.
pub fn create_file(name: &str, bytes: u64) -> Result<PrivateFd, Errno> {
    let fd = unsealed(name, bytes)?;
    fcntl_add_seals(&fd, FIXED_SIZE)?;
    Ok(fd)
}

/// Creates shared memory as [`create_file`] does, but only the returned mapping can ever write to it. A peer that
/// receives the fd can map it read-only. Needs Linux 5.1, and fails with EINVAL on older kernels.
pub fn create_read_only_for_peers(name: &str, bytes: u64) -> Result<(PrivateFd, Mapping), Errno> {
    let fd = unsealed(name, bytes)?;
    // The file is mapped before it is sealed, since F_SEAL_FUTURE_WRITE does not affect existing mappings.
    let mapping = Mapping(Extent::of_file(fd.as_fd(), 0, bytes as usize, Access::ReadWrite)?);
    fcntl_add_seals(&fd, FIXED_SIZE | SealFlags::FUTURE_WRITE)?;
    Ok((fd, mapping))
}

/// Returns the most bytes that a file of this process may have, memory files included (RLIMIT_FSIZE). If a process
/// exceeds that size, the kernel raises SIGXFSZ, which ends the program.
pub fn file_limit() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

fn unsealed(name: &str, bytes: u64) -> Result<PrivateFd, Errno> {
    mappable(bytes).ok_or(Errno::INVAL)?;
    if bytes > file_limit() {
        return Err(Errno::FBIG);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know NOEXEC_SEAL; later kernels can require it (sysctl vm.memfd_noexec).
    let fd =
        PrivateFd::open(|| memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(name, flags)))?;
    ftruncate(&fd, bytes)?;
    Ok(fd)
}

/// Maps the first `claimed` bytes of an fd that a peer has sent, after checking that it is sealed shared memory.
pub fn map_received(fd: BorrowedFd<'_>, claimed: u64, access: Access) -> Result<Mapping, MapError> {
    let length = mappable(claimed).ok_or(MapError::Size)?;
    check_received(fd, claimed, access)?;
    Ok(Mapping(Extent::of_file(fd, 0, length, access)?))
}

/// Returns whether `fd` is a memfd of any size that has the seals of `FIXED_SIZE`. The check involves no file system.
pub fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(FIXED_SIZE))
}

/// Checks that an fd that a peer has sent is shared memory which has at least `claimed` bytes for ever, and that its
/// seals permit `access`. A later mapping of the file can still fail. If that call was to replace another mapping, the
/// other mapping may be gone after the failure.
pub fn check_received(fd: BorrowedFd<'_>, claimed: u64, access: Access) -> Result<(), MapError> {
    mappable(claimed).ok_or(MapError::Size)?;
    // The seals are checked first, since the other calls may wait for the file's file system.
    let seals = fcntl_get_seals(fd).map_err(|_| MapError::NotMemfd)?;
    // Files on most file systems other than tmpfs cannot be sealed. Files on hugetlbfs can, but touching them raises
    // SIGBUS when huge pages run out.
    if fstatfs(fd)?.f_type as i64 != TMPFS_MAGIC {
        return Err(MapError::NotMemfd);
    }
    if !seals.contains(FIXED_SIZE) {
        return Err(MapError::NotSealed);
    }
    let read_only = SealFlags::WRITE | SealFlags::FUTURE_WRITE;
    if access == Access::ReadWrite && seals.intersects(read_only) {
        return Err(MapError::Kernel(Errno::PERM));
    }
    // The size is checked after the seals, since it cannot change once the file is sealed.
    if u64::try_from(fstat(fd)?.st_size).map_or(true, |size| size < claimed) {
        return Err(MapError::Size);
    }
    Ok(())
}

/// Returns `bytes` as a `usize` if a mapping can have that size: it is not 0, and pointer offsets can express it.
fn mappable(bytes: u64) -> Option<usize> {
    usize::try_from(bytes)
        .ok()
        .filter(|n| (1..=isize::MAX as usize).contains(n))
}

/// A range of addresses with a mapping. A value of this type is copied freely, and dropping it does nothing: its user
/// [unmaps](Self::unmap) the range. Other processes write to the memory at any time, so methods return a pointer and no
/// reference. The mapping can be replaced without releasing its addresses, and more of the file can be mapped without
/// its descriptor. A fork child does not inherit a file's mapping (MADV_DONTFORK), and core dumps leave it out.
///
/// This type trusts its file. [`check_received`] decides whether a peer's file can be trusted.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a range belongs to the process, not to a thread. This type itself never reads or writes the memory; its users
// synchronise their accesses through the pointer.
unsafe impl Send for Extent {}
// SAFETY: as above; all methods take plain values.
unsafe impl Sync for Extent {}

impl Extent {
    /// Returns the range of `bytes` that begins at `start`. Touches no memory.
    pub const fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Returns the address of the first byte.
    pub const fn start(self) -> NonNull<u8> {
        self.start
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub const fn len(self) -> usize {
        self.bytes
    }

    /// Maps private anonymous memory, which reads as zeroes and can be written.
    pub fn neutral(bytes: usize) -> Result<Self, Errno> {
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
        unsafe { neutral(null_mut(), bytes, MapFlags::empty()) }
    }

    /// Maps `bytes` of a file from `offset` on, at new addresses.
    pub fn of_file(fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> Result<Self, Errno> {
        // SAFETY: as in `neutral`.
        unsafe { file(null_mut(), bytes, MapFlags::empty(), fd, offset, access) }
    }

    /// Maps the file from `offset` on, in place of the range's present mapping.
    ///
    /// # Safety
    /// The caller owns the range, and no references into it exist.
    pub unsafe fn show(self, fd: BorrowedFd<'_>, offset: u64, access: Access) -> Result<(), Errno> {
        let at = self.start.as_ptr();
        // SAFETY: by the contract.
        unsafe { file(at, self.bytes, MapFlags::FIXED, fd, offset, access) }.map(drop)
    }

    /// Releases the memory but keeps the addresses. From then on they read as zeroes and can be written by all code
    /// that still has a pointer into the range.
    ///
    /// # Safety
    /// As for [`show`](Self::show).
    pub unsafe fn neutralise(self) -> Result<(), Errno> {
        // SAFETY: by the contract.
        unsafe { neutral(self.start.as_ptr(), self.bytes, MapFlags::FIXED) }.map(drop)
    }

    /// Maps zeroes in a fork child, which has not inherited this mapping, as [`neutralise`](Self::neutralise) does.
    /// Does nothing if the addresses have been mapped since the fork.
    ///
    /// # Safety
    /// As for [`show`](Self::show).
    pub unsafe fn after_fork(self) {
        // SAFETY: by the contract; MAP_FIXED_NOREPLACE replaces no mapping.
        let _ = unsafe { neutral(self.start.as_ptr(), self.bytes, MapFlags::FIXED_NOREPLACE) };
    }

    /// Makes a mapping of one page and `bytes`: this range's last page once more, and the `bytes` of the file that
    /// follow that page. The kernel chooses the addresses if `over` is `None`. Otherwise the new mapping replaces the
    /// mapping of `over`, which has the same length.
    ///
    /// mremap(2) with an old size of 0 maps the same shared file again, beginning at the file offset of the old
    /// address, with the new size. So no descriptor has to be kept for each peer. The new mapping has the permissions
    /// of this range.
    ///
    /// # Safety
    /// This range is a mapping of a shared file, and the file has these `bytes`. `over` is as for [`show`](Self::show).
    pub unsafe fn followed_by(self, bytes: usize, over: Option<Extent>) -> Result<Self, Errno> {
        let last = self.start.as_ptr().wrapping_add(self.bytes - PAGE).cast();
        let (whole, flags) = (PAGE + bytes, MremapFlags::MAYMOVE);
        // As in `file`: if the program locks its memory (MCL_CURRENT), this range is locked. It is unlocked here, since
        // its copy would be locked too, and filled.
        // SAFETY: the caller owns the range, by the contract.
        let _ = unsafe { munlock(self.start.as_ptr().cast(), self.bytes) };
        // SAFETY: by the contract, the last page of this range is mapped, and the caller owns the range of `over`. The
        // old size 0 leaves this range mapped.
        let start = unsafe {
            match over {
                None => mremap(last, 0, whole, flags)?,
                Some(over) => mremap_fixed(last, 0, whole, flags, over.start.as_ptr().cast())?,
            }
        };
        // The new mapping inherits this range's advice (`file`).
        Self::of(start, whole)
    }

    /// Forbids all access to the range. While access is forbidden, the kernel does not fill the range if the program
    /// locks its memory.
    ///
    /// # Safety
    /// The range is exactly one mapping made by [`of_file`](Self::of_file) or [`followed_by`](Self::followed_by), and
    /// no thread uses it.
    pub unsafe fn shut(self) -> Result<(), Errno> {
        // SAFETY: by the contract.
        unsafe { mprotect(self.start.as_ptr().cast(), self.bytes, MprotectFlags::empty()) }
    }

    /// Permits reads and writes again, after [`shut`](Self::shut) of this range or of the range that it
    /// [follows](Self::followed_by). Limits and the number of mappings cannot make it fail: no address is new, no
    /// mapping is split, and shared memory is charged to its file.
    ///
    /// # Safety
    /// The range is exactly one mapping of the library.
    pub unsafe fn open(self) -> Result<(), Errno> {
        // SAFETY: by the contract.
        unsafe { open(self.start.as_ptr().cast(), self.bytes) }
    }

    /// Allocates the memory of all pages that `range` (bytes) touches, so that no process fails for want of memory when
    /// it writes there. Fails if there is not enough memory.
    ///
    /// Kernels before 5.14 cannot do this (MADV_POPULATE_WRITE). On those kernels this succeeds without allocating.
    pub fn back(self, range: Range<usize>) -> Result<(), Errno> {
        let (first, end) = (range.start & !(PAGE - 1), range.end.next_multiple_of(PAGE));
        if first >= end || end > self.bytes {
            return Err(Errno::INVAL);
        }
        // SAFETY: within the range; the call faults pages in and does not change their content.
        let backed = unsafe {
            madvise(
                self.start.as_ptr().wrapping_add(first).cast(),
                end - first,
                Advice::LinuxPopulateWrite,
            )
        };
        match backed {
            Err(Errno::INVAL) => Ok(()),
            backed => backed,
        }
    }

    /// Frees the whole pages within `range` (bytes), for all processes that map them. They read as zeroes afterwards.
    /// Fails with EINVAL if `range` exceeds the mapping.
    pub fn punch_hole(self, range: Range<usize>) -> Result<(), Errno> {
        if range.end > self.bytes {
            return Err(Errno::INVAL);
        }
        let (first, end) = (range.start.next_multiple_of(PAGE), range.end & !(PAGE - 1));
        if first >= end {
            return Ok(());
        }
        // SAFETY: `first..end` lies within the mapping, whose users hold no references into it.
        unsafe { madvise(self.start.as_ptr().add(first).cast(), end - first, Advice::LinuxRemove) }
    }

    /// Unmaps the range. From then on the kernel may map its addresses for any other purpose.
    ///
    /// # Safety
    /// The caller owns the range, and no thread uses it any more.
    pub unsafe fn unmap(self) {
        // SAFETY: by the contract.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }

    fn of(start: *mut c_void, bytes: usize) -> Result<Self, Errno> {
        // The kernel maps nothing at null unless asked to.
        NonNull::new(start.cast())
            .map(|start| Self { start, bytes })
            .ok_or(Errno::NOMEM)
    }
}

/// # Safety
/// If `flags` have MAP_FIXED, the caller owns the `bytes` from `at` on, and no references into them exist.
unsafe fn neutral(at: *mut u8, bytes: usize, flags: MapFlags) -> Result<Extent, Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = flags | MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: by the contract.
    Extent::of(unsafe { mmap_anonymous(at.cast(), bytes, prot, flags)? }, bytes)
}

/// # Safety
/// As for `neutral`.
unsafe fn file(
    at: *mut u8,
    bytes: usize,
    flags: MapFlags,
    fd: BorrowedFd<'_>,
    offset: u64,
    access: Access,
) -> Result<Extent, Errno> {
    let prot = match access {
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        Access::ReadOnly => ProtFlags::READ,
    };
    let flags = flags | MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: by the contract.
    let start = unsafe { mmap(at.cast(), bytes, prot, flags, fd, offset)? };
    // A fork child is another instance, and must not read what its parent receives. Nor should a core dump hold
    // gigabytes of rings. Both are only advice, so errors are ignored.
    for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
        // SAFETY: exactly the new mapping.
        let _ = unsafe { madvise(start, bytes, advice) };
    }
    // If the program has called mlockall(2), the kernel has locked the mapping. It is unlocked here, since its pages
    // are allocated when they are used (`back`). Also, `followed_by` copies the lock, and the part of the file that it
    // maps must not be filled.
    // SAFETY: as above.
    let _ = unsafe { munlock(start, bytes) };
    Extent::of(start, bytes)
}

// The next two functions make mappings whose pages take memory only once they are touched, even in a process that has
// locked all its future memory (mlockall(2), MCL_FUTURE). In such a process the kernel fills each new mapping at once
// if the mapping permits access. A call with MCL_CURRENT fills all mappings that can be written. So of a long and
// mostly unused mapping only the part in use is made writable (`open`).

/// Maps `bytes` of a file from its beginning, or of anonymous memory if `file` is `None`, at an address that the kernel
/// chooses. Fails with the kernel's errno; EAGAIN if the limit of locked memory is too low.
pub fn map(
    bytes: usize,
    protection: ProtFlags,
    flags: MapFlags,
    file: Option<BorrowedFd<'_>>,
) -> Result<*mut c_void, Errno> {
    let (null, none) = (null_mut(), ProtFlags::empty());
    // The mapping permits no access at first, since the kernel does not fill such a mapping.
    // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
    let start = unsafe {
        match file {
            Some(fd) => mmap(null, bytes, none, flags, fd, 0),
            None => mmap_anonymous(null, bytes, none, flags),
        }
    }?;
    // SAFETY: exactly the new mapping, whose address no other code has yet.
    let opened = unsafe {
        // If munlock is refused, mprotect fills the mapping.
        let _ = munlock(start, bytes);
        mprotect(start, bytes, MprotectFlags::from_bits_retain(protection.bits()))
    };
    if let Err(error) = opened {
        // SAFETY: as above.
        let _ = unsafe { munmap(start, bytes) };
        return Err(error);
    }
    Ok(start)
}

/// Permits reads and writes of the `bytes` from `start` on. Fails with the kernel's errno.
///
/// # Safety
/// The range consists of whole pages, within a mapping that [`map`] has made.
pub unsafe fn open(start: *mut c_void, bytes: usize) -> Result<(), Errno> {
    // SAFETY: by the contract; the range loses no permission.
    unsafe { mprotect(start, bytes, MprotectFlags::READ | MprotectFlags::WRITE) }
}

#[cfg(test)]
mod tests;
