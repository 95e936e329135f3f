//! Socket options as the kernel has them, by the raw system calls, so that no hook is entered.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

use rdmasock_core::os::kernel;

/// Level and name.
pub type Name = (c_int, c_int);

/// The value of an option that is an int; `None` where the kernel has no such option.
pub fn get(fd: BorrowedFd<'_>, (level, name): Name) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: a buffer of the right size.
    unsafe { read(fd.as_raw_fd(), (level, name), &raw mut value, &mut len) }.then_some(value)
}

/// Reads an option into what `value` points to. False where the kernel refuses.
///
/// # Safety
/// `value` is valid for writes of `len` bytes.
pub unsafe fn read<T>(
    fd: c_int,
    (level, name): Name,
    value: *mut T,
    len: &mut libc::socklen_t,
) -> bool {
    // SAFETY: by the contract; the kernel writes no more than `len` says.
    let result = unsafe {
        kernel::call(
            libc::SYS_getsockopt,
            [
                fd as usize,
                level as usize,
                name as usize,
                kernel::address(value),
                kernel::address(std::ptr::from_mut(len)),
                0,
            ],
        )
    };
    result.is_ok()
}

/// Whether TCP's peer may still send: it has not ended its direction, and the connection is not over.
pub fn is_open_to_peer(fd: BorrowedFd<'_>) -> bool {
    // ESTABLISHED, SYN_SENT, SYN_RECV, FIN_WAIT1 and FIN_WAIT2 (Linux, tcp_states.h). The state is the first byte of TCP_INFO.
    let mut state = 0u8;
    let mut len = 1 as libc::socklen_t;
    // SAFETY: a buffer of the right size; the kernel writes no more than that.
    let known = unsafe { read(fd.as_raw_fd(), STATE, &raw mut state, &mut len) };
    known && (1..=5).contains(&state)
}

/// Sets an option that is an int.
pub fn set(fd: BorrowedFd<'_>, (level, name): Name, value: c_int) {
    // SAFETY: as in `get`.
    let _ = unsafe {
        kernel::call(
            libc::SYS_setsockopt,
            [
                fd.as_raw_fd() as usize,
                level as usize,
                name as usize,
                kernel::address(&raw const value),
                size_of::<c_int>(),
                0,
            ],
        )
    };
}

/// The connection's state and more.
const STATE: Name = (libc::IPPROTO_TCP, libc::TCP_INFO);
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

/// Whether urgent data is next in TCP (tcp(7), SIOCATMARK).
pub fn is_at_mark(fd: BorrowedFd<'_>) -> bool {
    const SIOCATMARK: usize = 0x8905;
    let mut at: c_int = 0;
    // SAFETY: the system call writes an int.
    let known = unsafe {
        kernel::call(
            libc::SYS_ioctl,
            [
                fd.as_raw_fd() as usize,
                SIOCATMARK,
                kernel::address(&raw mut at),
                0,
                0,
                0,
            ],
        )
    };
    known.is_ok() && at != 0
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_the_peer_ends_its_direction() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        let has_ended = || crate::ready::has_peer_ended(ours.as_fd());
        assert!(!has_ended());
        ours.shutdown(Shutdown::Read).unwrap();
        assert!(!has_ended());
        ours.shutdown(Shutdown::Both).unwrap();
        assert!(!has_ended());
        theirs.shutdown(Shutdown::Write).unwrap();
        while !has_ended() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

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
