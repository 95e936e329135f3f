//! What makes the instance, and what a new descriptor becomes.

pub(crate) mod confine;
pub(crate) mod instance;
pub(crate) mod lifecycle;
