use proptest::prelude::*;

use super::*;
use crate::arenas::tests::ONE;
use crate::changes;

/// A block that a test has allocated. All its bytes have the value `tag`.
struct Held {
    at: *mut c_void,
    len: usize,
    tag: u8,
}

impl Held {
    fn new(at: *mut c_void, len: usize, align: usize, tag: u8) -> Self {
        assert!(!at.is_null() && at.addr().is_multiple_of(align));
        // SAFETY: the block is the test's own.
        unsafe {
            assert!(malloc_usable_size(at) >= len);
            at.cast::<u8>().write_bytes(tag, len);
        }
        Self { at, len, tag }
    }

    fn is_whole(&self, len: usize) -> bool {
        // SAFETY: the block is the test's own.
        let bytes = unsafe { std::slice::from_raw_parts(self.at.cast::<u8>(), len) };
        bytes.iter().all(|byte| *byte == self.tag)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Malloc(usize),
    Calloc(usize),
    Align(u32, usize),
    Realloc(prop::sample::Index, usize),
    Free(prop::sample::Index),
}

fn ops() -> impl Strategy<Value = Op> {
    // Small sizes, sizes around the smallest large block, large sizes, and sizes of several pieces.
    let size = prop_oneof![
        0_usize..5000,
        (LARGE - 100)..(LARGE + 100),
        LARGE..300_000,
        1_000_000_usize..6_000_000
    ];
    let of = any::<prop::sample::Index>();
    prop_oneof![
        size.clone().prop_map(Op::Malloc),
        size.clone().prop_map(Op::Calloc),
        (3_u32..23, size.clone()).prop_map(|(shift, size)| Op::Align(shift, size)),
        (of.clone(), size).prop_map(|(of, size)| Op::Realloc(of, size)),
        of.prop_map(Op::Free),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn what_is_in_a_block_is_the_program_s(ops in prop::collection::vec(ops(), 1..40)) {
        let mut held: Vec<Held> = Vec::new();
        let _one = ONE.lock();
        // SAFETY: the test owns the blocks, and frees each once.
        unsafe {
            for (n, op) in ops.into_iter().enumerate() {
                let tag = n as u8 + 1;
                match op {
                    Op::Malloc(len) => held.push(Held::new(malloc(len), len, 16, tag)),
                    Op::Calloc(len) => {
                        let at = calloc(len, 1);
                        let zeroes = Held { at, len, tag: 0 };
                        prop_assert!(zeroes.is_whole(len));
                        held.push(Held::new(at, len, 16, tag));
                    }
                    Op::Align(shift, len) => {
                        let align = 1 << shift;
                        let mut at = null_mut();
                        prop_assert_eq!(posix_memalign(&mut at, align, len), 0);
                        held.push(Held::new(at, len, align, tag));
                        held.push(Held::new(memalign(align, len), len, align, tag));
                        held.push(Held::new(aligned_alloc(align, len), len, align, tag));
                    }
                    Op::Realloc(which, len) if !held.is_empty() => {
                        let index = which.index(held.len());
                        let old = held.swap_remove(index);
                        if len == 0 {
                            prop_assert!(realloc(old.at, 0).is_null());
                            continue;
                        }
                        let at = realloc(old.at, len);
                        prop_assert!(!at.is_null());
                        let kept = Held { at, len, tag: old.tag };
                        prop_assert!(kept.is_whole(len.min(old.len)));
                        held.push(Held::new(at, len, 16, tag));
                    }
                    Op::Free(which) if !held.is_empty() => {
                        let old = held.swap_remove(which.index(held.len()));
                        prop_assert!(old.is_whole(old.len));
                        free(old.at);
                    }
                    Op::Realloc(..) | Op::Free(_) => {}
                }
                prop_assert!(held.iter().all(|block| block.is_whole(block.len)));
            }
            held.iter().for_each(|block| free(block.at));
        }
    }
}

#[test]
fn what_cannot_be_is_refused_as_by_libc() {
    let mut at = std::ptr::dangling_mut::<c_void>();
    let before = at;
    // SAFETY: as in C.
    unsafe {
        for len in [usize::MAX, usize::MAX - 5000, 1 << 62] {
            assert!(malloc(len).is_null() && *errno() == libc::ENOMEM);
            assert!(calloc(len, 2).is_null() && realloc(null_mut(), len).is_null());
            assert!(pvalloc(len).is_null() && reallocarray(null_mut(), len, 3).is_null());
        }
        for align in [0, 1, 3, 4, 24, 1000] {
            assert_eq!(posix_memalign(&mut at, align, 100_000), libc::EINVAL);
            assert_eq!(at, before);
        }
        *errno() = 77;
        free(null_mut());
        free(malloc(200_000));
        assert_eq!(*errno(), 77);
        assert_eq!(malloc_usable_size(null_mut()), 0);
    }
}

#[test]
fn early_memory_is_told_apart() {
    // A thread of another test may be looking the next allocator up. Until that allocator is known, requests get early
    // memory.
    while !next::is_known() {
        std::thread::yield_now();
    }
    let first = next::early(100, 1);
    let second = next::early(10, 64);
    assert_eq!(second.addr() % 64, 0);
    assert_eq!(next::early_size(first), Some(100));
    assert_eq!(next::early_size(second), Some(10));
    assert!(next::early(usize::MAX - 100, 1).is_null());
    // SAFETY: these functions accept blocks of early memory, as they accept blocks of malloc.
    unsafe {
        first.cast::<u8>().write_bytes(9, 100);
        let moved = realloc(first, 200);
        assert!(
            Held {
                at: moved,
                len: 200,
                tag: 9
            }
            .is_whole(100)
        );
        assert!(next::early_size(moved).is_none());
        free(moved);
        free(second);
        assert_eq!(malloc_usable_size(second), 10);
    }
}

#[test]
fn calls_that_change_memory_are_seen_and_others_are_not() {
    let _one = ONE.lock();
    let (at, arena) = arenas::take(4 << 20, 2 << 20).unwrap();
    let len = 2 << 20;
    let epoch = || arena.piece(at).unwrap().1.load(std::sync::atomic::Ordering::SeqCst);
    let harmless = [
        (libc::SYS_mmap, [at, len, 0, libc::MAP_PRIVATE as usize, 0, 0]),
        (libc::SYS_madvise, [at, len, libc::MADV_HUGEPAGE as usize, 0, 0, 0]),
        (libc::SYS_madvise, [at, len, libc::MADV_WILLNEED as usize, 0, 0, 0]),
        (libc::SYS_munmap, [at - 4096, 4096, 0, 0, 0, 0]),
        (libc::SYS_shmat, [0, at, 0, 0, 0, 0]),
        (libc::SYS_process_madvise, [0, 0, 0, libc::MADV_WILLNEED as usize, 0, 0]),
        (libc::SYS_mlock, [at, len, 0, 0, 0, 0]),
    ];
    let before = epoch();
    for (number, arguments) in harmless {
        changes::before(number, &arguments);
        assert_eq!(epoch(), before, "{number} {arguments:?}");
    }
    let changing = [
        (libc::SYS_madvise, [at, 1, libc::MADV_DONTNEED as usize, 0, 0, 0]),
        (libc::SYS_madvise, [at, 1, libc::MADV_FREE as usize, 0, 0, 0]),
        (libc::SYS_madvise, [at, 1, libc::MADV_REMOVE as usize, 0, 0, 0]),
        (libc::SYS_madvise, [at, 1, libc::MADV_WIPEONFORK as usize, 0, 0, 0]),
        (libc::SYS_madvise, [at, 1, 12_345, 0, 0, 0]),
        (libc::SYS_process_madvise, [0, 0, 0, libc::MADV_DONTNEED as usize, 0, 0]),
        (libc::SYS_mprotect, [at, 1, 0, 0, 0, 0]),
        (libc::SYS_pkey_mprotect, [at, 1, 0, 0, 0, 0]),
        (libc::SYS_madvise, [at, 1, libc::MADV_DONTFORK as usize, 0, 0, 0]),
        (libc::SYS_munmap, [at, 1, 0, 0, 0, 0]),
        (libc::SYS_mmap, [at, 1, 0, libc::MAP_FIXED as usize, 0, 0]),
        (libc::SYS_mremap, [at, 1, 1, 0, 0, 0]),
        (libc::SYS_mremap, [4096, 1, 1, libc::MREMAP_FIXED as usize, at, 0]),
    ];
    for (number, arguments) in changing {
        let before = epoch();
        changes::before(number, &arguments);
        assert_ne!(epoch(), before, "{number} {arguments:?}");
    }
    arenas::free(arena, at);
}
