//! The `mem` fabric, for tests: a link within one process, with a side channel under a virtual clock, and channels
//! whose faults are scripted ([`Medium`]).
//!
//! The fabric has the arenas, ready queues and rings of the shm fabric, on the heap. It is not for production, and is
//! built for tests and with the feature `mem`.

use std::alloc::{Layout as AllocLayout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::fabric::arena::Arena;
use crate::fabric::layout::{Layout, PAGE, READY_QUEUES, Region};
use crate::fabric::ready::{ReadyCursor, ReadyLine, ReadyQueue};
use crate::fabric::ring::{Consumer, DataArea, DirectionBlock, Producer, Wake};
use crate::fabric::waiter::{MAX_WAITERS, WaiterId};
use crate::fabric::{LinkEnd, OpenError, Opened, SendError, layout};
use crate::ids::Vqpn;
use crate::sync::{RungMark, SleepFlag};
use crate::wire::{MAX_MESSAGE, Message};

/// Locks a mutex even if a test has panicked while it held the lock, so that other tests can go on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The virtual time; all clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// Returns the time in µs since the test began.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Lets `us` µs pass.
    pub fn advance(&self, us: u64) {
        self.0.fetch_add(us, Ordering::SeqCst);
    }
}

/// The fate of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Arrives after this many µs.
    Arrive(u64),
    /// Never arrives. On a reliable channel it arrives at once instead.
    Lose,
    /// Arrives twice: after the first number of µs, and after the second. On a reliable channel it arrives only once,
    /// after the first.
    Twice(u64, u64),
}

/// A channel of encoded messages in one direction, under a virtual clock.
#[derive(Debug)]
pub struct Medium {
    clock: Clock,
    reliable: bool,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    script: VecDeque<Fate>,
    /// The encoded messages by their time of arrival in µs, then in the order of sending.
    messages: BTreeMap<(u64, u64), Vec<u8>>,
    sent: u64,
    latest: u64,
}

impl Medium {
    /// Returns a channel like SEQPACKET: a delay does not change the order, and no message is lost or repeated.
    pub fn reliable(clock: &Clock) -> Self {
        Self {
            clock: clock.clone(),
            reliable: true,
            queue: Mutex::default(),
        }
    }

    /// Returns a channel like UDP: messages may be lost, repeated or reordered.
    pub fn datagrams(clock: &Clock) -> Self {
        Self {
            clock: clock.clone(),
            reliable: false,
            queue: Mutex::default(),
        }
    }

    /// Sets the fates of the next messages. Messages beyond them arrive at once.
    pub fn script(&self, fates: impl IntoIterator<Item = Fate>) {
        lock(&self.queue).script.extend(fates);
    }

    /// Sends a message, to which the next fate of the script applies.
    pub fn send(&self, message: &Message) -> Result<(), SendError> {
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).map_err(|_| SendError::Encoding)?;
        let mut queue = lock(&self.queue);
        let delays = match queue.script.pop_front() {
            None => [Some(0), None],
            Some(Fate::Arrive(us)) => [Some(us), None],
            Some(Fate::Lose) => [self.reliable.then_some(0), None],
            Some(Fate::Twice(a, b)) => [Some(a), (!self.reliable).then_some(b)],
        };
        for delay in delays.into_iter().flatten() {
            let mut due = self.clock.now() + delay;
            if self.reliable {
                due = due.max(queue.latest);
                queue.latest = due;
            }
            queue.sent += 1;
            let at = (due, queue.sent);
            queue.messages.insert(at, bytes.to_vec());
        }
        Ok(())
    }

    /// Returns the next message that has arrived; `None` if there is none.
    pub fn recv(&self) -> Option<Message> {
        let mut queue = lock(&self.queue);
        let first = queue.messages.first_entry()?;
        if first.key().0 > self.clock.now() {
            return None;
        }
        Message::decode(&first.remove()).ok()
    }

    /// Drops all messages that have not been received.
    pub fn lose_all(&self) {
        lock(&self.queue).messages.clear();
    }

    /// Returns the time at which the next message arrives, in µs; `None` if there is no message.
    pub fn next_arrival(&self) -> Option<u64> {
        lock(&self.queue).messages.first_key_value().map(|(at, _)| at.0)
    }
}

/// Zeroed pages on the heap.
#[derive(Debug)]
struct Heap {
    start: NonNull<u8>,
    layout: AllocLayout,
}

