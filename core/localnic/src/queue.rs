//! A queue pair: how work requests are posted, executed and completed. `conn.rs` makes the connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::serve::Slots;
use rdmasock_core::fabric::plugin::{Errno, Fate, Hidden, Level, Result, log};
use rdmasock_core::fabric::remote::qp::{Completed, Key, Read, Region, Role, Write};
use rdmasock_core::lock::Lock;
use rdmasock_core::sync::Published;
use rustix::net::Shutdown;

use crate::domain::{Domain, Registration, Table};
use crate::faults::{Fault, Faults};
use crate::nic::{Left, Nic, Served};
use crate::pair::{Arrived, BUFFER_BYTES, Pair};
use crate::settings::Settings;
use crate::{contexts, nic, pins};

/// The length of the send queue, work requests.
const SENDS: u32 = 240;

/// READs that may be outstanding, as the device reports it. Further ones wait in the send queue, up to its length.
pub const READS: u8 = 16;

/// Log texts of a cut: half of a WRITE or a READ has arrived, or nothing of another work request.
const IN_WRITE: &str = "cut by LOCALNIC in the middle of a WRITE";
const IN_READ: &str = "cut by LOCALNIC in the middle of a READ";
const AT_MESSAGE: &str = "cut by LOCALNIC at a message";

/// The byte that stands for the content of pages that are no longer the program's.
const OTHERS: u8 = 0xEE;

/// The other end: its process and its registrations.
#[derive(Debug)]
pub struct Far {
    /// The process.
    pub pid: i32,
    /// The registrations.
    pub table: Table,
}

/// The operation of a work request.
#[derive(Debug)]
enum Work {
    /// A message, with its bytes.
    Send(Vec<u8>),
    Write(Write, Option<u32>),
    Read(Read),
    Probe,
}

// SAFETY: the pointers refer to registered memory, which the device may access from any thread (`QueuePair::write`,
// `read`).
unsafe impl Send for Work {}

/// A work request that waits for the device.
#[derive(Debug)]
struct Job {
    due: Instant,
    work: Work,
    /// The value that its completion frees; `None` without a completion.
    frees: Option<u64>,
}

/// A queue pair; see the module.
pub struct Queue {
    settings: Settings,
    number: u32,
    pair: Pair,
    far: Far,
    domain: Arc<Domain>,
    channel: Arc<Hidden>,
    fate: Arc<Fate>,
    slots: Slots,
    registered: Lock<Vec<Registration>>,
    /// Work requests for the NIC's thread.
    jobs: Lock<VecDeque<Job>>,
    /// Whether the NIC has been notified of them.
    is_scheduled: AtomicBool,
    /// Held by the thread that executes work requests.
    running: Lock<Faults>,
    /// The value that the last completion frees.
    completed: Published<AtomicU64>,
    /// The last value of `completed` that `poll` has seen.
    seen: AtomicU64,
    /// The number of completed READs, and the last value of it that `poll` has seen.
    read: Published<AtomicU64>,
    read_seen: AtomicU64,
    /// Whether a probe was answered.
    probed: Published<AtomicU32>,
    /// Whether a probe is outstanding.
    is_probing: AtomicBool,
    /// Whether a thread is in `poll`.
    is_polling: AtomicBool,
}

