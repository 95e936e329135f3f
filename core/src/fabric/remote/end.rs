//! An end of a link between hosts: its calls, and which thread does the work. The engine does the work itself
//! (`engine.rs`): it carries the changes of this end's arena, and of the mirror of the peer's, over the queue pair.
//! `bulk.rs` has the calls for transfers that bypass the rings. A *head* is the position up to which a reader has
//! consumed a direction. A *cursor* is the producer or the consumer of a stream. Waiter 0 is the service thread's.
//!
//! # Threads
//! Any thread may make any call. One lock guards the engine; it is held for posting and polling, and for nothing that
//! waits. If another thread holds the lock, [`notify`](LinkEnd::notify), [`progress`](End::progress) and
//! [`arm`](End::arm) leave their work to that thread ([`Handoff`]). A signal handler that has interrupted the holder
//! does the same. The holder rings doorbells and registers memory after it has released the lock.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::fabric::layout::Region;
use crate::fabric::ready::{PrivateQueue, ReadyQueue};
use crate::fabric::remote::engine::{ARM, Engine, POLL, PUMP, SETTLE, TICK};
use crate::fabric::remote::lend::Buffers;
use crate::fabric::remote::qp::QueuePair;
use crate::fabric::remote::shared::{After, MAX_QUEUED_MESSAGES, QueuedMessage, Registry, Shared, Which, of_region};
use crate::fabric::remote::stream::{State, Stream};
use crate::fabric::remote::{
    Counts, ENGINE, Fault, FaultCell, Local, MIN_BUFFER, MIN_BUFFERS, SERVICE, Tuning, Unusable,
};
use crate::fabric::ring::{Consumer, Producer, Wake};
use crate::fabric::side::{Done, Numbers, Side, done};
use crate::fabric::waiter::{MAX_WAITERS, WaiterId};
use crate::fabric::{LinkEnd, OpenError, Opened, SendError};
use crate::ids::Vqpn;
use crate::lock::{Guard, Lock};
use crate::os::thread;
use crate::scratch;
use crate::sparse::Sparse;
use crate::sync::{AtomicBool, AtomicU64, Handoff, Presence, Published, Request, RungMark};
use crate::wire::{MAX_MESSAGE, Message};

/// An end of a link between hosts.
///
/// # Duties of the owner beside [`LinkEnd`]
/// - Call [`pair`](LinkEnd::pair) before a cursor of the stream is used, in a thread that is not in a signal handler.
/// - Pass *every* [`Wake`] that a cursor returns to [`notify`](LinkEnd::notify), also the one of [`Producer::end`] for
///   FIN. Call [`touch`](Self::touch) after changes that have to be carried over although they return no such wake:
///   [`Producer::adopt`], [`Consumer::stop`].
/// - Call [`progress`](Self::progress) while waiting, and when the queue pair's completion fd is readable. Before a
///   sleep call [`arm`](Self::arm), then check once more.
/// - When waiter 0 is woken, call [`take_message`](Self::take_message) until it returns `None`, and
///   [`fault`](Self::fault).
/// - Some ms after [`Local::settle_later`], call [`settle`](Self::settle), and again as long as the end
///   [owes](Self::owes) heads.
/// - While [`is_watched`](Self::is_watched) returns true, call [`tick`](Self::tick) about once a second. Waiter 0 is
///   woken when the watch begins.
///
/// # When the link is down
/// Every call stays harmless, and so do cursors: producers and consumers fill and drain their rings. The engine applies
/// no record of the peer any more, so [`received`](Self::received) is final, and the peer has to send again from that
/// position. This end sends again from the position that the peer has [received](Producer::rest).
///
/// # When both ends end a direction
/// On shm one word decides whether a producer has ended a direction or its consumer has stopped it. Between hosts both
/// can succeed, each at its own end, if END and STOP cross on their way. Both marks then stay. The producer's end may
/// have sent later bytes over TCP by then, so it cannot send the unread bytes there in their order. So an end resets
/// the connection if it gets a DEMOTE-REQUEST with a position for a stream whose producer [is
/// ended](Producer::is_ended).
pub struct End<Q, L> {
    pub(super) shared: Shared<Q, L>,
    pub(super) engine: Lock<Engine<Q>>,
    /// Work that is left to the holder of the lock, as bits such as [`PUMP`], [`POLL`] and [`SETTLE`].
    again: Handoff,
    /// The number of polls that threads left out because another thread held the engine.
    looks_saved: AtomicU64,
    fault: FaultCell,
    fault_unseen: Published<AtomicBool>,
    numbers: Numbers,
    registries: [Registry; 2],
    /// Counts threads that use the queue pair, streams or memory of the link without the engine's lock.
    pub(super) users: Presence,
}

