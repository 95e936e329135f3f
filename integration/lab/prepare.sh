# Prepares what the lab's virtual machines boot (sourced by scripts/lab): packages, kernel, modules, siw, initramfs.
# Not for running them. The result stays in the cache until one of the files that make it changes;
# nothing of it is installed on the host but packages, and no kernel joins the host's boot menu.
# shellcheck shell=bash

lab_packages="cpio kmod iproute2 nftables python3 ibverbs-providers ibverbs-utils librdmacm1 rdmacm-utils"
# How qemu is called.
qemu=(qemu-system-x86_64)

# prepare_machines CACHE: afterwards CACHE/boot holds kernel, initramfs and lib/modules.
prepare_machines() {
    local cache=$1 key lock status
    # shellcheck disable=SC2086 # a list of words
    need_packages $lab_packages
    mkdir -p "$cache"
    key=$(cat integration/lab/{prepare.sh,unpack-kernel,initramfs-init} | sha256sum)
    exec {lock}>"$cache/lock"
    flock "$lock"
    need_qemu "$cache"
    if [ "$(cat "$cache/boot/key" 2>/dev/null)" != "$key" ]; then
        echo "preparing the lab's kernel in $cache (once)"
        # A subshell: its scratch directory goes when it ends, however it ends. Not as a condition,
        # in which `set -e` would count for nothing.
        set +e
        (build_boot "$cache" "$key")
        status=$?
        set -e
        [ "$status" = 0 ] || die "the lab's kernel could not be prepared" \
            "read the message above; nothing half-made is kept, run again"
    fi
    exec {lock}>&-
}

