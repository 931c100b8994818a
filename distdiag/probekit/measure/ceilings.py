"""Measure what this machine can do at best, in the same run, as a reference for the results.

GB/s = 10^9 bytes per second. memcpy counts each copied byte once.
"""

from __future__ import annotations

import contextlib
import datetime
import select
import socket
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distdiag.probekit.ranks import interface

if TYPE_CHECKING:
    from distdiag.probekit.ranks.job import Job

_MEMCPY_BYTES = 64 * 2**20
_TCP_BYTES = 16 * 2**20
_CHUNK = 2**20
_MOST_S = 0.12  # for each of the two, and at most a thirtieth of the remaining time


def measure_ceilings(job: Job) -> None:
    """Set the ceilings by name on rank 0, {} elsewhere; measured once per command, in about a quarter of a second.

    `memcpy_gbps`: one rank copies 64 MiB in its memory while the others are idle.
    `tcp_both_ways_gbps`: one TCP connection between ranks 0 and 1, over gloo's interface; both ways at once, per
    direction, is what a ring does.
    `nic_line_rate_gbps`: line rate of the interface, if it is a card and there are several hosts.
    `pcie_gbps`, `nvlink_gbps`: rates of rank 0's GPU, from NVML.
    """
    if job.ceilings is None:
        job.barrier("barrier before the ceilings are measured")
        seconds = min(_MOST_S, max(0.0, job.left_s()) / 30)
        found: dict[str, float | None] = {"memcpy_gbps": memcpy_gbps(seconds=seconds)} if job.rank == 0 else {}
        if job.world_size > 1:
            found |= tcp_gbps(job, seconds)
            if job.rank == 0 and len(set(job.host_keys)) > 1:
                found["nic_line_rate_gbps"] = interface.line_rate_gbps(interface.tried_by("gloo").name)
        if job.device.type == "cuda" and job.rank == 0:
            from distdiag.probekit.measure.gpus import link_ceilings

            found |= link_ceilings(job.device.index or 0)
        job.ceilings = found
        job.barrier("barrier after the ceilings were measured")


def memcpy_gbps(seconds: float) -> float:
    """Return the rate of the fastest copy by one thread within `seconds`, in GB/s."""
    source = torch.ones(_MEMCPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)  # touch the pages
    best = float("inf")
    end = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return _MEMCPY_BYTES / best / 1e9


def tcp_gbps(job: Job, seconds: float) -> dict[str, float | None]:
    """Return the rate of plain TCP between ranks 0 and 1 (see `measure_ceilings`), the best of a few."""
    best = None
    with job.step("TCP ceiling between ranks 0 and 1"), contextlib.suppress(OSError, dist.DistError):
        # a failed connection must not end the probe, whose traffic may use another route
        if job.rank < 2:
            with _connection(job) as peer:
                peer.settimeout(job.options.timeout_s / 2)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                best = _best(peer, job.rank, seconds)
    return {"tcp_both_ways_gbps": best} if job.rank == 0 else {}


def _best(peer: socket.socket, rank: int, seconds: float) -> float:
    """Return the highest rate of several transfers; before each, rank 0 decides whether there is time for one more."""
    best = 0.0
    end = time.perf_counter() + seconds
    while True:
        if rank == 0:
            go_on = not best or time.perf_counter() < end
            peer.sendall(b"+" if go_on else b".")
        else:
            go_on = peer.recv(1) == b"+"
        if not go_on:
            return best
        best = max(best, _both_ways(peer))


def _connection(job: Job) -> socket.socket:
    store = job.open_store()
    limit_s = job.options.timeout_s / 2
    if job.rank == 0:
        with socket.socket() as listener:
            address = interface.tried_by("gloo").address
            listener.bind((address, 0))
            listener.listen(1)
            listener.settimeout(limit_s)
            store.set("ceiling/address", f"{address}:{listener.getsockname()[1]}")
            return listener.accept()[0]
    store.wait(["ceiling/address"], datetime.timedelta(seconds=limit_s))
    host, port = store.get("ceiling/address").decode().rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=limit_s)


def _both_ways(peer: socket.socket) -> float:
    """Send and receive at once; return the rate of one direction in GB/s."""
    timeout = peer.gettimeout()
    peer.setblocking(False)
    out = memoryview(bytearray(_CHUNK))
    into = memoryview(bytearray(_CHUNK))
    to_send = to_receive = _TCP_BYTES
    start = time.perf_counter()
    try:
        while to_send or to_receive:
            readable, writable, _ = select.select([peer] if to_receive else [], [peer] if to_send else [], [], timeout)
            if not readable and not writable:
                raise TimeoutError("no progress")
            if writable:
                to_send -= peer.send(out[: min(_CHUNK, to_send)])
            if readable:
                got = peer.recv_into(into[: min(_CHUNK, to_receive)])
                if not got:
                    raise ConnectionError("closed")
                to_receive -= got
    finally:
        peer.settimeout(timeout)
    return _TCP_BYTES / (time.perf_counter() - start) / 1e9
