//! Two hosts, played by two network namespaces. The tests check that peers find each other by the control port, and
//! that no other process on it can disturb a connection. There is no RDMA here, so an attempt ends before the link is
//! made.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::remote::{CONTROL_PORT, Hosts, Namespace};

const LIMIT: Duration = Duration::from_secs(60);
const SERVER: &str = "10.77.0.2:8077";
const SERVER_V6: &str = "[fd77::2]:8077";

type Test = fn(&Paths) -> Result<(), Failed>;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let cannot = Hosts::new().err();
    if let Some(why) = &cannot {
        println!("skipped: no network namespaces here: {why:#}");
    }
    let tests: [(&str, Test); 12] = [
        ("equal_secrets_lead_to_yes", |p| {
            finds(p, SERVER, 0, [Some("one secret for both"); 2])
        }),
        ("without_secrets_too", |p| finds(p, SERVER, 0, [None; 2])),
        ("over_ipv6_too", |p| finds(p, SERVER_V6, 0, [None; 2])),
        ("the_worker_that_holds_the_connection_says_yes", |p| {
            finds(p, SERVER, 4, [Some("one secret for both"); 2])
        }),
        ("different_secrets_lead_nowhere", different_secrets),
        ("a_plain_host_costs_three_datagrams_at_most", plain_host),
        ("squatter/garbage", |p| squatter(p, "garbage", None)),
        ("squatter/echo", |p| squatter(p, "echo", None)),
        ("squatter/nonce", |p| squatter(p, "nonce", None)),
        ("squatter/stamp", |p| squatter(p, "stamp", None)),
        ("squatter/yes_without_the_secret", |p| {
            squatter(p, "yes", Some("a secret that it has not"))
        }),
        ("a_flood_is_survived", flood),
    ];
    let trials = tests
        .into_iter()
        .map(|(name, test)| {
            let paths = Arc::clone(&paths);
            Trial::test(name, move || test(&paths)).with_ignored_flag(cannot.is_some())
        })
        .collect();
    libtest_mimic::run(&args, trials).exit_code()
}

/// A helper process, killed if it still runs when this is dropped.
struct Helper {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file with a secret; its directory is removed with this value.
struct Secret(tempfile::TempDir);

impl Secret {
    fn new(text: &str) -> Result<Self, Failed> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("secret");
        std::fs::write(&file, text)?;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self(dir))
    }
}

impl Helper {
    /// `library`: `Some` starts the helper with the library, and with this secret, if there is one.
    fn start(
        paths: &Paths,
        host: &Namespace,
        words: &[&str],
        library: Option<Option<&Secret>>,
    ) -> Result<Self, Failed> {
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        command.args(["helper", "remote"]).args(words);
        if let Some(secret) = library {
            command.env("LD_PRELOAD", paths.library.as_ref()?);
            command.env("RDMASOCK_PROMOTE_AFTER", "2r");
            command.env("RDMASOCK_DEV_PRETEND_RDMA", "10.77.0.0/24,fd77::/64");
            if let Some(secret) = secret {
                command.env("RDMASOCK_SECRET_FILE", secret.0.path().join("secret"));
            }
        }
        host.enter(&mut command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().unwrap());
        Ok(Self { child, lines })
    }

    /// Returns the next line that the helper prints. If there is none, the error has its stderr.
    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        if self.lines.read_line(&mut line)? == 0 {
            let mut words = String::new();
            let stderr = self.child.stderr.as_mut().unwrap();
            stderr.read_to_string(&mut words)?;
            return Err(format!("it ended early: {words}").into());
        }
        Ok(line.trim().to_owned())
    }

    /// Ends the helper's stdin and waits for its exit, which must be a success with an empty stderr.
    fn succeed(mut self) -> Result<String, Failed> {
        drop(self.child.stdin.take());
        let end = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > end {
                return Err("it does not end".into());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let (mut last, mut words) = (String::new(), String::new());
        self.lines.read_to_string(&mut last)?;
        let stderr = self.child.stderr.as_mut().unwrap();
        stderr.read_to_string(&mut words)?;
        let quiet = words.is_empty() || std::env::var_os("RDMASOCK_LOG").is_some();
        if status.success() && quiet {
            return Ok(last.trim().to_owned());
        }
        Err(format!("{status}\n{words}").into())
    }
}

/// Returns the sums of the processes' counters.
fn events(paths: &Paths, pids: &str) -> Result<HashMap<String, u64>, Failed> {
    let mut sums = HashMap::new();
    for pid in pids.split(' ') {
        let out = Command::new(&paths.command)
            .args(["stat", "--json", "--pid", pid])
            .output()?;
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        let counts = report["instances"][0]["events"].as_object();
        for (name, count) in counts.into_iter().flatten() {
            *sums.entry(name.clone()).or_default() += count.as_u64().unwrap_or_default();
        }
    }
    Ok(sums)
}

/// Fails with all counters unless `good`.
fn expect(
    what: &str,
    counts: &HashMap<String, u64>,
    good: impl Fn(&dyn Fn(&str) -> u64) -> bool,
) -> Result<(), Failed> {
    let count = |name: &str| counts.get(name).copied().unwrap_or(u64::MAX);
    if good(&count) {
        return Ok(());
    }
    let mut counts: Vec<_> = counts.iter().filter(|(_, n)| **n > 0).collect();
    counts.sort();
    Err(format!("{what}: {counts:?}").into())
}

