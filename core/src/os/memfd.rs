//! Shared memory between instances: sealed, sparse memfds and their mappings.
//!
//! A peer's fd is not trusted: before it is mapped, it is checked to be shared memory of the kernel's
//! own, sealed against shrinking, of the size that the peer claims. Reading it then cannot raise
//! SIGBUS. What is in it is the fabric's business, which must copy before it checks.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create,
};
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
const FIXED_SIZE: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

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

    /// The addresses.
    pub const fn extent(&self) -> Extent {
        self.0
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
    let fd = PrivateFd::open(|| {
        memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(name, flags))
    })?;
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

/// Whether what a peer has sent is shared memory of at least `claimed` bytes, for ever, and can be mapped like this. If the
/// kernel refuses that where something else is mapped already, that may be gone.
pub fn check_received(fd: BorrowedFd<'_>, claimed: u64, access: Access) -> Result<(), MapError> {
    mappable(claimed).ok_or(MapError::Size)?;
    // Files on other file systems cannot be sealed; those on hugetlbfs can, but touching them raises
    // SIGBUS when huge pages run out.
    if fstatfs(fd)?.f_type as i64 != TMPFS_MAGIC {
        return Err(MapError::NotMemfd);
    }
    let seals = fcntl_get_seals(fd).map_err(|_| MapError::NotMemfd)?;
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
mod tests {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    use rustix::io::{pread, pwrite};

    use super::*;

    fn memfd(bytes: u64, seals: SealFlags) -> PrivateFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let fd = PrivateFd::place(fd).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    fn refusal(fd: impl AsFd, claimed: u64) -> MapError {
        map_received(fd.as_fd(), claimed, Access::ReadWrite).unwrap_err()
    }

    #[test]
    fn two_mappings_are_one_memory() {
        let (fd, mine) = create("rdmasock-test", 1 << 30).unwrap();
        let theirs = map_received(fd.as_fd(), 1 << 30, Access::ReadWrite).unwrap();
        let at = (1 << 30) - 1;
        // SAFETY: within both mappings; nobody else writes.
        unsafe {
            mine.as_ptr().add(at).write(42);
            assert_eq!(theirs.as_ptr().add(at).read(), 42);
        }
        mine.punch_hole(4097..1 << 30).unwrap();
        assert_eq!(fstat(&fd).unwrap().st_blocks, 0);
        // SAFETY: as above.
        unsafe { assert_eq!(theirs.as_ptr().add(at).read(), 0) };
        assert_eq!(mine.punch_hole(0..(1 << 30) + 1), Err(Errno::INVAL));
    }

    #[test]
    fn a_hole_covers_whole_pages_only() {
        let (fd, mine) = create("rdmasock-test", 4 * 4096).unwrap();
        pwrite(&fd, &[7; 4 * 4096], 0).unwrap();
        mine.punch_hole(1..3 * 4096 - 1).unwrap();
        let mut bytes = [0; 4 * 4096];
        pread(&fd, &mut bytes[..], 0).unwrap();
        let zero: Vec<usize> = (0..4).filter(|page| bytes[page * 4096] == 0).collect();
        assert_eq!(zero, [1]);
        mine.punch_hole(5..6).unwrap();
    }

    #[test]
    fn the_size_can_no_longer_be_changed() {
        let (fd, _mapping) = create("rdmasock-test", 8192).unwrap();
        assert_eq!(ftruncate(&fd, 4096), Err(Errno::PERM));
        assert_eq!(ftruncate(&fd, 16384), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
    }

    #[test]
    fn a_file_is_not_made_larger_than_files_may_be() {
        super::super::forked::in_child(|| {
            let limit = rustix::process::Rlimit {
                current: Some(1 << 20),
                maximum: None,
            };
            rustix::process::setrlimit(Resource::Fsize, limit).unwrap();
            // Without a look at the limit this child is killed by SIGXFSZ.
            assert_eq!(
                create("rdmasock-test", (1 << 20) + 1).unwrap_err(),
                Errno::FBIG
            );
            assert!(create("rdmasock-test", 1 << 20).is_ok());
        });
    }

    #[test]
    fn peers_cannot_write_to_what_is_read_only_for_them() {
        let (fd, mine) = create_read_only_for_peers("rdmasock-test", 4096).unwrap();
        assert_eq!(refusal(&fd, 4096), MapError::Kernel(Errno::PERM));
        assert_eq!(pwrite(&fd, b"x", 0), Err(Errno::PERM));
        let theirs = map_received(fd.as_fd(), 4096, Access::ReadOnly).unwrap();
        // SAFETY: within the mappings; nobody else writes.
        unsafe {
            mine.as_ptr().write(9);
            assert_eq!(theirs.as_ptr().read(), 9);
            let raised = rustix::mm::mprotect(
                theirs.as_ptr().cast(),
                4096,
                rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
            );
            assert_eq!(raised, Err(Errno::ACCESS));
        }
    }

    #[test]
    fn what_is_not_sealed_shared_memory_is_refused() {
        for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let fd = memfd(4096, FIXED_SIZE.difference(missing));
            assert_eq!(refusal(&fd, 4096), MapError::NotSealed);
        }
        let fd = memfd(4096, FIXED_SIZE);
        for claimed in [4097, u64::MAX, 0, 1 << 63] {
            assert_eq!(refusal(&fd, claimed), MapError::Size, "{claimed}");
        }
        assert!(map_received(fd.as_fd(), 4096, Access::ReadWrite).is_ok());
        assert!(map_received(fd.as_fd(), 100, Access::ReadWrite).is_ok());

        let null = openat(CWD, "/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
        let exe = openat(CWD, "/proc/self/exe", OFlags::RDONLY, Mode::empty()).unwrap();
        let (pipe, _write_end) = rustix::pipe::pipe().unwrap();
        for fd in [null, exe, pipe] {
            assert!(matches!(
                refusal(fd, 4096),
                MapError::NotMemfd | MapError::NotSealed
            ));
        }
    }

    #[test]
    fn anonymous_memory_is_zeroed() {
        let map = Mapping::anonymous(4096).unwrap();
        // SAFETY: within the mapping, which only this test uses.
        assert_eq!(unsafe { map.as_ptr().add(4095).read() }, 0);
        assert!(Mapping::anonymous(0).is_err());
    }
}
