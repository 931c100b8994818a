"""Compares `distdiag diagnose` with torchfrtrace on the same flight-recorder dumps: 1,024 ranks x 200 entries.

    python benchmarks/dumps.py [--ranks 1024] [--entries 200] [--rounds 5]

Both read the same pickles, in turns, each time in a fresh process. Output: wall and CPU seconds of the call itself, without imports
(torchfrtrace imports torch, distdiag does not: counting imports would favour us). The ratio is computed per round, so that a busy
machine slows both; its interval is the bootstrap's 95 % of the median.
"""

from __future__ import annotations

import argparse
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STACK = [
    {"name": n, "filename": f, "line": i}
    for n, f, i in (
        ("all_reduce", "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3245),
        ("wrapper", "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 83),
        ("train_step", "/home/user/train.py", 131),
        ("main", "/home/user/train.py", 240),
    )
]


def one_dump(rank: int, world: int, entries: int, missing: int) -> dict[str, Any]:
    """Return a dump of a job with a world group and groups of eight; rank `missing` has not entered the last collective."""
    size = 8
    mine = rank // size
    groups = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))},
        str(mine + 1): {
            "name": str(mine + 1),
            "desc": "tp",
            "ranks": str(list(range(mine * size, min(world, mine * size + size)))),
        },
    }
    seqs = {"0": 0, str(mine + 1): 0}
    out = []
    for i in range(entries):
        last = i == entries - 1
        if last and rank == missing:
            break
        name = "0" if i % 4 == 3 or last else str(mine + 1)
        seqs[name] += 1
        created = 1_700_000_000_000_000_000 + i * 10_000_000 + rank
        out.append(
            {
                "frames": STACK,
                "record_id": i,
                "pg_id": 0 if name == "0" else 1,
                "process_group": (name, groups[name]["desc"]),
                "collective_seq_id": seqs[name],
                "p2p_seq_id": 0,
                "op_id": seqs[name],
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": created,
                "input_sizes": [[1024, 1024]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[1024, 1024]],
                "output_dtypes": ["BFloat16"],
                "state": "scheduled" if last else "completed",
                "time_discovered_started_ns": None if last else created + 1_000_000,
                "time_discovered_completed_ns": None if last else created + 2_000_000,
                "retired": not last,
                "timeout_ms": 600_000,
                "is_p2p": False,
            }
        )
    status = {
        str(k): {
            "last_enqueued_collective": n,
            "last_started_collective": n,
            "last_completed_collective": n - (k == 0 and rank != missing),
        }
        for k, n in enumerate(seqs.values())
    }
    return {"version": "2.9", "pg_config": groups, "pg_status": status, "entries": out}


def write(folder: Path, world: int, entries: int, missing: int) -> int:
    """Write all dumps, named as torch names them; return their size in bytes."""
    for rank in range(world):
        with (folder / f"nccl_trace_rank_{rank}").open("wb") as f:
            pickle.dump(one_dump(rank, world, entries, missing), f, protocol=2)
    return sum(p.stat().st_size for p in folder.iterdir())


CALLS = {
    "distdiag": """
from distdiag.sources.dumps.verdict import diagnose_dumps
w, c = time.perf_counter(), time.process_time()
report = diagnose_dumps(sys.argv[1])
print(time.perf_counter() - w, time.process_time() - c, [(f.kind, f.culprits) for f in report.findings], sep="\\t")
""",
    "torchfrtrace": """
import contextlib, io, logging
from torch.distributed.flight_recorder import fr_trace
logging.disable(logging.CRITICAL)
quiet = io.StringIO()
w, c = time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
    fr_trace.main([sys.argv[1], "--prefix", "nccl_trace_rank_"])
print(time.perf_counter() - w, time.process_time() - c, "", sep="\\t")
""",
}


def measure(name: str, folder: Path) -> tuple[float, float, str]:
    """Return wall and CPU seconds of one call in a fresh process, and its output."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, time\n" + CALLS[name], str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    wall, cpu, printed = done.stdout.strip("\n").splitlines()[-1].split("\t")
    return float(wall), float(cpu), printed


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[49], medians[1949]


def main() -> int:
    """Print the table; exit 1 if the ratio is above a fifth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d)
        size = write(folder, args.ranks, args.entries, missing=args.ranks // 2 + 5)
        wall: dict[str, list[float]] = {name: [] for name in CALLS}
        cpu: dict[str, list[float]] = {name: [] for name in CALLS}
        printed = ""
        for _ in range(args.rounds):
            for name in CALLS:
                w, c, text = measure(name, folder)
                wall[name].append(w)
                cpu[name].append(c)
                printed = text or printed
    print(f"{args.ranks:,} ranks x {args.entries} entries, {size / 1e6:.1f} MB of pickles, n = {args.rounds} rounds\n")
    print("| | median s | 95 % interval | CPU: median s | 95 % interval |")
    print("|---|---|---|---|---|")
    ratios = [[a / b for a, b in zip(t["distdiag"], t["torchfrtrace"], strict=True)] for t in (wall, cpu)]
    for name, columns, digits in (*((n, [wall[n], cpu[n]], 2) for n in CALLS), ("ratio", ratios, 3)):
        cells = []
        for values in columns:
            low, high = interval(values)
            cells += [f"{statistics.median(values):.{digits}f}", f"{low:.{digits}f}–{high:.{digits}f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\ndistdiag's verdict: {printed}")
    return int(statistics.median(ratios[0]) > 0.2)


if __name__ == "__main__":
    sys.exit(main())