impl Queue {
    /// Makes a queue pair over the memory of a pair, with a bound on the bytes in its send queue.
    pub fn new(
        settings: Settings,
        pair: Pair,
        far: Far,
        domain: Arc<Domain>,
        channel: Arc<Hidden>,
        fate: Arc<Fate>,
        most_bytes: u64,
    ) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let number = NUMBER.fetch_add(1, SeqCst);
        Self {
            settings,
            number,
            pair,
            far,
            domain,
            channel,
            fate,
            slots: Slots::new(SENDS, most_bytes),
            registered: Lock::new(Vec::new()),
            jobs: Lock::new(VecDeque::new()),
            is_scheduled: AtomicBool::new(false),
            running: Lock::new(Faults::new(&settings, u64::from(number))),
            completed: Published::default(),
            seen: AtomicU64::new(0),
            read: Published::default(),
            read_seen: AtomicU64::new(0),
            probed: Published::default(),
            is_probing: AtomicBool::new(false),
            is_polling: AtomicBool::new(false),
        }
    }

    /// Makes the queue pair end when the device disappears; ENODEV if the device is away.
    pub fn enter_device(self: &Arc<Self>) -> Result<()> {
        let weak = Arc::downgrade(self);
        nic::enter(&self.settings, self.number, weak)
    }

    /// Returns the bell, which is readable after a completion.
    pub fn bell(&self) -> &Arc<Hidden> {
        self.pair.bell()
    }

    /// Registers memory until it is deregistered, or the queue pair is closed.
    pub fn register(&self, start: u64, len: u64, role: Role) -> Result<Region> {
        // The program cannot change the mappings of rings, so these are not pinned.
        let is_pinned = role != Role::Both;
        let pages = match self.settings.has_pins && is_pinned {
            true => pins::pin(start, len).unwrap_or_else(|| {
                log(Level::Error, format_args!("localnic: pins needs CAP_SYS_ADMIN"));
                0
            }),
            false => 0,
        };
        let registration = self.domain.register(start, len, role, pages)?;
        let key = Key {
            local: registration.local_key(),
            remote: registration.remote_key(),
        };
        let handle = key.local.into();
        self.registered.lock().ok_or(Errno(libc::EDEADLK))?.push(registration);
        Ok(Region { key, handle })
    }

    /// Ends the registration. Waits for a peer that is accessing the memory.
    pub fn deregister(&self, handle: u64) {
        let given_up = self.registered.lock().and_then(|mut all| {
            let at = all.iter().position(|one| u64::from(one.local_key()) == handle)?;
            Some(all.swap_remove(at))
        });
        drop(given_up);
    }

    /// Posts a WRITE.
    ///
    /// # Safety
    /// The source is registered under its key, and stays unchanged until the peer has it.
    pub unsafe fn write(self: &Arc<Self>, write: &Write, immediate: Option<u32>) -> Result<()> {
        if write.len == 0 {
            return Err(Errno(libc::EINVAL));
        }
        if immediate.is_some() && self.settings.is_iwarp {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let work = || Work::Write(*write, immediate);
        self.post(write.len, work, |queue, faults| {
            queue.carry(
                faults,
                |queue| queue.place(write, immediate),
                |queue| queue.place_half(write),
            )
        })
    }

    /// Posts a READ.
    ///
    /// # Safety
    /// The target is registered under its key, and no code relies on its content before the READ has completed.
    pub unsafe fn read(self: &Arc<Self>, read: &Read) -> Result<()> {
        if read.len == 0 {
            return Err(Errno(libc::EINVAL));
        }
        let work = || Work::Read(*read);
        self.post(read.len, work, |queue, faults| queue.carry_read(faults, read))
    }

    /// Posts a message.
    pub fn send(self: &Arc<Self>, message: &[u8]) -> Result<()> {
        if message.len() > BUFFER_BYTES {
            return Err(Errno(libc::EMSGSIZE));
        }
        let work = || Work::Send(message.to_vec());
        self.post(message.len() as u32, work, |queue, faults| {
            queue.carry(faults, |queue| queue.pair.deliver(message), |_| AT_MESSAGE)
        })
    }

    /// Posts a probe.
    pub fn probe(self: &Arc<Self>) -> Result<()> {
        if self.fate.code() <= 0 {
            return Err(Errno(libc::ENOTCONN));
        }
        if self.is_probing.swap(true, SeqCst) {
            return Err(Errno(libc::EAGAIN));
        }
        if self.settings.has_thread {
            return self.leave(Work::Probe, None);
        }
        let mut faults = self.running.lock().ok_or(Errno(libc::EDEADLK))?;
        self.answer_probe(&mut faults)
    }

    /// Counts a work request of `len` bytes. Leaves it to the NIC's thread, or executes it in this thread.
    fn post(
        self: &Arc<Self>,
        len: u32,
        work: impl FnOnce() -> Work,
        carry: impl FnOnce(&Self, &mut Faults) -> Result<bool>,
    ) -> Result<()> {
        if self.fate.code() <= 0 {
            return Err(Errno(libc::ENOTCONN));
        }
        let turn = self.slots.turn(len).ok_or(Errno(libc::EAGAIN))?;
        let frees = turn.signal.then_some(turn.frees);
        if self.settings.has_thread {
            self.leave(work(), frees)?;
            self.slots.posted(turn);
            return Ok(());
        }
        let mut faults = self.running.lock().ok_or(Errno(libc::EDEADLK))?;
        // The request is counted before it is executed, so that no completion precedes the count.
        self.slots.posted(turn);
        if carry(self, &mut faults)? {
            self.complete(frees);
        }
        Ok(())
    }

    /// Leaves a work request to the NIC's thread.
    fn leave(self: &Arc<Self>, work: Work, frees: Option<u64>) -> Result<()> {
        let due = Instant::now() + Duration::from_micros(self.settings.delay_us);
        let job = Job { due, work, frees };
        self.jobs.lock().ok_or(Errno(libc::EDEADLK))?.push_back(job);
        if !self.is_scheduled.swap(true, SeqCst) {
            let me = Arc::clone(self);
            Nic::get()?.add(me);
        }
        Ok(())
    }

    /// Executes a work request with `whole`. If a cut is due it calls `half` instead, which does half of the work and
    /// returns the log text. Returns `false` for a request without effect and completion (silence).
    fn carry(
        &self,
        faults: &mut Faults,
        whole: impl FnOnce(&Self) -> Result<()>,
        half: impl FnOnce(&Self) -> &'static str,
    ) -> Result<bool> {
        if let Some(reason) = self.fate.over() {
            return Err(reason);
        }
        nic::count_request();
        contexts::fetch(&self.settings, self.number);
        match faults.next() {
            Some(Fault::Cut) => return Err(self.fail(half(self), libc::EIO)),
            Some(Fault::Silence) => self.pair.silence(),
            None => {}
        }
        if self.pair.is_silent() {
            return Ok(false);
        }
        if self.pair.is_over() {
            return Err(self.fail("the other end has ended it", libc::ECONNRESET));
        }
        match whole(self) {
            Ok(()) => Ok(true),
            Err(error) => Err(self.fail("a work request has failed", error.0)),
        }
    }

    fn answer_probe(&self, faults: &mut Faults) -> Result<()> {
        if self.carry(faults, |_| Ok(()), |_| AT_MESSAGE)? {
            self.is_probing.store(false, SeqCst);
            self.probed.publish(1);
            self.pair.fire_here();
        }
        Ok(())
    }

    fn carry_read(&self, faults: &mut Faults, read: &Read) -> Result<bool> {
        faults.on_read();
        let is_done = self.carry(
            faults,
            |queue| queue.fetch(read, read.len as usize),
            |queue| {
                let _ = queue.fetch(read, read.len as usize / 2);
                IN_READ
            },
        )?;
        if is_done {
            self.read.publish(self.read.load(Relaxed) + 1);
            self.pair.fire_here();
        }
        Ok(is_done)
    }

    fn complete(&self, frees: Option<u64>) {
        if let Some(frees) = frees {
            self.completed.publish(frees);
            self.pair.fire_here();
        }
    }

    fn place(&self, write: &Write, immediate: Option<u32>) -> Result<()> {
        self.copy(write, write.len as usize)?;
        match immediate {
            Some(immediate) => self.pair.deliver_immediate(immediate, write.len),
            None => Ok(()),
        }
    }

    fn place_half(&self, write: &Write) -> &'static str {
        let _ = self.copy(write, write.len as usize / 2);
        IN_WRITE
    }

    /// Copies the first `len` bytes of a WRITE to the peer. EACCES if a key does not permit it.
    fn copy(&self, write: &Write, len: usize) -> Result<()> {
        let bytes = u64::from(write.len);
        let from = self.domain.table().source(write.local, write.from.addr() as u64, bytes);
        let to = self.far.table.reach(write.remote, write.to, bytes);
        let (Some(from), Some(to)) = (from, to) else {
            return Err(Errno(libc::EACCES));
        };
        if !to.is_as_registered(Some(self.far.pid)) {
            // The write reaches pages that are mapped nowhere any more.
            return Ok(());
        }
        let others = (!from.is_as_registered(None)).then(|| vec![OTHERS; len]);
        let source = others.as_ref().map_or(write.from, |others| others.as_ptr());
        let mut done = 0;
        while done < len {
            let local = libc::iovec {
                iov_base: source.wrapping_add(done).cast_mut().cast(),
                iov_len: len - done,
            };
            let remote = libc::iovec {
                iov_base: std::ptr::without_provenance_mut((write.to as usize).wrapping_add(done)),
                iov_len: len - done,
            };
            // SAFETY: both ranges are registered for these lengths, and stay so while they are held.
            match unsafe { libc::process_vm_writev(self.far.pid, &local, 1, &remote, 1, 0) } {
                copied @ 1.. => done += copied as usize,
                _ => return Err(Errno::last()),
            }
        }
        Ok(())
    }

    /// Copies the first `len` bytes of a READ to this end. EACCES if a key does not permit it.
    fn fetch(&self, read: &Read, len: usize) -> Result<()> {
        let bytes = u64::from(read.len);
        let to = self.domain.table().sink(read.local, read.to.addr() as u64, bytes);
        let from = self.far.table.offered(read.remote, read.from, bytes);
        let (Some(to), Some(from)) = (to, from) else {
            return Err(Errno(libc::EACCES));
        };
        if !to.is_as_registered(None) {
            // The read fills pages that are mapped nowhere any more.
            return Ok(());
        }
        if !from.is_as_registered(Some(self.far.pid)) {
            // SAFETY: the range is registered for this length, and stays so while it is held.
            unsafe { read.to.write_bytes(OTHERS, len) };
            return Ok(());
        }
        let mut done = 0;
        while done < len {
            let local = libc::iovec {
                iov_base: read.to.wrapping_add(done).cast(),
                iov_len: len - done,
            };
            let remote = libc::iovec {
                iov_base: std::ptr::without_provenance_mut((read.from as usize).wrapping_add(done)),
                iov_len: len - done,
            };
            // SAFETY: both ranges are registered for these lengths, and stay so while they are held.
            match unsafe { libc::process_vm_readv(self.far.pid, &local, 1, &remote, 1, 0) } {
                copied @ 1.. => done += copied as usize,
                _ => return Err(Errno::last()),
            }
        }
        Ok(())
    }

    /// Ends the connection at both ends for this reason; returns the errno for the caller.
    pub fn fail(&self, why: &str, errno: i32) -> Errno {
        if self.fate.end(Errno(errno)) {
            log(
                Level::Debug,
                format_args!("localnic: queue pair {}: {why}", self.number),
            );
        }
        self.pair.end();
        let _ = rustix::net::shutdown(&*self.channel, Shutdown::Both);
        self.pair.fire_here();
        Errno(libc::ENOTCONN)
    }

    /// Asks for the completion fd to become readable at the next completion.
    pub fn arm(&self) -> Result<()> {
        match self.fate.over() {
            Some(reason) => Err(reason),
            None => {
                self.pair.arm();
                Ok(())
            }
        }
    }

    /// Hands over the completions and returns the number of events. Completions from before the end are handed over
    /// even after the end.
    pub fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize> {
        // The contract permits one caller at a time; a second caller finds no completion.
        if self.is_polling.swap(true, SeqCst) {
            return Ok(0);
        }
        let mut events = self.pair.take(|arrived| {
            each(match arrived {
                Arrived::Message(bytes) => Completed::Received(bytes),
                Arrived::Immediate { immediate, bytes } => Completed::Written { immediate, bytes },
            });
        });
        let completed = self.completed.look();
        if self.seen.swap(completed, Relaxed) != completed && self.slots.completed(completed) {
            each(Completed::Room);
            events += 1;
        }
        let read = self.read.look();
        for _ in self.read_seen.swap(read, Relaxed)..read {
            each(Completed::Read);
            events += 1;
        }
        if self.probed.look() != 0 {
            self.probed.take();
            each(Completed::Probed);
            events += 1;
        }
        self.is_polling.store(false, SeqCst);
        match (events, self.fate.over()) {
            (0, Some(reason)) => Err(reason),
            _ => Ok(events),
        }
    }

    /// Closes the queue pair. When this returns, no work request is executed any more, and no peer accesses the
    /// registered memory.
    pub fn close(&self) {
        self.fate.end(Errno(libc::ENOTCONN));
        self.pair.end();
        // Waits for the thread that executes a work request.
        drop(self.running.lock());
        if let Some(mut jobs) = self.jobs.lock() {
            jobs.clear();
        }
        let registered = self.registered.lock().map(|mut all| std::mem::take(&mut *all));
        drop(registered);
    }
}

