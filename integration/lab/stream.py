"""stream.py server|client ADDRESS PORT PAUSE STOP: bytes both ways at once until the file STOP is there, all compared.

A stream of random bytes in each direction, neither faster than a link carries it, so that there is time to break that: PAUSE ms after
every ten pieces. The last eight bytes say how many precede them.
Ends with 0 if all of the other's bytes came, in order, once."""
import os
import random
import socket
import sys
import threading
import time

from ends import connect

ROLE, ADDRESS, PORT, STOP = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[5]
PIECE, PAUSE_EVERY, PAUSE = 30_000, 10, int(sys.argv[4]) / 1000
MINE, THEIRS = (1, 2) if ROLE == "server" else (2, 1)
COUNT = 8


def send(connection):
    source, number = random.Random(MINE), 0
    while number % PAUSE_EVERY or not os.path.exists(STOP):
        connection.sendall(source.randbytes(PIECE))
        if number % PAUSE_EVERY == 0:
            time.sleep(PAUSE)
        number += 1
    connection.sendall((number * PIECE).to_bytes(COUNT, "big"))
    connection.shutdown(socket.SHUT_WR)


def main():
    connection = connect(ROLE, ADDRESS, PORT)
    sender = threading.Thread(target=send, args=(connection,), daemon=True)
    sender.start()
    # What may be the count is held back.
    source, wanted, is_good, count, last = random.Random(THEIRS), b"", True, 0, b""
    while data := connection.recv(65536):
        data = last + data
        payload, last = data[:-COUNT], data[-COUNT:]
        while len(wanted) < len(payload):
            wanted += source.randbytes(PIECE)
        is_good &= payload == wanted[: len(payload)]
        wanted = wanted[len(payload) :]
        count += len(payload)
    sender.join()
    sent = int.from_bytes(last, "big")
    print(f"{ROLE}: {count} of {sent} bytes")
    sys.exit(0 if count == sent and is_good else f"{ROLE}: not the bytes that were sent")


main()
