//! The engine's access to a direction block. The engine carries changes over a link between hosts (`remote.rs`), and
//! acts here for the cursor at the other host. In a block of the mirror, this end's copy of the peer's arena, it acts
//! for the peer's consumer. In a block of this end's arena it acts for the peer's producer. The engine keeps the rules
//! of a cursor (W1 and W2 in `ring.rs`). To publish, it writes words of the side that it acts for, and then takes the
//! wake-up word of the local side. To wait, it sets the wake-up word of the side that it acts for, and then reads the
//! words of the local side.

use crate::fabric::ring::block::{DirectionBlock, EndMark, STOPPED, Wake};
use crate::fabric::ring::{Ended, Stopped};
use crate::sync::Ordering;

/// The values that the local producer has published.
#[derive(Clone, Copy, Debug)]
pub(in crate::fabric) struct ProducerView {
    /// The raw end word. If the word is not 0, the tail is final.
    pub end: u32,
    pub tail: u64,
    /// Read after the tail, so it is the generation of the last switch that the tail can be beyond.
    pub generation: u32,
    pub switch_pos: u64,
    pub limited: u32,
}

/// The values that the local consumer has published.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::fabric) struct ConsumerView {
    pub head: u64,
    pub flags: u32,
    pub offer: u64,
    pub stopped: bool,
}

impl DirectionBlock {
    /// Acts for the consumer: asks for a wake-up by `bits` in `want_data`, then reads the values that the producer has
    /// published.
    pub(in crate::fabric) fn watch_producer(&self, bits: u32) -> ProducerView {
        self.consumer.want_data.keep_armed(bits);
        let p = &self.producer;
        // Acquires the final tail, which the producer published before the mark.
        let end = p.end.look();
        // Acquires the payload, which the producer wrote before the tail.
        let tail = p.tail.look();
        let generation = p.generation.load(Ordering::Acquire);
        ProducerView {
            end,
            tail,
            generation,
            switch_pos: p.switch_pos.load(Ordering::Relaxed),
            limited: p.limited.load(Ordering::Relaxed),
        }
    }

    /// Acts for the producer: asks for a wake-up by `bits` in `want_space`, then reads the values that the consumer has
    /// published.
    pub(in crate::fabric) fn watch_consumer(&self, bits: u32) -> ConsumerView {
        self.producer.want_space.keep_armed(bits);
        let c = &self.consumer;
        ConsumerView {
            head: c.head.look(),
            flags: c.flags.look(),
            offer: c.offer.look(),
            stopped: self.producer.end.look() == STOPPED,
        }
    }

    /// Returns the consumer's published head, without a request for a wake-up.
    pub(in crate::fabric) fn head(&self) -> u64 {
        self.consumer.head.look()
    }

    /// Returns the producer's published tail, without a request for a wake-up.
    pub(in crate::fabric) fn tail(&self) -> u64 {
        self.producer.tail.look()
    }

    /// Returns whether the producer has ended the direction.
    pub(in crate::fabric) fn has_ended(&self) -> bool {
        EndMark::from_word(self.producer.end.look()).is_some()
    }

    pub(in crate::fabric) fn put_head(&self, head: u64) -> Wake {
        self.last.consumed.store(head, Ordering::Relaxed);
        self.consumer.head.publish(head);
        self.producer.take_want_space()
    }

    pub(in crate::fabric) fn put_offer(&self, word: u64) -> Wake {
        self.consumer.offer.publish(word);
        self.producer.take_want_space()
    }

    pub(in crate::fabric) fn put_flags(&self, flags: u32) -> Wake {
        self.consumer.flags.add_bits(flags);
        self.producer.take_want_space()
    }

    /// Records that the peer's consumer has stopped. Fails with [`Ended`] if the direction has its end mark.
    pub(in crate::fabric) fn put_stop(&self) -> Result<(), Ended> {
        self.producer.end.claim(STOPPED).map_err(|_| Ended)
    }

    pub(in crate::fabric) fn put_tail(&self, tail: u64) -> Wake {
        self.producer.tail.publish(tail);
        self.consumer.take_want_data()
    }

    /// Publishes a switch of the peer's producer. To be called before `put_tail` publishes a tail beyond `position`.
    pub(in crate::fabric) fn put_switch(&self, generation: u32, position: u64) {
        self.producer.switch_pos.store(position, Ordering::Relaxed);
        // Releases `switch_pos` to the consumer's load of `generation`.
        self.producer.generation.store(generation, Ordering::Release);
    }

    /// Records that the peer's producer has ended the direction, at the tail that was published before. Returns the
    /// local consumer's waiters to wake. Fails with [`Stopped`] if the consumer has stopped before.
    pub(in crate::fabric) fn put_end(&self, end: EndMark) -> Result<Wake, Stopped> {
        self.producer.end.claim(end as u32).map_err(|_| Stopped)?;
        Ok(self.consumer.take_want_data())
    }

    pub(in crate::fabric) fn put_limited(&self, limited: u32) {
        self.producer.limited.store(limited, Ordering::Relaxed);
    }
}
