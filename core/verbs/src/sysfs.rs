//! Finds the RDMA device of a network interface in `/sys/class`, without opening the device.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rdmasock_core::fabric::plugin::Hidden;
use rdmasock_core::os::dir::names;
use rustix::fs::OFlags;

/// Returns the name of the RDMA device on the network interface `interface`; `None` if there is none. `class` is
/// `/sys/class`.
pub(crate) fn device_on(class: &Path, interface: &str) -> Option<OsString> {
    let net = class.join("net").join(interface);
    let devices = class.join("infiniband");
    list(&devices).into_iter().find(|name| {
        let at = devices.join(name);
        let Some(kind) = text(&at.join("node_type")) else {
            return false;
        };
        let is_on = match kind.contains("RNIC") {
            true => has_address_of(&at, &net),
            false => has_gid_on(&at, interface),
        };
        is_on || is_ipoib_of(&net, Path::new(name))
    })
}

/// Returns the names in a directory; no names if it cannot be read.
fn list(directory: &Path) -> Vec<OsString> {
    Hidden::open(directory, OFlags::DIRECTORY)
        .ok()
        .and_then(|at| names(at.as_fd()).ok())
        .unwrap_or_default()
}

/// Returns the text of an attribute file, which has at most a page; `None` if it cannot be read.
fn text(file: &Path) -> Option<String> {
    let file = Hidden::open(file, OFlags::empty()).ok()?;
    let mut page = vec![0; 4096];
    let len = rustix::io::read(file.as_fd(), &mut page).ok()?;
    page.truncate(len);
    String::from_utf8(page).ok()
}

/// Returns the paths of all entries in the directory `name` of each port of a device.
fn in_ports(device: &Path, name: &str) -> impl Iterator<Item = PathBuf> {
    let ports = device.join("ports");
    list(&ports).into_iter().flat_map(move |port| {
        let directory = ports.join(port).join(name);
        list(&directory).into_iter().map(move |entry| directory.join(entry))
    })
}

/// Returns whether a RoCE device is on the interface: an entry in the GID table of a port names the interface. A table
/// may have a thousand entries, and the first few are in use. So entries are read in the order of their numbers.
fn has_gid_on(device: &Path, interface: &str) -> bool {
    let mut entries: Vec<_> = in_ports(device, "gid_attrs/ndevs").collect();
    entries.sort_by_key(|entry| entry.file_name().map_or(u32::MAX, index_of));
    entries
        .iter()
        .any(|ndev| text(ndev).is_some_and(|text| text.trim_end() == interface))
}

/// Returns the number of a table's entry, which is its file name; `u32::MAX` if the name is no number.
fn index_of(name: &OsStr) -> u32 {
    let number = name.to_str().and_then(|name| name.parse().ok());
    number.unwrap_or(u32::MAX)
}

/// Returns whether an iWARP device is on the interface `net`: the only GID of a port begins with the interface's
/// hardware address.
fn has_address_of(device: &Path, net: &Path) -> bool {
    let digits = |text: String| text.replace(':', "").trim_end().to_owned();
    let Some(address) = text(&net.join("address")).map(digits) else {
        return false;
    };
    let is_real = address.bytes().any(|digit| digit != b'0');
    is_real && in_ports(device, "gids").any(|gid| text(&gid).is_some_and(|gid| digits(gid).starts_with(&address)))
}

/// Returns whether `net` is an interface for IP over InfiniBand that belongs to the device `name`. Other kinds of
/// interfaces are not checked here, because an Ethernet card may have an RDMA device that is not on its interface.
fn is_ipoib_of(net: &Path, name: &Path) -> bool {
    // 32 is ARPHRD_INFINIBAND.
    text(&net.join("type")).is_some_and(|kind| kind.trim_end() == "32")
        && net.join("device/infiniband").join(name).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: std::path::PathBuf, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn the_device_of_an_interface_is_found_in_sysfs() {
        let class = tempfile::tempdir().unwrap();
        let at = |path: &str| class.path().join(path);
        write(at("infiniband/siw0/node_type"), "4: RNIC\n");
        let gid = "5254:004c:410a:0000:0000:0000:0000:0000\n";
        write(at("infiniband/siw0/ports/1/gids/0"), gid);
        write(at("net/eth0/address"), "52:54:00:4c:41:0a\n");
        write(at("net/eth9/address"), "52:54:00:4c:41:0b\n");
        write(at("net/lo/address"), "\n");
        write(at("infiniband/rxe0/node_type"), "1: CA\n");
        write(at("infiniband/rxe0/ports/1/gid_attrs/ndevs/0"), "eth1\n");
        write(at("infiniband/rxe0/ports/1/gid_attrs/ndevs/1"), "eth1.7\n");
        write(at("infiniband/mlx4_0/node_type"), "1: CA\n");
        write(at("net/ib0/type"), "32\n");
        write(at("net/ib0/device/infiniband/mlx4_0/node_type"), "");
        write(at("net/eth2/type"), "1\n");
        write(at("net/eth2/device/infiniband/mlx4_0/node_type"), "");
        let found = |interface| device_on(class.path(), interface).map(|name| name.into_string().unwrap());
        assert_eq!(found("eth0").as_deref(), Some("siw0"));
        assert_eq!(found("eth1").as_deref(), Some("rxe0"));
        assert_eq!(found("eth1.7").as_deref(), Some("rxe0"));
        assert_eq!(found("ib0").as_deref(), Some("mlx4_0"));
        assert_eq!(found("eth2"), None);
        assert_eq!(found("eth9"), None);
        assert_eq!(found("lo"), None);
        assert!(device_on(&at("nothing"), "eth0").is_none());
    }
}
