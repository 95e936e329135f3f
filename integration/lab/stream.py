"""stream.py server|client ADDRESS PORT BYTES PAUSE: bytes both ways at once, and their digests.

A stream of random bytes in each direction, neither faster than a link carries it, so that there is time to break that: PAUSE ms after
every ten pieces.
Ends with 0 if all of the other's bytes came, in order, once."""
import hashlib
import random
import socket
import sys
import threading
import time

ROLE, ADDRESS, PORT, BYTES = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
PIECE, PAUSE_EVERY, PAUSE = 30_000, 10, int(sys.argv[5]) / 1000
MINE, THEIRS = (1, 2) if ROLE == "server" else (2, 1)


def pieces(seed):
    source, done = random.Random(seed), 0
    while done < BYTES:
        piece = source.randbytes(min(PIECE, BYTES - done))
        done += len(piece)
        yield piece


def connect():
    if ROLE == "client":
        return socket.create_connection((ADDRESS, PORT))
    listener = socket.create_server((ADDRESS, PORT))
    return listener.accept()[0]


def send(connection):
    for number, piece in enumerate(pieces(MINE)):
        connection.sendall(piece)
        if number % PAUSE_EVERY == 0:
            time.sleep(PAUSE)
    connection.shutdown(socket.SHUT_WR)


def main():
    connection = connect()
    sender = threading.Thread(target=send, args=(connection,), daemon=True)
    sender.start()
    got, count = hashlib.sha256(), 0
    while data := connection.recv(65536):
        got.update(data)
        count += len(data)
    sender.join()
    wanted = hashlib.sha256()
    for piece in pieces(THEIRS):
        wanted.update(piece)
    print(f"{ROLE}: {count} of {BYTES} bytes")
    sys.exit(0 if got.digest() == wanted.digest() else f"{ROLE}: not the bytes that were sent")


main()
