//! nginx with two workers: keep-alive, a connection per request, a large file by sendfile, a
//! reverse proxy, and a reload under load.

use anyhow::{Context, Result, ensure};
use rdmasock_integration::lab::{Lab, Mode, Role};
use rdmasock_integration::proc::wait_until;
use rdmasock_integration::servers::{Service, nginx, nginx_args, nginx_conf_path};

use crate::Case;
use crate::streams::same_file;

pub const CASES: &[Case] = &[
    ("nginx_keep_alive", keep_alive),
    ("nginx_connection_per_request", connection_per_request),
    ("nginx_large_file_by_sendfile", large_file),
    ("nginx_reverse_proxy", reverse_proxy),
    ("nginx_reload_under_load", reload),
];

const PAGE: &str = "www/page.bin";

/// Starts a server that has a page of 3,000 bytes.
fn with_page(lab: &Lab) -> Result<Service> {
    let server = nginx(lab, Role::Server, None)?;
    lab.random_file(PAGE, 3000, 5)?;
    Ok(server)
}

fn wrk(lab: &Lab, server: &Service, more: &[&str]) -> Result<()> {
    let cmd = lab
        .cmd(Role::Client, "wrk")?
        .args(["-t", "2", "-c", "50", "-d", "2s"])
        .args(more);
    let said = lab.text(cmd.args([server.url("page.bin")]))?;
    ensure!(
        !said.contains("Socket errors") && !said.contains("Non-2xx"),
        "wrk: {said}"
    );
    let requests = said.split_whitespace().zip(said.split_whitespace().skip(1));
    let count = requests
        .filter(|(_, word)| *word == "requests")
        .find_map(|(n, _)| n.parse().ok());
    ensure!(count.is_some_and(|count: u64| count > 100), "wrk: {said}");
    Ok(())
}

/// Fetches the page `times` times over one connection and compares every byte.
fn curl_pages(lab: &Lab, server: &Service, times: usize) -> Result<()> {
    let url = server.url(&format!("page.bin?[1-{times}]"));
    let cmd = lab.cmd(Role::Client, "curl")?;
    let got = lab.run(cmd.args(["--silent", "--show-error", "--fail", &url]))?;
    let page = std::fs::read(lab.path(PAGE))?;
    ensure!(
        got == page.repeat(times),
        "curl got other bytes ({} of them)",
        got.len()
    );
    Ok(())
}

fn keep_alive(lab: &mut Lab) -> Result<()> {
    let server = with_page(lab)?;
    curl_pages(lab, &server, 100)?;
    wrk(lab, &server, &[])?;
    curl_pages(lab, &server, 100)?;
    lab.check_paths(&server.proc, || curl_pages(lab, &server, 100))
}

fn connection_per_request(lab: &mut Lab) -> Result<()> {
    let server = with_page(lab)?;
    // By default such connections stay on TCP. With threshold 0 each is promoted in its short life.
    wrk(lab, &server, &["-H", "Connection: close"])?;
    lab.set("RDMASOCK_PROMOTE_AFTER", "0");
    let eager = with_page(lab)?;
    wrk(lab, &eager, &["-H", "Connection: close"])?;
    for _ in 0..10 {
        curl_pages(lab, &eager, 1)?;
    }
    Ok(())
}

fn large_file(lab: &mut Lab) -> Result<()> {
    let server = nginx(lab, Role::Server, None)?;
    let file = lab.random_file("www/large.bin", 100_000_000, 6)?;
    let copy = lab.path("copy.bin");
    let target = copy.to_str().context("a temporary path in UTF-8")?;
    let curl = |more: &[&str]| -> Result<()> {
        let cmd = lab.cmd(Role::Client, "curl")?.args(["-sSf", "-o", target]).args(more);
        lab.run(cmd.args([server.url("large.bin")])).map(drop)
    };
    curl(&[])?;
    ensure!(lab.sha256(&copy)? == lab.sha256(&file)?, "the copy's hash differs");
    curl(&["-r", "12345678-55555555"])?;
    let want = std::fs::read(&file)?;
    ensure!(
        want.get(12_345_678..=55_555_555) == Some(&std::fs::read(&copy)?[..]),
        "the range differs"
    );
    // The client is slower than the server, so the server's sendfile finds the connection full again and again.
    curl(&["-r", "0-19999999", "--limit-rate", "15M"])?;
    ensure!(
        want.get(..20_000_000) == Some(&std::fs::read(&copy)?[..]),
        "the slow copy differs"
    );
    lab.check_paths(&server.proc, || curl(&[]))
}

fn reverse_proxy(lab: &mut Lab) -> Result<()> {
    // For the server in front, the server behind is the other side, as a client is in other tests. So it has the
    // client's role.
    let back = nginx(lab, Role::Client, None)?;
    let front = nginx(lab, Role::Server, Some(back.port))?;
    lab.random_file(PAGE, 3000, 5)?;
    let file = lab.random_file("www/large.bin", 30_000_000, 7)?;
    curl_pages(lab, &front, 50)?;
    wrk(lab, &front, &[])?;
    let copy = lab.path("copy.bin");
    let cmd = lab
        .cmd(Role::Client, "curl")?
        .args(["-sSf", &front.url("large.bin"), "-o"]);
    lab.run(cmd.args([&copy]))?;
    same_file(&copy, &file)?;
    let more = || curl_pages(lab, &front, 50);
    lab.check_paths(&front.proc, more)?;
    if lab.mode() == Mode::Both {
        lab.check_paths(&back.proc, more)?;
    }
    Ok(())
}

fn reload(lab: &mut Lab) -> Result<()> {
    let server = with_page(lab)?;
    let port = server.port.to_string();
    let page = lab.path(PAGE);
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/keepalive.py");
    let load = lab
        .cmd(Role::Client, "python3")?
        .args([program, &port, "page.bin", "4"])
        .args([page])
        .spawn()?;
    let conf = nginx_conf_path(lab, server.port);
    for generation in 1..=3 {
        let before = workers(server.proc.pid())?;
        std::thread::sleep(std::time::Duration::from_millis(500));
        lab.run(
            lab.cmd(Role::Outsider, "nginx")?
                .args(nginx_args(&conf))
                .args(["-s", "reload"]),
        )?;
        wait_until("the new workers", lab.deadline(), || {
            let now = workers(server.proc.pid())?;
            Ok(now.iter().filter(|pid| !before.contains(pid)).count() >= 2)
        })
        .with_context(|| format!("reload {generation}"))?;
    }
    let said = String::from_utf8(lab.finish(load)?)?;
    // No request fails on kernel TCP: mode `kernel` runs the same check.
    ensure!(said.contains(", 0 failed"), "{said}");
    ensure!(!said.starts_with("0 requests"), "{said}");
    lab.check_paths(&server.proc, || curl_pages(lab, &server, 100))
}

/// Returns the pids of a process's children.
fn workers(pid: u32) -> Result<Vec<String>> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(list.split_whitespace().map(str::to_owned).collect())
}
