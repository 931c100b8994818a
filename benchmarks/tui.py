"""Measures the cost of the terminal view: CPU, memory, first screen and keys, with jobs of 2 to 4,096 ranks.

    python benchmarks/tui.py [--ranks 2 64 1024 4096] [--seconds 20] [--launches 5] [--keys 40] [--write]

A separate process writes frames as a monitor does, twice and four times a second, with new numbers of every rank in each. The view
runs under tmux at 160x48 for CPU and memory (from /proc, of its process alone), and on a pseudo-terminal for the times: from
its start to the first screen with data, and from a key to the first byte of the answer. A busy machine hardly changes CPU seconds but
changes wall-clock times, so its load is printed next to them. Columns: per cent of one core, MiB, seconds, milliseconds, bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import os
import platform
import pty
import random
import select
import shutil
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tui.tmux import terminal  # noqa: E402 - the repository root is put on the path first

WIDTH, HEIGHT = 160, 48
ALLOWED_BYTES = {
    (80, 24): 8 << 10,
    (250, 70): 48 << 10,
}  # of a frame, by terminal size; `tests/tui/test_frame_bytes.py`
SIZES = tuple(ALLOWED_BYTES)
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.tui.synthetic import Scenario, live
live(Path(sys.argv[1]), Scenario(ranks=int(sys.argv[2]), steps=60 if int(sys.argv[2]) < 4000 else 20), hz=float(sys.argv[3]), seconds=3600)
"""


@dataclass
class Result:
    """Measurements at one number of ranks."""

    ranks: int
    cpu_pct: dict[float, float] = field(default_factory=dict)  # by frames per second
    memory_mib: float = 0.0
    first_s: list[float] = field(default_factory=list)
    first_cpu_s: list[float] = field(default_factory=list)
    key_ms: list[float] = field(default_factory=list)
    frame_bytes: dict[tuple[int, int], float] = field(default_factory=dict)  # by width and height


