//! Limits how many channels peers keep open to this instance, and for how long: any process on the host can connect to
//! its names. This is only the account; the channels are in `channels`.
//!
//! A guest is a channel that was opened to one of this instance's names and has not become a link. A correct peer asks
//! at once, waits some seconds at most for the answer, and closes. So evicting the oldest guest hits a peer that is
//! done, or that never sent a request.

use std::collections::BTreeMap;

/// Time until a guest must send its first message, ns.
const SILENT_FOR: u64 = 3_000_000_000;
/// Time that a guest may stay after its last message, ns. Longer than any asker waits for an answer.
const IDLE_FOR: u64 = 10_000_000_000;
/// The most guests, if the process may have enough descriptors.
const MOST: usize = 256;
/// A user's share of the guests, as a divisor: a quarter.
const SHARE: usize = 4;
/// The guests' share of the process's descriptors, as a divisor: an eighth.
const DESCRIPTORS: u64 = 8;
/// The least bound, for all guests and for one user's.
const LEAST: usize = 8;

struct Guest {
    uid: u32,
    has_spoken: bool,
    /// When the guest's time is over, monotonic ns.
    until: u64,
}

/// The open guests.
pub(super) struct Guests {
    /// By channel id, so that the oldest guest is first.
    all: BTreeMap<u64, Guest>,
    most: usize,
}

impl Guests {
    /// Returns an empty account, for a process that may have `descriptors` descriptors.
    pub fn new(descriptors: u64) -> Self {
        let most = usize::try_from(descriptors / DESCRIPTORS).unwrap_or(MOST);
        Self {
            all: BTreeMap::new(),
            most: most.clamp(LEAST, MOST),
        }
    }

    /// Adds the channel `id` as a guest; ids only grow, so it is the newest. Returns the guest that has to be closed to
    /// make room, `None` if there is room. If `uid` has reached its share, that is one of `uid`'s guests; else one of
    /// the user with the most.
    pub fn admit(&mut self, id: u64, uid: u32, now: u64) -> Option<u64> {
        let leaves = if self.count(uid) >= (self.most / SHARE).max(LEAST) {
            self.first_of(uid)
        } else if self.all.len() >= self.most {
            let most = self.all.values().map(|g| g.uid).max_by_key(|uid| self.count(*uid));
            most.and_then(|uid| self.first_of(uid))
        } else {
            None
        };
        if let Some(leaves) = leaves {
            self.all.remove(&leaves);
        }
        let guest = Guest {
            uid,
            has_spoken: false,
            until: now + SILENT_FOR,
        };
        self.all.insert(id, guest);
        leaves
    }

    fn count(&self, uid: u32) -> usize {
        self.all.values().filter(|g| g.uid == uid).count()
    }

    /// Returns the user's oldest guest that has sent nothing, else the user's oldest guest.
    fn first_of(&self, uid: u32) -> Option<u64> {
        let of = |has_spoken| {
            let mut of = self
                .all
                .iter()
                .filter(move |(_, g)| g.uid == uid && g.has_spoken == has_spoken);
            of.next().map(|(id, _)| *id)
        };
        of(false).or_else(|| of(true))
    }

    /// Notes that a message has come over the channel.
    pub fn on_word(&mut self, id: u64, now: u64) {
        if let Some(guest) = self.all.get_mut(&id) {
            guest.has_spoken = true;
            guest.until = now + IDLE_FOR;
        }
    }

    /// Removes a channel that is closed, or has become a link's.
    pub fn on_gone(&mut self, id: u64) {
        self.all.remove(&id);
    }

    /// Returns the oldest guest, which is closed when no descriptor is left.
    pub fn first(&self) -> Option<u64> {
        self.all.keys().next().copied()
    }

    /// Returns the guests whose time is over.
    pub fn overdue(&self, now: u64) -> Vec<u64> {
        let overdue = self.all.iter().filter(|(_, g)| g.until <= now);
        overdue.map(|(id, _)| *id).collect()
    }

    /// Returns when the next guest's time is over, monotonic ns; `None` without guests.
    pub fn next_timeout(&self) -> Option<u64> {
        self.all.values().map(|g| g.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_with_too_many_loses_his_own_the_silent_first() {
        let mut guests = Guests::new(2048);
        assert_eq!(guests.most, 256);
        assert_eq!(guests.admit(1, 7, 0), None);
        for id in 2..66 {
            assert_eq!(guests.admit(id, 5, 0), None);
        }
        guests.on_word(2, 0);
        assert_eq!(guests.admit(66, 5, 0), Some(3));
        assert_eq!(guests.admit(67, 7, 0), None);
    }

    #[test]
    fn of_many_users_those_with_few_keep_theirs() {
        let mut guests = Guests::new(u64::MAX);
        assert_eq!(guests.admit(0, 0, 0), None);
        let mut gone = Vec::new();
        for id in 1..2000 {
            gone.extend(guests.admit(id, 1 + id as u32 % 40, 0));
        }
        assert_eq!(guests.all.len(), 256);
        assert!(!gone.contains(&0));
    }

    #[test]
    fn few_descriptors_are_few_guests() {
        let mut guests = Guests::new(64);
        let gone: Vec<_> = (0..20).filter_map(|id| guests.admit(id, 0, 0)).collect();
        assert_eq!(gone, (0..12).collect::<Vec<u64>>());
    }

    #[test]
    fn who_says_nothing_has_less_time() {
        let mut guests = Guests::new(2048);
        guests.admit(1, 0, 0);
        guests.admit(2, 0, 0);
        guests.on_word(2, 1);
        assert_eq!(guests.next_timeout(), Some(SILENT_FOR));
        assert_eq!(guests.overdue(SILENT_FOR), [1]);
        guests.on_gone(1);
        assert_eq!(guests.overdue(1 + IDLE_FOR), [2]);
        guests.on_gone(2);
        assert_eq!((guests.first(), guests.next_timeout()), (None, None));
    }
}
