//! redis: pipelining, publish and subscribe, blocking pops, saving under load, replication,
//! transactions, large values, and redis-benchmark's fifty clients.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rdmasock_integration::lab::{Lab, Role};
use rdmasock_integration::proc::{Cmd, wait_until};
use rdmasock_integration::servers::{Service, redis};

use crate::Case;

pub const CASES: &[Case] = &[
    ("redis_pipelining", pipelining),
    ("redis_publish_subscribe", publish_subscribe),
    ("redis_blocking_pop", blocking_pop),
    ("redis_save_under_load", save_under_load),
    ("redis_replication", replication),
    ("redis_transactions_and_large_values", transactions_and_large_values),
    ("redis_benchmark_fifty_clients", fifty_clients),
];

const KEYS: usize = 20_000;

/// Returns the command `redis-cli` on `server`, with a role.
fn cli(lab: &Lab, role: Role, server: &Service) -> Result<Cmd> {
    Ok(lab
        .cmd(role, "redis-cli")?
        .args(["-h", "127.0.0.1", "-p", &server.port.to_string()]))
}

/// Sends a command by a tool that never has the library. Returns the answer without its line end.
fn ask(lab: &Lab, server: &Service, words: &[&str]) -> Result<String> {
    let answer = lab.text(cli(lab, Role::Outsider, server)?.args(words))?;
    Ok(answer.trim_end().to_owned())
}

/// Sends each line as a command through one client, and returns one answer a line.
fn script(lab: &Lab, server: &Service, name: &str, lines: &str) -> Result<String> {
    let path = lab.path(name);
    std::fs::write(&path, lines)?;
    lab.text(cli(lab, Role::Client, server)?.stdin_file(&path)?)
}

fn value(key: usize) -> String {
    format!("{key}:").repeat(key % 97 + 1)
}

/// Loads `KEYS` keys in one burst and checks the count of answers.
fn load_keys(lab: &Lab, server: &Service) -> Result<()> {
    let mut burst = String::new();
    for key in 0..KEYS {
        writeln!(burst, "SET mine:{key} {}\r", value(key))?;
    }
    let path = lab.path("burst");
    std::fs::write(&path, burst)?;
    let cmd = cli(lab, Role::Client, server)?.args(["--pipe"]).stdin_file(&path)?;
    let said = lab.text(cmd)?;
    ensure!(
        said.contains(&format!("errors: 0, replies: {KEYS}")),
        "redis-cli --pipe: {said}"
    );
    Ok(())
}

/// Reads every `step`th key of [`load_keys`] back.
fn check_keys(lab: &Lab, server: &Service, step: usize) -> Result<()> {
    let keys = || (0..KEYS).step_by(step);
    let mut lines = String::new();
    for key in keys() {
        writeln!(lines, "GET mine:{key}")?;
    }
    let got = script(lab, server, "gets", &lines)?;
    let mut answers = got.lines();
    for key in keys() {
        ensure!(
            answers.next() == Some(value(key).as_str()),
            "the value of mine:{key} differs"
        );
    }
    ensure!(answers.next().is_none(), "more answers than questions");
    Ok(())
}

fn pipelining(lab: &mut Lab) -> Result<()> {
    let server = redis(lab, Role::Server, &[])?;
    load_keys(lab, &server)?;
    ensure!(ask(lab, &server, &["DBSIZE"])? == KEYS.to_string(), "DBSIZE");
    check_keys(lab, &server, 7)?;
    lab.check_paths(&server.proc, || check_keys(lab, &server, 7))
}

