//! One end of a link between hosts: the calls, and which thread does the work. What the work is, is the
//! engine's business (`engine.rs`, `turn.rs`). The calls about what goes past the rings are in `past.rs`.
//!
//! # Threads
//! Any thread may make any call. One lock guards the engine; it is held for posting and polling, and for nothing that
//! waits. [`notify`](LinkEnd::notify), [`progress`](End::progress) and [`arm`](End::arm) leave their work to whoever
//! holds it ([`Handoff`]). A signal handler that has interrupted the holder leaves its work in the same way. Doorbells
//! are rung, and memory is registered, when the lock has been let go of.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::buffers::Buffers;
use super::chunks::{Registry, of_region};
use super::counts::Counts;
use super::engine::Engine;
use super::fault::{Fault, FaultCell};
use super::local::{ENGINE, Local, SERVICE};
use super::qp::QueuePair;
use super::shared::{After, MAX_QUEUED_MESSAGES, QueuedMessage, Shared, Which};
use super::tuning::{MIN_BUFFER, MIN_BUFFERS, Tuning, Unusable};
use super::turn::{ARM, POLL, PUMP, SETTLE, TICK};
use crate::fabric::layout::Region;
use crate::fabric::link::{LinkEnd, OpenError, Opened, SendError};
use crate::fabric::numbers::{Done, Numbers, done};
use crate::fabric::ready::{PrivateQueue, ReadyQueue};
use crate::fabric::ring::{Consumer, Producer, Wake};
use crate::fabric::side::{Side, Sweeps};
use crate::fabric::waiter::{MAX_WAITERS, WaiterId};
use crate::ids::Vqpn;
use crate::lock::{Guard, Lock};
use crate::scratch::Scratch;
use crate::sparse::Sparse;
use crate::sync::{AtomicBool, AtomicU64, Handoff, Presence, Published, Request, RungMark};
use crate::wire::{MAX_MESSAGE, Message, RingOffer};

/// One end of a link between hosts.
///
/// # What whoever holds it has to do beside [`LinkEnd`]
/// - [`pair`](LinkEnd::pair) before a cursor of the stream is used; by a thread that is not in a
///   signal handler.
/// - Hand *every* [`Wake`] that a cursor gives to [`notify`](LinkEnd::notify), also that of
///   [`Producer::end`] for FIN. After what gives none but has to be carried over,
///   [`touch`](Self::touch): [`Producer::adopt`], [`Consumer::stop`].
/// - Call [`progress`](Self::progress) while waiting, and when the queue pair's completion fd is readable;
///   before a sleep [`arm`](Self::arm), then look once more.
/// - When waiter 0 is told: [`take_message`](Self::take_message) until there is none, and
///   [`fault`](Self::fault).
/// - Some ms after [`Local::settle_later`], call [`settle`](Self::settle), and again as long as it [owes](Self::owes).
/// - While [`is_watched`](Self::is_watched), call [`tick`](Self::tick) about once a second. Waiter 0 is told when
///   that begins.
///
/// # When the link is down
/// Every call stays harmless, cursors too: producers fill their rings and consumers drain theirs.
/// Nothing that comes from the peer is applied any more, so [`received`](Self::received) is final, and
/// what the peer has to send again begins there; this end sends again from what the peer
/// [received](Producer::rest).
///
/// # Both end a direction
/// On shm one word decides whether a producer has ended a direction or its consumer has stopped it. Here
/// both can win, each at its own end, with END and STOP crossing on their way. Both marks then stay, and
/// [`has_crossed`](Self::has_crossed) holds at either end as soon as it knows. The producer's end may have gone on
/// with TCP, so what was not read cannot be sent in its place: who gets the DEMOTE-REQUEST with a resumption for
/// a stream that has crossed, or whose producer [is ended](Producer::is_ended), resets the connection.
pub struct End<Q, L> {
    pub(super) shared: Shared<Q, L>,
    pub(super) engine: Lock<Engine<Q>>,
    /// What is left to whoever holds the lock: [`PUMP`], [`POLL`], [`SETTLE`].
    again: Handoff,
    /// Looks that were not made because another thread was at it.
    looks_saved: AtomicU64,
    fault: FaultCell,
    fault_unseen: Published<AtomicBool>,
    sweeps: Sweeps,
    numbers: Numbers,
    registries: [Registry; 2],
    /// Threads that have let go of the engine's lock and still do what they found under it.
    pub(super) finishing: Presence,
}

