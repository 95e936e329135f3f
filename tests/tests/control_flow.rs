//! Signals, longjmp and fork at any instruction: programs of C (`c/`) that use sockets in every permitted way, in
//! signal handlers, out of them, and in children of a process with threads. Each program ends by itself, with the
//! library as without.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rdmasock_tests::environment::cgroup::Cgroup;
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::observe::promotion_state;

/// Seconds after which a program that has not ended hangs.
const LIMIT: u32 = 90;

/// The connections that are moved.
#[derive(Clone, Copy, PartialEq)]
enum With {
    /// No library.
    Kernel,
    /// None: all connections stay on TCP.
    Defaults,
    /// All connections, soon.
    Soon,
    /// All connections, soon, over the local device with immediates; large sends are direct transfers.
    Device,
}

struct Program {
    name: &'static str,
    arguments: &'static [&'static str],
}

const PROGRAMS: &[Program] = &[
    Program {
        name: "fork_churn",
        arguments: &["3000", "4"],
    },
    Program {
        name: "clones",
        arguments: &["1"],
    },
    Program {
        name: "namespaces",
        arguments: &["5"],
    },
    Program {
        name: "handlers",
        arguments: &["4000"],
    },
    Program {
        name: "handlers",
        arguments: &["4000", "small"],
    },
    Program {
        name: "cold",
        arguments: &["30"],
    },
    Program {
        name: "jump",
        arguments: &["3000"],
    },
    Program {
        name: "same",
        arguments: &["20000"],
    },
    Program {
        name: "stack",
        arguments: &["200"],
    },
    Program {
        name: "installed",
        arguments: &["5000"],
    },
    Program {
        name: "greenlet",
        arguments: &["20"],
    },
    Program {
        name: "numbers",
        arguments: &["400000"],
    },
    Program {
        name: "numbers",
        arguments: &["60000", "low"],
    },
    Program {
        name: "no_memory",
        arguments: &["100", "as"],
    },
    Program {
        name: "no_memory",
        arguments: &["100", "data"],
    },
    Program {
        name: "no_memory",
        arguments: &["400", "as", "late"],
    },
    Program {
        name: "no_memory",
        arguments: &["400", "data", "late"],
    },
    Program {
        name: "closing",
        arguments: &["600"],
    },
    Program {
        name: "cancelled",
        arguments: &["500", "handler"],
    },
    Program {
        name: "cancelled",
        arguments: &["2", "busy"],
    },
    Program {
        name: "idle",
        arguments: &["1100", "recv"],
    },
    Program {
        name: "idle",
        arguments: &["900", "poll"],
    },
    Program {
        name: "idle",
        arguments: &["600", "epoll"],
    },
    Program {
        name: "last_thread",
        arguments: &["50", "exit"],
    },
    Program {
        name: "last_thread",
        arguments: &["50", "late"],
    },
    Program {
        name: "last_thread",
        arguments: &["50", "cancel"],
    },
    Program {
        name: "last_thread",
        arguments: &["50", "alone"],
    },
    Program {
        name: "last_thread",
        arguments: &["50", "unconnected"],
    },
    Program {
        name: "last_thread",
        arguments: &["50", "child"],
    },
];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Most programs have several threads each.
    args.test_threads.get_or_insert(1);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let mut trials = Vec::new();
    for program in PROGRAMS {
        for (with, name) in [(With::Kernel, "kernel"), (With::Defaults, "tcp"), (With::Soon, "link")] {
            let paths = Arc::clone(&paths);
            // The first argument is the number of repetitions.
            let how: String = program.arguments.iter().skip(1).map(|a| format!("_{a}")).collect();
            let title = format!("{name}/{}{how}", program.name);
            trials.push(Trial::test(title, move || run(&paths, program, with)));
        }
    }
    let shared = Arc::clone(&paths);
    trials.push(Trial::test("device/jump_large", move || {
        run(
            &shared,
            &Program {
                name: "jump",
                arguments: &["3000", "large"],
            },
            With::Device,
        )
    }));
    let shared = Arc::clone(&paths);
    trials.push(Trial::test("link/late_readers", move || late_readers(&shared)));
    let shared = Arc::clone(&paths);
    trials.push(Trial::test("link/fork_holds", move || fork_holds(&shared)));
    for who in ["child", "parent", "exec"] {
        let shared = Arc::clone(&paths);
        trials.push(Trial::test(format!("link/killed_{who}"), move || killed(&shared, who)));
    }
    for end in ["connects", "accepts"] {
        let shared = Arc::clone(&paths);
        trials.push(Trial::test(format!("link/namespaces_{end}"), move || {
            promoted_elsewhere(&shared, end)
        }));
    }
    trials.push(Trial::test("link/last_thread_is_promoted", move || {
        promoted_without_main(&paths)
    }));
    libtest_mimic::run(&args, trials).exit_code()
}

