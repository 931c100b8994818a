"""Measures what the encrypted connection costs node 0 with N nodes, without decoding and judging their states (`scale.py`).

    python benchmarks/connection.py [--nodes 16 64 128] [--seconds 15] [--kib 20]

The nodes are real clients, one thread each, in another process; each sends a state of random bytes every two seconds and reports once
a second, as in a job. The cost is the CPU time of the process with the server. Also shown: the longest time without a report of a
node, which must stay below `SILENT_S`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag.monitor.cluster import keys
from distdiag.monitor.cluster.transport import Transport
from distdiag.monitor.nodes import PERIOD_S
from distdiag.page import node_files
from distdiag.page.node_files import Peers, Server
from tests.jobs import wait_for

LOOPBACK = "127.0.0.1"


def transport(root: Path, node: int) -> Transport:
    return Transport(root / str(node), node, lambda _: b"")


def send(root: Path, nodes: int, kib: int) -> None:
    """Be all other nodes."""
    own = wait_for(lambda: ((o := node_files.read_own(root / "0")) and o.port and o) or None, 30, "the port")
    clients = []
    for k in range(1, nodes + 1):
        node_files.write(root / str(k), Peers(Server(own.public, own.port, (LOOPBACK,))))
        t = transport(root, k)
        t.poll()
        clients.append(t.client)
    state = os.urandom(kib << 10)
    while True:
        for client in clients:
            client.publish(state, 5)
            time.sleep(PERIOD_S / nodes)


def measure(nodes: int, seconds: float, kib: int) -> str:
    """Return one row of the table."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        root = Path(made)
        for k in range(nodes + 1):
            (root / str(k)).mkdir(mode=0o700)
        public = {k: keys.own_keys(root / str(k)).public for k in range(1, nodes + 1)}
        child = os.fork()
        if not child:
            send(root, nodes, kib)
        try:
            node_files.write(root / "0", Peers(keys=public))
            server = transport(root, 0)
            server.poll()
            wait_for(lambda: len(server.silent_s()) == nodes, 60, "all nodes")
            time.sleep(5)
            used, began, states, silent_s = time.process_time(), time.monotonic(), 0, 0.0
            while time.monotonic() - began < seconds:
                time.sleep(0.25)
                states += len(server.arrived())
                silent_s = max(silent_s, *server.silent_s().values())
            passed = time.monotonic() - began
            used = time.process_time() - used
            server.close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return f"| {nodes} | {100 * used / passed:.1f} | {states / passed:.0f} | {silent_s:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 64, 128])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--kib", type=int, default=20, help="size of a state")
    o = parser.parse_args()
    keys.own_addresses = lambda: (LOOPBACK, (LOOPBACK,))
    print("| nodes | % of a core | states a second | longest silence, s |\n|---|---|---|---|")
    for nodes in o.nodes:
        print(measure(nodes, o.seconds, o.kib), flush=True)
    print(f"load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
