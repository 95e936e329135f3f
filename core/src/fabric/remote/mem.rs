//! A queue pair in memory that behaves like a device, for tests. Its send queue is bounded, and completions free the
//! entries. A message that finds no receive buffer ends the connection. WRITEs and READs are checked against registered
//! memory. A test can set a delay, under a virtual clock, and choose the work request at which the connection ends.
//!
//! The modelled network carries out work requests when either end polls. It reads source memory at that time, not when
//! the work request is posted, as a device may do. The file is built for tests, and with the feature `mem`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::fabric::mem::Clock;
use crate::fabric::remote::qp::{Completed, Down, Key, Limits, PostError, QueuePair, Read, Region, Role, Write};

/// The properties of a pair of queue pairs.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The limits of each end.
    pub limits: Limits,
    /// The most work requests that are posted and whose completion was not polled.
    pub send_queue: usize,
    /// The number of work requests that one completion stands for. A completion stands for fewer only after the send
    /// queue was full.
    pub signal_every: usize,
    /// The delay from one end to the other in µs.
    pub delay: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: Limits {
                receive_buffers: 128,
                buffer_bytes: 4096,
                immediate: false,
                packet_bytes: 0,
                reads: 4,
            },
            send_queue: 256,
            signal_every: 16,
            delay: 0,
        }
    }
}

#[derive(Debug)]
enum Work {
    Send(Vec<u8>),
    Write(Write, Option<u32>),
    Read(Read),
    Probe,
}

// SAFETY: the pointer leads to registered memory, which any thread may access.
unsafe impl Send for Work {}

/// The use of memory that a key allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Source,
    Target,
    Sink,
    Offered,
}

#[derive(Debug)]
enum Arrived {
    Message(Vec<u8>),
    Written { immediate: u32, bytes: u32 },
}

/// The device of one end.
#[derive(Debug, Default)]
struct Device {
    /// Posted work requests, each with its time of arrival.
    posted: VecDeque<(u64, Work)>,
    /// The number of work requests that were carried out, and whose completions were not polled.
    completed: usize,
    /// The number of work requests that were posted, carried out or not, and whose completions were not polled.
    outstanding: usize,
    was_full: bool,
    /// The number of receive buffers that are posted.
    buffers: u16,
    arrived: VecDeque<Arrived>,
    /// The address, length, key and use of registered memory. `Source`: this end's WRITEs read there. `Target`: the
    /// peer writes there. `Sink`: this end's READs go there. `Offered`: the peer reads there.
    regions: Vec<(u64, u64, u32, Use)>,
    is_armed: bool,
    /// The number of times that the completion fd fired. This queue pair and those beside it share the fd.
    armed_fired: Arc<AtomicU64>,
    registered: u64,
    refuses_memory: bool,
    /// The number of probes, and of READs, that were carried out and not polled.
    probed: usize,
    read: usize,
}

impl Device {
    fn fire(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            self.armed_fired.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct State {
    config: Config,
    clock: Clock,
    devices: [Device; 2],
    is_down: bool,
    is_mute: bool,
    why: &'static str,
    /// The number of further work requests that are carried out before the connection ends; `None` if there is no
    /// limit.
    lives: Option<u64>,
    /// A connection whose registered memory counts as registered here too.
    beside: Option<Arc<Shared>>,
    /// The number of arrivals that are lost at each end when the connection ends, of those that were not polled.
    loses: usize,
    next_key: u32,
}

impl State {
    fn die(&mut self, why: &'static str) {
        if self.is_down {
            return;
        }
        self.is_down = true;
        self.why = why;
        let loses = self.loses;
        for device in &mut self.devices {
            device.posted.clear();
            let keep = device.arrived.len().saturating_sub(loses);
            device.arrived.truncate(keep);
            device.read = device.read.saturating_sub(loses);
        }
    }

    /// Carries out the work requests whose time has come.
    fn run(&mut self) {
        let now = self.clock.now();
        for me in [0, 1] {
            while !self.is_down && !self.is_mute {
                let Some(device) = self.devices.get_mut(me) else {
                    return;
                };
                if device.posted.front().is_none_or(|(due, _)| *due > now) {
                    break;
                }
                let Some((_, work)) = device.posted.pop_front() else {
                    break;
                };
                if let Some(lives) = self.lives.as_mut() {
                    if *lives == 0 {
                        self.die("scripted");
                        return;
                    }
                    *lives -= 1;
                }
                self.carry(me, work);
            }
        }
    }

    fn carry(&mut self, me: usize, work: Work) {
        let result = match work {
            Work::Probe => {
                if let Some(device) = self.devices.get_mut(me) {
                    device.probed += 1;
                    device.fire();
                }
                return;
            }
            Work::Read(read) => self.read(me, &read),
            Work::Send(bytes) => self.arrive(1 - me, Arrived::Message(bytes)),
            Work::Write(write, immediate) => self.write(me, &write).and_then(|()| match immediate {
                Some(immediate) => self.arrive(
                    1 - me,
                    Arrived::Written {
                        immediate,
                        bytes: write.len,
                    },
                ),
                None => Ok(()),
            }),
        };
        if let Err(why) = result {
            self.die(why);
        } else if let Some(device) = self.devices.get_mut(me) {
            device.completed += 1;
            // Fires for every work request, as if each were signalled.
            device.fire();
        }
    }

    fn arrive(&mut self, to: usize, what: Arrived) -> Result<(), &'static str> {
        let device = self.devices.get_mut(to).ok_or("no such end")?;
        device.buffers = device.buffers.checked_sub(1).ok_or("no receive buffer")?;
        device.arrived.push_back(what);
        device.fire();
        Ok(())
    }

    /// Returns whether an end has registered `len` bytes at `at` under the key for this use.
    fn covers(&self, end: usize, key: u32, (at, len): (u64, u32), what: Use) -> bool {
        let covers = |device: Option<&Device>| {
            let regions = device.map(|d| d.regions.as_slice()).unwrap_or_default();
            regions.iter().any(|(start, n, k, of)| {
                let end = at.checked_add(len.into());
                (*k, *of) == (key, what) && at >= *start && end.is_some_and(|end| end <= start + n)
            })
        };
        let beside = self.beside.as_ref().map(|beside| beside.lock());
        covers(self.devices.get(end)) || covers(beside.as_ref().and_then(|state| state.devices.get(end)))
    }

    fn write(&mut self, me: usize, write: &Write) -> Result<(), &'static str> {
        let from = (write.from.addr() as u64, write.len);
        if write.len == 0 || !self.covers(me, write.local, from, Use::Source) {
            return Err("bad local key");
        }
        if !self.covers(1 - me, write.remote, (write.to, write.len), Use::Target) {
            return Err("bad remote key");
        }
        let to = std::ptr::with_exposed_provenance_mut::<u8>(write.to as usize);
        // SAFETY: source and target are registered for this length, and stay mapped (`register`).
        unsafe { std::ptr::copy(write.from, to, write.len as usize) };
        Ok(())
    }

