# Shared by scripts/test, scripts/suites and scripts/demo (sourced): installs what they need, and nothing else.
# Needs Debian's apt and an installed Rust; each failure names its remedy.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    printf '  remedy: %s\n' "$2" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "installing packages needs root, and sudo is not installed" \
            "run as root: apt-get install $missing"
    fi
}

# need_miri: the interpreter that finds undefined behaviour, which nightly toolchains alone have. False without one.
need_miri() {
    cargo +nightly miri --version >/dev/null 2>&1 \
        || rustup --quiet component add --toolchain nightly miri rust-src >/dev/null 2>&1 \
        || rustup --quiet toolchain install nightly --profile minimal --component miri,rust-src >/dev/null 2>&1
}

# need_packages NAME…: installs the missing ones, and removes none. Services are left as they are: what is installed
# here is not started (RUNLEVEL=1 keeps invoke-rc.d from it), and our own servers use other ports.
need_packages() {
    local package
    missing=
    for package in "$@"; do
        if ! dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed; then
            missing="$missing $package"
        fi
    done
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null \
        || die "apt-get is not here, missing:$missing" "use Debian 12, or install these programs by hand"
    echo "installing:$missing"
    as_root apt-get -q update \
        || die "apt-get update failed" "check the network and /etc/apt/sources.list, then run again"
    # shellcheck disable=SC2086 # a list of words
    as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get -q install -y --no-remove --no-install-recommends $missing \
        || die "apt-get install$missing failed" "read apt's message above, repair it, then run again"
}

# need_rust COMPONENT…: cargo of at least the version in Cargo.toml, with these components, which rustup adds.
need_rust() {
    local wanted have component
    PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin"
    command -v cargo >/dev/null \
        || die "cargo is not installed" "install Rust with rustup (https://rustup.rs), then run again"
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    have=$(cargo --version | cut -d' ' -f2)
    printf '%s\n%s\n' "$wanted" "$have" | sort -VC \
        || die "cargo $have is older than $wanted" "rustup update stable"
    for component in "$@"; do
        "cargo-$component" --version >/dev/null 2>&1 \
            || rustup --quiet component add "${component/#fmt/rustfmt}" \
            || die "cargo $component does not work" "rustup component add ${component/#fmt/rustfmt}"
    done
    cargo fetch --locked --quiet \
        || die "cargo cannot fetch the dependencies" "check the network or cargo's source configuration"
}

# What the verbs plugin is built with. Where libclang is, which its bindings are made with, says .cargo/config.toml.
need_verbs() { need_packages build-essential pkg-config libibverbs-dev librdmacm-dev libclang-14-dev; }

# A Node that is there already will do, wherever it comes from.
need_node() { command -v node >/dev/null || need_packages nodejs; }

# Everything that the programs under test come from.
need_programs() {
    need_packages build-essential pkg-config ca-certificates curl python3 procps \
        redis-server redis-tools nginx-light wrk iperf3 memcached socat openssh-client
    need_server openssh-server ssh
    need_server vsftpd vsftpd
}

# need_server PACKAGE UNIT: a server that the tests start by themselves, and that is not to run on this machine for that: what
# Debian would start at the next boot it does not, if it was not installed before.
need_server() {
    need_packages "$1"
    [ -n "$missing" ] || return 0
    as_root systemctl disable "$2" >/dev/null 2>&1 || true
}

ulimit -n "$(ulimit -Hn)" || true
