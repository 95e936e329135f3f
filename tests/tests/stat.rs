//! The report of `rdmasock stat` about a connection that stands still: the threads that sleep on it, in which calls,
//! and the unread bytes at either end. The report comes while the stall lasts, also about a stopped program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdmasock_tests::harness::{Paths, clean_environment};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(30);

type Case = fn(&Paths) -> Result<(), Failed>;

const CASES: &[(&str, Case)] = &[
    ("a_receiver_that_nothing_comes_for", receiver),
    ("a_sender_whose_reader_does_not_read", sender),
    ("a_sender_whose_reader_is_stopped", stopped),
    ("poll_and_epoll", poll_and_epoll),
    ("both_directions_at_once", both_directions),
    ("bytes_that_nobody_reads", unread),
    ("a_killed_peer", killed),
    ("one_line_a_connection", one_line),
];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let trial = |(name, case): &(&str, Case)| {
        let (paths, case) = (Arc::clone(&paths), *case);
        Trial::test(*name, move || case(&paths))
    };
    libtest_mimic::run(&args, CASES.iter().map(trial).collect()).exit_code()
}

/// An end of the connection, killed if it still runs when this is dropped.
struct End {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl End {
    fn start(paths: &Paths, words: &[&str]) -> Result<Self, Failed> {
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        let mut child = command
            .env("LD_PRELOAD", paths.library.as_ref()?)
            .env("RDMASOCK_PROMOTE_AFTER", "2r,16K")
            .args(["helper", "stall"])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().unwrap());
        Ok(Self { child, lines })
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Tells the end to do `what`.
    fn begin(&mut self, what: &str) -> Result<(), Failed> {
        // The line is written in one piece: the program reads a line at a time.
        let line = format!("{what}\n");
        Ok(self.child.stdin.as_mut().unwrap().write_all(line.as_bytes())?)
    }

    /// Waits until the end has finished.
    fn finish(&mut self) -> Result<(), Failed> {
        match self.line()?.as_str() {
            "done" => Ok(()),
            other => Err(format!("it said {other:?}").into()),
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).unwrap();
    }
}

/// Two ends of a connection that is on a link, and stands still.
struct Pair<'a> {
    paths: &'a Paths,
    server: End,
    client: End,
}

impl<'a> Pair<'a> {
    fn promoted(paths: &'a Paths) -> Result<Self, Failed> {
        let mut server = End::start(paths, &["server"])?;
        let port = server.line()?;
        let mut client = End::start(paths, &["client", &port])?;
        server.line()?;
        client.line()?;
        let mut pair = Self { paths, server, client };
        let end = Instant::now() + LIMIT;
        loop {
            pair.server.begin("answer 20")?;
            pair.client.begin("ask 20")?;
            pair.server.finish()?;
            pair.client.finish()?;
            let both = [&pair.server, &pair.client].map(|end| pair.stream(end));
            if both.iter().all(|s| s["tx_path"] == "shm" && s["rx_path"] == "shm") {
                return Ok(pair);
            }
            if Instant::now() > end {
                return Err(format!("not promoted: {both:?}").into());
            }
        }
    }

    /// Returns the report of `rdmasock stat` about the one connection of an end.
    fn stream(&self, end: &End) -> Value {
        stream(self.paths, end)
    }

