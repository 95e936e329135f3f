//! Direct transfers and lent memory: the reader gets all bytes in order and once. In a direct transfer the writer's
//! device writes into a buffer with which the reader waits, and which the reader's end has announced (an *advert*).
//! Lent memory (a *loan*) is memory of the writer's program that the reader's device reads. The tests try any order of
//! adverts, withdrawals, loans, bytes by the rings, and the end of either queue pair.

use crate::fabric::remote::mem::pair_beside;
use crate::fabric::remote::qp::{QueuePair, Region, Role};
use crate::fabric::remote::tests::*;

/// A buffer with which the reader waits.
pub(crate) struct Waiting {
    memory: Vec<u8>,
    region: Region,
    serial: u32,
}

/// Memory that the writer has lent.
pub(crate) struct Lent {
    memory: Vec<u8>,
    pub region: Region,
    until: u64,
    is_offered: bool,
}

/// Registers memory of a program. The memory stays valid until it is deregistered, or until both ends are dropped.
fn registered(end: &TestEnd, mut memory: Vec<u8>, role: Role) -> Option<(Vec<u8>, Region)> {
    // SAFETY: the queue pair in memory accesses only registered memory, and only while an end polls.
    let region = unsafe { end.qp().register(memory.as_mut_ptr(), memory.len(), role) }.ok()?;
    Some((memory, region))
}

impl Direction {
    /// Makes the reader wait with a buffer, if its ring is empty.
    pub(crate) fn wait(&mut self, ends: &[TestEnd; 2], len: usize) {
        let end = &ends[self.reader];
        if self.waiting.is_some() || !self.consumer.spans(1).unwrap().is_empty() {
            return;
        }
        let Some((mut memory, region)) = registered(end, vec![0; len], Role::Target) else {
            return;
        };
        let buffer = Buffer {
            address: memory.as_mut_ptr().expose_provenance() as u64,
            length: len as u32,
            key: region.key,
        };
        let made = end.advertise(self.number, buffer);
        match made {
            Some(advert) => {
                assert_eq!(advert.position, self.got);
                self.waiting = Some(Waiting {
                    memory,
                    region,
                    serial: advert.serial,
                });
            }
            None => end.qp().deregister(region),
        }
    }

    /// If the advert has ended, returns the bytes that have come into the buffer.
    fn landed(&mut self, ends: &[TestEnd; 2]) -> Option<Vec<u8>> {
        let end = &ends[self.reader];
        let is_down = end.fault().is_some();
        let bytes = match end.landed(self.number, self.waiting.as_ref()?.serial).unwrap() {
            Landed::Over(bytes) | Landed::Read(bytes) => bytes as usize,
            Landed::Waits if is_down => 0,
            Landed::Waits => return None,
        };
        let mut waiting = self.waiting.take()?;
        end.qp().deregister(waiting.region);
        let (new, rest) = waiting.memory.split_at(bytes);
        assert!(*new == *self::bytes(self.seed, self.got, self.got + bytes as u64));
        if end.counts().lost == 0 && !is_down {
            assert!(rest.iter().all(|b| *b == 0), "beyond what was told");
        }
        assert!(self.consumer.spans(bytes).unwrap().len() >= bytes);
        waiting.memory.truncate(bytes);
        Some(waiting.memory)
    }

    /// If the advert has ended, consumes the bytes that have come into the buffer. Returns how many.
    pub(crate) fn collect(&mut self, ends: &[TestEnd; 2]) -> usize {
        let Some(landed) = self.landed(ends) else {
            return 0;
        };
        let (end, bytes) = (&ends[self.reader], landed.len());
        for wake in [self.consumer.consume(bytes), self.consumer.publish()] {
            end.notify(wake, self.back);
        }
        self.got += bytes as u64;
        end.settle_head(self.number);
        bytes
    }

    pub(crate) fn leave_off(&mut self, ends: &[TestEnd; 2]) {
        if let Some(waiting) = &self.waiting {
            ends[self.reader].withdraw(self.number, waiting.serial);
        }
    }

    /// Unwinds the reader's call after it has waited for the device, perhaps in vain. Bytes that have come are kept for
    /// the next call.
    pub(crate) fn unwind(&mut self, ends: &[TestEnd; 2]) {
        let end = &ends[self.reader];
        self.leave_off(ends);
        let waits = |waiting: &Waiting| end.landed(self.number, waiting.serial) == Some(Landed::Waits);
        if self.waiting.as_ref().is_some_and(waits) {
            end.drop_bulk();
        }
        if let Some(landed) = self.landed(ends) {
            let spans = self.consumer.spans(landed.len()).unwrap();
            // SAFETY: the source is readable, and apart from the ring.
            unsafe { spans.copy_in(0, landed.as_ptr(), landed.len()) };
            end.put_back(self.number);
        }
    }

