"""The two ends of a TCP connection, for the lab's programs: how it is made, how so many bytes are read from it, and that
they are looked at before they are gone."""
import contextlib
import os
import signal
import socket
import time


def connect(role, address, port):
    if role == "client":
        return socket.create_connection((address, port))
    with socket.create_server((address, port)) as listener:
        return listener.accept()[0]


def take(connection, count):
    """Ends the program where the connection ends before."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 65536))
        if not piece:
            raise SystemExit(f"ended after {len(data)} of {count} bytes")
        data += piece
    return bytes(data)


def be_counted():
    """Whoever counts from outside (promotion.py) has to have looked before the process ends, and then makes the file LAB_FRESH."""
    fresh, deadline = os.environ.get("LAB_FRESH"), time.monotonic() + 20
    if fresh:
        with contextlib.suppress(FileNotFoundError):
            os.remove(fresh)
        os.kill(int(os.environ["LAB_WATCHER"]), signal.SIGUSR1)
        while not os.path.exists(fresh) and time.monotonic() < deadline:
            time.sleep(0.05)
