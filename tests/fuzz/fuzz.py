"""`make fuzz`: damaged and crafted input for every command that reads files, from a seed, for FUZZ_SECONDS.

A case is one input, mutated, and one command on it. Each runs in a forked child, and fails with a traceback, after
5 s of CPU time (60 s of wall time), or with more than 1 GiB. Failing inputs are kept in FUZZ_DIR; the number of a case
and the seed make it again: `FUZZ_SEED=7 FUZZ_CASE=123 make fuzz`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distdiag.cli import main as distdiag
from distdiag.monitor.evidence import ask
from distdiag.page.layout import Phase
from distdiag.page.writer import PageWriter
from tests.diagnosis.recordings import Job, as_json, as_pickle
from tests.report.runs import make_run

CPU_S, WALL_S, MEMORY_BYTES = 5, 60, 1 << 30
TRACEBACK, KEPT = 70, 20  # exit status of a child whose command raised; failing inputs that are kept
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 31, 1 << 62, 1 << 63, 10**5000, -(10**30), 0.5, float("inf"), float("nan"), "", "\x1b[2J",
    "\ud800", "9" * 5000, "x" * 100_000, "0-99999999999", b"\xff", [], [[]], {}, {"a": []}, [None] * 3, (1, 2),
)  # fmt: skip
TEXT_LOG = """Current thread 0x00007f0000000000 (most recent call first):
  File "/home/user/train.py", line 12 in step
  File "/home/user/train.py", line 40 in main
Fatal Python error: Segmentation fault
"""


# -- mutations ---------------------------------------------------------------------------------------------------------


def flip(rng: random.Random, data: bytes) -> bytes:
    """Change, cut, double or insert bytes at a few positions."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + rng.choice((1, 4, 100))]
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
            case _:
                out[at:at] = out[at : at + rng.choice((4, 64, 1000))]
    return bytes(out)


def odd(rng: random.Random, shared: bool = False) -> Any:
    """Return a value that no writer would write there; sometimes nested beyond reason, or (for pickles) shared."""
    value = rng.choice(ODD)
    if rng.random() < 0.1:
        for _ in range(rng.choice((3, 30, 300))):
            value = [value] * (1 + shared) if rng.random() < 0.5 else {"a": value}
    return value


