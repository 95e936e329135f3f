//! What can interrupt a call of the library or end its thread: signal handlers (`handler`), jumps out of them and
//! cancellation (`jump`), and the end of the main thread (`ending`).

pub(crate) mod ending;
pub(crate) mod handler;
pub mod jump;