impl<Q: QueuePair, L: Local> End<Q, L> {
    /// An end with nothing open over a queue pair that is connected and has not been used. We receive in `mine`;
    /// `mirror` has the layout of the peer's arena, and behind that room for [buffers](Tuning::buffers). Both are
    /// zeroed memory of this process alone ([`Mapping::anonymous`](crate::os::memfd::Mapping::anonymous)).
    ///
    /// # Safety
    /// The end must live longer than every cursor that it gives out. [`producer`](LinkEnd::producer)
    /// must be asked at most once for each stream.
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
                closing: PrivateQueue::default(),
                tells: Sparse::new(),
                outbox: Lock::new(VecDeque::new()),
                news: Published::default(),
                owes: Request::new(),
                is_watched: Published::default(),
                watch_unseen: Published::default(),
                marks: (0..MAX_WAITERS).map(|_| RungMark::new()).collect(),
                retired: Lock::new(Vec::new()),
                retired_unseen: Published::default(),
            },
            again: Handoff::new(),
            looks_saved: AtomicU64::new(0),
            fault: FaultCell::default(),
            fault_unseen: Published::default(),
            sweeps: Sweeps::new(),
            numbers,
            registries: [Registry::new(), Registry::new()],
            finishing: Presence::new(),
        })
    }

    /// Becomes the end of another link, with nothing open, over a queue pair that is as the one that
    /// [`new`](Self::new) was given, and that `put` puts in that one's place. The end was [released](Self::release),
    /// and both of its sides have data areas again. False if threads are about to leave it; then `put` is not called.
    pub fn renew(&self, put: impl FnOnce(&Q)) -> bool {
        let Some(mut engine) = self.engine.lock() else {
            return false;
        };
        if !self.finishing.is_empty() {
            return false;
        }
        // What threads that are late have left here meanwhile.
        *engine = Engine::new(&self.shared.limits);
        self.shared.reset();
        self.again.take();
        self.looks_saved.store(0, Relaxed);
        self.sweeps.reset();
        self.numbers.reset(self.shared.mine.data_len() as u64);
        self.registries.iter().for_each(Registry::reset);
        self.fault_unseen.publish(false);
        put(&self.shared.qp);
        // Last, and under the lock: whoever has met the fault has set it by then, and not after.
        self.fault.clear();
        true
    }

    /// The two arenas: of this end, and the peer's as seen from here.
    pub fn sides(&self) -> [&Side; 2] {
        [&self.shared.mine, &self.shared.mirror]
    }

    /// The queue pair.
    pub fn qp(&self) -> &Q {
        &self.shared.qp
    }

    /// How it reaches our waiters.
    pub fn local(&self) -> &L {
        &self.shared.local
    }

    /// Every number that was ever given to a stream of ours is below this.
    pub fn numbers(&self) -> u32 {
        self.numbers.ever_given()
    }

    /// Polls the queue pair, applies what has come, tells the waiters of this process, and sends what can
    /// be sent. True if something came. False at once if another thread is at it.
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

    /// Before a sleep: the next completion makes the queue pair's fd readable. Then looks once more, as
    /// [`progress`](Self::progress); if another thread is at that, it looks in our place. Whoever has armed looks
    /// at what it waits for after this.
    pub fn arm(&self) -> Result<bool, Fault> {
        if let Some(fault) = self.fault.get() {
            return Err(fault);
        }
        if let Err(down) = self.shared.qp.arm() {
            self.fail(down.into());
            return Err(down.into());
        }
        self.shared.local.armed().store(true, Release);
        self.run(ARM | POLL)
    }

    /// Whether nothing has come since the queue pair was armed, as far as anybody has looked: then the fd is readable
    /// as soon as something has, and there is no need to look, or to arm it, before a sleep on it. (Who arms takes the
    /// event and asks for the next one, and then looks. So what was armed once is so ever after, or the fd is readable,
    /// or whoever takes the event is about to look: a sleep is at worst one that ends at once.)
    pub fn is_armed(&self) -> bool {
        self.shared.local.armed().load(Acquire)
    }

    /// The fd was found readable: it is so until the queue pair is armed again.
    pub fn on_readable(&self) {
        self.shared.local.armed().store(false, Relaxed);
    }

    /// Sends the heads that are held back since the last call. An idle direction's last bytes count as unread by the
    /// peer until then (less than a quarter of a ring; nobody waits for it); to be called again while there is
    /// [something](Self::owes) left.
    pub fn settle(&self) {
        if self.shared.owes.begin() {
            let _ = self.run(SETTLE | PUMP);
        }
    }

    /// There is something for [`settle`](Self::settle), perhaps not yet due.
    pub fn owes(&self) -> bool {
        self.shared.owes.is_asked()
    }

    /// Something was posted that is not proven to have arrived. For waiter 0, which is not told of it again.
    pub fn is_watched(&self) -> bool {
        if self.shared.watch_unseen.load(Relaxed) {
            self.shared.watch_unseen.publish(false);
        }
        // After that, so that what begins now is told of again.
        self.shared.is_watched.look()
    }

    /// There is reason to doubt that the link works: the peer's device is asked even if nothing is posted.
    pub fn doubt(&self) {
        self.with(|engine| engine.sender.counts.doubts += 1);
        let _ = self.run(PUMP);
    }

    /// A look at whether the peer's device still answers; the link is down with [`Fault::Silent`] if it has not
    /// for too long. The time is in ns, of a clock that does not go back.
    pub fn tick(&self, now: u64) {
        if self.fault.get().is_some() {
            return;
        }
        // In a signal handler that has interrupted the engine the next tick does it.
        let Some(mut engine) = self.engine.lock() else {
            return;
        };
        engine.now = now;
        let _ = self.turn(engine, POLL | TICK);
        let _ = self.again();
    }

    /// Carries over what has changed on the stream that the peer calls `theirs`, in either direction,
    /// where no [`Wake`] said so: after [`Producer::adopt`] and [`Consumer::stop`].
    pub fn touch(&self, theirs: Vqpn) {
        self.shared.dirty.push(theirs.0);
        let _ = self.run(PUMP);
    }

    /// The next message of the peer's. Waiter 0 is told when one comes.
    pub fn take_message(&self) -> Option<Message> {
        if self.shared.news.look() == 0 {
            return None;
        }
        self.with(|engine| {
            let message = engine.inbox.pop_front();
            if message.is_some() {
                self.shared.news.take_one();
            }
            message
        })?
    }

    /// Bytes committed to the peer's stream `theirs` that are not known to be in the peer's ring, where the end mark
    /// counts as one more; if it is
    /// not 0 the peer is asked, and when it answers waiter 0 is told, in its ready queue. 0 also when the peer
    /// has closed the stream, or it is not paired. `None` when the link is down, and in a signal
    /// handler that has interrupted the engine.
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

    /// Bytes committed to the peer's stream `theirs` that have not been sent: its ring has no room, or the queue pair.
    /// 0 also in a signal handler that has interrupted the engine.
    pub fn unsent(&self, theirs: Vqpn) -> u64 {
        self.with(|engine| engine.unsent(&self.shared, theirs.0)).unwrap_or(0)
    }

    /// Up to where our stream `mine` is in our ring. Final once the link is down. `None` if it is not open,
    /// and in a signal handler that has interrupted the engine.
    pub fn received(&self, mine: Vqpn) -> Option<u64> {
        self.with(|engine| engine.received(mine.0))?
    }

    /// Up to where the peer is known to have the bytes of its stream `theirs`. As far as this end knows:
    /// the peer's own word may be more.
    pub fn confirmed(&self, theirs: Vqpn) -> Option<u64> {
        self.with(|engine| engine.confirmed(theirs.0))?
    }

    /// Both ends have ended one of the directions of our stream `mine`; see [`End`].
    pub fn has_crossed(&self, mine: Vqpn) -> bool {
        self.with(|engine| engine.has_crossed(mine.0)).unwrap_or(false)
    }

    /// Whether the link is down.
    pub fn is_down(&self) -> bool {
        self.fault.get().is_some()
    }

    /// Why the link is down, if it is. For waiter 0, which is not told of it again.
    pub fn fault(&self) -> Option<Fault> {
        let fault = self.fault.get();
        if fault.is_some() {
            self.fault_unseen.publish(false);
            // There is nothing to be watched any more.
            self.shared.watch_unseen.publish(false);
        }
        fault
    }

    /// Takes in what has come by now, by whoever is at it.
    pub fn take_in(&self) {
        if let Some(engine) = self.engine.lock() {
            // A fault is met again.
            let _ = self.turn(engine, POLL | PUMP);
        }
    }

    /// Takes the link down. Nothing is sent or applied any more when this returns, but by a thread that this
    /// one has interrupted. The queue pair is for the caller to end. True if it was up.
    pub fn set_down(&self) -> bool {
        let first = self.fault.set(Fault::Closed);
        // Whoever is at it has looked for a fault before; let it finish.
        drop(self.engine.lock());
        first
    }

    /// Gives the memory of a link that is down back. What is reached without a cursor stays readable and writable, so
    /// that a thread that is late does no harm. False if one is about to leave the data areas: then nothing is done.
    ///
    /// # Safety
    /// No cursor is left, and the queue pairs have been ended.
    pub unsafe fn release(&self) -> bool {
        self.set_down();
        let Some(mut engine) = self.engine.lock() else {
            return false;
        };
        if !self.finishing.is_empty() {
            return false;
        }
        let old = std::mem::replace(&mut *engine, Engine::new(&self.shared.limits));
        // Under the lock: whoever takes it next finds the fault, or streams that are not there.
        // SAFETY: by the contract; what else reaches the data areas has the lock, or is among `finishing`.
        self.sides().into_iter().for_each(|side| unsafe { side.release() });
        drop(engine);
        drop(old);
        true
    }

    /// What was done so far. Zeroes in a signal handler that has interrupted the engine.
    pub fn counts(&self) -> Counts {
        let counts = self.with(|engine| engine.sender.counts).unwrap_or_default();
        Counts {
            looks: counts.looks + self.looks_saved.load(Relaxed),
            ..counts
        }
    }

    /// Does `what`, or leaves it to whoever holds the lock.
    pub(super) fn run(&self, what: u32) -> Result<bool, Fault> {
        self.again.add(what);
        self.again()
    }

    /// Does what was left to do. True if something came.
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

    /// One turn of the engine. Gives the lock back.
    fn turn(&self, mut engine: Guard<'_, Engine<Q>>, what: u32) -> Result<bool, Fault> {
        let what = what | self.again.take();
        let result = match self.fault.get() {
            Some(fault) => Err(fault),
            None => engine.run(&self.shared, what),
        };
        if let Err(fault) = result {
            // Before the lock is let go of: nothing else is applied.
            self.fail(fault);
        }
        self.let_go_of(engine);
        result
    }

    /// Uses the engine; `None` in a signal handler that has interrupted this thread's use.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Engine<Q>) -> T) -> Option<T> {
        let mut engine = self.engine.lock()?;
        let value = f(&mut engine);
        self.let_go_of(engine);
        // What others left to us.
        let _ = self.again();
        Some(value)
    }

    /// Lets go of the lock, and does what is not done under it.
    fn let_go_of(&self, mut engine: Guard<'_, Engine<Q>>) {
        let after = engine.after.take();
        let is_of_link = after.is_of_link();
        if is_of_link {
            self.finishing.enter();
        }
        drop(engine);
        self.finish(after);
        if is_of_link {
            self.finishing.leave();
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

    /// As of `shm::End`.
    pub fn hold(&self, mine: Vqpn) {
        self.numbers.hold(mine);
    }

    /// As of `shm::End`.
    pub fn let_go(&self, mine: Vqpn) {
        self.give_back(self.numbers.let_go(mine));
    }

    fn mark_done(&self, mine: Vqpn, bits: u8) {
        self.give_back(self.numbers.mark(mine, bits));
    }

    fn give_back(&self, done: Option<Done>) {
        let Some(done) = done else {
            return;
        };
        // Without the engine the number stays taken.
        let forgot = self.with(|engine| engine.forget_when_quiet(&self.shared, done));
        if let Some(done) = forgot.flatten() {
            self.free_number(done);
        }
    }

    /// The engine has forgotten it.
    fn free_number(&self, Done { number, regions }: Done) {
        // Not given back to the kernel: the device has the pages.
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
            self.numbers.put_back(vqpn, region);
            error
        };
        let block = self.shared.mine.block(vqpn).ok_or(OpenError::Streams)?;
        // SAFETY: within the mapping; the number is free, so nobody has a cursor on the block, and the engine
        // has forgotten it.
        unsafe { block.as_ref() }.reset();
        // SAFETY: as above; this is the block's only consumer, and the end outlives it (`new`).
        let mut consumer = unsafe { Consumer::new(block, self.shared.mine.area()) };
        // Nobody is waiting yet; the offer is carried over by `pair`.
        let _ = consumer.offer(region).map_err(|_| undo(OpenError::Arena))?;
        let ring = RingOffer::new(region.page(), region.log2()).ok_or(OpenError::Arena)?;
        self.register(Which::Mine, of_region(region, self.shared.tuning.chunk_log2));
        self.with(|engine| engine.open(vqpn.0))
            .ok_or_else(|| undo(OpenError::Busy))?;
        Ok(Opened { vqpn, ring, consumer })
    }

    fn pair(&self, mine: Vqpn, theirs: Vqpn, first: RingOffer) {
        let first = Region::new(first.page(), first.log2());
        self.with(|engine| engine.pair(&self.shared, mine.0, theirs.0, first));
        self.touch(theirs);
    }

    fn producer(&self, theirs: Vqpn) -> Option<Producer> {
        let block = self.shared.mirror.block(theirs)?;
        // SAFETY: within the mapping; the only producer, and the end outlives it (`new`).
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

    /// CLOSED follows what is still to be carried over, as far as the peer's ring has room, or, before an end mark, all
    /// of it; the number is done with when that is sent. That takes calls of [`progress`](Self::progress) if the queue
    /// pair is full now, and it may not have arrived when the process ends: who cares asks
    /// [`unconfirmed`](Self::unconfirmed) before.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>) {
        self.numbers.keep(mine, consumer);
        let Some(yours) = theirs else {
            return self.mark_done(mine, done::BOTH);
        };
        match self.with(|engine| engine.close(mine.0, yours.0)) {
            Some(true) => {}
            // It was never paired: there is nothing to be carried over.
            Some(false) => {
                if self.send(&Message::Closed { yours }).is_ok() {
                    self.mark_done(mine, done::LOCAL);
                }
            }
            None => self.shared.closing.push(mine.0),
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

    /// After what the peer has to know of the stream that the message is about: heads, offers, flags, a stop.
    /// No message that comes with fds. CLOSED is sent by [`close`](Self::close) where there is a stream.
    fn send(&self, message: &Message) -> Result<(), SendError> {
        if self.fault.get().is_some() {
            return Err(SendError::Down);
        }
        if message.fds() != 0 {
            return Err(SendError::Encoding);
        }
        // Not on the stack, which may be a handler's.
        let mut buf = Scratch::new(MAX_MESSAGE).ok_or(SendError::Full)?;
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
        // A fault that is met now, perhaps behind the message, does not say that it was not sent: the peer may act on
        // it. What has to be done about a link that is down is done where that is found.
        let _ = self.run(PUMP);
        Ok(())
    }

    /// [`ENGINE`]: carries over what has changed on the stream. Other wakes travel to the peer, and
    /// wake whom they name there.
    #[inline]
    fn notify(&self, wake: Wake, theirs: Vqpn) {
        if wake.0 == ENGINE.0 {
            self.touch(theirs);
        } else if !wake.is_none() {
            self.tell(wake, theirs);
        }
    }

    fn drain_ready(&self, waiter: WaiterId, each: impl FnMut(Vqpn)) {
        self.sweeps.drain(&self.shared.mine, waiter, each);
    }

    fn queued_at(&self, mine: Vqpn) -> u64 {
        self.shared.mine.told_at(mine)
    }

    /// Of waiter 0 also whether there is a message, or a fault, the beginning of a watch or the end of a bulk queue
    /// pair that was not asked for.
    fn has_ready(&self, waiter: WaiterId) -> bool {
        Sweeps::has_ready(&self.shared.mine, waiter)
            || waiter == SERVICE
                && (self.shared.news.look() > 0
                    || self.fault_unseen.look()
                    || self.shared.watch_unseen.look()
                    || self.shared.retired_unseen.look())
    }
}
