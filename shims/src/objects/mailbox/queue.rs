//! What calls leave to the service thread, in order. Whoever adds never waits and takes no lock: it may be a signal
//! handler that has interrupted another who adds. Only the service thread takes, and takes all.

use std::collections::VecDeque;
use std::sync::atomic::AtomicPtr;

use rdmasock_core::sync::Published;

use super::command::Command;

struct Node {
    command: Command,
    before: *mut Node,
}

/// See the module. Who adds looks next whether the thread sleeps, and the thread, about to sleep, whether something was
/// added.
#[derive(Default)]
pub struct Queue {
    /// What was added last.
    last: Published<AtomicPtr<Node>>,
}

impl Queue {
    pub fn push(&self, command: Command) {
        let mut before = std::ptr::null_mut();
        let node = Box::into_raw(Box::new(Node { command, before }));
        while let Err(now) = self.last.exchange(before, node) {
            before = now;
            // SAFETY: nobody else has the node yet.
            unsafe { (*node).before = before };
        }
    }

    pub fn is_empty(&self) -> bool {
        self.last.look().is_null()
    }

    /// Puts all that was added behind what is in `to`, the oldest first.
    pub fn take_all(&self, to: &mut VecDeque<Command>) {
        let begin = to.len();
        let mut next = self.last.take();
        while !next.is_null() {
            // SAFETY: by `push`; the swap has taken the whole chain from whoever else might take it.
            let node = unsafe { *Box::from_raw(next) };
            next = node.before;
            to.insert(begin, node.command);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.take_all(&mut VecDeque::new());
    }
}

#[cfg(test)]
mod tests {
    use rdmasock_core::ids::InstanceId;
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn what_threads_add_comes_in_each_ones_order() {
        const EACH: u64 = 1000;
        let queue = Queue::default();
        let command = |from: u64, i: u64| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&from.to_le_bytes());
            id[8..].copy_from_slice(&i.to_le_bytes());
            Command::Dialled(InstanceId::from_bytes(id), Err(Errno::IO))
        };
        let mut got = VecDeque::new();
        std::thread::scope(|s| {
            for from in 0..3 {
                let queue = &queue;
                s.spawn(move || (0..EACH).for_each(|i| queue.push(command(from, i))));
            }
            while got.len() < 3 * EACH as usize {
                queue.take_all(&mut got);
            }
        });
        assert!(queue.is_empty());
        let mut next = [0; 3];
        for command in got {
            let Command::Dialled(id, _) = command else {
                panic!("another command");
            };
            let (from, i) = id.as_bytes().split_at(8);
            let at = usize::from(from[0]);
            assert_eq!(i, u64::to_le_bytes(next[at]));
            next[at] += 1;
        }
    }
}
