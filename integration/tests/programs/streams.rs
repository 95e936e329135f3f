//! Programs that move bulk data: iperf3, socat and curl.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rdmasock_integration::lab::{Lab, Role};
use rdmasock_integration::ports::free_port;
use rdmasock_integration::proc::{Proc, wait_until};
use rdmasock_integration::servers::{iperf3, python};

use crate::Case;

pub const CASES: &[Case] = &[
    ("iperf3_one_stream", |lab| iperf(lab, &[])),
    ("iperf3_eight_streams", |lab| iperf(lab, &["-P", "8"])),
    ("iperf3_reverse", |lab| iperf(lab, &["-R"])),
    ("iperf3_bidirectional", |lab| iperf(lab, &["--bidir"])),
    ("curl_download_from_http_server", curl_download),
    ("curl_upload", curl_upload),
    ("curl_under_valgrind", curl_under_valgrind),
    ("socat_both_ways_with_half_close", socat_both_ways),
    ("socat_forking_server", socat_fork),
];

/// Fails unless both files have the same bytes.
pub fn same_file(got: &Path, want: &Path) -> Result<()> {
    let (got, want) = (std::fs::read(got)?, std::fs::read(want)?);
    let first = got.iter().zip(&want).position(|(a, b)| a != b);
    ensure!(
        got == want,
        "{} bytes instead of {}, first difference at {first:?}",
        got.len(),
        want.len()
    );
    Ok(())
}

fn iperf(lab: &mut Lab, more: &[&str]) -> Result<()> {
    let server = iperf3(lab, Role::Server)?;
    iperf_client(lab, server.port, more)?;
    lab.check_paths(&server.proc, || iperf_client(lab, server.port, more))
}

fn iperf_client(lab: &Lab, port: u16, more: &[&str]) -> Result<()> {
    let port = port.to_string();
    let cmd = lab.cmd(Role::Client, "iperf3")?;
    let json = lab.run(cmd.args(["-c", "127.0.0.1", "-p", &port, "-t", "2", "-J"]).args(more))?;
    let json: serde_json::Value = serde_json::from_slice(&json)?;
    ensure!(json.get("error").is_none(), "iperf3: {json}");
    let bytes = |pointer: &str| json.pointer(pointer).and_then(serde_json::Value::as_u64);
    let (sent, received) = (bytes("/end/sum_sent/bytes"), bytes("/end/sum_received/bytes"));
    ensure!(
        received > Some(0) && sent >= received,
        "sent {sent:?}, received {received:?}"
    );
    if more.contains(&"--bidir") {
        let back = bytes("/end/sum_received_bidir_reverse/bytes");
        ensure!(back > Some(0), "nothing in the other direction");
    }
    Ok(())
}

fn curl_download(lab: &mut Lab) -> Result<()> {
    std::fs::create_dir(lab.path("www"))?;
    let file = lab.random_file("www/file.bin", 20_000_000, 8)?;
    let www = lab.path("www").display().to_string();
    let args = ["-m", "http.server", "PORT", "--bind", "127.0.0.1", "--directory", &www];
    let server = python(lab, Role::Server, &args)?;
    let copy = lab.path("copy.bin");
    let download = || {
        let cmd = lab
            .cmd(Role::Client, "curl")?
            .args(["-sSf", &server.url("file.bin"), "-o"]);
        lab.run(cmd.args([&copy]))?;
        same_file(&copy, &file)?;
        Ok(std::fs::remove_file(&copy)?)
    };
    for _ in 0..3 {
        download()?;
    }
    let list = lab.text(lab.cmd(Role::Client, "curl")?.args(["-sSf", &server.url("")]))?;
    ensure!(list.contains("file.bin"), "no directory listing: {list}");
    lab.check_paths(&server.proc, download)
}

/// Checks curl under Valgrind. Valgrind's processor has no vDSO and runs one thread at a time, so a promotion takes
/// longer.
fn curl_under_valgrind(lab: &mut Lab) -> Result<()> {
    std::fs::create_dir(lab.path("www"))?;
    let file = lab.random_file("www/file.bin", 60_000_000, 12)?;
    let www = lab.path("www").display().to_string();
    let args = ["-m", "http.server", "PORT", "--bind", "127.0.0.1", "-d"];
    let server = python(lab, Role::Server, &[&args[..], &[&www]].concat())?;
    let copy = lab.path("copy.bin");
    lab.check_paths(&server.proc, || {
        let valgrind = lab.cmd(Role::Client, "valgrind")?;
        let cmd = valgrind.args(["--quiet", "--tool=none", "--error-exitcode=99", "curl"]);
        let url = server.url("file.bin");
        lab.run(cmd.args(["-sSf", &url, "-o"]).args([&copy]))?;
        same_file(&copy, &file)
    })
}

