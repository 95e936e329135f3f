"""exchange.py server|client ADDRESS PORT: four TCP connections, every byte checked.

On each: requests and answers of many sizes, small ones until the file LAB_GO is there (if that is set), then a stream in
both directions at once, then a half-close, after which the server says what it has received. LAB_LIBRARY, if set, must be
loaded."""
import hashlib
import os
import random
import socket
import sys
import threading
import time

from ends import be_counted

CONNECTIONS = 4
SIZES = [1, 2, 63, 64, 1000, 1448, 4095, 4096, 4097, 16384, 65537]
GO = os.environ.get("LAB_GO")
STREAM = int(os.environ.get("LAB_EXCHANGE_STREAM", 2 << 20))


def serve(connection):
    """Echoes, and ends with the digest of all of it."""
    digest = hashlib.sha256()
    with connection:
        while data := connection.recv(65536):
            digest.update(data)
            connection.sendall(data)
        connection.sendall(digest.digest())


def call(connection, number):
    source, digest = random.Random(number), hashlib.sha256()

    def receive(wanted, what):
        got = bytearray()
        while len(got) < len(wanted):
            data = connection.recv(len(wanted) - len(got))
            assert data, f"connection {number}: end of file in {what} after {len(got)} bytes"
            got += data
        assert got == wanted, f"connection {number}: wrong bytes in {what}"

    def ask(size):
        request = source.randbytes(size)
        digest.update(request)
        connection.sendall(request)
        receive(request, f"the answer of {size} bytes")

    with connection:
        for size in SIZES:
            ask(size)
        while GO and not os.path.exists(GO):
            ask(64)
            time.sleep(0.05)
        stream = source.randbytes(STREAM)
        digest.update(stream)
        sender = threading.Thread(target=connection.sendall, args=(stream,))
        sender.start()
        receive(stream, "the stream")
        sender.join()
        connection.shutdown(socket.SHUT_WR)
        receive(digest.digest(), "the digest")
        assert connection.recv(1) == b"", f"connection {number}: bytes after the end"


def all_of(jobs):
    """Runs each on a thread; the first failure ends the program."""
    failures = []

    def one(job):
        try:
            job()
        except BaseException as error:  # told below
            failures.append(error)

    threads = [threading.Thread(target=one, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        sys.exit(f"{failures[0]!r}")


role, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
library = os.environ.get("LAB_LIBRARY")
if library:
    assert os.path.realpath(library) in open("/proc/self/maps").read(), f"{library} is not loaded"
if role == "server":
    with socket.create_server((address, port)) as listener:
        connections = [listener.accept()[0] for _ in range(CONNECTIONS)]
    all_of([lambda c=c: serve(c) for c in connections])
else:
    connections = [socket.create_connection((address, port)) for _ in range(CONNECTIONS)]
    all_of([lambda c=c, n=n: call(c, n) for n, c in enumerate(connections)])
be_counted()
print(f"{role}: {CONNECTIONS} connections, {sum(SIZES) + STREAM} bytes each way on each")
