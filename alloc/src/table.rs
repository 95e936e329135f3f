//! What the library asks (`rdmasock_core::allocator`).

use core::ffi::{c_int, c_long};

use rdmasock_core::allocator::{ABI, End, Piece, Table};

use crate::arena::PIECE;
use crate::{arenas, changes};

static TABLE: Table = Table {
    abi: ABI,
    size: size_of::<Table>() as u32,
    piece,
    before,
    attach,
};

/// [`Entry`](rdmasock_core::allocator::Entry).
pub fn table(abi: u32) -> *const Table {
    if abi == ABI {
        &raw const TABLE
    } else {
        core::ptr::null()
    }
}

unsafe extern "C" fn piece(at: usize, out: *mut Piece) -> c_int {
    let found = arenas::of(at).and_then(|arena| arena.piece(at));
    let (Some((start, epoch)), false) = (found, out.is_null()) else {
        return 0;
    };
    // SAFETY: the caller's, by the table's contract.
    unsafe {
        out.write(Piece {
            start,
            len: PIECE,
            epoch,
        });
    }
    1
}

unsafe extern "C" fn before(number: c_long, arguments: *const [usize; 6]) {
    // SAFETY: the caller's.
    if let Some(arguments) = unsafe { arguments.as_ref() } {
        changes::before(number, arguments);
    }
}

unsafe extern "C" fn attach(end: End) {
    arenas::attach(end);
}
