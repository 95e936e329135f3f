//! A listener, and its connection requests.

use std::os::fd::AsFd;

use rdmasock_core::fabric::plugin::serve::{Incoming, Listen};
use rdmasock_core::fabric::plugin::{Address, Errno, Hidden, Level, Result, log};
use rdmasock_core::lock::Lock;
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, bind, listen, socket_with};

use crate::conn::Conn;
use crate::greeting::Kind;
use crate::names::name_of;
use crate::settings::Settings;
use crate::{greeting, nic};

/// The most requests that the kernel queues.
const BACKLOG: i32 = 64;
/// The ports that a listener may get.
const PORTS: std::ops::Range<u16> = 20_000..60_000;

/// A listener.
pub struct Listener {
    settings: Settings,
    /// Readable when `next` has work.
    set: Hidden,
    socket: Hidden,
    port: u16,
    /// Channels that are connected, but have not sent a request yet.
    silent: Lock<Vec<Hidden>>,
}

impl Listener {
    /// Listens at a local address; with port 0 at any free port.
    pub fn new(settings: Settings, local: &Address) -> Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = Hidden::place(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)?;
        let ports = if local.port == 0 {
            PORTS
        } else {
            local.port..local.port.saturating_add(1)
        };
        let begin = usize::from(local.port == 0) * rustix::process::getpid().as_raw_nonzero().get() as usize;
        let count = ports.len();
        let mut found = Err(Errno(libc::EADDRINUSE));
        for port in ports.clone().cycle().skip(begin % count).take(count) {
            match bind(&socket, &name_of(&Address { port, ..*local })?) {
                Err(rustix::io::Errno::ADDRINUSE) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    found = Ok(port);
                    break;
                }
            }
        }
        let port = found?;
        listen(&socket, BACKLOG)?;
        let set = Hidden::place(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        epoll::add(&set, &socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self {
            settings,
            set,
            socket,
            port,
            silent: Lock::new(Vec::new()),
        })
    }
}

impl Listen for Listener {
    type Conn = Conn;

    fn port(&self) -> u16 {
        self.port
    }

    fn fd(&self) -> i32 {
        self.set.number()
    }

    fn next(&self) -> Result<Option<Incoming<Conn>>> {
        nic::check()?;
        let mut silent = self.silent.lock().ok_or(Errno(libc::EDEADLK))?;
        while let Ok(new) = accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            let new = Hidden::place(new)?;
            epoll::add(&self.set, &new, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            silent.push(new);
        }
        let mut at = 0;
        while let Some(channel) = silent.get(at) {
            let request = match greeting::receive(channel) {
                Ok(None) => {
                    at += 1;
                    continue;
                }
                request => request,
            };
            let channel = silent.swap_remove(at);
            let _ = epoll::delete(&self.set, channel.as_fd());
            match request {
                Ok(Some(request)) if request.kind == Kind::Request => {
                    let private = request.private.bytes;
                    return Ok(Some(Incoming {
                        conn: Conn::requested(self.settings, channel, request),
                        private,
                    }));
                }
                // The channel was dropped; others may have requests.
                other => log(
                    Level::Debug,
                    format_args!("localnic: a request could not be taken: {:?}", other.err()),
                ),
            }
        }
        Ok(None)
    }
}
