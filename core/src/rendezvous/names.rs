//! Abstract AF_UNIX names, on which an instance accepts questions of other instances. Each listening socket of a TCP
//! port has a name (P2), and each instance has one (P6).
//!
//! Abstract names belong to a network namespace, as TCP ports do, and vanish with the last fd. Any user may bind one,
//! so a connector must first check the owner of the name by [`crate::rendezvous::diag::trusted`].

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};

use crate::ids::InstanceId;
use crate::os::channel::Channel;
use crate::os::kernel;
use crate::os::privatefd::PrivateFd;
use crate::wire::VERSION;

/// Service names of one port, at most: one for each listening socket (P3).
pub const MAX_SERVICES: u32 = 64;

/// The number of missing names in a row after which a connector tries no further name (P4). It is more than one because
/// the server with the first name may end before the server with the second.
const MAX_GAP: u32 = 2;

/// The length of a name's accept queue. If the queue is full, connect() fails with EAGAIN and the connector tries again
/// later (P4). If a connection stays in the queue and is never accepted, its connector loses one attempt.
const BACKLOG: i32 = 128;

/// Returns the name of the `k`th listening socket on TCP port `port` (P2), without the leading NUL.
pub fn service(port: u16, k: u32) -> String {
    format!("rdmasock/{VERSION}/tcp/{port}/{k}")
}

/// Returns the name of an instance (P6), without the leading NUL.
pub fn instance(id: &InstanceId) -> String {
    format!("rdmasock/{VERSION}/i/{id}")
}

/// A socket that listens on an abstract name.
#[derive(Debug)]
pub struct Listener {
    fd: PrivateFd,
}

impl Listener {
    /// Binds and listens on the first free service name of `port`. Also returns the number `k` of the name.
    ///
    /// EADDRINUSE if all [`MAX_SERVICES`] names are taken; otherwise the kernel's errno. The caller must not let an
    /// error fail the program's listen().
    pub fn service(port: u16) -> Result<(Self, u32), Errno> {
        for k in 0..MAX_SERVICES {
            match Self::bind(&service(port, k), socket_without_fds()?) {
                Err(Errno::ADDRINUSE) => {}
                other => return other.map(|listener| (listener, k)),
            }
        }
        Err(Errno::ADDRINUSE)
    }

    /// Binds and listens on the name of instance `id`. EADDRINUSE if another socket has taken it.
    pub fn instance(id: &InstanceId) -> Result<Self, Errno> {
        Self::bind(&instance(id), socket()?)
    }

    fn bind(name: &str, fd: PrivateFd) -> Result<Self, Errno> {
        bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        // listen() records the caller's uid, which SO_PEERCRED returns to each connector.
        listen(&fd, BACKLOG)?;
        Ok(Self { fd })
    }

