//! Receiving from the error queue (MSG_ERRQUEUE of recvmsg(2)), which never waits. It is the kernel's, but for one
//! thing: what it tells of sends with MSG_ZEROCOPY is put right by what it does not know, where some of them were made
//! on links (`completions`).

use std::sync::atomic::Ordering::SeqCst;

use rdmasock_core::os::kernel;
use rdmasock_core::stream::connection::{SocketIo as _, Task};

use crate::errno;
use crate::jump::within;
use crate::ready;
use crate::socket::completions::Completed;
use crate::socket::{KERNELS_ERRORS, Socket};
use crate::sockopt;

use libc::{c_int, c_void, msghdr, size_t, sock_extended_err, sockaddr, socklen_t, ssize_t};

/// SO_EE_ORIGIN_ZEROCOPY (linux/errqueue.h).
const ORIGIN_ZEROCOPY: u8 = 5;

/// More than the kernel has to say of one error: that, the address it is of, time stamps, options of the packet.
const CONTROL: usize = 512;

/// Control data, aligned as the kernel's headers are.
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

const HEADER: usize = size_of::<libc::cmsghdr>();

/// recv(2).
///
/// # Safety
/// The buffer is writable.
#[cold]
pub unsafe fn receive(
    socket: &'static Socket,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    plain: impl Fn() -> ssize_t,
) -> ssize_t {
    // SAFETY: by the contract.
    unsafe {
        receive_from(
            socket,
            buf,
            len,
            flags,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            plain,
        )
    }
}

/// recvfrom(2).
///
/// # Safety
/// The buffer and the address, if there is one, are writable.
#[cold]
pub unsafe fn receive_from(
    socket: &'static Socket,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
    plain: impl Fn() -> ssize_t,
) -> ssize_t {
    let mut piece = libc::iovec {
        iov_base: buf,
        iov_len: len,
    };
    // SAFETY: a plain struct.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
    let is_asked = !address.is_null() && !address_len.is_null();
    if is_asked {
        // SAFETY: by the contract.
        (message.msg_name, message.msg_namelen) = (address.cast(), unsafe { *address_len });
    }
    // SAFETY: a message of ours, over buffers of the program's.
    let n = unsafe { receive_message(socket, &raw mut message, flags, plain) };
    if n >= 0 && is_asked && socket.completions.has_link_sends() {
        // SAFETY: by the contract.
        unsafe { *address_len = message.msg_namelen };
    }
    n
}

/// recvmsg(2).
///
/// # Safety
/// `message` is the program's own, or an address that the kernel refuses.
#[cold]
pub unsafe fn receive_message(
    socket: &'static Socket,
    message: *mut msghdr,
    flags: c_int,
    plain: impl Fn() -> ssize_t,
) -> ssize_t {
    if !socket.completions.has_link_sends() || !crate::iov::is_plausible(message) {
        return plain();
    }
    let errno = errno::get();
    // SAFETY: by the contract.
    within(|| match unsafe { serve(socket, &mut *message, flags) } {
        Ok(n) => {
            errno::set(errno);
            n as ssize_t
        }
        Err(error) => errno::fail(error.raw_os_error()),
    })
}

/// # Safety
/// The message is the program's own.
unsafe fn serve(socket: &'static Socket, message: &mut msghdr, flags: c_int) -> rustix::io::Result<usize> {
    let has_room = socket.completions.change(|kept| kept.ids().has_room_for_kernels());
    if has_room == Some(true) {
        let mut control = Control([0; CONTROL]);
        // SAFETY: by the contract.
        match unsafe { from_kernel(socket, message, &mut control, flags) } {
            Ok(Told::Other(n)) => {
                after_read(socket);
                return Ok(n);
            }
            Ok(Told::Completed(told)) => {
                socket.completions.change(|kept| kept.ids().on_told_by_kernel(told));
            }
            Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(error),
        }
    }
    let Some(Some(completed)) = socket.completions.change(|kept| kept.ids().take()) else {
        return Err(rustix::io::Errno::AGAIN);
    };
    // SAFETY: by the contract.
    unsafe { tell(socket, message, completed, flags) };
    after_read(socket);
    Ok(0)
}

/// Something has been read: the kernel tells of what is left, as of news.
fn after_read(socket: &'static Socket) {
    if socket.completions.is_unread() {
        ready::notify_local(socket);
    } else if socket.is_plain() && socket.is_watched() {
        // Perhaps only for this the socket was not the kernel's to report on.
        socket.later(Task::Settle);
    }
}

/// What the kernel's queue had.
enum Told {
    /// Of sends with MSG_ZEROCOPY.
    Completed(Completed),
    /// Of something else, for which the program's message is filled in.
    Other(usize),
}

