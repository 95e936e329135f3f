"""direct.py server|client ADDRESS PORT ROUNDS WANTED: two programs that wait for each other and move much, every byte compared.

A round is so many pieces to the server, each with one to the client in return, that each have other bytes. Half of them are
received with MSG_WAITALL. Who sends waits in send and the other in recv, so the device can write from memory to memory. Who
sends without a pause would find nobody waiting: at the pace of emulated devices a ring is never read up within the time for
which a sender waits (docs/limits.md).
Rounds go on until both ends have seen what they WANT of their own counters (`rdmasock stat`), at least ROUNDS:

  any      nothing
  auto     some bytes went from memory to memory
  refused  of a round more than half of what was sent, and of what was received, went directly; from then on this end may lock no
           more memory: it was tried, and nothing of its memory was reached any more
  lent     bytes of this end's memory were read by the other's device, and the other way round

LAB_PIECE=2M makes the pieces larger. LAB_LIBRARY, if set, must be loaded."""
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time

from ends import be_counted, connect, take

ROLE, ADDRESS, PORT, ROUNDS, WANTED = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
PIECE, PIECES = {"": 160 << 10, "2M": 2 << 20}[os.environ.get("LAB_PIECE", "")], 16
# No two pieces of a run begin at the same byte of the source, nor on the same byte of a page.
STEP = 4099
# How long, s, what is wanted may be waited for: on a busy host a reader may come late again and again.
PATIENCE = 100
# What may be locked, bytes: less than a link's rings have locked already, so the device refuses the next. Half of it is more
# than the pieces' least, so the library tries.
LIMIT = 300_000


def source(role):
    return random.Random(role).randbytes(2 * PIECE)


MINE, THEIRS = source(ROLE), source("client" if ROLE == "server" else "server")


def begin_of(number):
    return number * STEP % PIECE


def send(connection, number):
    begin = begin_of(number)
    connection.sendall(memoryview(MINE)[begin : begin + PIECE])


def receive(connection, number, buffer):
    whole = memoryview(buffer)
    got = 0
    while got < PIECE:
        count = connection.recv_into(whole[got:], PIECE - got, socket.MSG_WAITALL if number % 2 else 0)
        assert count, f"{ROLE}: ended after {got} bytes of piece {number}"
        got += count
    begin = begin_of(number)
    assert buffer == THEIRS[begin : begin + PIECE], f"{ROLE}: wrong bytes in piece {number}"
    # Nothing of it is to be there when the next comes.
    buffer[:] = bytes(PIECE)


def counters():
    """This process's. Asked of the command, which is no program of the test: without the library."""
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(["rdmasock", "stat", "--json", "--pid", str(os.getpid())], env=env, capture_output=True, check=True, timeout=60)
    (instance,) = json.loads(done.stdout)["instances"]
    return instance["events"] | instance["totals"]


def is_seen(counted, last, before):
    """`last`: what was counted a round ago. `before`: when memory could no longer be locked, once it cannot."""
    sent, received = counted["direct_sent_bytes"], counted["direct_received_bytes"]
    if WANTED == "lent":
        return min(counted["rendezvous_sent_bytes"], counted["rendezvous_received_bytes"]) > 0
    if WANTED == "auto":
        return sent + received + counted["rendezvous_sent_bytes"] + counted["rendezvous_received_bytes"] > 0
    if not before:
        went = min(sent - last.get("direct_sent_bytes", 0), received - last.get("direct_received_bytes", 0))
        if went > PIECES * PIECE / 2:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT, LIMIT))
            before.update(counted)
        return False
    sent, received = sent - before["direct_sent_bytes"], received - before["direct_received_bytes"]
    # What must not be does not come about by waiting.
    assert sent == received == 0, f"{ROLE}: {sent} bytes sent from memory that cannot be registered, {received} received there"
    return counted["direct_unpinned"] > before["direct_unpinned"]


def connected():
    """The server of one run may be there later than the client, which ends after the server of the run before."""
    until = time.monotonic() + 60
    while True:
        try:
            return connect(ROLE, ADDRESS, PORT)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def main():
    library = os.environ.get("LAB_LIBRARY")
    assert not library or os.path.realpath(library) in open("/proc/self/maps").read(), f"{library} is not loaded"
    connection = connected()
    # Until it is promoted, and after that.
    until = time.monotonic() + 100
    go = os.environ.get("LAB_GO")
    if ROLE == "client":
        while go and not os.path.exists(go) and time.monotonic() < until:
            connection.sendall(b"?" * 64)
            take(connection, 64)
            time.sleep(0.05)
        connection.sendall(b"!" * 64)
    else:
        while take(connection, 64)[:1] == b"?":
            connection.sendall(b"?" * 64)
    rounds, mine, theirs, counted, before = 0, b"-", b"-", {}, {}
    buffer = bytearray(PIECE)
    until = time.monotonic() + PATIENCE
    while b"-" in (mine, theirs) or rounds < ROUNDS:
        for number in range(rounds * PIECES, (rounds + 1) * PIECES):
            if ROLE == "client":
                send(connection, number)
                receive(connection, number, buffer)
            else:
                receive(connection, number, buffer)
                send(connection, number)
        rounds += 1
        if WANTED == "any":
            mine = b"+"
        else:
            last, counted = counted, counters()
            mine = b"+" if is_seen(counted, last, before) else b"-"
            if mine == b"-" and time.monotonic() > until:
                mine = b"x"
        connection.sendall(mine)
        theirs = take(connection, 1)
        if b"x" in (mine, theirs):
            break
    be_counted()
    said = {name: counted[name] for name in counted if name.startswith(("direct_", "rendezvous_")) or name == "bulk_lost"}
    told = f"{ROLE}: {rounds} rounds of {PIECES * PIECE} bytes each way, {WANTED}: {said}"
    print(told)
    # Below the test's verdict.
    with open(os.environ["LAB_NOTES"], "a") as notes:
        notes.write(f"{told}\n")
    if b"x" in (mine, theirs):
        sys.exit(f"{ROLE}: not {WANTED} within {PATIENCE} s")


main()
