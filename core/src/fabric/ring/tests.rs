//! Tests of the ring: sequences over heap memory, hostile values, two threads, and loom models.

use std::ptr::NonNull;

use crate::fabric::layout::Region;
use crate::fabric::ring::*;

#[cfg(not(loom))]
mod hostile;
#[cfg(loom)]
mod loom_models;
#[cfg(not(loom))]
mod sequences;

/// A block and a data area of `len` bytes on the heap, in place of a mapped arena. They are not in boxes, since moving
/// a box invalidates other pointers to its content.
struct Memory {
    block: std::sync::Arc<DirectionBlock>,
    area: Vec<std::cell::UnsafeCell<Byte>>,
}

// SAFETY: the bytes are reached through raw pointers only, as shared memory is.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    fn new(len: usize) -> Self {
        Self {
            block: std::sync::Arc::default(),
            area: area(len),
        }
    }

    fn data_area(&self) -> DataArea {
        // SAFETY: the tests keep the memory for longer than the cursors.
        unsafe { DataArea::new(self.area.as_ptr() as *mut Byte, self.area.len()) }
    }

    fn producer(&self) -> Producer {
        // SAFETY: the block outlives the cursor; each test makes one producer.
        unsafe { Producer::new(NonNull::from(&*self.block), self.data_area()) }
    }

    fn consumer(&self) -> Consumer {
        // SAFETY: as for the producer.
        unsafe { Consumer::new(NonNull::from(&*self.block), self.data_area()) }
    }
}

#[cfg(loom)]
fn area(len: usize) -> Vec<std::cell::UnsafeCell<Byte>> {
    (0..len).map(|_| loom::cell::UnsafeCell::new(0u8).into()).collect()
}

/// Makes all cells at once, since making them byte by byte takes seconds in Miri.
#[cfg(not(loom))]
fn area(len: usize) -> Vec<std::cell::UnsafeCell<Byte>> {
    let mut zeros = std::mem::ManuallyDrop::new(vec![0u8; len]);
    // SAFETY: the vector is taken apart once, and its bytes are laid out as the cells are (`repr(transparent)`).
    unsafe { Vec::from_raw_parts(zeros.as_mut_ptr().cast(), zeros.len(), zeros.capacity()) }
}

/// Sends as much of `data` as there is room for.
fn send(p: &mut Producer, data: &[u8]) -> Result<(usize, Wake), RingError> {
    let spans = p.spans(data.len())?;
    let n = spans.len().min(data.len());
    // SAFETY: `data` is readable and apart from the ring.
    let copied = unsafe { spans.copy_in(0, data.as_ptr(), n) };
    assert_eq!(copied, n);
    Ok((n, p.commit(n)))
}

/// Receives into `buf` until it is full or the ring is empty.
fn recv(c: &mut Consumer, buf: &mut [u8]) -> Result<(usize, Wake), RingError> {
    let (mut done, mut wake) = (0, Wake::NONE);
    while done < buf.len() {
        let rest = &mut buf[done..];
        let spans = c.spans(rest.len())?;
        // SAFETY: `rest` is writable and apart from the ring.
        let n = unsafe { spans.copy_out(0, rest.as_mut_ptr(), rest.len()) };
        if n == 0 {
            break;
        }
        wake = Wake(wake.0 | c.consume(n).0);
        done += n;
    }
    Ok((done, wake))
}
