# Runs one command on the two nodes and brings their output and exit codes together (sourced by scripts/lab).
# How a node is started and stopped is elsewhere: vm.sh and hosts.sh, which both offer
#   start_node NODE   starts it with its output in $run/NODE/out, and sets pid[NODE]
#   stop_node NODE    asks it to end; all it started ends with it
#
# A node's output is text, and once a line that ends with "\001lab-exit CODE": its command has ended.
# A node stays up until both commands have ended, so that what one left in the background can serve the other.
# shellcheck shell=bash disable=SC2034,SC2154 # some variables are shared with scripts/lab

declare -A pid=() reader=() ended=()

# run_pair TIMEOUT: 0 if both commands ended with 0, 124 at the time-out, 125 if a node died, else the higher code.
run_pair() {
    local deadline=$((SECONDS + $1)) status=0 event node value events
    pid=() reader=() ended=()
    # Nothing of the pair before, whose wire would be taken for ours.
    rm -rf "${run:?}"/{a,b,wire,events}
    mkdir "$run/a" "$run/b"
    mkfifo "$run/events"
    exec {events}<>"$run/events"
    for node in a b; do
        mkfifo "$run/$node/out"
        relay "$node" <"$run/$node/out" &
        reader[$node]=$!
        start_node "$node"
    done
    while [ "${#ended[@]}" -lt 2 ]; do
        if [ "$SECONDS" -ge "$deadline" ] || ! read -r -t $((deadline - SECONDS)) -u "$events" event node value; then
            note "no end after $1 s; ended: ${!ended[*]}"
            status=124
            break
        fi
        case $event in
            exit) ended[$node]=$value ;;
            gone)
                note "node $node died"
                show_console "$node"
                status=125
                break
                ;;
        esac
    done
    stop_pair
    exec {events}>&-
    [ "$status" = 0 ] || return "$status"
    for node in a b; do
        [ "${ended[$node]}" = 0 ] || note "node $node ended with ${ended[$node]}"
        [ "${ended[$node]}" -le "$status" ] || status=${ended[$node]}
    done
    return "$status"
}

# The output of a node, each line with the node's name; says when its command, and the node, ended. It has the
# pipe of the events open itself: opening it would block for ever once a killed run_pair has left it.
relay() {
    local node=$1 line
    trap '' INT # ends with the node
    while IFS= read -r line || [ -n "$line" ]; do
        if [[ $line =~ ^(.*)$'\001lab-exit '([0-9]+)$ ]]; then
            printf 'exit %s %s\n' "$node" "${BASH_REMATCH[2]}" >&"$events"
            line=${BASH_REMATCH[1]}
            [ -n "$line" ] || continue
        fi
        printf '%s| %s\n' "$node" "$line"
    done
    printf 'gone %s\n' "$node" >&"$events"
}

# Ends both nodes and waits for them: nobody of ours is left afterwards.
stop_pair() {
    local node
    for node in "${!pid[@]}"; do
        stop_node "$node"
    done
    for node in "${!pid[@]}"; do
        wait_or_kill "${pid[$node]}"
        # If the node never opened its output, the reader still waits for it.
        # shellcheck disable=SC2015 # either may fail
        kill "${reader[$node]}" 2>/dev/null && wait "${reader[$node]}" 2>/dev/null || true
        unset "pid[$node]"
    done
}

# wait_or_kill PID: five seconds of patience.
wait_or_kill() {
    local tick
    for ((tick = 0; tick < 50; tick++)); do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

note() { printf 'lab: %s\n' "$1" >&2; }

# Ends with us, even if we are killed.
bound() { exec setpriv --pdeathsig "$1" "${@:2}"; }
