//! Memory that the program has registered ahead (`rdmasock_register`): which it is, for what, and by what the devices
//! of links know it. A device hears of a range when a link first uses it, and of its end when the program or the link
//! says so. Not what calls do with it (`pinned.rs`).

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rdmasock_core::fabric::remote::qp::{Key, Region, Role};
use rdmasock_core::lock::{Guard, Lock};

/// `RDMASOCK_SENT_FROM` and `RDMASOCK_RECEIVED_INTO`.
pub const SENT_FROM: c_int = 1;
pub const RECEIVED_INTO: c_int = 2;

/// More ranges are not kept.
const MOST: usize = 1024;

/// What registers memory: a link's device.
pub trait Device: Sync {
    /// Ends a registration, if the device is still there: its end is theirs.
    fn deregister(&self, region: Region);
}

/// A registration of a range.
pub struct Known {
    device: &'static dyn Device,
    role: Role,
    region: Region,
    /// What it takes of the budget, bytes.
    cost: u64,
}

impl Known {
    /// Ends all of them; gives what they took of the budget.
    pub fn end_all(registrations: Vec<Self>) -> u64 {
        let each = registrations.into_iter();
        each.map(|known| {
            known.device.deregister(known.region);
            known.cost
        })
        .sum()
    }

    /// What it takes of the budget.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    fn is_of(&self, device: &dyn Device) -> bool {
        std::ptr::addr_eq(self.device, device)
    }
}

fn find(known: &[Known], device: &dyn Device, role: Role) -> Option<Key> {
    let mut of_device = known.iter().filter(|known| known.is_of(device));
    of_device.find(|known| known.role == role).map(|known| known.region.key)
}

/// One range. It is in use by whoever has it beside the table.
pub struct Range {
    start: usize,
    len: usize,
    roles: c_int,
    known: Lock<Vec<Known>>,
}

impl Range {
    /// One that no device knows yet.
    pub fn new(start: usize, len: usize, roles: c_int) -> Self {
        Self {
            start,
            len,
            roles,
            known: Lock::new(Vec::new()),
        }
    }

    /// Where it begins, and its bytes.
    pub fn memory(&self) -> (*mut u8, usize) {
        (std::ptr::with_exposed_provenance_mut(self.start), self.len)
    }

    fn end(&self) -> usize {
        self.start + self.len
    }

    /// By what the device knows it, if it does.
    pub fn key(&self, device: &dyn Device, role: Role) -> Option<Key> {
        find(&self.known.lock()?, device, role)
    }

    /// The device knows it from now on; `Err`: it was told so meanwhile, and this is one too many.
    pub fn keep(&self, device: &'static dyn Device, role: Role, region: Region, cost: u64) -> Result<(), Option<Key>> {
        let mut known = self.known.lock().ok_or(None)?;
        if let Some(key) = find(&known, device, role) {
            return Err(Some(key));
        }
        known.push(Known {
            device,
            role,
            region,
            cost,
        });
        Ok(())
    }

    /// Its registrations with that device, to be ended.
    pub fn take_of(&self, device: &dyn Device) -> Vec<Known> {
        self.take(|known| known.is_of(device))
    }

    /// Takes out those registrations.
    pub fn take(&self, which: impl Fn(&Known) -> bool) -> Vec<Known> {
        let known = self.known.lock();
        known.map_or_else(Vec::new, |mut known| {
            known.extract_if(.., |known| which(known)).collect()
        })
    }
}

/// See the module.
pub struct Ahead {
    /// By their beginnings; none overlaps another.
    ranges: Lock<Vec<Arc<Range>>>,
    /// How many those are, for whoever would find none.
    count: AtomicUsize,
}

impl Ahead {
    pub const fn new() -> Self {
        Self {
            ranges: Lock::new(Vec::new()),
            count: AtomicUsize::new(0),
        }
    }

