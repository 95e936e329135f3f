//! Shared memory between instances: sealed, sparse memfds and their mappings.
//!
//! A peer's fd is not trusted. Before it is mapped, it is checked: shared memory of the kernel's own, sealed against
//! shrinking, of at least the size that the peer claims. So reading the mapping cannot raise SIGBUS. `fabric` defines
//! the content, and must copy it before it checks it.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

pub use super::extent::Access;
use super::extent::Extent;
use super::lazy;
use super::privatefd::PrivateFd;

/// The type of the file system that holds memfds without huge pages (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The seals that make a mapping safe: the size of the file can never change.
const FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// The reason why a peer's fd was not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The fd is not shared memory: the peer misbehaves.
    #[error("not a memfd")]
    NotMemfd,
    /// The peer could still change the size: it misbehaves.
    #[error("memfd without the seals")]
    NotSealed,
    /// The file is smaller than the peer claims, or the claimed size cannot be mapped: the peer misbehaves.
    #[error("memfd smaller than claimed")]
    Size,
    /// The kernel refused because of this process's own limits.
    #[error("mapping failed: {0}")]
    Kernel(#[from] Errno),
}

/// Mapped shared memory, unmapped when dropped. Other processes write to it at any time, so methods return a pointer
/// and no reference. A fork child inherits the mapping only if it is anonymous.
#[derive(Debug)]
pub struct Mapping(Extent);

impl Mapping {
    /// Returns the address of the first byte, aligned to a page. The pointer is valid as long as the mapping lives.
    pub const fn as_ptr(&self) -> *mut u8 {
        self.0.start().as_ptr()
    }

    /// Returns the size in bytes, as it was asked for.
    pub const fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Frees the whole pages within `range` (bytes), as [`Extent::punch_hole`] does.
    pub fn punch_hole(&self, range: Range<usize>) -> Result<(), Errno> {
        self.0.punch_hole(range)
    }

    /// Releases the memory but keeps the addresses, as [`Extent::neutralise`] does.
    pub fn neutralise(&self) -> Result<(), Errno> {
        // SAFETY: exactly this mapping, into whose memory only references to atomics exist, and those may change at any
        // time.
        unsafe { self.0.neutralise() }
    }

    /// Maps zeroes here in a fork child, as [`Extent::after_fork`] does.
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

    /// Maps private anonymous memory, zeroed. EINVAL for 0 bytes.
    pub fn neutral(bytes: usize) -> Result<Self, Errno> {
        Extent::neutral(bytes).map(Self)
    }

    /// Maps anonymous memory that fork children share, zeroed. EINVAL for 0 bytes.
    pub fn anonymous(bytes: usize) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let start: *mut u8 = lazy::map(bytes, protection, flags, None)?.cast();
        // The kernel never maps at null unless asked to.
        let start = NonNull::new(start).ok_or(Errno::NOMEM)?;
        Ok(Self(Extent::new(start, bytes)))
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
/// `name` shows in /proc/PID/maps. Fails with the kernel's errno (EMFILE, ENOMEM, EINVAL for 0 bytes); EFBIG if files
/// of this process [may not be](file_limit) that large.
pub fn create(name: &str, bytes: u64) -> Result<(PrivateFd, Mapping), Errno> {
    let fd = create_file(name, bytes)?;
    let extent = Extent::of_file(fd.as_fd(), 0, bytes as usize, Access::ReadWrite)?;
    Ok((fd, Mapping(extent)))
}

/// Creates sealed shared memory as [`create`] does, without a mapping.
pub fn create_file(name: &str, bytes: u64) -> Result<PrivateFd, Errno> {
    let fd = unsealed(name, bytes)?;
    fcntl_add_seals(&fd, FIXED_SIZE)?;
    Ok(fd)
}

/// Creates shared memory as [`create`] does, but only the returned mapping can ever write to it: a peer that receives
/// the fd can map it read-only. Needs Linux 5.1; EINVAL before.
pub fn create_read_only_for_peers(name: &str, bytes: u64) -> Result<(PrivateFd, Mapping), Errno> {
    let fd = unsealed(name, bytes)?;
    // Mapped before it is sealed: F_SEAL_FUTURE_WRITE does not affect existing mappings.
    let extent = Extent::of_file(fd.as_fd(), 0, bytes as usize, Access::ReadWrite)?;
    let mapping = Mapping(extent);
    fcntl_add_seals(&fd, FIXED_SIZE | SealFlags::FUTURE_WRITE)?;
    Ok((fd, mapping))
}

/// Returns the most bytes that a file of this process may have, memory files included (RLIMIT_FSIZE). Beyond that size
/// the kernel raises SIGXFSZ, which ends the program.
pub fn file_limit() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

fn unsealed(name: &str, bytes: u64) -> Result<PrivateFd, Errno> {
    mappable(bytes).ok_or(Errno::INVAL)?;
    within_file_limit(bytes)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know NOEXEC_SEAL; later kernels can require it (sysctl vm.memfd_noexec).
    let fd =
        PrivateFd::open(|| memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(name, flags)))?;
    ftruncate(&fd, bytes)?;
    Ok(fd)
}

/// Returns EFBIG if a file may not grow to `bytes`.
pub fn within_file_limit(bytes: u64) -> Result<(), Errno> {
    if bytes > file_limit() {
        return Err(Errno::FBIG);
    }
    Ok(())
}

/// Maps the first `claimed` bytes of an fd that a peer has sent, after checking that it is sealed shared memory.
pub fn map_received(fd: BorrowedFd<'_>, claimed: u64, access: Access) -> Result<Mapping, MapError> {
    let length = mappable(claimed).ok_or(MapError::Size)?;
    check_received(fd, claimed, access)?;
    Ok(Mapping(Extent::of_file(fd, 0, length, access)?))
}

/// Returns whether `fd` is a memfd of any size with the seals. The check involves no file system.
pub fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(FIXED_SIZE))
}

/// Checks that an fd that a peer has sent is shared memory which has at least `claimed` bytes for ever, and that its
/// seals permit `access`. A later mapping can still fail; one that replaces another may have removed that other then.
pub fn check_received(fd: BorrowedFd<'_>, claimed: u64, access: Access) -> Result<(), MapError> {
    mappable(claimed).ok_or(MapError::Size)?;
    // The seals come first: the other calls may wait for the file's file system.
    let seals = fcntl_get_seals(fd).map_err(|_| MapError::NotMemfd)?;
    // Files on most other file systems cannot be sealed. Files on hugetlbfs can, but touching them raises SIGBUS when
    // huge pages run out.
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
    // Checked after the seals: the size cannot change once the file is sealed.
    if u64::try_from(fstat(fd)?.st_size).map_or(true, |size| size < claimed) {
        return Err(MapError::Size);
    }
    Ok(())
}

/// Returns `bytes` if a mapping, and pointer arithmetic in it, can have that size.
fn mappable(bytes: u64) -> Option<usize> {
    usize::try_from(bytes)
        .ok()
        .filter(|n| (1..=isize::MAX as usize).contains(n))
}

#[cfg(test)]
mod tests;
