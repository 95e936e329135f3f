"""shutdown.py server|client ADDRESS PORT LOG: each way of shutdown() by the client on a promoted connection, with what
kernel TCP makes of it at both ends. LOG is this process's log, which tells of the promotion.
Ends with 0 if all went as on TCP."""
import random
import socket
import sys
import time

from ends import take

ROLE, ADDRESS, PORT, LOG = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
BALL, PATIENCE = 64, 60
DATA = random.Random(1).randbytes(50_000)


def expect(connection, data):
    assert take(connection, len(data)) == data, f"{ROLE}: other bytes"


def expect_end(connection):
    assert connection.recv(1) == b"", f"{ROLE}: more than was sent"


def promotions():
    with open(LOG, encoding="utf-8", errors="replace") as log:
        return log.read().count("promoted slot")


def serve_balls(connection):
    while take(connection, 1) == b"0":
        take(connection, BALL - 1)
        connection.sendall(b"0" * BALL)
    take(connection, BALL - 1)


def play(connection, wanted):
    until = time.monotonic() + PATIENCE
    while promotions() < wanted:
        assert time.monotonic() < until, "not promoted"
        connection.sendall(b"0" * BALL)
        take(connection, BALL)
        time.sleep(0.01)
    connection.sendall(b"1" * BALL)


def both(connection):
    if ROLE == "client":
        connection.sendall(DATA)
        connection.shutdown(socket.SHUT_RDWR)
        expect_end(connection)
        time.sleep(1)
    else:
        expect(connection, DATA)
        expect_end(connection)


def reading(connection):
    if ROLE == "client":
        connection.shutdown(socket.SHUT_RD)
        expect_end(connection)
        for _ in range(5):
            connection.sendall(DATA)
            time.sleep(0.2)
        connection.shutdown(socket.SHUT_WR)
        time.sleep(1)
    else:
        for _ in range(5):
            expect(connection, DATA)
        expect_end(connection)


def writing(connection):
    if ROLE == "client":
        connection.sendall(DATA)
        connection.shutdown(socket.SHUT_WR)
        expect(connection, DATA)
        expect_end(connection)
    else:
        expect(connection, DATA)
        expect_end(connection)
        connection.sendall(DATA)


def main():
    listener = socket.create_server((ADDRESS, PORT)) if ROLE == "server" else None
    for number, case in enumerate((both, reading, writing), 1):
        connection = listener.accept()[0] if listener else socket.create_connection((ADDRESS, PORT))
        connection.settimeout(PATIENCE)
        with connection:
            if listener:
                serve_balls(connection)
            else:
                play(connection, number)
            case(connection)
        print(f"{ROLE}: {case.__name__} as on TCP")


main()
