//! A direction of a simulated TCP connection: bounded, cut into segments, delivered late.

use std::collections::VecDeque;

use rdmasock_core::fabric::mem::Clock;

/// How a direction treats the bytes that are written to it.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Bytes that may be under way or unread.
    pub capacity: usize,
    /// Lengths of the segments, in turn.
    pub segments: Vec<usize>,
    /// µs from the write of a segment to its delivery.
    pub latency: u64,
}

/// A direction of a simulated TCP connection.
#[derive(Debug)]
pub struct Tcp {
    clock: Clock,
    shape: Shape,
    next: usize,
    bytes: VecDeque<u8>,
    /// Segments under way: the time at which each arrives, and its bytes.
    segments: VecDeque<(u64, usize)>,
    arrived: usize,
    fin: Option<u64>,
    /// Bytes ever written.
    pub total: usize,
}

impl Tcp {
    /// Returns an open direction.
    pub fn new(clock: &Clock, shape: Shape) -> Self {
        Self {
            clock: clock.clone(),
            shape,
            next: 0,
            bytes: VecDeque::new(),
            segments: VecDeque::new(),
            arrived: 0,
            fin: None,
            total: 0,
        }
    }

    /// Returns how many bytes can be written.
    pub fn room(&self) -> usize {
        self.shape.capacity - self.bytes.len()
    }

    /// Writes as many bytes as there is room for.
    pub fn write(&mut self, data: &[u8]) -> usize {
        assert!(self.fin.is_none(), "written after the end");
        let n = data.len().min(self.room());
        let mut left = n;
        while left > 0 {
            let segment = self.shape.segments[self.next % self.shape.segments.len()].clamp(1, left);
            self.next += 1;
            self.segments
                .push_back((self.clock.now() + self.shape.latency, segment));
            left -= segment;
        }
        self.bytes.extend(&data[..n]);
        self.total += n;
        n
    }

    /// Returns whether the direction has been ended.
    pub fn is_shut(&self) -> bool {
        self.fin.is_some()
    }

    /// Bytes that have arrived and are unread.
    pub fn arrived(&self) -> usize {
        self.arrived
    }

    /// Ends the direction.
    pub fn shut(&mut self) {
        self.fin.get_or_insert(self.clock.now() + self.shape.latency);
    }

    /// Lets the next segment arrive, if it is due.
    fn arrive(&mut self) {
        if let Some((due, n)) = self.segments.front().copied()
            && due <= self.clock.now()
        {
            self.segments.pop_front();
            self.arrived += n;
        }
    }

    /// Returns the bytes that have arrived and are unread. Each call finds at most one segment more.
    pub fn peek(&mut self) -> Vec<u8> {
        self.arrive();
        self.bytes.iter().take(self.arrived).copied().collect()
    }

    /// Takes bytes that have arrived.
    pub fn take(&mut self, n: usize) -> Vec<u8> {
        assert!(n <= self.arrived);
        self.arrived -= n;
        self.bytes.drain(..n).collect()
    }

    /// Returns whether all bytes have arrived, and the end too.
    pub fn is_ended(&self) -> bool {
        self.fin.is_some_and(|due| due <= self.clock.now()) && self.arrived == self.bytes.len()
    }
}
