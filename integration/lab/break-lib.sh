# Breaking the soft devices' links (sourced by tests, after test-lib.sh). The programs' TCP, on ports 7470 to 7499, goes on.
# shellcheck shell=bash

# Sets "hows": by a reset, which ends siw's connections at once as a device does that fails (siw runs on TCP), or
# silently: packets are dropped, and no device says so. rxe has only the second.
need_breakable() {
    case $LAB_DEVICE in
        siw) what="meta l4proto tcp" hows=(reset silent) ;;
        rxe) what="udp dport 4791" hows=(silent) ;;
        *) skip "only the soft devices' connections can be broken by a packet filter" ;;
    esac
}

# break_links HOW. What comes in is dropped, so that the device does not learn of it: rxe is told of what cannot go out.
break_links() {
    if [ "$1" = silent ]; then filter "$what drop"; else filter "$what reject with tcp reset"; fi
}

# What the other node's device says to this one's is lost, but for its taking a TCP connection of siw's.
lose_answers() {
    if [ "$LAB_DEVICE" = siw ]; then filter "tcp flags & syn == 0 drop"; else filter "$what drop"; fi
}

# filter RULE [PORTS]: for what comes in, but for what the programs and the barrier (or PORTS) say over TCP.
filter() {
    local ports=${2-7470-7499, 7077}
    nft -f - <<END
table inet failures {
  chain input {
    type filter hook input priority 0
    iifname "lo" accept
    tcp dport { $ports } accept
    tcp sport { $ports } accept
    $1
  }
}
END
}

mend() { nft delete table inet failures 2>/dev/null; }
