//! POSIX socket semantics over the engine: what the hooks in `preload/` call.

pub mod calls;
pub mod real;
