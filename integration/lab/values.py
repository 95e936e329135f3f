"""values.py ADDRESS PORT FILE: gets FILE, which is redis's value "large", and a value of as many other bytes, each compared.

Answers are waited for in recv with a buffer for all that is missing. Before each value goes a part of it: a receive tells the
sender of its buffer when the one before has brought much, and over a second queue pair, which the first of them has made. Whether
a buffer is told of before the server begins to answer is chance, so the first value is asked for until it has gone directly in
part, at most TIMES: after a pause each, in which the server's end leaves the send buffer that the answer before has filled (within
a second), for what is in there goes by rings. Begins when the file LAB_GO is there."""
import json
import os
import socket
import subprocess
import sys
import time

PART, TIMES, PAUSE = 60_000, 6, 1.3


def ask(server, wanted, *words):
    server.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
    answer, got = bytearray(len(wanted)), 0
    while got < len(wanted):
        count = server.recv_into(memoryview(answer)[got:])
        assert count, f"ended after {got} bytes"
        got += count
    assert answer == wanted, f"not the answer of {len(wanted)} bytes to {words[0]}"


def bulk(data):
    return b"$%d\r\n%b\r\n" % (len(data), data)


def received_directly():
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(["rdmasock", "stat", "--json", "--pid", str(os.getpid())], env=env, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)["instances"][0]["events"]["direct_received_bytes"]


def main():
    with open(sys.argv[3], "rb") as file:
        value = file.read()
    server = socket.create_connection((sys.argv[1], int(sys.argv[2])))

    def part():
        ask(server, bulk(value[:PART]), b"GETRANGE", b"large", b"0", b"%d" % (PART - 1))

    while not os.path.exists(os.environ["LAB_GO"]):
        part()
        time.sleep(0.05)
    for number in range(TIMES):
        until = time.monotonic() + PAUSE
        while time.monotonic() < until:
            part()
            time.sleep(0.1)
        ask(server, bulk(value), b"GET", b"large")
        if received_directly():
            break
    value = value[::-1]
    ask(server, b"+OK\r\n", b"SET", b"large", value)
    ask(server, bulk(value), b"GET", b"large")
    print(f"values of {len(value)} bytes: {number + 3} moved, {received_directly()} bytes directly")


main()
