//! The kernel's answers: those of sock_diag, and lines of /proc/net/tcp. A program may run on another
//! kernel, or in a sandbox, with other answers.
#![no_main]

use std::net::{IpAddr, SocketAddr};

use libfuzzer_sys::arbitrary::Arbitrary;
use libfuzzer_sys::{arbitrary, fuzz_target};
use rdmasock_core::fuzzing::{proc_net_tcp, sock_diag};
use rdmasock_core::rendezvous::diag::Owner;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Netlink(&'a [u8]),
    /// An answer of the requested kind, with arbitrary content.
    Answer(&'a [u8]),
    Table {
        lines: Vec<Line<'a>>,
        ip: IpAddr,
        port: u16,
    },
    Text {
        text: &'a str,
        ip: IpAddr,
        port: u16,
    },
}

/// A line with the fields in their places.
#[derive(Arbitrary, Debug)]
struct Line<'a> {
    ip: IpAddr,
    port: u16,
    state: u8,
    uid: u32,
    rest: &'a str,
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Netlink(bytes) => netlink(bytes),
    Input::Answer(rest) => {
        let mut bytes = vec![0; 16];
        bytes[4..6].copy_from_slice(&20_u16.to_ne_bytes());
        bytes.extend_from_slice(rest);
        netlink(&bytes);
    }
    Input::Table { lines, ip, port } => {
        let mut table = String::from("  sl  local_address rem_address   st\n");
        for line in &lines {
            let address = match line.ip {
                IpAddr::V4(ip) => hex(&ip.octets()),
                IpAddr::V6(ip) => hex(&ip.octets()),
            };
            table += &format!(
                "0: {address}:{:04X} 0:0 {:02X} 0:0 0:0 0 {} 0 77 {}\n",
                line.port, line.state, line.uid, line.rest
            );
        }
        look(&table, SocketAddr::new(ip, port));
    }
    Input::Text { text, ip, port } => look(text, SocketAddr::new(ip, port)),
});

fn netlink(bytes: &[u8]) {
    let _ = sock_diag(bytes);
}

fn hex(octets: &[u8]) -> String {
    let words = octets.chunks_exact(4);
    words
        .map(|w| format!("{:08X}", u32::from_ne_bytes([w[0], w[1], w[2], w[3]])))
        .collect()
}

/// Checks that the returned uid occurs in the text.
fn look(text: &str, server: SocketAddr) {
    if let Owner::Uid(uid) = proc_net_tcp(text, server) {
        let mut words = text.split_ascii_whitespace();
        assert!(words.any(|w| w.parse() == Ok(uid)));
    }
}