def somewhere(rng: random.Random, value: Any, shared: bool = False) -> Any:
    """Return plain data with one or more of its parts replaced by something odd."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        out = dict(value)
        for key in rng.sample(list(out), min(len(out), rng.choice((1, 1, 2)))):
            if rng.random() < 0.05:
                out.pop(key)
            else:
                out[key] = somewhere(rng, out[key], shared)
        return out
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.95:
        items = list(value)
        items[rng.randrange(len(items))] = somewhere(rng, rng.choice(items), shared)
        return type(value)(items) if type(value) in (list, tuple) else items
    return odd(rng, shared)


# -- inputs and the commands that read them ----------------------------------------------------------------------------


class Inputs:
    """Small inputs, made once; each `make_…` writes a mutated copy into a folder and returns the command to run."""

    def __init__(self, folder: Path) -> None:
        job = Job(3, {"1": ("tp", (0, 1))})
        for _ in range(3):
            job.collective()
            job.collective(group="1", op="all_gather")
            job.message(0, 1)
        job.collective(ranks=(0, 2), line=91)
        self.dumps = [job.dump(r) for r in range(3)]
        self.run = make_run(folder / "run", ranks=2, steps=20, gpus=True)
        (self.run / "run.json").write_text(json.dumps({"started_unix_s": 1.0, "versions": {"torch": "2"}}))
        con = sqlite3.connect(self.run / "run.db")
        con.execute("PRAGMA journal_mode = DELETE")
        con.execute("VACUUM")
        con.close()
        page = folder / "r0.page"
        writer = PageWriter(page)
        writer.h.pid, writer.h.world_size, writer.h.started_mono_ns = os.getpid(), 2, 1
        writer.h.phase = Phase.COLLECTIVE
        writer.publish()
        self.page = page.read_bytes()
        self.header_bytes = ctypes.sizeof(writer.h)

    def dump(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """One of three flight-recorder dumps is mutated, as data or as bytes."""
        as_text = rng.random() < 0.4
        for rank, whole in enumerate(self.dumps):
            content: Any = whole
            if rank == 1 and rng.random() < 0.6:
                for _ in range(rng.choice((1, 1, 3))):
                    content = somewhere(rng, content, shared=not as_text)
            try:
                data = as_json(content) if as_text else as_pickle(content)
            except Exception:  # what no writer can encode
                data = pickle.dumps(whole)
            (folder / f"rank{rank}").write_bytes(flip(rng, data) if rank == 1 and rng.random() < 0.5 else data)
        return lambda: distdiag(["diagnose", *rng.choice(([], ["--json"])), str(folder)])

    def database(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """run.db with odd values in its rows, or other bytes in its pages."""
        run = self._copy(folder)
        path = run / "run.db"
        if rng.random() < 0.6:
            con = sqlite3.connect(path)
            tables = [n for (n,) in con.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
            for _ in range(rng.choice((1, 3, 10))):
                table = rng.choice(tables)
                column = rng.choice([r[1] for r in con.execute(f"PRAGMA table_info({table})")])
                value = rng.choice([v for v in ODD if not isinstance(v, (list, dict, tuple))])
                where = rng.choice(("", " WHERE abs(random()) % 3 = 0"))
                with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError, ValueError):
                    con.execute(f"UPDATE {table} SET {column} = ?{where}", (value,))
            con.commit()
            con.close()
        else:
            path.write_bytes(flip(rng, path.read_bytes()))
        return self._reader(rng, run)

    def json_files(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """run.json, the stacks or the pointer to the database, mutated."""
        run = self._copy(folder)
        contents: dict[str, Any] = {
            "run.json": {"started_unix_s": 1.0, "versions": {"torch": "2"}},
            "stacks/latest.json": {"t_s": 1.0, "ranks": {"0": {"stack": ["main a.py:1"], "op": None, "note": None}}},
            "run.db.where": {"host": "node1", "path": "/nowhere/run.db"},
        }
        name = rng.choice(list(contents))
        if name == "run.db.where":
            (run / "run.db").unlink()
        (run / name).parent.mkdir(exist_ok=True)
        try:
            data = json.dumps(somewhere(rng, contents[name])).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError):
            data = b"[" * 50_000
        (run / name).write_bytes(flip(rng, data) if rng.random() < 0.5 else data)
        return self._reader(rng, run)

    def pages(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """A rank page with other bytes in its header or anywhere; `distdiag dump` reads it."""
        run = self._copy(folder)
        (run / "pages").mkdir()
        page = bytearray(self.page)
        for _ in range(rng.choice((1, 4, 64))):
            at = rng.randrange(rng.choice((self.header_bytes, len(page))))
            page[at] = rng.randrange(256)
        (run / "pages" / "r0.page").write_bytes(page)
        return lambda: distdiag(["dump", "--no-save", "--timeout", "0.2", str(run)])

    def logs(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """What faulthandler writes, mutated."""
        text = flip(rng, TEXT_LOG.encode()).decode("utf-8", "replace")
        return lambda: (ask.parse_stacks(text), ask.fatal_signal(text))

    def _copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.run, folder / "run"))

    def _reader(self, rng: random.Random, run: Path) -> Callable[[], Any]:
        arguments = rng.choice((
            ["diagnose", str(run)], ["diagnose", "--json", str(run)], ["report", "--format", "text", "-o", "-", str(run)],
            ["report", "--format", "json", "-o", "-", str(run)], ["report", "--format", "perfetto", "-o", "-", str(run)],
            ["compare", str(run), str(self.run)], ["tui", "--once", str(run)], ["tui", "--once", "--json", str(run)],
        ))  # fmt: skip
        return lambda: distdiag(arguments)


# -- running -----------------------------------------------------------------------------------------------------------


def run_case(command: Callable[[], Any], log: Path) -> str | None:
    """Run one command in a child with limits; return what is wrong, or None."""
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
    kept = Path(os.environ.get("FUZZ_DIR", tempfile.gettempdir())) / f"distdiag-fuzz-{os.getpid()}"
    failed: dict[str, int] = {}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="distdiag-fuzz-") as d:
        inputs = Inputs(Path(d))
        for arguments in (["diagnose"], ["report", "--format", "text", "-o", "-"], ["tui", "--once"]):  # import once
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
                distdiag([*arguments, str(inputs.run)])
        kinds = (
            inputs.dump,
            inputs.dump,
            inputs.database,
            inputs.database,
            inputs.json_files,
            inputs.pages,
            inputs.logs,
        )
        end = time.monotonic() + seconds
        number = int(only) if only else 0
        while time.monotonic() < end:
            rng = random.Random(f"{seed}/{number}")
            make = rng.choice(kinds)
            folder = Path(d) / "case"
            folder.mkdir()
            wrong = run_case(make(rng, folder), Path(d) / "log")
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
