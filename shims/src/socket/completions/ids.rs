//! The numbers of a connection's sends with MSG_ZEROCOPY, as the program counts them: the arithmetic, without a lock
//! and without the kernel.
//!
//! The kernel numbers the sends that TCP has taken, 0, 1, 2, …; it knows nothing of those on links. So the program's
//! number of one of the kernel's is that plus the sends on links before it. A *stay* says from which of the kernel's
//! numbers on how many those are:
//!
//! ```text
//! made on    TCP  TCP  link link TCP  link TCP
//! kernel's   0    1              2         3
//! program's  0    1    2    3    4    5    6        stays: from 2 on 2 more, from 3 on 3 more
//! ```
//!
//! Inside all counts are of 64 bits, while they are of 32 to the program and go round.

use smallvec::SmallVec;

/// So many stays are kept whose kernel's numbers the program may still be told of.
const STAYS: usize = 4;
/// So many ranges are kept that the program has not read. A range of the kernel's falls into one more than there are
/// stays.
const RANGES: usize = 4 * STAYS;

/// SO_EE_CODE_ZEROCOPY_COPIED (linux/errqueue.h).
const COPIED: u8 = 1;

/// Sends that are complete: what the program is told of at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completed {
    /// The first of them (`ee_info`).
    pub first: u32,
    /// The last (`ee_data`).
    pub last: u32,
    /// Whether they were copied (`ee_code`).
    pub code: u8,
}

struct Range {
    first: u64,
    last: u64,
    code: u8,
}

#[derive(Clone, Copy)]
struct Stay {
    /// The kernel's number of the first send on TCP after it.
    from: u64,
    /// Sends on links until then.
    sends: u64,
}

/// See the module.
#[derive(Default)]
pub struct Ids {
    /// Sends that the kernel has numbered.
    on_tcp: u64,
    /// Sends on links.
    on_links: u64,
    /// Before the first of the stays.
    before: u64,
    stays: SmallVec<[Stay; STAYS]>,
    /// One more than the kernel's last number that has been reported.
    reported: u64,
    /// Not read by the program, in their order, neither overlapping nor, where the codes are the same, adjacent.
    unread: SmallVec<[Range; RANGES]>,
}

impl Ids {
    /// TCP has taken a send.
    pub fn on_sent_by_tcp(&mut self) {
        self.on_tcp += 1;
    }

    /// Whether the next send on a link belongs to a stay that is known already.
    pub fn is_in_stay(&self) -> bool {
        self.stays.last().is_some_and(|stay| stay.from == self.on_tcp)
    }

    /// Whether there is room for a send on a link.
    pub fn has_room(&mut self) -> bool {
        if !self.is_in_stay() && self.stays.len() == STAYS {
            self.forget_oldest();
        }
        self.unread.len() < RANGES && (self.is_in_stay() || self.stays.len() < STAYS)
    }

    /// What precedes the second stay is not told by the kernel again.
    fn forget_oldest(&mut self) {
        if let [first, second, ..] = *self.stays
            && second.from <= self.reported
        {
            self.before = first.sends;
            self.stays.remove(0);
        }
    }

    /// A link has taken a send, for which there is [room](Self::has_room): it is complete.
    pub fn on_sent_by_link(&mut self) {
        let id = self.on_tcp + self.on_links;
        self.on_links += 1;
        let (from, sends) = (self.on_tcp, self.on_links);
        match self.stays.last_mut() {
            Some(stay) if stay.from == from => stay.sends = sends,
            _ => self.stays.push(Stay { from, sends }),
        }
        self.add(Range {
            first: id,
            last: id,
            code: COPIED,
        });
    }

    /// Whether there is room for what the kernel may have to tell.
    pub fn has_room_for_kernels(&self) -> bool {
        self.unread.len() + self.stays.len() < RANGES
    }

