"""Takes the flight records of a job's ranks, where the job itself has opened a way to them: stacks have places, these have counts.

- TORCH_WORKER_SERVER_SOCKET: torch's worker server, as `torch.distributed.elastic.control_plane.worker_main` starts it.
- TORCH_NCCL_DEBUG_INFO_PIPE_FILE: a named pipe; NCCL's monitor thread writes a dump once something is written into it.

Both paths come from the rank's environment. A socket counts if the rank itself serves it, a pipe if the rank has it open.
"""

from __future__ import annotations

import http.client
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from distdiag import guard, worker_server
from distdiag.attach.ranks import Candidate
from distdiag.diagnosis.model.findings import rank_list
from distdiag.terms.untrusted import visible

SOCKET, PIPE = "TORCH_WORKER_SERVER_SOCKET", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# gloo's (and in 2.15 every backend's), NCCL's own, and that of backends which torch's hook records
HANDLERS = ("fr_trace_json", "dump_nccl_trace_json", "fr_trace_json?backend=nccl")
ANSWER_S = 5.0  # for one record of a rank
WRITTEN_S = 12.0  # for all dumps of all ranks after the write to their pipes: they are asynchronous
SETTLED_S = 0.3  # a dump that has not grown for so long is complete
MAX_PATH = 107  # of a unix socket
MAX_NOTES = 4


def take(ranks: Mapping[int, Candidate], folder: Path) -> tuple[set[int], list[str]]:
    """Write the records of ranks into `folder`, for the reader of dumps; return which ranks have one, and notes for a person."""
    notes: list[str] = []
    taken, poked = set(), {}
    for rank, p in ranks.items():
        if SOCKET in p.env:
            try:
                for n, record in enumerate(_of_server(p)):
                    (folder / f"server{n}_rank{rank}.json").write_bytes(record)
                    taken.add(rank)
            except (OSError, http.client.HTTPException) as e:
                notes.append(f"rank {rank}: no answer from its worker server ({visible(str(e))[:120]})")
        if rank not in taken and PIPE in p.env:
            try:
                poked[rank] = _poke(p, rank)
            except OSError as e:
                notes.append(f"rank {rank}: no dump by its pipe ({visible(e.strerror or str(e))[:120]})")
    for rank, record in _dumps(poked):
        (folder / f"pipe_rank{rank}").write_bytes(record)
        taken.add(rank)
    if without := set(poked) - taken:
        notes.append(f"{rank_list(sorted(without))} wrote no dump within {WRITTEN_S:.0f} s")
    return taken, notes[:MAX_NOTES]


def seen_by(p: Candidate, path: str) -> Path:
    """Return a path of the rank, which may have another root, as this process reaches it."""
    return Path(f"/proc/{p.pid}/root{path}" if path.startswith("/") else f"/proc/{p.pid}/cwd/{path}")


# -- the worker server -------------------------------------------------------------------------------------------------


def _of_server(p: Candidate) -> Iterator[bytes]:
    """Yield the different records of a rank.

    Raises:
        OSError, http.client.HTTPException: it gives none.
    """
    path, seen, failure = str(seen_by(p, p.env[SOCKET])), set(), None
    if len(os.fsencode(path)) > MAX_PATH:
        raise OSError("the path of its socket is too long")
    for handler in HANDLERS:
        try:
            record = worker_server.ask(path, handler, ANSWER_S, p.pid)
        except (OSError, http.client.HTTPException) as e:
            failure = failure or e
            if isinstance(e, OSError):  # the server, not this handler
                break
            continue
        if record not in seen:
            seen.add(record)
            yield record
    if failure is not None and not seen:
        raise failure


# -- the dump pipe -----------------------------------------------------------------------------------------------------


def _poke(p: Candidate, rank: int) -> Path:
    """Ask a rank for a dump; return the file that it will write.

    Raises:
        OSError: it does not read its pipe, or there is a dump of this process that must not be lost.
    """
    prefix = next((p.env[name] for name in PREFIXES if p.env.get(name)), "")
    cache = p.env.get("XDG_CACHE_HOME") or f"{p.env.get('HOME', '')}/.cache"
    path = seen_by(p, f"{prefix or f'{cache}/torch/comm_lib_trace_rank_'}{rank}")
    if path.exists() and path.stat().st_mtime > _begun_s(p):
        raise OSError(f"{path.name} is there already, and would be overwritten; `distdiag diagnose` reads it")
    fd = os.open(seen_by(p, f"{p.env[PIPE]}{rank}.pipe"), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        given = os.fstat(fd)
        if not stat.S_ISFIFO(given.st_mode) or given.st_uid not in (0, os.geteuid()):
            raise OSError("it is no pipe of this user")
        if not any(_is(f"/proc/{p.pid}/fd/{n}", given) for n in os.listdir(f"/proc/{p.pid}/fd")):
            raise OSError("the rank does not read it")
        os.write(fd, b"1\n")
    finally:
        os.close(fd)
    return path


def _begun_s(p: Candidate) -> float:
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + p.started / os.sysconf("SC_CLK_TCK")


def _is(path: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), wanted)
    except OSError:
        return False


def _dumps(paths: Mapping[int, Path]) -> Iterator[tuple[int, bytes]]:
    left, sizes = dict(paths), dict.fromkeys(paths, 0)
    end = time.monotonic() + WRITTEN_S
    asked_s = time.time() - 1.0  # the clock of a file system may be a tick behind
    while left and time.monotonic() < end:
        time.sleep(SETTLED_S)
        for rank, path in list(left.items()):
            try:
                with guard.regular(path) as file:
                    found = os.fstat(file.fileno())
                    if found.st_uid not in (0, os.geteuid()) or found.st_mtime < asked_s:
                        continue
                    if 0 < found.st_size == sizes[rank] and found.st_size <= worker_server.MOST_BYTES:
                        yield rank, file.read(worker_server.MOST_BYTES)
                        del left[rank]
                    sizes[rank] = found.st_size
            except OSError:
                continue
