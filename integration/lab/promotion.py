#!/usr/bin/env -S -u LD_PRELOAD python3 -IS
"""Whether the programs of a test were promoted, told by everything but the programs.

promotion.py FACTS [MODE OTHER CHECKS]

Makes FACTS.fresh once everything is counted, and again after a sample that SIGUSR1 asks for. At SIGTERM it takes the last
sample and writes FACTS (JSON, one line); on node a, where there is more on the command line, it judges them then with OTHER,
node b's facts, against what the MODE demands, and appends the lines on promotion to CHECKS. All in one process, because
an emulated machine takes a second to start Python.

Facts: what `rdmasock stat` says of the processes in this process group, which queue pairs the kernel lists
for each (`rdma resource`), what the device has counted, and the bytes on the wire to and from the ports of the
tests (7480 to 7499) and of the RDMA device, headers included, which the kernel's packet filter counts. The
filter is set up on machines of ours only: real hosts are left as they are."""
import json
import os
import signal
import subprocess
import sys
import threading

# Between samples, s. One process goes on reading the counters in shared memory, which costs the programs least; the command
# that lists queue pairs has to be started for each.
INTERVAL = 1
TABLE = "rdmasock_lab"
RDMA = os.environ.get("LAB_RDMA", "")
DEVICE = os.environ.get("LAB_DEVICE", "")
COUNTERS = f"/sys/class/infiniband/{RDMA}/ports/1/hw_counters"
# What went directly, or was to, in the whole process.
EVENTS = ("direct_sent_bytes", "direct_received_bytes", "direct_unpinned")
BYTES = ("tx_tcp_bytes", "rx_tcp_bytes", "tx_link_bytes", "rx_link_bytes", "promoted", "demoted", "streams")
# What a packet of the smallest path carries at most; there may be more packets, never fewer.
LARGEST_PACKET = 4096
# Of all bytes, what has to be on a link: before a promotion, and while it is under way, TCP carries them. That takes
# a second or more on an emulated processor, for each client process, and the tests are short without --full.
SHARE = 0.5 if os.environ.get("LAB_FULL") else 0.2


