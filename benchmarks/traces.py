"""Compares `distdiag diagnose` with HTA (Holistic Trace Analysis) on the same Kineto traces of several ranks: numbers, time, memory.

    python benchmarks/traces.py --hta /path/to/python-with-hta [--ranks 8] [--mb 200] [--rounds 3] [--traces DIR] [--write]

Without --traces it generates traces first: each rank has four steps, with compute kernels on one stream, an NCCL all_reduce
per layer on another, and host operators around them; rank 1 is late. `--mb` is the size of each file. The two programs take
turns, each run in a new process. HTA's time span is from the first kernel to the last, distdiag's is whole steps. So these are
compared: time of compute kernels, time of communication kernels, and their overlap (ms); seconds and peak MiB of each program.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS, LAYERS, PID = 4, 24, 4037
FILL = (  # a host operator as text; json.dumps would take ten times as long
    '{"ph": "X", "cat": "cpu_op", "name": "aten::op_%d", "pid": %d, "tid": %d, "ts": %.3f, "dur": %.3f, "args": {"External id": %d, '
    '"Sequence number": %d, "Input type": ["float", "float"], "Input Dims": [[256, 1024], [1024, 1024]]}},\n'
)
HTA = """
import json, logging, sys, warnings
warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
files = {i: f for i, f in enumerate(sys.argv[1:])}
a = TraceAnalysis(trace_files=files, trace_dir="", include_last_profiler_step=True)
times, overlap = a.get_temporal_breakdown(visualize=False), a.get_comm_comp_overlap(visualize=False)
print(json.dumps({
    int(t["rank"]): {"compute_us": float(t["compute_time(us)"]), "overlap_pct": float(o["comp_comm_overlap_pctg"])}
    for (_, t), (_, o) in zip(times.iterrows(), overlap.iterrows())
}))
"""


def write_trace(path: Path, rank: int, ranks: int, mb: int) -> None:
    """Write the trace of one rank of a simulated job; host operators fill it up to `mb` megabytes."""
    rng = random.Random(rank)
    size, step_us = 0, 400_000.0
    fill = max(1, mb * 1_000_000 // (STEPS * LAYERS * 235))  # host operators of a layer, each of about 235 bytes
    base = 1_700_000_000_000_000_000
    with path.open("w") as f:

        def event(cat: str, name: str, ts: float, dur: float, pid: int, tid: int, **args: object) -> None:
            nonlocal size
            text = json.dumps(
                {
                    "ph": "X",
                    "cat": cat,
                    "name": name,
                    "pid": pid,
                    "tid": tid,
                    "ts": round(ts, 3),
                    "dur": round(dur, 3),
                    "args": args,
                }
            )
            f.write(text + ",\n")
            size += len(text)

        info = {"backend": "nccl", "rank": rank, "world_size": ranks}
        f.write(
            f'{{"schemaVersion": 1, "deviceProperties": [], "distributedInfo": {json.dumps(info)}, "baseTimeNanoseconds": {base},\n"traceEvents": [\n'
        )
        n = 0
        for step in range(STEPS):
            t0 = 1_000.0 + step * step_us
            event("user_annotation", f"ProfilerStep#{step + 10}", t0, step_us - 100, PID, PID)
            late = 15_000.0 if rank == 1 else 0.0
            at, end = t0 + 2_000 + late, 0.0
            for layer in range(LAYERS):
                n += 1
                dur = rng.uniform(6_000, 8_000)
                event("cuda_runtime", "cudaLaunchKernelExC", at - 400, 20, PID, PID, correlation=500_000 + n)
                event("cuda_runtime", "cudaLaunchKernel", at - 500, 20, PID, PID, correlation=100_000 + n)
                event(
                    "kernel",
                    "void cutlass::gemm_kernel<float>",
                    at,
                    dur,
                    0,
                    7,
                    stream=7,
                    correlation=100_000 + n,
                    device=0,
                )
                begin = max(at + dur, end)  # in order, on one stream
                end = max(begin, t0 + 17_000 + (layer + 1) * 12_000) + 3_000
                event(
                    "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", begin, end - begin,
                    0, 20, **{"stream": 20, "correlation": 500_000 + n, "device": 0, "Collective name": "allreduce", "In msg nelems": 1 << 20,
                              "Out msg nelems": 1 << 20, "Group size": ranks, "dtype": "Float", "Process Group Name": "default_pg", "Seq": n},
                )  # fmt: skip
                parts = [FILL % (i % 40, 7, 7, at - 1_000 + 7_000 * i / fill, 4_000 / fill, i, n) for i in range(fill)]
                f.write("".join(parts))
                size += sum(map(len, parts))
                at += max(dur, 10_500.0)
        f.write(
            f'{{"ph": "M", "name": "process_name", "pid": {PID}, "args": {{"name": "python"}}}}\n], "traceName": "{path.name}"}}\n'
        )


def timed(argv: list[str]) -> tuple[float, float, str]:
    """Return seconds, peak MiB of the largest process, and the output."""
    before = time.perf_counter()
    code = (
        "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE); "
        "sys.stdout.buffer.write(r.stdout); sys.stderr.buffer.write(r.stderr[-2000:]); "
        "print('\\nPEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    took = time.perf_counter() - before
    text, _, peak = done.stdout.rpartition("\nPEAK ")
    if done.returncode not in (0, 1) or not peak:
        raise SystemExit(f"{argv[0]} failed: {done.stderr[-1500:]}")
    return took, int(peak) / 1024, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hta", required=True, help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="traces-") as made:
        folder = arguments.traces or Path(made)
        if arguments.traces is None:
            for rank in range(arguments.ranks):
                write_trace(folder / f"rank-{rank}.json", rank, arguments.ranks, arguments.mb)
        files = sorted(str(p) for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")))
        sizes = sum(os.path.getsize(f) for f in files) / 1e6
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        text = other = ""
        for _ in range(arguments.rounds):
            s, mib, text = timed([sys.executable, "-m", "distdiag", "diagnose", str(folder), "--json"])
            ours.append((s, mib))
            s, mib, other = timed([arguments.hta, "-c", HTA, *files])
            theirs.append((s, mib))
            print(f"distdiag {ours[-1][0]:.1f} s {ours[-1][1]:.0f} MiB, HTA {s:.1f} s {mib:.0f} MiB", file=sys.stderr)
    found = json.loads(text)
    hta = {int(k): v for k, v in json.loads(other.strip().splitlines()[-1]).items()}
    ratios = [a[0] / b[0] for a, b in zip(ours, theirs, strict=True)]
    out = [
        "# Kineto traces: distdiag and HTA on the same files", "",
        (f"`python benchmarks/traces.py` on {os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f}; {len(files)} files,"
        f" {sizes:,.0f} MB together; rounds in turns, n = {arguments.rounds}."), "",
        "| | seconds (each round) | peak of the largest process |", "|---|---|---|",
        f"| distdiag diagnose | {', '.join(f'{s:.1f}' for s, _ in ours)} | {max(m for _, m in ours):,.0f} MiB |",
        f"| HTA | {', '.join(f'{s:.1f}' for s, _ in theirs)} | {max(m for _, m in theirs):,.0f} MiB |", "",
        f"distdiag takes {statistics.median(ratios):.2f} of HTA's time ({min(ratios):.2f}–{max(ratios):.2f}).", "",
        "| rank | compute ms, distdiag | HTA | share of communication that overlaps, distdiag | HTA |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for r in found["ranks"]:
        h = hta.get(r["rank"])
        if h is None:
            continue
        share = 100 * r["overlap_ms"] / r["comm_ms"] if r["comm_ms"] else float("nan")
        out.append(
            f"| {r['rank']} | {r['compute_ms'] * found['steps']:.2f} | {h['compute_us'] / 1e3:.2f} | {share:.2f} % | {h['overlap_pct']:.2f} % |"
        )
    table = "\n".join(out) + "\n"
    print(table)
    print(found["verdict"])
    if arguments.write:
        (ROOT / "benchmarks" / "results" / "traces.md").write_text(table)


if __name__ == "__main__":
    main()
