# For the lab's tests (sourced): both nodes run the same test at the same time.
# shellcheck shell=bash

skip() {
    echo "$1"
    exit 77
}

# note TEXT: a line below the test's verdict, also if it passes; only node a's are printed.
note() {
    printf '%s\n' "$1" | tee -a "$LAB_NOTES"
}

# full_or FULL CI: a size, for all tests or for those that CI runs.
full_or() { if [ -n "$LAB_FULL" ]; then echo "$1"; else echo "$2"; fi; }

# A machine of ours must have its device; real hosts may have none.
need_device() {
    [ -n "$LAB_RDMA" ] && return
    [ "$LAB_DEVICE" = hosts ] || { echo "no RDMA device with $LAB_ADDR"; exit 1; }
    skip "no RDMA device with $LAB_ADDR"
}

# On a machine of ours everything is installed.
need_program() {
    local name
    for name in "$@"; do
        command -v "$name" >/dev/null && continue
        [ "$LAB_DEVICE" = hosts ] || { echo "$name is not installed"; exit 1; }
        skip "$name is not installed"
    done
}

is_iwarp() { grep -q RNIC "/sys/class/infiniband/$LAB_RDMA/node_type"; }

# together PORT SERVER CLIENT: node a runs the shell line SERVER, which listens on PORT over TCP or RDMA;
# once it does, node b runs CLIENT. Ends with this node's code.
together() {
    local server code=0
    if [ "$LAB_NODE" = b ]; then
        [ "$(lab-barrier listening)" = yes ] || { echo "the server on node a does not listen"; return 1; }
        bash -c "$3"
        return
    fi
    bash -c "$2" &
    server=$!
    if wait_listening "$1" "$server"; then
        lab-barrier listening yes >/dev/null
        wait "$server" || code=$?
    else
        lab-barrier listening no >/dev/null
        code=1
    fi
    kill "$server" 2>/dev/null
    return "$code"
}

# wait_listening PORT PID: until something on this node listens there; fails when the process ends before.
wait_listening() {
    local tick
    for ((tick = 0; tick < 400; tick++)); do
        if ss -Hltn "sport = :$1" | grep -q . || rdma resource show cm_id state listen 2>/dev/null | grep -q ":$1 "; then
            return 0
        fi
        kill -0 "$2" 2>/dev/null || return 1
        sleep 0.1
    done
    return 1
}

# counted EVENT: how often `rdmasock stat` says it was counted, in all of this node's programs.
counted() {
    rdmasock stat --json | grep -o "\"$1\": *[0-9]*" | awk '{ sum += $NF } END { print sum + 0 }'
}

# thrice SECONDS PORT SERVER CLIENT: as `together`, for programs that are not the library's: in up to three attempts of so many
# seconds, each on the next port, for which PORT stands in the lines. siw loses what follows too closely on a new connection
# (see core/verbs/src/connect.rs), which these programs take for an error or wait for without end. A failed attempt
# is told below the verdict.
thrice() {
    local attempt port good other
    for attempt in 0 1 2; do
        port=$(($2 + attempt)) good=no
        together "$port" "timeout $1 ${3//PORT/$port}" "timeout $1 ${4//PORT/$port}" && good=yes
        other=$(lab-barrier "attempt-$attempt" "$good") || return 1
        [ "$good $other" != "yes yes" ] || return 0
        note "attempt $((attempt + 1)) of ${3%% *} (not rdmasock) failed: server ok $good, client ok $other"
    done
    return 1
}
