"""Measures the pytest plugin on generated tests: hanging ones end early with their line, healthy ones as without it.

    python benchmarks/pytest_plugin.py hanging            # 50 tests: seconds to their end, step by step, and the line in their failure
    python benchmarks/pytest_plugin.py healthy --pairs 6  # 500 tests with and without the plugin, in turn: outcomes and time

The tests are written as people write them: torch.multiprocessing.spawn, multiprocessing.Process, torchrun in a subprocess, torch's own
MultiProcessTestCase and MultiProcContinuousTest; with pytest-xdist, and with pytest-timeout. torch's own need the package expecttest (PYTHONPATH is passed on). Results: benchmarks/results/pytest_plugin.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs import clean_env, kill_marked  # noqa: E402
from tests.jobs import rows as table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "pytest_plugin.json"
MARK = "PLUGIN_BENCH_MARK"
LIMIT_S = 400
STEPS = 3
# MultiProcContinuousTest asks every quarter of it, and not within 10 s, whether its ranks live
TORCH_TIMEOUT = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "40"}
PR_SET_CHILD_SUBREAPER = 36

# Each is the body of a rank; its marked line is where the culprit hangs. CULPRIT is 0 or 1.
FAULTS = {
    "extra_barrier": """
    for step in range({steps}):
        if step == {steps} - 1 and rank == {culprit}:
            mark('call', rank)
            dist.barrier()  # HERE
        dist.all_reduce(x)
""",
    "lonely_broadcast": """
    for step in range({steps}):
        dist.all_reduce(x)
    if rank == {culprit}:
        mark('call', rank)
        dist.broadcast(x, src={culprit})  # HERE
    dist.barrier()
""",
    "skipped_reduce": """
    for step in range({steps}):
        if not (step == 1 and rank == {culprit}):
            dist.all_reduce(x)
        mark('call', rank)
        dist.all_gather([torch.zeros(4) for _ in range(2)], x)  # HERE
""",
    "no_sender": """
    for step in range({steps}):
        dist.all_reduce(x)
    if rank == {culprit}:
        mark('call', rank)
        dist.recv(x, src=1 - {culprit})  # HERE
    dist.barrier()
""",
    "one_step_less": """
    for step in range({steps} - (rank == {culprit})):
        dist.all_reduce(x)
    mark('call', rank)
    dist.barrier()  # HERE
""",
    "early_break": """
    for step in range({steps}):
        if step == 2 and rank == {culprit}:
            break
        dist.all_reduce(x)
    mark('call', rank)
    dist.barrier()  # HERE
""",
    "swallowed_exception": """
    for step in range({steps}):
        try:
            if step == 1 and rank == {culprit}:
                raise ValueError("bad sample")
            dist.all_reduce(x)
        except ValueError:
            pass
    mark('call', rank)
    dist.barrier()  # HERE
""",
    "other_tag": """
    dist.all_reduce(x)
    if rank == {culprit}:
        mark('call', rank)
        dist.recv(x, src=1 - {culprit}, tag=7)  # HERE
    else:
        dist.send(x, dst={culprit}, tag=8)
    dist.barrier()
""",
    "group_on_one": """
    dist.all_reduce(x)
    if rank == {culprit}:
        mark('call', rank)
        dist.new_group([0, 1])  # HERE
    dist.all_reduce(x)
""",
    "eval_on_one": """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    for step in range({steps}):
        model(torch.ones(2, 4)).sum().backward()
    if rank == {culprit}:
        mark('call', rank)
        model(torch.ones(2, 4))  # HERE
    dist.barrier()
""",
    "own_root": """
    for step in range({steps}):
        dist.all_reduce(x)
    mark('call', rank)
    dist.broadcast(x, src=rank)  # HERE
    dist.barrier()
""",
    "unused_head": """
    body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body, head
        def forward(self, x, use_head):
            out = self.body(x)
            return self.head(out) if use_head else out
    model = torch.nn.parallel.DistributedDataParallel(Net())
    model(torch.ones(2, 4), rank != {culprit}).sum().backward()
    mark('call', rank)
    dist.barrier()  # HERE
""",
    "object_on_one": """
    dist.all_reduce(x)
    if rank == {culprit}:
        mark('call', rank)
        dist.all_gather_object([None, None], "checkpoint")  # HERE
    dist.barrier()
