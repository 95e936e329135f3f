//! The loads of `bench device` on a link of the library: its engine over one queue pair, without sockets.

use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rdmasock_core::fabric::LinkEnd;
use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::fabric::remote::{End, Local, Tuning};
use rdmasock_core::fabric::ring::{Consumer, Producer};
use rdmasock_core::fabric::shm::Side;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::ids::Vqpn;
use rdmasock_core::sync::SleepFlag;
use rdmasock_localnic::settings::Settings;
use rdmasock_localnic::within::{LocalQp, pair};

use super::{TRANSFER, costs, numbers, processor, trips_of};
use crate::results::Figure;

/// A [`Local`] whose threads poll and never sleep, so that no thread has to be woken.
struct Awake(SleepFlag, AtomicBool);

impl Local for Awake {
    fn flag(&self, _: WaiterId) -> Option<&SleepFlag> {
        Some(&self.0)
    }

    fn ring(&self, _: WaiterId) {}

    fn armed(&self) -> &AtomicBool {
        &self.1
    }

    fn settle_later(&self) {}
}

type Here = End<LocalQp, Awake>;

/// The waiter of streams that have bytes to read.
const READER: WaiterId = WaiterId(1);
/// The waiter of streams that have room; no thread is woken.
const WRITER: WaiterId = WaiterId(2);
/// The longest time that ring heads are held back, the same as in the library's service thread.
const SETTLED: Duration = Duration::from_millis(5);

/// An end, as used by one thread.
struct Thread<'a> {
    end: &'a Here,
    settled: Instant,
}

impl<'a> Thread<'a> {
    fn new(end: &'a Here) -> Self {
        Self {
            end,
            settled: Instant::now(),
        }
    }

    /// Does the work of a waiting thread: makes progress, and settles held-back heads after `SETTLED`.
    fn look(&mut self) -> Result<()> {
        if !self.end.progress().map_err(|fault| anyhow!("{fault}"))? {
            std::hint::spin_loop();
            if self.end.owes() && self.settled.elapsed() > SETTLED {
                self.settled = Instant::now();
                self.end.settle();
            }
        }
        Ok(())
    }
}

/// Sends on a stream whose vQPN at the peer is `theirs`.
struct Sender {
    producer: Producer,
    theirs: Vqpn,
}

impl Sender {
    /// Copies as much of a message as there is room for, and returns the number of bytes.
    fn put(&mut self, end: &Here, message: &[u8]) -> Result<usize> {
        let spans = self.producer.spans(message.len()).map_err(|error| anyhow!("{error}"))?;
        // SAFETY: the message is readable and does not overlap the ring.
        let put = unsafe { spans.copy_in(0, message.as_ptr(), message.len()) };
        if put > 0 {
            end.notify(self.producer.commit(put), self.theirs);
        } else {
            self.producer
                .arm_space(WRITER.sleeper_bits())
                .map_err(|error| anyhow!("{error}"))?;
        }
        Ok(put)
    }

    /// Sends the whole message, unless `is_over` is set before.
    fn send(&mut self, thread: &mut Thread<'_>, mut message: &[u8], is_over: &AtomicBool) -> Result<()> {
        while !message.is_empty() && !is_over.load(Relaxed) {
            match self.put(thread.end, message)? {
                0 => thread.look()?,
                put => message = message.get(put..).unwrap_or_default(),
            }
        }
        Ok(())
    }
}

/// Receives a stream whose vQPN at the peer is `theirs`.
struct Receiver {
    consumer: Consumer,
    theirs: Vqpn,
}

impl Receiver {
    /// Copies the bytes that are in the ring, at most as many as fit, and returns their number.
    fn take(&mut self, end: &Here, into: &mut [u8]) -> Result<usize> {
        let spans = self.consumer.spans(into.len()).map_err(|error| anyhow!("{error}"))?;
        let len = spans.len().min(into.len());
        // SAFETY: the target is writable and does not overlap the ring.
        unsafe { spans.copy_out(0, into.as_mut_ptr(), len) };
        if len > 0 {
            end.notify(self.consumer.consume(len), self.theirs);
        }
        Ok(len)
    }