/// Compiles `c/NAME.c`, once.
fn compile(name: &str) -> Result<PathBuf, String> {
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| tempfile::tempdir().unwrap());
    let program = directory.path().join(name);
    if program.exists() {
        return Ok(program);
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("c/{name}.c"));
    let output = Command::new("cc")
        .args(["-O1", "-g", "-Wall", "-Werror", "-pthread"])
        // The dynamic linker's own work at a first call would count as part of the call.
        .args(["-Wl,-z,now", "-o"])
        .args([&program, &source])
        .output()
        .map_err(|e| format!("cc (Debian: apt install gcc libc6-dev): {e}"))?;
    if output.status.success() {
        Ok(program)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// A running program, in a process group of its own; killed with its descendants when this is dropped.
struct Running(Child);

impl Running {
    fn start(paths: &Paths, name: &str, arguments: &[&str], with: With) -> Result<Self, Failed> {
        // `timeout` kills a program that hangs for good: the program may have replaced the alarm's handler itself.
        let mut command = Command::new("timeout");
        command
            .args(["--signal", "KILL", &LIMIT.to_string(), "env"])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        clean_environment(&mut command);
        if with != With::Kernel {
            let library = paths.library.as_ref()?;
            command.arg(format!("LD_PRELOAD={}", library.display()));
        }
        if matches!(with, With::Soon | With::Device) {
            command.arg("RDMASOCK_PROMOTE_AFTER=2r,16K");
        }
        if with == With::Device {
            let device = format!("RDMASOCK_DEV_LOCAL_DEVICE={}", paths.device.display());
            // Peers ask by name, as within a host: a single control port would serve all tests that run at once.
            command.args([
                device.as_str(),
                "LOCALNIC=roce",
                "RDMASOCK_CONTROL_PORT=0",
                "RDMASOCK_ZCOPY_MIN=4K",
            ]);
        }
        command.arg(compile(name)?).args(arguments);
        Ok(Self(command.spawn().map_err(|e| e.to_string())?))
    }

    /// Returns the program's output. Fails unless the program succeeds with an empty stderr.
    fn end(mut self) -> Result<String, Failed> {
        drop(self.0.stdin.take());
        let (mut out, mut errors) = (String::new(), String::new());
        let (stdout, stderr) = (self.0.stdout.take(), self.0.stderr.take());
        std::thread::scope(|s| {
            s.spawn(|| std::io::read_to_string(stderr.unwrap()).map(|text| errors = text));
            stdout.map(|stdout| std::io::read_to_string(stdout).map(|text| out = text));
        });
        let status = self.0.wait().map_err(|e| e.to_string())?;
        if status.success() && errors.is_empty() {
            Ok(out)
        } else {
            Err(format!("ended with {status}, and said\n{out}{errors}").into())
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.0.id() as i32), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

fn run(paths: &Paths, program: &Program, with: With) -> Result<(), Failed> {
    let printed = Running::start(paths, program.name, program.arguments, with)?.end()?;
    let expected = Running::start(paths, program.name, &["1"], With::Kernel)?.end()?;
    if printed == expected {
        Ok(())
    } else {
        Err(format!("printed\n{printed}and not\n{expected}").into())
    }
}

/// A server of 60 clients in 64 MiB.
fn late_readers(paths: &Paths) -> Result<(), Failed> {
    let group = match Cgroup::with_memory(64 << 20) {
        Ok(group) => group,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let entrance = group.entrance();
    let arguments = ["60", entrance.to_str().unwrap()];
    let printed = Running::start(paths, "late_readers", &arguments, With::Soon)?.end()?;
    assert_eq!(printed, "all got all\n");
    Ok(())
}

/// Returns how many connections of the process are on a link.
fn on_link(paths: &Paths, pid: u32) -> Result<usize, Failed> {
    let state = promotion_state(&paths.command, pid).map_err(|e| e.to_string())?;
    Ok(state.map_or(0, |s| s.on_link))
}

fn fork_holds(paths: &Paths) -> Result<(), Failed> {
    let mut running = Running::start(paths, "fork_holds", &[], With::Soon)?;
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    let mut input = running.0.stdin.take().unwrap();
    let mut next = || lines.next().transpose().map(Option::unwrap_or_default);
    if next()? != "warm" {
        return running.end().map(drop);
    }
    // `timeout` has the program as its child.
    let pid = child_of(running.0.id())?;
    while on_link(paths, pid)? == 0 {
        std::thread::sleep(Duration::from_millis(5));
        if running.0.try_wait()?.is_some() {
            return Err("it ended without being promoted".into());
        }
    }
    input.write_all(b"\n")?;
    assert_eq!(next()?, "children have ended");
    assert_eq!(on_link(paths, pid)?, 1, "the parent's stream has left the link");
    input.write_all(b"\n")?;
    assert_eq!(next()?, "done");
    drop(input);
    running.end().map(drop)
}

/// A connection that a dead process has held too is promoted for the remaining owner.
fn killed(paths: &Paths, who: &str) -> Result<(), Failed> {
    let mut running = Running::start(paths, "killed", &[who], With::Soon)?;
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    let mut next = || lines.next().transpose().map(Option::unwrap_or_default);
    let Ok(user) = next()?.parse() else {
        return running.end().map(drop);
    };
    let procfs = PathBuf::from(format!("/proc/{user}"));
    while on_link(paths, user).unwrap_or(0) == 0 {
        std::thread::sleep(Duration::from_millis(5));
        if !procfs.exists() {
            return Err("it ended without being promoted".into());
        }
    }
    drop(running.0.stdin.take());
    assert_eq!(next()?, "done");
    running.end().map(drop)
}

/// A connection that is made when the main thread has ended is moved like any other, and `rdmasock stat` shows it.
fn promoted_without_main(paths: &Paths) -> Result<(), Failed> {
    let mut running = Running::start(paths, "last_thread", &["1000000", "late"], With::Soon)?;
    let pid = loop {
        if let Ok(pid) = child_of(running.0.id()) {
            break pid;
        }
    };
    // The program may not run yet, or `rdmasock stat` may not show it yet.
    while on_link(paths, pid).unwrap_or(0) == 0 {
        std::thread::sleep(Duration::from_millis(5));
        if running.0.try_wait()?.is_some() {
            return Err("it ended without being promoted".into());
        }
    }
    Ok(())
}

/// A connection that is made when the program has entered namespaces is moved like any other.
fn promoted_elsewhere(paths: &Paths, end: &str) -> Result<(), Failed> {
    let mut running = Running::start(paths, "namespaces", &["1", end], With::Soon)?;
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    if first != "moved" {
        println!("skipped: {first}");
        return running.end().map(drop);
    }
    let pid = child_of(running.0.id())?;
    let until = Instant::now() + Duration::from_secs(20);
    while on_link(paths, pid)? == 0 {
        std::thread::sleep(Duration::from_millis(5));
        if Instant::now() > until {
            return Err("it is not promoted".into());
        }
    }
    Ok(())
}

fn child_of(parent: u32) -> Result<u32, Failed> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))?;
    let first = children.split_whitespace().next().ok_or("no child")?;
    Ok(first.parse()?)
}