impl<Q: QueuePair, L: Local> End<Q, L> {
    /// Returns an end with no stream open, over a queue pair that is connected and has not been used. The end receives
    /// in `mine`. `mirror` has the layout of the peer's arena, followed by room for [buffers](Tuning::buffers). Both
    /// are zeroed memory of this process alone ([`Mapping::anonymous`](crate::os::memfd::Mapping::anonymous)). Fails
    /// with [`Unusable`] if the queue pair's receive buffers are too few or too small.
    ///
    /// # Safety
    /// The end must live longer than every cursor that it has returned. [`producer`](LinkEnd::producer) must be called
    /// at most once for each stream.
    pub unsafe fn new(qp: Q, mine: Side, mirror: Side, local: L, tuning: Tuning) -> Result<Self, Unusable> {
        let limits = qp.limits();
        if limits.buffer_bytes < MIN_BUFFER || limits.receive_buffers < MIN_BUFFERS {
            return Err(Unusable);
        }
        let numbers = Numbers::new(mine.data_len() as u64);
        let buffers = mirror.data_len().min(tuning.buffers as usize);
        let peers_len = mirror.data_len() - buffers;
        Ok(Self {
            engine: Lock::new(Engine::new(&limits)),
            shared: Shared {
                qp,
                limits,
                mine,
                mirror,
                peers_len,
                buffers: Buffers::new(peers_len, buffers),
                local,
                tuning,
                dirty: PrivateQueue::default(),
                tells: Sparse::new(),
                outbox: Lock::new(VecDeque::new()),
                news: Published::default(),
                owes: Request::default(),
                is_watched: Published::default(),
                watch_unseen: Published::default(),
                marks: (0..MAX_WAITERS).map(|_| RungMark::default()).collect(),
                retired_unseen: Published::default(),
            },
            again: Handoff::default(),
            looks_saved: AtomicU64::new(0),
            fault: FaultCell::default(),
            fault_unseen: Published::default(),
            numbers,
            registries: Default::default(),
            users: Presence::default(),
        })
    }

    /// Becomes the end of another link, with no stream open. `put` replaces the queue pair by a new one, which has to
    /// meet the conditions of [`new`](Self::new). The end was [released](Self::release), and both of its sides have
    /// data areas again. Returns false if threads still use the end; then `put` is not called.
    pub fn renew(&self, put: impl FnOnce(&Q)) -> bool {
        let Some(mut engine) = self.engine.lock().filter(|_| self.users.is_empty()) else {
            return false;
        };
        // Drops what late threads have left in the engine since the release.
        *engine = Engine::new(&self.shared.limits);
        self.shared.reset();
        self.again.take();
        self.looks_saved.store(0, Relaxed);
        self.numbers.reset(self.shared.mine.data_len() as u64);
        self.registries.iter().for_each(Registry::reset);
        self.fault_unseen.publish(false);
        put(&self.shared.qp);
        // The fault is cleared last, and under the lock: a turn that met a fault of the old link has stored it under
        // the lock too, and so before that.
        self.fault.clear();
        true
    }

    /// Returns the two arenas: this end's, and the mirror of the peer's.
    pub fn sides(&self) -> [&Side; 2] {
        [&self.shared.mine, &self.shared.mirror]
    }

    /// Returns the queue pair.
    pub fn qp(&self) -> &Q {
        &self.shared.qp
    }

    /// Returns the functions by which the end reaches the waiters of this process.
    pub fn local(&self) -> &L {
        &self.shared.local
    }

