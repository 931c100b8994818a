"""How long until node 0 names a deadlock over nodes that share no directory: from the wrong call to the printed finding.

Nodes are network namespaces of this machine (needs root and iproute2).

    python -m benchmarks.nodes --nodes 2 --n 20
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import textwrap
import time
from pathlib import Path

from tests.jobs import rows, wait_for
from tests.nodes import Cluster

LOOP = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.ones(10)
    for i in range(100_000):
        dist.all_reduce(x)
        time.sleep(0.02)
        if os.path.exists(HANG) and rank == world - 1:
            open(HANG + ".began", "w").write(str(time.time()))
            dist.barrier()
"""


def once(nodes: int) -> float:
    """Return the seconds from the call that never completes to the error on node 0's stderr."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        hang = root / "hang"
        script = root / "train.py"
        script.write_text(textwrap.dedent(LOOP).replace("HANG", repr(str(hang))))
        with Cluster(root, nodes) as cluster, cluster.job(script) as jobs:

            def heard() -> bool:
                lives = dict(rows(cluster.run(0), "SELECT rank, life FROM rank"))
                return len(lives) == nodes and set(lives.values()) == {"running"}

            wait_for(heard, 90, "all ranks", jobs[0])
            time.sleep(2.0 + time.time() % 1.0)
            hang.touch()
            end = time.monotonic() + 60
            while "deadlock/missing_rank" not in jobs[0].stderr():
                if time.monotonic() > end:
                    raise TimeoutError(jobs[0].tail())
                time.sleep(0.01)
            return time.time() - float((root / "hang.began").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--n", type=int, default=20)
    options = parser.parse_args()
    found = []
    for i in range(options.n):
        found.append(once(options.nodes))
        print(f"{i + 1}/{options.n}: {found[-1]:.2f} s", flush=True)
    found.sort()
    p95 = found[min(len(found) - 1, -(-95 * len(found) // 100) - 1)]
    result = {
        "nodes": options.nodes, "n": len(found), "median_s": round(statistics.median(found), 2), "p95_s": round(p95, 2),
        "least_s": round(found[0], 2), "most_s": round(found[-1], 2), "host": platform.node(),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
