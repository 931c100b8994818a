"""`make demo`: a job that hangs and its verdict, then a healthy training, its verdict and its report.

Usage: python tools/demo.py [further options of distdiag.train]
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def main() -> int:
    print("1. A job that hangs\n", flush=True)
    try:
        hang = subprocess.call([BIN / "distdiag", "demo"], cwd=HERE)
    except KeyboardInterrupt:
        return 130
    if hang:
        return hang
    run = Path("reports") / time.strftime("demo-%Y%m%d-%H%M%S")
    train = ["--standalone", "--nproc-per-node", "2", "-m", "distdiag.train", "--monitor", "--run-dir", str(run)]
    print("\n2. A healthy training: two ranks, recorded by distdiag\n")
    print(f"  torchrun {shlex.join([*train, *sys.argv[1:]])}")
    print("To watch them, open a second terminal and type:")
    print(f"  {BIN / 'distdiag'} tui {HERE / run}\n", flush=True)

    # torchrun would set one thread per rank, with a warning; instead the ranks share the cores equally
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 2) // 2))}
    try:
        trained = subprocess.call(
            [sys.executable, "-m", "torch.distributed.run", *train, *sys.argv[1:]], env=env, cwd=HERE
        )
        print("\nThe verdict:", flush=True)
        verdict = subprocess.call([BIN / "distdiag", "diagnose", run], cwd=HERE)
        print("\nThe report:", flush=True)
        report = subprocess.call([BIN / "distdiag", "report", run], cwd=HERE)
    except KeyboardInterrupt:
        return 130
    return trained or verdict or report


if __name__ == "__main__":
    sys.exit(main())
