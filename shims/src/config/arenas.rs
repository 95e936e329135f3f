//! What devices know of the registered allocator's memory (`alloc/`, docs/design/allocator.md): by which key a link's
//! device knows which piece, kept from call to call for as long as the piece is what it was. Not what calls do with it
//! (`pinned.rs`).
//!
//! What is kept of a piece is kept under its epoch, which the allocator changes before anything happens to the memory.
//! A call that begins looks at the epoch first, so it never uses what was registered before a change; whoever finds
//! such registrations ends them, the allocator's word ([`Pieces::end`]) as a rule.

use std::ffi::c_long;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::allocator::{ABI, End, Entry, Piece, Table, WHOLE};
use rdmasock_core::fabric::remote::qp::{Key, Region};
use rdmasock_core::lock::Lock;

use crate::config::{Alloc, config, warn};

/// More pieces are not kept.
const MOST: usize = 4096;

/// The allocator's table; null without it.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

/// Looks for the allocator among the libraries of the process; it will call `end`. False if it is not there, or of
/// another version.
pub fn find(end: End) -> bool {
    // SAFETY: a name that ends with a zero byte.
    let entry = unsafe { libc::dlsym(libc::RTLD_DEFAULT, rdmasock_core::allocator::ENTRY.as_ptr()) };
    if entry.is_null() {
        return false;
    }
    // SAFETY: the function of that name is of this type, and the table that it gives lives as long as the process.
    let table = unsafe {
        let entry = std::mem::transmute::<*mut libc::c_void, Entry>(entry);
        entry(ABI)
    };
    // SAFETY: as above.
    let Some(known) = (unsafe { table.as_ref() }) else {
        return false;
    };
    if known.abi != ABI || (known.size as usize) < size_of::<Table>() {
        return false;
    }
    // SAFETY: a function of the allocator's.
    unsafe { (known.attach)(end) };
    TABLE.store(table.cast_mut(), Release);
    true
}

