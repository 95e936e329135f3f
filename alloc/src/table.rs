//! The table of functions that the main library calls (`rdmasock_core::allocator`).

use core::ffi::{c_int, c_long};

use rdmasock_core::allocator::{ABI, End, Piece, Table};

use crate::arena::PIECE;
use crate::{arenas, changes};

/// The table of functions.
pub(crate) static TABLE: Table = Table {
    abi: ABI,
    size: size_of::<Table>() as u32,
    piece,
    before,
    attach,
};

unsafe extern "C" fn piece(at: usize, out: *mut Piece) -> c_int {
    let found = arenas::of(at).and_then(|arena| arena.piece(at));
    let (Some((start, epoch)), false) = (found, out.is_null()) else {
        return 0;
    };
    // SAFETY: by the table's contract `out` is valid for a write.
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
    // SAFETY: by the table's contract `arguments` is null or valid for reads.
    if let Some(arguments) = unsafe { arguments.as_ref() } {
        changes::before(number, arguments);
    }
}

unsafe extern "C" fn attach(end: End) {
    arenas::attach(end);
}