    /// Returns a bound: every number that this end has given to a stream of the present link is below it.
    pub fn numbers(&self) -> u32 {
        self.numbers.ever_given()
    }

    /// Polls the queue pair, applies the peer's records, wakes the waiters of this process, and sends what can be sent.
    /// Returns true if there was a completion. Returns false at once if another thread holds the engine.
    #[inline]
    pub fn progress(&self) -> Result<bool, Fault> {
        if let Some(fault) = self.fault.get() {
            return Err(fault);
        }
        let Some(engine) = self.engine.try_lock() else {
            self.looks_saved.fetch_add(1, Relaxed);
            return Ok(false);
        };
        let came = self.turn(engine, POLL)?;
        Ok(came | self.again()?)
    }

    /// Arms the queue pair before a sleep: the next completion makes its fd readable. Then polls once more, as
    /// [`progress`](Self::progress) does. If another thread holds the engine, that thread polls instead. The caller
    /// checks its own reasons not to sleep after this.
    pub fn arm(&self) -> Result<bool, Fault> {
        // Begins a section: a jump out of a signal handler waits until this thread is counted out.
        let thread = thread::current();
        thread.begin();
        // The thread is counted in before it checks for a fault: either `take_pair` sees this thread, or this thread
        // sees the fault.
        self.users.enter();
        let armed = match self.fault.get() {
            Some(fault) => Err(fault),
            None => self.shared.qp.arm().map_err(Fault::from),
        };
        self.users.leave();
        thread.end();
        if let Err(fault) = armed {
            self.fail(fault);
            return Err(fault);
        }
        self.shared.local.armed().store(true, Release);
        self.run(ARM | POLL)
    }

    /// Returns whether no thread has found a completion since the queue pair was armed. Then the fd becomes readable
    /// with the next completion, and a thread that is about to sleep on it need neither poll nor arm. (A thread that
    /// arms takes the event, asks for the next one, and then polls. So once a queue pair was armed, it is armed, or its
    /// fd is readable, or the thread that took the event is about to poll. At worst a sleep ends at once.)
    pub fn is_armed(&self) -> bool {
        self.shared.local.armed().load(Acquire)
    }

    /// Records that the fd was found readable. The fd stays readable until the queue pair is armed again.
    pub fn on_readable(&self) {
        self.shared.local.armed().store(false, Relaxed);
    }

    /// Sends the heads that were held back, and that have not moved since the last call. Until its head is sent, the
    /// peer counts an idle direction's last bytes as unread. These bytes are less than a quarter of a ring, and no
    /// thread waits for their head. The caller repeats the call while the end still [owes](Self::owes) heads.
    pub fn settle(&self) {
        if self.shared.owes.begin() {
            let _ = self.run(SETTLE | PUMP);
        }
    }

    /// Returns whether there are heads for [`settle`](Self::settle) to send. Some of them may not be due yet.
    pub fn owes(&self) -> bool {
        self.shared.owes.is_asked()
    }

    /// Returns whether the watch on the peer's device is on: a work request was posted that is not proven to have
    /// arrived. The thread of waiter 0 calls this. After the call, waiter 0 is woken only for a watch that begins
    /// later.
    pub fn is_watched(&self) -> bool {
        if self.shared.watch_unseen.load(Relaxed) {
            self.shared.watch_unseen.publish(false);
        }
        // Read after the store above, so that a watch that begins at this moment wakes waiter 0 again.
        self.shared.is_watched.look()
    }

    /// Makes the engine probe the peer's device even if no work request is posted, since the caller doubts that the
    /// link works.
    pub fn doubt(&self) {
        self.with(|engine| engine.means.sender.counts.doubts += 1);
        let _ = self.run(PUMP);
    }

    /// Checks whether the peer's device still answers. The link goes down with [`Fault::Silent`] if the device has not
    /// answered for `SILENCE` ns (`watch.rs`). `now` is the time in ns, of a clock that does not go back.
    pub fn tick(&self, now: u64) {
        // If the caller is a signal handler that has interrupted the engine, the next tick does the work.
        let Some(mut engine) = self.engine.lock() else {
            return;
        };
        engine.now = now;
        let _ = self.turn(engine, POLL | TICK);
        let _ = self.again();
    }

