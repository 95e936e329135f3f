//! placeholder
pub mod config;
pub mod log;
pub mod rules;
//! POSIX socket semantics over the engine: what the hooks in `preload/` call.

pub mod calls;
pub mod real;
