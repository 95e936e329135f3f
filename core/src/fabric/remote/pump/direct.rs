//! Writes bytes straight from the mirror or from the local program's memory into a buffer with which the peer's program
//! waits (P90–P95). Positions go on only when all is posted with PLACED behind it, so before that nothing has to be
//! undone.

use crate::fabric::layout::Region;
use crate::fabric::remote::bulk::{Bulk, Lost, Piece};
use crate::fabric::remote::chunks::Chunks;
use crate::fabric::remote::counts::DirectCounts;
use crate::fabric::remote::local::Local;
use crate::fabric::remote::qp::QueuePair;
use crate::fabric::remote::shared::{After, Shared};
use crate::fabric::remote::stream::Outgoing;

/// The longest piece in bytes.
const PIECE: u64 = 1 << 20;

/// How the stream's turn goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direct {
    /// The next bytes go by the ring.
    No,
    /// The direction waits for a record or a completion.
    Holds,
    /// There is more to send, but other streams are next.
    More,
    /// A piece was posted: check again.
    Went,
}

/// The parts of the engine that a direct transfer uses beside the stream.
pub(super) struct Means<'a, Q> {
    pub bulk: &'a mut Option<Bulk<Q>>,
    pub chunks: &'a Chunks,
    pub counts: &'a mut DirectCounts,
    pub after: &'a mut After,
    /// Why the bulk queue pair is to be given up.
    pub lost: &'a mut Option<Lost>,
    /// This end's number of the stream.
    pub mine: u32,
}

/// Writes as many of the bytes up to `tail` as possible into an announced buffer, at most `left` bytes.
pub(super) fn direct<Q: QueuePair, L: Local>(
    g: &Shared<Q, L>,
    means: &mut Means<'_, Q>,
    out: &mut Outgoing,
    theirs: u32,
    tail: u64,
    left: &mut u64,
) -> Direct {
    if out.targets.holds(out.head) {
        return Direct::Holds;
    }
    let told = out.told;
    let (Some((advert, written)), Some(bulk)) = (out.targets.at(told), means.bulk.as_mut()) else {
        out.targets.drop_open();
        return by_ring(g, means, out, theirs, tail);
    };
    let is_next = out.placed == told && out.aside.is_none();
    let next = out.next(tail).filter(|_| is_next);
    let from = told + written;
    let pending = next.map_or(0, |next| next.until.min(advert.end()).saturating_sub(from));
    let source = out.targets.source.filter(|source| source.covers(from));
    if written == 0 && pending == 0 && is_next {
        // Bytes for the advert may come yet.
        return Direct::No;
    }
    // Memory that was lent to the peer's device is not for this one; bytes that the peer has not read go by the mirror.
    let is_offered = source.is_some_and(|source| source.is_offered);
    let is_worth_it = written > 0 || source.is_some() || pending >= u64::from(g.tuning.direct_min);
    let piece = next
        .filter(|_| pending > 0 && is_worth_it && !is_offered)
        .and_then(|next| match source {
            Some(source) => Some(Piece {
                from: std::ptr::with_exposed_provenance(source.address + (from - source.from) as usize),
                len: pending.min(PIECE).min(source.until - from),
                key: source.key,
            }),
            None => in_mirror(g, means.chunks, means.after, next.source, from, {
                out.targets.mirrored(from, from + pending.min(PIECE)) - from
            }),
        });
    let Some(piece) = piece else {
        if written == 0 {
            out.targets.drop_open();
            return by_ring(g, means, out, theirs, tail);
        }
        return finish(bulk, means.lost, out, theirs);
    };
    if *left == 0 {
        return Direct::More;
    }
    let write = piece.to(advert.address + written, advert.rkey);
    // SAFETY: within a chunk of the mirror, or within the program's memory, each registered under the key.
    match unsafe { bulk.write(theirs, &write) } {
        Ok(true) => {}
        Ok(false) => return Direct::Holds,
        Err(lost) => {
            *means.lost = Some(lost);
            return Direct::Holds;
        }
    }
    out.targets.on_written(piece.len);
    *left -= piece.len.min(*left);
    means.counts.sent += piece.len;
    if source.is_some() {
        means.counts.from_programs += piece.len;
    }
    if piece.len < pending {
        return Direct::Went;
    }
    finish(bulk, means.lost, out, theirs)
}

/// Returns a piece of the mirror from a position on; `None` if that memory is not registered.
fn in_mirror<Q: QueuePair, L: Local>(
    g: &Shared<Q, L>,
    chunks: &Chunks,
    after: &mut After,
    ring: Region,
    from: u64,
    most: u64,
) -> Option<Piece> {
    let log2 = g.tuning.chunk_log2;
    let area = g.mirror.area();
    let (at, len) = area.piece(ring, from, most).filter(|(_, len)| *len > 0)?;
    let offset = area.offset_of(at);
    let chunk = (offset >> log2) as u32;
    let Some(key) = chunks.mirror.get(chunk) else {
        after.register = Some(chunk);
        return None;
    };
    let len = len.min((1 << log2) - (offset & ((1 << log2) - 1))) as u64;
    Some(Piece { from: at, len, key })
}

/// Ends the use of the advert: sends PLACED for the bytes that were written.
fn finish<Q: QueuePair>(bulk: &mut Bulk<Q>, lost: &mut Option<Lost>, out: &mut Outgoing, theirs: u32) -> Direct {
    if let Some(answer) = out.targets.finish() {
        out.on_direct(answer.tail);
        *lost = lost.or(bulk.answer(theirs, answer).err());
    }
    Direct::Holds
}

/// Sends the next bytes by the ring, if the mirror has them; otherwise asks the lender to put them there.
fn by_ring<Q: QueuePair, L: Local>(
    g: &Shared<Q, L>,
    means: &mut Means<'_, Q>,
    out: &mut Outgoing,
    theirs: u32,
    tail: u64,
) -> Direct {
    let position = out.placed;
    let Some(source) = out
        .targets
        .source
        .as_mut()
        .filter(|s| s.covers(position) && position < tail)
    else {
        return Direct::No;
    };
    if !std::mem::replace(&mut source.is_needed, true)
        && let Some(block) = g.block_mirror(theirs)
    {
        let wake = block.put_head(out.head);
        g.tell_here(means.after, wake, means.mine);
    }
    Direct::Holds
}