def cpu_s(pid: int) -> float:
    """Return user and system time of a process, its threads included, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def peak_mib(pid: int) -> float:
    """Return the peak resident memory, MiB."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def name_signals() -> None:
    """Name the signal that ends this program, and end what it has started: by default Python ends without a word."""

    def end(number: int, _: object) -> None:
        raise SystemExit(f"tui: error: ended by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGXCPU):
        if signal.getsignal(number) is signal.SIG_DFL:  # ignored under nohup: it stays ignored
            signal.signal(number, end)
    faulthandler.enable()


@contextlib.contextmanager
def writer(run: Path, ranks: int, hz: float) -> Iterator[None]:
    """Write frames of a live run until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER.format(root=str(ROOT)), str(run), str(ranks), str(hz)], start_new_session=True
    )
    try:
        end = time.monotonic() + 180
        while True:  # until frames arrive one after another
            with (
                contextlib.suppress(sqlite3.Error),
                contextlib.closing(sqlite3.connect(f"file:{run}/run.db?mode=ro", uri=True)) as con,
            ):
                if con.execute("SELECT count(*) FROM frame").fetchone()[0] > 10:
                    break
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit("the writer did not start")
            time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def frames_of(run: Path) -> int:
    """Return how many frames a run has so far."""
    with contextlib.closing(sqlite3.connect(f"file:{run}/run.db?mode=ro", uri=True, timeout=30)) as con:
        return con.execute("SELECT count(*) FROM frame").fetchone()[0]


def view_command(run: Path, hz: float) -> list[str]:
    return [sys.executable, "-m", "distdiag", "tui", str(run), "--hz", str(hz)]


def measure_cpu(run: Path, hz: float, seconds: float) -> tuple[float, float]:
    """Return per cent of one core under tmux at `hz` frames per second, and peak memory, MiB."""
    with terminal(view_command(run, hz), (WIDTH, HEIGHT)) as t:
        t.until("RUNNING", 120)
        time.sleep(2.0)  # start-up is measured separately
        pid = t.pid()
        before, written = cpu_s(pid), frames_of(run)
        time.sleep(seconds)
        used, written = cpu_s(pid) - before, frames_of(run) - written
        return 100 * used * hz / max(1, written), peak_mib(pid)  # a busy machine writes fewer frames than hz


class View:
    """The view on a pseudo-terminal."""

    def __init__(self, run: Path, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            view_command(run, 2.0), stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(slave)

    def read(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self.master], [], [], timeout_s)
        return os.read(self.master, 1 << 16) if ready else b""

    def first_screen(self) -> tuple[float, float]:
        """Return the seconds from the start to the first screen with data, and the CPU seconds used for it."""
        seen = b""
        while b"RUNNING" not in seen:
            seen += self.read(60.0)
            if self.process.poll() is not None:
                raise SystemExit(f"the view ended: {seen[-500:]!r}")
        return time.monotonic() - self.begun, cpu_s(self.process.pid)

    def key(self, key: bytes) -> float | None:
        """Return the milliseconds from a key to the first byte of the answer; None if a frame arrived in between."""
        while self.read(0.12):  # just after a frame: nothing else is drawn for a while
            pass
        begin = time.perf_counter()
        os.write(self.master, key)
        answer = self.read(1.0)
        return (time.perf_counter() - begin) * 1e3 if answer else None

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.master)


def measure_times(run: Path, launches: int, keys: int, result: Result) -> None:
    for i in range(launches):
        view = View(run)
        try:
            took, cpu = view.first_screen()
            result.first_s.append(took)
            result.first_cpu_s.append(cpu)
            if i == launches - 1:
                pressed = 0
                while len(result.key_ms) < keys and pressed < 4 * keys:
                    pressed += 1
                    if (ms := view.key(b"jk"[pressed % 2 :][:1])) is not None:
                        result.key_ms.append(ms)
        finally:
            view.close()


def measure_bytes(run: Path, size: tuple[int, int], frames: int = 20) -> float:
    """Return the mean bytes that the view writes to a terminal of this size for one new frame."""
    view = View(run, size)
    try:
        view.first_screen()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:  # the rest of the first screen
            view.read(0.1)
        written, before, end = 0, frames_of(run), time.monotonic() + 60.0
        while (seen := frames_of(run) - before) < frames and time.monotonic() < end:
            written += len(view.read(0.1))
        return written / max(1, seen)
    finally:
        view.close()


def interval(values: Sequence[float], rounds: int = 2000) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return statistics.median(values), medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def measure(ranks: int, seconds: float, launches: int, keys: int) -> Result:
    result = Result(ranks)
    for hz in (2.0, 4.0):
        with tempfile.TemporaryDirectory(prefix="tui-") as made:
            run = Path(made) / "run"
            print(f"{ranks} ranks, {hz:g} Hz: measuring", file=sys.stderr, flush=True)
            with writer(run, ranks, hz):
                result.cpu_pct[hz], memory = measure_cpu(run, hz, seconds)
                result.memory_mib = max(result.memory_mib, memory)
                if hz == 2.0:
                    measure_times(run, launches, keys, result)
                    result.frame_bytes = {size: measure_bytes(run, size) for size in SIZES}
        print(f"{ranks} ranks, {hz:g} Hz: {result.cpu_pct[hz]:.1f}% of one core", file=sys.stderr, flush=True)
    return result


def report(results: list[Result], seconds: float) -> str:
    """Return the results as Markdown."""
    load = os.getloadavg()
    out = [
        "# What the terminal view costs",
        "",
        f"`python benchmarks/tui.py` on {os.cpu_count()} cores ({platform.machine()}, {platform.system()}), load average {load[0]:.1f} / {load[1]:.1f} / {load[2]:.1f}",
        f"while it ran (other work included); Python {platform.python_version()}, {WIDTH}x{HEIGHT}, with new numbers of every rank in each frame.",
        "",
        "| ranks | CPU at 2 Hz | CPU at 4 Hz | peak memory | first screen | its CPU time | key to answer | bytes per frame, 80x24 | 250x70 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        first, first_low, first_high = interval(r.first_s)
        key, key_low, key_high = interval(r.key_ms)
        p95 = sorted(r.key_ms)[int(0.95 * (len(r.key_ms) - 1))]
        out.append(
            f"| {r.ranks:,} | {r.cpu_pct[2.0]:.1f} % | {r.cpu_pct[4.0]:.1f} % | {r.memory_mib:.0f} MiB"
            f" | {first:.2f} s ({first_low:.2f} – {first_high:.2f}, n = {len(r.first_s)}) | {statistics.median(r.first_cpu_s):.2f} s"
            f" | {key:.1f} ms ({key_low:.1f} – {key_high:.1f}; p95 {p95:.0f}, n = {len(r.key_ms)})"
            f" | {' | '.join(f'{r.frame_bytes[size] / 1024:.1f} KiB' for size in SIZES)} |"
        )
    out += [
        f"| allowed | 5 % | 10 % | 150 MiB | 1 s | – | 50 ms | {' | '.join(f'{n >> 10} KiB' for n in ALLOWED_BYTES.values())} |",
        "",
        f"CPU: of one core, under tmux, over {seconds:g} s. First screen: from the start of the process to its first screen with data. Intervals: 95 %, bootstrap of the median.",
        "",
    ]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/tui.md")
    arguments = parser.parse_args()
    name_signals()
    if shutil.which("tmux") is None:
        raise SystemExit("tmux is needed: its terminal is the one measured")
    results = [measure(n, arguments.seconds, arguments.launches, arguments.keys) for n in arguments.ranks]
    text = report(results, arguments.seconds)
    print(text)
    if arguments.write:
        path = ROOT / "benchmarks" / "results" / "tui.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"written: {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
