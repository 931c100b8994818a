"""Which job a rank belongs to if no launcher names it: the job whose process group it is in, by the group's own store.

Rank 0 writes which run it records into, before it makes the group; the others read it once the group exists. An address or a parent
process would not do: two jobs may use one port after each other, and two terminals have no parent in common.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from distdiag.recorder import run_claim
from distdiag.terms.launchers import RANKS
from distdiag.terms.untrusted import is_rank
from distdiag.unpatched import now_s, sleep

KEY = "distdiag/job"
# For a rank 0 that has not begun to make the group when this rank has it already. Ranks that one process spawned are all recorded.
WAIT_S, SPAWNED_WAIT_S = 1.0, 5.0
MOST_BYTES = 16_384  # of what rank 0 writes; the rest is not read, so a longer text is no JSON


def launched() -> bool:
    """True if this process got its rank from its launcher, in the environment that it was started with."""
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(os.fsdecode(v.partition(b"=")[0]) in RANKS for v in given)


def offer(store: Any, run_dir: str | None) -> None:
    """Make rank 0 part of the job of its default process group, and write for the others which that is. See `join`."""
    named = run_dir or os.environ.get(run_claim.ENV_DIR)
    chosen = os.path.abspath(named) if named else None
    job = run_claim.Joined(run_claim.job_given() or secrets.token_hex(8), run_claim.root_of_runs(), chosen, 0)
    store.set(KEY, json.dumps([job.token, str(job.root), chosen, socket.gethostname()]))
    store.check([KEY])  # a round trip: from now on, all see it
    run_claim.join_job(job)


def join(store: Any, rank: int, run_dir: str | None, backends: str) -> None:
    """Make this process part of the job of its default process group; of the run directories given to ranks, rank 0's counts.

    Raises:
        Exception: what the store raises; TimeoutError if rank 0 does not record.
        ValueError: another program wrote under our key.
    """
    if rank == 0:
        offer(store, run_dir)
        return
    host = socket.gethostname()
    _wait(store, backends)
    token, root, chosen, first = _read(store.get(KEY))
    node = 0 if host == first else _node(store, host, rank)
    run_claim.join_job(run_claim.Joined(token, Path(root), chosen, node))


def _wait(store: Any, backends: str) -> None:
    """Wait for rank 0. With gloo all ranks make the group together, so it has written or never will.

    The store's own `wait` prints warnings on the job's stderr if the key never comes.
    """
    wait_s = SPAWNED_WAIT_S if multiprocessing.parent_process() is not None else WAIT_S
    end = now_s() + (0.0 if "gloo" in backends else wait_s)
    while not store.check([KEY]):
        if now_s() >= end:
            raise TimeoutError(f"rank 0 is not recorded: no {KEY} in the job's store")
        sleep(0.02)


def _read(written: bytes) -> tuple[str, str, str | None, str]:
    """Return (token, root, run directory, host of rank 0). Whoever reaches the store can write there.

    Raises:
        ValueError: rank 0 of distdiag did not write this.
    """
    try:
        token, root, chosen, first = json.loads(written[:MOST_BYTES])
        paths = [root] if chosen is None else [root, chosen]
        ours = run_claim.is_word(token) and isinstance(first, str) and all(map(_is_path, paths))
    except (ValueError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise ValueError(f"{KEY} in the job's store is not from distdiag")
    return token, root, chosen, first


def _is_path(text: object) -> bool:
    """True for an absolute path without `..`; UnicodeEncodeError, a ValueError, for one that no file can have."""
    return (
        isinstance(text, str)
        and os.path.isabs(text)
        and b"\0" not in os.fsencode(text)
        and ".." not in Path(text).parts
    )


def _node(store: Any, host: str, rank: int) -> int:
    """Return the number of a host without rank 0: the first of its ranks that asks."""
    node = int(store.compare_set(f"distdiag/node/{host}", "", str(rank)))
    if not is_rank(node) or node == 0:
        raise ValueError(f"{node} is no number of a node")
    return node
