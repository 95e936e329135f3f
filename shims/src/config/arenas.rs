//! Keeps the registrations of memory that comes from the registered allocator (`alloc/`, docs/design/allocator.md): a
//! malloc for memory that devices access. That memory consists of *pieces*. To *register* a piece with a link's device
//! takes time, and gives the key by which the device accesses the piece. So a registration is not ended with the call
//! that has made it: later calls use it until the piece changes. `objects/pinned.rs` makes and uses registrations. A
//! [`Budget`] bounds how many bytes are registered at a time.
//!
//! Each piece has an *epoch*, a number that the allocator changes before anything happens to the piece's memory.
//! Registrations are kept with the epoch in which they were made. A call reads the epoch first, so it never uses a
//! registration from before a change. As a rule the allocator ends such registrations ([`Pieces::end`]). A later call
//! that finds one left ends it too.

use std::ffi::c_long;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};

use rdmasock_core::allocator::{ABI, End, Entry, Piece, Table, WHOLE};
use rdmasock_core::fabric::remote::qp::{Key, Region};
use rdmasock_core::lock::Lock;
use rustix::process::{Resource, getrlimit};

use crate::config::{Alloc, config, warn};

/// The most pieces that are kept.
const MOST: usize = 4096;

/// The unit in which the kernel counts locked memory, bytes.
pub(crate) const PAGE: u64 = 4096;

/// The allocator's table; null until the allocator is found.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

/// Looks for the allocator among the libraries of the process, and registers `end` with it. Returns false if the
/// allocator is not loaded, or is of another version.
pub(crate) fn find(end: End) -> bool {
    // SAFETY: the name ends in a NUL.
    let entry = unsafe { libc::dlsym(libc::RTLD_DEFAULT, rdmasock_core::allocator::ENTRY.as_ptr()) };
    if entry.is_null() {
        return false;
    }
    // SAFETY: the allocator exports this name with this type. The table that it returns lives as long as the process.
    let table = unsafe {
        let entry = std::mem::transmute::<*mut libc::c_void, Entry>(entry);
        entry(ABI)
    };
    // SAFETY: null, or a table that lives as long as the process.
    let Some(known) = (unsafe { table.as_ref() }) else {
        return false;
    };
    if known.abi != ABI || (known.size as usize) < size_of::<Table>() {
        return false;
    }
    // SAFETY: the allocator's function accepts any `End`, and its table has this version.
    unsafe { (known.attach)(end) };
    TABLE.store(table.cast_mut(), Release);
    true
}

/// Warns on stderr, once, if the user has asked for the allocator and it is not loaded.
pub(crate) fn warn_if_missing() {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    let is_missing = config().alloc == Alloc::Registered && table().is_none();
    if is_missing && !IS_SAID.swap(true, Relaxed) {
        warn(
            "RDMASOCK_ALLOC=registered, but librdmasock_alloc.so (of this version) is not preloaded, so malloc is as it \
             was; use `rdmasock run`, or LD_PRELOAD=\"librdmasock.so librdmasock_alloc.so\" with their paths",
        );
    }
}

fn table() -> Option<&'static Table> {
    // SAFETY: null, or a table that lives as long as the process.
    unsafe { TABLE.load(Acquire).as_ref() }
}

/// Notifies the allocator of a system call by number that the program is about to make, and that may change memory
/// mappings.
pub(crate) fn before(number: c_long, arguments: [usize; 6]) {
    if let Some(table) = table() {
        // SAFETY: the allocator's function, with a number and a pointer to six arguments.
        unsafe { (table.before)(number, &arguments) };
    }
}

/// Returns the piece that an address lies in; `None` if it lies in none, or there is no allocator.
fn piece(at: usize) -> Option<Piece> {
    let table = table()?;
    let mut piece = Piece {
        start: 0,
        len: 0,
        epoch: std::ptr::null(),
    };
    // SAFETY: the allocator's function, with an address and a valid place for the piece.
    let is_one = unsafe { (table.piece)(at, &mut piece) } != 0;
    is_one.then_some(piece)
}

/// The device of a link, with which memory is registered.
pub(crate) trait Device: Sync {
    /// Ends a registration, if the device still exists. Otherwise its registrations have ended with it.
    fn deregister(&self, region: Region);
}

/// Returns whether a registration of the memory at this address may last for longer than a call.
pub(crate) fn is_kept(at: usize) -> bool {
    piece(at).is_some_and(|piece| piece.now() & WHOLE != 0)
}

/// A registration of a piece with a device.
pub(crate) struct Known {
    device: &'static dyn Device,
    region: Region,
    /// The number of bytes that the registration takes of the budget.
    cost: u64,
}

