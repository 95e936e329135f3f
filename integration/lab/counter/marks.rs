//! What tells the counter where counting begins and ends: instructions that do nothing, and that no compiler emits with
//! these displacements. Part of two crates: the counter looks for them, `bench-lab` executes them.

/// `nop dword ptr [rax + displacement]`, without its displacement.
#[allow(dead_code, reason = "one of the two crates writes it as assembly")]
pub const NOP: [u8; 3] = [0x0f, 0x1f, 0x80];
/// The displacement of the instruction with which counting begins.
pub const BEGIN: i32 = 0x6d64_7301;
/// And of the one with which it ends.
pub const END: i32 = 0x6d64_7302;
