//! Links between hosts that fail while bytes are on them. On the local device they are cut in the middle of a WRITE or
//! a READ, silent, gone with the device, or late; over the verbs plugin queue pairs fail. Every byte of each connection
//! arrives once, and in its place. `CUTS` is the number of cuts; seeds begin at `CUTS_SEED`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;
use std::{fmt, fs};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_core::stats::{Event, instance_of};
use rdmasock_tests::harness::{Mode, Paths, clean_environment};

/// Cuts on each kind of device.
const CUTS: u64 = 100;
/// Cuts for each fault that takes longer: a cut in a direct transfer, a silent link, a failed queue pair of the
/// plugin, a device that goes, or a late answer.
const PER_SILENCE: u64 = 100;
const PER_DIRECT: u64 = 3;
const PER_PLUGIN: u64 = 5;
const PER_LOSS: u64 = 25;
const PER_LATE: u64 = 10;
/// A program that prints nothing for this time is given up. It detects hangs itself, and sooner.
const LIMIT: Duration = Duration::from_secs(100);
/// Pairs of programs in a row without a fault after which the test fails. A busy machine promotes a third of the
/// connections that a quiet one does, so that several pairs in a row have no fault.
const IN_VAIN: u32 = 25;
/// Seeds of a pair's connections.
const SEEDS: u64 = 1000;

/// Lines of each log that a failure shows.
const LAST_LINES: usize = 60;
/// The log settings under which the library and the device log faults.
const LOG: &str = "rdmasock=info,rdmasock::link=debug,rdmasock::verbs=debug";
const CUT: &str = "cut by LOCALNIC";
const CUT_WRITE: &str = "cut by LOCALNIC in the middle of a WRITE";
/// The log line of a queue pair whose peer no longer answers (IBV_WC_RETRY_EXC_ERR).
const FAILED: &str = "a work request failed with status 12";
const CUT_READ: &str = "cut by LOCALNIC in the middle of a READ";
const SILENT: &str = "link failed: no answer from the peer's device";
const GONE: &str = "the device is gone";
const CONNECTED: &str = "connected";
/// glibc's checks of the heap (mallopt(3), M_CHECK_ACTION). They find uses of what the plugin has freed: it frees and
/// makes all its objects with each queue pair.
const HEAP_CHECKS: &str = "libc_malloc_debug.so.0";
/// Log lines that no peer may cause.
const DEFECTS: [&str; 4] = [
    "breaks the protocol",
    "violation",
    "resumption failed",
    "a defect of the library",
];

/// A kind of fault.
#[derive(Clone, Copy)]
struct Fault {
    name: &'static str,
    /// The log line that is counted: in both logs, or in the log that has more.
    mark: &'static str,
    in_both: bool,
    /// The number of `CUTS` for which there is one such fault.
    share: u64,
    /// The path of large sends (`RDMASOCK_DEV_WAY`); empty is the default.
    way: &'static str,
    modes: [Mode; 2],
    settings: fn(round: u64) -> Settings,
}

/// The settings of a pair of programs.
struct Settings {
    /// `LOCALNIC`, without kind and seed.
    device: String,
    connections: u64,
    /// The number of connections that last, and how many times as long as a return to a link (about a second) they do.
    long: (u64, u8),
}

