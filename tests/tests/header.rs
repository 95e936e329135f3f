//! The promises of `include/rdmasock.h`: `c/header.c` plays each case with and without the library, within a host and
//! over the local device. The header itself is compiled as strict C and as C++, and has the reasons of `rdmasock stat`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_core::stats::Reason;
use rdmasock_tests::harness::{Mode, Paths, clean_environment};

/// Cases that are played on every path.
const EVERYWHERE: &[&str] = &["info", "errors", "stay", "view", "view_errors"];

/// Cases that are played where the connection gets a link.
const ON_LINKS: &[&str] = &[
    "hurry",
    "view_mixed",
    "view_closed",
    "view_killed",
    "view_forked",
    "view_stays",
    "view_passed",
];

/// Cases about links between hosts.
const OVER_THE_DEVICE: &[&str] = &["view_cut"];

/// The path that the connection gets.
#[derive(Clone, Copy)]
enum Way {
    /// There is no library.
    None,
    /// TCP, by a rule.
    Tcp,
    Shm,
    Device(Mode),
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Device(mode) => mode.name(),
        }
    }

    /// Returns the path's name for the programs.
    fn argument(self) -> &'static str {
        match self {
            Self::Device(_) => "rdma",
            way => way.name(),
        }
    }
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let mut trials = vec![
        Trial::test("header/strict_c", || compiles("cc", &["-std=c99", "-x", "c"])),
        Trial::test("header/gnu_c", || compiles("cc", &["-std=gnu17", "-x", "c"])),
        Trial::test("header/cpp", || compiles("c++", &["-std=c++11", "-x", "c++"])),
        Trial::test("header/reasons", reasons),
    ];
    let ways = [Way::Tcp, Way::Shm].into_iter().chain(Mode::DEVICES.map(Way::Device));
    let everywhere = ways.flat_map(|way| EVERYWHERE.iter().map(move |case| (way, *case)));
    let links = [Way::Shm].into_iter().chain(Mode::DEVICES.map(Way::Device));
    let on_links = links.flat_map(|way| ON_LINKS.iter().map(move |case| (way, *case)));
    let without = std::iter::once((Way::None, "absent"));
    for (way, case) in without.chain(everywhere).chain(on_links) {
        let paths = Arc::clone(&paths);
        let name = format!("{}/{case}", way.name());
        trials.push(Trial::test(name, move || play(&paths, case, way)));
    }
    for mode in Mode::DEVICES {
        for case in OVER_THE_DEVICE {
            let paths = Arc::clone(&paths);
            let name = format!("{}/{case}", mode.name());
            trials.push(Trial::test(name, move || play(&paths, case, Way::Device(mode))));
        }
    }
    let ways = [Way::None, Way::Tcp, Way::Shm];
    for way in ways.into_iter().chain(Mode::DEVICES.map(Way::Device)) {
        let paths = Arc::clone(&paths);
        let name = format!("{}/example", way.name());
        trials.push(Trial::test(name, move || example(&paths, way)));
    }
    libtest_mimic::run(&args, trials).exit_code()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIRECTORY.get_or_init(|| tempfile::tempdir().unwrap()).path()
}

/// Has the compiler make `output` of `source`, with all warnings.
fn compile(compiler: &str, flags: &[&str], source: &Path, output: &Path) -> Result<(), Failed> {
    let include = format!("-I{}", root().join("include").display());
    let said = Command::new(compiler)
        .args(["-O1", "-g", "-Wall", "-Werror", "-pthread", &include])
        .args(flags)
        .arg(source)
        .arg("-o")
        .arg(output)
        .output()
        .map_err(|e| format!("{compiler} (Debian: apt install g++ libc6-dev): {e}"))?;
    if said.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&said.stderr).into_owned().into())
    }
}

/// Compiles a program of two files that include nothing else first.
fn compiles(compiler: &str, flags: &[&str]) -> Result<(), Failed> {
    let name = format!("{compiler}{}", flags.concat());
    let source = directory().join(format!("{name}.source"));
    std::fs::write(
        &source,
        "#include \"rdmasock.h\"\n#include \"rdmasock.h\"\nint main(void) { return 0; }\n",
    )?;
    let flags = [flags, &["-Wextra", "-Wpedantic"]].concat();
    compile(compiler, &flags, &source, &directory().join(name))
}

/// `c/header.c`, compiled once.
fn program() -> Result<&'static Path, Failed> {
    static PROGRAM: OnceLock<Result<PathBuf, Failed>> = OnceLock::new();
    let made = PROGRAM.get_or_init(|| {
        let program = directory().join("header");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/header.c");
        compile("cc", &[], &source, &program).map(|()| program)
    });
    made.as_deref().map_err(Clone::clone)
}