    /// Carries over the changes of the stream that the peer calls `theirs`, in either direction, for which there was no
    /// [`Wake`]: changes by [`Producer::adopt`] and [`Consumer::stop`].
    pub fn touch(&self, theirs: Vqpn) {
        self.shared.dirty.push(theirs.0);
        let _ = self.run(PUMP);
    }

    /// Returns the peer's next message; `None` if there is none. Waiter 0 is woken when a message comes.
    pub fn take_message(&self) -> Option<Message> {
        if self.shared.news.look() == 0 {
            return None;
        }
        self.with(|engine| {
            let message = engine.inbox.pop_front()?;
            self.shared.news.take_one();
            Some(message)
        })?
    }

    /// Returns how many bytes committed to the peer's stream `theirs` are not known to be in the peer's ring; the end
    /// mark counts as one more. If the number is not 0 the engine asks the peer. When the peer answers, waiter 0 is
    /// woken, with the stream in its ready queue. Also returns 0 if the peer has closed the stream, or if the stream is
    /// not paired. `None` if the link is down, and in a signal handler that has interrupted the engine.
    pub fn unconfirmed(&self, theirs: Vqpn) -> Option<u64> {
        if self.fault.get().is_some() {
            return None;
        }
        let (bytes, ask) = self.with(|engine| engine.unconfirmed(&self.shared, theirs.0))?;
        if ask {
            self.touch(theirs);
        }
        Some(bytes)
    }

    /// Returns how many bytes committed to the peer's stream `theirs` have not been sent, because the peer's ring or
    /// the queue pair has no room. Returns 0 in a signal handler that has interrupted the engine.
    pub fn unsent(&self, theirs: Vqpn) -> u64 {
        let unsent = self.of_peer(theirs, |s| {
            let tail = self.shared.block_mirror(theirs.0)?.tail();
            Some(tail.saturating_sub(s.out.told))
        });
        unsent.flatten().unwrap_or(0)
    }

    /// Returns the position up to which the bytes of stream `mine` have arrived. The position is final once the link is
    /// down. `None` if the stream is not open, and in a signal handler that has interrupted the engine.
    pub fn received(&self, mine: Vqpn) -> Option<u64> {
        self.of_mine(mine, |s| (s.state != State::Free).then_some(s.inc.tail))?
    }

    /// Returns the position up to which the peer is known to have the bytes of its stream `theirs`. The peer itself may
    /// know of more. `None` if the stream is not paired, and in a signal handler that has interrupted the engine.
    pub fn confirmed(&self, theirs: Vqpn) -> Option<u64> {
        // An ACK counts the end mark as a byte, which is left out here.
        self.of_peer(theirs, |s| s.out.acked.max(s.out.head).min(s.out.told))
    }

    /// Returns whether the link is down.
    pub fn is_down(&self) -> bool {
        self.fault.get().is_some()
    }

    /// Returns why the link is down; `None` if it is up. The thread of waiter 0 calls this, and is not woken for the
    /// fault again.
    pub fn fault(&self) -> Option<Fault> {
        let fault = self.fault.get();
        if fault.is_some() {
            self.fault_unseen.publish(false);
            // A link that is down needs no watch.
            self.shared.watch_unseen.publish(false);
        }
        fault
    }

    /// Processes all completions that have come. Waits for a thread that holds the engine.
    pub fn take_in(&self) {
        if let Some(engine) = self.engine.lock() {
            // A fault is stored, and the caller's next call returns it.
            let _ = self.turn(engine, POLL | PUMP);
        }
    }

    /// Takes the link down. After this returns, no record is sent or applied any more. There is one exception: if a
    /// signal handler makes the call, the thread that it has interrupted may finish its turn. The caller ends the queue
    /// pair. Returns true if the link was up.
    pub fn set_down(&self) -> bool {
        let first = self.fault.set(Fault::Closed);
        // A thread that holds the engine has checked for a fault before this one was set. It may finish its turn.
        drop(self.engine.lock());
        first
    }

