//! Reads directories and files in a program that may close any descriptor at any time. `std::fs::read_dir` panics if
//! its descriptor has been closed. (iperf3, for one, closes some descriptors twice.)

use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;

use crate::os::privatefd::PrivateFd;
use crate::scratch;

/// Returns the names in the directory that `dir` is open for, from the current offset on, in the kernel's order
/// (getdents64(2)). Leaves out `.` and `..`.
pub fn names(dir: BorrowedFd<'_>) -> Result<Vec<OsString>, Errno> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(dir, &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    Ok(names)
}

/// Returns the content of the file at `path`. Fails with ENOMEM if there is no memory for it, and with EILSEQ if it is
/// not UTF-8.
pub fn text(path: &str) -> Result<String, Errno> {
    let (content, _) = bytes(path, usize::MAX)?;
    String::from_utf8(content).map_err(|_| Errno::ILSEQ)
}

/// Opens the file at `path` for reading. Does not block if the file is a FIFO.
pub(crate) fn open(path: impl AsRef<Path>) -> Result<PrivateFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    PrivateFd::open(|| rustix::fs::open(path.as_ref(), flags, Mode::empty()))
}

/// Returns the content of the file at `path`, and whether the end of the file was reached: the function stops reading
/// once it has `enough` bytes. Fails with ENOMEM if there is no memory for the content.
pub fn bytes(path: impl AsRef<Path>, enough: usize) -> Result<(Vec<u8>, bool), Errno> {
    read(&open(path)?, enough)
}

/// Returns the content of an open file, as [`bytes`] does.
pub(crate) fn read(file: &PrivateFd, enough: usize) -> Result<(Vec<u8>, bool), Errno> {
    let mut bytes = Vec::new();
    let mut piece = scratch::zeroed(4096).ok_or(Errno::NOMEM)?;
    while bytes.len() < enough {
        match rustix::io::read(file, &mut piece[..]) {
            Ok(0) => return Ok((bytes, true)),
            Ok(n) => {
                bytes.try_reserve(n).map_err(|_| Errno::NOMEM)?;
                bytes.extend_from_slice(piece.get(..n).unwrap_or_default());
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok((bytes, false))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::os::forked::in_child;

    fn open(path: &str) -> Result<OwnedFd, Errno> {
        rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())
    }

    #[test]
    fn the_names_are_those_that_std_finds() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/fabric");
        let mut found = names(open(path).unwrap().as_fd()).unwrap();
        let mut expected: Vec<_> = std::fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
        assert!(found.len() > 5);
    }

    #[test]
    fn a_program_that_closes_what_is_not_its_own_is_survived() {
        static DONE: AtomicBool = AtomicBool::new(false);
        in_child(|| {
            let closer = std::thread::spawn(|| {
                while !DONE.load(Relaxed) {
                    for fd in 3..16 {
                        // SAFETY: no code in this child relies on its descriptors.
                        unsafe { libc::close(fd) };
                    }
                }
            });
            let came = |_| open("/proc/self/task").and_then(|dir| names(dir.as_fd()));
            let failed = (0..20_000).map(came).filter(Result::is_err).count();
            DONE.store(true, Relaxed);
            closer.join().unwrap();
            assert!(failed > 0, "nothing was closed under way");
        });
    }
}
