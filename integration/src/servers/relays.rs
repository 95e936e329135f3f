//! haproxy in front of another server, and an rsync daemon: servers that pass on bytes without reading them.

use anyhow::Result;

use super::Service;
use crate::lab::{Lab, Role};
use crate::ports::free_port;

/// Starts haproxy, which passes TCP connections on to `upstream`. It uses splice if it expects this to pay.
///
/// # Errors
/// If the server does not start to listen in time. The same holds for all servers below.
pub fn haproxy(lab: &Lab, role: Role, upstream: u16) -> Result<Service> {
    let port = free_port()?;
    let conf = lab.path(&format!("haproxy-{port}.conf"));
    let text = format!(
        "global
    maxconn 1000
defaults
    mode tcp
    option splice-auto
    timeout connect 10s
    timeout client 1m
    timeout server 1m
listen relay
    bind 127.0.0.1:{port}
    server back 127.0.0.1:{upstream}
"
    );
    std::fs::write(&conf, text)?;
    let cmd = lab.cmd(role, "haproxy")?.args(["-db", "-f"]).args([&conf]);
    Ok(Service {
        proc: lab.serve(cmd, port)?,
        port,
    })
}

/// Starts an rsync daemon that serves `lab.path("files")` as "files". It has a process for each connection.
///
/// # Errors
/// As [`haproxy`].
pub fn rsync(lab: &Lab, role: Role) -> Result<Service> {
    let port = free_port()?;
    let files = lab.path("files");
    std::fs::create_dir_all(&files)?;
    let conf = lab.path("rsyncd.conf");
    let text = format!(
        "use chroot = no\nlog file = {}\n[files]\n    path = {}\n    read only = yes\n",
        lab.path("rsyncd.log").display(),
        files.display()
    );
    std::fs::write(&conf, text)?;
    let cmd = lab
        .cmd(role, "rsync")?
        .args(["--daemon", "--no-detach", "--address", "127.0.0.1"])
        .args(["--port", &port.to_string(), "--config"])
        .args([&conf]);
    Ok(Service {
        proc: lab.serve(cmd, port)?,
        port,
    })
}
