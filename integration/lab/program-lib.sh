# For the tests in tests/programs/ (sourced): an unmodified program between the nodes, with the library on neither,
# on one, and on both (LAB_MODE: kernel, server-only, client-only, both), and whether it was promoted.
# A test sets port (7480 to 7499), defines the functions server and client, which run on node a and on node b and
# start with `program` what is to have the library, and ends with run_program.
# shellcheck shell=bash disable=SC2154 # port is the test's

# shellcheck source=integration/lab/test-lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/test-lib.sh"

lab=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
library=
case $LAB_MODE-$LAB_NODE in both-? | server-only-a | client-only-b) library=$LAB_BUILD/librdmasock.so ;; esac
[ -z "$library" ] || [ -f "$library" ] || { echo "$library is missing"; exit 1; }
files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT

# Early, for the tests are short and setting up a link takes a second or more in an emulated machine.
export RDMASOCK_PROMOTE_AFTER=2r,16K

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

# random_file NAME BYTES SEED: the same on both nodes.
random_file() {
    python3 -c 'import random, sys; open(sys.argv[1], "wb").write(random.Random(int(sys.argv[3])).randbytes(int(sys.argv[2])))' "$@"
}

sha256() { sha256sum "$@" | cut -d' ' -f1; }

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

# The loader only warns, and goes on without it.
is_preloaded() { ! grep -q 'cannot be preloaded' "${LAB_NOTES%.notes}"; }

# run_program [--server-ends]: node a's server is ended when the client is done, or waited for.
run_program() {
    local code=0 watch process answer
    "$lab/promotion.py" watch "$files/facts" &
    watch=$!
    # What is counted has to be counted from the beginning.
    wait_for is_counting "$watch" || { echo "the counters cannot be read"; return 1; }
    if [ "$LAB_NODE" = a ]; then
        (server) &
        process=$!
        wait_listening "$port" "$process" || { echo "the server does not listen"; lab-barrier listening no >/dev/null; return 1; }
        lab-barrier listening yes >/dev/null || return 1
        answer=$(lab-barrier client-done) || return 1
        [ "${answer%% *}" = 0 ] || { echo "the client on node b failed"; code=1; }
        printf '%s\n' "${answer#* }" >"$files/other"
        end_watch "$watch" || code=1
        if [ "${1:-}" = --server-ends ] && [ "$code" = 0 ]; then
            wait "$process" || { echo "the server ended with $?"; code=1; }
        else
            check "the server still runs" kill -TERM "$process" || code=1
            wait "$process" 2>/dev/null
        fi
        expect_promoted || code=1
    else
        [ "$(lab-barrier listening)" = yes ] || { echo "the server on node a does not listen"; return 1; }
        (client) || code=$?
        end_watch "$watch" || code=1
        lab-barrier client-done "$code" "$(cat "$files/facts")" >/dev/null || return 1
    fi
    is_preloaded || code=1
    return "$code"
}

# Also when it has failed: its absence is noticed at the end.
is_counting() { test -e "$files/facts.fresh" || ! kill -0 "$1" 2>/dev/null; }

# Until all that has been carried so far is in the facts: two samples, for one may have begun before. For
# programs that end by themselves, and are not to end before they are looked at.
be_watched() {
    rm -f "$files/facts.fresh"
    wait_for test -e "$files/facts.fresh" || return
    rm -f "$files/facts.fresh"
    wait_for test -e "$files/facts.fresh"
}

end_watch() {
    kill -TERM "$1" 2>/dev/null
    wait "$1" || { echo "the counters could not be read"; return 1; }
}

# Both nodes' facts against what this mode demands: with the library on one node or on none, plain TCP; on both,
# promotion. Node a judges; each demand on promotion is a line of its own.
expect_promoted() { "$lab/promotion.py" judge "$LAB_MODE" "$files/facts" "$files/other" "$LAB_CHECKS"; }
