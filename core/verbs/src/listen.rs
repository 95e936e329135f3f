//! A listener for connections, and the requests that it receives.

use rdmasock_core::fabric::plugin::Address;
use rdmasock_core::fabric::plugin::serve::{Incoming, Listen};

use crate::conn::{Conn, words};
use crate::device;
use crate::error::{Errno, Result};
use crate::explain::{debug, explain};
use crate::sys::{Id, event};

/// The most connection requests that the kernel queues.
const BACKLOG: i32 = 64;
/// The most ports that are tried if the caller wants any port. On iWARP rdma_cm and TCP share ports: a port that is
/// free for rdma_cm may have a TCP listener.
const TRIES: usize = 16;

/// A listener for connections.
pub(crate) struct Listener {
    id: Id,
}

impl Listener {
    /// Listens at the address `local`. Port 0 stands for any free port.
    pub(crate) fn new(local: &Address) -> Result<Self> {
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
}

impl Listen for Listener {
    type Conn = Conn;

    fn port(&self) -> u16 {
        self.id.port()
    }

    fn fd(&self) -> i32 {
        self.id.channel().fd()
    }

    // Fails with ENODEV if the device was removed.
    fn next(&self) -> Result<Option<Incoming<Conn>>> {
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
                    return Ok(Some(Incoming {
                        conn,
                        private: words(&event.private),
                    }));
                }
                // The drop of the id has rejected this request. The channel may have further requests.
                Err(errno) => debug(format_args!("verbs: a request could not be taken: {errno}")),
            }
        }
        Ok(None)
    }
}
