//! Socket options as the kernel has them, by the raw system calls, so that no hook is entered.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Level and name.
pub type Name = (c_int, c_int);

/// The value of an option that is an int; `None` where the kernel has no such option. Changes errno.
pub fn get(fd: BorrowedFd<'_>, (level, name): Name) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: a buffer of the right size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            fd.as_raw_fd(),
            level,
            name,
            &raw mut value,
            &raw mut len,
        )
    };
    (result == 0).then_some(value)
}

/// Sets an option that is an int. Changes errno.
pub fn set(fd: BorrowedFd<'_>, (level, name): Name, value: c_int) {
    // SAFETY: as in `get`.
    unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            fd.as_raw_fd(),
            level,
            name,
            &raw const value,
            size_of::<c_int>(),
        );
    }
}

/// How much has to be there before a socket is readable or a receive ends: 1 unless the program says otherwise.
const LOW_WATER: Name = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
/// From where MSG_PEEK looks: -1 unless the program says otherwise.
const PEEK_OFFSET: Name = (libc::SOL_SOCKET, libc::SO_PEEK_OFF);

/// Whether an option may make receiving from the kernel another thing than receiving from a link.
pub fn changes_receiving(option: Name) -> bool {
    [LOW_WATER, PEEK_OFFSET].contains(&option)
}

/// Whether one of those does. An accepted connection has its listener's.
pub fn receives_otherwise(fd: BorrowedFd<'_>) -> bool {
    get(fd, LOW_WATER).is_some_and(|bytes| bytes != 1)
        || get(fd, PEEK_OFFSET).is_some_and(|at| at >= 0)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_low_water_mark_is_seen_and_so_is_its_end() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        assert!(!receives_otherwise(fd));
        set(fd, LOW_WATER, 10);
        assert!(receives_otherwise(fd));
        // 0 stands for 1.
        set(fd, LOW_WATER, 0);
        assert!(!receives_otherwise(fd));
        assert!(changes_receiving(PEEK_OFFSET));
        assert!(!changes_receiving((libc::SOL_SOCKET, libc::SO_KEEPALIVE)));
    }
}
