"""Echo servers and a checking client in Python's three styles.

    echo.py server asyncio|selectors|threads PORT
    echo.py client asyncio|selectors|threads PORT CONNECTIONS ROUNDS

The client sends messages of many sizes on every connection, checks each answer byte for byte,
then half-closes and expects the server's end of file. Prints "ok <bytes>" at the end.
"""
import asyncio
import hashlib
import selectors
import socket
import sys
import threading

SIZES = [1, 8, 100, 1000, 4095, 4096, 4097, 20000, 70001]


def message(connection, turn):
    size = SIZES[(connection + turn) % len(SIZES)]
    seed = hashlib.sha256(b"%d/%d" % (connection, turn)).digest()
    return (seed * (size // len(seed) + 1))[:size]


# ---- asyncio

async def asyncio_serve(port):
    async def handle(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


async def asyncio_talk(port, connections, rounds):
    async def one(number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        total = 0
        for turn in range(rounds):
            data = message(number, turn)
            writer.write(data)
            await writer.drain()
            assert await reader.readexactly(len(data)) == data, (number, turn)
            total += len(data)
        writer.write_eof()
        assert await reader.read() == b"", "bytes after the last answer"
        writer.close()
        return total

    return sum(await asyncio.gather(*(one(n) for n in range(connections))))


# ---- selectors: one thread, nonblocking sockets

def selectors_serve(port):
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    pending = {}
    while True:
        for key, _ in selector.select():
            conn = key.fileobj
            if conn is listener:
                conn, _ = listener.accept()
                conn.setblocking(False)
                pending[conn] = bytearray()
                selector.register(conn, selectors.EVENT_READ)
                continue
            queue, eof = pending[conn], False
            if key.events & selectors.EVENT_READ:
                try:
                    data = conn.recv(65536)
                    queue += data
                    eof = not data
                except BlockingIOError:
                    pass
            try:
                while queue:
                    del queue[: conn.send(queue)]
            except BlockingIOError:
                pass
            if eof and not queue:
                selector.unregister(conn)
                del pending[conn]
                conn.close()
            else:
                selector.modify(conn, selectors.EVENT_WRITE if queue else selectors.EVENT_READ)


def selectors_talk(port, connections, rounds):
    selector = selectors.SelectSelector()
    total = 0
    open_ = 0
    for number in range(connections):
        conn = socket.create_connection(("127.0.0.1", port))
        conn.setblocking(False)
        selector.register(conn, selectors.EVENT_WRITE, [number, 0, bytearray(message(number, 0)), b""])
        open_ += 1
    while open_:
        for key, events in selector.select():
            conn, state = key.fileobj, key.data
            number, turn, unsent, got = state
            want = message(number, turn) if turn < rounds else b""
            if events & selectors.EVENT_WRITE:
                del unsent[: conn.send(unsent)]
                if not unsent:
                    selector.modify(conn, selectors.EVENT_READ, state)
                continue
            data = conn.recv(65536)
            if turn == rounds:
                assert data == b"", "bytes after the last answer"
                selector.unregister(conn)
                conn.close()
                open_ -= 1
                continue
            assert data, "end of file in mid-answer"
            state[3] = got = got + data
            if len(got) < len(want):
                continue
            assert got == want, (number, turn)
            total += len(got)
            state[1], state[3] = turn + 1, b""
            if turn + 1 == rounds:
                conn.shutdown(socket.SHUT_WR)
            else:
                state[2] = bytearray(message(number, turn + 1))
                selector.modify(conn, selectors.EVENT_WRITE, state)
    return total


# ---- threads that block

def threads_serve(port):
    def handle(conn):
        with conn:
            while data := conn.recv(65536):
                conn.sendall(data)

    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    while True:
        conn, _ = listener.accept()
        threading.Thread(target=handle, args=(conn,), daemon=True).start()


def threads_talk(port, connections, rounds):
    totals, failures = [], []

    def one(number):
        try:
            with socket.create_connection(("127.0.0.1", port)) as conn:
                total = 0
                for turn in range(rounds):
                    data = message(number, turn)
                    # Larger than both sockets' buffers would block for good: the echo waits too.
                    conn.sendall(data)
                    got = conn.recv(len(data), socket.MSG_WAITALL)
                    assert got == data, (number, turn)
                    total += len(data)
                conn.shutdown(socket.SHUT_WR)
                assert conn.recv(1) == b"", "bytes after the last answer"
                totals.append(total)
        except BaseException as error:  # reported by the main thread
            failures.append(f"connection {number}: {error!r}")

    threads = [threading.Thread(target=one, args=(n,)) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return sum(totals)


def main():
    side, style, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run = globals()[f"{style}_{'serve' if side == 'server' else 'talk'}"]
    arguments = [port] + [int(argument) for argument in sys.argv[4:]]
    result = run(*arguments)
    if asyncio.iscoroutine(result):
        result = asyncio.run(result)
    print("ok", result)


main()