/// Says so, once, if the user has asked for the allocator and does not have it.
pub fn warn_if_missing() {
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

/// The program makes a system call by number that may change what memory is.
pub fn before(number: c_long, arguments: [usize; 6]) {
    if let Some(table) = table() {
        // SAFETY: a function of the allocator's, with what it takes.
        unsafe { (table.before)(number, &arguments) };
    }
}

/// The piece that an address lies in.
fn piece(at: usize) -> Option<Piece> {
    let table = table()?;
    let mut piece = Piece {
        start: 0,
        len: 0,
        epoch: std::ptr::null(),
    };
    // SAFETY: a function of the allocator's, with what it takes.
    let is_one = unsafe { (table.piece)(at, &mut piece) } != 0;
    is_one.then_some(piece)
}

/// What registers memory: a link's device.
pub trait Device: Sync {
    /// Ends a registration, if the device is still there: its end is theirs.
    fn deregister(&self, region: Region);
}

/// Whether devices may know the memory at this address for longer than a call.
pub fn is_kept(at: usize) -> bool {
    piece(at).is_some_and(|piece| piece.now() & WHOLE != 0)
}

/// A registration of a piece with a device.
pub struct Known {
    device: &'static dyn Device,
    region: Region,
    /// What it takes of the budget, bytes.
    cost: u64,
}

impl Known {
    /// Ends all of them; returns what they took of the budget.
    pub fn end_all(registrations: Vec<Self>) -> u64 {
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

/// A piece under one of its epochs. It is in use while a call has it beside the table.
pub struct Kept {
    start: usize,
    len: usize,
    epoch: u64,
    /// When a call last used it, by [`Pieces::clock`].
    used: AtomicU64,
    known: Lock<Vec<Known>>,
}

impl Kept {
    /// Where the piece begins, and its bytes.
    pub fn memory(&self) -> (*mut u8, usize) {
        (std::ptr::with_exposed_provenance_mut(self.start), self.len)
    }

    /// By which key the device knows the piece, if it does.
    pub fn key(&self, device: &dyn Device) -> Option<Key> {
        key_in(&self.known.lock()?, device)
    }

    /// The device knows it from now on; `Err`: another call has told it meanwhile, and this registration is one too
    /// many.
    pub fn keep(&self, device: &'static dyn Device, region: Region, cost: u64) -> Result<(), Option<Key>> {
        let mut known = self.known.lock().ok_or(None)?;
        if let Some(key) = key_in(&known, device) {
            return Err(Some(key));
        }
        known.push(Known { device, region, cost });
        Ok(())
    }

    /// Takes out its registrations with that device, to be ended.
    pub fn take_of(&self, device: &dyn Device) -> Vec<Known> {
        self.take(|known| known.is_of(device))
    }

    fn take(&self, which: impl Fn(&Known) -> bool) -> Vec<Known> {
        let known = self.known.lock();
        known.map_or_else(Vec::new, |mut known| {
            known.extract_if(.., |known| which(known)).collect()
        })
    }
}

/// Somebody has it no more: if that was the last, its registrations end. Gives what they took of the budget, which
/// is their bytes.
pub fn leave(kept: Arc<Kept>) -> u64 {
    Arc::into_inner(kept).map_or(0, |kept| Known::end_all(kept.take(|_| true)))
}

/// See the module.
pub struct Pieces {
    /// By their beginnings; one for each piece.
    kept: Lock<Vec<Arc<Kept>>>,
    /// How often pieces were asked for.
    clock: AtomicU64,
}

impl Pieces {
    /// Nothing is known yet.
    pub const fn new() -> Self {
        Self {
            kept: Lock::new(Vec::new()),
            clock: AtomicU64::new(0),
        }
    }

    /// The piece in which these bytes begin, how many of them lie in it, and what has come free of the budget. It stays
    /// as long as the value. `None` if it is not the allocator's, or is not to be known to devices.
    pub fn covering(&self, start: usize, len: usize) -> Option<(Arc<Kept>, usize, u64)> {
        let piece = piece(start)?;
        // First: what is registered later is what the piece is under this epoch, or is not used again.
        let epoch = piece.now();
        if epoch & WHOLE == 0 {
            return None;
        }
        let within = len.min(piece.start.checked_add(piece.len)?.checked_sub(start)?);
        let (kept, stale) = self.under(piece.start, piece.len, epoch)?;
        Some((kept, within, stale.map_or(0, leave)))
    }

    /// What is kept of a piece under an epoch, and what takes its place in the table no more.
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

    /// Ends what has not been used for longest, until so much of the budget has come free, or all that is left is in
    /// use. Gives how much has.
    pub fn make_room(&self, wanted: u64) -> u64 {
        let mut free = 0;
        while free < wanted {
            let oldest = self.kept.lock().and_then(|mut all| take_oldest(&mut all));
            let Some(oldest) = oldest else { break };
            free += leave(oldest);
        }
        free
    }

    /// This memory is about to be other memory, see [`End`]. Gives what has come free of the budget; `None` if
    /// devices may still know some of it.
    pub fn end(&self, start: usize, len: usize, force: bool) -> Option<u64> {
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

    /// The device is about to be no more, and its registrations with it. Gives what they took of the budget.
    pub fn forget(&self, device: &dyn Device) -> u64 {
        self.kept.lock().map_or(0, |all| {
            let known = all.iter().flat_map(|kept| kept.take_of(device));
            known.map(|known| known.cost).sum()
        })
    }
}

/// Of those that nobody uses.
fn take_oldest(all: &mut Vec<Arc<Kept>>) -> Option<Arc<Kept>> {
    let unused = all.iter().enumerate().filter(|(_, kept)| Arc::strong_count(kept) == 1);
    let (at, _) = unused.min_by_key(|(_, kept)| kept.used.load(Relaxed))?;
    Some(all.remove(at))
}

#[cfg(test)]
mod tests;
