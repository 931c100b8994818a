"""Measures the pytest plugin on generated tests: hanging ones end early with their line, healthy ones as without it.

    python benchmarks/pytest_plugin.py hanging            # 50 tests: seconds to their end, step by step, and the line in their failure
    python benchmarks/pytest_plugin.py healthy --pairs 6  # 500 tests with and without the plugin, in turn: outcomes and time

The tests are written as people write them: torch.multiprocessing.spawn, multiprocessing.Process, torchrun in a subprocess, torch's own
MultiProcessTestCase and MultiProcContinuousTest; with pytest-xdist, and with pytest-timeout. torch's own need the package expecttest (PYTHONPATH is passed on). Results: benchmarks/results/pytest_plugin.json.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs import clean_env, kill_marked  # noqa: E402
from tests.jobs import rows as table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "pytest_plugin.json"
MARK = "PLUGIN_BENCH_MARK"
LIMIT_S = 840
STEPS = 3

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
}
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


def generated(n: int, kind: str, fault: str, steps: int, culprit: int) -> str:
    """Return the source of one test."""
    body = FAULTS[fault].format(steps=steps, culprit=culprit).strip("\n")
    deep = "\n".join(f"    {line}" for line in body.splitlines())
    return HEAD + KINDS[kind].replace("{marks}", MARKS.replace("\\", "\\\\")).replace("{n}", str(n)).replace(
        "{body}", body
    ).replace("{deep}", deep)


def line_of(source: str, kind: str) -> tuple[str, int]:
    """Return file name suffix and line where the culprit hangs."""
    lines = source.splitlines()
    if kind == "torchrun":
        first = next(i for i, line in enumerate(lines) if line.startswith("JOB_"))
        return "job.py", next(i for i, line in enumerate(lines) if "# HERE" in line) - first + 1
    return "", next(i for i, line in enumerate(lines) if "# HERE" in line) + 1


def pytest(folder: Path, *options: str) -> tuple[dict[str, dict[str, Any]], float, float]:
    """Run the tests of a folder; return (outcome, seconds and failure of each test, wall seconds, CPU seconds)."""
    mark = os.urandom(8).hex()
    report = folder / "report.xml"
    own = {"TMPDIR": str(folder / "tmp"), MARK: mark, "MARKS": str(folder / "marks")}
    env = clean_env(folder / "home", own | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    (folder / "tmp").mkdir(exist_ok=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, str(folder)],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    finally:
        kill_marked(mark)
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
    """Run 50 hanging tests: of each way to start ranks 10, in turn alone, with xdist and with pytest-timeout."""
    chosen = [(kind, fault, STEPS + 4 * culprit, culprit) for kind in KINDS for fault in FAULTS for culprit in (0, 1)]
    rows = []
    for way, options in (
        ("plain", ("-p", "no:xdist")),
        ("xdist", ("-n", "1")),
        ("timeout", ("-p", "no:xdist", "--timeout=120")),
    ):
        with tempfile.TemporaryDirectory(prefix="plugin-") as made:
            folder, wanted = Path(made), {}
            for n, (kind, fault, steps, culprit) in enumerate(chosen):
                if ("plain", "xdist", "plain", "timeout", "plain")[n % 5] != way or (only and kind != only):
                    continue
                source = generated(n, kind, fault, steps, culprit)
                (folder / "conftest.py").write_text(CONFTEST)
                (folder / f"test_of_{n}.py").write_text(source)
                wanted[f"test_{n}"] = (kind, fault, culprit, *line_of(source, kind))
            found, *_ = pytest(folder, *options) if wanted else ({},)
            for name, (kind, fault, culprit, file, line) in wanted.items():
                got = found.get(name, {"outcome": "none", "seconds": LIMIT_S, "text": ""})
                place = f"{file or f'test_of_{name[5:]}.py'}:{line}"
                rows.append({
                    "kind": kind, "fault": fault, "culprit": culprit, "way": way, "outcome": got["outcome"],
                    "seconds": round(got["seconds"], 1), "line": re.search(rf"rank {culprit} .*?{re.escape(place)}", got["text"], re.DOTALL) is not None,
                    "steps_s": timeline(folder, name, culprit, got["text"]), "text": next((x for x in got["text"].splitlines() if "ERROR" in x), got["text"][:200]),
                })  # fmt: skip
                print(name, json.dumps(rows[-1]), flush=True)
    return summary(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "n": len(rows), "ended_with_line": sum(r["line"] for r in rows), "failed": sum(r["outcome"] == "failure" for r in rows),
        "median_s": statistics.median(r["seconds"] for r in rows), "max_s": max(r["seconds"] for r in rows),
        **{f"median_after_call_{kind}_s": round(statistics.median(x), 1) for kind, x in after_call(rows).items()},
        "load": round(os.getloadavg()[0], 1), "rows": rows,
    }  # fmt: skip


def after_call(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds from the wrong call to the test's failure, by the way to start ranks."""
    out: dict[str, list[float]] = {"all": []}
    for r in rows:
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


def healthy(pairs: int) -> dict[str, Any]:
    """Run 500 healthy tests with and without the plugin in turn: 493 plain ones, and 7 that start ranks."""
    out: dict[str, Any] = {"n": 500, "pairs": pairs}
    for part, source in (("plain", PLAIN), ("ranks", HEAD + RANKS)):
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
        for unit in ("wall_s", "cpu_s"):
            out[part][f"{unit[:-2]}_pct"] = interval([(a / b - 1) * 100 for a, b in out[part][unit]])
    total = [[p[i] + r[i] for i in (0, 1)] for p, r in zip(out["plain"]["wall_s"], out["ranks"]["wall_s"], strict=True)]
    out["wall_pct"] = interval([(a / b - 1) * 100 for a, b in total])
    return out


def interval(values: list[float]) -> list[float]:
    """Return the median and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return [round(statistics.median(values), 2), round(medians[50], 2), round(medians[1949], 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hanging", "healthy"])
    parser.add_argument("--only", help="one way to start ranks: " + ", ".join(KINDS))
    parser.add_argument("--pairs", type=int, default=6)
    given = parser.parse_args()
    found = hanging(given.only) if given.what == "hanging" else healthy(given.pairs)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.only is not None:
        found = summary(
            [*(r for r in kept.get("hanging", {}).get("rows", ()) if r["kind"] != given.only), *found["rows"]]
        )
    kept[given.what] = {**found, "date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}))


if __name__ == "__main__":
    main()
