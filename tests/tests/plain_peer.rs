//! One end has the library; the other is this process, without it, which records every byte.
//! It must see the application's bytes and nothing else, no matter which process answers on the service names.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::dialogue;
use rdmasock_tests::harness::{Paths, clean_environment};

/// Connections of each test, one after the other: the later ones meet the library's cache.
const CONNECTIONS: usize = 3;
const LIMIT: Duration = Duration::from_secs(60);

/// The ends that have the library.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Nobody,
    Client,
    Server,
    Both,
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let mut trials = Vec::new();
    let mut add = |name: String, role, after: &'static str, squatter: Option<&'static str>| {
        let paths = Arc::clone(&paths);
        // The library trusts a squatter of its own uid by design: only root can play another uid.
        let cannot = squatter.is_some() && !nix::unistd::geteuid().is_root();
        trials.push(Trial::test(name, move || run(&paths, role, after, squatter)).with_ignored_flag(cannot));
    };
    add("nobody_has_it".into(), Role::Nobody, "", None);
    for (name, role) in [("client", Role::Client), ("server", Role::Server)] {
        for after in ["", "0", "1", "1r", "100", "16K"] {
            let when = if after.is_empty() { "early" } else { after };
            add(format!("{name}_has_it/after_{when}"), role, after, None);
        }
    }
    for how in ["nothing", "garbage", "yes", "close"] {
        for (name, role) in [("client", Role::Client), ("server", Role::Server), ("both", Role::Both)] {
            for after in ["", "0"] {
                let when = if after.is_empty() { "early" } else { after };
                add(
                    format!("squatter_answers_{how}/{name}/after_{when}"),
                    role,
                    after,
                    Some(how),
                );
            }
        }
    }
    libtest_mimic::run(&args, trials).exit_code()
}

/// A helper process, killed if it still runs when this is dropped.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Helper {
    fn start(paths: &Paths, words: &[&str], library: Option<&str>) -> Result<Self, Failed> {
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        command.arg("helper").args(words);
        if let Some(after) = library {
            command.env("LD_PRELOAD", paths.library.as_ref()?);
            let early = if after.is_empty() { "2r,16K" } else { after };
            command.env("RDMASOCK_PROMOTE_AFTER", early);
        }
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Self(child))
    }

    /// Returns the first line that the helper prints.
    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Waits for the helper's exit, which must be a success with an empty stderr.
    fn succeed(mut self, who: &str) -> Result<(), Failed> {
        let end = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.0.try_wait()? {
                break status;
            }
            if Instant::now() > end {
                return Err(format!("the {who} is still there after {LIMIT:?}").into());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let mut words = String::new();
        self.0.stderr.as_mut().unwrap().read_to_string(&mut words)?;
        let quiet = words.is_empty() || std::env::var_os("RDMASOCK_LOG").is_some();
        if status.success() && quiet {
            return Ok(());
        }
        Err(format!("the {who}: {status}\n{words}").into())
    }
}

fn run(paths: &Paths, role: Role, after: &str, squatter: Option<&str>) -> Result<(), Failed> {
    let connections = CONNECTIONS.to_string();
    if role == Role::Client {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port().to_string();
        let _squatter = squat(paths, squatter, &port)?;
        let client = Helper::start(paths, &["dial", &port, &connections], Some(after))?;
        let recorded = plain_server(&listener);
        return both(recorded, client.succeed("client"));
    }
    // The port is free for a moment: the squatter has to know the server's port before the server does.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let port = port.to_string();
    let _squatter = squat(paths, squatter, &port)?;
    let library = (role != Role::Nobody).then_some(after);
    let mut server = Helper::start(paths, &["serve", &port, &connections], library)?;
    if server.line()? != port {
        return server.succeed("server");
    }
    let recorded = if role == Role::Both {
        Helper::start(paths, &["dial", &port, &connections], library)?.succeed("client")
    } else {
        plain_client(&port)
    };
    both(recorded, server.succeed("server"))
}

/// Returns success, or the errors of both ends.
fn both(recorded: Result<(), Failed>, helper: Result<(), Failed>) -> Result<(), Failed> {
    let words: Vec<_> = [recorded, helper]
        .into_iter()
        .filter_map(|r| r.err()?.message().map(str::to_owned))
        .collect();
    if words.is_empty() {
        Ok(())
    } else {
        Err(words.join("\n").into())
    }
}

/// Starts a squatter on the service names of `port`, and waits until it listens.
fn squat(paths: &Paths, how: Option<&str>, port: &str) -> Result<Option<Helper>, Failed> {
    let Some(how) = how else { return Ok(None) };
    let mut helper = Helper::start(paths, &["squat", port, how], None)?;
    match helper.line()?.as_str() {
        "squatting" => Ok(Some(helper)),
        _ => {
            helper.succeed("squatter")?;
            Err("the squatter did not start".into())
        }
    }
}

/// Compares the received bytes with the application's.
fn compare(got: &[u8], want: &[u8]) -> Result<(), Failed> {
    if got == want {
        return Ok(());
    }
    let at = got.iter().zip(want).take_while(|(a, b)| a == b).count();
    let some = |all: &[u8]| format!("{:02x?}", &all[at..all.len().min(at + 32)]);
    Err(format!(
        "{} bytes came, {} were sent; from byte {at} on:\n  came {}\n  sent {}",
        got.len(),
        want.len(),
        some(got),
        some(want)
    )
    .into())
}

/// Plays the server and checks the recording of each connection.
fn plain_server(listener: &TcpListener) -> Result<(), Failed> {
    for _ in 0..CONNECTIONS {
        let mut tcp = accept(listener)?;
        let mut got = Vec::new();
        for round in 0..dialogue::ROUNDS {
            let mut request = vec![0; dialogue::request(round).len()];
            tcp.read_exact(&mut request)?;
            got.extend(request);
            // A wrong byte shifts all later ones, so the comparison stops at the first.
            compare(&got, &dialogue::all_requests()[..got.len()])?;
            tcp.write_all(&dialogue::response(round))?;
        }
        tcp.read_to_end(&mut got)?;
        compare(&got, &dialogue::all_requests())?;
        tcp.write_all(&dialogue::farewell())?;
    }
    Ok(())
}

/// Calls accept(), with a time limit.
fn accept(listener: &TcpListener) -> Result<TcpStream, Failed> {
    listener.set_nonblocking(true)?;
    let end = Instant::now() + LIMIT;
    loop {
        match listener.accept() {
            Ok((tcp, _)) => {
                tcp.set_nonblocking(false)?;
                tcp.set_read_timeout(Some(LIMIT))?;
                return Ok(tcp);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(format!("no connection came: {e}").into()),
        }
    }
}

/// Plays the client and checks the recording of each connection.
fn plain_client(port: &str) -> Result<(), Failed> {
    for _ in 0..CONNECTIONS {
        let mut tcp = TcpStream::connect(format!("127.0.0.1:{port}"))?;
        tcp.set_read_timeout(Some(LIMIT))?;
        let mut got = Vec::new();
        for round in 0..dialogue::ROUNDS {
            tcp.write_all(&dialogue::request(round))?;
            let mut response = vec![0; dialogue::response(round).len()];
            tcp.read_exact(&mut response)?;
            got.extend(response);
            compare(&got, &dialogue::all_responses()[..got.len()])?;
        }
        tcp.shutdown(Shutdown::Write)?;
        tcp.read_to_end(&mut got)?;
        compare(&got, &dialogue::all_responses())?;
    }
    Ok(())
}
