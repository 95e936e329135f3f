//! Python's own ways of waiting (asyncio, selectors, threads), and memcached under a Python client.

use anyhow::{Result, ensure};
use rdmasock_integration::lab::{Lab, Role};
use rdmasock_integration::servers::{memcached, python};

use crate::Case;

pub const CASES: &[Case] = &[
    ("python_asyncio_echo", |lab| echo(lab, "asyncio", "asyncio", 100)),
    ("python_selectors_echo", |lab| echo(lab, "selectors", "selectors", 100)),
    ("python_threads_echo", |lab| echo(lab, "threads", "threads", 30)),
    ("python_asyncio_server_threads_client", |lab| {
        echo(lab, "asyncio", "threads", 30)
    }),
    ("memcached_twenty_connections", memcached_load),
];

const ECHO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/echo.py");

fn echo(lab: &mut Lab, server: &str, client: &str, connections: u32) -> Result<()> {
    let server = python(lab, Role::Server, &[ECHO, "server", server, "PORT"])?;
    let (port, connections) = (server.port.to_string(), connections.to_string());
    let load = || {
        let cmd = lab.cmd(Role::Client, "python3")?;
        let said = lab.text(cmd.args([ECHO, "client", client, &port, &connections, "30"]))?;
        ensure!(said.starts_with("ok "), "the client said {said}");
        Ok(())
    };
    load()?;
    lab.check_paths(&server.proc, load)
}

fn memcached_load(lab: &mut Lab) -> Result<()> {
    let server = memcached(lab, Role::Server)?;
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/memcache.py");
    let port = server.port.to_string();
    let load = || {
        let said = lab.text(lab.cmd(Role::Client, "python3")?.args([program, &port]))?;
        ensure!(said == "ok 10000\n", "the client said {said}");
        Ok(())
    };
    load()?;
    lab.check_paths(&server.proc, load)
}
