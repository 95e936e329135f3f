//! The conformance suite on each fabric of which one process can be both ends. These are `mem`; `shm` with two
//! mappings of each memfd, a SEQPACKET channel and eventfds, as two processes have them; and links between hosts. Links
//! between hosts run over queue pairs in memory, with and without immediates, and with tiny queues; over the local
//! device's queue pairs; and over the verbs plugin's on the stand-in for rdma-core, in a process of their own.
#![allow(clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use libtest_mimic::{Arguments, Failed, Trial};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::fabric::mem::Clock;
use rdmasock_core::fabric::remote::mem::{
    MemQp, {self as memqp},
};
use rdmasock_core::fabric::remote::qp::{Limits, QueuePair};
use rdmasock_core::fabric::remote::{Local, MIN_BUFFER, MIN_BUFFERS, Tuning};
use rdmasock_core::fabric::shm::{Outside, Side};
use rdmasock_core::fabric::waiter::{FLAGS_BYTES, FlagPage, MAX_WAITERS, WaiterId};
use rdmasock_core::fabric::{SendError, mem, remote, shm};
use rdmasock_core::os::channel::{Channel, RecvError};
use rdmasock_core::os::memfd;
use rdmasock_core::os::memfd::{Access, Mapping};
use rdmasock_core::sync::SleepFlag;
use rdmasock_core::wire::{MAX_MESSAGE, Message};
use rdmasock_localnic::settings::Settings;
use rdmasock_localnic::within;
use rdmasock_localnic::within::LocalQp;
use rdmasock_shims::config::verbs;
use rdmasock_shims::config::verbs::State;
use rdmasock_tests::conformance::{Harness, suite};
use rdmasock_tests::harness::{Paths, clean_environment};

/// The variable that is set where the suite is run on the plugin alone.
const ON_PLUGIN: &str = "CONFORMANCE_ON_PLUGIN";
/// In ms, far more than two threads of one process need.
const CONNECTS_WITHIN_MS: u32 = 20_000;

/// Links on the heap.
struct Mem;

impl Harness for Mem {
    type End = mem::End;

    fn link(data_bytes: u64) -> [Self::End; 2] {
        mem::heap_pair(data_bytes, &Clock::default()).expect("a size that arenas have")
    }

    fn recv(end: &Self::End) -> Option<Message> {
        end.recv()
    }

    fn begin_sleep(end: &Self::End, waiter: WaiterId) {
        end.begin_sleep(waiter);
    }

    fn end_sleep(end: &Self::End, waiter: WaiterId) -> u64 {
        end.end_sleep(waiter)
    }
}

/// Links over memfds.
struct Shm;

/// The doorbells of one end, made when they are first asked for: 1,024 would be too many fds.
#[derive(Default)]
struct Bells(Mutex<BTreeMap<u16, EventFd>>);

impl Bells {
    fn with<T>(&self, waiter: WaiterId, f: impl FnOnce(&EventFd) -> T) -> T {
        let mut all = self.0.lock().expect("no test fails in here");
        f(all.entry(waiter.0).or_insert_with(|| {
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).expect("an eventfd")
        }))
    }
}

/// The parts of an end of a [`Shm`] link beside its memory.
struct Outer {
    channel: Channel,
    /// The flags of this end's waiters, as this end maps them.
    flags: FlagPage,
    bells: Arc<Bells>,
    peers: Arc<Bells>,
}

impl Outside for Outer {
    fn send(&self, message: &Message) -> Result<(), SendError> {
        let mut buf = [0; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).map_err(|_| SendError::Encoding)?;
        self.channel.send(bytes, &[]).map_err(|_| SendError::Down)
    }

    fn ring(&self, waiter: WaiterId, _: &FlagPage) {
        self.peers.with(waiter, |bell| bell.write(1)).expect("never full");
    }
}

/// Returns an arena as its owner maps it and as the peer does; each maps as much as it uses.
fn arena(data_bytes: u64) -> [Side; 2] {
    let layout = Layout::for_data(data_bytes).expect("a size that arenas have");
    let fd = memfd::create_file("rdmasock-conformance", layout.file_len()).expect("a memfd");
    [(), ()].map(|()| {
        let side = Side::blank();
        side.show(fd.as_fd(), &layout).expect("a mapping");
        side
    })
}

/// A page of flags as its owner has it and as the peer maps it.
fn flags() -> [FlagPage; 2] {
    let (fd, mine) = memfd::create_read_only_for_peers("rdmasock-conformance", FLAGS_BYTES).expect("a memfd");
    [mine, map_again(fd, FLAGS_BYTES, Access::ReadOnly)].map(|mapping| FlagPage::new(mapping).expect("a whole page"))
}

fn map_again(fd: impl AsFd, bytes: u64, access: Access) -> Mapping {
    memfd::map_received(fd.as_fd(), bytes, access).expect("a second mapping")
}

