//! The instructions that mark where counting begins and ends. They have no effect, and no compiler emits them with
//! these displacements. The file is part of two crates: the counter detects the marks, `bench-lab` executes them.

/// `nop dword ptr [rax + displacement]`, without its displacement.
#[allow(dead_code, reason = "one of the two crates writes it as assembly")]
pub const NOP: [u8; 3] = [0x0f, 0x1f, 0x80];
/// The displacement of the instruction with which counting begins.
pub const BEGIN: i32 = 0x6d64_7301;
/// The displacement of the instruction with which counting ends.
pub const END: i32 = 0x6d64_7302;