    fn lock(&self) -> Result<Guard<'_, Vec<Arc<Range>>>, c_int> {
        // In a signal handler, which may not come here.
        self.ranges.lock().ok_or(libc::EDEADLK)
    }

    /// One more range; `Err` is an errno.
    pub fn add(&self, start: usize, len: usize, roles: c_int) -> Result<(), c_int> {
        let end = start.checked_add(len).filter(|_| start > 0 && len > 0);
        let is_known = roles != 0 && roles & !(SENT_FROM | RECEIVED_INTO) == 0;
        let end = end.filter(|_| is_known).ok_or(libc::EINVAL)?;
        let mut ranges = self.lock()?;
        let at = ranges.partition_point(|range| range.end() <= start);
        if ranges.get(at).is_some_and(|next| next.start < end) {
            return Err(libc::EEXIST);
        }
        if ranges.len() >= MOST {
            return Err(libc::ENOMEM);
        }
        ranges.insert(at, Arc::new(Range::new(start, len, roles)));
        self.count.store(ranges.len(), Relaxed);
        Ok(())
    }

    /// The range that begins there is no more. Gives its registrations, to be ended; `Err` is an errno: EBUSY, a call
    /// uses it.
    pub fn remove(&self, start: usize) -> Result<Vec<Known>, c_int> {
        let mut ranges = self.lock()?;
        let at = ranges.binary_search_by_key(&start, |range| range.start);
        let at = at.map_err(|_| libc::EINVAL)?;
        let range = ranges.get_mut(at).ok_or(libc::EINVAL)?;
        if Arc::get_mut(range).is_none() {
            return Err(libc::EBUSY);
        }
        let range = ranges.remove(at);
        self.count.store(ranges.len(), Relaxed);
        Ok(range.take(|_| true))
    }

    /// The range that has all of this, if it is for that; it stays as long as the value.
    pub fn covering(&self, start: usize, len: usize, role: Role) -> Option<Arc<Range>> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        let needs = match role {
            Role::Source => SENT_FROM,
            Role::Target | Role::Sink => RECEIVED_INTO,
            // Memory is in these roles for a link's own ends, or for one call.
            Role::Both | Role::Offered | Role::OnDemand => return None,
        };
        let ranges = self.ranges.lock()?;
        let at = ranges.partition_point(|range| range.end() <= start);
        let range = ranges.get(at)?;
        let is_within = range.start <= start && start.checked_add(len)? <= range.end();
        (is_within && range.roles & needs != 0).then(|| Arc::clone(range))
    }

    /// The device is about to be no more, and its registrations with it. Gives what they took of the budget.
    pub fn forget(&self, device: &dyn Device) -> u64 {
        self.ranges.lock().map_or(0, |ranges| {
            let all = ranges.iter().flat_map(|range| range.take_of(device));
            all.map(|known| known.cost).sum()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Sums up what was deregistered.
    struct Counts(AtomicU64);

    impl Device for Counts {
        fn deregister(&self, region: Region) {
            self.0.fetch_add(region.handle, Relaxed);
        }
    }

    fn device() -> &'static Counts {
        Box::leak(Box::new(Counts(AtomicU64::new(0))))
    }

    /// Gives what it took of the budget.
    fn remove(ahead: &Ahead, start: usize) -> Result<u64, c_int> {
        ahead.remove(start).map(Known::end_all)
    }

    fn region(handle: u64) -> Region {
        let (local, remote) = (handle as u32, handle as u32 + 1);
        Region {
            key: Key { local, remote },
            handle,
        }
    }

    #[test]
    fn a_range_is_found_by_what_lies_within() {
        let ahead = Ahead::new();
        let both = SENT_FROM | RECEIVED_INTO;
        ahead.add(5000, 1000, both).unwrap();
        ahead.add(1000, 1000, SENT_FROM).unwrap();
        ahead.add(2000, 1000, RECEIVED_INTO).unwrap();
        let found = |start, len, role| ahead.covering(start, len, role).map(|range| range.start);
        assert_eq!(found(1000, 1000, Role::Source), Some(1000));
        assert_eq!(found(1000, 1001, Role::Source), None, "two ranges are not one");
        assert_eq!(found(1500, 1, Role::Target), None);
        assert_eq!(found(2999, 1, Role::Target), Some(2000));
        for role in [Role::Source, Role::Target] {
            assert_eq!(found(5999, 1, role), Some(5000));
            assert_eq!(found(4999, 2, role), None);
            assert_eq!(found(6000, 1, role), None);
            assert_eq!(found(5500, usize::MAX, role), None);
        }
    }

    #[test]
    fn what_is_no_range_is_refused() {
        let ahead = Ahead::new();
        for (start, len, roles) in [(0, 10, 1), (10, 0, 1), (10, usize::MAX, 1), (10, 10, 0), (10, 10, 4)] {
            assert_eq!(ahead.add(start, len, roles), Err(libc::EINVAL));
        }
        ahead.add(1000, 100, SENT_FROM).unwrap();
        for (start, len) in [(999, 2), (1000, 100), (1050, 1), (1099, 1), (900, 1000)] {
            assert_eq!(ahead.add(start, len, RECEIVED_INTO), Err(libc::EEXIST));
        }
        assert_eq!(remove(&ahead, 1001), Err(libc::EINVAL));
        assert_eq!(remove(&ahead, 1000), Ok(0));
        assert_eq!(remove(&ahead, 1000), Err(libc::EINVAL));
        for i in 1..=MOST {
            ahead.add(i * 10, 10, SENT_FROM).unwrap();
        }
        assert_eq!(ahead.add(1 << 30, 10, SENT_FROM), Err(libc::ENOMEM));
    }

    #[test]
    fn registrations_end_with_their_range_and_with_their_device() {
        let ahead = Ahead::new();
        let (a, b) = (device(), device());
        ahead.add(1000, 100, SENT_FROM | RECEIVED_INTO).unwrap();
        ahead.add(2000, 100, SENT_FROM).unwrap();
        let first = ahead.covering(1000, 100, Role::Source).unwrap();
        let second = ahead.covering(2000, 100, Role::Source).unwrap();
        first.keep(a, Role::Source, region(1), 10).unwrap();
        first.keep(a, Role::Target, region(10), 20).unwrap();
        first.keep(b, Role::Source, region(100), 30).unwrap();
        second.keep(a, Role::Source, region(1000), 40).unwrap();
        let again = first.keep(a, Role::Source, region(7), 1).unwrap_err();
        assert_eq!(again.map(|key| key.local), Some(1));
        assert_eq!(first.key(b, Role::Source).map(|key| key.local), Some(100));
        assert!(first.key(b, Role::Target).is_none());
        assert_eq!(remove(&ahead, 1000), Err(libc::EBUSY));
        drop(first);
        assert_eq!(remove(&ahead, 1000), Ok(60));
        assert_eq!((a.0.load(Relaxed), b.0.load(Relaxed)), (11, 100));
        // Also while it is in use: the link is over for whoever uses it.
        assert_eq!((ahead.forget(a), a.0.load(Relaxed)), (40, 11));
        assert!(second.key(a, Role::Source).is_none());
        drop(second);
        assert_eq!(remove(&ahead, 2000), Ok(0));
    }
}
