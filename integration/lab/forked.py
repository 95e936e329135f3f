"""forked.py server|client ADDRESS PORT: connections that change their holder in mid-conversation, at the server.

The client sends numbered lines ahead of the answers, so that some are unread when the holder changes; every line is answered
once, in order, by whoever holds the connection then."""
import os
import socket
import sys
import time

ROLE, ADDRESS, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])
LINES, CHANGE_AT, AHEAD = 3000, 1500, 20
# Lines that are sent slowly, in s, until the connection is on a link: between emulated machines that takes seconds.
SLOW, PAUSE = range(100, 1000), 0.02


def answer(connection, first, last):
    """Reads byte by byte, so that nothing of a later line is taken from who comes after."""
    for number in range(first, last):
        line = b""
        while not line.endswith(b"\n"):
            got = connection.recv(1)
            assert got, f"the connection ended at {number}"
            line += got
        assert line == b"%d\n" % number, (line, number)
        connection.sendall(line)


def serve(listener, how):
    connection = listener.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer(connection, 0, CHANGE_AT)
    if how == "fork":
        child = os.fork()
        if child == 0:
            answer(connection, CHANGE_AT, LINES)
            os._exit(0)
    else:
        # The program of an exec in a child: with the descriptor, and without the library.
        os.set_inheritable(connection.fileno(), True)
        child = os.fork()
        if child == 0:
            environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
            again = [sys.executable, __file__, "rest", str(connection.fileno()), "0"]
            os.execve(sys.executable, again, environment)
    connection.close()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"{how}: the child ended with {status}"


def ask():
    before = times_promoted()
    connection = socket.create_connection((ADDRESS, PORT))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answers, on_link = connection.makefile("rb"), False
    for number in range(LINES + AHEAD):
        if number < LINES:
            connection.sendall(b"%d\n" % number)
        if number >= AHEAD:
            line = answers.readline()
            assert line == b"%d\n" % (number - AHEAD), (line, number)
        if number in SLOW and not on_link:
            time.sleep(PAUSE)
            on_link = number % 10 == 0 and times_promoted() > before
    assert answers.read() == b"", "nothing after the last line"


def times_promoted():
    with open(os.environ["RDMASOCK_LOG_FILE"], encoding="utf-8") as log:
        return log.read().count("promoted slot")


def main():
    if ROLE == "rest":
        with socket.socket(fileno=int(ADDRESS)) as connection:
            answer(connection, CHANGE_AT, LINES)
    elif ROLE == "server":
        with socket.create_server((ADDRESS, PORT)) as listener:
            for how in ["fork", "exec"]:
                serve(listener, how)
    else:
        for _ in range(2):
            ask()


main()
