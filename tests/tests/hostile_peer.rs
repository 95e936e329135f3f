//! A server with the library has one client that attacks it over the link, as another user where that is possible. All
//! other clients are served, also those that come during the attack.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::hostile::attacks;
use rdmasock_tests::observe::promotion_state;

/// The longest time that any step may take; a step takes milliseconds.
const LIMIT: Duration = Duration::from_secs(60);
/// Rounds of a friend on each of its connections, before and under the attack.
const ROUNDS: u32 = 300;
/// The most descriptors that the victim may have open.
const DESCRIPTORS: u32 = 200;
/// The memory that a receiver of one stream may make the victim use, MiB: eight of the largest rings.
const MOST_BACKED: u64 = 34;
/// A user who owns no files.
const OTHER: u32 = 65_534;
/// Clients that come and go during the attack.
const VISITS: usize = 30;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let mut trials = Vec::new();
    let is_root = nix::unistd::geteuid().is_root();
    for (name, victim) in attacks::ALL.iter().chain(attacks::OF_ANOTHER_USER) {
        let paths = Arc::clone(&paths);
        let cannot = !is_root && attacks::OF_ANOTHER_USER.contains(&(name, victim));
        let trial = Trial::test(format!("{name}/{victim}"), move || attack(&paths, name, victim));
        trials.push(trial.with_ignored_flag(cannot));
    }
    for (name, asker, is_believed) in [("another_user", OTHER, false), ("root", 0, true)] {
        let paths = Arc::clone(&paths);
        let run = move || ask_about_a_plain_peer(&paths, asker, is_believed);
        let cannot = !nix::unistd::geteuid().is_root();
        trials.push(Trial::test(format!("asks_about_a_plain_peer/{name}"), run).with_ignored_flag(cannot));
    }
    for victim in ["epoll", "threads"] {
        let paths = Arc::clone(&paths);
        trials.push(Trial::test(
            format!("clients_that_have_gone_leave_nothing/{victim}"),
            move || come_and_go(&paths, victim),
        ));
    }
    libtest_mimic::run(&args, trials).exit_code()
}

/// A program of the test, ended when this is dropped.
struct Program {
    who: &'static str,
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Program {
    fn start(paths: &Paths, who: &'static str, words: &[&str], library: bool) -> Result<Self, Failed> {
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        command.args(["helper", "hostile"]);
        if who != "asked" {
            command.arg(who).args(words);
        }
        if library {
            command
                .env("LD_PRELOAD", paths.library.as_ref()?)
                .env("RDMASOCK_PROMOTE_AFTER", "1r");
        }
        if who == "asked" {
            command
                .args(["victim", "epoll", "0"])
                .env("RDMASOCK_CONTROL_PORT", attacks::ASKED_PORT.to_string())
                .env("RDMASOCK_DEV_PRETEND_RDMA", "127.0.0.0/8");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let stdin = child.stdin.take().unwrap();
        Ok(Self {
            who,
            child,
            stdin,
            lines,
        })
    }

    /// Returns the next line that the program prints; fails after [`LIMIT`].
    fn line(&mut self) -> Result<String, Failed> {
        self.lines.recv_timeout(LIMIT).map_err(|_| {
            let status = self.child.try_wait();
            format!("the {}: no line in {LIMIT:?}; its end: {status:?}", self.who).into()
        })
    }

    fn expect(&mut self, want: &str) -> Result<(), Failed> {
        let line = self.line()?;
        if line == want {
            return Ok(());
        }
        Err(format!("the {}: {line:?} for {want:?}", self.who).into())
    }

    /// Makes a friend hold its conversations.
    fn talk(&mut self) -> Result<(), Failed> {
        writeln!(self.stdin, "{ROUNDS}")?;
        self.expect("done")
    }

    /// Waits until a friend's connections are on a link.
    fn promoted(&mut self, paths: &Paths) -> Result<(), Failed> {
        let end = Instant::now() + LIMIT;
        loop {
            self.talk()?;
            let state = promotion_state(&paths.command, self.child.id())?;
            if state.is_some_and(|s| s.on_link == 2) {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("a friend's connections are not promoted: {state:?}").into());
            }
        }
    }

    fn descriptors(&self) -> Result<usize, Failed> {
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.child.id()))?.count())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn friend(paths: &Paths, port: &str) -> Result<Program, Failed> {
    let mut friend = Program::start(paths, "friend", &[port], true)?;
    friend.promoted(paths)?;
    Ok(friend)
}