# need_qemu CACHE: the installed one, or one that is unpacked in CACHE/qemu: installing this qemu can mean removing another's
# package (a newer qemu-utils, say).
need_qemu() {
    local root="$1/qemu/root" scratch package
    command -v "${qemu[0]}" >/dev/null && return
    if [ ! -d "$root" ]; then
        echo "  qemu"
        scratch=$(mktemp -d "$1/new.XXXXXX")
        # With what it needs and the host has not got; only downloaded, so nothing is removed for it.
        mkdir -p "$scratch/packages/partial" "$scratch/root"
        as_root apt-get -q=2 update || echo "apt-get update failed; going on with the lists as they are"
        as_root env DEBIAN_FRONTEND=noninteractive apt-get -q=2 -y --download-only --no-install-recommends \
            -o Dir::Cache::archives="$(realpath "$scratch")/packages/" -o APT::Sandbox::User=root install qemu-system-x86 \
            || { rm -rf "$scratch"; die "qemu-system-x86 cannot be downloaded" "install a qemu-system-x86_64 yourself, then run again"; }
        for package in "$scratch"/packages/*.deb; do
            dpkg -x "$package" "$scratch/root"
        done
        rm -rf "$scratch/packages"
        mkdir -p "$1/qemu"
        mv "$scratch/root" "$root"
        rm -rf "$scratch"
    fi
    qemu=(env "LD_LIBRARY_PATH=$(find "$root/usr/lib" "$root/lib" -type d -path "*$(uname -m)*" -printf '%p:' 2>/dev/null)"
        "$root/usr/bin/qemu-system-x86_64" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu")
}

build_boot() {
    local cache=$1 key=$2 release version series scratch modules
    set -eu
    if [ "$(id -u)" = 0 ] || command -v sudo >/dev/null; then
        as_root apt-get -q=2 update || echo "apt-get update failed; going on with the lists as they are"
    fi
    release=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: linux-image-//p' | head -n 1)
    [ -n "$release" ] || die "apt does not know linux-image-amd64" "run apt-get update on Debian 12"
    need_packages build-essential xz-utils "linux-headers-$release"
    version=$(dpkg-query -W -f='${Version}' "linux-headers-$release")
    series=$(cut -d. -f1,2 <<<"$release")

    # Cleaned even when interrupted; /tmp would be no better, and may be small.
    scratch=$(mktemp -d "$cache/new.XXXXXX")
    # shellcheck disable=SC2064 # the name as it is now
    trap "rm -rf '$scratch'" EXIT
    trap 'exit 130' INT TERM HUP

    fetch "$scratch" busybox-static
    echo "  kernel $release"
    fetch "$scratch" "linux-image-$release=$version" || fetch "$scratch" "linux-image-$release-unsigned=$version"
    mkdir "$scratch/boot"
    integration/lab/unpack-kernel "$scratch/root/boot/vmlinuz-$release" "$scratch/boot/vmlinux"
    modules="$scratch/boot/lib/modules/$release"
    mkdir -p "$modules/kernel/drivers"
    (
        cd "$scratch/root/lib/modules/$release"
        cp -a modules.builtin modules.builtin.modinfo modules.order "$modules/"
        cd kernel
        cp -a arch crypto fs lib net "$modules/kernel/"
        cp -a drivers/{char,dax,infiniband,net,ptp,virtio} "$modules/kernel/drivers/"
    )

    if ! grep -q '/siw\.ko' <(find "$modules"); then
        echo "  siw, which Debian's kernel leaves out"
        fetch "$scratch" "linux-source-$series=$version"
        build_siw "$scratch" "$series" "$release" "$modules/extra"
    fi
    depmod -b "$scratch/boot" "$release"

    echo "  initramfs"
    build_initramfs "$scratch" "$release" >"$scratch/boot/initramfs"
    printf '%s\n' "$key" >"$scratch/boot/key"
    rm -rf "${cache:?}/boot" "$cache/accelerator"
    mv "$scratch/boot" "$cache/boot"
}

# fetch SCRATCH PACKAGE[=VERSION]: unpacks a package into SCRATCH/root.
fetch() {
    # The user apt would fetch with cannot write there.
    (cd "$1" && apt-get -q=2 -o APT::Sandbox::User=root download "$2" && dpkg -x ./*.deb root && rm ./*.deb)
}

build_siw() {
    local scratch=$1 series=$2 release=$3 into=$4 source="$1/linux-source-$2/drivers/infiniband/sw/siw"
    tar -C "$scratch" -xf "$scratch/root/usr/src/linux-source-$series.tar.xz" "linux-source-$series/drivers/infiniband/sw/siw"
    # A peer that answers without private data makes siw copy from a null pointer, and the machine dies.
    # In this function only: the same test elsewhere is about what we send.
    sed -i '/^static int siw_cm_upcall(/,/^}/s/if (pd_len) {$/if (pd_len \&\& cep->mpa.pdata) {/' "$source/siw_cm.c"
    grep -q 'if (pd_len && cep->mpa.pdata) {' "$source/siw_cm.c" \
        || echo "  warning: siw's source looks different now; the guard for answers without private data is not in"
    make -s -C "/usr/src/linux-headers-$release" M="$(realpath "$source")" CONFIG_RDMA_SIW=m modules >"$scratch/siw.log" 2>&1 \
        || { cat "$scratch/siw.log"; return 1; }
    mkdir -p "$into"
    strip -g "$source/siw.ko" -o "$into/siw.ko"
}

# The modules that mount the root, in the order in which they are loaded, and busybox.
build_initramfs() {
    local scratch=$1 release=$2 tree="$1/initramfs" module verb file rest
    mkdir -p "$tree"/{bin,modules,root,lower,upper,proc,sys,dev}
    cp "$scratch/root/bin/busybox" "$tree/bin/"
    cp integration/lab/initramfs-init "$tree/init"
    for module in virtio_pci virtio_console 9pnet_virtio 9p overlay; do
        # shellcheck disable=SC2034 # rest: options
        while read -r verb file rest; do
            [ "$verb" = insmod ] || continue
            cp "$file" "$tree/modules/"
            printf '%s\n' "${file##*/}"
        done < <(modprobe -d "$scratch/boot" -S "$release" --show-depends "$module")
    done | awk '!seen[$0]++' >"$tree/modules/list"
    (cd "$tree" && find . | cpio -o -H newc --quiet | gzip -1)
}
