//! The scenarios, by theme, and the table of them. A scenario is one function that both sides
//! run; it uses libc calls only, and logs what must not depend on the path of the bytes.

mod calls;
mod close;
mod connect;
mod echo;
mod epoll;
mod epoll_more;
mod fds;
mod files;
mod flags;
pub mod helper;
mod migrate;
mod options;
mod poll;
mod process;
mod signals;
mod threads;
mod timing;

use crate::ctx::Ctx;
use crate::harness::Mode;

/// One scenario.
pub struct Scenario {
    /// Its name; `base/n` where a family of scenarios differs by a number.
    pub name: String,
    /// What each side does.
    pub run: fn(&Ctx),
    /// The number in the name, or 0.
    pub param: u32,
    /// Whether it warms a connection up; then mode `both` demands that it is promoted.
    pub warms_up: bool,
    /// Variables for the sides that have the library.
    pub env: Vec<(&'static str, String)>,
    /// The modes in which it runs.
    pub modes: &'static [Mode],
}

impl Scenario {
    fn new(name: &str, run: fn(&Ctx), warms_up: bool) -> Self {
        Self {
            name: name.into(),
            run,
            param: 0,
            warms_up,
            env: Vec::new(),
            modes: &Mode::ALL,
        }
    }

    fn numbered(base: &str, param: u32, run: fn(&Ctx), warms_up: bool) -> Self {
        Self {
            param,
            modes: &[Mode::Kernel, Mode::Both],
            ..Self::new(&format!("{base}/{param:02}"), run, warms_up)
        }
    }

    fn with_env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.env.push((name, value.into()));
        self
    }
}

/// `table![module: warm { a, b } cold { c }]`: scenarios named `module_a`, …; the `cold` ones
/// do not warm up a connection.
macro_rules! table {
    ($($module:ident: warm { $($warm:ident),* $(,)? } cold { $($cold:ident),* $(,)? })*) => {
        vec![$(
            $(Scenario::new(
                concat!(stringify!($module), "_", stringify!($warm)), $module::$warm, true),)*
            $(Scenario::new(
                concat!(stringify!($module), "_", stringify!($cold)), $module::$cold, false),)*
        )*]
    };
}

/// Every scenario.
pub fn all() -> Vec<Scenario> {
    let mut all = table![
        TABLE
    ];
    migrate::add_to(&mut all);
    all
}

/// Undoes what Rust's start-up changes: SIGPIPE is at its default again. Raises the soft limit
/// of open files as far as the scenarios need it.
pub fn behave_like_a_c_program() {
    call!(libc::signal(libc::SIGPIPE, libc::SIG_DFL));
    let mut limit: libc::rlimit = crate::sys::zeroed();
    call!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit)).ok();
    limit.rlim_cur = limit.rlim_max.min(4096);
    call!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)).ok();
}
