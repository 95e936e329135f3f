use std::sync::Mutex;

use super::*;

/// Held by tests that count the memory of all arenas, or change much of it. All tests of a process share the arenas.
pub(crate) static ONE: Mutex<()> = Mutex::new(());

#[test]
fn what_is_freed_goes_back_but_for_what_is_kept() {
    let _one = ONE.lock();
    let before = excess();
    let blocks: Vec<_> = (0..40).map(|_| take(10 << 20, 1).unwrap()).collect();
    for (at, _) in &blocks {
        // SAFETY: the test owns the block.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(*at).write_bytes(1, 10 << 20) };
    }
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = text.split_whitespace().nth(1).unwrap().parse().unwrap();
        pages * 4096
    };
    let full = resident();
    assert!(full >= 400 << 20);
    blocks.into_iter().for_each(|(at, arena)| free(arena, at));
    assert!(before == 0 && excess() == 0);
    let left = full - resident();
    assert!(left > 260 << 20, "{left} bytes went back");
}

#[test]
fn what_is_no_arena_s_is_told_apart() {
    let (at, arena) = take(LARGE, 1).unwrap();
    for inside in [at, at + LARGE - 1, arena.start(), arena.start() + ARENA - 1] {
        assert!(of(inside).is_some_and(|of| std::ptr::eq(of, arena)));
    }
    let local = 0;
    for outside in [0, 1, usize::MAX, (&raw const local).addr(), 1 << 47] {
        assert!(of(outside).is_none());
    }
    assert!(take(LARGE - 1, 1).is_none() && take(ARENA, 1).is_none() && take(LARGE, 2 * PIECE).is_none());
    free(arena, at);
}

#[test]
fn calls_on_other_memory_change_nothing() {
    let _one = ONE.lock();
    let (at, arena) = take(PIECE, PIECE).unwrap();
    let epoch = || arena.piece(at).unwrap().1.load(std::sync::atomic::Ordering::SeqCst);
    let before = epoch();
    change(4096, at - 4096, true);
    change(at, 0, true);
    change(at + PIECE, usize::MAX, false);
    assert_eq!(epoch(), before);
    change(at - 1, 2, false);
    assert_ne!(epoch(), before);
    free(arena, at);
}
