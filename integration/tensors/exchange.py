#!/usr/bin/env python3
"""Two processes that add up arrays as a data-parallel training step does: each makes a fresh array, sends it to the
other over a plain socket while it receives the other's into a fresh one, adds the two, and lets all of them go.

    exchange.py server MEGABYTES ROUNDS     prints its port
    exchange.py client MEGABYTES ROUNDS PORT

Then each prints a line of JSON with what it took, and ends when its standard input does. With numpy the arrays are
numpy's, else array.array's. It knows nothing of rdmasock.
"""
import array
import json
import resource
import socket
import sys
import threading
import time

try:
    import numpy
except ImportError:
    numpy = None


def fresh(count, value):
    """An array of so many numbers, all of them this one."""
    if numpy is not None:
        return numpy.full(count, value, dtype=numpy.int64)
    return array.array("q", [value]) * count


def empty(count):
    return numpy.empty(count, dtype=numpy.int64) if numpy is not None else array.array("q", bytes(8 * count))


def add(one, other):
    if numpy is not None:
        return one + other
    # Slow, so only some of them: what is measured is the exchange.
    return array.array("q", [a + b for a, b in zip(one[::1024], other[::1024])])


def is_all(total, value):
    return bool((total == value).all()) if numpy is not None else all(number == value for number in total)


def receive(connection, into):
    view = memoryview(into).cast("B")
    while len(view) > 0:
        got = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if got == 0:
            raise EOFError("the other end has gone")
        view = view[got:]


def step(connection, count, mine, theirs):
    gradient = fresh(count, mine)
    sender = threading.Thread(target=connection.sendall, args=(memoryview(gradient).cast("B"),))
    sender.start()
    other = empty(count)
    receive(connection, other)
    sender.join()
    if not is_all(add(gradient, other), mine + theirs):
        raise ValueError(f"the sum is not {mine + theirs}")


def main():
    is_server, megabytes, rounds = sys.argv[1] == "server", float(sys.argv[2]), int(sys.argv[3])
    if is_server:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            connection, _ = listener.accept()
    else:
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[4])))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    count = int(megabytes * 1_000_000) // 8
    sign = 1 if is_server else -3
    # Until it is on a link.
    for number in range(40):
        step(connection, 4096, sign * number, -3 // sign * number)
        time.sleep(0.005)
    times = []
    for number in range(rounds + 2):
        begun = time.perf_counter()
        step(connection, count, sign * number, -3 // sign * number)
        times.append(time.perf_counter() - begun)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"seconds": times[2:], "processor": used.ru_utime + used.ru_stime}), flush=True)
    sys.stdin.read()


main()
