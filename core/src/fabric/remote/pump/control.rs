//! Sends the changes that a consumer has published: rings on offer with the keys of their memory, heads, flags, a stop.
//! Also answers to CONFIRM, adverts and withdrawals of buffers with which the program waits, and TAKEN for memory that
//! the peer lends. `data.rs` sends the producer's.

use crate::fabric::remote::chunks::{Chunks, of_region};
use crate::fabric::remote::local::{ENGINE, Local};
use crate::fabric::remote::qp::QueuePair;
use crate::fabric::remote::record::Record;
use crate::fabric::remote::sender::{Halt, Sender};
use crate::fabric::remote::shared::Shared;
use crate::fabric::remote::stream::Stream;
use crate::fabric::ring::proxy::unpack_offer;

/// Sends the records of the local consumer of a stream.
pub(super) fn control<Q: QueuePair, L: Local>(
    g: &Shared<Q, L>,
    sender: &mut Sender,
    chunks: &mut Chunks,
    s: &mut Stream,
    mine: u32,
    theirs: u32,
) -> Result<(), Halt> {
    let Some(block) = g.block_mine(mine) else {
        return Ok(());
    };
    let inc = &mut s.inc;
    // An advert is for the bytes that follow the head, so the peer needs the head first.
    inc.settle |= inc.landings.untold().is_some();
    let view = block.watch_consumer(ENGINE.0);
    let taken = inc.takings.answer(inc.tail, view.head);
    // The peer need not keep bytes that it knows were read.
    inc.settle |= taken.is_some();
    if view.offer != inc.offer_told {
        if let Some((_, region)) = unpack_offer(view.offer) {
            for index in of_region(region, g.tuning.chunk_log2) {
                if chunks.announced.get(index).is_none()
                    && let Some(target) = chunks.mine.get(index)
                {
                    let record = Record::Chunk {
                        index,
                        rkey: target.rkey,
                        base: target.base,
                    };
                    sender.put(&g.qp, &record)?;
                    chunks.announced.set(index, ());
                }
            }
        }
        let word = view.offer;
        sender.put(&g.qp, &Record::Offer { theirs, word })?;
        inc.on_offer_told(word);
    }
    let head = view.head;
    let untold = head.saturating_sub(inc.head_told);
    if untold > 0 && (inc.settle || untold >= inc.quarter()) {
        sender.put(&g.qp, &Record::Head { theirs, head })?;
        inc.head_told = head;
    }
    inc.settle = false;
    if view.flags != inc.flags_told {
        let flags = view.flags;
        sender.put(&g.qp, &Record::Flags { theirs, flags })?;
        inc.flags_told = flags;
    }
    if view.stopped && !inc.stop_told {
        sender.put(&g.qp, &Record::Stop { theirs })?;
        inc.stop_told = true;
    }
    if inc.ack_due {
        let tail = inc.ack();
        sender.put(&g.qp, &Record::Ack { theirs, tail })?;
        inc.ack_due = false;
    }
    if let Some(serial) = taken {
        let tail = inc.tail;
        sender.put(&g.qp, &Record::Taken { theirs, serial, tail })?;
        inc.takings.on_answered();
    }
    if let Some(withdrawal) = inc.landings.withdrawal() {
        sender.put(&g.qp, &Record::Withdraw { theirs, withdrawal })?;
        inc.landings.on_withdrawal_told();
    }
    if let Some(memory) = inc.landings.untold() {
        sender.put(&g.qp, &Record::Advert { theirs, memory })?;
        inc.landings.on_told();
    }
    Ok(())
}