""",
    "async_on_one": """
    for step in range({steps}):
        dist.all_reduce(x)
    if rank == {culprit}:
        mark('call', rank)
        dist.all_reduce(x, async_op=True).wait()  # HERE
    dist.barrier()
""",
}
EACH = 10  # faults of each way to start ranks
# Writes the wall-clock time at which a rank got somewhere.
MARKS = """
import os, time
def mark(what, rank):
    with open(os.environ["MARKS"], "a") as file:
        file.write(f"{what} {rank} {time.time()}\\n")
mark("python", os.environ.get("RANK", -1))
"""
CONFTEST = """
import os, time
def pytest_runtest_logreport(report):
    with open(os.environ["MARKS"], "a") as file:
        file.write(f"{report.when} {report.nodeid.rpartition('::')[2]} {time.time()}\\n")
"""
HEAD = (
    MARKS
    + """
import subprocess, sys
import pytest, torch
import torch.distributed as dist
import torch.multiprocessing as mp
mark("torch", -1)

def join(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mark("joined", rank)
    return torch.ones(4)
"""
)
KINDS = {
    "spawn": """
def work_{n}(rank, store):
    x = join(rank, store)
{body}
    dist.destroy_process_group()

def test_{n}(tmp_path):
    mp.spawn(work_{n}, args=(tmp_path / "store",), nprocs=2)
""",
    "process": """
def work_{n}(rank, store):
    x = join(rank, store)
{body}
    dist.destroy_process_group()

def test_{n}(tmp_path):
    ranks = [mp.get_context("spawn").Process(target=work_{n}, args=(rank, tmp_path / "store")) for rank in range(2)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    assert [p.exitcode for p in ranks] == [0, 0]
""",
    "torchrun": '''
JOB_{n} = """{marks}
import torch
import torch.distributed as dist
mark("torch", -1)
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4)
mark("joined", rank)
def main():
{body}
main()
dist.destroy_process_group()
"""

def test_{n}(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB_{n})
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(job)], check=True)
''',
    "case": """
from torch.testing._internal.common_distributed import MultiProcessTestCase

class Test_{n}(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_{n}(self):
        rank, x = self.rank, join(self.rank, self.file_name)
        self.work(rank, x)
        dist.destroy_process_group()

    def work(self, rank, x):
{deep}
""",
    "continuous": """
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class Test_{n}(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_{n}(self):
        rank, x = self.rank, torch.ones(4)
{deep}
""",
}


NEXT = """
def test_{n}_next():
    pass
"""


def generated(n: int, kind: str, fault: str, steps: int, culprit: int) -> str:
    """Return the source of one test."""
    body = FAULTS[fault].format(steps=steps, culprit=culprit).strip("\n")
    deep = "\n".join(f"    {line}" for line in body.splitlines())
    return HEAD + (KINDS[kind] + NEXT).replace("{marks}", MARKS.replace("\\", "\\\\")).replace("{n}", str(n)).replace(
        "{body}", body
    ).replace("{deep}", deep)


def line_of(source: str, kind: str) -> tuple[str, int]:
    """Return file name suffix and line where the culprit hangs."""
    lines = source.splitlines()
    if kind == "torchrun":
        first = next(i for i, line in enumerate(lines) if line.startswith("JOB_"))
        return "job.py", next(i for i, line in enumerate(lines) if "# HERE" in line) - first + 1
    return "", next(i for i, line in enumerate(lines) if "# HERE" in line) + 1


def pytest(
    folder: Path, *options: str, limit_s: float = LIMIT_S, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, dict[str, Any]], float, float]:
    """Run the tests of a folder; return (outcome, seconds and failure of each test, wall seconds, CPU seconds)."""
    mark = os.urandom(8).hex()
    report = folder / "report.xml"
    own = {**variables, "TMPDIR": str(folder / "tmp"), MARK: mark, "MARKS": str(folder / "marks")}
    env = clean_env(folder / "home", own | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    (folder / "tmp").mkdir(exist_ok=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, str(folder)],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=limit_s, check=False,
        )  # fmt: skip
        wall = time.monotonic() - began
        end = time.monotonic() + 30
        while time.monotonic() < end:  # monitors end after the suite; their CPU time counts
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
    except ChildProcessError:
        pass
    finally:
        kill_marked(mark)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    out: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [x for x in case if x.tag in ("failure", "error", "skipped")]
        out[case.get("name", "")] = {
            "outcome": bad[0].tag if bad else "passed", "seconds": float(case.get("time", "0")),
            "text": (bad[0].get("message") or "") + (bad[0].text or "") if bad else "",
        }  # fmt: skip
    return out, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# -- hanging -----------------------------------------------------------------------------------------------------------


def hanging(only: str | None) -> dict[str, Any]:
    """Run 50 hanging tests: of each way to start ranks 10 with different faults, in turn alone, with xdist and with pytest-timeout."""
    names = list(FAULTS)
    chosen = [
        (kind, names[(3 * k + i) % len(names)], STEPS + 4 * (i % 2), i % 2)
        for i in range(EACH)
        for k, kind in enumerate(KINDS)
    ]
    ways = {"plain": ("-p", "no:xdist"), "xdist": ("-n", "1"), "timeout": ("-p", "no:xdist", "--timeout=80")}
    rows = []
    for n, (kind, fault, steps, culprit) in enumerate(chosen):
        if only and kind != only:
            continue
        way = ("plain", "xdist", "plain", "timeout", "plain")[(n + n // 5) % 5]
        with tempfile.TemporaryDirectory(prefix="plugin-") as made:
            folder, name, source = Path(made), f"test_{n}", generated(n, kind, fault, steps, culprit)
            (folder / "conftest.py").write_text(CONFTEST)
            (folder / f"test_of_{n}.py").write_text(source)
            found: dict[str, dict[str, Any]] = {}
            with contextlib.suppress(subprocess.TimeoutExpired):
                found, *_ = pytest(
                    folder, *ways[way], limit_s=100, variables=TORCH_TIMEOUT if kind == "continuous" else {}
                )
            got = found.get(name, {"outcome": "none", "seconds": 100.0, "text": ""})
            file, line = line_of(source, kind)
            place = re.escape(f"{file or f'test_of_{n}.py'}:{line}")
            rows.append({
                "kind": kind, "fault": fault, "culprit": culprit, "way": way, "outcome": got["outcome"],
                "seconds": round(got["seconds"], 1), "line": re.search(rf"rank {culprit} .*?{place}", got["text"], re.DOTALL) is not None,
                "next": found.get(f"{name}_next", {}).get("outcome") == "passed",
                "steps_s": timeline(folder, name, culprit, got["text"]) if name in found else {},
                "text": next((x for x in got["text"].splitlines() if "ERROR" in x), got["text"][:200]),
            })  # fmt: skip
        print(name, json.dumps(rows[-1] | {"load": os.getloadavg()[0]}), flush=True)
        keep("hanging", summary(rows))
    return summary(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "n": len(rows), "next_ran": sum(r["next"] for r in rows), "ended_with_line": sum(r["line"] for r in rows), "failed": sum(r["outcome"] == "failure" for r in rows),
        "median_s": statistics.median(r["seconds"] for r in rows), "max_s": max(r["seconds"] for r in rows),
        **{f"median_after_call_{kind}_s": round(statistics.median(x), 1) for kind, x in after_call(rows).items() if x},
        "load": round(os.getloadavg()[0], 1), "rows": rows,
    }  # fmt: skip


def after_call(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds from the wrong call to the test's failure, by the way to start ranks."""
    out: dict[str, list[float]] = {"all": []}
    for r in (r for r in rows if r["steps_s"]):
        out["all"].append(took := r["steps_s"]["failed"] - r["steps_s"]["call"])
        out.setdefault(r["kind"], []).append(took)
    return out


def timeline(folder: Path, name: str, culprit: int, text: str) -> dict[str, float]:
    """Return the seconds from the test's begin to each step of it: of its ranks the last one, of the finding from the run."""
    marks = [(what, who, float(at)) for what, who, at in map(str.split, (folder / "marks").read_text().splitlines())]
    begin, end = (min(at for what, who, at in marks if (what, who) == (when, name)) for when in ("setup", "call"))
    within = [(what, who, at) for what, who, at in marks if begin <= at <= end]
    out = {what: max((at for w, _, at in within if w == what), default=begin) for what in ("python", "torch", "joined")}
    out["call"] = max((at for what, who, at in within if (what, who) == ("call", str(culprit))), default=begin)
    if named := re.search(r"^  run    (\S+)$", text, re.MULTILINE):
        run = Path(named[1])
        meta = dict(table(run, "SELECT key, value FROM meta WHERE key IN ('started_unix_s', 'hang_ended_s')"))
        seen, found = table(run, "SELECT min(first_seen_s), min(detected_s) FROM finding WHERE severity = 'error'")[0]
        zero = float(meta["started_unix_s"])
        out |= {"seen": zero + seen, "found": zero + found, "ended": zero + float(meta.get("hang_ended_s", "nan"))}
    return {what: round(at - begin, 1) for what, at in {**out, "failed": end}.items()}


# -- healthy -----------------------------------------------------------------------------------------------------------

PLAIN = """
import pytest, torch

@pytest.fixture
def data():
    yield torch.arange(4000.0)

@pytest.mark.parametrize("i", range(493))
def test_plain(i, data):
    total = sum(float((data * k).sum()) for k in range(120))
    if i % 97 == 5:
        pytest.skip("not today")
    assert i % 61 != 7, "its own reason"
    assert total > 0
"""
RANKS = '''
def _work(rank, store):
    x = join(rank, store)
    for step in range(50):
        dist.all_reduce(x)
    dist.destroy_process_group()

@pytest.mark.parametrize("n", range(4))
def test_forked(tmp_path, n):
    mp.start_processes(_work, (tmp_path / "store",), nprocs=2, start_method="fork")

@pytest.mark.parametrize("n", range(2))
def test_spawned(tmp_path, n):
    mp.spawn(_work, args=(tmp_path / "store",), nprocs=2)

JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(50):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""

@pytest.mark.parametrize("n", range(1))
def test_torchrun(tmp_path, n):
    (tmp_path / "job.py").write_text(JOB)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "job.py")], check=True)
'''


def healthy(pairs: int, only: str | None) -> dict[str, Any]:
    """Run 500 healthy tests with and without the plugin in turn: 493 plain ones, and 7 that start ranks."""
    out: dict[str, Any] = {"n": 0, "pairs": pairs}
    for part, source in (("plain", PLAIN), ("ranks", HEAD + RANKS)):
        if only not in (None, part):
            continue
        rows = []
        for pair in range(pairs):
            row: dict[str, Any] = {}
            for how in ("with", "without") if pair % 2 else ("without", "with"):
                with tempfile.TemporaryDirectory(prefix="plugin-") as made:
                    (Path(made) / "test_healthy.py").write_text(source)
                    found, wall, cpu = pytest(
                        Path(made), "-p", "no:xdist", *(() if how == "with" else ("-p", "no:distdiag"))
                    )
                row[how] = {
                    "wall_s": round(wall, 2),
                    "cpu_s": round(cpu, 2),
                    "outcomes": {k: v["outcome"] for k, v in found.items()},
                }
            rows.append(row)
            print(part, [(row[how]["wall_s"], row[how]["cpu_s"]) for how in ("with", "without")], flush=True)
        out[part] = {
            "tests": len(rows[0]["with"]["outcomes"]),
            "same_outcomes": all(r["with"]["outcomes"] == r["without"]["outcomes"] for r in rows),
            "wall_s": [[r[how]["wall_s"] for how in ("with", "without")] for r in rows],
            "cpu_s": [[r[how]["cpu_s"] for how in ("with", "without")] for r in rows],
        }  # fmt: skip
        out["n"] += out[part]["tests"]
        for unit in ("wall_s", "cpu_s"):
            out[part][f"{unit[:-2]}_pct"] = interval([(a / b - 1) * 100 for a, b in out[part][unit]])
    if only is None:
        for unit in ("wall_s", "cpu_s"):
            both = zip(out["plain"][unit], out["ranks"][unit], strict=True)
            out[f"{unit[:-2]}_pct"] = interval([((p[0] + r[0]) / (p[1] + r[1]) - 1) * 100 for p, r in both])
    return out


def interval(values: list[float]) -> list[float]:
    """Return the median and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return [round(statistics.median(values), 2), round(medians[50], 2), round(medians[1949], 2)]


def keep(what: str, found: dict[str, Any]) -> None:
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[what] = {**found, "date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # monitors have no parent otherwise
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hanging", "healthy"])
    parser.add_argument(
        "--only", help="one way to start ranks: " + ", ".join(KINDS) + "; of healthy tests: plain, ranks"
    )
    parser.add_argument("--pairs", type=int, default=6)
    given = parser.parse_args()
    found = hanging(given.only) if given.what == "hanging" else healthy(given.pairs, given.only)
    keep(given.what, found)
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}))


if __name__ == "__main__":
    main()
