//! Servers whose system calls are restricted, by a service manager or by themselves. They are never killed for a system
//! call of the library. Their connections are promoted, or stay on TCP for a reason that `rdmasock stat` gives.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rdmasock_integration::filter::Filter;
use rdmasock_integration::lab::{Lab, Mode, Role};
use rdmasock_integration::ports::free_port;
use rdmasock_integration::proc::{Cmd, Proc, wait_until};
use rdmasock_integration::servers::{Service, nginx_cmd, redis_cmd};

use crate::Case;
use crate::streams::same_file;

pub const CASES: &[Case] = &[
    ("confined_redis_as_a_service", redis),
    ("confined_nginx_as_a_service", nginx),
    ("confined_sshd_by_its_sandbox", sshd),
    ("confined_vsftpd_by_its_sandbox", vsftpd),
];

/// Starts a server, with the service manager's filter in force before it begins.
fn as_service(lab: &Lab, (cmd, port): (Cmd, u16)) -> Result<Service> {
    let proc = lab.serve(cmd.confined(Filter::system_service()), port)?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", proc.pid()))?;
    ensure!(status.contains("\nSeccomp:\t2\n"), "no filter is in force");
    Ok(Service { proc, port })
}

fn redis(lab: &mut Lab) -> Result<()> {
    let mut server = as_service(lab, redis_cmd(lab, Role::Server, &[])?)?;
    let port = server.port.to_string();
    let requests = || -> Result<()> {
        let cmd = lab.cmd(Role::Client, "redis-benchmark")?;
        let said = lab.text(cmd.args([
            "-p",
            &port,
            "-c",
            "5",
            "-n",
            "5000",
            "-t",
            "set,get,lpush",
            "-d",
            "3000",
            "-q",
        ]))?;
        ensure!(said.matches("requests per second").count() == 3, "{said}");
        Ok(())
    };
    requests()?;
    lab.check_paths(&server.proc, requests)?;
    // SAVE makes the server write a file.
    let cmd = lab.cmd(Role::Client, "redis-cli")?;
    ensure!(lab.text(cmd.args(["-p", &port, "SAVE"]))?.trim() == "OK", "SAVE");
    server.proc.check_running()
}

fn nginx(lab: &mut Lab) -> Result<()> {
    let mut server = as_service(lab, nginx_cmd(lab, Role::Server, None)?)?;
    let want = lab.random_file("www/page", 30_000, 11)?;
    // The requests use one connection.
    let url = server.url("page?[1-200]");
    let requests = || -> Result<()> {
        let got = lab.path("got");
        let cmd = lab.cmd(Role::Client, "curl")?.args(["-sSf", "-o"]);
        lab.run(cmd.args([got.as_os_str(), url.as_ref()]))?;
        same_file(&got, &want)
    };
    requests()?;
    lab.check_paths(&server.proc, requests)?;
    server.proc.check_running()
}

/// A directory that sshd needs when it runs as root. It is removed if it did not exist before.
struct Directory(Option<PathBuf>);

