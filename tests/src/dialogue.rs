//! The fixed conversation of the plain-peer tests. The bytes of each end are known in advance, so
//! that a recording of all received bytes can be compared byte by byte.

use crate::data;

/// Request and response sizes, in bytes; they pass every default promotion threshold.
const SIZES: [(usize, usize); 12] = [
    (1, 1),
    (64, 10),
    (10, 64),
    (700, 1500),
    (20_000, 3),
    (3, 20_000),
    (5, 5),
    (100_000, 100_000),
    (1, 200_000),
    (64, 64),
    (0, 30),
    (64, 64),
];

/// The number of rounds. In each the client sends a request, then the server a response.
pub const ROUNDS: usize = SIZES.len();

/// Returns the bytes that the client sends in `round`.
pub fn request(round: usize) -> Vec<u8> {
    data::pattern(100 + round as u64, 0, SIZES[round].0)
}

/// Returns the bytes that the server sends in `round`.
pub fn response(round: usize) -> Vec<u8> {
    data::pattern(200 + round as u64, 0, SIZES[round].1)
}

/// Returns the bytes that the server sends after the client's EOF, before it closes.
pub fn farewell() -> Vec<u8> {
    data::pattern(300, 0, 5000)
}

/// Returns all bytes that the client sends in a connection.
pub fn all_requests() -> Vec<u8> {
    (0..ROUNDS).flat_map(request).collect()
}

/// Returns all bytes that the server sends in a connection.
pub fn all_responses() -> Vec<u8> {
    (0..ROUNDS).flat_map(response).chain(farewell()).collect()
}