    /// Returns true if bytes are in the ring already. On false, [`READER`] is notified when bytes arrive.
    fn arm(&mut self, end: &Here) -> Result<bool> {
        let armed = self
            .consumer
            .arm_data(READER.queue_bits())
            .map_err(|error| anyhow!("{error}"))?;
        end.notify(armed.wake, self.theirs);
        Ok(armed.ready)
    }
}

/// Both ends of a stream.
struct Stream {
    senders: [Sender; 2],
    receivers: [Receiver; 2],
    /// The numbers (vQPNs) of the stream at either end.
    numbers: [Vqpn; 2],
}

/// Makes a link with `streams` streams, whose rings have `1 << log2` bytes.
fn link(settings: Settings, streams: usize, log2: u8) -> Result<([Here; 2], Vec<Stream>)> {
    // The arena has to hold both directions, and the space that its allocator keeps free.
    let data = ((streams.next_power_of_two() as u64) << log2) * 2;
    let end = |qp: LocalQp| {
        let side = || {
            let layout = Layout::for_data(data).context("an arena's size")?;
            let side = Side::anonymous()?;
            side.map_data(&layout)?;
            anyhow::Ok(side)
        };
        // SAFETY: the cursors are dropped before the ends, and each stream's producer is asked for once.
        unsafe {
            Here::new(
                qp,
                side()?,
                side()?,
                Awake(SleepFlag::default(), AtomicBool::new(false)),
                Tuning::default(),
            )
        }
        .map_err(|error| anyhow!("{error}"))
    };
    let [a, b] = pair(settings).map_err(|error| anyhow!("no queue pair: errno {}", error.0))?;
    let ends = [end(a)?, end(b)?];
    let opened = (0..streams).map(|_| stream(&ends, log2)).collect::<Result<Vec<_>>>()?;
    Ok((ends, opened))
}

fn stream([a, b]: &[Here; 2], log2: u8) -> Result<Stream> {
    let open = |end: &Here| end.open(log2).map_err(|error| anyhow!("{error}"));
    let (here, there) = (open(a)?, open(b)?);
    a.pair(here.vqpn, there.vqpn, there.ring);
    b.pair(there.vqpn, here.vqpn, here.ring);
    let sender = |end: &Here, theirs| {
        let producer = end.producer(theirs).context("no producer")?;
        Ok::<_, anyhow::Error>(Sender { producer, theirs })
    };
    let receiver = |consumer, theirs| Receiver { consumer, theirs };
    Ok(Stream {
        senders: [sender(a, there.vqpn)?, sender(b, here.vqpn)?],
        receivers: [receiver(here.consumer, there.vqpn), receiver(there.consumer, here.vqpn)],
        numbers: [here.vqpn, there.vqpn],
    })
}

/// Sends a message to and fro, and returns the times of the round trips.
pub fn trips(settings: Settings, bytes: usize, time: Duration) -> Result<Vec<(Figure, f64)>> {
    let (ends, mut streams) = link(settings, 1, 16)?;
    let one = streams.pop().context("no stream")?;
    let ([mut to, mut back], [mut from, mut at]) = (one.senders, one.receivers);
    let message = vec![7; bytes];
    let is_over = AtomicBool::new(false);
    let receive = |thread: &mut Thread<'_>, receiver: &mut Receiver, buffer: &mut [u8]| {
        let mut got = 0;
        while got < bytes && !is_over.load(Relaxed) {
            match receiver.take(thread.end, buffer.get_mut(got..).unwrap_or_default())? {
                0 => thread.look()?,
                more => got += more,
            }
        }
        Ok::<_, anyhow::Error>(())
    };
    let [a, b] = &ends;
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let (mut thread, mut buffer) = (Thread::new(b), vec![0; bytes]);
            while !is_over.load(Relaxed) {
                receive(&mut thread, &mut at, &mut buffer)?;
                back.send(&mut thread, &message, &is_over)?;
            }
            Ok::<_, anyhow::Error>(())
        });
        let (mut thread, mut buffer) = (Thread::new(a), vec![0; bytes]);
        let trips = trips_of(time, || {
            to.send(&mut thread, &message, &is_over)?;
            receive(&mut thread, &mut from, &mut buffer)
        });
        is_over.store(true, Relaxed);
        echo.join().map_err(|_| anyhow!("the other thread"))??;
        trips
    })
}

