"""Inputs for `make fuzz`: mutations of bytes and of plain data, and the files that each command reads."""

from __future__ import annotations

import contextlib
import gzip
import json
import mmap
import os
import pickle
import random
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from distdiag import procfs
from distdiag.cli import main as distdiag
from distdiag.diagnosis.model.findings import Finding, Report, Severity, Where
from distdiag.monitor.evidence import ask, native
from distdiag.monitor.loop import Monitor
from distdiag.page import directories
from distdiag.page.layout import Header, Page, page_path
from distdiag.recorder import joining
from distdiag.report.formats import FORMATS
from distdiag.sources.logs.patterns import TABLE
from distdiag.store.checked import schema
from tests.diagnosis.recordings import Job, as_json, as_pickle
from tests.monitor.test_damaged_pages import a_page, changed
from tests.report.runs import make_run
from tests.sources.test_logs import counters, fingerprint, raised, table, timeout
from tests.sources.test_logs import signal as dump_signal
from tests.store.test_wrong_types import WRONG, filled, spoil

# what the monitor and the commands write into a run
LINKS = (
    ".run.db.reserve", ".verdict.stream", "verdict.txt", "monitor.log", "run.db.where", ".node_0.ended", "run.db-wal", "run.db-shm",
    "run.db-journal", "stacks", "flight_recorder", "profile", "nodes", "attempt_1", "report.html", "trace.json", ".jobs", "pages",
)  # fmt: skip
LOG_S, LOG_S_PER_MB = 3.0, 2.0  # CPU time of a log: of the command, and for its size
TRACE_FACTOR, TRACE_S = 9.0, 0.2  # n² would be 16; less is not measured well
SCREENS = ("ranks", "comm", "heat", "memory", "findings", "data", "stacks", "probes", "timeline", "profile", "rank")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 31, 1 << 62, 1 << 63, 10**5000, -(10**30), 0.5, float("inf"), float("nan"), "", "\x1b[2J",
    "\ud800", "9" * 5000, "x" * 100_000, "0-99999999999", b"\xff", [], [[]], {}, {"a": []}, [None] * 3, (1, 2),
)  # fmt: skip
TEXT_LOG = """Current thread 0x00007f0000000000 (most recent call first):
  File "/home/user/train.py", line 12 in step
  File "/home/user/train.py", line 40 in main
Fatal Python error: Segmentation fault
"""
JOB_LOGS = (
    timeout(3), counters(3, 40, 44, 39), dump_signal(2, 21, 21, first=3), raised(1, "torch.OutOfMemoryError: CUDA out of memory. Tried"),
    table(5, -9, "Signal 9 (SIGKILL) received by PID 9"), fingerprint("ALLREDUCE", "4"), '{"message": "ValueError: odd", "rank": 2}\n',
    "srun: error: n7: tasks 1-2,5: Out Of Memory\n", "n1:7:8 [2] socket.cc:49 NCCL WARN Call to recv from 10.2.8.7<5> failed : Broken pipe\n",
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: " + fingerprint("REDUCE", "4") + "\n",
    "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 10 params, while rank 1 has inconsistent 8 params.\n",
    "Parameter indices which did not receive grad for rank 1: 6 7\n", "[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms\n",
)  # fmt: skip


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
    """Return a value that no writer would write; sometimes deeply nested or (for pickles) shared."""
    value = rng.choice(ODD)
    if rng.random() < 0.1:
        for _ in range(rng.choice((3, 30, 300))):
            value = [value] * (1 + shared) if rng.random() < 0.5 else {"a": value}
    return value


def somewhere(rng: random.Random, value: Any, shared: bool = False) -> Any:
    """Return plain data with one or more parts replaced by an odd value."""
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


