"""Nodes of a job as network namespaces of this machine, each with its own address, run directory and home, joined by one switch.

with Cluster(tmp_path, 2) as cluster, cluster.job(script) as nodes:
    ...
    cluster.cut(1)
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, distdiag, free_port, launch, start
from tests.launchers import CLONE_NEWNET, Place

LINK = "eth0"


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=30)


@lru_cache
def why_not() -> str | None:
    """Return why this machine cannot have network namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "no ip (iproute2)"
    name = f"ddtry{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "sw", "type", "bridge")
        _ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError) as e:
        return f"no network namespace can be made: {getattr(e, 'stderr', '') or e}"
    return None


@contextmanager
def socket_in(name: str) -> Iterator[socket.socket]:
    """Open a packet socket in a network namespace; a thread changes into it, and ends."""
    made: list[socket.socket] = []
    libc = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        with open(f"/run/netns/{name}") as f:
            if libc.setns(f.fileno(), CLONE_NEWNET) == 0:
                made.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not made:
        pytest.skip(f"no packet socket in a namespace: {os.strerror(ctypes.get_errno())}")
    with made[0] as s:
        yield s


class Cluster:
    """`n` nodes; node k has the address 10.77.0.(k + 1) and the directory `root/node_k`.

    Args:
        offsets_s: Seconds by which the monotonic clocks of nodes are ahead, by node.
    """

    def __init__(self, root: Path, n: int, offsets_s: dict[int, int] | None = None) -> None:
        if (reason := why_not()) is not None:
            pytest.skip(reason)
        self.root, self.n, self.offsets_s = root, n, offsets_s or {}
        self.names = [f"dd{os.getpid()}n{k}" for k in range(n)]
        self.switch = f"dd{os.getpid()}sw"

    def __enter__(self) -> Cluster:
        self.__exit__()
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "sw", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "sw", "up")
        for k, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("link", "add", LINK, "netns", name, "type", "veth", "peer", "name", f"port{k}", "netns", self.switch)
            _ip("-n", self.switch, "link", "set", f"port{k}", "master", "sw", "up")
            _ip("-n", name, "addr", "add", f"{self.address(k)}/24", "dev", LINK)
            for device in ("lo", LINK):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def run(self, node: int = 0) -> Path:
        """Return the run directory of a node; no other node has one of this name."""
        return self.root / f"node_{node}" / f"run_of_{node}"

    def cut(self, node: int) -> None:
        """Take the link of a node down."""
        _ip("-n", self.switch, "link", "set", f"port{node}", "down")

    def mend(self, node: int) -> None:
        """Bring it up again."""
        _ip("-n", self.switch, "link", "set", f"port{node}", "up")

    def slow(self, a: int, b: int, rate: str) -> None:
        """Limit what two nodes send each other, as "50mbit"; both are fast with all others. Skips the test if the kernel cannot."""
        for here, there in ((a, b), (b, a)):
            tc = ["ip", "netns", "exec", self.names[here], "tc"]
            for words in (
                "qdisc add dev {} root handle 1: htb default 1",
                "class add dev {} parent 1: classid 1:1 htb rate 10gbit",
                f"class add dev {{}} parent 1: classid 1:2 htb rate {rate}",
                f"filter add dev {{}} parent 1: protocol ip u32 match ip dst {self.address(there)}/32 flowid 1:2",
            ):
                done = subprocess.run([*tc, *words.format(LINK).split()], capture_output=True, text=True, timeout=30)
                if done.returncode:
                    pytest.skip(f"no link can be made slow: {done.stderr.strip()}")

    def kill(self, node: int) -> None:
        """SIGKILL every process of a node at once."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.names[node]], check=True, capture_output=True, text=True, timeout=30
        )
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @contextmanager
    def wire(self) -> Iterator[Callable[[int], bytes]]:
        """Record what crosses the switch; yield a function that returns all payloads of one TCP port so far."""
        with socket_in(self.switch) as s:
            s.settimeout(0.2)
            taken: list[bytes] = []
            over = threading.Event()

            def record() -> None:
                while not over.is_set():
                    with suppress(TimeoutError):
                        taken.append(s.recv(65_535))

            thread = threading.Thread(target=record)
            thread.start()

            def of_port(port: int) -> bytes:
                found = []
                for frame in list(taken):
                    ip = frame[14:]
                    if frame[12:14] != b"\x08\x00" or ip[9] != socket.IPPROTO_TCP:
                        continue
                    tcp = ip[(ip[0] & 15) * 4 : int.from_bytes(ip[2:4], "big")]
                    if port.to_bytes(2, "big") in (tcp[:2], tcp[2:4]):
                        found.append(tcp[(tcp[12] >> 4) * 4 :])
                return b"".join(found)

            try:
                yield of_port
            finally:
                over.set()
                thread.join()

    def inside(self, node: int) -> list[str]:
        """Return the start of a command that runs on a node."""
        shifted = ["unshare", "--time", "--monotonic", str(self.offsets_s[node])] if node in self.offsets_s else []
        return ["ip", "netns", "exec", self.names[node], *shifted]

    @contextmanager
    def job(
        self, script: Path, nproc: int = 1, timeout: float = 200.0, *, fork_ranks: bool = False
    ) -> Iterator[list[Job]]:
        """Run a script on all nodes, recorded: under torchrun, or in forked ranks (see `tests/launchers.py`)."""
        port = str(free_port())
        with ExitStack() as stack:
            jobs = []
            for k in range(self.n):
                here = self.run(k).parent
                here.mkdir(parents=True, exist_ok=True)
                env = {"GLOO_SOCKET_IFNAME": LINK, "TMPDIR": str(here)}
                program = ["-m", "distdiag.run", "--run-dir", str(self.run(k)), str(script)]
                if fork_ranks:
                    env |= {
                        "WORLD_SIZE": str(self.n * nproc), "GROUP_RANK": str(k), "GROUP_WORLD_SIZE": str(self.n),
                        "MASTER_ADDR": self.address(0), "MASTER_PORT": port,
                    }  # fmt: skip
                    place = Place(self.names[k], self.offsets_s.get(k, 0))
                    job = launch(program, nproc, here, env, timeout, fork_ranks=True, place=place)
                else:
                    command = [
                        *self.inside(k), sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.n),
                        "--node-rank", str(k), "--master-addr", self.address(0), "--master-port", port,
                        "--nproc-per-node", str(nproc), *program,
                    ]  # fmt: skip
                    job = start(command, cwd=here, env=env, timeout=timeout)
                jobs.append(stack.enter_context(job))
            yield jobs

    def findings(self) -> list[dict[str, Any]]:
        """Return what node 0 has found so far."""
        answer = distdiag("diagnose", self.run(0), "--json", timeout=60)
        return json.loads(answer.stdout).get("findings", []) if answer.returncode in (0, 1) else []