impl Known {
    /// Ends all `registrations`. Returns how many bytes of the budget have come free.
    pub(crate) fn end_all(registrations: Vec<Self>) -> u64 {
        let each = registrations.into_iter();
        each.map(|known| {
            known.device.deregister(known.region);
            known.cost
        })
        .sum()
    }

    fn is_of(&self, device: &dyn Device) -> bool {
        std::ptr::addr_eq(self.device, device)
    }
}

fn key_in(known: &[Known], device: &dyn Device) -> Option<Key> {
    let known = known.iter().find(|known| known.is_of(device));
    known.map(|known| known.region.key)
}

/// A piece in one of its epochs, with its registrations. A call uses it as long as it holds a reference besides the one
/// in `Pieces`.
pub(crate) struct Kept {
    start: usize,
    len: usize,
    epoch: u64,
    /// The time of the last use by a call, in counts of [`Pieces::clock`].
    used: AtomicU64,
    known: Lock<Vec<Known>>,
}

impl Kept {
    /// Returns the beginning of the piece and its bytes.
    pub(crate) fn memory(&self) -> (*mut u8, usize) {
        (std::ptr::with_exposed_provenance_mut(self.start), self.len)
    }

    /// Returns the key by which the device knows the piece; `None` if it does not.
    pub(crate) fn key(&self, device: &dyn Device) -> Option<Key> {
        key_in(&self.known.lock()?, device)
    }

    /// Adds a new registration with a device to the list. After `Err` the caller has to end its registration.
    /// `Err(Some)` has the key of a registration with the device that another call has added meanwhile. `Err(None)`
    /// means that the caller is a signal handler, which has interrupted a change of the list.
    pub(crate) fn keep(&self, device: &'static dyn Device, region: Region, cost: u64) -> Result<(), Option<Key>> {
        let mut known = self.known.lock().ok_or(None)?;
        if let Some(key) = key_in(&known, device) {
            return Err(Some(key));
        }
        known.push(Known { device, region, cost });
        Ok(())
    }

    /// Removes the registrations with `device` from the list and returns them. They have not ended yet.
    pub(crate) fn take_of(&self, device: &dyn Device) -> Vec<Known> {
        self.take(|known| known.is_of(device))
    }

    fn take(&self, which: impl Fn(&Known) -> bool) -> Vec<Known> {
        let known = self.known.lock();
        known.map_or_else(Vec::new, |mut known| {
            known.extract_if(.., |known| which(known)).collect()
        })
    }
}

/// Releases a reference to a piece. The last release ends the piece's registrations. Returns how many bytes of the
/// budget have come free.
pub(crate) fn leave(kept: Arc<Kept>) -> u64 {
    Arc::into_inner(kept).map_or(0, |kept| Known::end_all(kept.take(|_| true)))
}

/// The kept pieces, and the registrations of each.
pub(crate) struct Pieces {
    /// Sorted by start address, with one entry for each piece.
    kept: Lock<Vec<Arc<Kept>>>,
    /// The number of calls of `covering` so far, as a clock for the order of use.
    clock: AtomicU64,
}

impl Pieces {
    /// Returns an empty table.
    pub(crate) const fn new() -> Self {
        Self {
            kept: Lock::new(Vec::new()),
            clock: AtomicU64::new(0),
        }
    }

    /// Returns the piece in which these bytes begin, how many of the bytes lie in it, and how many bytes of the budget
    /// have come free. The piece's registrations last as long as the reference. `None` if the memory is not the
    /// allocator's, or its registrations must not outlast a call.
    pub(crate) fn covering(&self, start: usize, len: usize) -> Option<(Arc<Kept>, usize, u64)> {
        let piece = piece(start)?;
        // The epoch is read before the caller registers the piece. If the piece changes in between, its epoch does too,
        // and the registration is not used again.
        let epoch = piece.now();
        if epoch & WHOLE == 0 {
            return None;
        }
        let within = len.min(piece.start.checked_add(piece.len)?.checked_sub(start)?);
        let (kept, stale) = self.under(piece.start, piece.len, epoch)?;
        Some((kept, within, stale.map_or(0, leave)))
    }

    /// Returns the entry of a piece in an epoch, and the entry that was removed from the table in exchange, if any.
    fn under(&self, start: usize, len: usize, epoch: u64) -> Option<(Arc<Kept>, Option<Arc<Kept>>)> {
        let used = self.clock.fetch_add(1, Relaxed);
        let mut all = self.kept.lock()?;
        let place = all.binary_search_by_key(&start, |kept| kept.start);
        if let Ok(at) = place
            && let Some(known) = all.get(at).filter(|known| known.epoch == epoch)
        {
            known.used.store(used, Relaxed);
            return Some((Arc::clone(known), None));
        }
        let fresh = Arc::new(Kept {
            start,
            len,
            epoch,
            used: AtomicU64::new(used),
            known: Lock::new(Vec::new()),
        });
        let stale = match place {
            Ok(at) => Some(std::mem::replace(all.get_mut(at)?, Arc::clone(&fresh))),
            Err(at) => {
                let is_full = all.len() >= MOST;
                all.insert(at, Arc::clone(&fresh));
                if is_full { take_oldest(&mut all) } else { None }
            }
        };
        Some((fresh, stale))
    }

