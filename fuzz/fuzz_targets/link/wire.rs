//! A queue pair whose other end is the fuzzer: it delivers prepared events, and checks the requests that are posted.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use libfuzzer_sys::arbitrary;
use libfuzzer_sys::arbitrary::Arbitrary;
use rdmasock_core::fabric::remote::qp::{
    Completed, Down, Key, Limits, PostError, QueuePair, Read, Region, Role, Write,
};
use rdmasock_core::fabric::remote::record::decode;
use rdmasock_core::fabric::remote::{MIN_BUFFER, MIN_BUFFERS};

/// The properties of the device.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub struct Setting {
    immediate: bool,
    many_buffers: bool,
    refuses_memory: bool,
}

pub enum Arrived {
    Message(Vec<u8>),
    Written { immediate: u32, bytes: u32 },
    Probed,
}

#[derive(Default)]
struct State {
    arrived: VecDeque<Arrived>,
    is_full: bool,
    was_full: bool,
    /// Whether probes stay unanswered.
    is_silent: bool,
    is_probing: bool,
    is_down: bool,
    /// Whether the end has found a fault, so that it may post no more.
    is_forbidden: bool,
    /// The messages, and WRITEs with immediates, whose buffers the peer has not granted again.
    sent: u16,
    regions: Vec<(usize, usize, u32)>,
    /// Key and address of each chunk that the peer has announced.
    chunks: Vec<(u32, u64)>,
}

pub struct Wire {
    setting: Setting,
    state: Mutex<State>,
}

impl Wire {
    pub fn new(setting: Setting) -> Self {
        Self {
            setting,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no other thread")
    }

    pub fn arrive(&self, what: Arrived) {
        self.state().arrived.push_back(what);
    }

    pub fn set_silent(&self, is_silent: bool) {
        self.state().is_silent = is_silent;
    }

    pub fn set_full(&self, is_full: bool) {
        self.state().is_full = is_full;
    }

    pub fn cut(&self) {
        self.state().is_down = true;
    }

    /// Returns whether the next event is malformed, so that no end may accept it.
    pub fn is_next_malformed(&self) -> bool {
        match self.state().arrived.front() {
            Some(Arrived::Message(bytes)) => decode(bytes).is_err(),
            _ => false,
        }
    }

    /// Forbids all further posts.
    pub fn forbid(&self) {
        self.state().is_forbidden = true;
    }

    /// Returns the receive buffers that a correct peer would grant again now.
    pub fn owes(&self) -> u16 {
        self.state().sent
    }

    pub fn next_chunk(&self) -> u32 {
        self.state().chunks.len() as u32
    }

    pub fn on_chunk(&self, rkey: u32, base: u64) {
        self.state().chunks.push((rkey, base));
    }

    fn post(&self, takes_buffer: bool) -> Result<(), PostError> {
        let mut state = self.state();
        assert!(!state.is_forbidden, "sent after a fault");
        if state.is_down {
            return Err(PostError::Down);
        }
        if state.is_full {
            state.was_full = true;
            return Err(PostError::Full);
        }
        if takes_buffer {
            state.sent += 1;
            assert!(state.sent <= self.limits().receive_buffers, "no credit");
        }
        Ok(())
    }
}

impl QueuePair for Wire {
    fn limits(&self) -> Limits {
        Limits {
            receive_buffers: if self.setting.many_buffers { 64 } else { MIN_BUFFERS },
            buffer_bytes: MIN_BUFFER,
            immediate: self.setting.immediate,
            // So small that many of the messages fill packets.
            packet_bytes: 256,
            // READs are posted on a bulk queue pair alone, and this link has none.
            reads: 0,
        }
    }

    unsafe fn register(&self, at: *mut u8, len: usize, _: Role) -> Result<Region, Down> {
        if self.setting.refuses_memory {
            return Err(Down(12));
        }
        let regions = &mut self.state().regions;
        let local = regions.len() as u32;
        regions.push((at as usize, len, local));
        let key = Key {
            local,
            remote: local + 1000,
        };
        let handle = local.into();
        Ok(Region { key, handle })
    }

    fn deregister(&self, _: Region) {}

    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<(), PostError> {
        assert!(write.len > 0 && (immediate.is_none() || self.setting.immediate));
        {
            let state = self.state();
            let (from, len) = (write.from as usize, write.len as usize);
            assert!(
                state
                    .regions
                    .iter()
                    .any(|(at, n, key)| *key == write.local && from >= *at && from + len <= at + n)
            );
            // A chunk has 8 KiB, and no WRITE exceeds a chunk that the peer has announced.
            assert!(state.chunks.iter().any(|(rkey, base)| *rkey == write.remote
                && write.to >= *base
                && write.to - base + len as u64 <= 8192));
        }
        self.post(immediate.is_some())
    }

    unsafe fn read(&self, _: &Read) -> Result<(), PostError> {
        panic!("a READ without a bulk queue pair");
    }

    fn send(&self, message: &[u8]) -> Result<(), PostError> {
        assert!(message.len() <= MIN_BUFFER as usize);
        let mut records = decode(message).expect("a message").records;
        assert!(records.all(|r| r.is_ok()));
        self.post(true)
    }

    fn probe(&self) -> Result<(), PostError> {
        let mut state = self.state();
        assert!(!state.is_forbidden, "sent after a fault");
        if state.is_down {
            return Err(PostError::Down);
        }
        assert!(!std::mem::replace(&mut state.is_probing, true), "two probes");
        if !state.is_silent {
            state.arrived.push_back(Arrived::Probed);
        }
        Ok(())
    }

    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize, Down> {
        let mut events = 0;
        loop {
            let arrived = self.state().arrived.pop_front();
            match &arrived {
                None => break,
                Some(Arrived::Message(bytes)) => {
                    if let Ok(received) = decode(bytes) {
                        let mut state = self.state();
                        state.sent = state.sent.saturating_sub(received.grant);
                    }
                    each(Completed::Received(bytes));
                }
                Some(Arrived::Written { immediate, bytes }) => each(Completed::Written {
                    immediate: *immediate,
                    bytes: *bytes,
                }),
                Some(Arrived::Probed) => {
                    self.state().is_probing = false;
                    each(Completed::Probed);
                }
            }
            events += 1;
        }
        let room = {
            let mut state = self.state();
            !state.is_full && std::mem::take(&mut state.was_full)
        };
        if room {
            each(Completed::Room);
            events += 1;
        }
        if self.state().is_down {
            return Err(Down(104));
        }
        Ok(events)
    }

    fn arm(&self) -> Result<(), Down> {
        Ok(())
    }
}
