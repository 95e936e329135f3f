//! How two sides that share words do not miss each other; and the atomics of shared memory. These are std's, or loom's
//! under `--cfg loom`, so that the models check the code that ships. Locks and threads are elsewhere.
//!
//! # First publish, then check
//! Wherever two sides must not miss each other, each first stores a word and then loads the word that the other stores
//! (Dekker's protocol). A sleeper announces that it sleeps, then checks for work. A thread with work publishes it, then
//! checks for a sleeper. A processor may execute the load before the store, and then both find nothing. A full fence
//! between the two on *both* sides forbids that. All pairs use one of these:
//!
//! | | one side | the other |
//! |---|---|---|
//! | [`Published`] | publishes a word, then reads another | publishes that other, then reads the first |
//! | [`Attention`] | asks for a notification, then checks for news | publishes, then takes the waiter to notify |
//! | [`SleepFlag`] | raises it, checks, sleeps | publishes, then checks whether to ring |
//! | [`Presence`] | counts itself in, then checks whether it may stay | publishes the closing, then checks the count |
//! | [`Request`] | publishes, then asks if no request is pending | takes the request, then checks what is to be done |
//! | [`Handoff`] | adds work, then tries a lock | releases that lock, then checks for work |
//! | [`store_load_fence`] | stores, fences, loads | the same with the words exchanged; for words with other uses too |
//!
//! # The cost of each
//! All but the last two announce by a `SeqCst` read-modify-write and check by a `SeqCst` load. The single total order
//! of such operations forbids that both sides miss, and no further instruction is needed (x86-64: the locked
//! instruction is the fence; aarch64: `stlxr` and `ldar`). So no function for the protocol takes an ordering: there
//! would be one correct argument.
//!
//! # How this is checked
//! The loom models try every interleaving, and find missing releases and acquires. But loom treats a `SeqCst` access as
//! `AcqRel`, and honours `SeqCst` fences only. So a model has a fence at the places where the total order does its
//! work. Miri follows the orderings themselves, and so checks that those accesses are `SeqCst`. The tests beside the
//! models run in Miri too, often enough to fail if an ordering is weaker.

mod attention;
mod handoff;
#[cfg(all(test, loom))]
pub(crate) mod loom_models;
mod presence;
mod published;
mod request;
mod sleep_flag;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;
mod words;

pub use attention::Attention;
pub use handoff::Handoff;
pub use presence::Presence;
pub use published::Published;
pub use request::Request;
pub use sleep_flag::{RungMark, SleepFlag};
pub use words::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence, store_load_fence};
