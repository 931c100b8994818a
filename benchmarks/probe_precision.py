"""Checks that the probe's p50 is right: compares it with a bare `dist.all_reduce` loop, with PARAM and with gloo's benchmark.

    python benchmarks/probe_precision.py                        # two tables, about two minutes
    python benchmarks/probe_precision.py --param ~/param        # a checkout of github.com/facebookresearch/param
    python benchmarks/probe_precision.py --gloo ~/gloo/build/gloo/benchmark/benchmark

Table 1: the harness and the bare loop in one process group, in turns (ABBA), size by size: same seconds, same neighbours, same
statistics. They agree if each p50 is within the union of both 95 % intervals. Table 2: whole commands, one after another, with
what each prints at each size (p50 in µs), and its time in seconds from the start of Python to its exit. The other tools' code is not
in this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from distdiag.probekit.measure.sampling import Stamped
    from distdiag.probekit.ranks.job import Job

SIZES = [1024 * 4**k for k in range(9)]  # 1 KiB to 64 MiB
RESULTS = ROOT / "benchmarks" / "results"

BARE = """
import os, time, statistics, torch, torch.distributed as dist
dist.init_process_group("gloo")
for size in {sizes}:
    x = torch.zeros(size // 4)
    times = []
    for i in range({iterations} + 5):
        t = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - t)
    if dist.get_rank() == 0:
        print("BARE", size, statistics.median(times[5:]) * 1e6, flush=True)
