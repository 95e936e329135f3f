use super::*;

fn arena() -> &'static Arena {
    Arena::new().unwrap()
}

fn epoch(arena: &Arena, at: usize) -> u64 {
    arena.piece(at).unwrap().1.load(SeqCst)
}

fn bytes(at: usize, len: usize) -> &'static mut [u8] {
    // SAFETY: the test owns the block, which has `len` bytes.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(at), len) }
}

fn give_back_all(arena: &Arena) -> usize {
    let given = Arena::numbers().filter(|number| arena.is_idle(*number) && arena.give_back(*number, |_, _| true));
    given.count()
}

#[test]
fn blocks_are_aligned_and_apart() {
    let arena = arena();
    assert_eq!(arena.start() % ARENA, 0);
    let small = arena.take(70_000, 1).unwrap();
    assert_eq!(arena.size(small), Some(5 * GRAIN));
    for shift in 4..=21 {
        let at = arena.take(100_000, 1 << shift).unwrap();
        assert_eq!(at % (1 << shift), 0);
        bytes(at, 100_000).fill(shift);
    }
    assert!(bytes(small, 5 * GRAIN).iter().all(|byte| *byte == 0));
    assert_eq!(arena.take(ARENA, 1), None);
    assert_eq!(arena.size(small + GRAIN), None);
    assert!(arena.free(small).is_some());
    assert!(arena.free(small).is_none(), "a second time");
    assert!(arena.free(small + 8).is_none());
}

#[test]
fn a_block_grows_where_it_is_while_nobody_is_behind_it() {
    let arena = arena();
    let first = arena.take(100_000, 1).unwrap();
    assert!(arena.resize(first, 3 * PIECE));
    bytes(first, 3 * PIECE).fill(1);
    let second = arena.take(100_000, 1).unwrap();
    assert!(second >= first + 3 * PIECE);
    assert!(!arena.resize(first, 4 * PIECE));
    assert!(arena.resize(first, PIECE));
    assert_eq!(arena.size(first), Some(PIECE));
    let between = arena.take(PIECE, PIECE).unwrap();
    assert!(between > first && between < second);
    bytes(between, PIECE).fill(2);
    assert!(bytes(first, PIECE).iter().all(|byte| *byte == 1));
}

#[test]
fn what_was_used_before_is_cleared_and_what_is_new_is_zero() {
    let arena = arena();
    let at = arena.take(3 * PIECE, 1).unwrap();
    bytes(at, 3 * PIECE).fill(7);
    assert!(arena.free(at).is_some());
    let again = arena.take(3 * PIECE, 1).unwrap();
    assert_eq!(again, at);
    arena.clear(again, 2 * PIECE + 5);
    assert!(bytes(again, 2 * PIECE + 5).iter().all(|byte| *byte == 0));
    assert_eq!(bytes(again, 3 * PIECE)[2 * PIECE + 5], 7, "no more than was asked for");
    assert!(arena.free(again).is_some());
    assert_eq!(give_back_all(arena), 3);
    assert_eq!(arena.bytes(), (0, 0));
    let fresh = arena.take(3 * PIECE, 1).unwrap();
    arena.clear(fresh, 3 * PIECE);
    assert!(bytes(fresh, 3 * PIECE).iter().all(|byte| *byte == 0));
}

#[test]
fn an_epoch_ends_before_the_memory_does_and_never_comes_again() {
    let arena = arena();
    let at = arena.take(PIECE, PIECE).unwrap();
    let mut seen = vec![epoch(arena, at)];
    assert!(seen[0] & WHOLE != 0);
    let number = (at - arena.start()) / PIECE;
    assert!(!arena.give_back(number, |_, _| panic!("it has a block")));
    for _ in 0..5 {
        assert!(arena.free(at).is_some());
        let given = arena.give_back(number, |from, len| {
            assert_eq!((from, len), (at, PIECE));
            assert!(epoch(arena, at) & WHOLE == 0, "a call could begin to use it");
            true
        });
        assert!(given);
        assert!(epoch(arena, at) & WHOLE == 0);
        assert_eq!(arena.take(PIECE, PIECE), Some(at));
        let now = epoch(arena, at);
        assert!(now & WHOLE != 0 && !seen.contains(&now));
        seen.push(now);
    }
    assert!(arena.free(at).is_some());
    // A device still uses the piece (`false`), so the piece keeps its memory and its epoch.
    let before = epoch(arena, at);
    assert!(!arena.give_back(number, |_, _| false));
    assert_eq!(epoch(arena, at), before);
    assert_eq!(arena.bytes(), (0, PIECE));
}

#[test]
fn what_the_program_changes_is_whole_again_with_new_memory_alone() {
    let arena = arena();
    let at = arena.take(2 * PIECE, PIECE).unwrap();
    let before = epoch(arena, at);
    let other = epoch(arena, at + PIECE);
    arena.change(at + 4096, at + 8192, false);
    let changed = epoch(arena, at);
    assert!(changed & (WHOLE | LOST) == 0 && changed > before);
    assert_eq!(epoch(arena, at + PIECE), other);
    assert!(arena.free(at).is_some());
    assert_eq!(arena.take(2 * PIECE, PIECE), Some(at));
    assert!(epoch(arena, at) & WHOLE == 0, "the same memory");
    assert!(arena.free(at).is_some());
    assert_eq!(give_back_all(arena), 2);
    assert_eq!(arena.take(2 * PIECE, PIECE), Some(at));
    assert!(epoch(arena, at) & WHOLE != 0);
}

#[test]
fn what_is_lost_is_never_given_out_again() {
    let arena = arena();
    let at = arena.take(3 * PIECE, PIECE).unwrap();
    arena.change(at + PIECE, at + PIECE + 1, true);
    assert!(epoch(arena, at + PIECE) & LOST != 0);
    assert!(arena.free(at).is_some());
    let lost = at + PIECE..at + 2 * PIECE;
    for _ in 0..100 {
        let block = arena.take(PIECE / 2, 1).unwrap();
        assert!(block + PIECE / 2 <= lost.start || block >= lost.end);
    }
    // A free piece that the program unmaps is lost too.
    let free = arena.take(PIECE, PIECE).unwrap();
    assert!(arena.free(free).is_some());
    arena.change(free, free + PIECE, true);
    let number = (free - arena.start()) / PIECE;
    assert!(!arena.give_back(number, |_, _| panic!("it is lost")));
    for _ in 0..4 {
        assert_ne!(arena.take(PIECE, PIECE), Some(free));
    }
    arena.change(at + PIECE, at + PIECE + 1, false);
    assert!(epoch(arena, at + PIECE) & LOST != 0, "for good");
}
