# The stages of scripts/test (sourced): runs them, counts their tests, repeats failed tests, and prints the result.
# Needs $logs, a folder, and $strict, which is empty or not.

# Each stage in a process group of its own, so that an interrupt ends all of it.
set -m

passed=0 failed=0 skipped=0 group=
declare -A begun=()
unsteady=()
# The arguments after which a stage's command takes the name of one test. The other stages have no single tests, give the same result
# at each run, or repeat their own parts (suites).
declare -A alone=([unit]='-- --exact' [differential]='-- --exact' [programs]='-- --exact' [lab]=--only)
# More failures than this in a stage are one broken thing, and to repeat them all would take longer than the run.
most_repeated=20

finish() {
    local each
    if [ "${#unsteady[@]}" -gt 0 ]; then
        printf '\n%s unsteady tests, which failed once and then passed alone three times:\n' "${#unsteady[@]}"
        for each in "${unsteady[@]}"; do printf '    %s\n' "$each"; done
        [ -z "$strict" ] || failed=$((failed + ${#unsteady[@]})) passed=$((passed - ${#unsteady[@]}))
    fi
    printf '%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
    [ "$failed" = 0 ]
}

interrupted() {
    trap '' INT TERM
    local each
    for each in $group "${begun[@]}"; do
        kill -TERM -- "-$each" 2>/dev/null || true
        wait "$each" || true
    done
    echo interrupted
    failed=$((failed + 1))
    finish || exit 130
}
trap interrupted INT TERM

elapsed() { printf '[%4d s]' "$SECONDS"; }

# begin NAME COMMAND…: a stage that keeps one processor busy goes on beside the next ones, until its turn comes.
begin() {
    local log="$logs/$1.log"
    printf '%s %s begins\n' "$(elapsed)" "$1"
    "${@:2}" >"$log" 2>&1 </dev/null &
    begun[$1]=$!
}

# run NAME COMMAND…: output to its log, a line of progress every half minute; the command's status.
run() {
    local name=$1 log="$logs/$1.log" ticks=0
    shift
    printf '%s %s\n' "$(elapsed)" "$name"
    if [ -n "${begun[$name]:-}" ]; then
        group=${begun[$name]}
        unset "begun[$name]"
    else
        "$@" >"$log" 2>&1 </dev/null &
        group=$!
    fi
    while kill -0 "$group" 2>/dev/null; do
        sleep 0.5
        ticks=$((ticks + 1))
        if [ $((ticks % 60)) = 0 ]; then
            printf '%s   … %s\n' "$(elapsed)" "$(tail -n 1 "$log" | cut -c 1-100)"
        fi
    done
    local status=0
    wait "$group" || status=$?
    group=
    return "$status"
}

show_failure() {
    printf '%s   FAILED, the end of %s:\n' "$(elapsed)" "$logs/$1.log"
    tail -n 40 "$logs/$1.log" | sed 's/^/    /'
}

# check NAME COMMAND…: one check.
check() {
    if run "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        show_failure "$1"
    fi
}

# tests NAME COMMAND…: as many checks as its "test result:" lines say. A command that fails without
# a failed test (it does not build, it crashed), or that runs none, counts as one failure.
tests() {
    local status=0 ok bad ignored log="$logs/$1.log"
    run "$@" || status=$?
    read -r ok bad ignored < <(awk '/^test result:/ {
        for (i = 2; i <= NF; i++) {
            if ($i ~ /^passed/) ok += $(i - 1)
            if ($i ~ /^failed/) bad += $(i - 1)
            if ($i ~ /^ignored/) ignored += $(i - 1)
        }
    } END { print ok + 0, bad + 0, ignored + 0 }' "$log")
    if [ "$bad" = 0 ] && { [ "$status" != 0 ] || [ "$ok" = 0 ]; }; then
        bad=1
    fi
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + ignored))
    printf '%s   %s passed, %s failed, %s skipped\n' "$(elapsed)" "$ok" "$bad" "$ignored"
    grep -E '^test .* \.\.\. ignored|^skipped:' "$log" | sed 's/^/    /' || true
    [ "$bad" = 0 ] || { show_failed_tests "$log"; show_failure "$1"; repeat "$bad" "$@"; }
}

# repeat BAD NAME COMMAND…: runs each of a stage's failed tests alone, three times. A test that passes each time counts as passed, and
# as unsteady. What failed without the name of a test (a crash, a build) stays failed.
repeat() {
    local bad=$1 name=$2 log="$logs/$2.log" names each try kept
    shift 2
    [ -n "${alone[$name]:-}" ] || return 0
    mapfile -t names < <(sed -nE 's/^test (.*[^ ]) +\.\.\. FAILED.*/\1/p' "$log")
    [ "${#names[@]}" -gt 0 ] && [ "$bad" -le "$most_repeated" ] || return 0
    # A program of tests that crashed has no result, and its tests that did not run would be missed.
    [ "$(grep -cE '^ +(Running|Doc-tests) ' "$log")" -le "$(grep -c '^test result:' "$log")" ] || return 0
    mkdir -p "$logs/unsteady"
    for each in "${names[@]}"; do
        kept="$logs/unsteady/${each//[^A-Za-z0-9_.-]/_}.$(date +%Y%m%dT%H%M%S).log"
        cp "$log" "$kept"
        for try in 1 2 3; do
            # shellcheck disable=SC2086 # a list of words
            if ! run "$name-again" "$@" ${alone[$name]} "$each" \
                || ! grep -qE '^test result: (.* )?[1-9][0-9]* passed' "$logs/$name-again.log"; then
                printf '%s   %s failed again, alone (%s of 3)\n' "$(elapsed)" "$each" "$try"
                rm "$kept"
                continue 2
            fi
        done
        passed=$((passed + 1)) failed=$((failed - 1))
        unsteady+=("$name: $each: seen $(find "$logs/unsteady" -name "${each//[^A-Za-z0-9_.-]/_}.*.log" | wc -l) times, log $kept")
    done
}

# skip NAME REASON: a stage that cannot be run here.
skip() {
    printf '%s %s\n    skipped: %s: %s\n' "$(elapsed)" "$1" "$1" "$2"
    skipped=$((skipped + 1))
}

# What the failed tests of a log printed, by which a failure on another machine can be understood.
show_failed_tests() {
    awk '/^failures:/ { shown = 1 } /^test result:/ { shown = 0 }
        (shown || /^test .*FAILED/ || /^[ab]\| /) && lines++ < 150 { print "    " substr($0, 1, 200) }' "$1"
}
