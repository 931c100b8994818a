"""Checks of the recorder on a GPU: its times, its overhead, that it changes nothing, and verdicts on NCCL."""

from __future__ import annotations

import json
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _gpu_base import FAIL, PASS, NotPossible, Outcome, finished, free_port, nccl_version, need, need_gpu

OVERHEAD_ALLOWED = 1.02

JOB = """
import json, os, sys, time, torch, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
record, steps, out = sys.argv[1] == "record", int(sys.argv[2]), sys.argv[3]
if record:
    import distdiag
    distdiag.attach(sys.argv[4])
torch.cuda.set_device(0)
dist.init_process_group("nccl")
torch.manual_seed(0)
layers = []
for i, o in ((3, 64), (64, 128), (128, 256), (256, 256)):
    layers += [torch.nn.Conv2d(i, o, 3, padding=1), torch.nn.BatchNorm2d(o), torch.nn.ReLU()]
net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(4096, 10)).cuda()
ddp = DistributedDataParallel(net, device_ids=[0])
sgd = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
batch = int(sys.argv[5])
x, y = torch.rand(batch, 3, 32, 32, device="cuda"), torch.randint(0, 10, (batch,), device="cuda")
events, host = [], []
for i in range(steps):
    t = time.perf_counter()
    e = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    e[0].record(); loss = F.cross_entropy(ddp(x), y); e[1].record()
    loss.backward(); e[2].record()
    sgd.step(); sgd.zero_grad(set_to_none=True); e[3].record()
    if i % 10 == 9: loss.item()
    events.append(e); host.append(time.perf_counter() - t)
torch.cuda.synchronize()
keep = events[20:]
p50 = lambda a, b: sorted(e[a].elapsed_time(e[b]) for e in keep)[len(keep) // 2]
total = keep[0][0].elapsed_time(keep[-1][3]) / len(keep)
time.sleep(1.5 if record else 0)
json.dump({"step_ms": total, "forward_ms": p50(0, 1), "backward_ms": p50(1, 2), "optimizer_ms": p50(2, 3)}, open(out, "w"))
dist.destroy_process_group()
sys.stdout.flush()
time.sleep(0.3)
"""


def job(record: bool, steps: int, scratch: Path, batch: int = 256) -> tuple[dict[str, float], Path]:
    """Run JOB once on one rank; return (its own CUDA event times, run directory)."""
    script, out, run_dir = scratch / "job.py", scratch / "times.json", scratch / f"run-{time.monotonic_ns()}"
    script.write_text(JOB)
    out.unlink(missing_ok=True)
    mode = "record" if record else "plain"
    command = [sys.executable, str(script), mode, str(steps), str(out), str(run_dir), str(batch)]
    code, _, err = finished(command, 90, one_rank())
    if not out.exists():
        raise RuntimeError(f"the job ended with {code}: {err.strip().splitlines()[-1][:300] if err.strip() else ''}")
    return json.loads(out.read_text()), run_dir


def recorder_events() -> Outcome:
    """Compare the recorder's step, forward and backward times with the job's own CUDA events."""
    need_recorder()
    with tempfile.TemporaryDirectory() as folder:
        own, run_dir = job(True, 400, Path(folder))
        rows, gpus = read_run(run_dir)
    if not rows:
        return Outcome(FAIL, "the recorder wrote no step", {"own": own})
    columns = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
    recorded = {
        c: statistics.median(v) if (v := [r[i] for r in rows[20:] if r[i] is not None]) else None
        for i, c in enumerate(columns)
    }
    memory = [r[4] for r in rows if r[4] is not None]
    problems = []
    step = recorded["step_ms"]
    if step is None or not 0.8 <= step / own["step_ms"] <= 1.25:
        problems.append(f"step {step} ms recorded, {own['step_ms']:.2f} by the job's own events")
    for part in ("forward_ms", "backward_ms"):
        value = recorded[part]
        if value is None or not 0.6 <= value / own[part] <= 1.6:
            problems.append(f"{part} {value} recorded, {own[part]:.2f} by the job's own events")
    if not memory or max(memory) <= 0:
        problems.append("no device memory recorded")
    if not gpus:
        problems.append("no row in table gpu")
    text = (
        "; ".join(problems)
        or f"step {step:.2f} ms recorded against {own['step_ms']:.2f}, forward {recorded['forward_ms']:.2f} against {own['forward_ms']:.2f}, backward {recorded['backward_ms']:.2f} against {own['backward_ms']:.2f}"
    )
    return Outcome(FAIL if problems else PASS, text, {"recorded": recorded, "own": own, "steps": len(rows)})