fn attack(paths: &Paths, name: &str, victim: &str) -> Result<(), Failed> {
    let file = tempfile::NamedTempFile::new()?;
    file.as_file().set_permissions(Permissions::from_mode(0o644))?;
    let path = file.path().to_string_lossy();
    let words = [victim, &DESCRIPTORS.to_string(), &path];
    let mut victim = Program::start(paths, "victim", &words, true)?;
    let port = victim.line()?;
    let mut old = friend(paths, &port)?;
    let mut attacker = Program::start(paths, "attack", &[&port, name, &path], false)?;
    attacker.expect("on")?;
    old.talk()?;
    let mut new = friend(paths, &port)?;
    for _ in 0..3 {
        old.talk()?;
        new.talk()?;
    }
    match name {
        // A link that carries nothing but noise is left.
        "ready_bits" | "service_bits" => attacker.expect("out")?,
        "large_ring" | "rings_all_over" | "reserves_all_over" => {
            let line = attacker.line()?;
            let backed = line.strip_prefix("backed ").and_then(|n| n.parse().ok());
            if backed.is_none_or(|mib: u64| mib > MOST_BACKED) {
                return Err(format!("{line} MiB of the attacker's arena").into());
            }
        }
        _ => {}
    }
    drop(attacker);
    if !is_locked(file.as_file())? {
        return Err("the victim's lock is gone".into());
    }
    old.talk()?;
    new.talk()?;
    friend(paths, &port)?;
    match victim.child.try_wait()? {
        None => Ok(()),
        Some(status) => Err(format!("the victim's end: {status}").into()),
    }
}

fn is_locked(file: &std::fs::File) -> Result<bool, Failed> {
    // SAFETY: zero is a valid value for each field.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_GETLK(&mut lock))?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

/// A server with the library has a client without it. An asker that has asked the server about the connection chooses
/// the client's bytes. All bytes are answered, and no others come.
fn ask_about_a_plain_peer(paths: &Paths, asker: u32, is_believed: bool) -> Result<(), Failed> {
    let mut victim = Program::start(paths, "asked", &[], true)?;
    let port = victim.line()?;
    let mut tcp = TcpStream::connect(format!("127.0.0.1:{port}"))?;
    tcp.set_read_timeout(Some(Duration::from_secs(10)))?;
    let from = tcp.local_addr()?.port().to_string();
    let mut exchange = |bytes: &[u8]| {
        tcp.write_all(bytes)?;
        let mut answer = vec![0; bytes.len()];
        tcp.read_exact(&mut answer)?;
        if answer != bytes {
            return Err(Failed::from(format!("{answer:02x?} for {bytes:02x?}")));
        }
        Ok(())
    };
    for _ in 0..10 {
        exchange(&[b'a'; 64])?;
    }
    let mut asker = Program::start(paths, "ask", &[&port, &from, &asker.to_string()], false)?;
    let answer = asker.line()?;
    let is_yes = answer != "no";
    let digits = if is_yes { answer.clone() } else { "ff".repeat(40) };
    let hello: Vec<u8> = (0..digits.len() / 2)
        .map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).unwrap())
        .collect();
    if is_yes && is_believed {
        // Root may ask. The scan ends with the asker's channel.
        writeln!(asker.stdin)?;
        asker.expect("gone")?;
    }
    exchange(&hello[..1]).map_err(|e| format!("the first byte of a HELLO: {e:?}"))?;
    exchange(&hello).map_err(|e| format!("a HELLO: {e:?}"))?;
    for _ in 0..10 {
        exchange(&[0xff; 64])?;
    }
    match is_yes == is_believed {
        true => Ok(()),
        false => Err(format!("{answer:?} to this user").into()),
    }
}

fn come_and_go(paths: &Paths, victim: &str) -> Result<(), Failed> {
    let mut victim = Program::start(paths, "victim", &[victim, "0"], true)?;
    let port = victim.line()?;
    for _ in 0..3 {
        friend(paths, &port)?;
    }
    let before = settled(&victim)?;
    for _ in 0..VISITS {
        friend(paths, &port)?;
    }
    let after = settled(&victim)?;
    if after <= before {
        return Ok(());
    }
    Err(format!("{before} descriptors before {VISITS} clients, {after} after them").into())
}

/// Returns how many descriptors the victim has once their number no longer falls.
fn settled(victim: &Program) -> Result<usize, Failed> {
    let mut fewest = victim.descriptors()?;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(50));
        fewest = fewest.min(victim.descriptors()?);
    }
    Ok(fewest)
}
