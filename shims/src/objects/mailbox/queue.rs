//! The commands that calls leave to the service thread, in order. [`Queue::push`] never waits and takes no lock, since
//! it may run in a signal handler that has interrupted another `push`. The service thread alone takes commands out,
//! always all of them.

use std::collections::VecDeque;
use std::sync::atomic::AtomicPtr;

use rdmasock_core::sync::Published;

use super::command::Command;

struct Node {
    command: Command,
    before: *mut Node,
}

/// A queue of commands. The caller of [`Self::push`] checks next whether the thread sleeps. The thread, about to sleep,
/// checks whether a command was added. [`Published`] makes one of them see the other.
#[derive(Default)]
pub struct Queue {
    /// The node that was added last; null if the queue is empty.
    last: Published<AtomicPtr<Node>>,
}

impl Queue {
    pub fn push(&self, command: Command) {
        let mut before = std::ptr::null_mut();
        let node = Box::into_raw(Box::new(Node { command, before }));
        while let Err(now) = self.last.exchange(before, node) {
            before = now;
            // SAFETY: the exchange has failed, so the node is not in the queue, and this call alone has it.
            unsafe { (*node).before = before };
        }
    }

    pub fn is_empty(&self) -> bool {
        self.last.look().is_null()
    }

    /// Moves all commands to the end of `to`, the oldest first.
    pub fn take_all(&self, to: &mut VecDeque<Command>) {
        let begin = to.len();
        let mut next = self.last.take();
        while !next.is_null() {
            // SAFETY: `push` has made each node by `Box::into_raw`. `take` has removed the whole chain from the queue,
            // so no other call frees it.
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