    /// The kernel tells of sends that TCP has taken, by its numbers; there is
    /// [room](Self::has_room_for_kernels).
    pub fn on_told_by_kernel(&mut self, told: Completed) {
        // The kernel's count is near ours, also where others send too.
        let behind = told.first.wrapping_sub(self.on_tcp as u32).cast_signed();
        let mut first = self.on_tcp.wrapping_add_signed(behind.into());
        let last = first + u64::from(told.last.wrapping_sub(told.first));
        self.reported = self.reported.max(last + 1);
        let mut more = self.before;
        let stays = self.stays.clone();
        for stay in stays {
            if first > last {
                return;
            }
            if first < stay.from {
                let end = last.min(stay.from - 1);
                self.add_moved(first, end, more, told.code);
                first = end + 1;
            }
            more = stay.sends;
        }
        if first <= last {
            self.add_moved(first, last, more, told.code);
        }
    }

    fn add_moved(&mut self, first: u64, last: u64, more: u64, code: u8) {
        self.add(Range {
            first: first + more,
            last: last + more,
            code,
        });
    }

    fn add(&mut self, range: Range) {
        let at = self.unread.iter().position(|r| r.first > range.first);
        let at = at.unwrap_or(self.unread.len());
        self.unread.insert(at, range);
        self.join(at);
        if let Some(before) = at.checked_sub(1) {
            self.join(before);
        }
    }

    /// Makes one of two that are adjacent.
    fn join(&mut self, at: usize) {
        if let Some([one, next]) = self.unread.get_mut(at..).and_then(|rest| rest.first_chunk_mut())
            && one.code == next.code
            && one.last + 1 == next.first
        {
            one.last = next.last;
            self.unread.remove(at + 1);
        }
    }

    /// What the program is told of next; it has been told then.
    pub fn take(&mut self) -> Option<Completed> {
        let range = self.unread.first_mut()?;
        // One that goes round to where it began would be of none.
        let last = range.last.min(range.first + u64::from(u32::MAX) - 1);
        let completed = Completed {
            first: range.first as u32,
            last: last as u32,
            code: range.code,
        };
        if last == range.last {
            self.unread.remove(0);
        } else {
            range.first = last + 1;
        }
        Some(completed)
    }

