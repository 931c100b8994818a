"""Logs that are meant to harm their reader: each is judged within its limits, and the reason is named where it is not."""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from distdiag import guard
from distdiag.diagnosis.model.findings import Report
from distdiag.sources import logs
from distdiag.sources.logs import lines, verdict
from distdiag.sources.logs.collector import Collector
from distdiag.sources.logs.join import join
from distdiag.sources.logs.patterns import TABLE
from distdiag.sources.logs.verdict import diagnose_logs
from distdiag.terms.untrusted import REPEATS
from tests.jobs import distdiag

LINES_OF_DEEP = 4600


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    for row in TABLE:
        yield row.name, row.regex
    for info in pkgutil.iter_modules(logs.__path__):
        module = importlib.import_module(f"{logs.__name__}.{info.name}")
        yield from ((f"{info.name}.{n}", v) for n, v in vars(module).items() if isinstance(v, re.Pattern))


def open_repeats(parsed: Any, last: bool, anchored: bool) -> list[str]:
    """Return the repeats that may take the rest of a line at every position of it."""
    items = [item for item in parsed if item[0] is not sre.AT]
    found: list[str] = []
    for nth, (op, value) in enumerate(items):
        tail = last and nth == len(items) - 1
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            _, most, inner = value
            dots = anchored and [i[0] for i in inner] == [sre.ANY]
            if most > REPEATS[")"] and not (tail or dots):
                found.append(f"{value}")
            found += open_repeats(inner, tail, anchored)
        elif op is sre.SUBPATTERN:
            found += open_repeats(value[3], tail, anchored)
        elif op is sre.BRANCH:
            found += [r for branch in value[1] for r in open_repeats(branch, tail, anchored)]
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            found += open_repeats(value[1], False, anchored)
    return found


def test_no_pattern_takes_quadratic_time() -> None:
    found = {}
    for name, pattern in patterns():
        parsed = _parser.parse(pattern.pattern, pattern.flags)
        begins = len(parsed) > 0 and parsed[0] == (sre.AT, sre.AT_BEGINNING)
        if bad := open_repeats(parsed, True, begins):
            found[name] = (pattern.pattern, bad)
    assert not found


def cpu_s(path: Path) -> tuple[float, Report]:
    """Return the CPU time of judging one log, the child's included, and the verdict."""
    before = os.times()
    report = diagnose_logs([str(path)])
    after = os.times()
    assert report is not None
    return sum(after[:4]) - sum(before[:4]), report


@pytest.mark.parametrize(
    "line",
    [
        "[distdiag] ERROR mismatch/op  rank 0\n[distdiag]   where  " + "1:1 in " * LINES_OF_DEEP + "\n",
        "client socket has failed to connect to any network address of (" * 500 + "\n",
        "NCCL WARN Connect to " * 1500 + "\n",
        "Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(" * 300
        + "\n",
        "Error: " + "a." * 16_000 + "\n",
        "rank : " + "1" * 30_000 + "\n",
        "\x1b[" * 16_000 + "Error\n",
        "Timed out waiting " + "[gloo/transport/" * 2000 + "\n",
    ],
    ids=lambda line: line[:30].strip(),
)
def test_a_line_that_fits_a_pattern_everywhere_costs_little_more_than_its_size(tmp_path: Path, line: str) -> None:
    """Twice as long lines take about twice as long: with an open repeat it was four times, and seconds a line."""
    took = []
    for factor in (1, 4):
        (tmp_path / "job.log").write_text(line.replace("\n", " " * 8 + "\n") * (8 * factor))
        took.append(min(cpu_s(tmp_path / "job.log")[0] for _ in range(2)))
    assert took[1] < 16 * max(took[0], 0.05)


def test_equal_errors_are_skipped_at_the_speed_of_reading_lines(tmp_path: Path) -> None:
    """The rate is compared with that of the first, detailed lines: on a log of which every line is an error."""
    line = "2026-01-01 10:00:00 [rank{r}] ERROR train.py:88: RuntimeError: loss is not finite at step {n}: 0.{n}\n"
    few, many = tmp_path / "few.log", tmp_path / "many.log"
    few.write_text("".join(line.format(r=n % 8, n=n) for n in range(4000)))
    many.write_text("".join(line.format(r=n % 8, n=n) for n in range(200_000)))
    short, long = (min(cpu_s(p)[0] for _ in range(2)) for p in (few, many))
    assert long < 8 * short  # it has 50 times the lines


