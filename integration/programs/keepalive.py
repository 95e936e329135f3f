"""HTTP load over kept-alive connections for a number of seconds: keepalive.py PORT PATH SECONDS FILE

A connection that ends before the first byte of an answer is opened again and the request sent
once more, as every HTTP client does (RFC 9112, 9.3.1); anything else counts as a failed request.
Prints "<requests> requests, <failures> failed" and the distinct failures.
"""
import socket
import sys
import threading
import time

PORT, PATH, SECONDS = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
REQUEST = f"GET /{PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
counts, failures = [], []


def answer(conn):
    """The body, or None where the connection ended before the first byte."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            part = conn.recv(65536)
        except ConnectionResetError:
            part = b""
        if not part:
            if data:
                raise RuntimeError("end of file within the header")
            return None
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    lines = head.split(b"\r\n")
    if not lines[0].startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"status {lines[0]!r}")
    length = next(int(l.split(b":")[1]) for l in lines if l.lower().startswith(b"content-length"))
    while len(body) < length:
        part = conn.recv(65536)
        if not part:
            raise RuntimeError("end of file within the body")
        body += part
    if len(body) > length:
        raise RuntimeError("bytes after the body")
    return body


def load(expected):
    conn, end = None, time.monotonic() + SECONDS
    done = 0
    while time.monotonic() < end:
        try:
            is_new = conn is None
            if is_new:
                conn = socket.create_connection(("127.0.0.1", PORT), timeout=10)
            try:
                conn.sendall(REQUEST)
                body = answer(conn)
            except (BrokenPipeError, ConnectionResetError):
                body = None
            if body is None:
                conn.close()
                conn = None
                if is_new:
                    raise RuntimeError("a new connection ended without an answer")
                continue
            if body != expected:
                raise RuntimeError("wrong body")
            done += 1
        except Exception as error:  # counted: the load goes on
            failures.append(repr(error))
            conn = None
    counts.append(done)


with open(sys.argv[4], "rb") as file:
    content = file.read()
threads = [threading.Thread(target=load, args=(content,)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"{sum(counts)} requests, {len(failures)} failed", sorted(set(failures))[:5])
