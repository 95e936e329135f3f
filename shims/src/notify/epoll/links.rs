//! The links that carry a set's sockets. Those within this host are looked at in every wait. To look at one to another
//! host is to poll its completions, so where there are many the kernel's set tells which of them have some.

use std::os::fd::BorrowedFd;

use rustix::event::epoll as kernel;
use rustix::io::Errno;

use super::key::Key;
use crate::objects::link::held::Pin;
use crate::objects::link::{Link, News, Remote, Watch};

/// A link to another host.
pub(crate) struct Far {
    pub link: &'static Link,
    /// What the set knows of it is true of no other.
    _pin: Pin,
    pub remote: &'static Remote,
    pub slot: u32,
    /// The remote's.
    pub news: &'static News,
    /// The kernel's set has its completion descriptor.
    pub is_watched: bool,
    /// The service thread hears of it for this set.
    is_left: bool,
}

impl Far {
    /// The kernel's set tells of what completes, and need not be asked again.
    pub fn is_told(&self) -> bool {
        self.is_watched && self.news.is_armed()
    }

    /// Before a sleep on `set`, of which `watch` tells: what completes makes the set ready.
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

    /// Whatever threads of the program do, the service thread hears of what completes.
    fn leave_to_service(&mut self) {
        if !std::mem::replace(&mut self.is_left, true) {
            self.remote.leave_to_service();
        }
    }

    /// The set has no more to do with the link.
    fn let_go(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        self.unwatch(set, watch);
        if std::mem::take(&mut self.is_left) {
            self.remote.take_from_service();
        }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Links {
    /// Within this host.
    pub near: Vec<&'static Link>,
    pub far: Vec<Far>,
    /// With which of `far` the next look begins.
    pub next: usize,
    /// Of `far`, those that had something for the present harvest. Empty in between.
    pub spoke: Vec<&'static Link>,
    /// What the service thread's count of the links that it has begun to hear of was before the last sleep.
    taken_back: u32,
    /// The kernel's set has none of their descriptors, and the service thread hears of what completes.
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
            // After that: the service thread, which has such links forgotten, sees the set's or is seen here.
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

    /// Forgets those that are down: nobody takes what completes on one, and the kernel's set would be ready for as long
    /// as its queue pair is there.
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

    /// The set has no more to do with any of them.
    pub fn let_go(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        self.far.iter_mut().for_each(|far| far.let_go(set, watch));
    }

    /// Another set holds this one from now on, so the kernel's object is to show what is ready for the program, which
    /// is less than what completes.
    pub fn leave_to_service(&mut self, set: Option<BorrowedFd<'_>>, watch: &'static Watch) {
        self.are_left = true;
        for far in &mut self.far {
            far.leave_to_service();
            far.unwatch(set, watch);
        }
    }

    /// Whether a sleep on the set is to be woken by what completes on any.
    pub fn are_to_wake(&self) -> bool {
        !self.far.is_empty() && !self.are_left
    }

    /// Those to other hosts, in turn.
    pub fn far_in_turn(&self) -> impl Iterator<Item = (usize, &Far)> {
        let (before, rest) = self.far.split_at(self.next.min(self.far.len()));
        let rest = rest.iter().enumerate().map(move |(n, far)| (before.len() + n, far));
        rest.chain(before.iter().enumerate())
    }

    /// Before a sleep on `set`: what completes on any of them makes it ready. Those that have been told of since the
    /// last time, and only those, are asked again.
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
