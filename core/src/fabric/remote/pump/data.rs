//! Sends the changes that a producer has published: payload, switches of rings, the end mark. Each piece goes from its
//! place in the mirror to the same positions of the peer's ring, which may have another size. `control.rs` sends the
//! consumer's.

use super::direct::{Direct, Means, direct};
use crate::fabric::remote::local::{ENGINE, Local};
use crate::fabric::remote::qp::{QueuePair, Write};
use crate::fabric::remote::record::{DATA_BYTES, HEADER_BYTES, Record};
use crate::fabric::remote::sender::{Halt, Sender};
use crate::fabric::remote::shared::Shared;
use crate::fabric::remote::stream::{Next, Outgoing, Stream};
use crate::fabric::ring::EndMark;

/// How a stream's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The stream has nothing more to send.
    Done,
    /// The stream has more to send, but other streams are next.
    More,
    /// The stream has more to send, but has to wait for the peer, mostly for room in its ring.
    Full,
}

/// Sends the records of the local producer of a stream, with at most `Tuning::piece` bytes of payload.
pub(super) fn data<Q: QueuePair, L: Local>(
    g: &Shared<Q, L>,
    sender: &mut Sender,
    means: &mut Means<'_, Q>,
    s: &mut Stream,
    theirs: u32,
) -> Result<Turn, Halt> {
    let Some(block) = g.block_mirror(theirs) else {
        return Ok(Turn::Done);
    };
    let out = &mut s.out;
    let view = out.look(block, ENGINE.0);
    if out.stopped {
        return Ok(Turn::Done);
    }
    if out.targets.holds(out.head) {
        return Ok(Turn::Full);
    }
    if out.loans.is_open() && out.loans.reach().is_some() {
        // Only a RECALL is sent before the peer's end has answered how far it has read.
        if let Some(serial) = out.loans.recalled() {
            sender.put(&g.qp, &Record::Recall { theirs, serial })?;
            out.loans.on_recall_told();
        }
        return Ok(Turn::Full);
    }
    let is_lent = out.targets.source.is_some_and(|source| source.is_offered);
    if is_lent && !out.loans.is_open() {
        // The direction goes on when `take_source` has copied the rest into the mirror.
        return Ok(Turn::Full);
    }
    tell_limited(g, sender, out, theirs, view.limited)?;
    let area = g.mirror.area();
    let mut left = u64::from(g.tuning.piece.max(1));
    loop {
        if let Some(generation) = out.next_generation() {
            let position = out.told;
            let record = Record::Switch {
                theirs,
                generation,
                position,
            };
            sender.put(&g.qp, &record)?;
            out.on_switched();
            // WRITEs over the bulk queue pair could arrive before this record.
            out.targets.drop_open();
            continue;
        }
        if let Some(loan) = out.loans.untold() {
            if loan.position == out.told && loan.end() <= out.window() {
                sender.put(&g.qp, &Record::Source { theirs, memory: loan })?;
                out.loans.on_told();
                out.targets.drop_open();
                return Ok(Turn::Full);
            }
            // `direct` asks the lender for the bytes below.
            out.loans.recall();
        }
        match direct(g, means, out, theirs, view.tail, &mut left) {
            Direct::No => {}
            Direct::Went => continue,
            Direct::More => return Ok(Turn::More),
            Direct::Holds => return Ok(Turn::Full),
        }
        let next = out.next(view.tail).map(|next| Next {
            // Only as far as the mirror has the bytes.
            until: out.targets.mirrored(out.placed, next.until),
            ..next
        });
        let there = next.map_or(0, |next| next.until.saturating_sub(out.placed));
        let next = next.filter(|_| there > 0 && left > 0).and_then(|next| {
            let (at, len) = area.piece(next.source, out.placed, there.min(left))?;
            Some((next, at, len))
        });
        let Some((next, at, len)) = next else {
            if out.placed == out.told {
                break;
            }
            announce(g, sender, theirs, out.placed)?;
            out.told = out.placed;
            continue;
        };
        let log2 = g.tuning.chunk_log2;
        let chunk = |offset: usize| (offset >> log2) as u32;
        let in_chunk = |offset: usize| offset & ((1 << log2) - 1);
        let from = area.offset_of(at);
        let in_ring = (out.placed & (next.ring.len() as u64 - 1)) as usize;
        let to = next.ring.offset() + in_ring;
        let target = means.chunks.theirs.get(chunk(to));
        let key = means.chunks.mirror.get(chunk(from));
        // A WRITE with an immediate needs no header, which may save a packet.
        let alone = g.limits.immediate && sender.is_empty() && out.placed == out.told;
        let header = (HEADER_BYTES + DATA_BYTES) as u64;
        let is_small =
            there <= u64::from(g.tuning.eager_max) && !(alone && g.limits.spills(there, header) && sender.has_credit());
        let (Some(target), Some(local), false) = (target, key, is_small) else {
            if key.is_none() && target.is_some() && !is_small {
                means.after.register = Some(chunk(from));
            }
            if out.placed != out.told {
                announce(g, sender, theirs, out.placed)?;
                out.told = out.placed;
            }
            let want = there.min(left).min(u64::from(u16::MAX)) as usize;
            let want = want.min(sender.most_payload());
            let tail = out.placed + want as u64;
            let from = out.placed;
            // SAFETY: committed and not told, so the producer does not write there.
            let fill = |to: &mut [u8]| unsafe { area.copy_out(next.source, from, to) };
            if !sender.put_data(&g.qp, theirs, tail, want, fill)? {
                // Cannot happen: the payload is no longer than the room, and lies within the ring.
                return Ok(Turn::Done);
            }
            (out.placed, out.told) = (tail, tail);
            left = left.saturating_sub(want as u64);
            continue;
        };
        // Both rings may wrap, and lie in several chunks.
        let len = len
            .min(next.ring.len() - in_ring)
            .min((1 << log2) - in_chunk(from))
            .min((1 << log2) - in_chunk(to)) as u64;
        let whole = alone && len == there && sender.has_credit();
        let write = Write {
            from: at,
            local,
            len: len as u32,
            to: target.base.wrapping_add(in_chunk(to) as u64),
            remote: target.rkey,
        };
        // SAFETY: within the chunk, which was registered under the key.
        unsafe { sender.write(&g.qp, &write, whole.then_some(theirs)) }?;
        out.placed += len;
        left = left.saturating_sub(len);
        if whole {
            out.told = out.placed;
        }
    }
    let has_rest = out.told < view.tail;
    if has_rest && left == 0 {
        return Ok(Turn::More);
    }
    if has_rest {
        out.on_rest(view.tail);
        tell_limited(g, sender, out, theirs, view.limited)?;
    } else if !out.end_told && EndMark::from_word(view.end).is_some() {
        let (end, tail) = (view.end as u8, view.tail);
        sender.put(&g.qp, &Record::End { theirs, end, tail })?;
        out.end_told = true;
    }
    let asks = out.told.saturating_add(out.end_told.into());
    if out.want_confirm && asks > out.asked {
        sender.put(&g.qp, &Record::Confirm { theirs })?;
        out.want_confirm = false;
        out.asked = asks;
    }
    Ok(if has_rest { Turn::Full } else { Turn::Done })
}

/// Sends DATA without payload for the bytes that were written.
fn announce<Q: QueuePair, L: Local>(g: &Shared<Q, L>, sender: &mut Sender, theirs: u32, tail: u64) -> Result<(), Halt> {
    let record = Record::Data {
        theirs,
        tail,
        payload: &[],
    };
    sender.put(&g.qp, &record)
}

/// Sends how often the window was too small, if the count has changed.
fn tell_limited<Q: QueuePair, L: Local>(
    g: &Shared<Q, L>,
    sender: &mut Sender,
    out: &mut Outgoing,
    theirs: u32,
    counted: u32,
) -> Result<(), Halt> {
    let count = out.limited(counted);
    if count != out.limited_told {
        sender.put(&g.qp, &Record::Limited { theirs, count })?;
        out.limited_told = count;
    }
    Ok(())
}
