# For the tests in tests/programs/ (sourced): an unmodified program between the nodes, with the library on neither,
# on one, and on both (LAB_MODE: kernel, server-only, client-only, both; direct: both with direct transfers), and whether it was promoted.
# A test sets port (7480 to 7499), defines the functions server and client, which run on node a and on node b and
# start with `program` what is to have the library, and ends with run_program.
# shellcheck shell=bash disable=SC2154 # port is the test's

# shellcheck source=integration/lab/test-lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/test-lib.sh"

lab=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
library=
case $LAB_MODE-$LAB_NODE in both-? | direct-? | server-only-a | client-only-b) library=$LAB_BUILD/librdmasock.so ;; esac
[ -z "$library" ] || [ -f "$library" ] || { echo "$library is missing"; exit 1; }
files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT

# Early, for the tests are short and setting up a link takes a second or more in an emulated machine.
export RDMASOCK_PROMOTE_AFTER=2r,16K
# Smaller than what most programs that wait read at once.
[ "$LAB_MODE" != direct ] || export RDMASOCK_ZCOPY_MIN=16K
# What the suite shows when the test fails.
export RDMASOCK_LOG=info,rdmasock::promote=trace RDMASOCK_LOG_FILE=$LAB_LOGS/%p

# program NAME ARGUMENT…: with the library in front if this node has it in this mode.
program() { env ${library:+LD_PRELOAD="$library"} "$@"; }

# The same, in place of the shell: for a server, which is to be ended by its pid.
exec_program() { exec env ${library:+LD_PRELOAD="$library"} "$@"; }

# check TEXT COMMAND…: a sentence when the command fails.
check() {
    local text=$1
    shift
    "$@" || { echo "failed: $text"; return 1; }
}

# numbered_file NAME BYTES SEED: the same on both nodes, and nowhere the same as elsewhere in it or in one of another seed.
# Numbers, for they are made at once.
numbered_file() { seq "${3}000000000" "${3}999999999" | head -c "$2" >"$1"; }

# wait_for COMMAND…: for a minute; machines that are emulated on a busy host are slow.
wait_for() {
    local tick
    for ((tick = 0; tick < 600; tick++)); do
        if "$@"; then return 0; fi
        sleep 0.1
    done
    echo "in vain: $*"
    return 1
}

# Until a connection of this node is promoted, however long its host takes for that; a moment where none is to be.
wait_promoted() { if [[ $LAB_MODE == both || $LAB_MODE == direct ]]; then wait_for is_promoted; else sleep 1; fi; }
is_promoted() { rdmasock stat --json | grep -q '"promoted": [1-9]'; }

# For programs that wait for the file LAB_GO before most of their load.
announce_promotion() {
    export LAB_GO=$files/go
    rm -f "$LAB_GO"
    { wait_promoted; touch "$LAB_GO"; } &
}

# The loader only warns, and goes on without it.
is_preloaded() { ! grep -q 'cannot be preloaded' "${LAB_NOTES%.notes}"; }

# run_program [--server-ends]: node a's server is ended when the client is done, or waited for. Node a judges both nodes'
# facts against what this mode demands: with the library on one node or on none, plain TCP; on both, promotion, with a line
# of its own for each demand.
run_program() {
    local code=0 process answer judging=()
    [ "$LAB_NODE" = b ] || judging=("$LAB_MODE" "$files/other" "$LAB_CHECKS")
    "$lab/promotion.py" "$files/facts" ${judging[@]+"${judging[@]}"} &
    export LAB_WATCHER=$!
    if [ "$LAB_NODE" = a ]; then
        (server) &
        process=$!
        is_counted || return 1
        wait_listening "$port" "$process" || { echo "the server does not listen"; lab-barrier listening no >/dev/null; return 1; }
        lab-barrier listening yes >/dev/null || return 1
        answer=$(lab-barrier client-done) || return 1
        [ "${answer%% *}" = 0 ] || { echo "the client on node b failed"; code=1; }
        printf '%s\n' "${answer#* }" >"$files/other"
        end_watch || code=1
        if [ "${1:-}" = --server-ends ] && [ "$code" = 0 ]; then
            wait "$process" || { echo "the server ended with $?"; code=1; }
        else
            check "the server still runs" kill -TERM "$process" || code=1
            wait "$process" 2>/dev/null
        fi
    else
        is_counted || return 1
        [ "$(lab-barrier listening)" = yes ] || { echo "the server on node a does not listen"; return 1; }
        (client) || code=$?
        end_watch || code=1
        lab-barrier client-done "$code" "$(cat "$files/facts")" >/dev/null || return 1
    fi
    is_preloaded || code=1
    return "$code"
}

# What is counted has to be counted from the beginning: before the client starts.
is_counted() {
    wait_for watcher_is_ready && test -e "$files/facts.fresh" || { echo "the counters cannot be read"; return 1; }
}

watcher_is_ready() { test -e "$files/facts.fresh" || ! kill -0 "$LAB_WATCHER" 2>/dev/null; }

# Until all that has been carried so far is in the facts. For programs that end by themselves, and are not to end before
# they are looked at.
be_watched() {
    rm -f "$files/facts.fresh"
    kill -USR1 "$LAB_WATCHER" && wait_for test -e "$files/facts.fresh"
}

# The last sample; on node a, judgement.
end_watch() {
    kill -TERM "$LAB_WATCHER" 2>/dev/null
    wait "$LAB_WATCHER" || { echo "the counters could not be read, or are not as this mode demands"; return 1; }
}
