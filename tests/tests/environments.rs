//! Environments and calls of a program that decide whether its connections may leave TCP: rules, io_uring, limits,
//! seccomp. A connection of two guests (`src/guest.rs`) goes on all the while, and each byte of it is checked.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::observe::{Promotion, count, promotion_state, reasons};

const LIMIT: Duration = Duration::from_secs(30);

type Case = fn(&Paths) -> Result<(), Failed>;

const CASES: &[(&str, Case)] = &[
    ("without_rules", without_rules),
    ("switched_off/0", |paths| switched_off(paths, "0")),
    ("switched_off/false", |paths| switched_off(paths, "false")),
    ("switched_off/no", |paths| switched_off(paths, "no")),
    ("switched_off/OFF", |paths| switched_off(paths, "OFF")),
    ("switched_off/no_word", |paths| switched_off(paths, "perhaps")),
    ("switched_on", switched_on),
    ("two_listeners/v4", |paths| two_listeners(paths, "v4")),
    ("two_listeners/v6", |paths| two_listeners(paths, "v6")),
    ("rules_file_missing", rules_file_missing),
    ("rules_file_unreadable", rules_file_unreadable),
    ("rules_file_wrong", rules_file_wrong),
    ("io_uring_is_hidden", io_uring_is_hidden),
    ("io_uring_is_hidden_from_libuv", io_uring_is_hidden_from_libuv),
    ("io_uring_allowed_before", io_uring_allowed_before),
    ("io_uring_by_default", io_uring_by_default),
    ("io_uring_allowed_on_a_link", io_uring_allowed_on_a_link),
    ("deep_bind_before", deep_bind_before),
    ("deep_bind_on_a_link", deep_bind_on_a_link),
    ("no_files_at_all", no_files_at_all),
    ("no_large_files", no_large_files),
    ("limit_of_open_files_is_kept", limit_of_open_files_is_kept),
    ("few_open_files", few_open_files),
    ("very_few_open_files", very_few_open_files),
    ("locked_memory", locked_memory),
    ("locked_memory_on_a_link", locked_memory_on_a_link),
    ("little_address_space", little_address_space),
    ("nobody", |paths| as_root(paths, &["early:nobody"])),
    ("nobody_before_listen", |paths| as_root(paths, &["bound:nobody"])),
    ("listener_of_another_image", listener_of_another_image),
    ("listener_of_another_image/nobody", |paths| {
        as_root(paths, &["bound:nobody", "exec"])
    }),
    ("stamps_of_the_listener", stamps_of_the_listener),
    ("low_water_is_refused_once", low_water_is_refused_once),
    ("chroot", chroot),
    ("chroot_and_nobody", chroot_and_nobody),
    ("sandbox/plain_client", |paths| sandboxed(paths, &["sandbox"], false)),
    ("sandbox/client", |paths| sandboxed(paths, &["sandbox"], true)),
    ("sandbox/all_threads/plain_client", |paths| {
        sandboxed(paths, &["sandbox:all threads"], false)
    }),
    ("sandbox/all_threads/client", |paths| {
        sandboxed(paths, &["sandbox:all threads"], true)
    }),
    ("sandbox/on_a_link", |paths| sandboxed_on_a_link(paths, &[], "sandbox")),
    ("sandbox/all_threads/on_a_link", |paths| {
        sandboxed_on_a_link(paths, &[], "sandbox:all threads")
    }),
    ("sandbox/epoll/client", |paths| {
        sandboxed(paths, &[EPOLL, "sandbox"], true)
    }),
    ("sandbox/epoll/on_a_link", |paths| {
        sandboxed_on_a_link(paths, &[EPOLL], "sandbox")
    }),
    ("sandbox/epoll/all_threads/on_a_link", |paths| {
        sandboxed_on_a_link(paths, &[EPOLL], "sandbox:all threads")
    }),
    ("strict_mode/on_a_link", |paths| {
        sandboxed_on_a_link(paths, &[], "strict")
    }),
    ("system_service/plain_client", |paths| {
        service_for_plain_client(paths, "system service")
    }),
    ("system_service/client", |paths| service(paths, "system service")),
    ("system_service/all_threads/client", |paths| {
        service(paths, "system service:all threads")
    }),
    ("system_service/on_a_link", |paths| {
        service_on_a_link(paths, "system service")
    }),
    ("system_service/all_threads/on_a_link", |paths| {
        service_on_a_link(paths, "system service:all threads")
    }),
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

/// A guest, killed if it still runs when this is dropped.
struct Guest {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Guest {
    /// Starts a guest; with the library if `variables` are given for it.
    fn start(paths: &Paths, words: &[&str], variables: Option<&[(&str, &str)]>) -> Result<Self, Failed> {
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        if variables.is_some() {
            command.env("LD_PRELOAD", paths.library.as_ref()?);
            command.env("RDMASOCK_PROMOTE_AFTER", "2r,16K");
        }
        let variables = variables.unwrap_or_default();
        let mut child = command
            .args(["helper", "guest"])
            .args(words)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().unwrap());
        Ok(Self { child, lines })
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Sends a command to the guest, and returns its answer.
    fn tell(&mut self, what: &str) -> Result<String, Failed> {
        self.write(what)?;
        self.line()
    }

    /// Writes a command. If the guest has ended already, the error is how it ended.
    fn write(&mut self, what: &str) -> Result<(), Failed> {
        // The line is written at once: a guest that reads in between would treat a part as a line.
        let line = format!("{what}\n");
        let stdin = self.child.stdin.as_mut().unwrap();
        if stdin.write_all(line.as_bytes()).is_err() {
            let words = self.succeed("guest")?;
            return Err(format!("the guest has ended before {what:?}\n{words}").into());
        }
        Ok(())
    }

    fn state(&self, paths: &Paths) -> Result<Promotion, Failed> {
        let state = promotion_state(&paths.command, self.child.id()).map_err(|e| e.to_string())?;
        Ok(state.ok_or("not among the instances")?)
    }

    /// Returns why the guest's connections are on TCP.
    fn reasons(&self, paths: &Paths) -> Result<Vec<String>, Failed> {
        Ok(reasons(&paths.command, self.child.id()).map_err(|e| e.to_string())?)
    }

    /// Waits for the guest's exit, which must be a success. Returns its stderr.
    fn succeed(&mut self, who: &str) -> Result<String, Failed> {
        let end = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > end {
                return Err(format!("the {who} is still there after {LIMIT:?}").into());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let mut words = String::new();
        let stderr = self.child.stderr.as_mut().unwrap();
        stderr.read_to_string(&mut words)?;
        if status.success() {
            return Ok(words);
        }
        Err(format!("the {who}: {status}\n{words}").into())
    }
}

/// A server and its client, with a conversation between them.
struct Talk<'a> {
    paths: &'a Paths,
    server: Guest,
    client: Guest,
}

impl<'a> Talk<'a> {
    /// Starts both ends. The server does `what` after it has begun to listen.
    fn begin(paths: &'a Paths, what: &[&str], variables: &[(&str, &str)]) -> Result<(Self, Vec<String>), Failed> {
        Self::with_client(paths, what, variables, Some(&[]))
    }

    /// As [`Self::begin`]; the client has the library if `of_client` has variables for it.
    fn with_client(
        paths: &'a Paths,
        what: &[&str],
        variables: &[(&str, &str)],
        of_client: Option<&[(&str, &str)]>,
    ) -> Result<(Self, Vec<String>), Failed> {
        let words = [&["server"], what].concat();
        let mut server = Guest::start(paths, &words, Some(variables))?;
        let port = server.line()?;
        let said = what.iter().map(|_| server.line()).collect::<Result<_, _>>()?;
        let client = Guest::start(paths, &["client", &port], of_client)?;
        Ok((Self { paths, server, client }, said))
    }

    /// Waits until both ends have the connection on a link.
    fn on_link(&self) -> Result<(), Failed> {
        let end = Instant::now() + LIMIT;
        loop {
            let states = (self.server.state(self.paths), self.client.state(self.paths));
            if let (Ok(s), Ok(c)) = &states
                && s.on_link > 0
                && c.on_link > 0
            {
                return Ok(());
            }
            if Instant::now() > end {
                let reasons = self.server.reasons(self.paths);
                return Err(format!("not promoted: {states:?}, {reasons:?}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the server reports that its connection is on TCP because of `reason`.
    fn stays(&self, reason: &str) -> Result<(), Failed> {
        self.stays_at(&self.server, reason)
    }

    /// Waits until one end reports that the connection is on TCP because of `reason`.
    fn stays_at(&self, guest: &Guest, reason: &str) -> Result<(), Failed> {
        let end = Instant::now() + LIMIT;
        loop {
            let state = (guest.state(self.paths), guest.reasons(self.paths));
            if let (Ok(s), Ok(r)) = &state
                && s.on_link == 0
                && r.iter().any(|r| r == reason)
            {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("not on TCP because of {reason}: {state:?}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for many more messages in both directions.
    fn goes_on(&mut self) -> Result<(), Failed> {
        for _ in 0..20 {
            if let Err(why) = self.client.tell("say") {
                // The client may have failed because of the server.
                let server = self.server.succeed("server");
                return Err(format!("{}\n{server:?}", why.message().unwrap_or_default()).into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Ends both guests, which must succeed. Returns the server's stderr.
    fn end(mut self) -> Result<String, Failed> {
        self.client.write("end")?;
        let words = self.client.succeed("client")?;
        let logged = std::env::var_os("RDMASOCK_LOG").is_some();
        if !words.is_empty() && !logged {
            return Err(format!("the client wrote {words}").into());
        }
        self.server.succeed("server")
    }
}

fn expect(what: &str, is: &str, should: &str) -> Result<(), Failed> {
    if is == should {
        return Ok(());
    }
    Err(format!("{what}: {is}, not {should}").into())
}

fn without_rules(paths: &Paths) -> Result<(), Failed> {
    let (talk, _) = Talk::begin(paths, &[], &[])?;
    talk.on_link()?;
    expect("stderr", &talk.end()?, "")
}

/// A process whose `RDMASOCK` has this value works on TCP, as either end.
fn switched_off(paths: &Paths, value: &str) -> Result<(), Failed> {
    let variables = [("RDMASOCK", value)];
    // Only the nonsense is worth a line: which values are accepted.
    let is_silent = value != "perhaps";
    let check_words = |words: &str| match (is_silent, words.lines().count()) {
        (true, 0) => Ok(()),
        (false, 1) if words.contains("RDMASOCK=perhaps: accepted is on") => Ok(()),
        _ => Err(Failed::from(format!("stderr: {words}"))),
    };
    let (mut talk, _) = Talk::begin(paths, &[], &variables)?;
    talk.stays_at(&talk.client, "peer without the library")?;
    talk.goes_on()?;
    is_off(paths, &talk.server, value)?;
    check_words(&talk.end()?)?;

    let (mut talk, _) = Talk::with_client(paths, &[], &[], Some(&variables))?;
    talk.goes_on()?;
    is_off(paths, &talk.client, value)?;
    let state = talk.server.state(paths)?;
    expect("promoted connections", &state.promoted.to_string(), "0")?;
    talk.client.write("end")?;
    check_words(&talk.client.succeed("client")?)?;
    expect("stderr", &talk.server.succeed("server")?, "")
}

/// A value that is plainly "on" gives what the other values take away. So [`is_off`] would find it.
fn switched_on(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, &[], &[("RDMASOCK", "yes")])?;
    talk.on_link()?;
    talk.goes_on()?;
    if is_off(paths, &talk.server, "yes").is_ok() || threads(&talk.server)? < 2 {
        return Err("the server is off".into());
    }
    expect("stderr", &talk.end()?, "")
}

/// Checks that a guest has no service thread, is no instance, and is listed as switched off by `value`.
fn is_off(paths: &Paths, guest: &Guest, value: &str) -> Result<(), Failed> {
    let pid = guest.child.id();
    expect("threads", &threads(guest)?.to_string(), "1")?;
    let state = promotion_state(&paths.command, pid).map_err(|e| e.to_string())?;
    if let Some(state) = state {
        return Err(format!("an instance: {state:?}").into());
    }
    let program = paths.scenario.file_name().unwrap().to_string_lossy();
    let line = format!("{program} (pid {pid}): switched off by RDMASOCK={value}\n");
    let stat = |arguments: &[&str]| -> Result<String, Failed> {
        let said = Command::new(&paths.command).arg("stat").args(arguments).output()?;
        Ok(String::from_utf8(said.stdout)?)
    };
    expect("its line", &stat(&["--pid", &pid.to_string()])?, &line)?;
    let all = stat(&[])?;
    if all.contains(&line) {
        return Ok(());
    }
    Err(format!("not listed:\n{all}").into())
}

/// Returns how many threads a guest has.
fn threads(guest: &Guest) -> Result<usize, Failed> {
    Ok(std::fs::read_dir(format!("/proc/{}/task", guest.child.id()))?.count())
}

/// Connections to a server that listens on one port of two addresses are promoted, and no promotion waits until a
/// question is given up.
fn two_listeners(paths: &Paths, family: &str) -> Result<(), Failed> {
    /// An answer may be late on a busy machine. So only rounds with a time-out each are a fault.
    const ROUNDS: u32 = 5;
    let mut waits = Vec::new();
    for _ in 0..ROUNDS {
        waits.push(visits(paths, family)?);
        if waits.last() == Some(&0) {
            return Ok(());
        }
    }
    Err(format!("promotions that waited until a time-out, by round: {waits:?}").into())
}

/// Makes connections one after the other, each of which lasts until it is promoted. Returns how many questions got no
/// answer in time.
fn visits(paths: &Paths, family: &str) -> Result<u64, Failed> {
    const VISITS: u64 = 9;
    let mut server = Guest::start(paths, &["host"], Some(&[]))?;
    let port = server.line()?;
    let mut client = Guest::start(paths, &["visitor", &port, family], Some(&[]))?;
    for visit in 1..=VISITS {
        client.write("call")?;
        let end = Instant::now() + LIMIT;
        loop {
            let states = [&server, &client].map(|guest| guest.state(paths));
            let is_promoted = |state: &Result<Promotion, _>| state.as_ref().is_ok_and(|s| s.promoted >= visit);
            if states.iter().all(is_promoted) {
                break;
            }
            if Instant::now() > end {
                let reasons = [&server, &client].map(|guest| guest.reasons(paths));
                return Err(format!("connection {visit}: {states:?}, {reasons:?}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        expect("the client", &client.tell("leave")?, "left")?;
    }
    let timeouts = count(&paths.command, client.child.id(), "timeouts").map_err(|e| e.to_string())?;
    for (guest, who) in [(&mut client, "client"), (&mut server, "server")] {
        guest.write("end")?;
        expect("stderr", &guest.succeed(who)?, "")?;
    }
    timeouts.ok_or_else(|| "no count of time-outs".into())
}

/// A server whose rules cannot be read leaves its connections on TCP, and prints one line about it.
fn with_rules(paths: &Paths, file: &Path) -> Result<(), Failed> {
    let file = file.to_str().unwrap();
    let (talk, _) = Talk::begin(paths, &[], &[("RDMASOCK_RULES", file)])?;
    talk.stays("rules file cannot be used")?;
    let said = talk.end()?;
    let is_one_line = said.matches('\n').count() == 1;
    if is_one_line && said.contains("every connection stays on TCP") && said.contains(file) {
        return Ok(());
    }
    Err(format!("the server wrote {said}").into())
}

fn rules_file_missing(paths: &Paths) -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    with_rules(paths, &dir.path().join("rules.toml"))
}

fn rules_file_unreadable(paths: &Paths) -> Result<(), Failed> {
    // The file is a directory, because root may read any file.
    let dir = tempfile::tempdir()?;
    with_rules(paths, dir.path())
}

fn rules_file_wrong(paths: &Paths) -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("rules.toml");
    std::fs::write(&file, "[[rule]]\nprot = 80\naction = \"leave\"\n")?;
    with_rules(paths, &file)
}

fn io_uring_is_hidden(paths: &Paths) -> Result<(), Failed> {
    hidden_from(paths, &[("RDMASOCK_IO_URING", "hide")])
}

/// libuv adds descriptors to its epoll sets by a ring, and works without it where there is none.
fn io_uring_is_hidden_from_libuv(paths: &Paths) -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let (source, library) = (dir.path().join("uv.c"), dir.path().join("libuv.so.1"));
    std::fs::write(&source, "int uv_loop_init(void *loop) { return loop == 0; }\n")?;
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).args([&library, &source]);
    if !cc.status()?.success() {
        return Err("cc (Debian: apt install gcc libc6-dev)".into());
    }
    let both = format!("{}:{}", paths.library.as_ref()?.display(), library.display());
    hidden_from(paths, &[("LD_PRELOAD", &both)])
}

fn hidden_from(paths: &Paths, variables: &[(&str, &str)]) -> Result<(), Failed> {
    let (mut talk, said) = Talk::begin(paths, &["io_uring"], variables)?;
    expect("the ring", &said[0], "-1 ENOSYS")?;
    talk.on_link()?;
    expect("the ring on a link", &talk.server.tell("io_uring")?, "-1 ENOSYS")?;
    talk.on_link()?;
    expect("stderr", &talk.end()?, "")
}

const ALLOWED: &[(&str, &str)] = &[("RDMASOCK_IO_URING", "allow")];
/// Without variables a program gets the kernel's io_uring.
const BY_DEFAULT: &[(&str, &str)] = &[];
const HAS_RING: &str = "the program uses io_uring";

/// Returns whether the kernel gives this process, which has no library, an io_uring.
fn has_rings() -> bool {
    let mut parameters = [0u64; 32];
    // SAFETY: room for the parameters.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
    // SAFETY: made above, or refused.
    unsafe { libc::close(ring as i32) == 0 }
}

fn io_uring_allowed_before(paths: &Paths) -> Result<(), Failed> {
    allowed_before(paths, ALLOWED)
}

fn io_uring_by_default(paths: &Paths) -> Result<(), Failed> {
    allowed_before(paths, BY_DEFAULT)
}

fn allowed_before(paths: &Paths, variables: &[(&str, &str)]) -> Result<(), Failed> {
    let (talk, said) = Talk::begin(paths, &["io_uring"], variables)?;
    if !has_rings() {
        println!("skipped: this kernel gives no io_uring ({})", said[0]);
        return Ok(());
    }
    expect("the ring", &said[0], "done")?;
    talk.stays(HAS_RING)?;
    expect("stderr", &talk.end()?, "")
}

fn io_uring_allowed_on_a_link(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, &[], ALLOWED)?;
    talk.on_link()?;
    let said = talk.server.tell("io_uring")?;
    if !has_rings() {
        println!("skipped: this kernel gives no io_uring ({said})");
        return Ok(());
    }
    expect("the ring", &said, "done")?;
    talk.stays(HAS_RING)?;
    expect("stderr", &talk.end()?, "")
}

const HAS_LIBRARY: &str = "a library was opened with RTLD_DEEPBIND";

fn deep_bind_before(paths: &Paths) -> Result<(), Failed> {
    let (talk, said) = Talk::begin(paths, &["deep bind"], &[])?;
    expect("the library", &said[0], "done")?;
    talk.stays(HAS_LIBRARY)?;
    expect("stderr", &talk.end()?, "")
}

fn deep_bind_on_a_link(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, &[], &[])?;
    talk.on_link()?;
    expect("the library", &talk.server.tell("deep bind")?, "done")?;
    talk.stays(HAS_LIBRARY)?;
    expect("stderr", &talk.end()?, "")
}

/// Promoted or not, the program gets no SIGXFSZ, which would end it.
fn no_files_at_all(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, said) = Talk::begin(paths, &["early:file size:0"], &[])?;
    expect("the limit", &said[0], "done")?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

fn no_large_files(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, said) = Talk::begin(paths, &["early:file size:300000"], &[])?;
    expect("the limit", &said[0], "done")?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

/// The library opens and closes its own descriptors under the program's limit.
fn limit_of_open_files_is_kept(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, said) = Talk::begin(paths, &["early:1024 open files for now", "early:watch the limit"], &[])?;
    expect("the limit", &said[0], "done")?;
    talk.on_link()?;
    expect("the limit", &talk.server.tell("watched")?, "kept")?;
    expect("stderr", &talk.end()?, "")
}

fn few_open_files(paths: &Paths) -> Result<(), Failed> {
    let (talk, said) = Talk::begin(paths, &["early:open files:64"], &[])?;
    expect("the limit", &said[0], "done")?;
    talk.on_link()?;
    expect("stderr", &talk.end()?, "")
}

/// A program with so few descriptors has each of their numbers, and stays on TCP.
fn very_few_open_files(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, said) = Talk::begin(paths, &["early:open files:32", "take all open files"], &[])?;
    expect("the limit", &said[0], "done")?;
    expect("the last number", &said[1], "done")?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

/// The library's mappings are not filled though the program locks its mappings.
fn locked_memory(paths: &Paths) -> Result<(), Failed> {
    /// KiB of a link and its thread that may be locked, and resident. glibc reserves 64 MiB for the thread's
    /// allocations.
    const ROOM: [u64; 2] = [80 * 1024, 16 * 1024];
    let words = ["early:lock memory", "early:memory"];
    let (mut talk, said) = Talk::begin(paths, &words, &[])?;
    if said[0] != "done" {
        println!("skipped: no memory may be locked ({})", said[0]);
        return Ok(());
    }
    talk.on_link()?;
    let after = talk.server.tell("memory")?;
    let (before, after) = (numbers(&said[1]), numbers(&after));
    for ((before, after), room) in before.into_iter().zip(after).zip(ROOM) {
        if after > before + room {
            return Err(format!("locked or resident: {before} KiB, then {after}").into());
        }
    }
    expect("stderr", &talk.end()?, "")
}

/// A program that locks its present memory fills the parts of a link that are in use, not those it may grow into.
fn locked_memory_on_a_link(paths: &Paths) -> Result<(), Failed> {
    /// KiB that may become resident: mostly one segment of each arena, and the stacks and heaps of two threads.
    const ROOM: u64 = 5 * 1024;
    let (mut talk, _) = Talk::begin(paths, &[], &[])?;
    talk.on_link()?;
    let before = talk.server.tell("memory")?;
    let locked = talk.server.tell("lock present memory")?;
    if locked != "done" {
        println!("skipped: the memory may not be locked ({locked})");
        return Ok(());
    }
    let after = talk.server.tell("memory")?;
    if numbers(&after)[2] > numbers(&before)[2] + ROOM {
        return Err(format!("locked, resident, of no file: {before} KiB, then {after}").into());
    }
    talk.on_link()?;
    expect("stderr", &talk.end()?, "")
}

fn numbers(of: &str) -> Vec<u64> {
    of.split(' ').map(|n| n.parse().unwrap()).collect()
}

/// The address space is too little for a link: that costs the promotion alone.
fn little_address_space(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, said) = Talk::begin(paths, &["early:address space:300000000"], &[])?;
    expect("the limit", &said[0], "done")?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

/// A server that has made calls for root only, before it made a socket, is promoted all the same.
fn as_root(paths: &Paths, what: &[&str]) -> Result<(), Failed> {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root may");
        return Ok(());
    }
    let (mut talk, said) = Talk::begin(paths, what, &[])?;
    for said in said {
        expect("what was to be done", &said, "done")?;
    }
    talk.on_link()?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

/// A server that gets its listener over an exec (systemd, an update without a pause) is promoted.
fn listener_of_another_image(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, &["exec"], &[])?;
    talk.on_link()?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

/// Options whose data only a receive with room for control data gets do not keep other receives on TCP.
fn stamps_of_the_listener(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, &["stamps"], &[])?;
    talk.on_link()?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

/// An option that no link serves is the reason that both ends report, and the client asks no second time.
fn low_water_is_refused_once(paths: &Paths) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, &["low water"], &[])?;
    talk.stays("socket option or call not supported on a link")?;
    talk.goes_on()?;
    let (command, client) = (&paths.command, talk.client.child.id());
    let asks = count(command, client, "asks").map_err(|e| e.to_string())?;
    expect("asks", &format!("{asks:?}"), "Some(1)")?;
    expect("stderr", &talk.end()?, "")
}

fn chroot(paths: &Paths) -> Result<(), Failed> {
    let root = tempfile::tempdir()?;
    as_root(paths, &[&format!("early:root:{}", root.path().display())])
}

fn chroot_and_nobody(paths: &Paths) -> Result<(), Failed> {
    let root = tempfile::tempdir()?;
    let enter = format!("early:root:{}", root.path().display());
    as_root(paths, &[&enter, "early:nobody"])
}

const EPOLL: &str = "early:wait by epoll";
const CONFINED: &str = "the program restricts its system calls";

/// A server that forbids itself most calls after it has begun to listen serves its client, on TCP.
fn sandboxed(paths: &Paths, what: &[&str], is_client_ours: bool) -> Result<(), Failed> {
    let (mut talk, said) = Talk::with_client(paths, what, &[], is_client_ours.then_some(&[]))?;
    for said in said {
        expect("the filter", &said, "done")?;
    }
    talk.goes_on()?;
    talk.stays(CONFINED)?;
    expect("stderr", &talk.end()?, "")
}

/// As [`sandboxed`], in the middle of a connection that is on a link.
fn sandboxed_on_a_link(paths: &Paths, before: &[&str], how: &str) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, before, &[])?;
    talk.on_link()?;
    expect("the filter", &talk.server.tell(how)?, "done")?;
    talk.goes_on()?;
    talk.stays(CONFINED)?;
    expect("stderr", &talk.end()?, "")
}

/// A filter that allows the calls of services changes nothing.
fn service(paths: &Paths, how: &str) -> Result<(), Failed> {
    let (mut talk, said) = Talk::begin(paths, &[how], &[])?;
    expect("the filter", &said[0], "done")?;
    talk.on_link()?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

fn service_for_plain_client(paths: &Paths, how: &str) -> Result<(), Failed> {
    let (mut talk, said) = Talk::with_client(paths, &[how], &[], None)?;
    expect("the filter", &said[0], "done")?;
    talk.goes_on()?;
    expect("stderr", &talk.end()?, "")
}

fn service_on_a_link(paths: &Paths, how: &str) -> Result<(), Failed> {
    let (mut talk, _) = Talk::begin(paths, &[], &[])?;
    talk.on_link()?;
    expect("the filter", &talk.server.tell(how)?, "done")?;
    talk.goes_on()?;
    talk.on_link()?;
    expect("stderr", &talk.end()?, "")
}