impl Harness for Shm {
    type End = shm::End<Outer>;

    fn link(data_bytes: u64) -> [Self::End; 2] {
        let ([a, a_seen], [b, b_seen]) = (arena(data_bytes), arena(data_bytes));
        let ([a_flags, a_flags_seen], [b_flags, b_flags_seen]) = (flags(), flags());
        let (a_channel, b_channel) = Channel::pair().expect("a pair of sockets");
        let (a_bells, b_bells) = <(Arc<Bells>, Arc<Bells>)>::default();
        let outer = |channel, flags, bells: &Arc<Bells>, peers: &Arc<Bells>| Outer {
            channel,
            flags,
            bells: Arc::clone(bells),
            peers: Arc::clone(peers),
        };
        let a_outer = outer(a_channel, a_flags, &a_bells, &b_bells);
        let b_outer = outer(b_channel, b_flags, &b_bells, &a_bells);
        // SAFETY: the suite makes ends before cursors, so drops them after; it opens a stream, then
        // asks for its producer once.
        unsafe {
            [
                shm::End::new(a, b_seen, b_flags_seen, a_outer),
                shm::End::new(b, a_seen, a_flags_seen, b_outer),
            ]
        }
    }

    fn recv(end: &Self::End) -> Option<Message> {
        let mut buf = [0; MAX_MESSAGE];
        match end.outside().channel.recv(&mut buf) {
            Ok(received) => Some(Message::decode(received.bytes).expect("a message")),
            Err(RecvError::WouldBlock) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn begin_sleep(end: &Self::End, waiter: WaiterId) {
        if let Some(flag) = end.outside().flags.flag(waiter) {
            flag.begin();
        }
    }

    fn end_sleep(end: &Self::End, waiter: WaiterId) -> u64 {
        if let Some(flag) = end.outside().flags.flag(waiter) {
            flag.end();
        }
        // EAGAIN: the bell was not rung.
        end.outside().bells.with(waiter, |bell| bell.read().unwrap_or(0))
    }
}

/// The waiters of one end of a [`Remote`] link.
struct Here {
    flags: Vec<SleepFlag>,
    bells: Vec<AtomicU64>,
    armed: AtomicBool,
}

impl Here {
    fn new() -> Self {
        Self {
            flags: (0..MAX_WAITERS).map(|_| SleepFlag::default()).collect(),
            bells: (0..MAX_WAITERS).map(|_| AtomicU64::new(0)).collect(),
            armed: AtomicBool::new(false),
        }
    }
}

impl Local for Here {
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag> {
        self.flags.get(usize::from(waiter.0))
    }

    fn ring(&self, waiter: WaiterId) {
        if let Some(bell) = self.bells.get(usize::from(waiter.0)) {
            bell.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn armed(&self) -> &AtomicBool {
        &self.armed
    }

    /// Every test settles when the link is quiet.
    fn settle_later(&self) {}
}

/// Queue pairs of one kind, both ends in this process.
trait Pairs {
    type Qp: QueuePair;
    /// Returns two connected queue pairs.
    fn pair() -> [Self::Qp; 2];
    /// Returns how a link uses them.
    fn tuning() -> Tuning {
        Tuning::default()
    }
}

/// Queue pairs in memory: with immediates or without, and if `TINY` with the smallest queues and buffers.
struct InMemory<const IMMEDIATE: bool, const TINY: bool>;

impl<const IMMEDIATE: bool, const TINY: bool> Pairs for InMemory<IMMEDIATE, TINY> {
    type Qp = MemQp;

    fn pair() -> [MemQp; 2] {
        let mut config = memqp::Config::default();
        if TINY {
            config.limits = Limits {
                receive_buffers: MIN_BUFFERS,
                buffer_bytes: MIN_BUFFER,
                immediate: IMMEDIATE,
                packet_bytes: 0,
                reads: 4,
            };
            config.send_queue = 2;
        }
        config.limits.immediate = IMMEDIATE;
        memqp::pair(config, &Clock::default())
    }

    fn tuning() -> Tuning {
        if !TINY {
            return Tuning::default();
        }
        Tuning {
            eager_max: 100,
            piece: 1000,
            chunk_log2: 13,
            ..Tuning::default()
        }
    }
}

/// Queue pairs of the local device.
struct OnDevice<const IMMEDIATE: bool>;

impl<const IMMEDIATE: bool> Pairs for OnDevice<IMMEDIATE> {
    type Qp = LocalQp;

    fn pair() -> [LocalQp; 2] {
        let settings = Settings {
            is_iwarp: !IMMEDIATE,
            ..Settings::default()
        };
        within::pair(settings).expect("a pair of the local device")
    }
}

/// Queue pairs of the verbs plugin that the environment names.
struct OnPlugin;

impl Pairs for OnPlugin {
    type Qp = verbs::Pair;

    fn pair() -> [verbs::Pair; 2] {
        let local = IpAddr::from([127, 0, 0, 1]);
        let acceptor = verbs::Acceptor::new(local).expect("a listener of the plugin");
        let is_answered = AtomicBool::new(false);
        let (connected, accepted) = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                let connected = verbs::connect(local, acceptor.address, b"hello", CONNECTS_WITHIN_MS, None).ok();
                is_answered.store(true, Ordering::Relaxed);
                connected
            });
            let accepted = loop {
                match acceptor.next().expect("the device is there") {
                    Some(incoming) => break incoming.accept(b"hello too", None).ok(),
                    None if is_answered.load(Ordering::Relaxed) => break None,
                    None => std::thread::yield_now(),
                }
            };
            (connecting.join().expect("no panic"), accepted)
        });
        let both = [connected, accepted].map(|end| end.expect("a connection of the plugin"));
        while both.iter().any(|pair| pair.state() == State::Connecting) {
            std::thread::yield_now();
        }
        both
    }
}

