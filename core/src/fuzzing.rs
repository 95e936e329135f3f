//! Makes private parsers of this crate callable by the fuzz targets (`fuzz/`). No other code uses this module.

use std::net::SocketAddr;

use rustix::io::Errno;

use crate::rendezvous::diag;

/// Parses an answer of sock_diag(7). Returns the state and the uid of the socket that the answer describes.
pub fn sock_diag(bytes: &[u8]) -> Result<(u8, u32), Errno> {
    diag::parse(bytes).map(|socket| (socket.state, socket.uid))
}

/// Finds the socket that listens on `server` in the text of /proc/net/tcp or tcp6, and returns the socket's owner.
pub fn proc_net_tcp(text: &str, server: SocketAddr) -> diag::Owner {
    diag::find_listener(text, server)
}