def read_run(run_dir: Path) -> tuple[list[tuple[Any, ...]], int]:
    """Return step rows and the number of gpu rows, once the monitor has closed the run."""
    deadline = time.monotonic() + 30
    rows: list[tuple[Any, ...]] = []
    gpus = 0
    while time.monotonic() < deadline:
        try:
            con = sqlite3.connect(f"file:{run_dir / 'run.db'}?mode=ro", uri=True)
            try:
                rows = con.execute(
                    "SELECT step_ms, forward_ms, backward_ms, optimizer_ms, device_bytes FROM step ORDER BY step"
                ).fetchall()
                gpus = con.execute("SELECT count(*) FROM gpu").fetchone()[0]
                if con.execute(
                    "SELECT 1 FROM meta WHERE key IN ('ended_s', 'monitor_ended') AND value IS NOT NULL"
                ).fetchone():
                    break
            finally:
                con.close()
        except sqlite3.Error:
            pass  # not written yet
        time.sleep(0.2)
    return rows, gpus


def overhead_at(step_ms: float) -> Outcome:
    """Compare recorded and plain steps of about this length, in turns, by the job's own CUDA events."""
    need_recorder()
    plain: list[float] = []
    recorded: list[float] = []
    end = time.monotonic() + 75
    with tempfile.TemporaryDirectory() as folder:
        trial, _ = job(False, 60, Path(folder))
        batch = max(8, round(256 * step_ms / trial["step_ms"]))
        steps = max(60, round(4000 / step_ms))
        for turn in range(6):
            for record in (False, True) if turn % 2 == 0 else (True, False):
                (recorded if record else plain).append(job(record, steps, Path(folder), batch)[0]["step_ms"])
            if time.monotonic() > end and turn >= 1:
                break
    ratios = [r / p for p, r in zip(plain, recorded, strict=True)]
    ratio = statistics.median(ratios)
    text = f"recorded / plain {ratio:.4f} (median of {len(ratios)} pairs, {min(ratios):.4f} to {max(ratios):.4f}; step {statistics.median(plain):.2f} ms; allowed {OVERHEAD_ALLOWED})"
    return Outcome(
        PASS if min(ratios) <= OVERHEAD_ALLOWED and ratio <= OVERHEAD_ALLOWED else FAIL,
        text,
        {"plain_ms": plain, "recorded_ms": recorded, "ratio": ratio, "batch": batch, "steps": steps},
    )


def overhead_10ms() -> Outcome:
    return overhead_at(10.0)


def overhead_50ms() -> Outcome:
    return overhead_at(50.0)


# Both print one line of JSON that must be the same with and without distdiag.
COMPILE = """
import json, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.cuda.set_device(0)
dist.init_process_group("nccl")
def explain(f, *args):
    e = torch._dynamo.explain(f)(*args)
    torch._dynamo.reset()
    return [e.graph_count, e.graph_break_count]
x = torch.rand(8, 32, device="cuda")
whole = torch.compile(lambda v: v.to(torch.float64).cuda() + 1, fullgraph=True)(x).dtype
torch._dynamo.reset()
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
ddp = DistributedDataParallel(net, device_ids=[0])
def step(v):
    loss = ddp(v).square().mean()
    loss.backward()
    return loss
print(json.dumps({"fullgraph": str(whole), "function": explain(lambda v: v.cpu().cuda() * 2, x), "ddp": explain(step, x)}))
dist.destroy_process_group()
"""

CAPTURE = """
import json, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.rand(16, 32, device="cuda")
def step():
    sgd.zero_grad(set_to_none=True)
    loss = net(x).square().mean()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    sgd.step()
    return loss
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(200):
    graph.replay()
print(json.dumps({"loss": f"{loss.item():.6f}"}))
dist.destroy_process_group()
"""