fn publish_subscribe(lab: &mut Lab) -> Result<()> {
    const MESSAGES: usize = 500;
    // A subscriber sends only once, so the bytes from the server must cause the promotion.
    lab.set("RDMASOCK_PROMOTE_AFTER", "0");
    let server = redis(lab, Role::Server, &[])?;
    let mut subscriber = cli(lab, Role::Client, &server)?.args(["SUBSCRIBE", "news"]).spawn()?;
    wait_until("the subscription", lab.deadline(), || {
        Ok(ask(lab, &server, &["PUBSUB", "NUMSUB", "news"])?.ends_with('1'))
    })?;
    let mut lines = String::new();
    for number in 0..MESSAGES {
        writeln!(lines, "PUBLISH news message-{number}")?;
    }
    let publish = || script(lab, &server, "publish", &lines);
    let receivers = publish()?;
    ensure!(
        receivers.lines().filter(|line| *line == "1").count() == MESSAGES,
        "{receivers}"
    );
    let last = format!("message-{}\n", MESSAGES - 1);
    wait_until("the last message", lab.deadline(), || {
        subscriber.check_running()?;
        Ok(subscriber.text().ends_with(&last))
    })?;
    let text = subscriber.text();
    let got = text.lines().filter(|line| line.starts_with("message-"));
    ensure!(
        got.eq((0..MESSAGES).map(|number| format!("message-{number}"))),
        "lost or out of order"
    );
    lab.check_paths(&server.proc, || publish().map(drop))
}

fn blocking_pop(lab: &mut Lab) -> Result<()> {
    const ITEMS: usize = 200;
    let server = redis(lab, Role::Server, &[])?;
    let pops = lab.path("pops");
    std::fs::write(&pops, "BLPOP queue 30\n".repeat(ITEMS))?;
    let mut popper = cli(lab, Role::Client, &server)?.stdin_file(&pops)?.spawn()?;
    wait_until("the first BLPOP to block", lab.deadline(), || {
        popper.check_running()?;
        Ok(ask(lab, &server, &["INFO", "clients"])?.contains("blocked_clients:1"))
    })?;
    let mut lines = String::new();
    for item in 0..ITEMS {
        writeln!(lines, "RPUSH queue item-{item}")?;
    }
    let push = || script(lab, &server, "pushes", &lines).map(drop);
    push()?;
    let got = String::from_utf8(lab.finish(popper)?)?;
    let items = got.lines().filter(|line| line.starts_with("item-"));
    ensure!(items.eq((0..ITEMS).map(|item| format!("item-{item}"))), "popped: {got}");
    lab.check_paths(&server.proc, push)
}

fn save_under_load(lab: &mut Lab) -> Result<()> {
    let server = redis(lab, Role::Server, &[])?;
    load_keys(lab, &server)?;
    let load = cli_benchmark(lab, &server, "150000", &["-r", "10000", "-t", "set", "-P", "4"])?.spawn()?;
    ensure!(ask(lab, &server, &["BGSAVE"])?.contains("started"), "BGSAVE");
    wait_until("the snapshot", lab.deadline(), || {
        Ok(ask(lab, &server, &["INFO", "persistence"])?.contains("rdb_bgsave_in_progress:0"))
    })?;
    let info = ask(lab, &server, &["INFO", "persistence"])?;
    ensure!(info.contains("rdb_last_bgsave_status:ok"), "BGSAVE failed: {info}");
    ensure!(info.contains("rdb_saves:1"), "no snapshot was written: {info}");
    lab.finish(load)?;
    check_keys(lab, &server, 501)?;
    lab.check_paths(&server.proc, || check_keys(lab, &server, 501))?;
    let dir = lab.path(&format!("redis-{}", server.port));
    drop(server);

    let dir = dir.to_str().context("a temporary path in UTF-8")?;
    let restored = redis(lab, Role::Server, &["--dir", dir])?;
    check_keys(lab, &restored, 1)
}