fn curl_upload(lab: &mut Lab) -> Result<()> {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/http_put.py");
    let server = python(lab, Role::Server, &[program, "PORT"])?;
    let upload = |name: &str, size| {
        let file = lab.random_file(name, size, 9)?;
        let cmd = lab.cmd(Role::Client, "curl")?.args(["-sSf", &server.url(name), "-T"]);
        let answer = lab.text(cmd.args([&file]))?;
        ensure!(answer.trim() == lab.sha256(&file)?, "{name} arrived with another hash");
        Ok(())
    };
    upload("small.bin", 1)?;
    upload("middle.bin", 65_537)?;
    upload("large.bin", 30_000_000)?;
    lab.check_paths(&server.proc, || upload("large.bin", 30_000_000))
}

fn socat_both_ways(lab: &mut Lab) -> Result<()> {
    const SIZE: usize = 20_000_000;
    let port = free_port()?;
    let listen = format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr");
    let cmd = lab
        .cmd(Role::Server, "socat")?
        .args(["-t", "30", "-", &listen])
        .stdin_pipe();
    let mut server = lab.serve(cmd, port)?;
    let connect = format!("TCP:127.0.0.1:{port}");
    let cmd = lab
        .cmd(Role::Client, "socat")?
        .args(["-t", "30", "-", &connect])
        .stdin_pipe();
    let mut client = cmd.spawn()?;

    let from_server = lab.random_file("server.bin", SIZE, 10)?;
    let from_client = lab.random_file("client.bin", SIZE, 11)?;
    let (data, mut sent) = ([std::fs::read(&from_server)?, std::fs::read(&from_client)?], 0);
    let mut pipes = [&mut server, &mut client].map(Proc::stdin);
    // The writers send little at a time until the connection is promoted, then the rest as fast as possible.
    lab.check_paths(&server, || {
        let more = sent..SIZE.min(sent + 16_384);
        sent = more.end;
        for (pipe, data) in pipes.iter_mut().zip(&data) {
            let part = data.get(more.clone()).unwrap_or_default();
            pipe.as_mut().context("a pipe")?.write_all(part)?;
        }
        Ok(())
    })?;
    let mut writers = Vec::new();
    for (pipe, mut data) in pipes.into_iter().zip(data) {
        let mut pipe = pipe.context("a pipe")?;
        writers.push(std::thread::spawn(move || {
            pipe.write_all(&data.split_off(sent)).map(|()| pipe)
        }));
    }
    wait_until("all bytes both ways", lab.deadline(), || {
        server.check_running()?;
        client.check_running()?;
        Ok(server.stdout().len() >= SIZE && client.stdout().len() >= SIZE)
    })?;
    lab.check_paths(&server, || Ok(()))?;
    for writer in writers {
        // Closing the pipe makes this side half-close its connection.
        drop(writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))??);
    }
    ensure!(
        lab.finish(server)? == std::fs::read(&from_client)?,
        "the server got other bytes"
    );
    ensure!(
        lab.finish(client)? == std::fs::read(&from_server)?,
        "the client got other bytes"
    );
    Ok(())
}

fn socat_fork(lab: &mut Lab) -> Result<()> {
    const SIZE: usize = 3_000_000;
    let port = free_port()?;
    let listen = format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork");
    let cmd = lab
        .cmd(Role::Server, "socat")?
        .args(["-t", "30", &listen, "EXEC:sha256sum"]);
    let server = lab.serve(cmd, port)?;
    let mut clients = Vec::new();
    for number in 0..4 {
        let name = format!("upload-{number}.bin");
        let file = lab.random_file(&name, SIZE + number, number as u64 + 20)?;
        let connect = format!("TCP:127.0.0.1:{port}");
        let cmd = lab
            .cmd(Role::Client, "socat")?
            .args(["-t", "30", "-", &connect])
            .stdin_pipe();
        let mut client = cmd.spawn()?;
        let pipe = client.stdin().context("a pipe")?;
        let bytes = std::fs::read(&file)?;
        clients.push((client, pipe, file, bytes));
    }
    // The forked children, which own the connections, live until their clients half-close.
    let mut sent = 0;
    lab.check_paths(&server, || {
        let more = sent..SIZE.min(sent + 16_384);
        sent = more.end;
        for (_, pipe, _, bytes) in &mut clients {
            pipe.write_all(bytes.get(more.clone()).unwrap_or_default())?;
        }
        Ok(())
    })?;
    for (_, pipe, _, bytes) in &mut clients {
        pipe.write_all(bytes.get(sent..).unwrap_or_default())?;
    }
    lab.check_paths(&server, || Ok(()))?;
    for (client, pipe, file, _) in clients {
        drop(pipe);
        let answer = String::from_utf8(lab.finish(client)?)?;
        ensure!(answer.starts_with(&lab.sha256(&file)?), "another hash: {answer}");
    }
    Ok(())
}