    /// Whether there is something that the program has not read.
    pub fn is_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// What is unread is another's to read.
    pub fn forget_unread(&mut self) {
        self.unread.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(first: u32, last: u32) -> Completed {
        Completed {
            first,
            last,
            code: COPIED,
        }
    }

    fn links(ids: &mut Ids, sends: usize) {
        for _ in 0..sends {
            assert!(ids.has_room());
            ids.on_sent_by_link();
        }
    }

    fn tcp(ids: &mut Ids, sends: usize) {
        (0..sends).for_each(|_| ids.on_sent_by_tcp());
    }

    #[test]
    fn what_nobody_reads_is_one_range() {
        let mut ids = Ids::default();
        tcp(&mut ids, 2);
        links(&mut ids, 1000);
        assert_eq!(ids.unread.len(), 1);
        // Late: what precedes it joins it.
        ids.on_told_by_kernel(completed(0, 1));
        assert_eq!(ids.take(), Some(completed(0, 1001)));
        assert_eq!(ids.take(), None);
    }

    #[test]
    fn a_range_of_the_kernels_that_links_have_interrupted_comes_in_parts() {
        let mut ids = Ids::default();
        tcp(&mut ids, 2);
        links(&mut ids, 2);
        assert_eq!(ids.take(), Some(completed(2, 3)));
        tcp(&mut ids, 1);
        links(&mut ids, 1);
        assert_eq!(ids.take(), Some(completed(5, 5)));
        tcp(&mut ids, 1);
        // The picture of the module.
        ids.on_told_by_kernel(completed(0, 3));
        assert_eq!(ids.take(), Some(completed(0, 1)));
        assert_eq!(ids.take(), Some(completed(4, 4)));
        assert_eq!(ids.take(), Some(completed(6, 6)));
        assert_eq!(ids.take(), None);
    }

    #[test]
    fn what_was_not_copied_is_told_apart() {
        let mut ids = Ids::default();
        tcp(&mut ids, 1);
        links(&mut ids, 1);
        ids.on_told_by_kernel(Completed {
            code: 0,
            ..completed(0, 0)
        });
        assert_eq!(ids.take().map(|c| (c.first, c.last, c.code)), Some((0, 0, 0)));
        assert_eq!(ids.take(), Some(completed(1, 1)));
    }

    #[test]
    fn stays_that_the_program_has_heard_of_are_forgotten_and_others_are_not() {
        let mut ids = Ids::default();
        let mut next = 0;
        for kernels in 0..100 {
            links(&mut ids, 1);
            tcp(&mut ids, 1);
            ids.on_told_by_kernel(completed(kernels, kernels));
            assert_eq!(ids.take(), Some(completed(next, next + 1)));
            next += 2;
        }
        assert!(ids.stays.len() <= STAYS);
        // Nobody reads any more.
        for _ in 0..STAYS {
            if ids.has_room() {
                ids.on_sent_by_link();
            }
            tcp(&mut ids, 1);
        }
        assert!(!ids.has_room());
        // In a stay that is known there is room for any number.
        let mut ids = Ids::default();
        for _ in 0..STAYS {
            links(&mut ids, 1);
            tcp(&mut ids, 1);
        }
        assert!(!ids.has_room());
    }

    #[test]
    fn numbers_go_round_as_the_kernels_do() {
        let start = u64::from(u32::MAX) - 1;
        let mut ids = Ids {
            on_tcp: start,
            reported: start,
            ..Ids::default()
        };
        tcp(&mut ids, 1);
        links(&mut ids, 2);
        ids.on_told_by_kernel(completed(u32::MAX - 1, u32::MAX - 1));
        assert_eq!(ids.take(), Some(completed(u32::MAX - 1, 0)));
        tcp(&mut ids, 2);
        ids.on_told_by_kernel(completed(u32::MAX, 0));
        assert_eq!(ids.take(), Some(completed(1, 2)));
    }

    /// Whatever is sent where, told when and read when, each send is told of once, in its order, and nothing grows.
    #[test]
    fn each_is_told_once() {
        let mut seed = 1u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        let mut ids = Ids::default();
        let (mut sent, mut on_tcp, mut told, mut refused) = (0u64, 0u32, 0u32, 0);
        let mut seen = Vec::new();
        for _ in 0..20_000 {
            match below(6) {
                0 => {
                    ids.on_sent_by_tcp();
                    on_tcp += 1;
                    sent += 1;
                }
                1 | 2 if ids.has_room() => {
                    ids.on_sent_by_link();
                    sent += 1;
                }
                1 | 2 => refused += 1,
                3 if told < on_tcp && ids.has_room_for_kernels() => {
                    let last = told + below((on_tcp - told).into()) as u32;
                    ids.on_told_by_kernel(completed(told, last));
                    told = last + 1;
                }
                4 => {
                    if let Some(c) = ids.take() {
                        seen.extend(c.first..=c.last);
                    }
                }
                _ => {}
            }
            assert!(ids.unread.len() <= RANGES && ids.stays.len() <= STAYS);
        }
        assert!(refused > 0);
        while told < on_tcp || ids.is_unread() {
            if told < on_tcp && ids.has_room_for_kernels() {
                ids.on_told_by_kernel(completed(told, on_tcp - 1));
                told = on_tcp;
            }
            if let Some(c) = ids.take() {
                seen.extend(c.first..=c.last);
            }
        }
        seen.sort_unstable();
        assert_eq!(seen.len() as u64, sent);
        assert!(seen.iter().enumerate().all(|(at, id)| at as u32 == *id));
    }
}
