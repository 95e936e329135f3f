//! Makes the instance, and decides what a new fd becomes.

pub(crate) mod confine;
pub(crate) mod instance;
pub(crate) mod lifecycle;
