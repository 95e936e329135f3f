//! Tests the verbs plugin between two hosts. Loads the plugin as the preloaded library does. The lab's tests `verbs`,
//! `verbs-ends` and `verbs-beside` run it on both nodes. It is not shipped.
//!
//!     verbs-peer server PLUGIN ADDRESS PORT
//!     verbs-peer client PLUGIN ADDRESS PORT PEER        what goes over a connection
//!     verbs-peer client-ends PLUGIN ADDRESS PORT PEER   how connections begin and end
//!     verbs-peer client-beside PLUGIN ADDRESS PORT PEER connections beside another one
//!
//! The client runs one scenario after the other. The first byte of a connection's private data tells the server which
//! scenario it is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod beside;
mod link;
mod memory;
mod scenarios;

use link::{Api, address};
use scenarios::Part;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    let port = |text: &str| text.parse().expect("a port");
    match words[..] {
        ["server", plugin, local, at] => {
            scenarios::serve(&Api::load(plugin), &address(local, port(at)));
        }
        [
            role @ ("client" | "client-ends" | "client-beside"),
            plugin,
            local,
            at,
            peer,
        ] => {
            let part = match role {
                "client-ends" => Part::Ends,
                "client-beside" => Part::Beside,
                _ => Part::Traffic,
            };
            scenarios::run(&Api::load(plugin), &address(local, 0), &address(peer, port(at)), part);
        }
        // The client starts these two roles, each as a process of its own.
        ["victim", plugin, local, at, peer] => {
            let target = address(peer, port(at));
            scenarios::be_killed(&Api::load(plugin), &address(local, 0), &target);
        }
        ["poor", plugin, local, at, peer] => {
            let target = address(peer, port(at));
            scenarios::have_little_memory(&Api::load(plugin), &address(local, 0), &target);
        }
        _ => {
            eprintln!("usage: verbs-peer server PLUGIN ADDRESS PORT");
            eprintln!("       verbs-peer client|client-ends|client-beside PLUGIN ADDRESS PORT PEER");
            std::process::exit(2);
        }
    }
}