def output(*command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# ---- watching

def filter_packets():
    """Counts from zero. The barriers' port is nobody's payload."""
    device = "udp dport 4791 counter name of_device" if DEVICE == "rxe" else "meta l4proto tcp counter name of_device"
    chains = "".join(
        f"""chain {hook} {{
            type filter hook {hook} priority 0; policy accept;
            {name} "lo" accept
            tcp dport 7480-7499 counter name of_programs accept
            tcp sport 7480-7499 counter name of_programs accept
            tcp dport 7077 accept
            tcp sport 7077 accept
            {device}
        }}
        """
        for hook, name in (("input", "iifname"), ("output", "oifname"))
    )
    text = f"""add table inet {TABLE}
        delete table inet {TABLE}
        table inet {TABLE} {{
            counter of_programs {{ }}
            counter of_device {{ }}
            {chains}
        }}
        """
    output("nft", "-f", "-", text=text)


def packet_bytes():
    listed = json.loads(output("nft", "-j", "list", "counters", "table", "inet", TABLE))["nftables"]
    return {entry["counter"]["name"]: entry["counter"]["bytes"] for entry in listed if "counter" in entry}


def device_counters():
    """Empty where the driver has none, as siw."""
    counters = {}
    for name in ("sent_pkts", "rcvd_pkts"):
        try:
            with open(f"{COUNTERS}/{name}") as file:
                counters[name] = int(file.read())
        except OSError:
            pass
    return counters


def is_ours(pid):
    try:
        return os.getpgid(pid) == os.getpgrp()
    except OSError:
        return False


def queue_pairs():
    """Number of reliably connected queue pairs of programs. The kernel knows them by the thread that has made them,
    which may have ended since: so they are not told by process."""
    if not RDMA:
        return 0
    pairs = json.loads(output("rdma", "-j", "resource", "show", "qp") or "[]")
    return sum(pair.get("type") == "RC" and pair.get("ifname") == RDMA for pair in pairs)


class Watch:
    def __init__(self):
        self.instances, self.queue_pairs, self.links = {}, 0, 0
        self.lock = threading.Lock()

    def follow(self, documents):
        """Takes what `rdmasock stat --watch` prints, as long as it does."""
        for line in documents:
            self.take(json.loads(line))

    def take(self, document):
        with self.lock:
            self.links = max(self.links, sum(self.look(one) for one in document["instances"] if is_ours(one["pid"])))
            self.queue_pairs = max(self.queue_pairs, queue_pairs())

    def look(self, instance):
        """Gives the number of its links."""
        known = self.instances.setdefault(
            instance["id"],
            {"pid": instance["pid"], "program": instance["program"], "peers": [], "fabrics": [], "links": 0, "twice": 0, "why": []},
        )
        # They only grow, and a sample may be taken in after a later one.
        known.update({name: max(known.get(name, 0), instance["totals"][name]) for name in BYTES})
        known.update({name: max(known.get(name, 0), instance["events"][name]) for name in EVENTS})
        links = [link for link in instance["links"] if link["state"] != "down"]
        peers = [link["peer"] for link in links]
        known["links"] = max(known["links"], len(links))
        known["twice"] = max([known["twice"]] + [peers.count(peer) - 1 for peer in peers])
        known["peers"] = sorted(set(known["peers"]) | set(peers))
        known["fabrics"] = sorted(set(known["fabrics"]) | {link["fabric"] for link in links})
        reasons = {stream["why_tcp"] for stream in instance["streams"] if stream["why_tcp"]}
        known["why"] = sorted(set(known["why"]) | reasons)[:4]
        return len(links)


def watch(path):
    """Gives the facts."""
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    stat = [os.path.join(os.environ["LAB_BUILD"], "rdmasock"), "stat", "--json"]
    seen, counts_packets = Watch(), DEVICE in ("siw", "rxe")
    if counts_packets:
        filter_packets()
    before = device_counters()
    with subprocess.Popen([*stat, "--watch", str(INTERVAL)], stdout=subprocess.PIPE, text=True) as stream:
        follower = threading.Thread(target=seen.follow, args=(stream.stdout,), daemon=True)
        follower.start()
        open(f"{path}.fresh", "w").close()
        while signal.sigwait(signals) == signal.SIGUSR1:
            seen.take(json.loads(output(*stat)))
            open(f"{path}.fresh", "w").close()
        # What the others have missed.
        seen.take(json.loads(output(*stat)))
        is_followed = follower.is_alive()
        stream.kill()
        # Before what it reads is closed.
        follower.join()
    if not is_followed:
        sys.exit("nobody has sampled the counters")
    after = device_counters()
    facts = {
        "instances": seen.instances,
        "queue_pairs": seen.queue_pairs,
        "links": seen.links,
        "device": {name: after[name] - before.get(name, 0) for name in after},
        "wire": packet_bytes() if counts_packets else None,
    }
    with open(path, "w") as file:
        file.write(json.dumps(facts, separators=(",", ":")) + "\n")
    return facts


# ---- judging

def total(facts, *names):
    return sum(instance[name] for instance in facts["instances"].values() for name in names)


def link_bytes(facts):
    return total(facts, "tx_link_bytes", "rx_link_bytes")


def tcp_bytes(facts):
    return total(facts, "tx_tcp_bytes", "rx_tcp_bytes")


def is_loaded(node, facts, wanted):
    """The library was active exactly where this mode has it. Clients on a busy machine may be too short to be seen."""
    number = len(facts["instances"])
    if number > 0 and not wanted or number == 0 and wanted and node == "a":
        return f"node {node}: rdmasock stat lists {number} processes of the test, expected {'some' if wanted else 'none'}"
    return None


def on_tcp(node, facts):
    if link_bytes(facts) or total(facts, "promoted"):
        return f"node {node}: promoted, although the other node has no library: {facts['instances']}"
    return None


def judge_counters(a, b):
    said = []
    good = True
    for node, facts in (("a", a), ("b", b)):
        link, tcp, promoted = link_bytes(facts), tcp_bytes(facts), total(facts, "promoted")
        why = sorted({reason for instance in facts["instances"].values() for reason in instance["why"]})
        said.append(f"{node}: {link} of {link + tcp} bytes on a link, {promoted} promoted{', ' + '; '.join(why) if why else ''}")
        good &= promoted > 0 and link >= SHARE * (link + tcp) > 0
    return good, " | ".join(said)


def judge_links(a, b, pairs):
    """One link between two processes, which is one queue pair, and with direct transfers one more; beside them at most one that
    is being made or taken down."""
    said = []
    good = True
    for node, facts, other in (("a", a, b), ("b", b, a)):
        busy = {name: one for name, one in facts["instances"].items() if one["tx_link_bytes"] + one["rx_link_bytes"] > 0}
        good &= bool(busy)
        for name, one in busy.items():
            good &= one["fabrics"] == ["verbs"] and one["twice"] == 0
            good &= all(peer in other["instances"] for peer in one["peers"])
            said.append(f"{node}: {one['program']} {one['links']} links at once over {one['fabrics']} to {len(one['peers'])} processes")
        good &= 0 < facts["queue_pairs"] <= pairs * facts["links"] + 1
        said.append(f"{node}: at most {facts['links']} links and {facts['queue_pairs']} queue pairs at once")
    return good, " | ".join(said)


def judge_device(a, b):
    """The device, and its wire, have carried what the library says is on links."""
    said = []
    good = True
    for node, facts in (("a", a), ("b", b)):
        link = link_bytes(facts)
        good &= link > 0
        if facts["wire"]:
            good &= facts["wire"]["of_device"] >= 0.9 * link
            said.append(f"{node}: {facts['wire']['of_device']} bytes on the device's wire")
        if facts["device"]:
            packets = sum(facts["device"].values())
            good &= packets * LARGEST_PACKET >= link and packets > 0
            said.append(f"{node}: {packets} packets of the device")
        if not facts["wire"] and not facts["device"]:
            said.append(f"{node}: this device has no counters")
    return good, " | ".join(said)


def judge_tcp(a, b):
    """The payload has left the programs' TCP connections."""
    said = []
    good = True
    for node, facts in (("a", a), ("b", b)):
        if not facts["wire"]:
            # Nothing but the library's own word, which judge_counters has read.
            said.append(f"{node}: packets are not counted on real hosts")
            continue
        # With headers and what was sent again; what is on a link is not there too.
        good &= facts["wire"]["of_programs"] < 1.5 * tcp_bytes(facts) + 0.25 * link_bytes(facts)
        said.append(f"{node}: {facts['wire']['of_programs']} bytes on the wire of the programs' TCP")
    return good, " | ".join(said)


def judge_direct(a, b, directly):
    """Bytes that a device took from, or put into, the memory of programs: where they are to be, and nowhere else."""
    said = []
    good = True
    for node, facts in (("a", a), ("b", b)):
        for way in ("sent", "received"):
            count = total(facts, f"direct_{way}_bytes")
            good &= (count > 0) == (f"{node}-{way}" in directly)
            said.append(f"{node}: {count} {way}")
        said.append(f"{total(facts, 'direct_unpinned')} times memory was not registered")
    return good, " | ".join(said)


def judge(mode, a, b, directly=()):
    """What is wrong, and the lines on promotion. `directly`: what is to have gone so, as "b-received"."""
    is_direct = mode == "direct"
    at_a, at_b = (mode in ("both", "direct", here) for here in ("server-only", "client-only"))
    wrong = [is_loaded("a", a, at_a), is_loaded("b", b, at_b)]
    if not (at_a and at_b):
        return [said for said in wrong + [on_tcp("a", a), on_tcp("b", b)] if said], []
    rules = {
        "counters": judge_counters(a, b),
        "one-link": judge_links(a, b, 2 if is_direct else 1),
        "device": judge_device(a, b),
        "tcp-is-empty": judge_tcp(a, b),
        "direct": judge_direct(a, b, directly if is_direct else ()),
    }
    lines = []
    for name, (good, text) in rules.items():
        lines.append(f"{name} {'ok' if good else 'FAILED'} ({text})")
    return [said for said in wrong if said], lines


def main():
    path, *judging = sys.argv[1:]
    a = watch(path)
    if not judging:
        return
    mode, other, checks = judging
    with open(other) as file:
        b = json.load(file)
    wrong, lines = judge(mode, a, b, os.environ.get("LAB_DIRECT", "").split())
    print(json.dumps({"a": a, "b": b}))
    with open(checks, "a") as out:
        out.writelines(f"{line}\n" for line in lines)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
