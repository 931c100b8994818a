"""`make fuzz`: damaged and crafted input for every command that reads files, from a seed, for FUZZ_SECONDS.

A case is one input, mutated, and one command on it. Each runs in a forked child, and fails with a traceback, after
5 s of CPU time (60 s of wall time), with more than 1 GiB, with a change outside the case's folder, or with a signal to a bystander.
Logs also fail if they take longer than their size allows, traces if four times as many events take over nine times as long. Failures in
the child that reads dumps, logs and traces count. Failing inputs are kept in FUZZ_DIR. The number of a case and the seed
(and FUZZ_KIND, if given) reproduce it: `FUZZ_SEED=7 FUZZ_CASE=123 make fuzz`. FUZZ_CASES limits the number of cases.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ["DISTDIAG_RAISE"] = "1"

from distdiag.cli import main as distdiag
from tests import watch
from tests.fuzz.inputs import Inputs

CPU_S, WALL_S, MEMORY_BYTES = 5, 60, 1 << 30
TRACEBACK, KEPT = 70, 20  # exit status of a child whose command raised; number of failing inputs that are kept


def run_case(command: Callable[[], Any], log: Path) -> str | None:
    """Run one command in a child with limits; return the failure, or None."""
    pid = os.fork()
    if pid == 0:
        _child(command, log)
    deadline = time.monotonic() + WALL_S
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"hangs for {WALL_S} s"
        time.sleep(0.005)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"takes more than {CPU_S} s" if number == signal.SIGXCPU else signal.Signals(number).name
    if usage.ru_maxrss > MEMORY_BYTES >> 10:
        return f"takes {usage.ru_maxrss >> 10} MiB"
    if os.waitstatus_to_exitcode(status) == TRACEBACK or b"Traceback (most recent" in log.read_bytes():
        return "a traceback: " + log.read_text(errors="replace").strip().splitlines()[-1][:200]
    return None


def _child(command: Callable[[], Any], log: Path) -> None:
    code = TRACEBACK
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for n in (1, 2):
            os.dup2(fd, n)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), encoding="utf-8", errors="backslashreplace")
        used = int(Path("/proc/self/statm").read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES + (256 << 20), resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        command()
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> int:
    """Run cases until the time is over; exit 1 if any failed."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "60"))
    seed = int(os.environ.get("FUZZ_SEED", "0") or 0)
    only = os.environ.get("FUZZ_CASE")
    named = os.environ.get("FUZZ_KIND")
    kept = Path(os.environ.get("FUZZ_DIR", tempfile.gettempdir())) / f"distdiag-fuzz-{os.getpid()}"
    most = float(os.environ.get("FUZZ_CASES", "inf"))
    failed: dict[str, int] = {}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="distdiag-fuzz-") as d, watch.bystander() as bystander:
        inputs = Inputs(Path(d), bystander.pid)
        untouched = watch.tree(inputs.outside)
        for arguments in (["diagnose"], ["report", "--format", "text", "-o", "-"], ["tui", "--once"]):  # import once
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
                distdiag([*arguments, str(inputs.run)])
        kinds = (
            inputs.dump,
            inputs.dump,
            inputs.database,
            inputs.database,
            inputs.json_files,
            inputs.dumped_page,
            inputs.monitored_page,
            inputs.monitored_page,
            inputs.node_state,
            inputs.records,
            inputs.archive,
            inputs.archive,
            inputs.logs,
            inputs.job_log,
            inputs.pumped_log,
            inputs.trace,
            inputs.wrong_types,
            inputs.wrong_types,
            inputs.formats,
            inputs.store_key,
        )
        kinds = tuple(k for k in kinds if k.__name__ == named) if named else kinds
        end = time.monotonic() + seconds
        number = int(only) if only else 0
        while time.monotonic() < end and number < most:
            rng = random.Random(f"{seed}/{number}")
            make = rng.choice(kinds)
            folder = Path(d) / "case"
            folder.mkdir()
            wrong = run_case(make(rng, folder), Path(d) / "log")
            if changed := watch.differing(untouched, watch.tree(inputs.outside)):
                wrong, untouched = f"changes {min(changed)}", watch.tree(inputs.outside)
            assert bystander.stdout is not None
            if select.select([bystander.stdout], [], [], 0)[0]:
                wrong = f"signal {bystander.stdout.readline().strip()} to a bystander"
            counts[make.__name__] = counts.get(make.__name__, 0) + 1
            if wrong:
                if wrong not in failed and len(failed) < KEPT:
                    shutil.copytree(folder, kept / f"case-{number}")
                    shutil.copy(Path(d) / "log", kept / f"case-{number}.log")
                    print(f"fuzz: FUZZ_SEED={seed} FUZZ_CASE={number} {make.__name__}: {wrong}", flush=True)
                failed[wrong] = failed.get(wrong, 0) + 1
            shutil.rmtree(folder)
            if only:
                break
            number += 1
    print(f"fuzz: {sum(counts.values())} cases ({', '.join(f'{n} {k}' for k, n in counts.items())}), seed {seed}")
    if failed:
        print(f"fuzz: {sum(failed.values())} failed in {len(failed)} ways; inputs are in {kept}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