    /// Takes the link down, and calls `take` with its queue pair, to end the queue pair. No thread of this process uses
    /// it at that moment or later. Returns `None`, without the call, if a thread still uses the queue pair.
    pub fn take_pair<T>(&self, take: impl FnOnce(&Q) -> T) -> Option<T> {
        self.set_down();
        let _engine = self.engine.lock()?;
        self.users.is_empty().then(|| take(&self.shared.qp))
    }

    /// Releases the memory of a link that is down. Memory that threads access without a cursor stays readable and
    /// writable, so that an access by a late thread does no harm. If a thread still uses the data areas, returns false
    /// and does nothing.
    ///
    /// # Safety
    /// No cursor is left, and the queue pairs have been ended.
    pub unsafe fn release(&self) -> bool {
        self.set_down();
        let Some(mut engine) = self.engine.lock().filter(|_| self.users.is_empty()) else {
            return false;
        };
        let old = std::mem::replace(&mut *engine, Engine::new(&self.shared.limits));
        // This is done under the lock, so the next holder finds the fault, or an engine without streams.
        // SAFETY: by the contract. Every other user of the data areas holds the lock, or is counted in `users`.
        self.sides().into_iter().for_each(|side| unsafe { side.release() });
        drop(engine);
        drop(old);
        true
    }

    /// Returns the counts so far. They are 0 in a signal handler that has interrupted the engine.
    pub fn counts(&self) -> Counts {
        let counts = self.with(|engine| engine.means.sender.counts).unwrap_or_default();
        Counts {
            looks: counts.looks + self.looks_saved.load(Relaxed),
            ..counts
        }
    }

    /// Does the work `what`, or leaves it to the holder of the lock.
    pub(super) fn run(&self, what: u32) -> Result<bool, Fault> {
        self.again.add(what);
        self.again()
    }

    /// Does the work that was left by other threads. Returns true if there was a completion.
    pub(super) fn again(&self) -> Result<bool, Fault> {
        let mut came = false;
        loop {
            if self.again.is_empty() {
                return Ok(came);
            }
            let Some(engine) = self.engine.try_lock() else {
                return Ok(came);
            };
            came |= self.turn(engine, 0)?;
        }
    }

    /// Takes a turn of the engine, and releases the lock.
    fn turn(&self, mut engine: Guard<'_, Engine<Q>>, what: u32) -> Result<bool, Fault> {
        let what = what | self.again.take();
        let result = match self.fault.get() {
            Some(fault) => Err(fault),
            None => engine.run(&self.shared, what),
        };
        if let Err(fault) = result {
            // The fault is set before the lock is released, so that no further record is applied.
            self.fail(fault);
        }
        self.let_go_of(engine);
        result
    }

