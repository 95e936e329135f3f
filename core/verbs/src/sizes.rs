//! The lengths of a connection's queues. They depend on its kind of traffic, and on the limits of the device.
//! `queue.rs` has the queues.

use rdmasock_core::fabric::plugin::serve;

use crate::sys::{BATCH, DeviceLimits};

/// The number of entries of the send queue that are left free. One of them is for a probe (`Queue::probe`). The others
/// are a reserve, because the kernel's SoftiWARP driver (siw) reports a completion a moment before it frees the entry.
const MARGIN: u32 = 16;

/// The lengths of the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// The most work requests in the send queue at a time, without a probe.
    pub slots: u32,
    /// The length of the send queue, in work requests.
    pub sends: u32,
    /// The number of receive buffers that the peer may use.
    pub receives: u32,
    /// If the work requests in the send queue have this number of bytes or more, no more are posted.
    pub bytes: u64,
}

impl Sizes {
    /// The wished lengths for small and frequent messages.
    pub(crate) const MESSAGES: Self = Self::wish(256, 128, serve::FOR_MESSAGES);
    /// The wished lengths for few and large WRITEs, with an occasional message.
    pub(crate) const BULK: Self = Self::wish(64 + MARGIN, 32, serve::FOR_BULK);

    const fn wish(sends: u32, receives: u32, bytes: u64) -> Self {
        Self {
            slots: sends - MARGIN,
            sends,
            receives,
            bytes,
        }
    }

    /// Returns these lengths, shortened to the limits of the device. `None` if the device's queues are too short to
    /// make progress.
    pub(crate) fn fit(self, limits: &DeviceLimits) -> Option<Self> {
        let spare = BATCH as u32;
        // Each entry of the send queue and of the receive queue may have a completion in the one completion queue.
        let each = limits.max_qp_wr.min(limits.max_cqe / 2);
        let receives = self.receives.min(each.checked_sub(spare)?);
        let sends = self.sends.min(each);
        (receives >= 8 && sends >= 2 * MARGIN).then_some(Self::wish(sends, receives, self.bytes))
    }

    /// Returns the number of receive buffers that are posted (`queue.rs` says why it is more than `receives`).
    pub(crate) fn posted(self) -> u32 {
        self.receives + BATCH as u32
    }

    /// Returns the length that the completion queue needs.
    pub(crate) fn completions(self) -> u32 {
        self.sends + self.posted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(max_qp_wr: u32, max_cqe: u32) -> DeviceLimits {
        DeviceLimits {
            max_qp_wr,
            max_cqe,
            max_reads: 1,
        }
    }

    #[test]
    fn queues_are_as_long_as_wished_or_as_the_device_allows() {
        let sizes =
            |wish, wr, cqe| Sizes::fit(wish, &limits(wr, cqe)).map(|sizes| (sizes.slots, sizes.sends, sizes.receives));
        assert_eq!(sizes(Sizes::MESSAGES, 32_768, 1 << 20), Some((240, 256, 128)));
        assert_eq!(sizes(Sizes::MESSAGES, 100, 1 << 20), Some((84, 100, 84)));
        assert_eq!(sizes(Sizes::MESSAGES, 32_768, 200), Some((84, 100, 84)));
        assert_eq!(sizes(Sizes::BULK, 32_768, 1 << 20), Some((64, 80, 32)));
        assert_eq!(sizes(Sizes::BULK, 60, 1 << 20), Some((44, 60, 32)));
        assert_eq!(sizes(Sizes::BULK, 40, 1 << 20), Some((24, 40, 24)));
        for wish in [Sizes::MESSAGES, Sizes::BULK] {
            assert_eq!(sizes(wish, 32, 64), Some((16, 32, 16)));
            assert_eq!(sizes(wish, 31, 1000), None);
            assert_eq!(sizes(wish, 0, 0), None);
        }
    }

    #[test]
    fn both_queues_fit_into_the_completion_queue() {
        for wish in [Sizes::MESSAGES, Sizes::BULK] {
            for wr in 0..400 {
                if let Some(sizes) = Sizes::fit(wish, &limits(wr, 400)) {
                    assert!(sizes.completions() <= 400 && sizes.posted() <= wr && sizes.sends <= wr);
                }
            }
        }
    }
}