const FAULTS: [Fault; 7] = [
    Fault {
        name: "cut",
        mark: CUT,
        in_both: true,
        share: 1,
        way: "",
        modes: Mode::DEVICES,
        settings: |round| Settings {
            device: format!(
                "cut={}{}",
                pick(round, [40, 4, 150, 12]),
                pick(round / 4, ["", ",thread", ",delay=30"])
            ),
            connections: 300,
            long: (3, 1),
        },
    },
    // These cuts are rarer, so that there is time for direct transfers, which they hit.
    Fault {
        name: "direct",
        mark: CUT,
        in_both: true,
        share: PER_DIRECT,
        way: "",
        modes: Mode::DEVICES,
        settings: |round| Settings {
            device: format!(
                "cut={}{}",
                pick(round, [200, 100, 400]),
                pick(round / 3, ["", ",thread", ",delay=30"])
            ),
            connections: 120,
            long: (0, 0),
        },
    },
    Fault {
        name: "lent",
        mark: CUT_READ,
        in_both: true,
        share: PER_DIRECT,
        way: "get",
        modes: Mode::DEVICES,
        settings: |round| Settings {
            device: format!(
                "cutread={}{}",
                pick(round, [10, 2, 40]),
                pick(round / 3, ["", ",thread", ",delay=30"])
            ),
            connections: 120,
            long: (0, 0),
        },
    },
    Fault {
        name: "plugin",
        mark: FAILED,
        in_both: true,
        share: PER_PLUGIN,
        way: "",
        modes: Mode::PLUGIN,
        settings: |round| Settings {
            device: format!("cut={}", pick(round, [40, 600, 150])),
            connections: 120,
            long: (2, 1),
        },
    },
    Fault {
        name: "silence",
        mark: SILENT,
        in_both: false,
        share: PER_SILENCE,
        way: "",
        modes: Mode::DEVICES,
        settings: |round| Settings {
            device: format!("silence={}{}", pick(round, [60, 20, 200]), pick(round, ["", ",thread"])),
            connections: 12,
            long: (2, 1),
        },
    },
    Fault {
        name: "gone",
        mark: GONE,
        in_both: true,
        share: PER_LOSS,
        way: "",
        modes: Mode::DEVICES,
        settings: |round| Settings {
            device: format!(
                "gone={}{}",
                pick(round, [100, 30, 400]),
                pick(round / 3, ["", ",delay=30"])
            ),
            connections: 60,
            long: (4, 3),
        },
    },
    Fault {
        name: "late",
        mark: CONNECTED,
        in_both: true,
        share: PER_LATE,
        way: "",
        modes: Mode::DEVICES,
        settings: |round| match round {
            // The first request is given up, and the next one is answered.
            0 => Settings {
                device: "late=3300".to_owned(),
                connections: 4,
                long: (4, 6),
            },
            _ => Settings {
                device: format!("late={},cut={}", pick(round, [20, 150, 500]), pick(round / 3, [60, 10])),
                connections: 80,
                long: (2, 2),
            },
        },
    },
];

fn pick<T: Copy, const N: usize>(round: u64, all: [T; N]) -> T {
    all[(round % N as u64) as usize]
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // The programs wait most of the time.
    args.test_threads.get_or_insert(8);
    let cases = ["silence", "late", "direct", "lent", "gone", "plugin", "cut"].into_iter();
    let cases = cases.flat_map(|name| FAULTS.into_iter().filter(move |fault| fault.name == name));
    let trials = cases.flat_map(|fault| {
        fault.modes.map(|mode| {
            let device = mode.device().unwrap();
            Trial::test(format!("{}/{device}", fault.name), move || rounds(fault, mode, device))
        })
    });
    libtest_mimic::run(&args, trials.collect()).exit_code()
}

fn number(variable: &str, default: u64) -> u64 {
    let asked = std::env::var(variable).ok();
    asked.map_or(default, |n| n.parse().expect("a number"))
}

/// The counts of a run.
#[derive(Clone, Copy, Default)]
struct Figures {
    pairs: u64,
    connections: u64,
    faults: u64,
    in_writes: u64,
    in_reads: u64,
    links: u64,
    bytes: u64,
    link_bytes: u64,
    /// Received bytes of direct transfers.
    direct_bytes: u64,
    /// Received bytes that READs took from the senders' memory.
    lent_bytes: u64,
    /// Of these, bytes that landed in buffers that programs waited with.
    landed_bytes: u64,
    promoted: u64,
}

