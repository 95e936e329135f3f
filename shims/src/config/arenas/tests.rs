use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::SeqCst;

use rdmasock_core::allocator::NEXT;

use crate::config::arenas::*;

const LEN: usize = 2 << 20;
/// The address at which the pieces of the tests begin. No test reads the memory there.
const START: usize = 1 << 40;
const PIECES: usize = 64;
const KIB: usize = 1024;

/// The epochs of the pieces. Each test has pieces of its own.
static EPOCHS: [AtomicU64; PIECES] = [const { AtomicU64::new(WHOLE) }; PIECES];

unsafe extern "C" fn piece_at(at: usize, out: *mut Piece) -> c_int {
    let Some(epoch) = at.checked_sub(START).and_then(|offset| EPOCHS.get(offset / LEN)) else {
        return 0;
    };
    // SAFETY: the caller passes a valid place for a piece.
    unsafe {
        out.write(Piece {
            start: at / LEN * LEN,
            len: LEN,
            epoch,
        });
    }
    1
}

unsafe extern "C" fn before_call(_: c_long, _: *const [usize; 6]) {}

unsafe extern "C" fn attach_end(_: End) {}

fn arenas() -> Pieces {
    static FAKE: OnceLock<Table> = OnceLock::new();
    let table = FAKE.get_or_init(|| Table {
        abi: ABI,
        size: size_of::<Table>() as u32,
        piece: piece_at,
        before: before_call,
        attach: attach_end,
    });
    TABLE.store(std::ptr::from_ref(table).cast_mut(), Release);
    Pieces::new()
}

/// A device that sums up the handles that were deregistered.
struct Counts(AtomicU64);

impl Device for Counts {
    fn deregister(&self, region: Region) {
        self.0.fetch_add(region.handle, Relaxed);
    }
}

fn device() -> &'static Counts {
    Box::leak(Box::new(Counts(AtomicU64::new(0))))
}

fn at(number: usize) -> usize {
    START + number * LEN
}

/// Makes a call that keeps a registration of the piece `number` with `device` under `handle`.
fn call(arenas: &Pieces, device: &'static Counts, number: usize, handle: u64) -> Arc<Kept> {
    let (kept, len, _) = arenas.covering(at(number) + 100, LEN).unwrap();
    assert_eq!(len, LEN - 100);
    let key = Key { local: 1, remote: 2 };
    kept.keep(device, Region { key, handle }, LEN as u64).unwrap();
    kept
}

fn is_known(arenas: &Pieces, device: &Counts, number: usize) -> bool {
    let (kept, _, _) = arenas.covering(at(number), 1).unwrap();
    let is_known = kept.key(device).is_some();
    assert_eq!(leave(kept), 0);
    is_known
}

#[test]
fn what_was_registered_under_another_epoch_is_not_used() {
    let (arenas, device) = (arenas(), device());
    assert_eq!(leave(call(&arenas, device, 0, 1)), 0, "the table has it");
    assert!(is_known(&arenas, device, 0));
    assert!(!is_known(&arenas, device, 1));
    EPOCHS[0].fetch_add(NEXT, SeqCst);
    let (kept, _, free) = arenas.covering(at(0), 10).unwrap();
    assert!(kept.key(device).is_none());
    assert_eq!(
        (free, device.0.load(Relaxed)),
        (LEN as u64, 1),
        "and ends, as nobody uses it"
    );
    EPOCHS[0].fetch_and(!WHOLE, SeqCst);
    assert!(arenas.covering(at(0), 10).is_none());
    assert!(arenas.covering(START - 1, 10).is_none(), "no piece at all");
    EPOCHS[0].fetch_or(WHOLE, SeqCst);
}

#[test]
fn a_piece_that_changes_under_a_call_is_the_call_s_to_its_end() {
    let (arenas, device) = (arenas(), device());
    let used = call(&arenas, device, 2, 1);
    assert_eq!(arenas.end(at(2), LEN, false), None, "a call uses it");
    assert!(is_known(&arenas, device, 2));
    EPOCHS[2].fetch_add(NEXT, SeqCst);
    assert_eq!(arenas.end(at(2) + 5, 1, true), Some(0));
    assert!(!is_known(&arenas, device, 2));
    assert_eq!(device.0.load(Relaxed), 0);
    assert!(used.key(device).is_some());
    assert_eq!((leave(used), device.0.load(Relaxed)), (LEN as u64, 1));
}

#[test]
fn no_device_knows_what_has_ended() {
    let (arenas, device) = (arenas(), device());
    for number in 4..8 {
        leave(call(&arenas, device, number, 1 << number));
    }
    assert_eq!(arenas.end(at(5), 2 * LEN, false), Some(2 * LEN as u64));
    assert_eq!(device.0.load(Relaxed), 1 << 5 | 1 << 6);
    assert!(is_known(&arenas, device, 4) && is_known(&arenas, device, 7));
    assert_eq!(arenas.end(at(5), 2 * LEN, false), Some(0));
    // The end of a device ends its registrations, without a call of `deregister`.
    assert_eq!(
        (arenas.forget(device), device.0.load(Relaxed)),
        (2 * LEN as u64, 1 << 5 | 1 << 6)
    );
    assert!(!is_known(&arenas, device, 4));
}

#[test]
fn what_was_not_used_for_longest_makes_room_and_what_is_used_stays() {
    let (arenas, device) = (arenas(), device());
    let used = call(&arenas, device, 10, 1);
    for number in 11..15 {
        leave(call(&arenas, device, number, 1 << number));
    }
    assert!(is_known(&arenas, device, 11));
    assert_eq!(arenas.make_room(LEN as u64 + 1), 2 * LEN as u64);
    assert_eq!(device.0.load(Relaxed), 1 << 12 | 1 << 13);
    assert_eq!(arenas.make_room(u64::MAX), 2 * LEN as u64);
    assert!(is_known(&arenas, device, 10));
    assert_eq!(leave(used), 0);
    assert_eq!(arenas.make_room(1), LEN as u64);
}

#[test]
fn no_more_is_taken_than_there_is() {
    let budget = Budget::default();
    let limit = 1024 * KIB as u64;
    let (first, first_cost) = budget.take(600 * KIB, 64 * KIB, limit).unwrap();
    assert_eq!((first, first_cost), (600 * KIB, 608 * KIB as u64));
    // The second call gets what is left of the limit, less two pages for the edges of its memory.
    let (second, second_cost) = budget.take(600 * KIB, 64 * KIB, limit).unwrap();
    assert_eq!(second, 1024 * KIB - 608 * KIB - 8 * KIB);
    assert_eq!(budget.take(4 * KIB, 4 * KIB, limit), None);
    budget.give_back(first_cost);
    assert_eq!(budget.take(700 * KIB, 601 * KIB, limit), None);
    assert_eq!(budget.take(700 * KIB, 600 * KIB, limit).unwrap().0, 600 * KIB);
    budget.give_back(first_cost);
    budget.give_back(second_cost);
    assert_eq!(budget.0.into_inner(), 0);
}

#[test]
fn there_may_be_nothing_and_no_limit() {
    let budget = Budget::default();
    for limit in [0, 4096, 8192] {
        assert_eq!(budget.take(100_000, 1, limit), None);
    }
    assert_eq!(budget.take(1 << 30, 1, u64::MAX).unwrap().0, 1 << 30);
    // The limit was lowered meanwhile, below the bytes that are taken.
    assert_eq!(budget.take(1, 1, 8192), None);
}