    /// Sends from the program's own memory, if the peer's program waits with a buffer.
    fn write_from(&mut self, ends: &[TestEnd; 2], n: usize) {
        let n = n.min(ends[1 - self.reader].wanted(self.number) as usize);
        if self.producer.spans(n).unwrap().len() >= n {
            self.send_from(ends, n, false);
        }
    }

    /// Sends from the program's own memory, which it lends to the reader's device.
    pub(crate) fn offer_from(&mut self, ends: &[TestEnd; 2], n: usize) {
        let n = n.min(self.producer.spans(n).unwrap().len());
        self.send_from(ends, n, true);
    }

    fn send_from(&mut self, ends: &[TestEnd; 2], n: usize, is_offered: bool) {
        let end = &ends[1 - self.reader];
        if n == 0 || self.lent.is_some() {
            return;
        }
        let data = bytes(self.seed, self.sent, self.sent + n as u64);
        let role = if is_offered { Role::Offered } else { Role::Source };
        let Some((mut memory, region)) = registered(end, data, role) else {
            return;
        };
        let (address, key) = (memory.as_mut_ptr().expose_provenance(), region.key);
        let is_taken = match is_offered {
            true => end.offer_source(self.number, self.sent, address, n as u64, key.remote),
            false => end.lend_source(self.number, self.sent, address, n as u64, key.local),
        };
        if !is_taken {
            end.qp().deregister(region);
            return;
        }
        let wake = self.producer.commit(n);
        self.sent += n as u64;
        end.notify(wake, self.number);
        self.lent = Some(Lent {
            memory,
            region,
            until: self.sent,
            is_offered,
        });
    }

    /// Makes the writer take its memory back. As soon as the device does not use the memory any more, the memory is
    /// overwritten, so that a later use of it shows.
    pub(crate) fn take(&mut self, ends: &[TestEnd; 2]) {
        let end = &ends[1 - self.reader];
        let Some(mut lent) = self.lent.take() else {
            return;
        };
        end.cancel_source(self.number);
        let is_done = end.is_source_done(self.number);
        // SAFETY: the memory lives until the end of this function.
        let left = unsafe { end.take_source(self.number) };
        let is_under_way = if lent.is_offered {
            assert!(!is_done || left.is_none_or(|left| left == 0));
            !is_done
        } else {
            end.untaken(self.number, lent.until) > 0
        };
        if is_under_way && end.fault().is_none() {
            // A writer that has waited in vain gives the bulk queue pair up. After that no byte reaches the peer from
            // this memory.
            end.drop_bulk();
        }
        end.qp().deregister(lent.region);
        lent.memory.fill(0xee);
    }
}

impl World {
    /// Gives both ends a bulk queue pair, if neither has one.
    fn attach(&self, config: Config) {
        if self.ends.iter().any(TestEnd::has_bulk) {
            return;
        }
        // Before that, records that are under way arrive, and each end ends its old bulk queue pair.
        self.settle();
        for end in &self.ends {
            end.end_retired(drop);
        }
        let pairs = pair_beside(config, &self.clock, Some(self.ends[0].qp()));
        for (end, qp) in self.ends.iter().zip(pairs) {
            let back = end.attach_bulk(qp);
            assert!(back.is_none() || end.fault().is_some());
        }
    }