    /// Ends the registrations that were unused for longest, until `wanted` bytes of the budget have come free or all
    /// other pieces are in use. Returns how many bytes have come free.
    pub(crate) fn make_room(&self, wanted: u64) -> u64 {
        let mut free = 0;
        while free < wanted {
            let oldest = self.kept.lock().and_then(|mut all| take_oldest(&mut all));
            let Some(oldest) = oldest else { break };
            free += leave(oldest);
        }
        free
    }

    /// Ends the registrations of memory that is about to be replaced, with `force` as in [`End`]. Returns how many
    /// bytes of the budget have come free; `None` if nothing has ended, because a call uses some of the memory and
    /// `force` is false, or because the caller is a signal handler that has interrupted a change of the table.
    pub(crate) fn end(&self, start: usize, len: usize, force: bool) -> Option<u64> {
        let end = start.saturating_add(len);
        let taken: Vec<Arc<Kept>> = {
            let mut all = self.kept.lock()?;
            let touches = |kept: &Arc<Kept>| kept.start < end && kept.start + kept.len > start;
            let is_used = |kept: &Arc<Kept>| Arc::strong_count(kept) > 1;
            if !force && all.iter().any(|kept| touches(kept) && is_used(kept)) {
                return None;
            }
            all.extract_if(.., |kept| touches(kept)).collect()
        };
        Some(taken.into_iter().map(leave).sum())
    }

    /// Forgets the registrations with a device. The device is about to end, and its registrations end with it. Returns
    /// how many bytes of the budget have come free.
    pub(crate) fn forget(&self, device: &dyn Device) -> u64 {
        self.kept.lock().map_or(0, |all| {
            let known = all.iter().flat_map(|kept| kept.take_of(device));
            known.map(|known| known.cost).sum()
        })
    }
}

/// Removes the entry that was unused for longest from `all`, and returns it. `None` if all entries are in use.
fn take_oldest(all: &mut Vec<Arc<Kept>>) -> Option<Arc<Kept>> {
    let unused = all.iter().enumerate().filter(|(_, kept)| Arc::strong_count(kept) == 1);
    let (at, _) = unused.min_by_key(|(_, kept)| kept.used.load(Relaxed))?;
    Some(all.remove(at))
}

/// The number of bytes of the program's memory that are registered, over all links. The kernel locks such pages in
/// memory. It counts them, like the pages of rings, against the limit on locked memory. So at most half of the limit is
/// used for them, and the other half is left for the rings of later links.
#[derive(Default)]
pub(crate) struct Budget(AtomicU64);

/// Returns half of the limit on locked memory, bytes; `u64::MAX` without a limit. The program may change the limit at
/// any time.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::Memlock).current.map_or(u64::MAX, |limit| limit / 2)
}

impl Budget {
    /// Takes up to `wanted` bytes of `limit`. Also takes two pages, because the memory may begin and end within a page.
    /// Returns how many bytes may be registered, and the cost to pass to [`give_back`](Self::give_back). `None` if
    /// fewer than `least` bytes are left.
    pub(crate) fn take(&self, wanted: usize, least: usize, limit: u64) -> Option<(usize, u64)> {
        let edges = 2 * PAGE;
        let mut len = 0;
        let taken = self.0.fetch_update(Relaxed, Relaxed, |taken| {
            let free = limit.checked_sub(taken)?.checked_sub(edges)?;
            len = wanted.min(usize::try_from(free).unwrap_or(usize::MAX));
            (len >= least).then(|| taken + len as u64 + edges)
        });
        taken.ok().map(|_| (len, len as u64 + edges))
    }

    /// Takes `bytes` bytes of `limit`, which are whole pages. Returns the cost to pass to
    /// [`give_back`](Self::give_back); `None` if fewer bytes are left.
    pub(crate) fn take_pages(&self, bytes: u64, limit: u64) -> Option<u64> {
        let with = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= limit);
        self.0.fetch_update(Relaxed, Relaxed, with).ok().map(|_| bytes)
    }

    /// Gives back the bytes that a registration has taken.
    pub(crate) fn give_back(&self, cost: u64) {
        self.0.fetch_sub(cost, Relaxed);
    }
}

#[cfg(test)]
mod tests;
