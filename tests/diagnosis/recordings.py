"""Makes flight-recorder dumps for tests: a job is simulated, each rank's recorder records its calls, in any format and version."""

from __future__ import annotations

import gzip
import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_NS = 1_700_000_000_000_000_000


def frames(line: int, file: str = "/home/user/train.py") -> list[dict[str, Any]]:
    site = "/opt/venv/lib/python3.11/site-packages/torch/distributed/"
    return [
        {"name": "all_reduce", "filename": site + "distributed_c10d.py", "line": 3245},
        {"name": "wrapper", "filename": site + "c10d_logger.py", "line": 83},
        {"name": "step", "filename": file, "line": line},
        {"name": "main", "filename": file, "line": 400},
    ]


@dataclass
class Recorder:
    """One rank's ring."""

    rank: int
    backend: str = "nccl"
    entries: list[dict[str, Any]] = field(default_factory=list)
    seq: dict[str, int] = field(default_factory=dict)
    p2p: dict[str, int] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)


class Job:
    """A simulated job with its recorders.

    Args:
        groups: name -> (description, members); "0" has all ranks.
    """

    def __init__(
        self, world: int, groups: dict[str, tuple[str, tuple[int, ...]]] | None = None, backend: str = "nccl"
    ) -> None:
        self.world, self.backend = world, backend
        self.groups = {"0": ("default_pg", tuple(range(world))), **(groups or {})}
        self.ranks = [Recorder(r, backend) for r in range(world)]
        self.now_ns = START_NS

    def collective(
        self,
        op: str = "all_reduce",
        group: str = "0",
        ranks: tuple[int, ...] | None = None,
        done: bool | tuple[int, ...] | None = None,
        shape: tuple[int, ...] = (1024,),
        dtype: str = "Float",
        line: int = 88,
    ) -> None:
        """Let `ranks` (default all members) issue the next collective; complete on `done` (default: on all if all issued it)."""
        members = self.groups[group][1]
        here = members if ranks is None else ranks
        if done is None:
            done = tuple(here) == tuple(members)
        on = set(here if done is True else done or ())
        for r in here:
            self.issue(r, op, group, r in on, shape, dtype, line)
        self.now_ns += 10_000_000

    def issue(
        self,
        rank: int,
        op: str,
        group: str,
        done: bool,
        shape: tuple[int, ...] = (1024,),
        dtype: str = "Float",
        line: int = 88,
    ) -> None:
        ring = self.ranks[rank]
        message = op.startswith(("send", "recv"))
        if message:
            ring.p2p[group] = ring.p2p.get(group, 0) + 1
        else:
            ring.seq[group] = ring.seq.get(group, 0) + 1
        ring.ops[group] = ring.ops.get(group, 0) + 1
        nothing = None
        gloo = self.backend == "gloo"
        at = self.now_ns + rank
        sizes = [] if op == "barrier" else [list(shape)]
        ring.entries.append(
            {
                "record_id": len(ring.entries),
                "pg_id": list(self.groups).index(group),
                "process_group": (group, self.groups[group][0]),
                "collective_seq_id": ring.seq.get(group, 0),
                "p2p_seq_id": ring.p2p.get(group, 0),
                "op_id": ring.ops[group],
                "profiling_name": f"{self.backend}:{op}",
                "time_created_ns": at,
                "input_sizes": sizes,
                "input_dtypes": [dtype] if sizes else [],
                "output_sizes": sizes,
                "output_dtypes": [dtype] if sizes else [],
                "state": "completed" if done and not gloo else "scheduled",
                "time_discovered_started_ns": at + 1000 if done and not gloo else nothing,
                "time_discovered_completed_ns": at + 2000 if done and not gloo else nothing,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": message,
                "frames": frames(line),
            }
        )

    def message(self, source: int, target: int, group: str = "0", sent: bool = True, received: bool = True) -> None:
        """Add a send and its recv; complete if both ends were issued."""
        members = self.groups[group][1]
        a, b = members.index(source), members.index(target)
        if sent:
            self.issue(source, f"send {a}->{b}", group, sent and received, line=40)
        if received:
            self.issue(target, f"recv {b}<-{a}", group, sent and received, line=41)
        self.now_ns += 10_000_000

    def dump(self, rank: int, keep: int | None = None, active: bool = False) -> dict[str, Any]:
        """Return what torch 2.9 writes for one rank: the newest `keep` entries, or only those in flight."""
        ring = self.ranks[rank]
        entries = [e for e in ring.entries if not active or e["state"] != "completed"]
        entries = entries if keep is None else entries[-keep:]
        mine = {n: (d, m) for n, (d, m) in self.groups.items() if rank in m}
        status = {}
        for n in mine:
            last = [e for e in ring.entries if e["process_group"][0] == n]
            open_ = [e["collective_seq_id"] for e in last if not e["retired"] and not e["is_p2p"]]
            top = ring.seq.get(n, 0)
            status[str(list(self.groups).index(n))] = {
                "last_enqueued_collective": top,
                "last_started_collective": -1,
                "last_completed_collective": min(open_) - 1 if open_ else top,
            }
        config = {n: {"name": n, "desc": d, "ranks": str(list(m))} for n, (d, m) in mine.items()}
        if self.backend == "gloo":
            config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        return {
            "version": "2.9",
            "pg_config": config,
            "nccl_version": "2.27.3",
            "pg_status": status,
            "entries": entries,
        }


def as_json(dump: dict[str, Any]) -> bytes:
    """Return the JSON form: no frames, numbers of pg_status as text, 0 for unknown times."""
    entries = []
    for old in dump["entries"]:
        e = {k: v for k, v in old.items() if k != "frames"}
        for k in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            e[k] = e.get(k) or 0
        entries.append(e)
    status = {k: {n: str(v) for n, v in s.items()} for k, s in dump["pg_status"].items()}
    return json.dumps({**dump, "entries": entries, "pg_status": status}).encode()


def as_pickle(dump: Any) -> bytes:
    return pickle.dumps(dump, protocol=2)


def version_1(dump: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the form of torch 2.1 and 2.2: a bare list, one counter, only the group's number."""
    gone = {
        "process_group",
        "collective_seq_id",
        "p2p_seq_id",
        "op_id",
        "is_p2p",
        "input_dtypes",
        "output_dtypes",
        "timeout_ms",
    }
    return [
        {**{k: v for k, v in e.items() if k not in gone}, "seq_id": e["collective_seq_id"]} for e in dump["entries"]
    ]


def version_2_0(dump: dict[str, Any]) -> dict[str, Any]:
    """Return the form without pg_config, pg_status and is_p2p."""
    entries = [{k: v for k, v in e.items() if k not in ("is_p2p", "timeout_ms", "op_id")} for e in dump["entries"]]
    return {"version": "2.0", "entries": entries}


def write(folder: Path, job: Job, name: str = "_dump_{}", form: str = "pickle", **more: Any) -> None:
    """Write all ranks' dumps as files; `form` is pickle, json, or either with .gz."""
    folder.mkdir(parents=True, exist_ok=True)
    for r in range(job.world):
        dump = job.dump(r, **more)
        data = as_json(dump) if form.startswith("json") else as_pickle(dump)
        (folder / name.format(r)).write_bytes(gzip.compress(data) if form.endswith(".gz") else data)
