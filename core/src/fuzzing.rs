//! Exposes parsers that are private to this crate to the fuzz targets (`fuzz/`), and to no other code.

use std::net::SocketAddr;

use rustix::io::Errno;

use crate::rendezvous::diag;

/// Parses an answer of sock_diag(7); returns state and uid of the socket.
pub fn sock_diag(bytes: &[u8]) -> Result<(u8, u32), Errno> {
    diag::parse(bytes).map(|socket| (socket.state, socket.uid))
}

/// Finds a listening socket in the text of /proc/net/tcp or tcp6.
pub fn proc_net_tcp(text: &str, server: SocketAddr) -> diag::Owner {
    diag::find_listener(text, server)
}