impl Figures {
    fn add(&mut self, other: &Self) {
        self.pairs += other.pairs;
        self.connections += other.connections;
        self.faults += other.faults;
        self.in_writes += other.in_writes;
        self.in_reads += other.in_reads;
        self.links += other.links;
        self.bytes += other.bytes;
        self.link_bytes += other.link_bytes;
        self.direct_bytes += other.direct_bytes;
        self.lent_bytes += other.lent_bytes;
        self.landed_bytes += other.landed_bytes;
        self.promoted += other.promoted;
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} counted, {} cuts in the middle of a WRITE, {} of a READ; {} links of {} pairs of programs, {} connections, {} ends \
             promoted; {} bytes compared, {} of them sent on links; {} written past the rings, {} \
             read, {} of these past rings",
            self.faults,
            self.in_writes,
            self.in_reads,
            self.links,
            self.pairs,
            self.connections,
            self.promoted,
            self.bytes,
            self.link_bytes,
            self.direct_bytes,
            self.lent_bytes,
            self.landed_bytes
        )
    }
}

/// Runs pairs of programs until there have been enough faults.
fn rounds(fault: Fault, mode: Mode, device: &str) -> Result<(), Failed> {
    let asked = number("CUTS", CUTS).div_ceil(fault.share);
    let first_seed = number("CUTS_SEED", 1);
    let (mut all, mut in_vain, mut round) = (Figures::default(), 0, 0);
    while all.faults < asked {
        let seed = first_seed + round * SEEDS;
        let settings = (fault.settings)(round);
        let what = format!("LOCALNIC={device},{} from seed {seed} on", settings.device);
        let figures = pair(fault, mode, device, &settings, seed).map_err(|why| {
            let why = why.message().unwrap_or("it failed").to_owned();
            format!("{what}, after {all}:\n{why}")
        })?;
        all.add(&figures);
        in_vain = if figures.faults == 0 { in_vain + 1 } else { 0 };
        if in_vain == IN_VAIN {
            return Err(format!("{} of {asked} faults; none with {what}", all.faults).into());
        }
        round += 1;
    }
    if fault.name == "lent" && (all.in_reads == 0 || all.landed_bytes == 0) {
        return Err(format!("no READ was cut, or nothing was read past the rings, in {all}").into());
    }
    if fault.name == "direct" && all.lent_bytes == 0 {
        return Err(format!("nothing was read from what senders lend in {all}").into());
    }
    if fault.name == "direct" && all.direct_bytes == 0 {
        return Err(format!("nothing went past the rings in {all}").into());
    }
    println!("{}/{device}: {all}", fault.name);
    Ok(())
}

/// Runs a pair of programs to its end.
fn pair(fault: Fault, mode: Mode, device: &str, settings: &Settings, seed: u64) -> Result<Figures, Failed> {
    let dir = tempfile::tempdir()?;
    let start = |args: &[&str], seed: u64| {
        let localnic = format!("{device},{},seed={seed}", settings.device);
        let promote_after = pick(seed / SEEDS, ["0", "2r,16K"]);
        // The settings alternate: many sends are direct, or as `auto` decides.
        let least = pick(seed / SEEDS / 2, ["4K", "auto"]);
        Peer::start(args, (mode, &localnic), promote_after, (least, fault.way), dir.path())
    };
    let connections = settings.connections.to_string();
    let mut server = start(&["serve", &connections], seed)?;
    let port = server.line()?;
    let (long, times) = (settings.long.0.to_string(), settings.long.1.to_string());
    // The client has another seed, so that the ends are not both cut at the same work request.
    let mut client = start(
        &["dial", &port, &seed.to_string(), &connections, &long, &times],
        seed + 1,
    )?;
    let mut figures = Figures {
        pairs: 1,
        connections: settings.connections,
        ..Figures::default()
    };
    let mut wrong = String::new();
    for (name, peer) in [("client", &mut client), ("server", &mut server)] {
        match peer.until_done() {
            Ok(bytes) => figures.bytes += bytes,
            Err(why) => wrong += &format!("the {name}:\n{why}"),
        }
    }
    let mut found = Vec::new();
    let mut logs = String::new();
    for (name, peer) in [("client", &client), ("server", &server)] {
        let instance = instance_of(peer.child.id()).ok().flatten().map(|p| p.instance);
        if let Some(instance) = instance {
            figures.link_bytes += instance.totals.tx.link_bytes;
            figures.direct_bytes += instance.count(Event::DirectReceived);
            figures.lent_bytes += instance.count(Event::RendezvousReceived);
            figures.landed_bytes += instance.count(Event::RendezvousLanded);
            figures.promoted += instance.totals.promoted;
            if instance.count(Event::LinkViolation) > 0 {
                wrong += &format!("the {name} counts violations\n");
            }
        }
        let log = fs::read_to_string(dir.path().join(format!("{}.log", peer.child.id()))).unwrap_or_default();
        let last: Vec<_> = log.lines().rev().take(LAST_LINES).collect();
        logs += &format!("the {name}'s log, the last line first:\n{}\n", last.join("\n"));
        let count = |mark: &str| log.lines().filter(|line| line.contains(mark)).count() as u64;
        found.push(count(fault.mark));
        figures.in_writes += count(CUT_WRITE);
        figures.in_reads += count(CUT_READ);
        figures.links += count(CONNECTED);
        for line in log
            .lines()
            .filter(|line| DEFECTS.iter().any(|defect| line.contains(defect)))
        {
            wrong += &format!("the {name} logs: {line}\n");
        }
    }
    figures.faults = if fault.in_both {
        found.iter().sum()
    } else {
        found.into_iter().max().unwrap_or(0)
    };
    if wrong.is_empty() {
        for (name, peer) in [("client", client), ("server", server)] {
            peer.end().map_err(|why| format!("the {name} at its end: {why}"))?;
        }
        return Ok(figures);
    }
    Err((wrong + &logs).into())
}