@pytest.mark.parametrize("what", ["ValueError: no image {w}", "NCCL WARN no image {w}"])
def test_errors_of_many_shapes_are_skipped_at_the_speed_of_reading_lines(tmp_path: Path, what: str) -> None:
    """A shape is a line without its digits. Whether it can matter, and whether enough of its lines were read, is judged once."""
    words = [f"{a}{b}" for a in "abcdefghijklmnopqrstuvwx" for b in "ABCDEFGHIJKLMNOPQRSTUVWX"]
    line = "2026-01-01 10:00:00 [rank{r}] ERROR data.py:{n}: " + what + "\n"
    text = "".join(line.format(r=n % 8, n=n, w=words[n % len(words)]) for n in range(200_000))
    few, many = tmp_path / "few.log", tmp_path / "many.log"
    few.write_text(text[: len(text) // 50])
    many.write_text(text)
    short, long = (min(cpu_s(p)[0] for _ in range(2)) for p in (few, many))
    assert long < 8 * short


@pytest.mark.parametrize(
    "line",
    [
        '[rank{n}]: Traceback (most recent call last):\n[rank{n}]:   File "t.py", line 3, in f\n[rank{n}]: ValueError: no {w}\n',
        "[rank{n}]: Fatal Python error: {w} {w}\n",
        'Traceback (most recent call last):\n  File "/a/t.py", line 3, in f\nValueError: no {w}\n',
    ],
)
def test_four_times_as_many_reasons_take_about_four_times_as_long(tmp_path: Path, line: str) -> None:
    def seconds(lines: int) -> float:
        words = ("".join(w) for w in itertools.product("abcdefghijkl", repeat=4))
        text = "torch.distributed.elastic\n" + "".join(line.format(n=n, w=next(words)) for n in range(lines))
        (tmp_path / "job.log").write_text(text)
        return cpu_s(tmp_path / "job.log")[0]

    short, long = seconds(500), seconds(2000)
    assert long < 8 * short


def test_the_end_of_a_file_is_read_even_after_a_million_equal_lines(tmp_path: Path) -> None:
    trace = (
        '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/home/u/train.py", line 40, in <module>\n[rank3]:     main()\n'
        '[rank3]:   File "/home/u/train.py", line {n}, in main\n[rank3]: {what}\n'
    )
    noise = "".join(trace.format(n=12, what=f"ValueError: no image {n}") for n in range(20_000))
    (tmp_path / "job.log").write_text(
        noise + trace.format(n=77, what="RuntimeError: CUDA error: an illegal memory access was encountered")
    )
    report = diagnose_logs([str(tmp_path / "job.log")])
    assert report is not None
    (found,) = [f for f in report.findings if "illegal memory access" in f.message]
    assert found.culprits == (3,) and found.where[0].line == 77


def test_further_ranks_are_read_where_their_lines_differ_in_the_rank_only(tmp_path: Path) -> None:
    """A line of each of 3,000 ranks has one shape; noise of one rank has one, too, and most of it is left out."""
    filler = "".join(f"[rank0]: Exception in thread {n}: 12345 ignored\n" for n in range(60_000))
    lines = "".join(f"[rank{r}]: RuntimeError: NCCL error: unhandled system error\n" for r in range(3000))
    (tmp_path / "job.log").write_text(filler[: 1 << 20] + lines + filler)
    found = Collector([tmp_path / "job.log"]).read()
    join(found)
    assert len(found.ranks) == 3000


def test_a_file_that_is_not_read_shows_nothing_of_the_one_before_it(tmp_path: Path) -> None:
    first, refused = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text("step 1 loss 0.5\nstep 2 loss nan\nTraining completed\n")
    refused.write_text("x\n")
    found = Collector([first, refused]).read(refused={str(refused): "takes too long"})
    assert found.steps and [path.name for path, end in found.ends.items() if end.stepped or end.well or end.loss] == [
        "a.log"
    ]


def test_a_file_that_takes_too_long_is_read_in_part_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_DETAIL", 100_000)
    words = (
        f"{a}{b}{c}"
        for a in "abcdefghijklmnop"
        for b in "abcdefghijklmnopqrst"
        for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )
    text = "".join(f"ValueError: no file {w}, Error of {w[::-1]} in {w * 20}\n" for w in words)
    (tmp_path / "job.log").write_text(
        text + "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    )
    report = diagnose_logs([str(tmp_path / "job.log")])
    assert report is not None
    assert any("only its first and last lines" in n for n in report.notes)
    assert [f.culprits for f in report.findings] == [(1,)]


def test_a_file_that_kills_its_reader_is_listed_and_the_others_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lines.lines

    def deadly(path: Path, bounds: lines.Bounds, column: int | None) -> Iterator[tuple[int, str]]:
        if path.name == "bad.log":
            os.abort()
        return real(path, bounds, column)

    monkeypatch.setattr(lines, "lines", deadly)
    (tmp_path / "bad.log").write_text("Error\n")
    (tmp_path / "good.log").write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    assert any("bad.log" in n and "SIGABRT" in n for n in report.notes)
    assert [f.culprits for f in report.findings] == [(1,)]


DIGITS = "9" * 4301
NUMBERS = (
    f"Process name: [[1,1],{DIGITS}]\nExit code:    {DIGITS}\n",
    f"time      : now\nhost      : h\nrank      : {DIGITS} (local_rank: {DIGITS})\nexitcode  : {DIGITS} (pid: {DIGITS})\ntraceback : x\n",
    f"n1:{DIGITS}:8 [{DIGITS}] NCCL WARN Call to recv from 10.2.8.7<5> failed : Broken pipe\n",
    f"[PG ID {DIGITS} PG GUID 0(default_pg) Rank {DIGITS}] Watchdog caught collective operation timeout\n",
    f"srun: error: n7: tasks {DIGITS}: Exited with exit code {DIGITS}\n",
    f"rank {DIGITS} nranks {DIGITS}\n",
    f"Timed out after {DIGITS} seconds waiting for clients. {DIGITS}/{DIGITS} clients joined\n",
    f"Ranks {DIGITS}, {DIGITS} failed to pass monitoredBarrier in {DIGITS} ms\n",
    f"DDP expects same model across all ranks, but Rank {DIGITS} has {DIGITS} params, while rank {DIGITS} has inconsistent {DIGITS} params\n",
    f'{{"message": "Traceback (most recent call last):\\n  File \\"a.py\\", line {DIGITS}\\nValueError: x", "rank": {DIGITS}}}\n',
    f"[distdiag] ERROR mismatch/op  x\n[distdiag]   where  a.py:{DIGITS} (rank {DIGITS}); b.py:1 (ranks {DIGITS}\n",
    f"r: line {DIGITS}: {DIGITS} Killed\nexits with return code = -{DIGITS}\n-- Process {DIGITS} terminated with the following error\n",
)


def test_numbers_that_python_refuses_to_convert_are_no_traceback(tmp_path: Path) -> None:
    """Each line alone, then with every shorter run of digits: up to 4,300 `int` takes it, and 64 bits do not hold it."""
    for nth, text in enumerate(NUMBERS):
        for length in (4301, 4300, 25, 20, 19, 10):
            (tmp_path / f"{nth}.{length}.log").write_text(text.replace(DIGITS, "9" * length))
    done = distdiag("diagnose", str(tmp_path))
    assert "Traceback (most recent" not in done.stderr and done.returncode in (0, 1, 3), done.stderr
    for log in sorted(tmp_path.iterdir()):
        diagnose_logs([str(log)])  # a failure in the child is raised here


def test_a_line_of_twice_the_length_takes_no_four_times_as_long(tmp_path: Path) -> None:
    def seconds(pieces: int) -> float:
        line = "[distdiag] ERROR mismatch/op  rank 0\n[distdiag]   where  " + "1:1 in " * pieces + "\n"
        (tmp_path / "job.log").write_text(line * 20)
        began = time.monotonic()
        assert diagnose_logs([str(tmp_path / "job.log")]) is not None
        return time.monotonic() - began

    short, long = (min(seconds(pieces) for _ in range(3)) for pieces in (LINES_OF_DEEP // 2, LINES_OF_DEEP))
    assert long < 3 * short + 0.1


def test_a_sparse_log_has_the_limits_of_what_the_disk_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of some kilobytes brings it; reading all its zeros would take minutes."""
    monkeypatch.setattr(verdict, "LIMITS", guard.Limits(cpu_s=0.2, cpu_s_per_byte=2e-6, memory_per_byte=1))
    (tmp_path / "job.log").write_text("[rank0]: step 1\n" * 8192)
    assert guard.stored_bytes(tmp_path / "job.log") == (tmp_path / "job.log").stat().st_size
    os.truncate(tmp_path / "job.log", 1 << 40)
    with open(tmp_path / "hole.log", "wb") as file:
        file.truncate(1 << 40)
    assert guard.stored_bytes(tmp_path / "hole.log") == guard.SPARSE_BYTES
    (tmp_path / "hole.log").unlink()
    began_s = os.times().children_user
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and "takes too long" in "".join(report.notes)
    assert os.times().children_user - began_s < 30