// SAFETY: the value owns its memory, and this type itself does not read or write that.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl Heap {
    /// Allocates `bytes` bytes; `None` if no allocation can have that size.
    fn new(bytes: usize) -> Option<Self> {
        let layout = AllocLayout::from_size_align(bytes.max(1), PAGE).ok()?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Some(Self { start, layout })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: `new` has allocated the memory with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// An arena, whose memory both ends share.
#[derive(Clone)]
struct Side {
    memory: Arc<Heap>,
    layout: Layout,
}

impl Side {
    fn new(layout: Layout) -> Option<Self> {
        let memory = Arc::new(Heap::new(layout.file_len() as usize)?);
        Some(Self { memory, layout })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.memory.start.as_ptr().wrapping_add(offset)
    }

    fn area(&self) -> DataArea {
        // SAFETY: the memory is as long as the layout says (`new`). The end, which keeps the memory, outlives its
        // cursors (`heap_pair`).
        unsafe { DataArea::new(self.at(layout::DATA_OFFSET), self.layout.data_len()) }
    }

    fn block(&self, vqpn: Vqpn) -> Option<NonNull<DirectionBlock>> {
        NonNull::new(self.at(layout::block_offset(vqpn.0)?).cast())
    }

    fn queue(&self, waiter: WaiterId) -> Option<InArena<'_>> {
        (u32::from(waiter.0) < READY_QUEUES).then_some(InArena(self, waiter))
    }
}

struct InArena<'a>(&'a Side, WaiterId);

impl ReadyQueue for InArena<'_> {
    fn line(&self, group: usize) -> Option<&ReadyLine> {
        let Self(side, waiter) = self;
        let offset = layout::line_offset(waiter.0.into(), u32::try_from(group).ok()?)?;
        // SAFETY: the line lies within the memory, is aligned (`layout`), and has only atomics. The memory lives as
        // long as the side.
        Some(unsafe { &*side.at(offset).cast::<ReadyLine>() })
    }
}

/// The waiters of one end, in place of the doorbells and the page of flags that a real end has.
#[derive(Debug)]
struct Waiters(Vec<(SleepFlag, AtomicU32)>);

impl Waiters {
    fn new() -> Self {
        Self((0..MAX_WAITERS).map(|_| Default::default()).collect())
    }

    fn get(&self, waiter: WaiterId) -> Option<&(SleepFlag, AtomicU32)> {
        self.0.get(waiter.0 as usize)
    }

    fn ring(&self, waiter: WaiterId) {
        if let Some((_, bell)) = self.get(waiter) {
            bell.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[derive(Debug)]
struct Numbers {
    arena: Arena,
    next: u32,
    free: Vec<u32>,
    /// By number: which ends have finished with the stream, and the rings to be freed when both have.
    used: BTreeMap<u32, Used>,
}

#[derive(Debug, Default)]
struct Used {
    left: bool,
    peer_left: bool,
    rings: Vec<Region>,
}

impl Used {
    fn keep(&mut self, consumer: Option<Consumer>) {
        let rings = consumer.map(Consumer::into_regions);
        self.rings.extend(rings.into_iter().flatten().flatten());
    }
}

impl Numbers {
    fn done(&mut self, number: u32, change: impl FnOnce(&mut Used)) {
        let Some(used) = self.used.get_mut(&number) else {
            return;
        };
        change(used);
        if used.left
            && used.peer_left
            && let Some(used) = self.used.remove(&number)
        {
            used.rings.into_iter().for_each(|r| self.arena.free(r));
            self.free.push(number);
        }
    }
}

/// An end of a link within the process.
pub struct End {
    mine: Side,
    theirs: Side,
    outgoing: Arc<Medium>,
    incoming: Arc<Medium>,
    waiters: Arc<Waiters>,
    peers: Arc<Waiters>,
    marks: Vec<RungMark>,
    cursors: Vec<Mutex<ReadyCursor>>,
    numbers: Mutex<Numbers>,
    up: Arc<AtomicBool>,
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("End")
            .field("numbers", &self.numbers)
            .finish_non_exhaustive()
    }
}

/// Returns the two ends of a link whose arenas have data areas of `data_bytes` bytes each; `None` if no data area has
/// that size. Cursors made by an end must not outlive it.
pub fn heap_pair(data_bytes: u64, clock: &Clock) -> Option<[End; 2]> {
    let layout = Layout::for_data(data_bytes)?;
    let sides = [Side::new(layout)?, Side::new(layout)?];
    let media = [Arc::new(Medium::reliable(clock)), Arc::new(Medium::reliable(clock))];
    let waiters = [Arc::new(Waiters::new()), Arc::new(Waiters::new())];
    let up = Arc::new(AtomicBool::new(true));
    let end = |me: usize, you: usize| End {
        mine: sides[me].clone(),
        theirs: sides[you].clone(),
        outgoing: Arc::clone(&media[me]),
        incoming: Arc::clone(&media[you]),
        waiters: Arc::clone(&waiters[me]),
        peers: Arc::clone(&waiters[you]),
        marks: (0..READY_QUEUES).map(|_| RungMark::default()).collect(),
        cursors: (0..READY_QUEUES).map(|_| Mutex::default()).collect(),
        numbers: Mutex::new(Numbers {
            arena: Arena::new(layout.data_len() as u64),
            next: 0,
            free: Vec::new(),
            used: BTreeMap::new(),
        }),
        up: Arc::clone(&up),
    };
    Some([end(0, 1), end(1, 0)])
}

impl End {
    /// Returns the channel on which this end sends its messages, for a script of their fates.
    pub fn medium(&self) -> &Medium {
        &self.outgoing
    }

    /// Returns the next message from the other end that has arrived; `None` if there is none.
    pub fn recv(&self) -> Option<Message> {
        self.incoming.recv()
    }

    /// Takes the link down, for both ends.
    pub fn break_down(&self) {
        self.up.store(false, Ordering::SeqCst);
    }

    /// Returns whether the link is up.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::SeqCst)
    }

    /// Records that this end's `waiter` is about to sleep. Afterwards the caller checks its reasons not to sleep once
    /// more.
    pub fn begin_sleep(&self, waiter: WaiterId) {
        if let Some((flag, _)) = self.waiters.get(waiter) {
            flag.begin();
        }
    }

    /// Records that `waiter` is awake. Returns how often its doorbell was rung since the last call.
    pub fn end_sleep(&self, waiter: WaiterId) -> u64 {
        self.waiters.get(waiter).map_or(0, |(flag, bell)| {
            flag.end();
            bell.swap(0, Ordering::SeqCst).into()
        })
    }

    /// Returns how many bytes of this end's arena are in use for rings.
    pub fn bytes_in_use(&self) -> u64 {
        lock(&self.numbers).arena.bytes_in_use()
    }
}

impl LinkEnd for End {
    fn open(&self, log2: u8) -> Result<Opened, OpenError> {
        let mut numbers = lock(&self.numbers);
        let number = numbers.free.last().copied().unwrap_or(numbers.next);
        let vqpn = Vqpn(number);
        let block = self.mine.block(vqpn).ok_or(OpenError::Streams)?;
        let region = numbers.arena.alloc(log2).ok_or(OpenError::Arena)?;
        // SAFETY: the block is within the memory. The number is free, so neither end has a cursor on the block.
        unsafe { block.as_ref() }.reset();
        // SAFETY: as above. The number was free, so this is the block's only consumer; it does not outlive the end
        // (`heap_pair`).
        let mut consumer = unsafe { Consumer::new(block, self.mine.area()) };
        if consumer.offer(region).is_err() {
            numbers.arena.free(region);
            return Err(OpenError::Arena);
        }
        if numbers.free.pop().is_none() {
            numbers.next += 1;
        }
        numbers.used.insert(number, Used::default());
        let ring = region;
        Ok(Opened { vqpn, ring, consumer })
    }