    /// Accepts one connection. `None` if no connection is waiting. Fails with the kernel's errno (EMFILE and the like);
    /// then the connection stays in the queue.
    pub fn accept(&self) -> Result<Option<Channel>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match PrivateFd::open(|| accept_with(&self.fd, flags)) {
            Ok(fd) => Ok(Some(Channel::new(fd))),
            // ECONNABORTED: the connector has closed its socket already. The next call accepts the next connection.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl Drop for Listener {
    /// Accepts and drops each waiting connection first. Its unread messages may hold files, whose release can block for
    /// as long as their sender arranges. So the close of the name must not release them. The drop of a channel leaves
    /// that to another thread.
    fn drop(&mut self) {
        (0..=BACKLOG).map_while(|_| self.accept().ok().flatten()).for_each(drop);
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Connects to an abstract name, without waiting.
///
/// ECONNREFUSED if no socket listens on the name, EAGAIN if its accept queue is full, EINVAL if the name is longer than
/// 107 bytes.
pub fn connect_to(name: &[u8]) -> Result<Channel, Errno> {
    connect_by(socket()?, name)
}

fn connect_by(fd: PrivateFd, name: &[u8]) -> Result<Channel, Errno> {
    let address = SocketAddrUnix::new_abstract_name(name).map_err(|_| Errno::INVAL)?;
    connect(&fd, &address)?;
    Ok(Channel::new(fd))
}

/// Returns true if `port` has service names, and also if that cannot be found out at the moment. Never waits.
pub fn is_served(port: u16) -> bool {
    connect_to_services(port).next().is_some()
}

/// Connects to the service names of `port`, one after the other, until `MAX_GAP` names in a row are missing.
///
/// Returns a channel or an errno for each name that exists. EAGAIN: the name's accept queue is full. EMFILE and the
/// like: this process has reached a limit. No item at all means that no program with the library listens on the port.
pub fn connect_to_services(port: u16) -> impl Iterator<Item = Result<Channel, Errno>> {
    let (mut k, mut gap) = (0, 0);
    std::iter::from_fn(move || {
        while k < MAX_SERVICES && gap < MAX_GAP {
            let attempt = socket_without_fds().and_then(|fd| connect_by(fd, service(port, k).as_bytes()));
            k += 1;
            match attempt {
                Err(Errno::CONNREFUSED) => gap += 1,
                other => {
                    gap = 0;
                    return Some(other);
                }
            }
        }
        None
    })
}

fn socket() -> Result<PrivateFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    PrivateFd::open(|| socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
}

/// Creates a socket that refuses fds by SCM_RIGHTS. Sockets that are accepted from it refuse them too. Linux before
/// 6.16 lacks the option: there the socket accepts fds.
fn socket_without_fds() -> Result<PrivateFd, Errno> {
    const SO_PASSRIGHTS: libc::c_int = 83;
    let fd = socket()?;
    let _ = kernel::set_option(fd.as_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, 0);
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::forked::{free_port, in_child};

    fn found(port: u16) -> Vec<Result<(), Errno>> {
        connect_to_services(port).map(|attempt| attempt.map(drop)).collect()
    }

    #[test]
    fn names_are_as_documented_and_fit() {
        assert_eq!(service(6379, 3), "rdmasock/2/tcp/6379/3");
        let id = InstanceId::from_bytes([0xAB; 16]);
        assert_eq!(instance(&id), format!("rdmasock/2/i/{}", "ab".repeat(16)));
    }

    #[test]
    fn a_port_without_the_library_has_no_names() {
        let port = free_port();
        assert!(!is_served(port));
        let (_name, _) = Listener::service(port).unwrap();
        assert!(is_served(port));
        assert_eq!(found(free_port()), []);
    }

    #[test]
    fn every_listener_of_a_port_is_found_and_a_gap_does_not_hide_the_next() {
        in_child(|| {
            let port = free_port();
            let (a, k) = Listener::service(port).unwrap();
            assert_eq!(k, 0);
            let (b, k) = Listener::service(port).unwrap();
            assert_eq!(k, 1);
            assert_eq!(found(port), [Ok(()), Ok(())]);
            drop(a);
            assert_eq!(found(port), [Ok(())]);
            let (_again, k) = Listener::service(port).unwrap();
            assert_eq!(k, 0);
            drop(b);
            assert_eq!(found(port), [Ok(())]);
        });
    }

    #[test]
    fn there_are_only_so_many_names() {
        in_child(|| {
            let port = free_port();
            let all: Vec<_> = (0..MAX_SERVICES).map(|_| Listener::service(port).unwrap()).collect();
            assert_eq!(Listener::service(port).unwrap_err(), Errno::ADDRINUSE);
            assert_eq!(found(port).len(), all.len());
        });
    }

    #[test]
    fn no_fds_come_to_a_service_name_where_the_kernel_can_see_to_that() {
        in_child(|| {
            let port = free_port();
            let (name, _) = Listener::service(port).unwrap();
            let asker = connect_to(service(port, 0).as_bytes()).unwrap();
            let sent = asker.send(b"x", &[name.as_fd()]);
            let answerer = name.accept().unwrap().unwrap();
            assert_eq!(answerer.send(b"x", &[name.as_fd()]), Ok(()));
            match sent {
                Err(Errno::PERM) => {}
                // Linux before 6.16 delivers the fd.
                sent => assert!(sent.is_ok() && answerer.next(&mut [0; 4]).unwrap().has_fds),
            }
        });
    }

    #[test]
    fn a_name_is_closed_after_all_who_wait_there() {
        in_child(|| {
            let id = InstanceId::random().unwrap();
            let name = Listener::instance(&id).unwrap();
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            let waits = connect_to(instance(&id).as_bytes()).unwrap();
            waits.send(b"x", &[writer.as_fd()]).unwrap();
            drop((name, writer));
            assert!(crate::os::privatefd::is_any_left());
            assert!(crate::os::apart::close_left());
            assert_eq!(rustix::io::read(&reader, &mut [0u8; 1][..]), Ok(0));
        });
    }

    #[test]
    fn two_instances_can_talk() {
        let id = InstanceId::random().unwrap();
        let listener = Listener::instance(&id).unwrap();
        assert_eq!(Listener::instance(&id).unwrap_err(), Errno::ADDRINUSE);
        assert!(listener.accept().unwrap().is_none());
        let c = connect_to(instance(&id).as_bytes()).unwrap();
        let s = listener.accept().unwrap().unwrap();
        c.send(b"hello", &[]).unwrap();
        assert_eq!(s.recv(&mut [0; 16]).unwrap().bytes, b"hello");
        assert_eq!(c.peer().unwrap().pid, Some(std::process::id()));
    }

    #[test]
    fn nobody_waits_for_a_name_that_does_not_accept() {
        let id = InstanceId::random().unwrap();
        let _listener = Listener::instance(&id).unwrap();
        let mut waiting = Vec::new();
        let refused = loop {
            match connect_to(instance(&id).as_bytes()) {
                Ok(channel) => waiting.push(channel),
                Err(errno) => break errno,
            }
        };
        assert_eq!(refused, Errno::AGAIN);
        assert_eq!(connect_to(&[b'x'; 108]).unwrap_err(), Errno::INVAL);
    }
}
