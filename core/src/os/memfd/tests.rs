//! Tests of sealed memory: which files can be mapped, what a peer cannot do to them, and that under mlockall only
//! touched pages take memory.

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::{pread, pwrite};

use crate::os::forked::in_child;
use crate::os::memfd::*;

fn memfd(bytes: u64, seals: SealFlags) -> PrivateFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let fd = PrivateFd::place(fd).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn created(name: &str, bytes: u64) -> Result<(PrivateFd, Mapping), MapError> {
    let fd = create_file(name, bytes)?;
    let mapping = map_received(fd.as_fd(), bytes, Access::ReadWrite)?;
    Ok((fd, mapping))
}

fn refusal(fd: impl AsFd, claimed: u64) -> MapError {
    map_received(fd.as_fd(), claimed, Access::ReadWrite).unwrap_err()
}

#[test]
fn two_mappings_are_one_memory() {
    let (fd, mine) = created("rdmasock-test", 1 << 30).unwrap();
    let theirs = map_received(fd.as_fd(), 1 << 30, Access::ReadWrite).unwrap();
    let at = (1 << 30) - 1;
    // SAFETY: within both mappings; no other thread writes there.
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
    let (fd, mine) = created("rdmasock-test", 4 * 4096).unwrap();
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
    let (fd, _mapping) = created("rdmasock-test", 8192).unwrap();
    assert_eq!(ftruncate(&fd, 4096), Err(Errno::PERM));
    assert_eq!(ftruncate(&fd, 16384), Err(Errno::PERM));
    assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
}

#[test]
fn a_file_is_not_made_larger_than_files_may_be() {
    crate::os::forked::in_child(|| {
        let limit = rustix::process::Rlimit {
            current: Some(1 << 20),
            maximum: None,
        };
        rustix::process::setrlimit(Resource::Fsize, limit).unwrap();
        // Without the check of the limit, SIGXFSZ would kill this child.
        assert_eq!(create_file("rdmasock-test", (1 << 20) + 1).unwrap_err(), Errno::FBIG);
        assert!(create_file("rdmasock-test", 1 << 20).is_ok());
    });
}

#[test]
fn peers_cannot_write_to_what_is_read_only_for_them() {
    let (fd, mine) = create_read_only_for_peers("rdmasock-test", 4096).unwrap();
    assert_eq!(refusal(&fd, 4096), MapError::Kernel(Errno::PERM));
    assert_eq!(pwrite(&fd, b"x", 0), Err(Errno::PERM));
    let theirs = map_received(fd.as_fd(), 4096, Access::ReadOnly).unwrap();
    // SAFETY: within the mappings; no other thread writes there.
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
        assert!(matches!(refusal(fd, 4096), MapError::NotMemfd | MapError::NotSealed));
    }
}

#[test]
fn anonymous_memory_is_zeroed() {
    let map = Mapping::anonymous(4096).unwrap();
    // SAFETY: within the mapping, which only this test uses.
    assert_eq!(unsafe { map.as_ptr().add(4095).read() }, 0);
    assert!(Mapping::anonymous(0).is_err());
}

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn only_what_is_touched_is_filled_where_memory_is_locked() {
    in_child(|| {
        // SAFETY: affects the mappings of this child only.
        if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
            println!("skipped: no memory may be locked");
            return;
        }
        const BYTES: usize = 64 << 20;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let Ok(start) = map(BYTES, both, MapFlags::PRIVATE, None) else {
            println!("skipped: not that much memory may be locked");
            return;
        };
        let before = resident();
        // SAFETY: the byte lies within the mapping, which is writable.
        unsafe { start.cast::<u8>().add(BYTES - 1).write(1) };
        assert!(resident() < before + 1000 && before < BYTES / 4096);
    });
}