    /// For each end that has given its bulk queue pair up, notifies the other end.
    pub(crate) fn tell_lost(&self) {
        for at in [0, 1] {
            if self.ends[at].end_retired(drop) > 0 {
                self.ends[1 - at].drop_bulk();
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Other(Op),
    Wait(prop::sample::Index, usize),
    LeaveOff(prop::sample::Index),
    Unwind(prop::sample::Index),
    WriteFrom(prop::sample::Index, usize),
    OfferFrom(prop::sample::Index, usize),
    Take(prop::sample::Index),
    Lose(usize),
    TellLost,
    Attach,
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        20 => op().prop_filter("no end", |op| !matches!(op, Op::End(_))).prop_map(Step::Other),
        14 => (index(), 1usize..9000).prop_map(|(i, n)| Step::Wait(i, n)),
        2 => index().prop_map(Step::LeaveOff),
        2 => index().prop_map(Step::Unwind),
        6 => (index(), 1usize..9000).prop_map(|(i, n)| Step::WriteFrom(i, n)),
        8 => (index(), 1usize..9000).prop_map(|(i, n)| Step::OfferFrom(i, n)),
        3 => index().prop_map(Step::Take),
        1 => (0usize..2).prop_map(Step::Lose),
        2 => Just(Step::TellLost),
        2 => Just(Step::Attach),
    ]
}

impl World {
    fn step(&mut self, step: &Step, bulk: Config, sent: &mut Sent) {
        let n = self.directions.len();
        let (ends, all) = (&self.ends, &mut self.directions);
        match step {
            Step::Other(op) => self.apply(op, sent),
            Step::Wait(i, len) => all[i.index(n)].wait(ends, *len),
            Step::LeaveOff(i) => all[i.index(n)].leave_off(ends),
            Step::Unwind(i) => all[i.index(n)].unwind(ends),
            Step::WriteFrom(i, len) => all[i.index(n)].write_from(ends, *len),
            Step::OfferFrom(i, len) => all[i.index(n)].offer_from(ends, *len),
            Step::Take(i) => all[i.index(n)].take(ends),
            Step::Lose(at) => ends[*at].drop_bulk(),
            Step::TellLost => self.tell_lost(),
            Step::Attach => self.attach(bulk),
        }
    }
}

/// Returns the properties of a bulk queue pair with this delay, which may be longer or shorter than the link's own.
fn bulk(delay: u64, config: Config) -> Config {
    Config { delay, ..config }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn what_is_sent_is_read_in_order_and_once(
        immediate in any::<bool>(),
        streams in 1usize..3,
        delay in 0..=BULK_DELAY,
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let (config, tuning) = tiny(immediate);
        let bulk = bulk(delay, config);
        let mut world = World::new(config, tuning, streams);
        world.attach(bulk);
        let mut sent = [0, 0];
        for step in &steps {
            world.step(step, bulk, &mut sent);
        }
        // The world comes to rest: no call waits for bytes that do not come.
        for _ in 0..3 {
            world.tell_lost();
            for d in &mut world.directions {
                d.leave_off(&world.ends);
                d.take(&world.ends);
            }
            world.tell_lost();
            world.drain();
        }
        for d in &mut world.directions {
            prop_assert!(d.waiting.is_none());
            prop_assert_eq!(d.got, d.sent);
        }
    }

    /// Work that waits for a direct transfer goes on without another call when the transfer has ended.
    #[test]
    fn an_end_behind_a_direct_transfer_comes_and_is_confirmed(
        immediate in any::<bool>(),
        delay in 0..=BULK_DELAY,
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let (config, tuning) = tiny(immediate);
        let bulk = bulk(delay, config);
        let mut world = World::new(config, tuning, 1);
        world.attach(bulk);
        for step in &steps {
            world.step(step, bulk, &mut [0, 0]);
        }
        world.tell_lost();
        for d in &mut world.directions {
            d.take(&world.ends);
            let wake = d.producer.end(crate::fabric::ring::EndMark::Fin).unwrap();
            world.ends[1 - d.reader].notify(wake, d.number);
        }
        for _ in 0..4 {
            world.tell_lost();
            world.drain();
            for d in &mut world.directions {
                d.leave_off(&world.ends);
                // ACK covers only the bytes that were sent before CONFIRM.
                let _ = world.ends[1 - d.reader].unconfirmed(d.number);
            }
        }
        world.drain();
        for d in &mut world.directions {
            prop_assert_eq!(d.got, d.sent);
            prop_assert_eq!(d.consumer.end(), Ok(Some(crate::fabric::ring::EndMark::Fin)));
            prop_assert_eq!(world.ends[1 - d.reader].unconfirmed(d.number), Some(0));
        }
    }

    #[test]
    fn what_was_received_and_what_is_sent_again_are_the_whole(
        immediate in any::<bool>(),
        streams in 1usize..3,
        delay in 0..=BULK_DELAY,
        lives in 0u64..200,
        loses in 0usize..4,
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let (config, tuning) = tiny(immediate);
        let bulk = bulk(delay, config);
        let mut world = World::new(config, tuning, streams);
        world.attach(bulk);
        world.ends[0].qp().die_after(lives, loses);
        let mut sent = [0, 0];
        for step in &steps {
            // If the link is down, `settle` would fail.
            if world.ends.iter().any(|end| end.fault().is_some()) {
                break;
            }
            if !matches!(step, Step::Attach) {
                world.step(step, bulk, &mut sent);
            }
        }
        world.ends[0].qp().cut();
        for end in &world.ends {
            let _ = end.progress();
            prop_assert!(matches!(end.fault(), Some(Fault::Down(_))));
        }
        for d in &mut world.directions {
            let received = world.ends[d.reader].received(d.number).unwrap();
            prop_assert!(d.got <= received && received <= d.sent);
            prop_assert!(world.ends[1 - d.reader].confirmed(d.number).unwrap() <= received);
            let consumed = d.got;
            d.read(&world.ends, usize::MAX);
            prop_assert_eq!(d.got, received);
            d.take(&world.ends);
            // A reader that hands its end over to another process asks for the bytes that its program has not read.
            let unread = d.producer.rest(consumed).ok();
            prop_assert_eq!(unread, Some(bytes(d.seed, consumed, d.sent)));
            let again = d.producer.rest(received).ok();
            prop_assert_eq!(again, Some(bytes(d.seed, received, d.sent)));
        }
    }
}

pub(crate) fn large() -> (World, Config) {
    let world = World::new(
        Config::default(),
        Tuning {
            direct_min: 1000,
            ..Tuning::default()
        },
        1,
    );
    world.attach(Config::default());
    let mut world = world;
    world.grow(16);
    for _ in 0..2 {
        world.directions[0].write(&world.ends, 5000);
        world.drain();
    }
    world.rest();
    (world, Config::default())
}

#[test]
fn bytes_go_from_one_programs_memory_into_the_others() {
    let (mut world, _) = large();
    for _ in 0..5 {
        world.directions[0].wait(&world.ends, 40_000);
        world.settle();
        assert_eq!(world.ends[1].wanted(world.directions[0].number), 40_000);
        let sends = world.ends[1].counts().eager_bytes;
        world.directions[0].write_from(&world.ends, 30_000);
        world.settle();
        assert_eq!(world.directions[0].collect(&world.ends), 30_000);
        world.settle();
        assert!(world.ends[1].is_source_done(world.directions[0].number));
        world.directions[0].take(&world.ends);
        assert_eq!(world.ends[1].counts().eager_bytes, sends);
    }
    assert_eq!(world.ends[0].counts().lost, 0);
}

#[test]
fn bytes_of_the_mirror_go_into_the_readers_memory() {
    let (mut world, _) = large();
    world.directions[0].wait(&world.ends, 40_000);
    world.settle();
    world.directions[0].write(&world.ends, 20_000);
    world.settle();
    assert_eq!(world.directions[0].collect(&world.ends), 20_000);
    // A short send goes by the ring, which ends the advert.
    world.settle();
    world.directions[0].wait(&world.ends, 40_000);
    world.settle();
    world.directions[0].write(&world.ends, 20);
    world.settle();
    assert_eq!(world.directions[0].read(&world.ends, 100), 20);
    assert!(world.directions[0].waiting.is_none());
}

#[test]
fn what_was_lent_and_cannot_go_is_sent_by_the_ring() {
    let (mut world, _) = large();
    world.directions[0].wait(&world.ends, 40_000);
    world.settle();
    world.directions[0].write_from(&world.ends, 30_000);
    // The reader's end gives its bulk queue pair up before any byte has come.
    world.ends[0].drop_bulk();
    world.tell_lost();
    world.settle();
    assert!(world.ends[1].is_source_done(world.directions[0].number));
    world.directions[0].take(&world.ends);
    world.drain();
    assert_eq!(world.directions[0].got, world.directions[0].sent);
    // Another bulk queue pair replaces the one that was given up.
    world.attach(Config::default());
    world.rest();
    world.directions[0].wait(&world.ends, 40_000);
    world.settle();
    world.directions[0].write_from(&world.ends, 30_000);
    world.settle();
    assert_eq!(world.directions[0].collect(&world.ends), 30_000);
}

#[test]
fn what_a_lost_bulk_queue_pair_leaves_to_say_is_said_in_the_same_turn() {
    let (mut world, _) = large();
    world.directions[0].wait(&world.ends, 40_000);
    world.settle();
    // The device refuses the WRITE.
    let region = world.directions[0].waiting.as_ref().unwrap().region;
    world.ends[0].qp().deregister(region);
    world.directions[0].write(&world.ends, 20_000);
    for end in [0, 1].repeat(10) {
        while world.ends[end].progress().unwrap() {}
    }
    assert_eq!([0, 1].map(|at: usize| world.ends[at].counts().lost), [1, 1]);
    assert_eq!(world.directions[0].collect(&world.ends), 0);
    assert_eq!(world.directions[0].read(&world.ends, 20_000), 20_000);
}
