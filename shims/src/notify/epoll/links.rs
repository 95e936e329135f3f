//! The links that carry a set's sockets. A wait checks every link within this host. To check a link to another host is
//! to poll its completions. If there are many such links, the kernel's set reports which of them have completions.

use std::os::fd::BorrowedFd;

use rustix::event::epoll as kernel;
use rustix::io::Errno;

use super::key::Key;
use crate::objects::link::held::Pin;
use crate::objects::link::{Link, News, Remote, Watch};

/// A link to another host, and its state in this set.
pub(crate) struct Far {
    pub link: &'static Link,
    /// Keeps the link object from reuse: the state below is true of no other link.
    _pin: Pin,
    pub remote: &'static Remote,
    pub slot: u32,
    /// The remote end's flags: what is queued, and whether it is armed.
    pub news: &'static News,
    /// The kernel's set has the link's completion descriptor.
    pub is_watched: bool,
    /// The service thread handles the link's completions on behalf of this set.
    is_left: bool,
}

impl Far {
    /// Whether the kernel's set reports the next completion, so that the link need not be armed again.
    pub fn is_told(&self) -> bool {
        self.is_watched && self.news.is_armed()
    }

    /// Arms the link before a sleep on `set`: a completion makes the set readable. `watch` counts the threads that
    /// sleep on the set.
    fn watch(&mut self, set: BorrowedFd<'_>, key: Key, watch: &'static Watch) {
        let Self {
            link,
            remote,
            is_watched,
            ..
        } = self;
        remote.watch(|fd| {
            if !*is_watched {
                let data = kernel::EventData::new_u64(key.of_link(link.slot()).0);
                let flags = kernel::EventFlags::IN | kernel::EventFlags::EXCLUSIVE;
                *is_watched = matches!(kernel::add(set, fd, data, flags), Ok(()) | Err(Errno::EXIST));
                if *is_watched {
                    remote.watchers.add(watch);
                }
            }
            *is_watched
        });
    }

    fn unwatch(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        if std::mem::take(&mut self.is_watched) {
            self.remote.watchers.remove(watch);
            self.remote.while_open(|fd| {
                if let Some(set) = set {
                    let _ = kernel::delete(set, fd);
                }
            });
        }
    }

    /// Makes the service thread handle completions, even while threads of the program sleep on the link.
    fn leave_to_service(&mut self) {
        if !std::mem::replace(&mut self.is_left, true) {
            self.remote.leave_to_service();
        }
    }

    /// Ends the set's use of the link.
    fn let_go(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        self.unwatch(set, watch);
        if std::mem::take(&mut self.is_left) {
            self.remote.take_from_service();
        }
    }
}

/// All links of a set, see the module.
#[derive(Default)]
pub(crate) struct Links {
    /// Links within this host.
    pub near: Vec<&'static Link>,
    pub far: Vec<Far>,
    /// The index in `far` at which the next check begins.
    pub next: usize,
    /// Links of `far` that had data for the present harvest. Empty between harvests.
    pub spoke: Vec<&'static Link>,
    /// The service thread's `taken_back` before the last sleep: how often it has begun to handle completions of a link.
    taken_back: u32,
    /// The service thread handles completions of all links, and the kernel's set has none of their descriptors.
    are_left: bool,
}

impl Links {
    pub fn add(&mut self, link: &'static Link) {
        let Some(remote) = link.remote() else {
            if !self.near.iter().any(|l| std::ptr::eq(*l, link)) {
                self.near.push(link);
            }
            return;
        };
        if !self.far.iter().any(|f| std::ptr::eq(f.link, link))
            && let Some(pin) = Pin::new(link)
            // Checked after the link is pinned. The service thread first ends links, then has the sets drop them; so it
            // sees this entry, or the link is seen dead here.
            && link.is_alive()
        {
            let mut far = Far {
                link,
                _pin: pin,
                remote,
                slot: link.slot(),
                news: remote.news(),
                is_watched: false,
                is_left: false,
            };
            if self.are_left {
                far.leave_to_service();
            }
            self.far.push(far);
        }
    }

    /// Removes links that are down. No thread takes in completions of a dead link, and the kernel's set would be
    /// readable until its queue pair is destroyed.
    pub fn drop_dead(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        self.near.retain(|link| link.is_alive());
        self.far.retain_mut(|far| {
            let is_alive = far.link.is_alive();
            if !is_alive {
                far.let_go(set, watch);
            }
            is_alive
        });
    }

    /// Ends the set's use of all links.
    pub fn let_go(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        self.far.iter_mut().for_each(|far| far.let_go(set, watch));
    }

    /// Makes the service thread handle all completions, because another set holds this one from now on. The kernel's
    /// object must then show what is ready for the program, and not every completion is.
    pub fn leave_to_service(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        self.are_left = true;
        for far in &mut self.far {
            far.leave_to_service();
            far.unwatch(set, watch);
        }
    }

    /// Whether completions on some link have to wake a sleep on the set.
    pub fn are_to_wake(&self) -> bool {
        !self.far.is_empty() && !self.are_left
    }

    /// Returns the links to other hosts with their indices, beginning with `next`.
    pub fn far_in_turn(&self) -> impl Iterator<Item = (usize, &Far)> {
        let (before, rest) = self.far.split_at(self.next.min(self.far.len()));
        let rest = rest.iter().enumerate().map(move |(n, far)| (before.len() + n, far));
        rest.chain(before.iter().enumerate())
    }

    /// Arms the links before a sleep on `set`: a completion on any of them makes the set readable. Skips links that are
    /// still armed, unless the service thread has begun to handle completions since the last sleep (`taken_back`).
    pub fn watch(&mut self, set: BorrowedFd<'_>, key: Key, watch: &'static Watch, taken_back: u32) {
        if self.are_left {
            return;
        }
        let is_heard_elsewhere = std::mem::replace(&mut self.taken_back, taken_back) != taken_back;
        for far in &mut self.far {
            if is_heard_elsewhere || !far.is_told() {
                far.watch(set, key, watch);
            }
        }
    }
}
