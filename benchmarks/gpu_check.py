"""Runs everything that needs a GPU, unattended, from a bare checkout, in under ten minutes: `make gpu-check`.

Needs Python with torch >= 2.10 and numpy; a check that lacks a package names it. Each check runs in its own process, so that one
that hangs or crashes costs only its time, and ends with one word: pass, fail, not possible here.
The results go to benchmarks/results/gpu_check-<device>.json. Exit code 0: nothing failed; 1: something did; 4: no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _gpu_machine as machine  # noqa: E402
import _gpu_recorder as recorder  # noqa: E402
from _gpu_base import FAIL, NOT_POSSIBLE, PASS, Check, NotPossible, Outcome, finished  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TOTAL_S = 580.0

CHECKS = (
    Check("device", "torch sees the GPU", 60, machine.device_facts),
    Check("nvml", "NVML's facts and health", 30, machine.nvml_facts),
    Check("verdicts", "missing rank, mismatch, straggler and a healthy job on two NCCL ranks", 180, recorder.verdicts),
    Check("capture", "a step with an all_reduce in a CUDA graph, with and without distdiag", 80, recorder.captured),
    Check("compile", "graphs and graph breaks of compiled code, with and without distdiag", 120, recorder.compiled),
    Check("recorder", "the recorder's times and memory against CUDA events", 90, recorder.recorder_events),
    Check("overhead-10ms", "what recording costs steps of 10 ms", 120, recorder.overhead_10ms),
    Check("overhead-50ms", "what recording costs steps of 50 ms", 120, recorder.overhead_50ms),
    Check("nccl-1", "NCCL with one rank", 60, machine.nccl_one_rank),
    Check("nccl-2", "NCCL with two ranks", 60, machine.nccl_two_ranks),
    Check("nccl-tests", "our all_reduce against nccl-tests'", 90, machine.nccl_tests),
    Check("training", "the reference job on the GPU", 100, machine.training_job),
    Check("gloo-cuda", "gloo with CUDA tensors, two ranks on one GPU", 120, machine.gloo_on_cuda),
    Check("matmul", "matrix products against the published peak", 60, machine.matmul),
    Check("memory", "device memory and copies against the peak", 60, machine.memory_and_copies),
    Check("device-to-device", "copies between two GPUs", 40, machine.device_to_device),
    Check("probe-gpu", "the gpu probe", 70, machine.gpu_probe),
    Check("probe-dataloader", "the dataloader probe with pinned transfers", 60, machine.dataloader_probe),
    Check("probe-step", "the step probe", 70, machine.step_probe),
)


def one_check(name: str) -> int:
    """Run one check in this process; print its outcome as JSON."""
    check = next(c for c in CHECKS if c.name == name)
    try:
        outcome = check.run()
    except NotPossible as e:
        outcome = Outcome(NOT_POSSIBLE, str(e))
    except Exception as e:
        outcome = Outcome(FAIL, f"{type(e).__name__}: {e}".splitlines()[0][:300])
    print("\n" + json.dumps(asdict(outcome)))
    sys.stdout.flush()
    os._exit(0)  # CUDA and NCCL may hang at the interpreter's end; the outcome is already printed


def run_check(check: Check, left_s: float) -> Outcome:
    limit = min(check.limit_s, left_s)
    if limit < 10:
        return Outcome(NOT_POSSIBLE, "no time left of the ten minutes")
    code, out, err = finished([sys.executable, str(Path(__file__).resolve()), "--check", check.name], limit)
    try:
        return Outcome(**json.loads(out.strip().splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = err.strip().splitlines()[-1][:300] if err.strip() else "no output"
        return Outcome(FAIL, f"exit code {code}: {last}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,…", help="only these checks: " + ", ".join(c.name for c in CHECKS))
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default benchmarks/results/gpu_check-<device>.json"
    )
    parser.add_argument("--check", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        return one_check(args.check)
    wanted = args.only.split(",") if args.only else [c.name for c in CHECKS]
    unknown = set(wanted) - {c.name for c in CHECKS}
    if unknown:
        parser.error(f"no check {', '.join(sorted(unknown))}")
    began = time.monotonic()
    outcomes: dict[str, dict[str, Any]] = {}
    name = None
    for check in CHECKS:
        if check.name not in wanted:
            continue
        start = time.monotonic()
        # Without a GPU every check would report that after importing torch; the first reports it for all.
        if name is None and outcomes.get("device", {}).get("word") == NOT_POSSIBLE:
            outcome = Outcome(NOT_POSSIBLE, outcomes["device"]["text"])
        else:
            outcome = run_check(check, TOTAL_S - (start - began))
        if check.name == "device" and outcome.word == PASS:
            name = outcome.data["name"]
        seconds = time.monotonic() - start
        outcomes[check.name] = asdict(outcome) | {"about": check.about, "seconds": round(seconds, 1)}
        print(f"{outcome.word:18} {check.name:18} {seconds:6.1f} s  {outcome.text}", flush=True)
    words = [o["word"] for o in outcomes.values()]
    total = time.monotonic() - began
    print(
        f"\n{words.count(PASS)} passed, {words.count(FAIL)} failed, {words.count(NOT_POSSIBLE)} not possible here, in {total:.0f} s"
    )
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name or "no-gpu").strip("-")
    if name is not None or args.output:
        output = args.output or RESULTS / f"gpu_check-{slug}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(
            json.dumps(
                {"schema": "distdiag.gpu-check/1", "device": name, "seconds": round(total, 1), "checks": outcomes},
                indent=1,
            )
            + "\n"
        )
        print(f"written: {output}", file=sys.stderr)
    return 1 if FAIL in words else 4 if PASS not in words else 0


if __name__ == "__main__":
    sys.exit(main())
