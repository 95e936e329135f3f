//! The rules file: which connections may leave TCP, by program, ports, addresses and direction.
//!
//! ```toml
//! [[rule]]                        # the first rule that matches decides; none: accelerate
//! program = "nginx*"              # glob on the program's basename
//! port = [80, "8000-8999"]        # this end's port: a port, a range, or a list of these
//! peer_port = 5432                # the other end's
//! local = "10.0.0.0/8"            # this end's address: an address, a CIDR, or a list of these
//! peer = ["192.168.1.7", "fd00::/8"]
//! direction = "accept"            # or "connect"
//! action = "leave"                # or "accelerate"
//! ```
//!
//! A key that is left out matches everything. IPv4-mapped IPv6 addresses count as IPv4. The other reasons for which a
//! connection stays on TCP are in other files.

use core::net::{IpAddr, SocketAddr};
use core::ops::RangeInclusive;
use std::path::Path;

use ipnet::IpNet;
use rdmasock_core::os::dir;
use rdmasock_core::stats::Direction;
use rustix::io::Errno;
use serde::Deserialize;

/// The longest rules file that is read, bytes. A longer file is taken for a mistake.
const LONGEST: usize = 1 << 20;

/// The rules' decision about a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Decision {
    /// The connection may move to a link.
    #[default]
    Accelerate,
    /// The connection stays on TCP.
    Leave,
}

/// The rules in their order. Without rules every connection may be accelerated.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rules {
    #[serde(default, rename = "rule")]
    rules: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    program: Option<String>,
    port: Option<OneOrMany<Ports>>,
    peer_port: Option<OneOrMany<Ports>>,
    local: Option<OneOrMany<Net>>,
    peer: Option<OneOrMany<Net>>,
    direction: Option<Way>,
    action: Decision,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    Accept,
    Connect,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    bound = "T: Deserialize<'de>",
    expecting = "expected a port such as 80, a range such as \"8000-8999\", an address or CIDR such as \"10.0.0.0/8\" \
                 (as the key demands), or a list of these"
)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    fn any(&self, is_match: impl FnMut(&T) -> bool) -> bool {
        match self {
            Self::One(one) => core::slice::from_ref(one),
            Self::Many(many) => many,
        }
        .iter()
        .any(is_match)
    }
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "PortsText")]
struct Ports(RangeInclusive<u16>);

#[derive(Deserialize)]
#[serde(untagged)]
enum PortsText {
    Number(u16),
    Text(String),
}

impl TryFrom<PortsText> for Ports {
    type Error = &'static str;

    fn try_from(text: PortsText) -> Result<Self, Self::Error> {
        let text = match text {
            PortsText::Number(port) => return Ok(Self(port..=port)),
            PortsText::Text(text) => text,
        };
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if first <= last => Ok(Self(first..=last)),
            _ => Err("not a range of ports"),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Net(IpNet);

impl TryFrom<String> for Net {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let net = match text.parse::<IpAddr>() {
            Ok(address) => Ok(IpNet::from(address.to_canonical())),
            Err(_) => text.parse(),
        };
        net.map(Self).map_err(|_| "not an address or CIDR")
    }
}

impl Rules {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// A message of one line that names the fault, its place, and the remedy.
    pub(crate) fn load(path: &Path) -> Result<Self, String> {
        read(path)
            .map_err(|problem| format!("cannot read it: {problem}"))
            .and_then(|text| Self::parse(&text))
            .map_err(|problem| {
                format!(
                    "rules file {path:?}: {problem}; every connection stays on TCP, because the file may leave \
                     it there; correct the file or unset RDMASOCK_RULES"
                )
            })
    }

    /// Reads rules from the text of a file.
    ///
    /// # Errors
    /// A message of one line that names the fault and its line in the text.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| {
            let message = error.message().replace('\n', ", ");
            match error.span().and_then(|span| text.get(..span.start)) {
                Some(before) => {
                    let line = before.matches('\n').count() + 1;
                    format!("line {line}: {message}")
                }
                None => message,
            }
        })
    }

    /// Returns the decision of the first rule that matches; without one, [`Decision::Accelerate`]. `program` is the
    /// program's basename, and `local` this end's address.
    #[must_use]
    pub(crate) fn decide(&self, program: &str, local: SocketAddr, peer: SocketAddr, direction: Direction) -> Decision {
        self.rules
            .iter()
            .find(|rule| rule.is_match(program, local, peer, direction))
            .map_or_else(Decision::default, |rule| rule.action)
    }
}

impl Rule {
    fn is_match(&self, program: &str, local: SocketAddr, peer: SocketAddr, direction: Direction) -> bool {
        self.program
            .as_ref()
            .is_none_or(|glob| is_glob_match(glob.as_bytes(), program.as_bytes()))
            && has_port(self.port.as_ref(), local)
            && has_port(self.peer_port.as_ref(), peer)
            && has_address(self.local.as_ref(), local)
            && has_address(self.peer.as_ref(), peer)
            && match self.direction {
                None => true,
                Some(Way::Accept) => direction == Direction::Accept,
                Some(Way::Connect) => direction == Direction::Connect,
            }
    }
}

fn has_port(ports: Option<&OneOrMany<Ports>>, addr: SocketAddr) -> bool {
    ports.is_none_or(|ports| ports.any(|range| range.0.contains(&addr.port())))
}

fn has_address(nets: Option<&OneOrMany<Net>>, addr: SocketAddr) -> bool {
    let ip = addr.ip().to_canonical();
    nets.is_none_or(|nets| nets.any(|net| net.0.contains(&ip)))
}

/// Returns whether the whole `text` matches `glob`, where `*` stands for any number of bytes and `?` for one byte.
fn is_glob_match(glob: &[u8], text: &[u8]) -> bool {
    let (mut rest_glob, mut rest_text) = (glob, text);
    // The glob behind the latest star, and the text at which it was tried. If it does not match there, it is tried
    // again one byte further.
    let mut star: Option<(&[u8], &[u8])> = None;
    loop {
        match (rest_glob, rest_text) {
            ([b'*', after @ ..], _) => {
                star = Some((after, rest_text));
                rest_glob = after;
            }
            ([], []) => return true,
            ([g, glob_after @ ..], [t, text_after @ ..]) if *g == b'?' || g == t => {
                (rest_glob, rest_text) = (glob_after, text_after);
            }
            _ => match star {
                Some((after, [_, text_after @ ..])) => {
                    star = Some((after, text_after));
                    (rest_glob, rest_text) = (after, text_after);
                }
                _ => return false,
            },
        }
    }
}

/// Returns the text of a file, read past the hooks.
fn read(path: &Path) -> Result<String, String> {
    let failed = |errno: Errno| std::io::Error::from(errno).to_string();
    match dir::bytes(path, LONGEST + 1).map_err(failed)? {
        (text, true) => String::from_utf8(text).map_err(|_| "not UTF-8".to_owned()),
        _ => Err(format!("longer than {LONGEST} bytes")),
    }
}

#[cfg(test)]
mod tests;