dist.barrier()
dist.destroy_process_group()
time.sleep(0.3)
os._exit(0)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="per size in table 1, both loops together (default 4)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns per size (default 20)")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--param", type=Path, metavar="DIR", help="a checkout of PARAM")
    parser.add_argument("--gloo", type=Path, metavar="FILE", help="the built gloo benchmark (USE_REDIS is not needed)")
    parser.add_argument(
        "--commands", type=int, default=1, help="times each whole command is run (default 1; 0: no table 2)"
    )
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "probe_precision.json")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        return as_rank(args)

    from distdiag.probekit.verdict.result import host_class

    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "table.json"
        own = [
            str(Path(__file__)),
            "--as-rank",
            str(file),
            "--seconds",
            str(args.seconds),
            "--rounds",
            str(args.rounds),
        ]
        run([*torchrun(args.nproc), *own])
        agreement = json.loads(file.read_text())
    print_agreement(agreement)
    commands = whole_commands(args) if args.commands else []
    result = {
        "schema": "distdiag.benchmark/1",
        "benchmark": "probe_precision",
        "host_class": host_class(),
        "load1_before": load_before,
        "load1_after": os.getloadavg()[0],
        "nproc": args.nproc,
        "agreement": agreement,
        "commands": commands,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten: {args.output}", file=sys.stderr)
    return 0 if all(r["agree"] for r in agreement) else 1


def torchrun(nproc: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Return the stdout of a command in its own session, which is killed with everything in it."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | os.environ | (env or {})
    p = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = p.communicate(timeout=900)
    finally:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if p.returncode not in (0, 1, 3):
        raise SystemExit(f"{' '.join(command[:4])} … ended with {p.returncode}:\n{err[-2000:]}")
    return out


# ---------------------------------------------------------------------- table 1


def as_rank(args: argparse.Namespace) -> int:
    """Run one rank of table 1, under torchrun."""
    from distdiag.probekit.command.options import parse
    from distdiag.probekit.measure.collective import Collective
    from distdiag.probekit.measure.probe import load_probe
    from distdiag.probekit.measure.sampling import sample
    from distdiag.probekit.ranks import environment
    from distdiag.probekit.ranks.job import joined
    from distdiag.probekit.verdict.collective_result import make_row

    place = environment.detect()
    assert place is not None
    options = parse([], "allreduce")
    options.device, options.backend = "cpu", "gloo"
    probe = load_probe("allreduce")
    assert isinstance(probe, Collective)
    rows: list[dict[str, Any]] = []
    with joined(place, options, 60.0) as job:
        turn_s = args.seconds / args.rounds / 2
        for size in SIZES:
            b = probe.buffers(job, size // 4)
            call = probe.timed_call(job, b)
            harness: list[Stamped | None] = []
            bare: list[Stamped | None] = []
            for i in range(args.rounds):
                order = ("harness", "bare") if i % 2 == 0 else ("bare", "harness")
                for who in order:
                    if who == "harness":
                        harness.append(sample(job, call, f"harness {size}", turn_s, 1e-9))
                    else:
                        bare.append(bare_loop(job, b.sent, turn_s))
            if job.rank == 0:
                pair = {}
                for who, parts in (("probe", harness), ("bare", bare)):
                    row, _, _ = make_row("all_reduce", size, joined_up([p for p in parts if p is not None]), [], job)
                    pair[who] = row
                rows.append(agreement_row(size, pair["probe"], pair["bare"]))
    if job.rank == 0:
        args.as_rank.write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)


def bare_loop(job: Job, x: Any, seconds: float) -> Stamped | None:
    """Run the obvious loop for about `seconds`; return its times, and the foreign CPU meanwhile."""
    import numpy as np
    import torch.distributed as dist

    from distdiag.probekit.measure.noise import BlockNoise
    from distdiag.probekit.measure.sampling import NoiseMeter, Stamped

    dist.all_reduce(x)
    begin = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(x)
    n = int(job.agree([max(1.0, min(5000.0, seconds / ((time.perf_counter() - begin) / 3)))])[0])
    meter = NoiseMeter(job)
    entered, left = [], []
    dist.all_reduce(x)
    for _ in range(n):
        entered.append(time.perf_counter_ns())
        dist.all_reduce(x)
        left.append(time.perf_counter_ns())
    noise = meter.stop("bare")
    stamps = job.gather_array(np.array([entered, left], dtype=np.int64))
    if stamps is None or noise is None:
        return None
    us = (stamps - stamps.min()) / 1e3
    return Stamped(
        us[:, 0], us[:, 1], np.zeros(n, dtype=int), [BlockNoise(noise.foreign_cpus, noise.cpus, job.ranks_per_host)]
    )


def joined_up(parts: list[Stamped]) -> Stamped:
    """Return the turns of one loop as one series, noisy ones included: neighbours disturb both loops equally.

    A block without our ranks is never called noisy, so `make_row` leaves none out.
    """
    import numpy as np

    from distdiag.probekit.measure.noise import BlockNoise
    from distdiag.probekit.measure.sampling import Stamped

    blocks, noise = [], []
    for p in parts:
        blocks.append(p.block + len(noise))
        noise += [BlockNoise(n.foreign_cpus, n.cpus, ranks=0) for n in p.noise]
    return Stamped(
        np.concatenate([p.entered_us for p in parts], axis=1), np.concatenate([p.left_us for p in parts], axis=1), np.concatenate(blocks), noise
    )  # fmt: skip


def agreement_row(size: int, probe: Any, bare: Any) -> dict[str, Any]:
    low = min(probe.time_us.ci95[0], bare.time_us.ci95[0])
    high = max(probe.time_us.ci95[1], bare.time_us.ci95[1])
    return {
        "bytes": size,
        "probe_us": {"p50": probe.time_us.p50, "ci95": probe.time_us.ci95, "iterations": probe.iterations},
        "bare_us": {"p50": bare.time_us.p50, "ci95": bare.time_us.ci95, "iterations": bare.iterations},
        "ratio": probe.time_us.p50 / bare.time_us.p50,
        "agree": low <= probe.time_us.p50 <= high and low <= bare.time_us.p50 <= high and overlap(probe, bare),
        "foreign_cpus": probe.foreign_cpus,
    }


def overlap(probe: Any, bare: Any) -> bool:
    """True if the union has no gap: the two intervals touch, or one p50 is in the other's interval."""
    return probe.time_us.ci95[0] <= bare.time_us.ci95[1] and bare.time_us.ci95[0] <= probe.time_us.ci95[1]


def print_agreement(rows: list[dict[str, Any]]) -> None:
    from distdiag.terms.units import size_text

    print(
        f"{'size':>8} {'probe p50 us':>13} {'95 % interval':>23} {'n':>6} {'bare p50 us':>13} {'95 % interval':>23} {'n':>6} {'ratio':>6}  agree  foreign CPUs"
    )
    for r in rows:
        cells = [f"{size_text(r['bytes']):>8}"]
        for who in ("probe_us", "bare_us"):
            t = r[who]
            cells.append(f"{t['p50']:13,.1f} {t['ci95'][0]:10,.1f} – {t['ci95'][1]:10,.1f} {t['iterations']:6d}")
        foreign = f"{r['foreign_cpus']:.1f}" if r["foreign_cpus"] is not None else "–"
        print(f"{' '.join(cells)} {r['ratio']:6.3f}  {'yes' if r['agree'] else 'NO':>5}  {foreign:>12}")


# ---------------------------------------------------------------------- table 2


def whole_commands(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every command in turn, `--commands` times; return the last run's figures and all durations."""
    options = f"-m distdiag probe allreduce --nproc {args.nproc} --device cpu --no-record --json"
    probe = [sys.executable, *options.split()]
    plan: dict[str, Any] = {
        "distdiag probe allreduce": lambda: probe_json(run(probe)),
        "… --quick": lambda: probe_json(run([*probe, "--quick"])),
        "bare loop, 20 iterations, torchrun": lambda: bare_script(args.nproc, 20),
    }
    if args.param:
        plan["PARAM comms.py, 20 iterations"] = lambda: param(args.param, args.nproc)
    if args.gloo:
        plan["gloo benchmark (C++)"] = lambda: gloo(args.gloo, args.nproc)
    found = [{"command": name, "seconds": [], "p50_us": {}} for name in plan]
    for _ in range(args.commands):
        for entry, work in zip(found, plan.values(), strict=True):
            start = time.monotonic()
            entry["p50_us"] = work()
            entry["seconds"].append(round(time.monotonic() - start, 2))
    from distdiag.terms.units import size_text

    print(f"\n{'whole command':36} {'seconds':>8}  p50 in us at " + " ".join(f"{size_text(s):>9}" for s in SIZES))
    for entry in found:
        cells = " ".join(f"{entry['p50_us'][s]:9,.0f}" if s in entry["p50_us"] else f"{'–':>9}" for s in SIZES)
        print(f"{entry['command']:36} {min(entry['seconds']):8.1f}  {'':13}{cells}")
    return found


def probe_json(text: str) -> dict[int, float]:
    return {r["bytes"]: r["time_us"]["p50"] for r in json.loads(text)["rows"]}


def bare_script(nproc: int, iterations: int) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "bare.py"
        script.write_text(BARE.format(sizes=SIZES, iterations=iterations))
        out = run([*torchrun(nproc), str(script)])
    return {int(size): float(us) for size, us in re.findall(r"BARE (\d+) ([\d.]+)", out)}


def param(checkout: Path, nproc: int) -> dict[int, float]:
    """Run PARAM's all_reduce (it puts a barrier before the timer), started with torchrun's variables, as it expects."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "param_bench").symlink_to(checkout.resolve())
        script = checkout / "train" / "comms" / "pt" / "comms.py"
        port = str(free_port())
        options = f"--master-ip 127.0.0.1 --master-port {port} --backend gloo --device cpu --collective all_reduce"
        options += " --b 1K --e 64M --f 4 --n 20 --w 5 --z 1"
        out = run_ranks(
            [sys.executable, str(script), *options.split()],
            nproc,
            {"PYTHONPATH": scratch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
    return {int(s): float(us) for s, us in re.findall(r"COMMS-RES-all_reduce\S*\s+(\d+)\s+\d+\s+([\d.]+)", out)}


def gloo(benchmark: Path, nproc: int) -> dict[int, float]:
    """Run gloo's own benchmark, ring all_reduce in C++; it prints microseconds per size in elements."""
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES:
            options = f"--size {nproc} --shared-path {scratch} --prefix {size} --transport tcp --tcp-device lo"
            options += f" --elements {size // 4} --iteration-time 300ms allreduce_ring_chunked"
            command = [str(benchmark), *options.split()]
            out = run_ranks(command, nproc, {}, rank_option="--rank")
            match = re.search(rf"\s{size // 4}\s+([\d.]+)\s+([\d.]+)", out)  # elements, min, p50
            if match:
                found[size] = float(match[2])
    return found


def run_ranks(command: list[str], nproc: int, env: dict[str, str], rank_option: str | None = None) -> str:
    """Start one process per rank with torchrun's variables; return rank 0's stdout."""
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(nproc):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
        }
        own = [*command[:1], rank_option, str(rank), *command[1:]] if rank_option else command
        ranks.append(
            subprocess.Popen(
                own,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    try:
        outputs = [p.communicate(timeout=600)[0] for p in ranks]
        return outputs[0]
    finally:
        for p in ranks:
            try:
                os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
