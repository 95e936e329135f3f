#!/usr/bin/env python3
"""exchange.py on kernel TCP and with the library between two processes on the local device, a model of one between
hosts: by the rings, and with large sends taken from the program's memory, without the registered allocator and with it.
The ways take turns; each row is the median of all rounds. Prints ratios of one run, and how often memory was registered.

    compare.py DIRECTORY [--quick] [--json FILE]     (DIRECTORY has librdmasock.so and the others)
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys

EXCHANGE = pathlib.Path(__file__).with_name("exchange.py")
WAYS = ["kernel TCP", "rings", "direct", "direct, allocator"]
EVENTS = ["direct_registrations", "alloc_hits", "alloc_misses"]


def lock_memory():
    """As much as may be locked, for what devices know is."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    for limit in ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (most, most)):
        try:
            return resource.setrlimit(resource.RLIMIT_MEMLOCK, limit)
        except (OSError, ValueError):
            pass


def environment(directory, way):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RDMASOCK", "LD_PRELOAD"))}
    if way == "kernel TCP":
        return env
    library = str(directory / "librdmasock.so")
    env |= {
        "LD_PRELOAD": library,
        "RDMASOCK_DEV_LOCAL_DEVICE": str(directory / "librdmasock_localnic.so"),
        "LOCALNIC": "roce",
        "RDMASOCK_CONTROL_PORT": "0",
        "RDMASOCK_PROMOTE_AFTER": "2r,16K",
    }
    if way.startswith("direct"):
        env["RDMASOCK_ZCOPY_MIN"] = "128K"
    if way.endswith("allocator"):
        env["RDMASOCK_ALLOC"] = "registered"
        env["LD_PRELOAD"] = f"{library} {directory / 'librdmasock_alloc.so'}"
    return env


def counts(directory, pid):
    said = subprocess.run(
        [directory / "rdmasock", "stat", "--json", "--pid", str(pid)], capture_output=True, text=True, check=False
    )
    instances = json.loads(said.stdout or "{}").get("instances", []) if said.returncode == 0 else []
    return {event: sum(one["events"].get(event, 0) for one in instances) for event in EVENTS}


def play(directory, way, megabytes, rounds):
    env = environment(directory, way)
    begin = lambda *words: subprocess.Popen(
        [sys.executable, EXCHANGE, *map(str, words)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    server = begin("server", megabytes, rounds)
    client = begin("client", megabytes, rounds, server.stdout.readline().strip())
    try:
        said = [json.loads(end.stdout.readline() or "null") for end in (server, client)]
        if None in said:
            sys.exit(f"{way}, {megabytes} MB: a program has failed")
        return {
            "seconds": said[1]["seconds"],
            "processor": sum(end["processor"] for end in said),
            "counts": counts(directory, client.pid),
        }
    finally:
        for end in (server, client):
            end.stdin.close()
            end.wait(timeout=60)


def main():
    words = argparse.ArgumentParser()
    words.add_argument("directory", type=pathlib.Path)
    words.add_argument("--quick", action="store_true")
    words.add_argument("--json", type=pathlib.Path)
    words = words.parse_args()
    turns, rounds = (1, 5) if words.quick else (5, 20)
    rows = []
    lock_memory()
    print(f"{'MB':>4}  {'way':<18} {'ms a step':>9} {'x TCP':>6} {'x direct':>8} {'cpu x TCP':>9}  registrations")
    for megabytes in (4, 16, 64):
        played = {way: [] for way in WAYS}
        for _ in range(turns):
            for way in WAYS:
                played[way].append(play(words.directory.resolve(), way, megabytes, rounds))
        median = {way: statistics.median(s for turn in played[way] for s in turn["seconds"]) for way in WAYS}
        processor = {way: sum(turn["processor"] for turn in played[way]) for way in WAYS}
        for way in WAYS:
            last = played[way][-1]["counts"]
            row = {
                "megabytes": megabytes,
                "way": way,
                "seconds": median[way],
                "of_tcp": median["kernel TCP"] / median[way],
                "of_direct": median["direct"] / median[way],
                "processor_of_tcp": processor[way] / processor["kernel TCP"],
                **last,
            }
            rows.append(row)
            registered = "" if way == "kernel TCP" else f"{last['direct_registrations']}, {last['alloc_hits']} kept"
            print(
                f"{megabytes:>4}  {way:<18} {1000 * median[way]:>9.2f} {row['of_tcp']:>6.2f} {row['of_direct']:>8.2f} "
                f"{row['processor_of_tcp']:>9.2f}  {registered}",
                flush=True,
            )
    slower = [row for row in rows if row["way"] == "direct, allocator" and row["of_direct"] < 1]
    for row in slower:
        print(f"slower with the allocator: {row['megabytes']} MB, {row['of_direct']:.2f} x")
    if words.json:
        words.json.write_text(json.dumps(rows, indent=1) + "\n")


main()