    fn read(&mut self, me: usize, read: &Read) -> Result<(), &'static str> {
        let to = (read.to.addr() as u64, read.len);
        if read.len == 0 || !self.covers(me, read.local, to, Use::Sink) {
            return Err("bad local key");
        }
        if !self.covers(1 - me, read.remote, (read.from, read.len), Use::Offered) {
            return Err("bad remote key");
        }
        let from = std::ptr::with_exposed_provenance::<u8>(read.from as usize);
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy(from, read.to, read.len as usize) };
        if let Some(device) = self.devices.get_mut(me) {
            device.read += 1;
            device.fire();
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// A copy of the state's flag, which is read without the lock.
    is_down: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An end of a pair of queue pairs.
#[derive(Debug)]
pub struct MemQp {
    me: usize,
    limits: Limits,
    shared: Arc<Shared>,
}

/// Returns two queue pairs that are connected with each other.
pub fn pair(config: Config, clock: &Clock) -> [MemQp; 2] {
    pair_beside(config, clock, None)
}

/// Returns two connected queue pairs. Memory that is registered with `other` is registered for them too.
pub fn pair_beside(config: Config, clock: &Clock, other: Option<&MemQp>) -> [MemQp; 2] {
    let fired = |other: &MemQp| {
        other
            .shared
            .lock()
            .devices
            .each_ref()
            .map(|d| Arc::clone(&d.armed_fired))
    };
    let devices = other.map(fired).unwrap_or_default().map(|armed_fired| Device {
        buffers: config.limits.receive_buffers,
        armed_fired,
        ..Device::default()
    });
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            config,
            clock: clock.clone(),
            devices,
            is_down: false,
            is_mute: false,
            why: "",
            lives: None,
            beside: other.map(|other| Arc::clone(&other.shared)),
            loses: 0,
            next_key: 0x100,
        }),
        is_down: AtomicBool::new(false),
    });
    [0, 1].map(|me| MemQp {
        me,
        limits: config.limits,
        shared: Arc::clone(&shared),
    })
}

impl MemQp {
    /// Ends the connection after `requests` more work requests of both ends. Later requests are lost. Of the messages
    /// that have arrived at each end by then and were not polled, `loses` are lost.
    pub fn die_after(&self, requests: u64, loses: usize) {
        let mut state = self.shared.lock();
        state.lives = Some(requests);
        state.loses = loses;
    }

    /// Ends the connection.
    pub fn cut(&self) {
        self.shared.lock().die("cut");
    }

    /// While `on`, carries out no work request of either end, and reports no error.
    pub fn mute(&self, on: bool) {
        self.shared.lock().is_mute = on;
    }