def unchanged(script: str) -> Outcome:
    """Run a script with and without distdiag; its output must be the same."""
    need_recorder()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.py"
        file.write_text(script)
        run_dir = Path(folder) / "run"
        answers = []
        for launch in ([], ["-m", "distdiag.run", "--run-dir", str(run_dir)]):
            code, out, err = finished([sys.executable, *launch, str(file)], 100, one_rank())
            if code != 0:
                last = err.strip().splitlines()[-1][:300] if err.strip() else ""
                return Outcome(FAIL, f"{'recorded' if launch else 'plain'}: exit code {code}: {last}")
            answers.append(json.loads(out.strip().splitlines()[-1]))
        verdict = diagnose(run_dir)
    same = answers[0] == answers[1] and not loud(verdict)
    text = f"plain {answers[0]}, recorded {answers[1]}, findings {loud(verdict) or 'none'}"
    return Outcome(PASS if same else FAIL, text, {"plain": answers[0], "recorded": answers[1]})


def compiled() -> Outcome:
    return unchanged(COMPILE)


def captured() -> Outcome:
    return unchanged(CAPTURE)


# Two ranks on NCCL. Arguments: what is wrong.
FAULTY = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
what, rank = sys.argv[1], int(os.environ["RANK"])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl")
ddp = DistributedDataParallel(torch.nn.Linear(512, 512).to(device), device_ids=[device.index])
sgd = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(150):
    if what == "straggler" and rank == 1:
        time.sleep(0.03)
    sgd.zero_grad()
    loss = ddp(torch.rand(64, 512, device=device)).square().mean()
    loss.backward()
    sgd.step()
    if what == "missing_rank" and step == 40 and rank == 0:
        dist.all_reduce(loss.detach())
    if what == "mismatch" and step == 40:
        dist.all_reduce(torch.ones(4 + 4 * rank, device=device))
    loss.item()
dist.destroy_process_group()
"""
EXPECTED = {
    "healthy": set(),
    "missing_rank": {"deadlock", "mismatch"},
    "mismatch": {"mismatch"},
    "straggler": {"straggler"},
}


def verdicts() -> Outcome:
    """Run two NCCL ranks with a known fault; the finding must be in the run while the job still runs."""
    torch = need_recorder()
    env = two_ranks(torch)
    wrong, data = [], {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.py"
        file.write_text(FAULTY)
        for what, kinds in EXPECTED.items():
            run_dir = Path(folder) / what
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "distdiag.run"]
            # the verdict must not need the watchdog, which acts after ten minutes
            hang = {"DISTDIAG_END_HANGS_S": "2"}
            finished([sys.executable, *launch, "--run-dir", str(run_dir), str(file), what], 50, env | hang)
            found = loud(diagnose(run_dir))
            data[what] = found
            if ({f.partition("/")[0] for f in found} & kinds) != ({f.partition("/")[0] for f in found} or kinds):
                wrong.append(f"{what}: {', '.join(found) or 'nothing found'}")
    return Outcome(FAIL if wrong else PASS, "; ".join(wrong) or f"{len(EXPECTED)} jobs judged right", data)


def two_ranks(torch: Any) -> dict[str, str]:
    """Return the environment for two NCCL ranks on this machine."""
    if torch.cuda.device_count() >= 2:
        return {}
    version = nccl_version()
    if version is None or version < (2, 30):
        found = "of unknown version" if version is None else ".".join(map(str, version))
        raise NotPossible(f"one GPU, and NCCL {found}: two ranks on one GPU need 2.30")
    # Experimental there, off by default; few CTAs so that both ranks' kernels fit on the card at once.
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}


def need_recorder() -> Any:
    """Return torch if a recorded NCCL job can run here; else raise NotPossible."""
    torch = need_gpu()
    need("msgspec", "psutil", "click")
    if not torch.distributed.is_nccl_available():
        raise NotPossible("this torch has no NCCL")
    return torch


def one_rank() -> dict[str, str]:
    """Return the variables that a launcher sets for the only rank of a job."""
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return (
        dict.fromkeys(names[0], "0")
        | dict.fromkeys(names[1], "1")
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    )


def diagnose(run_dir: Path) -> dict[str, Any]:
    """Return `distdiag diagnose --json` of a run."""
    _, out, err = finished([sys.executable, "-m", "distdiag", "diagnose", str(run_dir), "--json"], 60)
    try:
        return json.loads(out)
    except ValueError:
        raise RuntimeError(f"diagnose printed no JSON: {err.strip().splitlines()[-1:]}") from None


def loud(verdict: dict[str, Any]) -> list[str]:
    """Return kind/cause of the findings that are warnings or errors."""
    return [f"{f['kind']}/{f['cause']}" for f in verdict.get("findings", ()) if f["severity"] != "info"]