    /// Waits until the report about an end satisfies `condition`, and returns it.
    fn until(&self, end: &End, condition: impl Fn(&Value) -> bool) -> Result<Value, Failed> {
        let until = Instant::now() + LIMIT;
        loop {
            let stream = self.stream(end);
            if condition(&stream) {
                return Ok(stream);
            }
            if Instant::now() > until {
                return Err(format!("{stream:#}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a thread of an end is asleep in `call`, and one alone.
    fn until_asleep(&self, end: &End, call: &str) -> Result<Value, Failed> {
        self.until(end, |s| is_asleep(s, call))
    }

    /// Waits until no thread sleeps, and nothing is unread.
    fn until_quiet(&self) -> Result<(), Failed> {
        for end in [&self.server, &self.client] {
            self.until(end, |s| {
                s["asleep"] == Value::Array(Vec::new()) && s["unread_here"] == 0 && s["unread_there"] == 0
            })?;
        }
        Ok(())
    }
}

fn stream(paths: &Paths, end: &End) -> Value {
    let pid = end.pid().to_string();
    let output = Command::new(&paths.command)
        .args(["stat", "--json", "--pid", &pid])
        .output()
        .unwrap();
    // `rdmasock stat` does not list a program that has not used a socket yet, or that has ended.
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let stream = seen.pointer("/instances/0/streams/0");
    stream.cloned().unwrap_or_default()
}

fn is_asleep(stream: &Value, call: &str) -> bool {
    let asleep = stream["asleep"].as_array();
    asleep.is_some_and(|all| all.len() == 1 && all[0]["call"] == call && all[0]["threads"] == 1)
}

fn seconds(stream: &Value) -> f64 {
    stream["asleep"][0]["asleep_s"].as_f64().unwrap()
}

fn receiver(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    pair.until_quiet()?;
    pair.client.begin("receive 10")?;
    let first = pair.until_asleep(&pair.client, "recv")?;
    // The main thread's id is the process id.
    assert_eq!(first["asleep"][0]["thread"], pair.client.pid(), "{first:#}");
    assert_eq!((&first["unread_here"], &first["unread_there"]), (&0.into(), &0.into()));
    let later = pair.until(&pair.client, |s| is_asleep(s, "recv") && seconds(s) >= 0.1)?;
    assert!(seconds(&later) > seconds(&first));
    assert_eq!(pair.stream(&pair.server)["asleep"], Value::Array(Vec::new()));
    pair.server.begin("send 10")?;
    pair.server.finish()?;
    pair.client.finish()?;
    pair.until_quiet()
}

/// More bytes than a ring takes.
const MUCH: usize = 20_000_000;

fn sender(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    pair.client.begin(&format!("send {MUCH}"))?;
    let client = pair.until(&pair.client, |s| {
        // The ring has grown to its largest size.
        is_asleep(s, "send") && seconds(s) >= 0.1
    })?;
    let server = pair.stream(&pair.server);
    assert!(client["unread_there"].as_u64().unwrap() > 0, "{client:#}");
    assert_eq!(client["unread_there"], server["unread_here"], "{server:#}");
    assert_eq!(
        (&client["unread_here"], &server["unread_there"]),
        (&0.into(), &0.into())
    );
    pair.server.begin(&format!("receive {MUCH}"))?;
    pair.server.finish()?;
    pair.client.finish()?;
    pair.until_quiet()
}

fn stopped(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    pair.server.begin(&format!("receive {MUCH}"))?;
    pair.until_asleep(&pair.server, "recv")?;
    pair.server.signal(Signal::SIGSTOP);
    pair.client.begin(&format!("send {MUCH}"))?;
    let client = pair.until_asleep(&pair.client, "send")?;
    let server = pair.until(&pair.server, |s| s["unread_here"] != 0)?;
    // The server was asleep when it was stopped, and has not noticed the arrived bytes.
    assert!(is_asleep(&server, "recv"), "{server:#}");
    assert!(client["unread_there"].as_u64().unwrap() > 0, "{client:#}");
    pair.server.signal(Signal::SIGCONT);
    pair.server.finish()?;
    pair.client.finish()?;
    pair.until_quiet()
}

fn poll_and_epoll(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    for (word, call) in [("poll", "poll"), ("epoll", "epoll_wait")] {
        pair.client.begin(word)?;
        let stream = pair.until_asleep(&pair.client, call)?;
        assert_eq!(stream["asleep"][0]["thread"], pair.client.pid(), "{stream:#}");
        pair.server.begin("send 10")?;
        pair.server.finish()?;
        pair.client.finish()?;
        pair.until(&pair.client, |s| {
            s["asleep"] == Value::Array(Vec::new()) && s["unread_here"] == 10
        })?;
        pair.client.begin("receive 10")?;
        pair.client.finish()?;
    }
    pair.until_quiet()
}

fn both_directions(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    pair.client.begin(&format!("both {MUCH}"))?;
    let stream = pair.until(&pair.client, |s| {
        s["asleep"].as_array().is_some_and(|all| all.len() == 2)
    })?;
    let mut calls: Vec<&str> = (0..2)
        .map(|at| stream["asleep"][at]["call"].as_str().unwrap())
        .collect();
    calls.sort_unstable();
    assert_eq!(calls, ["recv", "send"]);
    assert_ne!(stream["asleep"][0]["thread"], stream["asleep"][1]["thread"]);
    pair.server.begin(&format!("receive {MUCH}"))?;
    pair.server.finish()?;
    pair.server.begin("send 1")?;
    pair.server.finish()?;
    pair.client.finish()?;
    pair.until_quiet()
}

fn unread(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    pair.client.begin("send 1000")?;
    pair.client.finish()?;
    pair.until(&pair.server, |s| s["unread_here"] == 1000)?;
    assert_eq!(pair.stream(&pair.client)["unread_there"], 1000);
    pair.server.begin("receive 400")?;
    pair.server.finish()?;
    assert_eq!(pair.stream(&pair.server)["unread_here"], 600);
    assert_eq!(pair.stream(&pair.client)["unread_there"], 600);
    Ok(())
}

fn killed(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    pair.client.begin("poll")?;
    pair.until_asleep(&pair.client, "poll")?;
    pair.server.signal(Signal::SIGKILL);
    pair.server.child.wait()?;
    pair.client.finish()?;
    // The program has not read the end; the other end's counts are not known any more.
    let client = pair.until(&pair.client, |s| s["asleep"] == Value::Array(Vec::new()))?;
    assert_eq!(client["unread_here"], Value::Null, "{client:#}");
    assert_eq!(stream(paths, &pair.server), Value::Null);
    Ok(())
}

fn one_line(paths: &Paths) -> Result<(), Failed> {
    let mut pair = Pair::promoted(paths)?;
    pair.client.begin(&format!("send {MUCH}"))?;
    pair.until_asleep(&pair.client, "send")?;
    let output = Command::new(&paths.command).arg("stat").output()?;
    let text = String::from_utf8(output.stdout)?;
    for end in [&pair.server, &pair.client] {
        let pid = end.pid().to_string();
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| line.split_whitespace().next() == Some(&pid))
            .collect();
        let [line] = lines.as_slice() else {
            return Err(format!("{lines:?} of {text}").into());
        };
        for part in ["127.0.0.1:", "shm", "iB"] {
            assert!(line.contains(part), "{part} in {line}");
        }
        let is_client = pid == pair.client.pid().to_string();
        assert_eq!(line.contains("send "), is_client, "{text}");
    }
    pair.server.begin(&format!("receive {MUCH}"))?;
    pair.server.finish()?;
    pair.client.finish()
}
