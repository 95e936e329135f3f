//! Fabrics: ways to move bytes between instances. Only the modules; each says what it is for.
pub mod arena;
pub mod layout;
pub mod ready;
pub mod ring;
