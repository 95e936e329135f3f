//! Socket addresses in libc's form. The only calls are getsockname and getpeername.

use libc::c_int;

use crate::sys::{Ret, zeroed};

/// A socket address with its length.
#[derive(Clone, Copy)]
pub struct Addr {
    /// The address, of any family.
    pub storage: libc::sockaddr_storage,
    /// The length of the address in bytes.
    pub len: libc::socklen_t,
}

impl Addr {
    fn from_v6(ip: std::net::Ipv6Addr, port: u16) -> Self {
        let mut addr: libc::sockaddr_in6 = zeroed();
        addr.sin6_family = libc::AF_INET6 as u16;
        addr.sin6_port = port.to_be();
        addr.sin6_addr.s6_addr = ip.octets();
        Self::of(addr)
    }

    fn of<T>(addr: T) -> Self {
        let mut storage: libc::sockaddr_storage = zeroed();
        let len = size_of::<T>();
        assert!(len <= size_of::<libc::sockaddr_storage>());
        // SAFETY: `storage` is larger than T and both are plain bytes.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const addr).cast::<u8>(), (&raw mut storage).cast::<u8>(), len);
        }
        Self {
            storage,
            len: len as libc::socklen_t,
        }
    }

    /// 127.0.0.1:port
    pub fn v4(port: u16) -> Self {
        let mut addr: libc::sockaddr_in = zeroed();
        addr.sin_family = libc::AF_INET as u16;
        addr.sin_port = port.to_be();
        addr.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
        Self::of(addr)
    }

    /// `[ip%interface]:port`
    pub fn scoped(ip: std::net::Ipv6Addr, port: u16, interface: u32) -> Self {
        let mut addr = Self::from_v6(ip, port);
        // SAFETY: the storage holds an address of this family, of plain bytes.
        unsafe { (*(&raw mut addr.storage).cast::<libc::sockaddr_in6>()).sin6_scope_id = interface };
        addr
    }

    /// `[::1]:port`
    pub fn v6(port: u16) -> Self {
        Self::from_v6(std::net::Ipv6Addr::LOCALHOST, port)
    }

    /// `[::ffff:127.0.0.1]:port`
    pub fn mapped(port: u16) -> Self {
        Self::from_v6(std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped(), port)
    }

    /// `[::]:port`
    pub fn any6(port: u16) -> Self {
        Self::from_v6(std::net::Ipv6Addr::UNSPECIFIED, port)
    }

    /// AF_UNSPEC, which dissolves an association.
    pub fn unspec() -> Self {
        let mut addr: libc::sockaddr_in = zeroed();
        addr.sin_family = libc::AF_UNSPEC as u16;
        Self::of(addr)
    }

    /// An AF_UNIX address: a path, or an abstract name if `name` begins with NUL.
    pub fn unix(name: &[u8]) -> Self {
        let mut addr: libc::sockaddr_un = zeroed();
        addr.sun_family = libc::AF_UNIX as u16;
        for (to, from) in addr.sun_path.iter_mut().zip(name) {
            *to = *from as libc::c_char;
        }
        let mut all = Self::of(addr);
        all.len = (size_of::<libc::sa_family_t>() + name.len()) as libc::socklen_t;
        all
    }

    /// Returns the address in libc's form.
    pub fn ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    /// The family.
    pub fn family(&self) -> c_int {
        c_int::from(self.storage.ss_family)
    }

    /// The port of an IP address.
    pub fn port(&self) -> u16 {
        // SAFETY: sin_port and sin6_port are both at this place in an initialised storage.
        u16::from_be(unsafe { (*(&raw const self.storage).cast::<libc::sockaddr_in>()).sin_port })
    }

    /// Returns the IP address without its port, or the family's number.
    pub fn ip(&self) -> String {
        match self.family() {
            libc::AF_INET => {
                // SAFETY: the family says what is in the storage.
                let a = unsafe { *(&raw const self.storage).cast::<libc::sockaddr_in>() };
                std::net::Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)).to_string()
            }
            libc::AF_INET6 => {
                // SAFETY: the family says what is in the storage.
                let a = unsafe { *(&raw const self.storage).cast::<libc::sockaddr_in6>() };
                std::net::Ipv6Addr::from(a.sin6_addr.s6_addr).to_string()
            }
            other => format!("family {other}"),
        }
    }

    /// Calls getsockname, and returns its result and the address.
    pub fn local_of(fd: c_int) -> (Ret, Self) {
        let mut a = Self::empty();
        let r = call!(libc::getsockname(fd, a.mut_ptr(), &mut a.len));
        (r, a)
    }

    /// Calls getpeername, and returns its result and the address.
    pub fn peer_of(fd: c_int) -> (Ret, Self) {
        let mut a = Self::empty();
        let r = call!(libc::getpeername(fd, a.mut_ptr(), &mut a.len));
        (r, a)
    }

    /// Room for an address that the kernel fills in.
    pub fn empty() -> Self {
        Self {
            storage: zeroed(),
            len: size_of::<libc::sockaddr_storage>() as libc::socklen_t,
        }
    }

    /// Returns the place where libc writes an address.
    pub fn mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }
}