/// Sends messages one way from several threads, each on its own stream, to one thread that reads all streams.
pub fn one_way(settings: Settings, bytes: usize, threads: usize, time: Duration) -> Result<Vec<(Figure, f64)>> {
    let (ends, streams) = link(settings, threads, 18)?;
    let [a, b] = &ends;
    let message = vec![7; bytes];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (mut all, mut receivers) = (Vec::new(), Vec::new());
        for stream in streams {
            let ([mut to, _], [_, at]) = (stream.senders, stream.receivers);
            receivers.push(at);
            let (message, is_over) = (&message, &is_over);
            all.push(scope.spawn(move || {
                let mut thread = Thread::new(a);
                while !is_over.load(Relaxed) {
                    to.send(&mut thread, message, is_over)?;
                }
                Ok::<_, anyhow::Error>(())
            }));
        }
        let (mut thread, mut buffer) = (Thread::new(b), vec![0; TRANSFER]);
        let (since, mut received) = (Instant::now(), 0);
        while since.elapsed() < time {
            let before = received;
            for at in &mut receivers {
                received += at.take(b, &mut buffer)?;
            }
            if received == before {
                thread.look()?;
            }
        }
        let seconds = since.elapsed().as_secs_f64();
        is_over.store(true, Relaxed);
        for thread in all {
            thread.join().map_err(|_| anyhow!("another thread"))??;
        }
        Ok(vec![(Figure::Messages, received as f64 / bytes as f64 / seconds)])
    })
}

/// Sends one transfer after the other, each on a random stream, to one thread that reads the streams reported ready.
pub fn sends(settings: Settings, connections: usize, time: Duration) -> Result<Vec<(Figure, f64)>> {
    let (ends, streams) = link(settings, connections, TRANSFER.ilog2() as u8)?;
    let [a, b] = &ends;
    let message = vec![7; TRANSFER];
    let is_over = AtomicBool::new(false);
    let received = AtomicUsize::new(0);
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    for stream in streams {
        let ([to, _], [_, at], [_, number]) = (stream.senders, stream.receivers, stream.numbers);
        senders.push(to);
        receivers.push((number, at));
    }
    receivers.sort_by_key(|(number, _)| number.0);
    let mut next = numbers(connections);
    let read = Mutex::new(receivers);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut receivers = read.lock().map_err(|_| anyhow!("a lock"))?;
            let (mut thread, mut buffer, mut ready) = (Thread::new(b), vec![0; TRANSFER], Vec::new());
            for (number, at) in receivers.iter_mut() {
                if at.arm(b)? {
                    ready.push(*number);
                }
            }
            while !is_over.load(Relaxed) {
                b.drain_ready(READER, |number| ready.push(number));
                let Some(number) = ready.pop() else {
                    thread.look()?;
                    continue;
                };
                let at = receivers.binary_search_by_key(&number.0, |(number, _)| number.0);
                let at = at.ok().and_then(|at| receivers.get_mut(at));
                let (_, at) = at.context("no such stream")?;
                received.fetch_add(at.take(b, &mut buffer)?, Relaxed);
                if at.arm(b)? {
                    ready.push(number);
                }
            }
            Ok::<_, anyhow::Error>(())
        });
        let mut thread = Thread::new(a);
        let (since, before) = (Instant::now(), processor()?);
        while since.elapsed() < time {
            let sender = senders.get_mut(next()).context("no stream")?;
            sender.send(&mut thread, &message, &is_over)?;
        }
        let (bytes, took, used) = (received.load(Relaxed) as u64, since.elapsed(), processor()? - before);
        is_over.store(true, Relaxed);
        reader.join().map_err(|_| anyhow!("the other thread"))??;
        costs(bytes, took, used)
    })
}
