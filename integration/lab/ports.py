"""ports.py ADDRESS: listens on every fourth port that the kernel gives to those who connect, until it is killed."""
import resource
import signal
import socket
import sys

with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
    low, high = map(int, file.read().split())
wanted = range(low, high + 1, 4)
need = len(wanted) + 64
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, max(need, hard)))
except ValueError:
    # Not root: as many as may be.
    wanted = wanted[: hard - 64]
taken = []
for port in wanted:
    listener = socket.socket()
    try:
        listener.bind((sys.argv[1], port))
        listener.listen()
    except OSError:
        continue
    taken.append(listener)
print(f"{len(taken)} of {high - low + 1} ports are taken", flush=True)
signal.pause()
