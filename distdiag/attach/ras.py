"""Asks NCCL's RAS, on request, how many collectives each rank of each communicator has launched, and writes that as flight records.

RAS answers on a socket of the loopback interface. Asked in NCCL 2.26.5 and 2.27.3 it crashed jobs (nccl#1718, #1762), so it is asked
from 2.28.9 on; the version is read from the library that the rank has mapped, before anything is sent. Protocol and JSON:
NCCL's src/ras/client.cc and client_support.cc.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distdiag import guard
from distdiag.attach.ranks import Candidate
from distdiag.terms.untrusted import is_count, visible

OLDEST = (2, 28, 9)
ADDRESS, PORT = "NCCL_RAS_ADDR", 28028
DEADLINE_S = 20.0  # RAS waits 5 s itself for a process that does not answer
MOST_BYTES = 16 << 20
MOST_COMMUNICATORS = 256
_LIBRARY = re.compile(rb"\s(/\S*libnccl\S*)")
_VERSION = re.compile(rb"NCCL version (\d{1,3})\.(\d{1,3})\.(\d{1,3})")
_LISTENS = "0A"  # in /proc/net/tcp
_LOCAL = {"127.0.0.1": "0100007F", "::1": "00000000000000000000000001000000"}  # as there


def take(ranks: Mapping[int, Candidate], folder: Path) -> tuple[set[int], list[str]]:
    """Write one record for each rank that RAS knows into `folder`; return these ranks, and notes for a person."""
    first = next(iter(ranks.values()))
    try:
        status = json.loads(_ask(*_server(first)))
        records = records_of(status, {p.pid: rank for rank, p in ranks.items()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        return set(), [f"RAS: {visible(str(e) or type(e).__name__)[:160]}"]
    for rank, record in records.items():
        (folder / f"ras_rank{rank}.json").write_text(json.dumps(record))
    return set(records), []


def version(p: Candidate) -> tuple[int, ...] | None:
    """Return the version of NCCL that a process has mapped; None if that is not known."""
    found = _LIBRARY.search(p.maps)
    if found is None:
        return None
    with guard.regular(Path(f"/proc/{p.pid}/root{os.fsdecode(found[1])}")) as file:
        if not os.fstat(file.fileno()).st_size:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = _VERSION.search(content)
            return None if match is None else tuple(int(n) for n in match.groups())


def _server(p: Candidate) -> tuple[str, int]:
    """Return the address of the RAS of a rank.

    Raises:
        OSError: it may not be asked.
    """
    known = version(p)
    if known is None or known < OLDEST:
        which = ".".join(map(str, known)) if known else "of unknown version"
        raise OSError(f"not asked: NCCL {which}; it is safe from {'.'.join(map(str, OLDEST))} on")
    host, _, port = p.env.get(ADDRESS, f"localhost:{PORT}").rpartition(":")
    host = host.strip("[]") or "localhost"
    number = int(port) if port.isdecimal() and len(port) < 6 else PORT
    if os.readlink(f"/proc/{p.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
        raise OSError("not asked: the job has its own network namespace; attach inside its container")
    for address in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        if address in _LOCAL and _owner(address, number) in (0, os.geteuid()):
            return address, number
    raise OSError(f"no socket of this user or root listens on {visible(host)[:60]}:{number}, on the loopback interface")


def _owner(address: str, port: int) -> int | None:
    """Return the user whose socket listens there; None if there is none."""
    local = f"{_LOCAL[address]}:{port:04X}"
    for line in Path("/proc/net/tcp6" if ":" in address else "/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == local and fields[3] == _LISTENS:
            return int(fields[7])
    return None


def _ask(address: str, port: int) -> bytes:
    """Return the status in JSON.

    Raises:
        OSError: no answer in time, or another protocol.
    """
    end = time.monotonic() + DEADLINE_S
    with socket.create_connection((address, port), timeout=DEADLINE_S) as connection:
        for command, answer in (("CLIENT PROTOCOL 2", b"SERVER PROTOCOL 2"), ("SET FORMAT json", b"OK")):
            connection.sendall(f"{command}\n".encode())
            if (got := _read(connection, end, line=True).strip()) != answer:
                raise OSError(f"answered {got[:60]!r} to {command}")
        connection.sendall(b"VERBOSE STATUS\n")
        return _read(connection, end)


def _read(connection: socket.socket, end: float, line: bool = False) -> bytes:
    """Return what the server sends, up to the end of a line or of the connection."""
    received = bytearray()
    while not (line and received.endswith(b"\n")):
        connection.settimeout(max(end - time.monotonic(), 0.001))
        chunk = connection.recv(1 if line else 1 << 16)
        if not chunk:
            break
        received += chunk
        if len(received) > (200 if line else MOST_BYTES) or time.monotonic() > end:
            raise OSError("its answer is too long, or too slow")
    return bytes(received)


def records_of(status: Mapping[str, Any], rank_of: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """Return a flight record for each rank: of each communicator the collectives launched, and those that all launched.

    RAS does not count what is complete. Ranks that have stood still, as attach has seen, wait in what not all have
    launched. A communicator with a rank that is not here is left out.
    """
    out: dict[int, dict[str, Any]] = {}
    for n, comm in enumerate(status["communicators"][:MOST_COMMUNICATORS]):
        counts: dict[int, int] = {}
        for member in comm["ranks"]:
            launched = list(member["collective_counts"].values())
            if member["pid"] in rank_of and all(map(is_count, launched)):
                counts[rank_of[member["pid"]]] = sum(launched)
        if len(counts) < 2 or len(counts) != comm["size"]:
            continue
        everywhere = min(counts.values())
        for rank, launched in counts.items():
            record = out.setdefault(rank, {"rank": rank, "entries": [], "pg_config": {}, "pg_status": {}})
            record["pg_config"][str(n)] = {"name": str(n), "desc": "", "ranks": str(sorted(counts))}
            record["pg_status"][str(n)] = {
                "last_enqueued_collective": launched,
                "last_completed_collective": everywhere,
            }
    return out
