//! Both ends of a connection in one process, for tests and measurements of code that uses a queue pair.

use std::time::Duration;

use rdmasock_core::fabric::plugin::serve::{Connection, Listen};
use rdmasock_core::fabric::plugin::{Address, Errno, Result};
use rdmasock_core::fabric::remote::qp::{Completed, Down, Limits, PostError, QueuePair, Read, Region, Role, Write};

use crate::conn::Conn;
use crate::listen::Listener;
use crate::settings::Settings;

/// The timeout for connecting: far more than two threads of one process need.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A connected queue pair.
pub struct LocalQp(Conn);

/// Returns two queue pairs that are connected to each other.
pub fn pair(settings: Settings) -> Result<[LocalQp; 2]> {
    pair_beside(settings, None)
}

/// Returns two connected queue pairs, each beside another one at its end.
pub fn pair_beside(settings: Settings, beside: Option<[&LocalQp; 2]>) -> Result<[LocalQp; 2]> {
    let [connects, accepts] = beside.map_or([None; 2], |both| both.map(|qp| Some(&qp.0)));
    let mut address = Address::default();
    let listener = Listener::new(settings, &address)?;
    address.port = listener.port();
    let (connector, acceptor) = std::thread::scope(|scope| {
        let dialling = scope.spawn(|| Conn::connect(settings, &address, b"hello", TIMEOUT, connects));
        let acceptor = loop {
            if let Some(incoming) = listener.next()? {
                break incoming.conn;
            }
            if dialling.is_finished() {
                break Err(Errno(libc::ECONNREFUSED))?;
            }
            std::thread::yield_now();
        };
        acceptor.accept(b"hello too", accepts)?;
        let connector = dialling.join().map_err(|_| Errno(libc::EIO))??;
        Ok::<_, Errno>((connector, acceptor))
    })?;
    while acceptor.state() == 0 {
        std::thread::yield_now();
    }
    Ok([LocalQp(connector), LocalQp(acceptor)])
}

impl LocalQp {
    /// Returns the connection.
    pub fn conn(&self) -> &Conn {
        &self.0
    }
}

fn post(result: Result<()>) -> std::result::Result<(), PostError> {
    result.map_err(|error| match error {
        Errno(libc::EAGAIN) => PostError::Full,
        _ => PostError::Down,
    })
}

impl QueuePair for LocalQp {
    fn limits(&self) -> Limits {
        // A connected queue pair always has its limits.
        self.0.info().map_or(Limits::default(), |info| info.limits)
    }

    unsafe fn register(&self, at: *mut u8, len: usize, role: Role) -> std::result::Result<Region, Down> {
        // SAFETY: by this function's contract.
        unsafe { self.0.register(at.cast(), len, role) }.map_err(|error| Down(error.0))
    }

    fn deregister(&self, region: Region) {
        self.0.deregister(region.handle);
    }

    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> std::result::Result<(), PostError> {
        // SAFETY: by this function's contract.
        post(unsafe { self.0.write(write, immediate) })
    }

    unsafe fn read(&self, read: &Read) -> std::result::Result<(), PostError> {
        // SAFETY: by this function's contract.
        post(unsafe { self.0.read(read) })
    }

    fn send(&self, message: &[u8]) -> std::result::Result<(), PostError> {
        post(self.0.send(message))
    }

    fn probe(&self) -> std::result::Result<(), PostError> {
        post(self.0.probe())
    }

    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> std::result::Result<usize, Down> {
        self.0.poll(each).map_err(|error| Down(error.0))
    }

    fn arm(&self) -> std::result::Result<(), Down> {
        self.0.arm().map_err(|error| Down(error.0))
    }
}
