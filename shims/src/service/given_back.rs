//! What a peer gives back of the data that it has taken out of TCP (P85).

use std::os::fd::AsFd;

use rdmasock_core::os::memfd;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stream::connection::MOST_ASIDE;

/// The data, as the peer says that it is; `None` if it is not.
pub(super) fn read(bytes: u32, file: &PrivateFd) -> Option<Vec<u8>> {
    // Nothing that could make this thread wait, nor a file that shrinks.
    memfd::check_received(file.as_fd(), bytes.into(), memfd::Access::ReadOnly).ok()?;
    let len = usize::try_from(bytes).ok().filter(|n| *n <= MOST_ASIDE)?;
    let mut read = Vec::new();
    read.try_reserve_exact(len).ok()?;
    read.resize(len, 0);
    let mut at = 0;
    while let Some(rest) = read.get_mut(at..).filter(|rest| !rest.is_empty()) {
        at += rustix::io::pread(file, rest, at as u64).ok().filter(|n| *n > 0)?;
    }
    Some(read)
}

/// What a peer gives back is data, whatever it sends.
#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};

    use super::*;

    fn file(bytes: &[u8]) -> PrivateFd {
        let file = memfd::create_file("test-back", bytes.len() as u64).unwrap();
        assert_eq!(rustix::io::write(&file, bytes), Ok(bytes.len()));
        file
    }

    #[test]
    fn a_file_is_read_from_its_beginning_wherever_the_peer_has_left_it() {
        assert_eq!(read(4, &file(b"unread")), Some(b"unre".to_vec()));
    }

    /// What is no memfd might keep the service thread waiting, and one that is not sealed could shrink.
    #[test]
    fn nothing_but_a_sealed_file_of_that_size_is_read() {
        let device = PrivateFd::open(|| open("/dev/zero", OFlags::RDONLY, Mode::empty()));
        assert_eq!(read(1, &device.unwrap()), None);
        let unsealed = PrivateFd::open(|| memfd_create("test-back", MemfdFlags::ALLOW_SEALING));
        let unsealed = unsealed.unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert_eq!(read(1, &unsealed), None);
        assert_eq!(read(7, &file(b"unread")), None);
        assert_eq!(read(0, &file(b"unread")), None);
        let large = memfd::create_file("test-back", MOST_ASIDE as u64 + 1).unwrap();
        assert_eq!(read(MOST_ASIDE as u32 + 1, &large), None);
    }
}
