//! One arena as mapped here, and its owner's places in the ready queues: what every fabric with arenas
//! of its own makes an end of. Not for who maps an arena, nor for the cursors on it.

use std::ptr::NonNull;

use super::layout::{self, Layout, READY_QUEUES};
use super::ready::{ReadyCursor, ReadyQueue};
use super::ring::{DataArea, DirectionBlock};
use super::waiter::WaiterId;
use crate::ids::Vqpn;
use crate::lock::Lock;
use crate::os::memfd::Mapping;

/// One side's arena as mapped here.
#[derive(Debug)]
pub struct Side {
    mapping: Mapping,
    layout: Layout,
}

impl Side {
    /// The arena in `mapping`; `None` if that is shorter than the layout says.
    pub fn new(mapping: Mapping, layout: Layout) -> Option<Self> {
        (mapping.bytes() as u64 >= layout.file_len()).then_some(Self { mapping, layout })
    }

    /// What lies where in it.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(offset)
    }

    pub(super) fn area(&self) -> DataArea {
        // SAFETY: the data area lies within the mapping (`new`), which stays for as long as there
        // are cursors (the contract of each fabric's `End::new`).
        unsafe { DataArea::new(self.at(layout::DATA_OFFSET), self.layout.data_len()) }
    }

    pub(super) fn block(&self, vqpn: Vqpn) -> Option<NonNull<DirectionBlock>> {
        NonNull::new(self.at(layout::block_offset(vqpn.0)?).cast())
    }

    pub(super) fn queue(&self, waiter: WaiterId) -> Option<&ReadyQueue> {
        let offset = layout::ready_offset(waiter.0.into())?;
        // SAFETY: inside the mapping (`new`), aligned (layout), only atomics, mapped as long as `self`.
        Some(unsafe { &*self.at(offset).cast::<ReadyQueue>() })
    }
}

/// The places of our waiters in the ready queues of our arena.
pub(super) struct Sweeps(Box<[Lock<ReadyCursor>]>);

impl Sweeps {
    pub fn new() -> Self {
        Self(
            (0..READY_QUEUES)
                .map(|_| Lock::new(ReadyCursor::new()))
                .collect(),
        )
    }

    /// Takes what is queued for `waiter` in `mine`.
    pub fn drain(&self, mine: &Side, waiter: WaiterId, mut each: impl FnMut(Vqpn)) {
        let (Some(queue), Some(cursor)) = (mine.queue(waiter), self.0.get(waiter.0 as usize))
        else {
            return;
        };
        let Some(mut cursor) = cursor.lock() else {
            return;
        };
        cursor.begin(queue);
        while let Some(vqpn) = cursor.pop(queue) {
            each(Vqpn(vqpn));
        }
    }

    /// Whether something is queued for `waiter` in `mine`.
    pub fn has_ready(&self, mine: &Side, waiter: WaiterId) -> bool {
        match (mine.queue(waiter), self.0.get(waiter.0 as usize)) {
            (Some(queue), Some(cursor)) => cursor.lock().is_none_or(|c| !c.is_idle(queue)),
            _ => false,
        }
    }
}