    /// Returns why the connection has ended; empty while it has not.
    pub fn why(&self) -> &'static str {
        self.shared.lock().why
    }

    /// Makes the device refuse to register memory from now on.
    pub fn refuse_memory(&self) {
        self.with(|d| d.refuses_memory = true);
    }

    /// Returns how often memory was registered.
    pub fn registered(&self) -> u64 {
        self.with(|d| d.registered)
    }

    /// Returns how often the completion fd would have become readable.
    pub fn fired(&self) -> u64 {
        self.with(|d| d.armed_fired.load(Ordering::Relaxed))
    }

    /// Returns when the next work request of either end arrives, in µs; `None` if none is under way.
    pub fn next_arrival(&self) -> Option<u64> {
        let state = self.shared.lock();
        if state.is_mute {
            return None;
        }
        let due = state.devices.iter().filter_map(|d| d.posted.front());
        due.map(|(due, _)| *due).min()
    }

    fn with<T: Default>(&self, f: impl FnOnce(&mut Device) -> T) -> T {
        let mut state = self.shared.lock();
        state.devices.get_mut(self.me).map(f).unwrap_or_default()
    }

    fn post(&self, work: Work) -> Result<(), PostError> {
        let mut state = self.shared.lock();
        if state.is_down {
            return Err(PostError::Down);
        }
        let (due, most) = (state.clock.now() + state.config.delay, state.config.send_queue);
        let Some(device) = state.devices.get_mut(self.me) else {
            return Err(PostError::Down);
        };
        // There is always room for a probe.
        if !matches!(work, Work::Probe) {
            if device.outstanding >= most {
                device.was_full = true;
                if device.completed > 0 {
                    // A real device would have signalled one of these work requests.
                    device.fire();
                }
                return Err(PostError::Full);
            }
            device.outstanding += 1;
        }
        device.posted.push_back((due, work));
        Ok(())
    }
}

impl QueuePair for MemQp {
    fn limits(&self) -> Limits {
        self.limits
    }

    unsafe fn register(&self, at: *mut u8, len: usize, role: Role) -> Result<Region, Down> {
        let mut state = self.shared.lock();
        state.next_key += 2;
        let key = Key {
            local: state.next_key,
            remote: state.next_key + 1,
        };
        let Some(device) = state.devices.get_mut(self.me) else {
            return Err(Down(0));
        };
        if device.refuses_memory {
            return Err(Down(12));
        }
        device.registered += 1;
        let start = at.expose_provenance() as u64;
        let uses: &[(u32, Use)] = match role {
            Role::Both => &[
                (key.local, Use::Source),
                (key.local, Use::Sink),
                (key.remote, Use::Target),
            ],
            Role::Source => &[(key.local, Use::Source)],
            Role::Target => &[(key.local, Use::Sink), (key.remote, Use::Target)],
            Role::Offered => &[(key.remote, Use::Offered)],
        };
        for (k, what) in uses {
            device.regions.push((start, len as u64, *k, *what));
        }
        let handle = key.local.into();
        Ok(Region { key, handle })
    }

    fn deregister(&self, region: Region) {
        let Key { local, remote } = region.key;
        self.with(|d| d.regions.retain(|(_, _, k, _)| *k != local && *k != remote));
    }

    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<(), PostError> {
        self.post(Work::Write(*write, immediate))
    }

    unsafe fn read(&self, read: &Read) -> Result<(), PostError> {
        self.post(Work::Read(*read))
    }

    fn send(&self, message: &[u8]) -> Result<(), PostError> {
        if message.len() > self.limits.buffer_bytes as usize {
            self.shared.lock().die("message too long");
            return Err(PostError::Down);
        }
        self.post(Work::Send(message.to_vec()))
    }

    fn probe(&self) -> Result<(), PostError> {
        self.post(Work::Probe)
    }

    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize, Down> {
        let mut events = 0;
        self.shared.lock().run();
        loop {
            let arrived = self.with(|d| d.arrived.pop_front());
            let Some(arrived) = arrived else { break };
            match &arrived {
                Arrived::Message(bytes) => each(Completed::Received(bytes)),
                Arrived::Written { immediate, bytes } => each(Completed::Written {
                    immediate: *immediate,
                    bytes: *bytes,
                }),
            }
            self.with(|d| d.buffers += 1);
            events += 1;
        }
        let mut state = self.shared.lock();
        let signal = state.config.signal_every.max(1);
        let (mut room, mut probed, mut read) = (false, 0, 0);
        if let Some(device) = state.devices.get_mut(self.me) {
            let signal = if device.was_full { 1 } else { signal };
            let n = device.completed / signal * signal;
            device.completed -= n;
            device.outstanding -= n;
            room = n > 0 && std::mem::take(&mut device.was_full);
            probed = std::mem::take(&mut device.probed);
            read = std::mem::take(&mut device.read);
        }
        let is_down = state.is_down;
        drop(state);
        for _ in 0..read {
            each(Completed::Read);
            events += 1;
        }
        if room {
            each(Completed::Room);
            events += 1;
        }
        for _ in 0..probed {
            each(Completed::Probed);
            events += 1;
        }
        if is_down {
            self.shared.is_down.store(true, Ordering::SeqCst);
            return Err(Down(104));
        }
        Ok(events)
    }

    fn arm(&self) -> Result<(), Down> {
        self.with(|d| d.is_armed = true);
        if self.shared.is_down.load(Ordering::SeqCst) {
            return Err(Down(104));
        }
        Ok(())
    }
}

impl Drop for MemQp {
    /// Ends the connection: a queue pair that is destroyed carries out no more work requests.
    fn drop(&mut self) {
        self.shared.lock().die("destroyed");
    }
}
