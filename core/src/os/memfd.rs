//! Shared memory between instances: sealed, sparse memfds and their mappings.
//!
//! A peer's fd is not trusted: before it is mapped, it is checked to be shared memory of the kernel's
//! own, sealed against shrinking, of the size that the peer claims. Reading it then cannot raise
//! SIGBUS. What is in it is the fabric's business, which must copy before it checks.

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

/// The file system that memfds without huge pages live on (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The seals that make a mapping safe: the file keeps its size for ever.
const FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Why a peer's fd was not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The peer sent something else than shared memory: it misbehaves.
    #[error("not a memfd")]
    NotMemfd,
    /// The peer could still change its size: it misbehaves.
    #[error("memfd without the seals")]
    NotSealed,
    /// Smaller than the peer claims, or no sensible size at all: it misbehaves.
    #[error("memfd smaller than claimed")]
    Size,
    /// The kernel refused: our own limits.
    #[error("mapping failed: {0}")]
    Kernel(#[from] Errno),
}

/// Mapped shared memory; unmapped when dropped. Other processes write to it at any time, so it gives
/// out a pointer and no reference. A fork child has it only if it is anonymous.
#[derive(Debug)]
pub struct Mapping(Extent);

impl Mapping {
    /// The first byte, aligned to a page. Valid for as long as the mapping lives.
    pub const fn as_ptr(&self) -> *mut u8 {
        self.0.start().as_ptr()
    }

    /// The size in bytes, as asked for.
    pub const fn bytes(&self) -> usize {
        self.0.len()
    }

    /// As [`Extent::punch_hole`].
    pub fn punch_hole(&self, range: Range<usize>) -> Result<(), Errno> {
        self.0.punch_hole(range)
    }

    /// As [`Extent::neutralise`].
    pub fn neutralise(&self) -> Result<(), Errno> {
        // SAFETY: exactly this mapping, whose memory nobody holds references to but to atomics that may change.
        unsafe { self.0.neutralise() }
    }

    /// As [`Extent::after_fork`].
    pub fn after_fork(&self) {
        // SAFETY: as in `neutralise`.
        unsafe { self.0.after_fork() };
    }

    /// What a peer has sent takes the place of what is mapped here, as by [`map_received`].
    pub fn show_received(&self, fd: BorrowedFd<'_>, access: Access) -> Result<(), MapError> {
        check_received(fd, self.bytes() as u64, access)?;
        // SAFETY: as in `neutralise`.
        Ok(unsafe { self.0.show(fd, 0, access) }?)
    }

    /// Memory of no file and no other process, zeroed. EINVAL for no bytes.
    pub fn neutral(bytes: usize) -> Result<Self, Errno> {
        Extent::neutral(bytes).map(Self)
    }

    /// Anonymous memory that fork children share, zeroed. EINVAL for no bytes.
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
        // SAFETY: this value owned the mapping, and whoever kept its pointer borrowed this value.
        unsafe { self.0.unmap() };
    }
}

/// Creates sealed shared memory of `bytes` that peers may write to; pages come as they are touched.
///
/// `name` shows in /proc/PID/maps. Fails with the kernel's errno (EMFILE, ENOMEM, EINVAL for 0 bytes), EFBIG if it
/// is more than files [may have](file_limit).
pub fn create(name: &str, bytes: u64) -> Result<(PrivateFd, Mapping), Errno> {
    let fd = create_file(name, bytes)?;
    let extent = Extent::of_file(fd.as_fd(), 0, bytes as usize, Access::ReadWrite)?;
    Ok((fd, Mapping(extent)))
}

/// As [`create`], without a mapping.
pub fn create_file(name: &str, bytes: u64) -> Result<PrivateFd, Errno> {
    let fd = unsealed(name, bytes)?;
    fcntl_add_seals(&fd, FIXED_SIZE)?;
    Ok(fd)
}

/// Like [`create`], but only the returned mapping can ever be written through: a peer that is sent the
/// fd can map it to read only. Linux 5.1; EINVAL before.
pub fn create_read_only_for_peers(name: &str, bytes: u64) -> Result<(PrivateFd, Mapping), Errno> {
    let fd = unsealed(name, bytes)?;
    // Mapped before it is sealed: F_SEAL_FUTURE_WRITE leaves existing mappings alone.
    let extent = Extent::of_file(fd.as_fd(), 0, bytes as usize, Access::ReadWrite)?;
    let mapping = Mapping(extent);
    fcntl_add_seals(&fd, FIXED_SIZE | SealFlags::FUTURE_WRITE)?;
    Ok((fd, mapping))
}

/// Bytes that a file of this process may have (RLIMIT_FSIZE), memory or not. Beyond it the kernel raises SIGXFSZ,
/// which ends the program.
pub fn file_limit() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

fn unsealed(name: &str, bytes: u64) -> Result<PrivateFd, Errno> {
    mappable(bytes).ok_or(Errno::INVAL)?;
    within_file_limit(bytes)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know NOEXEC_SEAL, later ones may insist on it (sysctl vm.memfd_noexec).
    let fd =
        PrivateFd::open(|| memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(name, flags)))?;
    ftruncate(&fd, bytes)?;
    Ok(fd)
}

/// EFBIG if a file may not grow to that many bytes.
pub fn within_file_limit(bytes: u64) -> Result<(), Errno> {
    if bytes > file_limit() {
        return Err(Errno::FBIG);
    }
    Ok(())
}

/// Maps the first `claimed` bytes of what a peer has sent as shared memory, after checking that it is.
pub fn map_received(fd: BorrowedFd<'_>, claimed: u64, access: Access) -> Result<Mapping, MapError> {
    let length = mappable(claimed).ok_or(MapError::Size)?;
    check_received(fd, claimed, access)?;
    Ok(Mapping(Extent::of_file(fd, 0, length, access)?))
}

/// Whether this is a memfd with the seals, of any size. The answer involves no file system.
pub fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(FIXED_SIZE))
}

/// Whether what a peer has sent is shared memory of at least `claimed` bytes, for ever, and can be mapped like this. If
/// the kernel refuses that where something else is mapped already, that may be gone.
pub fn check_received(fd: BorrowedFd<'_>, claimed: u64, access: Access) -> Result<(), MapError> {
    mappable(claimed).ok_or(MapError::Size)?;
    // First, as other calls may wait for the file's file system.
    let seals = fcntl_get_seals(fd).map_err(|_| MapError::NotMemfd)?;
    // Files on other file systems cannot be sealed; those on hugetlbfs can, but touching them raises
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
    // Checked after the seals: from there on it cannot change.
    if u64::try_from(fstat(fd)?.st_size).map_or(true, |size| size < claimed) {
        return Err(MapError::Size);
    }
    Ok(())
}

/// A size that a mapping, and pointer arithmetic in it, can have.
fn mappable(bytes: u64) -> Option<usize> {
    usize::try_from(bytes)
        .ok()
        .filter(|n| (1..=isize::MAX as usize).contains(n))
}

#[cfg(test)]
mod tests;
