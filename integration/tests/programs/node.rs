//! Node: keep-alive connections, connections that either end destroys, files that get the fds of these, and a cluster.
//! libuv closes by `syscall` and would use io_uring.

use anyhow::{Result, ensure};
use rdmasock_integration::lab::{Lab, Role};
use rdmasock_integration::servers::node;

use crate::Case;

pub const CASES: &[Case] = &[
    ("node_http_and_files", |lab| web(lab, "server", &[], true)),
    ("node_asks_for_io_uring", |lab| {
        web(lab, "server", &[("UV_USE_IO_URING", "1")], true)
    }),
    // The primary passes accepted connections to its workers, so none is promoted.
    ("node_cluster", |lab| web(lab, "cluster", &[], false)),
];

const WEB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/web.mjs");
const ROUNDS: &str = "12";

fn web(lab: &mut Lab, kind: &str, env: &[(&str, &str)], is_promoted: bool) -> Result<()> {
    let dir = lab.path("files");
    std::fs::create_dir(&dir)?;
    let dir = dir.to_string_lossy().into_owned();
    let server = node(lab, Role::Server, &[WEB, kind, "PORT", &dir], env)?;
    let port = server.port.to_string();
    let load = || {
        let cmd = lab.cmd(Role::Client, "node")?;
        let said = lab.text(cmd.args([WEB, "client", &port, &dir, ROUNDS]))?;
        ensure!(said == "ok 480\n", "the client said {said}");
        Ok(())
    };
    load()?;
    if is_promoted {
        lab.check_paths(&server.proc, load)?;
    }
    Ok(())
}
