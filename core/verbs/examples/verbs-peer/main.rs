//! Tries the verbs plugin between two hosts, loaded as the library loads it. Not shipped; the lab's tests
//! `verbs` and `verbs-ends` run it on both nodes:
//!
//!     verbs-peer server PLUGIN ADDRESS PORT
//!     verbs-peer client PLUGIN ADDRESS PORT PEER        what goes over a connection
//!     verbs-peer client-ends PLUGIN ADDRESS PORT PEER   how connections begin and end
//!
//! The client goes through the scenarios; the first byte of a connection's private data tells the server which.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod link;
mod scenarios;

use link::{Api, address};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    let port = |text: &str| text.parse().expect("a port");
    match words[..] {
        ["server", plugin, local, at] => {
            scenarios::serve(&Api::load(plugin), &address(local, port(at)));
        }
        [role @ ("client" | "client-ends"), plugin, local, at, peer] => {
            let (target, ends) = (address(peer, port(at)), role == "client-ends");
            scenarios::run(&Api::load(plugin), &address(local, 0), &target, ends);
        }
        // In processes of their own, started by the client.
        ["victim", plugin, local, at, peer] => {
            let target = address(peer, port(at));
            scenarios::be_killed(&Api::load(plugin), &address(local, 0), &target);
        }
        ["poor", plugin, local, at, peer] => {
            let target = address(peer, port(at));
            scenarios::have_little_memory(&Api::load(plugin), &address(local, 0), &target);
        }
        _ => {
            eprintln!("usage: verbs-peer server PLUGIN ADDRESS PORT | client|client-ends PLUGIN ADDRESS PORT PEER");
            std::process::exit(2);
        }
    }
}