/// Links between hosts.
struct Remote<P>(PhantomData<P>);

impl<P: Pairs> Harness for Remote<P> {
    type End = remote::End<P::Qp, Here>;
    const KEEPS: bool = true;

    fn link(data_bytes: u64) -> [Self::End; 2] {
        let mut tuning = P::tuning();
        tuning.buffers = data_bytes;
        let side = |data_bytes| {
            let layout = Layout::for_data(data_bytes).expect("a size that arenas have");
            let mapping = Mapping::anonymous(layout.file_len() as usize).expect("memory");
            Side::new(mapping, layout).expect("as long as its layout")
        };
        P::pair().map(|qp| {
            let (mine, mirror) = (side(data_bytes), side(data_bytes + tuning.buffers));
            // SAFETY: the suite makes ends before cursors, so drops them after; it opens a stream, then
            // asks for its producer once.
            unsafe { remote::End::new(qp, mine, mirror, Here::new(), tuning) }
                .expect("a queue pair that can carry a link")
        })
    }

    fn recv(end: &Self::End) -> Option<Message> {
        end.take_message()
    }

    fn begin_sleep(end: &Self::End, waiter: WaiterId) {
        if let Some(flag) = end.local().flag(waiter) {
            flag.begin();
        }
    }

    fn end_sleep(end: &Self::End, waiter: WaiterId) -> u64 {
        if let Some(flag) = end.local().flag(waiter) {
            flag.end();
        }
        let bell = end.local().bells.get(usize::from(waiter.0));
        bell.map_or(0, |bell| bell.swap(0, Ordering::SeqCst))
    }

    fn settle(ends: &[Self::End; 2]) {
        loop {
            let mut came = false;
            for end in ends {
                came |= end.owes();
                end.settle();
                came |= end.progress().expect("the link is up");
            }
            if !came {
                return;
            }
        }
    }
}

/// Runs the suite on the plugin, in a process that finds the stand-in. `words` set the stand-in's variables.
fn on_plugin(words: &str) -> Result<(), Failed> {
    let paths = Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario")));
    let mut command = Command::new(std::env::current_exe()?);
    clean_environment(&mut command);
    let standin = paths.standin().map_err(|e| format!("{e:#}"))?;
    standin.set(&mut command, words);
    let output = command.env(ON_PLUGIN, words).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into()),
    }
}

fn main() {
    let args = Arguments::from_args();
    let trials = |fabric: &'static str, tests: Vec<(&'static str, fn())>| {
        tests.into_iter().map(move |(name, test)| {
            Trial::test(format!("{fabric}::{name}"), move || {
                test();
                Ok(())
            })
        })
    };
    if std::env::var_os(ON_PLUGIN).is_some() {
        let all = trials("plugin", suite::<Remote<OnPlugin>>()).collect();
        libtest_mimic::run(&args, all).exit();
    }
    let plugins = ["roce", "iwarp"].map(|words| Trial::test(format!("plugin_{words}"), move || on_plugin(words)));
    let all = trials("mem", suite::<Mem>())
        .chain(trials("shm", suite::<Shm>()))
        .chain(trials("iwarp", suite::<Remote<InMemory<false, false>>>()))
        .chain(trials("roce", suite::<Remote<InMemory<true, false>>>()))
        .chain(trials("iwarp_tiny", suite::<Remote<InMemory<false, true>>>()))
        .chain(trials("roce_tiny", suite::<Remote<InMemory<true, true>>>()))
        .chain(trials("device_iwarp", suite::<Remote<OnDevice<false>>>()))
        .chain(trials("device_roce", suite::<Remote<OnDevice<true>>>()))
        .chain(plugins)
        .collect();
    libtest_mimic::run(&args, all).exit();
}
