"""unread.py server|client ADDRESS PORT LOG FILES: both ends send all that they have before they read any of it.

Some of it while the promotion is under way, some on the link, some after that has failed: LOG is this process's log.
FILES/switched says that the link may be broken, and FILES/broken that it is. All of it fits the buffers of kernel TCP.
Ends with 0 if every send returned, and then every byte came, in order."""
import os
import random
import socket
import sys
import time

from ends import connect, take

ROLE, ADDRESS, PORT, LOG, FILES = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
MINE, THEIRS = (1, 2) if ROLE == "server" else (2, 1)
PIECES = (40_000, 24_000, 24_000)
WORD = b"x" * 64
PATIENCE = 30


def wait_until(condition, what):
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"{ROLE}: no {what} in {PATIENCE} s")
        time.sleep(0.005)


def wait_for(step):
    wait_until(lambda: step in open(LOG, encoding="utf-8", errors="replace").read(), step)


def main():
    connection = connect(ROLE, ADDRESS, PORT)
    connection.settimeout(PATIENCE)
    for _ in range(3):
        if ROLE == "client":
            connection.sendall(WORD)
        take(connection, len(WORD))
        if ROLE == "server":
            connection.sendall(WORD)
    source = random.Random(MINE)
    # The other's greeting has been read: nothing but SWITCH is to come, and that only when there is a link. And ours has
    # been sent: one behind what the other does not read would wait for it.
    wait_for("step=NeedLink" if ROLE == "client" else "markers are out")
    connection.sendall(source.randbytes(PIECES[0]))
    wait_for("step=Write(Switch)")
    open(f"{FILES}/switched", "w", encoding="utf-8").close()
    wait_until(lambda: os.path.exists(f"{FILES}/broken"), "broken link")
    connection.sendall(source.randbytes(PIECES[1]))
    wait_for("step=WriteResume")
    connection.sendall(source.randbytes(PIECES[2]))
    print(f"{ROLE}: all sent")
    # As long as the other may still wait for what it has to send.
    time.sleep(1)
    source = random.Random(THEIRS)
    wanted = b"".join(source.randbytes(n) for n in PIECES)
    if take(connection, len(wanted)) != wanted:
        sys.exit(f"{ROLE}: not the bytes that were sent")
    connection.shutdown(socket.SHUT_WR)
    if connection.recv(1):
        sys.exit(f"{ROLE}: more than was sent")


main()
