"""The two ends of a TCP connection, for the lab's programs: how it is made, and how so many bytes are read from it."""
import socket


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