    /// Calls `f` with the engine. `None` in a signal handler that has interrupted this thread's use of the engine.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Engine<Q>) -> T) -> Option<T> {
        let mut engine = self.engine.lock()?;
        let value = f(&mut engine);
        self.let_go_of(engine);
        // Other threads may have left work to this thread.
        let _ = self.again();
        Some(value)
    }

    /// Calls `f` with this end's stream `mine`. `None` if its number was never in use, and in a signal handler that has
    /// interrupted the engine.
    pub(super) fn of_mine<T>(&self, mine: Vqpn, f: impl FnOnce(&mut Stream) -> T) -> Option<T> {
        self.with(|engine| engine.streams.get(mine.0).map(f))?
    }

    /// Calls `f` with the stream that the peer calls `theirs`. `None` if this end knows no stream of that number, and
    /// in a signal handler that has interrupted the engine.
    pub(super) fn of_peer<T>(&self, theirs: Vqpn, f: impl FnOnce(&mut Stream) -> T) -> Option<T> {
        self.with(|engine| engine.streams.of_peer(theirs.0).map(|(_, s)| f(s)))?
    }

    /// Releases the lock, and does the work that must not be done under it.
    fn let_go_of(&self, mut engine: Guard<'_, Engine<Q>>) {
        let after = std::mem::take(&mut engine.means.after);
        let is_of_link = after.is_of_link();
        if is_of_link {
            self.users.enter();
        }
        // Keeps the section open: a jump out of a signal handler waits until this thread is counted out.
        let _section = engine.unlock();
        self.finish(after);
        if is_of_link {
            self.users.leave();
        }
    }

    fn finish(&self, after: After) {
        after.rings().for_each(|w| self.shared.local.ring(w));
        for mine in after.closed {
            self.mark_done(mine, done::LOCAL);
        }
        after.done.into_iter().for_each(|done| self.free_number(done));
        if let Some(chunk) = after.register {
            let keys = self.register(Which::Mirror, chunk..=chunk);
            if keys > 0 {
                let _ = self.run(PUMP);
            }
        }
    }

    fn register(&self, which: Which, chunks: RangeInclusive<u32>) -> usize {
        let (side, registry) = match which {
            Which::Mine => (&self.shared.mine, &self.registries[0]),
            Which::Mirror => (&self.shared.mirror, &self.registries[1]),
        };
        let log2 = self.shared.tuning.chunk_log2;
        let keys = registry.register(&self.shared.qp, side, log2, chunks);
        if !keys.is_empty() {
            self.with(|engine| engine.on_registered(&self.shared, which, &keys));
        }
        keys.len()
    }

    #[cold]
    fn fail(&self, fault: Fault) {
        if self.fault.set(fault) {
            self.fault_unseen.publish(true);
            self.shared.local.ring(SERVICE);
        }
    }

    /// Holds the rings of stream `mine`, which this end has not closed. The rings are kept until `let_go` is called,
    /// once.
    pub fn hold(&self, mine: Vqpn) {
        self.numbers.hold(mine);
    }

    /// Ends a [`hold`](Self::hold), and frees the rings if both ends have finished with the stream.
    pub fn let_go(&self, mine: Vqpn) {
        self.mark_done(mine, done::USERS);
    }

    fn mark_done(&self, mine: Vqpn, bits: u8) {
        if let Some(done) = self.numbers.mark(mine, bits) {
            // In a signal handler that has interrupted the engine, the number stays taken.
            self.with(|engine| engine.forget_when_quiet(&self.shared, done));
        }
    }

    /// Frees a number that the engine has forgotten.
    fn free_number(&self, Done { number, regions }: Done) {
        // The kernel does not get the memory back, since the device keeps the pages.
        regions.into_iter().for_each(|r| self.numbers.free(r));
        self.numbers.give_back(number);
    }

    #[cold]
    fn tell(&self, wake: Wake, theirs: Vqpn) {
        if self.shared.add_tell(theirs.0, wake.0) {
            self.touch(theirs);
        }
    }
}

impl<Q: QueuePair, L: Local> LinkEnd for End<Q, L> {
    fn open(&self, log2: u8) -> Result<Opened, OpenError> {
        let (vqpn, region) = self.numbers.take(log2)?;
        let undo = |error| {
            self.numbers.free(region);
            self.numbers.give_back(vqpn);
            error
        };
        // SAFETY: the number is free, and the engine has forgotten it. The end outlives the consumer (`new`). `pair`
        // carries the offer over.
        let opened = unsafe { self.shared.mine.open(vqpn, region) }.map_err(undo)?;
        self.register(Which::Mine, of_region(region, self.shared.tuning.chunk_log2));
        self.with(|engine| engine.open(vqpn.0))
            .ok_or_else(|| undo(OpenError::Busy))?;
        Ok(opened)
    }

    fn pair(&self, mine: Vqpn, theirs: Vqpn, first: Region) {
        self.with(|engine| engine.pair(&self.shared, mine.0, theirs.0, first));
        self.touch(theirs);
    }

    fn producer(&self, theirs: Vqpn) -> Option<Producer> {
        let block = self.shared.mirror.block(theirs)?;
        // SAFETY: the block is within the mapping. This is its only producer, and the end outlives it (`new`).
        Some(unsafe { Producer::new(block, self.shared.mirror.area()) })
    }

    fn lend(&self, theirs: Vqpn, producer: &mut Producer, log2: u8) -> bool {
        let lent = self.with(|engine| engine.lend(&self.shared, theirs.0, producer, log2));
        lent.unwrap_or(false)
    }