/// A program of `cuts-peer`; killed when this is dropped.
struct Peer {
    child: Child,
    lines: Receiver<String>,
}

impl Peer {
    /// Starts a program whose sends from `least` bytes on are direct, by `way` unless that is empty.
    fn start(
        args: &[&str],
        (mode, device): (Mode, &str),
        promote_after: &str,
        (least, way): (&str, &str),
        dir: &Path,
    ) -> Result<Self, Failed> {
        let paths = Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario")));
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuts-peer"));
        clean_environment(&mut command);
        if !way.is_empty() {
            command.env("RDMASOCK_DEV_WAY", way);
        }
        paths
            .set_device(mode, device, &mut command)
            .map_err(|e| format!("{e:#}"))?;
        let mut preload = paths.library?.into_os_string();
        if Mode::PLUGIN.contains(&mode) {
            preload.push(":");
            preload.push(HEAP_CHECKS);
            command.env("MALLOC_CHECK_", "3").env("MALLOC_PERTURB_", "165");
        }
        let mut child = command
            .args(args)
            .env("LD_PRELOAD", preload)
            .env("RDMASOCK_ZCOPY_MIN", least)
            .env("RDMASOCK_PROMOTE_AFTER", promote_after)
            .env("RDMASOCK_LOG", LOG)
            .env("RDMASOCK_LOG_FILE", dir.join("%p.log"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (give, lines) = sync_channel(10_000);
        let out = BufReader::new(child.stdout.take().unwrap());
        // The thread ends with the program.
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if give.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// Returns the next line that the program prints.
    fn line(&mut self) -> Result<String, String> {
        self.lines.recv_timeout(LIMIT).map_err(|error| match error {
            RecvTimeoutError::Timeout => "it says nothing".to_owned(),
            RecvTimeoutError::Disconnected => match self.child.wait() {
                Ok(status) => format!("it ended early: {status}"),
                Err(error) => error.to_string(),
            },
        })
    }

    /// Waits until the program's connections have ended. Returns how many bytes it has compared.
    fn until_done(&mut self) -> Result<u64, String> {
        let mut wrong = String::new();
        loop {
            match self.line() {
                Ok(line) => match line.strip_prefix("done ") {
                    Some(bytes) if wrong.is_empty() => return bytes.parse().map_err(|_| line),
                    Some(_) => return Err(wrong),
                    None => wrong += &format!("{line}\n"),
                },
                Err(why) => return Err(format!("{wrong}{why}\n")),
            }
        }
    }

    /// Ends the program's stdin, and waits for its exit, which must be a success.
    fn end(mut self) -> Result<(), String> {
        drop(self.child.stdin.take());
        let status = self.child.wait().map_err(|e| e.to_string())?;
        if status.success() {
            Ok(())
        } else {
            Err(status.to_string())
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The program may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
