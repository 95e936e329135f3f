//! Finds free TCP ports for private servers, and checks whether a server listens on its port. No function connects to a
//! server: a probe would count as a client (iperf3 serves only one).

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// The first port. The range is below Linux's default ephemeral range (32768 and up), so that no client's source port
/// takes it.
const FIRST: u16 = 12_000;
const COUNT: u16 = 20_000;

static NEXT: AtomicU16 = AtomicU16::new(0);

/// Returns a port of 127.0.0.1 that was free a moment ago and that this process has not handed out before.
///
/// # Errors
/// The last bind error, if none of the `COUNT` ports is free.
pub fn free_port() -> std::io::Result<u16> {
    let start = (std::process::id().wrapping_mul(97) % u32::from(COUNT)) as u16;
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrInUse);
    for _ in 0..COUNT {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + ((u32::from(start) + u32::from(step)) % u32::from(COUNT)) as u16;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns whether a socket of this network namespace listens on TCP `port` (proc_net_tcp(5)).
pub fn is_listening(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .any(|table| table.lines().skip(1).any(|line| listens(line, port)))
}

/// Returns whether a row listens on `port`. A row is `sl local_address rem_address st …`, with addresses in
/// hexadecimal; state 0A is LISTEN.
fn listens(line: &str, port: u16) -> bool {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let local = fields.next().and_then(|address| address.rsplit_once(':'));
    let state = fields.nth(1);
    state == Some("0A") && local.and_then(|(_, hex)| u16::from_str_radix(hex, 16).ok()) == Some(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_seen_and_its_port_is_not_free() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_listening(port));
        assert_ne!(free_port().unwrap(), port);
    }

    #[test]
    fn ports_are_handed_out_once() {
        assert_ne!(free_port().unwrap(), free_port().unwrap());
    }
}