fn replication(lab: &mut Lab) -> Result<()> {
    let primary = redis(lab, Role::Server, &[])?;
    load_keys(lab, &primary)?;
    // The replica is the client of the replication stream.
    let port = primary.port.to_string();
    let replica = redis(lab, Role::Client, &["--replicaof", "127.0.0.1", &port])?;
    wait_until("the first synchronisation", lab.deadline(), || {
        Ok(ask(lab, &replica, &["INFO", "replication"])?.contains("master_link_status:up"))
    })?;
    lab.run(cli_benchmark(
        lab,
        &primary,
        "20000",
        &["-r", "5000", "-t", "set,lpush", "-P", "8"],
    )?)?;
    ensure!(
        ask(lab, &primary, &["WAIT", "1", "20000"])? == "1",
        "the replica does not follow"
    );
    let digest = |server| ask(lab, server, &["DEBUG", "DIGEST"]);
    let want = digest(&primary)?;
    ensure!(digest(&replica)? == want, "the replica's data differs");
    ensure!(
        ask(lab, &replica, &["DBSIZE"])? == ask(lab, &primary, &["DBSIZE"])?,
        "DBSIZE"
    );
    lab.check_paths(&primary.proc, || check_keys(lab, &primary, 7))
}

fn transactions_and_large_values(lab: &mut Lab) -> Result<()> {
    let server = redis(lab, Role::Server, &[])?;
    let mut lines = String::new();
    for _ in 0..50 {
        lines.push_str("MULTI\nINCR n\nAPPEND s abc\nSTRLEN s\nEXEC\n");
    }
    let said = script(lab, &server, "multi", &lines)?;
    ensure!(
        said.lines().filter(|line| *line == "QUEUED").count() == 150,
        "MULTI: {said}"
    );
    ensure!(said.ends_with("50\n150\n150\n"), "the last EXEC: {said}");

    for (name, size) in [("small", 3), ("large", 5_000_003), ("larger", 40_000_000)] {
        let file = lab.random_file(name, size, size as u64)?;
        let cmd = cli(lab, Role::Client, &server)?.args(["-x", "SET", name]);
        ensure!(lab.text(cmd.stdin_file(&file)?)?.trim() == "OK", "SET {name}");
        let got = lab.run(cli(lab, Role::Client, &server)?.args(["--raw", "GET", name]))?;
        same_but_line_end(&got, &file).with_context(|| format!("GET {name}"))?;
    }
    lab.check_paths(&server.proc, || script(lab, &server, "multi", &lines).map(drop))
}

/// Compares the value that `redis-cli --raw` printed, with its added line end, to a file.
fn same_but_line_end(got: &[u8], file: &Path) -> Result<()> {
    let want = std::fs::read(file)?;
    ensure!(got.strip_suffix(b"\n") == Some(want.as_slice()), "the value differs");
    Ok(())
}

fn cli_benchmark(lab: &Lab, server: &Service, requests: &str, more: &[&str]) -> Result<Cmd> {
    let port = server.port.to_string();
    let cmd = lab.cmd(Role::Client, "redis-benchmark")?;
    Ok(cmd
        .args(["-h", "127.0.0.1", "-p", &port, "-c", "50", "-n", requests, "-q"])
        .args(more))
}

fn fifty_clients(lab: &mut Lab) -> Result<()> {
    let server = redis(lab, Role::Server, &[])?;
    lab.run(cli_benchmark(
        lab,
        &server,
        "30000",
        &["-t", "set,get,incr,lpush,mset"],
    )?)?;
    lab.run(cli_benchmark(
        lab,
        &server,
        "30000",
        &["-t", "set,get", "-P", "16", "-d", "3000"],
    )?)?;
    let stats = ask(lab, &server, &["INFO", "commandstats"])?;
    for (command, calls) in [("set", 60_000), ("get", 60_000), ("incr", 30_000), ("mset", 30_000)] {
        let want = format!("cmdstat_{command}:calls={calls},");
        ensure!(stats.contains(&want), "expected {want} in {stats}");
    }
    lab.check_paths(&server.proc, || {
        let more = cli_benchmark(lab, &server, "30000", &["-t", "set"])?;
        lab.run(more).map(drop)
    })
}