    fn producer(&self, theirs: Vqpn) -> Option<Producer> {
        let block = self.theirs.block(theirs)?;
        // SAFETY: the block is within the memory, and this is its only producer by the trait's contract.
        Some(unsafe { Producer::new(block, self.theirs.area()) })
    }

    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>) {
        let told = theirs.is_some_and(|yours| self.send(&Message::Closed { yours }).is_ok());
        lock(&self.numbers).done(mine.0, |used| {
            used.keep(consumer);
            used.left = told || theirs.is_none();
            used.peer_left |= theirs.is_none();
        });
    }

    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        lock(&self.numbers).done(mine.0, |used| {
            used.keep(consumer);
            used.left = true;
        });
    }

    fn on_closed(&self, mine: Vqpn) {
        lock(&self.numbers).done(mine.0, |used| used.peer_left = true);
    }

    fn allocate(&self, log2: u8) -> Option<Region> {
        lock(&self.numbers).arena.alloc(log2)
    }

    fn free(&self, region: Region) {
        lock(&self.numbers).arena.free(region);
    }

    fn send(&self, message: &Message) -> Result<(), SendError> {
        if !self.is_up() {
            return Err(SendError::Down);
        }
        self.outgoing.send(message)
    }

    fn notify(&self, wake: Wake, theirs: Vqpn) {
        if let Some(waiter) = WaiterId::of_queue(wake.0)
            && let Some(queue) = self.theirs.queue(waiter)
        {
            queue.push(theirs.0);
            if let (Some((flag, _)), Some(mark)) = (self.peers.get(waiter), self.marks.get(waiter.0 as usize))
                && flag.must_ring(mark)
            {
                self.peers.ring(waiter);
            }
        }
        if let Some(sleeper) = WaiterId::of_sleeper(wake.0) {
            self.peers.ring(sleeper);
        }
    }

    fn drain_ready(&self, waiter: WaiterId, mut each: impl FnMut(Vqpn)) {
        if let (Some(queue), Some(cursor)) = (self.mine.queue(waiter), self.cursors.get(waiter.0 as usize)) {
            let mut cursor = lock(cursor);
            cursor.begin(&queue);
            while let Some(vqpn) = cursor.pop(&queue) {
                each(Vqpn(vqpn));
            }
        }
    }

    fn queued_at(&self, mine: Vqpn) -> u64 {
        // SAFETY: the block is within the arena, which lives as long as the end, and has only atomics.
        let block = self.mine.block(mine).map(|b| unsafe { b.as_ref() });
        block.map_or(0, DirectionBlock::told_at)
    }

    fn has_ready(&self, waiter: WaiterId) -> bool {
        match (self.mine.queue(waiter), self.cursors.get(waiter.0 as usize)) {
            (Some(queue), Some(cursor)) => !lock(cursor).is_idle(&queue),
            _ => false,
        }
    }
}