/// Takes the next from the kernel's queue.
///
/// # Safety
/// The message is the program's own.
unsafe fn from_kernel(
    socket: &'static Socket,
    message: &mut msghdr,
    control: &mut Control,
    flags: c_int,
) -> rustix::io::Result<Told> {
    let mut copy = *message;
    (copy.msg_control, copy.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL);
    let n = {
        // Keeps close() out.
        let _control = socket.control.lock();
        let fd = socket.numbers.anchor_fd().ok_or(rustix::io::Errno::BADF)?;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&fd) as usize;
        let to = kernel::address(&raw mut copy);
        // SAFETY: the program's buffers, and a control buffer of ours; with MSG_ERRQUEUE it does not wait.
        unsafe { kernel::call(libc::SYS_recvmsg, [fd, to, flags as usize, 0, 0, 0]) }?
    };
    // The next look at readiness asks whether there is more.
    socket.wakes.anchor.fetch_or(KERNELS_ERRORS, SeqCst);
    // SAFETY: the kernel has filled it in.
    if let Some(told) = unsafe { completed(&copy) } {
        return Ok(Told::Completed(told));
    }
    let (to, room) = (message.msg_control, message.msg_controllen);
    message.msg_namelen = copy.msg_namelen;
    message.msg_flags = copy.msg_flags;
    message.msg_controllen = 0;
    let mut put = Put {
        message,
        to: to.cast(),
        room,
    };
    // SAFETY: the macros of cmsg(3) on what the kernel has written; the program's control buffer.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const copy);
        while let Some(c) = header.as_ref() {
            let bytes = c.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            let data = std::slice::from_raw_parts(libc::CMSG_DATA(header), bytes);
            put.put(c.cmsg_level, c.cmsg_type, data);
            header = libc::CMSG_NXTHDR(&raw const copy, header);
        }
    }
    Ok(Told::Other(n))
}

/// Which sends the kernel's message tells of, if it does of any.
///
/// # Safety
/// The kernel has filled the message in.
unsafe fn completed(message: &msghdr) -> Option<Completed> {
    // SAFETY: the macros of cmsg(3), as above.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(c) = header.as_ref() {
            let is_error = matches!(
                (c.cmsg_level, c.cmsg_type),
                (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
            );
            if is_error && c.cmsg_len >= libc::CMSG_LEN(size_of::<sock_extended_err>() as u32) as usize {
                let error = libc::CMSG_DATA(header).cast::<sock_extended_err>().read_unaligned();
                return (error.ee_origin == ORIGIN_ZEROCOPY && error.ee_errno == 0).then_some(Completed {
                    first: error.ee_info,
                    last: error.ee_data,
                    code: error.ee_code,
                });
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
        None
    }
}

/// Fills the program's message in as the kernel does.
///
/// # Safety
/// The message is the program's own.
unsafe fn tell(socket: &'static Socket, message: &mut msghdr, completed: Completed, flags: c_int) {
    /// The error, and an address, which is none: a sockaddr_in6 at most.
    const LONGEST: usize = size_of::<sock_extended_err>() + size_of::<libc::sockaddr_in6>();
    let error = sock_extended_err {
        ee_errno: 0,
        ee_origin: ORIGIN_ZEROCOPY,
        ee_type: 0,
        ee_code: completed.code,
        ee_pad: 0,
        ee_info: completed.first,
        ee_data: completed.last,
    };
    let mut bytes = [0u8; LONGEST];
    // SAFETY: there is room for it.
    unsafe { bytes.as_mut_ptr().cast::<sock_extended_err>().write_unaligned(error) };
    let (level, kind, len) = if is_v6(socket) {
        (libc::SOL_IPV6, libc::IPV6_RECVERR, LONGEST)
    } else {
        let len = size_of::<sock_extended_err>() + size_of::<libc::sockaddr_in>();
        (libc::SOL_IP, libc::IP_RECVERR, len)
    };
    let room = std::mem::replace(&mut message.msg_controllen, 0);
    if !message.msg_name.is_null() {
        message.msg_namelen = 0;
    }
    message.msg_flags = flags & libc::MSG_CMSG_CLOEXEC | libc::MSG_ERRQUEUE;
    let mut put = Put {
        to: message.msg_control.cast(),
        room,
        message,
    };
    // SAFETY: the program's control buffer.
    unsafe { put.put(level, kind, bytes.get(..len).unwrap_or_default()) };
}

fn is_v6(socket: &'static Socket) -> bool {
    let _control = socket.control.lock();
    let domain = socket
        .numbers
        .anchor_fd()
        .and_then(|fd| sockopt::get(fd, (libc::SOL_SOCKET, libc::SO_DOMAIN)));
    domain == Some(libc::AF_INET6)
}

/// The program's control buffer, from where something is to be put on.
struct Put<'a> {
    message: &'a mut msghdr,
    to: *mut u8,
    room: usize,
}

impl Put<'_> {
    /// As the kernel's put_cmsg().
    ///
    /// # Safety
    /// `room` bytes are writable, unless `to` is null.
    unsafe fn put(&mut self, level: c_int, kind: c_int, data: &[u8]) {
        if self.to.is_null() || self.room < HEADER {
            self.message.msg_flags |= libc::MSG_CTRUNC;
            return;
        }
        let whole = HEADER + data.len();
        if self.room < whole {
            self.message.msg_flags |= libc::MSG_CTRUNC;
        }
        let len = whole.min(self.room);
        let header = libc::cmsghdr {
            cmsg_len: len,
            cmsg_level: level,
            cmsg_type: kind,
        };
        let space = whole.next_multiple_of(size_of::<usize>()).min(self.room);
        // SAFETY: by the contract; no more than there is room for.
        unsafe {
            self.to.cast::<libc::cmsghdr>().write_unaligned(header);
            std::ptr::copy_nonoverlapping(data.as_ptr(), self.to.add(HEADER), len - HEADER);
            self.to = self.to.add(space);
        }
        self.room -= space;
        self.message.msg_controllen += space;
    }
}
