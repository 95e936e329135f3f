//! A listener, and the requests that come to it.

use rdmasock_core::fabric::plugin::Address;

use crate::conn::Conn;
use crate::device;
use crate::error::{Errno, Result};
use crate::explain::explain;
use crate::sys::{Id, Private, event};
use rdmasock_core::fabric::plugin::host::{Level, log};

/// Requests that the kernel keeps.
const BACKLOG: i32 = 64;
/// iWARP has its ports from TCP: one that rdma_cm thinks is free may be a TCP listener's.
const TRIES: usize = 16;

/// A listener.
#[derive(Debug)]
pub struct Listener {
    id: Id,
}

impl Listener {
    /// Listens at a local address, with port 0 at a port that is free.
    pub fn new(local: &Address) -> Result<Self> {
        device::open(local)?;
        let mut result = Err(Errno(libc::EADDRINUSE));
        for _ in 0..if local.port == 0 { TRIES } else { 1 } {
            result = Self::attempt(local);
            if !matches!(result, Err(Errno(libc::EADDRINUSE))) {
                break;
            }
        }
        result.map_err(|errno| explain("listening", errno))
    }

    fn attempt(local: &Address) -> Result<Self> {
        let id = Id::new()?;
        id.bind(local)?;
        id.listen(BACKLOG)?;
        Ok(Self { id })
    }

    pub fn port(&self) -> u16 {
        self.id.port()
    }

    /// Readable when there may be a request.
    pub fn fd(&self) -> i32 {
        self.id.channel().fd()
    }

    /// The next request, with what the peer sent along; `None` if there is none now, ENODEV if the device is gone, and
    /// no more will come.
    pub fn next(&self) -> Result<Option<(Conn, Private)>> {
        while let Some(event) = self.id.channel().next()? {
            if event.kind == event::RDMA_CM_EVENT_DEVICE_REMOVAL {
                return Err(Errno(libc::ENODEV));
            }
            let Some(incoming) = event.incoming else {
                continue;
            };
            match incoming.migrate().and_then(Conn::new) {
                Ok(conn) => {
                    conn.hear(&event.private);
                    return Ok(Some((conn, event.private)));
                }
                // It was rejected by that; others may follow.
                Err(errno) => log(
                    Level::Debug,
                    format_args!("verbs: a request could not be taken: {errno}"),
                ),
            }
        }
        Ok(None)
    }
}