/// Writes a rules file that leaves all connections on TCP, once: a program that reads it during a second write would
/// find no rule.
fn rules_that_leave() -> Result<&'static Path, Failed> {
    static RULES: OnceLock<Result<PathBuf, Failed>> = OnceLock::new();
    let written = RULES.get_or_init(|| {
        let rules = directory().join("rules.toml");
        std::fs::write(&rules, "[[rule]]\naction = \"leave\"\n")?;
        Ok(rules)
    });
    written.as_deref().map_err(Clone::clone)
}

/// Sets the variables by which a program's connections get this path.
fn environment(paths: &Paths, command: &mut Command, way: Way) -> Result<(), Failed> {
    clean_environment(command);
    if matches!(way, Way::None) {
        return Ok(());
    }
    command
        .env("LD_PRELOAD", paths.library.as_ref()?)
        .env("RDMASOCK_PROMOTE_AFTER", "2r,16K");
    if let Way::Device(mode) = way {
        command
            .env("RDMASOCK_DEV_LOCAL_DEVICE", &paths.device)
            .env("LOCALNIC", mode.device().unwrap())
            // Peers ask by name, as within a host: a single control port would serve all tests that run at once.
            .env("RDMASOCK_CONTROL_PORT", "0");
    }
    if matches!(way, Way::Tcp) {
        command.env("RDMASOCK_RULES", rules_that_leave()?);
    }
    Ok(())
}

fn play(paths: &Paths, case: &str, way: Way) -> Result<(), Failed> {
    let mut command = Command::new(program()?);
    environment(paths, &mut command, way)?;
    if case == "hurry" {
        command.env("RDMASOCK_PROMOTE_AFTER", "1000000r");
    }
    if case.ends_with("_cut")
        && let Way::Device(mode) = way
    {
        command.env("LOCALNIC", format!("{},cut=200", mode.name()));
    }
    let said = command.args([case, way.argument()]).stdin(Stdio::null()).output()?;
    if said.status.success() && said.stdout.is_empty() && said.stderr.is_empty() {
        return Ok(());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!("{}\n{}{}", said.status, text(&said.stdout), text(&said.stderr)).into())
}

/// Runs the example, and a client that compares the bytes that come back.
fn example(paths: &Paths, way: Way) -> Result<(), Failed> {
    let program = directory().join(format!("echo-{}", way.name()));
    let source = root().join("include/examples/echo.c");
    compile("cc", &["-std=gnu99", "-Wextra", "-Wpedantic"], &source, &program)?;
    let mut server = Command::new(&program);
    environment(paths, &mut server, way)?;
    // The server ends with its client, which does not live long.
    let mut server = Killed(server.args(["0", "1"]).stdout(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
    let mut line = || lines.next().transpose().map(Option::unwrap_or_default);
    let port = line()?.replace("port ", "");
    let mut client = Command::new(self::program()?);
    environment(paths, &mut client, way)?;
    let said = client.args(["echo-client", &port]).output()?;
    if !said.status.success() {
        return Err(String::from_utf8_lossy(&said.stderr).into_owned().into());
    }
    let said = line()?;
    let count = |text: &str| -> u64 {
        let word = text.split_whitespace().next().and_then(|word| word.parse().ok());
        word.unwrap_or_else(|| panic!("{said}"))
    };
    let (all, rest) = said.split_once(", ").ok_or("no counts")?;
    let (all, viewed) = (count(all), count(rest));
    let is_known = said.contains("came by TCP");
    assert!(all >= 10_000_000, "{said}");
    match way {
        Way::None => assert!(viewed == 0 && !is_known, "{said}"),
        Way::Tcp => assert!(viewed == 0 && is_known, "{said}"),
        Way::Shm | Way::Device(_) => assert!(viewed > all / 2 && is_known, "{said}"),
    }
    Ok(())
}

/// A process, killed if it still runs when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The header has each reason, by its name in capitals and with its code.
fn reasons() -> Result<(), Failed> {
    let header = std::fs::read_to_string(root().join("include/rdmasock.h"))?;
    let known: Vec<String> = header
        .lines()
        .filter_map(|line| line.trim().strip_prefix("RDMASOCK_WHY_"))
        .map(|line| line.trim_end_matches(',').to_owned())
        .collect();
    let of = |reason: &Reason| {
        let mut name = String::new();
        for c in format!("{reason:?}").chars() {
            if c.is_ascii_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(c.to_ascii_uppercase());
        }
        format!("{name} = {}", *reason as u16)
    };
    let expected: Vec<String> = Reason::ALL.iter().map(of).collect();
    assert_eq!(known, expected);
    Ok(())
}