impl Directory {
    fn new(path: &Path) -> Result<Self> {
        if !nix::unistd::geteuid().is_root() || path.exists() {
            return Ok(Self(None));
        }
        std::fs::create_dir(path).with_context(|| path.display().to_string())?;
        Ok(Self(Some(path.into())))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// Checks sshd, which executes itself for each connection. Before the login a sandboxed process serves the client, and
/// the sandbox kills for a forbidden call. The connection survives an exec, so it stays on TCP.
fn sshd(lab: &mut Lab) -> Result<()> {
    const BYTES: usize = 5_000_000;
    let _directory = Directory::new(Path::new("/run/sshd"))?;
    let (host_key, key, port) = (lab.path("host-key"), lab.path("key"), free_port()?);
    for file in [&host_key, &key] {
        let cmd = lab
            .cmd(Role::Outsider, "ssh-keygen")?
            .args(["-q", "-t", "ed25519", "-N", "", "-f"]);
        lab.run(cmd.args([file]))?;
    }
    let config = lab.path("sshd_config");
    std::fs::write(
        &config,
        format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {}\nAuthorizedKeysFile {}.pub\nStrictModes no\nUsePAM no\nPidFile none\n\
             PasswordAuthentication no\nPermitRootLogin prohibit-password\n",
            host_key.display(),
            key.display()
        ),
    )?;
    let cmd = lab.cmd(Role::Server, "/usr/sbin/sshd")?.args(["-D", "-e", "-f"]);
    let mut server = lab.serve(cmd.args([&config]), port)?;

    let user = nix::unistd::User::from_uid(nix::unistd::geteuid())?.context("no user of this uid")?;
    let mut cmd = lab
        .cmd(Role::Client, "ssh")?
        .args(["-F", "none", "-p", &port.to_string(), "-i"])
        .args([&key]);
    for option in [
        "BatchMode=yes",
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
    ] {
        cmd = cmd.args(["-o", option]);
    }
    let cmd = cmd.args([&format!("{}@127.0.0.1", user.name), "cat"]);
    let want = lab.random_file("want", BYTES, 3)?;
    let mut client = cmd.stdin_pipe().spawn()?;
    let mut input = client.stdin().context("no pipe to ssh")?;
    let mut data = Vec::new();
    std::fs::File::open(&want)?.read_to_end(&mut data)?;
    input.write_all(&data)?;
    wait_until("all to come back", lab.deadline(), || {
        client.check_running()?;
        Ok(client.stdout().len() == BYTES)
    })?;
    ensure!(lab.totals(client.pid())?.link() == 0, "a byte went over a link");
    if matches!(lab.mode(), Mode::Both | Mode::ClientOnly) {
        wait_until("a reason", lab.deadline(), || {
            let said = lab.reasons(client.pid())?;
            Ok(said.contains("declined by peer") || said.contains("peer without the library"))
        })
        .with_context(|| lab.not_promoted(&client))?;
    }
    drop(input);
    ensure!(lab.finish(client)? == data, "other bytes came back");
    server.check_running()
}

/// Starts vsftpd in the foreground on `port`, with `role`.
fn start_vsftpd(lab: &Lab, role: Role, port: u16, sandbox: &str) -> Result<Proc> {
    let cmd = lab.cmd(role, "/usr/sbin/vsftpd")?;
    let cmd = cmd
        .args([lab.path("vsftpd.conf")])
        .args([format!("-olisten_port={port}")]);
    lab.serve(cmd.args([format!("-oseccomp_sandbox={sandbox}")]), port)
}

/// Fetches a file from the server on `port`.
fn fetch(lab: &Lab, role: Role, port: u16) -> Result<PathBuf> {
    let got = lab.path("fetched");
    let url = format!("ftp://127.0.0.1:{port}/file");
    let cmd = lab.cmd(role, "curl")?.args(["-sSf", "--max-time", "20", "-o"]);
    lab.run(cmd.args([got.as_os_str(), url.as_ref()]))?;
    Ok(got)
}

/// Checks vsftpd, which makes its children by clone(2), with namespaces of their own, and passes them the connections.
/// Its sandbox is made for an older libc. If the sandbox kills vsftpd without the library, the test runs without the
/// sandbox.
fn vsftpd(lab: &mut Lab) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        println!("\nskipped: vsftpd's children are of other users, which only root may start");
        return Ok(());
    }
    let empty = lab.path("empty");
    std::fs::create_dir(&empty)?;
    std::fs::create_dir(lab.path("files"))?;
    let want = lab.random_file("files/file", 5_000_000, 7)?;
    std::fs::write(
        lab.path("vsftpd.conf"),
        format!(
            "listen=YES\nlisten_address=127.0.0.1\nbackground=NO\nanonymous_enable=YES\nlocal_enable=NO\nftp_username=ftp\n\
             nopriv_user=nobody\nxferlog_enable=NO\nanon_root={}\nsecure_chroot_dir={}\n",
            lab.path("files").display(),
            empty.display()
        ),
    )?;
    let port = free_port()?;
    let alone = start_vsftpd(lab, Role::Outsider, port, "YES")?;
    let sandbox = match fetch(lab, Role::Outsider, port) {
        Ok(_) => "YES",
        Err(_) => {
            println!("skipped: vsftpd's own filter, which kills vsftpd on kernel TCP; without it the test goes on");
            "NO"
        }
    };
    drop(alone);
    let port = free_port()?;
    let mut server = start_vsftpd(lab, Role::Server, port, sandbox)?;
    for _ in 0..3 {
        same_file(&fetch(lab, Role::Client, port)?, &want)?;
    }
    server.check_running()
}