class Inputs:
    """Small inputs, made once; each `make_…` writes a mutated copy into a folder and returns the command to run."""

    def __init__(self, folder: Path, bystander: int) -> None:
        self.bystander = bystander
        self.outside = folder / "outside"
        (self.outside / "folder").mkdir(parents=True)
        (self.outside / "notes.txt").write_text("mine\n")
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
        self.filled = filled(folder / "filled")
        a_page(folder / "made", 1)
        self.page = page_path(folder / "made", 1).read_bytes()
        self.node = self._node_state(folder / "other")

    def _node_state(self, folder: Path) -> Any:
        """Return the state that node 1 leaves for node 0, as plain data: its ranks are 2 and 3."""
        monitor = _monitor(folder, self._two_pages(folder, world_size=4, first=2))
        monitor.tick()
        monitor.nodes.node = monitor.nodes.files.own = 1
        monitor.nodes.publish(monitor.snapshot(0.0), time.time(), closed=True)
        state = msgspec.msgpack.decode((folder / "run" / "nodes" / "1.state").read_bytes())
        assert state["node"] == 1 and list(state["ranks"]) == [2, 3], state
        monitor.close()
        return state

    def dump(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Mutate one of three flight-recorder dumps, as data or as bytes."""
        as_text = rng.random() < 0.4
        for rank, whole in enumerate(self.dumps):
            content: Any = whole
            if rank == 1 and rng.random() < 0.6:
                for _ in range(rng.choice((1, 1, 3))):
                    content = somewhere(rng, content, shared=not as_text)
            try:
                data = as_json(content) if as_text else as_pickle(content)
            except Exception:  # a value that cannot be encoded
                data = pickle.dumps(whole)
            (folder / f"rank{rank}").write_bytes(flip(rng, data) if rank == 1 and rng.random() < 0.5 else data)
        return lambda: distdiag(["diagnose", *rng.choice(([], ["--json"])), str(folder)])

    def database(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Write run.db with odd values in its rows, or other bytes in its pages."""
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
        """Mutate run.json, the stacks or the pointer to the database."""
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

    def job_log(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Mutate a log of a job that was not recorded."""
        text = "".join(rng.choice(JOB_LOGS) for _ in range(rng.choice((1, 3, 20))))
        if rng.random() < 0.5:
            text = re.sub(
                r"\d+",
                lambda m: (
                    rng.choice(("-1", "9" * 19, "9" * 25, "131072", "\x1b[2J", "")) if rng.random() < 0.05 else m[0]
                ),
                text,
            )
        data = flip(rng, text.encode("utf-8", "replace"))
        (folder / "job.log").write_bytes(gzip.compress(data) if rng.random() < 0.1 else data)
        return lambda: distdiag(["diagnose", *rng.choice(([], ["--json"])), str(folder / "job.log")])

    def pumped_log(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Write a log of lines that fit a known message at many positions: parts of messages, repeated."""
        parts = [w for text in JOB_LOGS for w in re.findall(r"\S+ \S+ |\W+|\w+", text)]
        parts += [p.needle for p in TABLE] + [
            "1:1 in ",
            "[distdiag]   where  ",
            "9" * 40,
            "a.",
            "\x1b[",
            "rank ",
            "Error: ",
        ]
        line = ""
        for _ in range(rng.choice((1, 2, 4))):
            line += rng.choice(parts) + "".join(rng.sample(parts, rng.choice((1, 1, 2, 3)))) * rng.choice((1, 30, 3000))
        text = (line[:100_000].replace("\n", " ") + "\n") * rng.choice((1, 4, 20))
        (folder / "job.log").write_text(text, errors="replace")
        limit_s = LOG_S + LOG_S_PER_MB * len(text) / 1e6

        def read() -> None:
            began = os.times()
            distdiag(["diagnose", str(folder / "job.log")])
            took_s = sum(os.times()[:4]) - sum(began[:4])
            assert took_s < limit_s, f"{len(text) / 1e6:.2f} MB take {took_s:.1f} s"

        return read

    def trace(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Write traces of two ranks with events that overlap, damaged or in two sizes whose times are compared."""
        names = ("module: m{}", "module: m", "FSDP::all_gather (m{})", "aten::mm", "c10d::allreduce_", "gloo:all_reduce", "gloo:send", "ncclKernel", "autograd::engine::evaluate_function: Mm", "ProfilerStep#{}")  # fmt: skip
        kinds = [(name, rng.choice(("cpu_op", "user_annotation", "kernel")), rng.choice((1.0, 30.0, 1e6))) for name in rng.sample(names, rng.randrange(2, 7))]  # fmt: skip

        def events(count: int, rank: int) -> list[dict[str, Any]]:
            return [
                {"ph": "X", "name": name.format(i), "cat": cat, "tid": i % 2, "ts": 10.0 * i + rank, "dur": span,
                 "args": {"Seq": i, "Sequence number": i, "Process Group Name": "0", "Collective name": "allreduce"}}
                for i in range(count) for name, cat, span in kinds
            ]  # fmt: skip

        def write(to: Path, count: int) -> Path:
            to.mkdir()
            for rank in range(2):
                content: Any = {
                    "schemaVersion": 1,
                    "deviceProperties": [],
                    "traceEvents": events(count, rank),
                    "distributedInfo": {"rank": rank},
                }
                if damaged and rank:
                    content = somewhere(rng, content)
                try:
                    data = json.dumps(content, default=str).encode("utf-8", "replace")
                except (TypeError, ValueError, RecursionError):  # a value that cannot be encoded
                    data = b'{"traceEvents": ' + b"[" * 50_000
                (to / f"rank{rank}.json").write_bytes(flip(rng, data) if damaged and rng.random() < 0.5 else data)
            return to

        damaged = rng.random() < 0.7
        if damaged:
            write(folder / "traces", 50)
            return lambda: distdiag(["diagnose", *rng.choice(([], ["--json"])), str(folder / "traces")])
        few, many = write(folder / "few", 200), write(folder / "many", 800)

        def compare() -> None:
            took = []
            for traces in (few, many):
                began = os.times()
                distdiag(["diagnose", str(traces)])
                took.append(sum(os.times()[:4]) - sum(began[:4]))
            assert took[1] < TRACE_FACTOR * max(took[0], TRACE_S), (
                f"four times as many events: {took[0]:.2f} and {took[1]:.2f} s"
            )

        return compare

    def wrong_types(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Put wrong types into one or more columns of run.db, of all rows or of some."""
        run = Path(shutil.copytree(self.filled, folder / "run"))
        con = sqlite3.connect(run / "run.db")
        for _ in range(rng.choice((1, 1, 1, 5))):
            table = rng.choice(list(schema()))
            values = tuple(rng.sample(WRONG, rng.choice((1, 1, 4, len(WRONG)))))
            spoil(con, table, rng.choice(list(schema()[table])), values, every=rng.choice((1, 1, 2, 3)))
        con.close()
        if rng.random() < 0.3:
            screen = rng.choice(SCREENS)
            return lambda: distdiag(["tui", "--once", "--screen", screen, str(run)])
        return self._reader(rng, run)

    def formats(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Findings of hostile texts, in every output format: well-formed, and nothing that a terminal or a page obeys."""
        parts = [
            "`", "``", "<img src=x>", "\x1b]0;x\x07", "\n::error::x", "\u202e", "\ud800", "\ufffe", "]]>", "&", "|", "a b", "[x](y)", "@all",
            "%0A", "\\", "\r", "/..", "é", "#",
        ]  # fmt: skip

        def text() -> str:
            return "".join(rng.choices(parts, k=rng.randrange(8)))

        def where() -> Where:
            at = rng.choice(["/repo/", "/repo/../", "/", ""]) + text()
            return Where(rank=rng.randrange(4), file=at, line=rng.choice([-1, 0, 3, 1 << 62]), function=text())

        found = tuple(
            Finding(
                kind=text(), cause=text(), certainty=text(), severity=rng.choice(list(Severity)), message=text(), cost=text(),
                advice=text(), where=tuple(where() for _ in range(rng.randrange(3))),
            ) for _ in range(rng.randrange(3))
        )  # fmt: skip
        report = Report(state=text(), state_text=text(), findings=found, notes=(text(),))
        (folder / "report.json").write_text(repr(report), errors="backslashreplace")

        def write() -> None:
            for name, form in FORMATS.items():
                written = form(report, Path("/repo"))
                written.encode()
                assert all(c == "\n" or c.isprintable() for c in written), name
                if name == "junit":
                    ElementTree.fromstring(written)
                elif name in ("gitlab", "sarif"):
                    json.loads(written)
                elif name == "github":
                    assert all(line.startswith("::") for line in written.splitlines())
                else:
                    assert "<img" not in re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", written)

        return write

    def store_key(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """What rank 0 of a job leaves in its store: read as its run, or refused with ValueError."""
        good = json.dumps(["0123456789abcdef.0", "/tmp/reports", rng.choice([None, "/tmp/run"]), "host"]).encode()
        value = somewhere(rng, json.loads(good))
        written = flip(rng, good) if rng.random() < 0.5 else pickle.dumps(None)
        with contextlib.suppress(TypeError, ValueError):
            written = json.dumps(value).encode() if rng.random() < 0.7 else written
        (folder / "key").write_bytes(written)

        def read() -> None:
            with contextlib.suppress(ValueError):
                token, root, chosen, _ = joining._read(written)
                assert " " not in token and "/" not in token and len(token) <= 64
                for path in filter(None, (root, chosen)):
                    assert path.startswith("/") and os.fsencode(path)

        return read

    def dumped_page(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Damage the page of a living process; `distdiag dump` reads it and asks the process."""
        run = self._copy(folder)
        pages = directories.overflow(run, 0)
        directories.make(pages)
        directories.node_record(run, 0).write_text(f"launcher {pages}\n")
        path = page_path(pages, 0)
        path.write_bytes(changed(self.page, rng))
        return lambda: _dump_own(path, run)

    def monitored_page(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Damage a page before or while the monitor reads it, next to a valid one."""
        pages = self._two_pages(folder)
        damaged, at_once = changed(self.page, rng), rng.random() < 0.3

        def watch() -> None:
            if at_once:
                page_path(pages, 1).write_bytes(damaged)
            monitor = _monitor(folder, pages)
            monitor._survive(monitor.tick)
            with page_path(pages, 1).open("r+b") as f:
                f.write(damaged)
            _poll_twice(monitor)

        return watch

    def node_state(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Mutate the state file of another node, as data or as bytes; the monitor of node 0 reads it."""
        pages = self._two_pages(folder, world_size=4)
        state = self.node
        for _ in range(rng.choice((1, 1, 3))):
            state = somewhere(rng, state)
        try:
            data = msgspec.msgpack.encode(state)
        except (TypeError, ValueError, OverflowError, RecursionError):
            data = b"\x91" * 50_000
        data = flip(rng, data) if rng.random() < 0.3 else data
        (folder / "run" / "nodes").mkdir(parents=True)
        (folder / "run" / "nodes" / "1.state").write_bytes(data)
        return lambda: _poll_twice(_monitor(folder, pages))

    def archive(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Make a run as an archive brings it: links that leave it, pages and records that name foreign processes and directories."""
        run, outside = self._copy(folder), self.outside
        for name in rng.sample(LINKS, rng.randrange(1, len(LINKS))):
            if not (run / name).exists():
                (run / name).symlink_to(outside / rng.choice(("notes.txt", "folder", "absent")))
        pages = run / f"pages.{rng.choice((0, 0, 1))}"
        directories.make(pages, rng.choice((run, outside)))
        chosen = rng.choice((pages, outside, "/none", "x" * 300, "", "/dev/shm", run / "flight_recorder"))
        owner = rng.choice(("h:1:1", f"{os.uname().nodename}:1:1", ""))
        directories.node_record(run, 0).write_text(f"{owner} {chosen}\n")
        path = page_path(pages, 0)
        path.write_bytes(self.page if rng.random() < 0.5 else changed(self.page, rng))
        pid = rng.choice((self.bystander, self.bystander, 1, os.getppid()))
        for field, value in (
            (Header.pid, pid), (Header.process_start_ticks, procfs.start_ticks(pid)), (Header.heartbeat_ns, 1),
            (Header.trace_signal, rng.choice((15, 9, 1, 0, 47, 64, 1 << 20))),
        ):  # fmt: skip
            patch(path, field, int(value or 0))
        path.chmod(rng.choice((0o600, 0o600, 0o666)))
        (pages / "r0.trace").touch()
        if rng.random() < 0.2:
            return lambda: _poll_prepared(run, pages)
        if rng.random() < 0.5:
            return self._reader(rng, run)
        arguments = rng.choice(
            (["dump", "--timeout", "0.2"], ["profile", "--timeout", "0.2"], ["report", "--format", "perfetto"])
        )
        return lambda: distdiag([*arguments, str(run)])

    def records(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Mutate the small files of a run directory: its pages' directory, who has ended, which launch it belongs to."""
        run = self._copy(folder)
        contents = {
            ".node_0": f"host:1:2 {run}/pages.0\n", ".node_0.ended": "0 1\n", ".jobs/0": "0123456789abcdef.0\n",
            "verdict.txt": "distdiag: nothing found\n", "monitor.log": TEXT_LOG,
        }  # fmt: skip
        (run / ".jobs").mkdir(exist_ok=True)
        for name, text in contents.items():
            data = text.encode()
            (run / name).write_bytes(flip(rng, data) if rng.random() < 0.5 else data)
        if rng.random() < 0.3:
            name = rng.choice(list(contents))
            (run / name).unlink()
            (run / name).mkdir()
        if rng.random() < 0.2:
            return lambda: distdiag(["dump", "--no-save", "--timeout", "0.2", str(run)])
        return self._reader(rng, run)

    def logs(self, rng: random.Random, folder: Path) -> Callable[[], Any]:
        """Mutate what faulthandler and the handler of native frames write."""
        text = flip(rng, TEXT_LOG.encode()).decode("utf-8", "replace")
        frames = folder / "r0.native"
        frames.write_bytes(flip(rng, b"\1" + bytes(7) + b"\5" + bytes(503)))

        def read() -> None:
            ask.parse_stacks(text)
            ask.fatal_signal(text)
            sample = native.read(frames)
            if sample is not None:
                native.host_wait([f.name for f in native.Symbols(os.getpid()).frames(sample)])

        return read

    def _two_pages(self, folder: Path, world_size: int = 2, first: int = 0) -> Path:
        pages = folder / "pages"
        for rank in (first, first + 1):
            a_page(pages, rank).header.world_size = world_size
        return pages

    def _copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.run, folder / "run"))

    def _reader(self, rng: random.Random, run: Path) -> Callable[[], Any]:
        arguments = rng.choice((
            ["diagnose", str(run)], ["diagnose", "--json", str(run)],
            ["diagnose", "--output-format", rng.choice(list(FORMATS)), str(run)], ["report", "--format", "text", "-o", "-", str(run)],
            ["report", "--format", "json", "-o", "-", str(run)], ["report", "--format", "perfetto", "-o", "-", str(run)],
            ["compare", str(run), str(self.run)], ["tui", "--once", str(run)], ["tui", "--once", "--json", str(run)],
        ))  # fmt: skip
        return lambda: distdiag(arguments)


def patch(path: Path, field: Any, value: int) -> None:
    """Write a number into the header of a page file."""
    at = Page.header.offset + field.offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write((value & (1 << 8 * field.size) - 1).to_bytes(field.size, "little"))


def _poll_prepared(run: Path, pages: Path) -> None:
    """Let a monitor write into a directory that somebody else has prepared."""
    monitor = Monitor(run, pages, node=0, quiet=True, keep_bytes=1 << 30)
    for _ in range(2):
        monitor._survive(monitor.tick)
    monitor.close()


def _dump_own(path: Path, run: Path) -> None:
    """Run `distdiag dump` on a page as if this process wrote it."""
    with path.open("r+b") as f:
        page = mmap.mmap(f.fileno(), 0)
        for field, value in (
            (Header.pid, os.getpid()),
            (Header.process_start_ticks, procfs.start_ticks(os.getpid())),
        ):
            at = Page.header.offset + field.offset
            page[at : at + field.size] = int(value or 0).to_bytes(field.size, "little")
        path.chmod(0o600)
        distdiag(["dump", "--no-save", "--timeout", "0.2", str(run)])


def _monitor(folder: Path, pages: Path) -> Monitor:
    return Monitor(folder / "run", pages, node=0, quiet=True, keep_bytes=1 << 30)


def _poll_twice(monitor: Monitor) -> None:
    """Run two more polls: damage costs only its own rank, and no poll."""
    for _ in range(2):
        monitor._survive(lambda: not monitor._all_moving() and monitor.tick())
    assert 0 in monitor.views, monitor.pages.damaged
    assert not monitor._failed_polls, monitor.diagnosis.failures
