//! Parsers that are private to this crate, for the fuzz targets (`fuzz/`). No other use.

use std::net::SocketAddr;

use rustix::io::Errno;

use crate::rendezvous::{diag, route};

/// Reads an answer of sock_diag(7): state and uid of a socket.
pub fn sock_diag(bytes: &[u8]) -> Result<(u8, u32), Errno> {
    diag::parse(bytes).map(|socket| (socket.state, socket.uid))
}

/// Finds a listening socket in the text of /proc/net/tcp or tcp6.
pub fn proc_net_tcp(text: &str, server: SocketAddr) -> diag::Owner {
    diag::find_listener(text, server)
}

/// Reads an answer of rtnetlink(7) to a route lookup.
pub fn route(bytes: &[u8]) -> Result<route::Place, Errno> {
    route::parse(bytes)
}
