//! How two sides that share words do not miss each other, and the atomics that shared memory is written over: std's, or
//! loom's under `--cfg loom`, so that the models check the code that ships. Not for locks or threads.
//!
//! # First say, then look
//! Wherever two sides must not miss each other, each first stores something and then loads what the other stores
//! (Dekker's protocol): a sleeper says that it sleeps and looks for work, who brings work says so and looks for a
//! sleeper. A processor may let the load go ahead of the store, and then both find nothing. What forbids it is a full
//! fence between the two on *both* sides. All pairs go through one of these:
//!
//! | | one side | the other |
//! |---|---|---|
//! | [`Published`] | publishes a word, then looks at another | likewise, with the words exchanged |
//! | [`Attention`] | asks to be told, then looks | publishes, then takes whom to tell |
//! | [`SleepFlag`] | raises it, looks, sleeps | publishes, then looks whether to ring |
//! | [`Presence`] | counts itself in, then looks whether it may stay | publishes that nobody may, then looks who is there |
//! | [`Request`] | publishes, then asks if nobody has | takes what was asked, then looks |
//! | [`Handoff`] | says what is to be done, then tries a lock | lets go of it, then looks what is to be done |
//! | [`store_load_fence`] | stores, fences, loads | likewise, where the words are something else too |
//!
//! # What each costs
//! All but the last two announce by a `SeqCst` read-modify-write and look by a `SeqCst` load. The single total order of
//! such operations forbids that both miss, and no further instruction is needed (x86-64: the locked instruction is the
//! fence; aarch64: `stlxr` and `ldar`). So nothing here takes an ordering: there would be one way to get it right.
//!
//! # What is checked
//! The loom models try every interleaving, and find what is not released or acquired; but loom takes a `SeqCst` access
//! for `AcqRel`, and honours `SeqCst` fences only, so in a model there is a fence at the places where the total order
//! does its work. That those accesses are `SeqCst` is for Miri to find, which follows the orderings themselves: the
//! tests beside the models run there too, often enough to fail where one is weaker.

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
