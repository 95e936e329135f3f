//! Starts the servers under test, each on a private port. Their files are in the experiment's directory, and they
//! ignore the distribution's configuration. A family of servers that needs more than a few lines has a file of its own.

pub mod databases;
pub mod relays;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::lab::{Lab, Role};
use crate::ports::free_port;
use crate::proc::{Cmd, Proc};

/// A running server.
#[derive(Debug)]
pub struct Service {
    pub proc: Proc,
    pub port: u16,
}

impl Service {
    /// Returns `127.0.0.1:<port>`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns `http://127.0.0.1:<port>/<path>`.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address())
    }
}

/// Starts redis-server in memory only; `options` are appended. Its Unix socket is [`redis_unix`].
///
/// # Errors
/// If the server does not start to listen in time. The same holds for all servers below.
pub fn redis(lab: &Lab, role: Role, options: &[&str]) -> Result<Service> {
    let (cmd, port) = redis_cmd(lab, role, options)?;
    Ok(Service {
        proc: lab.serve(cmd, port)?,
        port,
    })
}

/// Returns the command that starts [`redis`], and its port.
///
/// # Errors
/// If redis is not installed.
pub fn redis_cmd(lab: &Lab, role: Role, options: &[&str]) -> Result<(Cmd, u16)> {
    let port = free_port()?;
    let dir = lab.path(&format!("redis-{port}"));
    std::fs::create_dir_all(&dir)?;
    let cmd = lab
        .cmd(role, "redis-server")?
        .args([
            "--bind",
            "127.0.0.1",
            "--daemonize",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        .args(["--enable-debug-command", "local", "--port", &port.to_string()])
        .args(["--repl-diskless-sync-delay", "0"])
        .args([
            Path::new("--dir"),
            &dir,
            Path::new("--unixsocket"),
            &redis_unix(lab, port),
        ])
        .args(options);
    Ok((cmd, port))
}

/// Returns the path of the Unix socket of the redis server on `port`.
pub fn redis_unix(lab: &Lab, port: u16) -> PathBuf {
    lab.path(&format!("redis-{port}")).join("unix")
}

/// Starts nginx with two workers that serve `lab.path("www")`, or pass all requests on to `upstream`.
///
/// # Errors
/// As [`redis`].
pub fn nginx(lab: &Lab, role: Role, upstream: Option<u16>) -> Result<Service> {
    let (cmd, port) = nginx_cmd(lab, role, upstream)?;
    Ok(Service {
        proc: lab.serve(cmd, port)?,
        port,
    })
}

/// Returns the command that starts [`nginx`], and its port.
///
/// # Errors
/// If nginx is not installed.
pub fn nginx_cmd(lab: &Lab, role: Role, upstream: Option<u16>) -> Result<(Cmd, u16)> {
    let port = free_port()?;
    let conf = nginx_conf(lab, port, upstream)?;
    let cmd = lab.cmd(role, "nginx")?.args(nginx_args(&conf));
    Ok((cmd, port))
}

/// Returns the arguments that select a configuration; more may follow (`-s reload`).
pub fn nginx_args(conf: &Path) -> [&std::ffi::OsStr; 4] {
    let dir = conf.parent().unwrap_or(conf);
    ["-c".as_ref(), conf.as_os_str(), "-p".as_ref(), dir.as_os_str()]
}

/// Returns the path of the configuration of [`nginx`] on `port`.
pub fn nginx_conf_path(lab: &Lab, port: u16) -> PathBuf {
    lab.path(&format!("nginx-{port}.conf"))
}

fn nginx_conf(lab: &Lab, port: u16, upstream: Option<u16>) -> Result<PathBuf> {
    let temp = lab.path(&format!("nginx-{port}"));
    std::fs::create_dir_all(&temp)?;
    std::fs::create_dir_all(lab.path("www"))?;
    let www = lab.path("www").display().to_string();
    let temp = temp.display();
    let location = match upstream {
        None => format!("root {www};"),
        Some(_) => "proxy_pass http://back; proxy_http_version 1.1; \
                    proxy_set_header Connection \"\";"
            .to_owned(),
    };
    let back = upstream.map_or(String::new(), |port| {
        format!("upstream back {{ server 127.0.0.1:{port}; keepalive 16; }}")
    });
    // Only the workers of a root master change their user, which is the usual deployment.
    let user = if nix::unistd::geteuid().is_root() {
        "user nobody nogroup;"
    } else {
        ""
    };
    let text = format!(
        "{user}
worker_processes 2;
daemon off;
pid {temp}/pid;
error_log {temp}.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000000;
    client_body_temp_path {temp}/body;
    proxy_temp_path {temp}/proxy;
    fastcgi_temp_path {temp}/fastcgi;
    uwsgi_temp_path {temp}/uwsgi;
    scgi_temp_path {temp}/scgi;
    {back}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{ {location} }}
    }}
}}
"
    );
    let conf = nginx_conf_path(lab, port);
    std::fs::write(&conf, text).context("nginx configuration")?;
    Ok(conf)
}

/// Starts `iperf3 -s`.
///
/// # Errors
/// As [`redis`].
pub fn iperf3(lab: &Lab, role: Role) -> Result<Service> {
    let port = free_port()?;
    let cmd = lab
        .cmd(role, "iperf3")?
        .args(["-s", "-B", "127.0.0.1", "-p", &port.to_string()]);
    Ok(Service {
        proc: lab.serve(cmd, port)?,
        port,
    })
}

/// Starts memcached with four threads, without UDP.
///
/// # Errors
/// As [`redis`].
pub fn memcached(lab: &Lab, role: Role) -> Result<Service> {
    let port = free_port()?;
    let mut cmd = lab.cmd(role, "memcached")?.args([
        "-t",
        "4",
        "-l",
        "127.0.0.1",
        "-U",
        "0",
        "-m",
        "256",
        "-p",
        &port.to_string(),
    ]);
    if nix::unistd::geteuid().is_root() {
        cmd = cmd.args(["-u", "nobody"]);
    }
    Ok(Service {
        proc: lab.serve(cmd, port)?,
        port,
    })
}

/// Starts a Python program. The argument `PORT` is replaced by its port.
///
/// # Errors
/// As [`redis`].
pub fn python(lab: &Lab, role: Role, args: &[&str]) -> Result<Service> {
    interpreted(lab, role, "python3", args, &[("PYTHONUNBUFFERED", "1")])
}

/// Starts a Node program with variables. The argument `PORT` is replaced by its port.
///
/// # Errors
/// As [`redis`].
pub fn node(lab: &Lab, role: Role, args: &[&str], env: &[(&str, &str)]) -> Result<Service> {
    interpreted(lab, role, "node", args, env)
}

fn interpreted(lab: &Lab, role: Role, program: &str, args: &[&str], env: &[(&str, &str)]) -> Result<Service> {
    let port = free_port()?;
    let number = port.to_string();
    let args = args
        .iter()
        .map(|arg| if *arg == "PORT" { number.as_str() } else { arg });
    let mut cmd = lab.cmd(role, program)?.args(args);
    for (key, value) in env {
        cmd = cmd.env(key, value);
    }
    Ok(Service {
        proc: lab.serve(cmd, port)?,
        port,
    })
}