    fn take_back(&self, theirs: Vqpn, producer: &mut Producer) -> bool {
        let taken = self.with(|engine| engine.take_back(&self.shared, theirs.0, producer));
        taken.unwrap_or(false)
    }

    /// CLOSED follows the bytes still to be carried over. If the direction has an end mark these are all bytes before
    /// the mark, otherwise only those for which the peer's ring has room. This end has finished with the number when
    /// CLOSED is sent. If the queue pair is full, a later call of [`progress`](Self::progress) sends it. CLOSED may not
    /// have arrived when the process ends. A caller that needs it to arrive first calls
    /// [`unconfirmed`](Self::unconfirmed) until that returns 0.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>) {
        self.numbers.keep(mine, consumer);
        let Some(yours) = theirs else {
            return self.mark_done(mine, done::BOTH);
        };
        // In a signal handler that has interrupted the engine, the number stays taken.
        let is_left_to_it = self.with(|engine| engine.close(mine.0, yours.0));
        // If the stream was never paired, there are no bytes to be carried over.
        if is_left_to_it == Some(false) && self.send(&Message::Closed { yours }).is_ok() {
            self.mark_done(mine, done::LOCAL);
        }
        self.touch(yours);
    }

    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.numbers.keep(mine, consumer);
        self.mark_done(mine, done::LOCAL);
    }

    fn on_closed(&self, mine: Vqpn) {
        self.mark_done(mine, done::PEER);
    }

    fn allocate(&self, log2: u8) -> Option<Region> {
        let region = self.numbers.allocate(log2)?;
        self.register(Which::Mine, of_region(region, self.shared.tuning.chunk_log2));
        Some(region)
    }

    fn free(&self, region: Region) {
        self.numbers.free(region);
    }

    /// Sends a message, behind the state of its stream that the peer needs first: heads, offers, flags, a stop. Fails
    /// for messages with fds. For a paired stream [`close`](Self::close) sends CLOSED, in place of this call.
    fn send(&self, message: &Message) -> Result<(), SendError> {
        if self.fault.get().is_some() {
            return Err(SendError::Down);
        }
        if message.fds() != 0 {
            return Err(SendError::Encoding);
        }
        // The buffer is not on the stack, which may be a signal handler's and small.
        let mut buf = scratch::zeroed(MAX_MESSAGE).ok_or(SendError::Full)?;
        let bytes = message.encode(&mut buf).map_err(|_| SendError::Encoding)?;
        let message = QueuedMessage {
            yours: message.yours(),
            bytes: bytes.into(),
        };
        {
            let mut outbox = self.shared.outbox.lock().ok_or(SendError::Full)?;
            if outbox.len() >= MAX_QUEUED_MESSAGES {
                return Err(SendError::Full);
            }
            outbox.push_back(message);
        }
        // A fault that occurs here, perhaps after the message was posted, does not prove that the message was not sent:
        // the peer may act on it. The thread that finds the link down handles that.
        let _ = self.run(PUMP);
        Ok(())
    }

    /// If `wake` is [`ENGINE`], carries over the changes of the stream. Any other wake goes to the peer, and wakes
    /// there the waiters that it names.
    #[inline]
    fn notify(&self, wake: Wake, theirs: Vqpn) {
        if wake.0 == ENGINE.0 {
            self.touch(theirs);
        } else if !wake.is_none() {
            self.tell(wake, theirs);
        }
    }

    fn drain_ready(&self, waiter: WaiterId, each: impl FnMut(Vqpn)) {
        self.shared.mine.drain(waiter, each);
    }

    fn queued_at(&self, mine: Vqpn) -> u64 {
        self.shared.mine.told_at(mine)
    }

    /// For waiter 0 also returns true if there is a message. The same holds for a fault, a new watch or a given-up bulk
    /// queue pair until the service thread calls `fault`, `is_watched` or `end_retired`.
    fn has_ready(&self, waiter: WaiterId) -> bool {
        self.shared.mine.has_ready(waiter)
            || waiter == SERVICE
                && (self.shared.news.look() > 0
                    || self.fault_unseen.look()
                    || self.shared.watch_unseen.look()
                    || self.shared.retired_unseen.look())
    }
}