impl Served for Queue {
    fn run(&self) -> Left {
        let Some(mut faults) = self.running.lock() else {
            return Left::Nothing;
        };
        loop {
            let job = {
                let Some(mut jobs) = self.jobs.lock() else {
                    return Left::Nothing;
                };
                match jobs.front() {
                    None => break,
                    Some(job) if job.due > Instant::now() => return Left::Until(job.due),
                    Some(_) => jobs.pop_front(),
                }
            };
            let Some(Job { work, frees, .. }) = job else { break };
            let is_done = match &work {
                Work::Send(bytes) => self.carry(&mut faults, |queue| queue.pair.deliver(bytes), |_| AT_MESSAGE),
                Work::Write(write, immediate) => self.carry(
                    &mut faults,
                    |queue| queue.place(write, *immediate),
                    |queue| queue.place_half(write),
                ),
                Work::Read(read) => self.carry_read(&mut faults, read),
                Work::Probe => self.answer_probe(&mut faults).map(|()| false),
            };
            if is_done == Ok(true) {
                self.complete(frees);
            }
        }
        drop(faults);
        // A poster first leaves its job, then checks whether the NIC is notified.
        self.is_scheduled.store(false, SeqCst);
        let is_left = self.jobs.lock().is_some_and(|jobs| !jobs.is_empty());
        match is_left && !self.is_scheduled.swap(true, SeqCst) {
            true => Left::Until(Instant::now()),
            false => Left::Nothing,
        }
    }

    fn lose_device(&self) {
        self.fail("the device is gone", libc::ENODEV);
    }
}
