"""Pipelined load with checked answers for memcached's text protocol: memcache.py PORT [ADDRESS CONNECTIONS KEYS]

20 connections with 500 keys by default, each with its own keys: sets in one burst, gets in one burst, a multi-get, then
incr, delete and a value of 900 kB. With LAB_GO in the environment, small gets before that until this file is there. Prints
"ok <keys>".
"""
import os
import socket
import sys
import threading
import time

PORT = int(sys.argv[1])
ADDRESS, CONNECTIONS, KEYS = (sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if sys.argv[2:] else ("127.0.0.1", 20, 500)
failures = []


def value(number, key):
    return (b"%d:%d;" % (number, key)) * (key % 200 + 1)


def one(number):
    conn = socket.create_connection((ADDRESS, PORT))
    stream = conn.makefile("rb")

    def send_all(data):
        # From a thread of its own, so that a burst cannot fill both directions and stop.
        sender = threading.Thread(target=conn.sendall, args=(data,))
        sender.start()
        return sender

    def expect(line):
        got = stream.readline()
        assert got == line, (number, got, line)

    def expect_value(key, data):
        expect(b"VALUE %s 0 %d\r\n" % (key, len(data)))
        assert stream.read(len(data) + 2) == data + b"\r\n", (number, key)

    def set_(key, data):
        return b"set %s 0 0 %d\r\n%s\r\n" % (key, len(data), data)

    go = os.environ.get("LAB_GO")
    while go and not os.path.exists(go):
        conn.sendall(b"get none\r\n")
        expect(b"END\r\n")
        time.sleep(0.05)
    name = lambda key: b"k%d-%d" % (number, key)
    sender = send_all(b"".join(set_(name(k), value(number, k)) for k in range(KEYS)))
    for _ in range(KEYS):
        expect(b"STORED\r\n")
    sender.join()
    sender = send_all(b"".join(b"get %s\r\n" % name(k) for k in range(KEYS)))
    for k in range(KEYS):
        expect_value(name(k), value(number, k))
        expect(b"END\r\n")
    sender.join()
    conn.sendall(b"get " + b" ".join(name(k) for k in range(50)) + b"\r\n")
    for k in range(50):
        expect_value(name(k), value(number, k))
    expect(b"END\r\n")
    conn.sendall(set_(b"n%d" % number, b"41") + b"incr n%d 1\r\ndelete n%d\r\n" % (number, number))
    for line in (b"STORED\r\n", b"42\r\n", b"DELETED\r\n"):
        expect(line)
    large = value(number, 199)[:1000] * 900
    conn.sendall(set_(b"large%d" % number, large) + b"get large%d\r\n" % number)
    expect(b"STORED\r\n")
    expect_value(b"large%d" % number, large)
    expect(b"END\r\n")
    conn.sendall(b"quit\r\n")
    assert stream.read() == b""
    conn.close()


def guarded(number):
    try:
        one(number)
    except BaseException as error:  # reported by the main thread
        failures.append(f"connection {number}: {error!r}")


threads = [threading.Thread(target=guarded, args=(n,)) for n in range(CONNECTIONS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
print("ok", CONNECTIONS * KEYS)