/// A server with `workers` and a client, each with its secret: the client receives the YES of the connection's owner.
fn finds(paths: &Paths, address: &str, workers: usize, secrets: [Option<&str>; 2]) -> Result<(), Failed> {
    let hosts = Hosts::new()?;
    let [ours, theirs] = secrets.map(|s| s.map(Secret::new).transpose());
    let (ours, theirs) = (ours?, theirs?);
    let words = ["listen", address, &workers.to_string()];
    let mut server = Helper::start(paths, &hosts.b, &words, Some(theirs.as_ref()))?;
    let pids = server.line()?;
    // More than one connection: with workers, some questions come to a worker that does not hold the connection.
    let connections = if workers == 0 { "2" } else { "8" };
    let words = ["talk", address, connections, "40"];
    let mut client = Helper::start(paths, &hosts.a, &words, Some(ours.as_ref()))?;
    let pid = client.line()?;
    let wanted: u64 = connections.parse().unwrap();
    expect("client", &events(paths, &pid)?, |count| {
        count("yes") >= wanted && count("control_asks") >= wanted && count("timeouts") == 0
    })?;
    expect("server", &events(paths, &pids)?, |count| {
        count("control_answers") >= wanted
            && count("control_stamps") >= 1
            && count("control_refused_hmac") == 0
            // A single process holds all connections. Several workers take turns: each gets questions about others'
            // connections.
            && (count("control_relays") == 0) == (workers == 0)
    })?;
    client.succeed()?;
    server.succeed().map(drop)
}

fn different_secrets(paths: &Paths) -> Result<(), Failed> {
    let hosts = Hosts::new()?;
    let (ours, theirs) = (
        Secret::new("the secret of one host")?,
        Secret::new("the secret of another")?,
    );
    let mut server = Helper::start(paths, &hosts.b, &["listen", SERVER, "0"], Some(Some(&theirs)))?;
    let pids = server.line()?;
    let words = ["talk", SERVER, "2", "40"];
    let mut client = Helper::start(paths, &hosts.a, &words, Some(Some(&ours)))?;
    let pid = client.line()?;
    expect("client", &events(paths, &pid)?, |count| {
        count("yes") == 0 && count("control_asks") >= 1
    })?;
    expect("server", &events(paths, &pids)?, |count| {
        count("control_refused_hmac") >= 1 && count("control_answers") == 0
    })?;
    client.succeed()?;
    server.succeed().map(drop)
}

fn plain_host(paths: &Paths) -> Result<(), Failed> {
    let hosts = Hosts::new()?;
    let mut server = Helper::start(paths, &hosts.b, &["listen", SERVER, "0"], None)?;
    server.line()?;
    let words = ["talk", SERVER, "5", "20"];
    let mut client = Helper::start(paths, &hosts.a, &words, Some(None))?;
    let pid = client.line()?;
    expect("client", &events(paths, &pid)?, |count| {
        count("yes") == 0 && count("control_asks") >= 1
    })?;
    let came = hosts.b.udp_counter("NoPorts")?;
    // The client asks one question at a time, and may end before the second.
    if !(1..=3).contains(&came) {
        return Err(format!("{came} datagrams came, not 1 to 3").into());
    }
    client.succeed()?;
    server.succeed().map(drop)
}

/// Another process has the port of the server's host; the server has the library or not.
fn squatter(paths: &Paths, how: &str, secret: Option<&str>) -> Result<(), Failed> {
    let secret = secret.map(Secret::new).transpose()?;
    for has_library in [false, true] {
        let hosts = Hosts::new()?;
        let mut squatter = Helper::start(paths, &hosts.b, &["squat", how], None)?;
        if squatter.line()? != "squatting" {
            return Err("the squatter did not start".into());
        }
        let library = has_library.then_some(secret.as_ref());
        let mut server = Helper::start(paths, &hosts.b, &["listen", SERVER, "0"], library)?;
        let pids = server.line()?;
        let words = ["talk", SERVER, "2", "60"];
        let mut client = Helper::start(paths, &hosts.a, &words, Some(secret.as_ref()))?;
        let pid = client.line()?;
        expect("client", &events(paths, &pid)?, |count| {
            let refused = match how {
                "garbage" => count("control_refused_length") + count("control_refused_kind"),
                "yes" => count("control_refused_hmac"),
                "stamp" => 1,
                _ => count("control_refused_misplaced"),
            };
            count("yes") == 0 && refused >= 1
        })?;
        if has_library {
            expect("server", &events(paths, &pids)?, |count| {
                count("control_unbound") == 1 && count("control_answers") == 0
            })?;
        }
        client.succeed()?;
        server.succeed()?;
        let came: u64 = squatter.succeed()?.parse()?;
        // There are two connections, and each is asked for a few times at most.
        if !(1..=20).contains(&came) {
            return Err(format!("{came} questions came to the squatter").into());
        }
    }
    Ok(())
}

fn flood(paths: &Paths) -> Result<(), Failed> {
    let hosts = Hosts::new()?;
    let mut server = Helper::start(paths, &hosts.b, &["listen", SERVER, "0"], Some(None))?;
    let pids = server.line()?;
    // The library binds the port with the first connection.
    let mut first = Helper::start(paths, &hosts.a, &["talk", SERVER, "1", "20"], Some(None))?;
    first.line()?;
    let target = format!("10.77.0.2:{CONTROL_PORT}");
    Helper::start(paths, &hosts.a, &["flood", &target, "30000"], None)?.succeed()?;
    expect("server", &events(paths, &pids)?, |count| {
        count("control_refused_length") > 0 && count("control_refused_kind") > 0 && count("control_refused_rate") > 0
    })?;
    std::thread::sleep(Duration::from_millis(300));
    let mut client = Helper::start(paths, &hosts.a, &["talk", SERVER, "1", "40"], Some(None))?;
    let pid = client.line()?;
    expect("client", &events(paths, &pid)?, |count| count("yes") >= 1)?;
    client.succeed()?;
    first.succeed()?;
    server.succeed().map(drop)
}
