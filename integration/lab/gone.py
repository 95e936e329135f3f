"""gone.py server|client ADDRESS PORT CUT: keepalive ends a connection at rest to a host that is gone.

Two connections, which go to one link. Once the file CUT is there the client sends on the one until it is full, so that the link is
given up, and receives from the other, which has keepalive. Ends with 0 if that receive says that the connection has timed out."""
import errno
import os
import socket
import sys
import time

from ends import take

ROLE, ADDRESS, PORT, CUT = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
PIECE, EXCHANGES = 20_000, 10
# Silence ends the connection after 5 s.
PROBES = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}


def connections():
    if ROLE == "client":
        return [socket.create_connection((ADDRESS, PORT)) for _ in range(2)]
    with socket.create_server((ADDRESS, PORT)) as listener:
        return [listener.accept()[0] for _ in range(2)]


def fill(connection):
    connection.setblocking(False)
    try:
        while True:
            connection.send(bytes(PIECE))
    except BlockingIOError:
        pass


def main():
    busy, quiet = connections()
    for _ in range(EXCHANGES):
        for connection in busy, quiet:
            connection.sendall(bytes(PIECE))
            take(connection, PIECE)
        time.sleep(0.1)
    if ROLE == "client":
        for option, value in PROBES.items():
            quiet.setsockopt(socket.IPPROTO_TCP, option, value)
        quiet.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    print("at rest", flush=True)
    while not os.path.exists(CUT):
        time.sleep(0.05)
    if ROLE == "server":
        return
    fill(busy)
    try:
        quiet.recv(1)
    except OSError as error:
        print("the quiet one:", errno.errorcode[error.errno])
        timeout = quiet.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        sys.exit(0 if error.errno == errno.ETIMEDOUT and timeout == 0 else f"user timeout {timeout}")
    sys.exit("the quiet one: an end")


main()
