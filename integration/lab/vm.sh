# The nodes as two virtual machines on one wire (sourced by scripts/lab, after pair.sh). What they boot comes from prepare.sh.
# Their root is the host's: read-only, with a layer in memory that dies with the machine.
# shellcheck shell=bash disable=SC2004,SC2034,SC2154 # some variables are shared with scripts/lab

cpus=1 memory=1024 mtu=1500 accelerator=
addr_a=10.77.0.1 addr_b=10.77.0.2

# choose_accelerator BOOT: kvm if a machine really starts with it, else emulation. Kept until the host is booted again.
choose_accelerator() {
    local boot=$1 known="$1/../accelerator" id
    [ -z "$accelerator" ] || return 0
    id=$(cat /proc/sys/kernel/random/boot_id)
    accelerator=tcg,thread=multi
    [ -r /dev/kvm ] && [ -w /dev/kvm ] || return 0
    if [ "$(cut -d' ' -f1 "$known" 2>/dev/null)" != "$id" ]; then
        # Existing is not enough: /dev/kvm may be there and fail, or hang, with this kernel.
        if timeout -k 1 10 "${qemu[@]}" -accel kvm "${machine[@]}" -m 256 -kernel "$boot/vmlinux" -initrd "$boot/initramfs" \
            -append "console=ttyS0 panic=-1 lab.probe" -serial stdio </dev/null 2>/dev/null | grep -q lab-probe-ok; then
            printf '%s kvm\n' "$id" >"$known"
        else
            printf '%s tcg,thread=multi\n' "$id" >"$known"
        fi
    fi
    accelerator=$(cut -d' ' -f2 "$known")
}

# erms: with it Linux and libc copy and clear memory by instructions that the emulator does byte by byte, three quarters of all
# that it did in a transfer.
machine=(-M q35 -cpu max,-erms -nodefaults -no-user-config -display none -no-reboot)

# start_node NODE: uses $boot, $device and $command, and $counts.
start_node() {
    local node=$1 peer_addr addr wire mac tick counter=()
    [ -z "$counts" ] || counter=(-plugin "$build/liblab_counter.so,out=$logs/counts-$device-$node")
    case $node in
        a) addr=$addr_a peer_addr=$addr_b wire=on mac=52:54:00:4c:41:0a ;;
        b) addr=$addr_b peer_addr=$addr_a wire=off mac=52:54:00:4c:41:0b ;;
    esac
    {
        printf 'cd %q || exit\n' "$PWD"
        printf 'export %s\n' "LAB_NODE=$node" "LAB_ADDR=$addr" "LAB_PEER=$peer_addr" "LAB_DEVICE=$device"
        printf 'export %q\n' "LAB_BUILD=$build" "${settings[@]}"
        printf 'exec integration/lab/guest-init %q %q' "$boot" "$mtu"
        printf ' %q' "${command[@]}"
    } >"$run/$node/init"
    if [ "$node" = b ]; then
        # Node a makes the wire. If it cannot, node b dies of it, which is reported.
        for ((tick = 0; tick < 200; tick++)); do
            if [ -S "$run/wire" ] || ! kill -0 "${pid[a]}" 2>/dev/null; then break; fi
            sleep 0.05
        done
    fi
    # maxcpus: for a machine that cannot have a second processor qemu's emulator (before 8.0) leaves memory barriers out,
    # which virtio needs between the processor and qemu's own thread: a notification was lost, and the network with it, about
    # once an hour. nr_cpus: the guest makes nothing of it.
    # tsc=reliable: without it a clock that costs a system call is chosen. no_timer_check: on a busy host the emulated
    # timer's first ticks come too late for the kernel, which then panics. The last three of the kernel's parameters spare work
    # that no test is about: clearing memory that is overwritten anyway, detours against attacks, pressure statistics.
    bound KILL "${qemu[@]}" -accel "$accelerator" "${machine[@]}" -smp "$cpus,maxcpus=$((cpus + 1))" -m "$memory" -name "lab-$node" \
        -kernel "$boot/vmlinux" -initrd "$boot/initramfs" \
        -append "console=ttyS0 panic=-1 oops=panic loglevel=5 tsc=reliable no_timer_check nr_cpus=$cpus net.ifnames=0 lab.init=$run/$node/init init_on_alloc=0 mitigations=off psi=0" \
        -serial "file:$run/$node/console" \
        -device virtio-serial-pci -chardev "file,id=out,path=$run/$node/out" -device virtserialport,chardev=out,name=lab.out \
        -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,fsdev=root,mount_tag=root \
        -netdev "stream,id=wire,server=$wire,addr.type=unix,addr.path=$run/wire" -device "virtio-net-pci,netdev=wire,mac=$mac" \
        -device virtio-rng-pci ${counter[@]+"${counter[@]}"} </dev/null >"$run/$node/qemu" 2>&1 &
    pid[$node]=$!
}

# The machine has nothing that is worth an orderly end.
stop_node() { kill -TERM "${pid[$1]}" 2>/dev/null || true; }

show_console() {
    local line
    while IFS= read -r line; do
        note "$1 console: $line"
    done < <(cat "$run/$1/qemu" "$run/$1/console" 2>/dev/null | tr -d '\r' | tail -n 25)
}
