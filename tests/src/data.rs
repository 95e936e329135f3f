//! Deterministic payload bytes, their hash and a small random generator. No I/O.

/// Byte `offset` of the endless stream named `seed`.
fn byte_at(seed: u64, offset: u64) -> u8 {
    let mut x = (offset ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 56) as u8
}

/// `len` bytes of stream `seed`, from `offset`.
pub fn pattern(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| byte_at(seed, offset + i)).collect()
}

/// Panics at the first byte of `got` that is not byte `offset + i` of stream `seed`.
pub fn verify(seed: u64, offset: u64, got: &[u8]) {
    for (i, byte) in got.iter().enumerate() {
        let at = offset + i as u64;
        let want = byte_at(seed, at);
        assert_eq!(*byte, want, "stream {seed}: byte {at} is {byte:#x}, not {want:#x}");
    }
}

/// FNV-1a, 64 bits; folded over pieces by passing the previous result as `state`.
pub fn hash_from(state: u64, bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(state, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

/// FNV-1a of `bytes`.
pub fn hash(bytes: &[u8]) -> u64 {
    hash_from(HASH_START, bytes)
}

/// The state with which [`hash_from`] begins.
pub const HASH_START: u64 = 0xcbf2_9ce4_8422_2325;

/// How a transcript shows bytes: short text as it is, everything else as length and hash.
pub fn show(bytes: &[u8]) -> String {
    if bytes.len() <= 40 && bytes.iter().all(|b| (0x20..0x7f).contains(b)) {
        format!("{:?}", String::from_utf8_lossy(bytes))
    } else {
        format!("{} bytes #{:016x}", bytes.len(), hash(bytes))
    }
}

/// xorshift64*: the same sequence in every run.
pub struct Rng(u64);

impl Rng {
    /// A generator; `seed` may be anything.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound
    }
}
