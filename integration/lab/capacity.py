"""capacity.py server|client ADDRESS PORT LOG: how much a connection between hosts takes at once from a client that does not wait,
while the server does not read, and that all of it arrives, also after the client has ended. LOG is this process's log, which
tells of the promotion.
Ends with 0 if it is as much as kernel TCP takes of a connection beside it, and every byte came."""
import random
import socket
import struct
import sys
import time

from ends import take

ROLE, ADDRESS, PORT, LOG = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
BALL, PATIENCE = 64, 60
AT_MOST = 16 << 20
# More than any ring but the largest holds.
AT_LEAST = 2 << 20


def data(seed):
    return random.Random(seed).randbytes(AT_MOST)


def is_promoted():
    with open(LOG, encoding="utf-8", errors="replace") as log:
        return "promoted slot" in log.read()


def serve_balls(connection):
    while take(connection, 1) == b"0":
        take(connection, BALL - 1)
        connection.sendall(b"0" * BALL)
    take(connection, BALL - 1)


def play(connection):
    until = time.monotonic() + PATIENCE
    while not is_promoted():
        assert time.monotonic() < until, "not promoted"
        connection.sendall(b"0" * BALL)
        take(connection, BALL)
        time.sleep(0.01)
    connection.sendall(b"1" * BALL)


def fill(connection, seed, piece):
    """As much as is taken at once."""
    whole, sent = memoryview(data(seed)), 0
    # With a time-out Python would wait for room.
    connection.setblocking(False)
    while sent < AT_MOST:
        try:
            sent += connection.send(whole[sent:sent + piece])
        except BlockingIOError:
            break
    connection.settimeout(PATIENCE)
    return sent


def expect(connection, control, seed):
    sent, = struct.unpack("<Q", take(control, 8))
    assert take(connection, sent) == data(seed)[:sent], "other bytes"
    control.sendall(b"d")
    return sent


def client(connection, control, cold):
    def tell(sent):
        control.sendall(struct.pack("<Q", sent))

    kernel = fill(cold, 0, 4096)
    tell(kernel)
    take(control, 1)
    play(connection)
    for seed, piece in enumerate((4096, 1 << 20), 1):
        sent = fill(connection, seed, piece)
        tell(sent)
        assert take(control, 1) == b"d"
        print(f"client: {sent} bytes at once in pieces of {piece}, of TCP {kernel}")
        assert max(AT_LEAST, kernel * 9 // 10) <= sent < AT_MOST, "not as TCP"
        # Until everything has its first size again.
        time.sleep(2.5)
    tell(fill(connection, 3, 65536))


def server(connection, control, cold):
    expect(cold, control, 0)
    serve_balls(connection)
    for seed in (1, 2):
        expect(connection, control, seed)
    sent, = struct.unpack("<Q", take(control, 8))
    # Until the client's process is gone.
    time.sleep(6)
    assert take(connection, sent) == data(3)[:sent], "other bytes"
    assert connection.recv(1) == b"", "more than was sent"
    print(f"server: the last {sent} bytes came after the client had ended")


def main():
    listener = socket.create_server((ADDRESS, PORT)) if ROLE == "server" else None
    ends = []
    for _ in range(3):
        ends.append(listener.accept()[0] if listener else socket.create_connection((ADDRESS, PORT)))
        ends[-1].settimeout(PATIENCE)
    (server if listener else client)(*ends)


main()
