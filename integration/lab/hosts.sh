# The nodes as two real hosts over ssh (sourced by scripts/lab, after vm.sh, whose functions it replaces).
# A node lives as long as its ssh and the ssh's input: what it needs goes there in one archive, into a directory that
# it removes itself. Nothing is installed on the hosts, and no device is made.
# shellcheck shell=bash disable=SC2004,SC2034,SC2154 # some variables are shared with scripts/lab

declare -A host=() address=() feeder=()

# parse_hosts A,B [X,Y]
parse_hosts() {
    local node names addresses
    IFS=, read -r -a names <<<"$1"
    IFS=, read -r -a addresses <<<"$2"
    [[ ${#names[@]} = 2 && -n ${names[0]} && -n ${names[1]} ]] || usage_error "--hosts takes two names, A,B, not '$1'"
    [[ ${names[0]} != -* && ${names[1]} != -* ]] || usage_error "a host's name begins with '-'"
    [ -z "$2" ] || [ "${#addresses[@]}" = 2 ] || usage_error "--addresses takes two, X,Y, not '$2'"
    host=([a]=${names[0]} [b]=${names[1]})
    address=([a]=${addresses[0]:-} [b]=${addresses[1]:-})
    for node in a b; do
        [ -n "${address[$node]}" ] || address[$node]=$(address_of "${host[$node]}")
        [[ ${address[$node]} =~ ^[0-9]+(\.[0-9]+){3}$ ]] || usage_error "'${address[$node]}' is not an IPv4 address"
    done
}

# What ssh's configuration makes of a name, resolved here.
address_of() {
    local name
    name=$(ssh -G "$1" 2>/dev/null | sed -n 's/^hostname //p')
    getent ahostsv4 "${name:-${1#*@}}" | awk '{ print $1; exit }' | grep . \
        || die "no IPv4 address for $1" "name the RDMA network's addresses: --addresses X,Y"
}

# The lab and the release build, placed as in this tree.
prepare_hosts() {
    ln -s "$PWD/integration" "$run/integration"
    mkdir -p "$run/target"
    ln -s "$build" "$run/target/release"
    local built
    built=$(cd "$run" && ls target/release/{librdmasock.so,librdmasock_verbs.so,rdmasock,lab-barrier,bench-lab,examples/verbs-peer} 2>/dev/null) || true
    # shellcheck disable=SC2086 # a list of words
    tar -C "$run" -czhf "$run/archive" integration/lab integration/programs $built
}

# For the shell of a stranger, which need not be bash.
quoted() {
    local word
    for word in "$@"; do
        printf "'%s' " "${word//\'/\'\\\'\'}"
    done
}

# Unpacks $1 bytes of its input and goes on as what is inside; all that is left of a broken attempt is removed.
# shellcheck disable=SC2016 # expanded over there
bootstrap='size=$1; shift
dir=$(mktemp -d /tmp/rdmasock-node.XXXXXX) || exit
head -c "$size" | tar -xzf - -C "$dir" && exec "$dir/integration/lab/remote" "$dir" "$@"
rm -rf "$dir"'

start_node() {
    local node=$1 other=b size words
    [ "$node" = a ] || other=a
    size=$(stat -c %s "$run/archive")
    words=(env "LAB_NODE=$node" "LAB_ADDR=${address[$node]}" "LAB_PEER=${address[$other]}" "LAB_DEVICE=$device" "${settings[@]}"
        sh -c "$bootstrap" lab "$size" "$timeout" "${command[@]}")
    mkfifo "$run/$node/in"
    { cat "$run/archive"; bound TERM sleep infinity; } >"$run/$node/in" 2>/dev/null &
    feeder[$node]=$!
    bound TERM ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -T "${host[$node]}" "exec $(quoted "${words[@]}")" \
        <"$run/$node/in" >"$run/$node/out" 2>"$run/$node/ssh" &
    pid[$node]=$!
}

# Closes the input, and leaves the rest to the other end.
stop_node() { kill -TERM "${feeder[$1]}" 2>/dev/null || true; }

show_console() {
    local line
    while IFS= read -r line; do
        note "ssh ${host[$1]}: $line"
    done < <(tail -n 25 "$run/$1/ssh")
}
