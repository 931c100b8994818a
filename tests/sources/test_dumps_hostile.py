"""Dumps that are meant to harm their reader: only the bad file is lost, and the reason is named."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdiag.diagnosis.model.findings import Report
from distdiag.sources.dumps.verdict import NoDumps, diagnose_dumps
from tests.diagnosis.recordings import Job, as_pickle, write
from tests.jobs import distdiag


def hung() -> Job:
    job = Job(4)
    for _ in range(5):
        job.collective()
    job.collective(ranks=(0, 2, 3), line=91)
    return job


def shared(levels: int = 60) -> list[Any]:
    """Return 2^levels leaves in a few hundred bytes."""
    out: list[Any] = []
    for _ in range(levels):
        out = [out, out]
    return out


def nested_key(depth: int = 400_000) -> bytes:
    """Return {((((…))),): None}: the hash of the key overflows the C stack."""
    return b"\x80\x02})" + b"\x85" * depth + b"Ns."


def with_field(name: str, value: Any) -> bytes:
    dump = hung().dump(3)
    dump[name] = value
    return as_pickle(dump)


def in_entries(**fields: Any) -> bytes:
    dump = hung().dump(3)
    for e in dump["entries"]:
        e.update(fields)
    return as_pickle(dump)


def group(**fields: Any) -> bytes:
    dump = hung().dump(3)
    dump["pg_config"]["0"].update(fields)
    return as_pickle(dump)


def nested_tuple(depth: int = 400_000) -> bytes:
    """Return a dump with deeply nested tuples as group names, which must not be hashed."""
    marked = in_entries(process_group=("NAME", "x"))
    short, long = b"X\x04\x00\x00\x00NAME", b")" + b"\x85" * depth
    assert short in marked
    return marked.replace(short, long, 1)


# file content, and whether it is nevertheless a readable dump
CASES: dict[str, tuple[Callable[[], bytes], bool]] = {
    "rank of 10^9": (lambda: with_field("rank", 10**9), False),
    "rank of 5,000 digits": (lambda: with_field("rank", 10**5000), False),
    "a member of 10^9": (lambda: group(ranks="[0, 1, 2, 3, 1000000000]"), False),
    "a member of 5,000 digits": (lambda: group(ranks="[0, " + "9" * 5000 + "]"), False),
    "members as numbers": (lambda: group(ranks=[0, 10**9]), False),
    "a key of nested tuples": (nested_key, False),
    "a group of nested tuples": (nested_tuple, True),
    "shared lists as version": (lambda: with_field("version", shared()), True),
    "shared lists as name": (lambda: group(name=shared()), True),
    "shared lists as description": (lambda: group(desc=shared()), True),
    "shared lists as members": (lambda: group(ranks=shared()), True),
    "shared lists in entries": (
        lambda: in_entries(pg_id=shared(), input_sizes=shared(), frames=shared(), input_dtypes=shared(), state=shared()),
        True,
    ),
    "groups of shared lists": (lambda: in_entries(process_group=(shared(), shared())), True),
    "shapes of 10^5000": (lambda: in_entries(input_sizes=[[10**5000, 2]], output_sizes=None), True),
    "times of 10^5000": (lambda: in_entries(time_created_ns=10**5000, timeout_ms=10**5000), True),
    "numbers of 10^5000": (lambda: in_entries(collective_seq_id=10**5000), True),
    "names in surrogates": (lambda: in_entries(profiling_name="nccl:\ud800", frames=[{"name": "\udcff", "filename": "/\udcff", "line": 3}]), True),
    "counters of 10^5000": (lambda: with_field("pg_status", {"0": {"last_enqueued_collective": "9" * 5000, "last_completed_collective": 10**5000}}), True),
    "groups without members": (lambda: with_field("pg_config", {"1": {"name": "1"}, "2": 7}), True),
    "a zip bomb": (lambda: gzip.compress(bytes(128 << 20)), False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_costs_only_itself(tmp_path: Path, case: str) -> None:
    content, readable = CASES[case]
    write(tmp_path, hung())
    bad = tmp_path / "_dump_3"
    bad.write_bytes(content())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = diagnose_dumps(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "read in this process"
    unreadable = [f for f in report.findings if f.cause == "unreadable_dump"]
    assert bool(unreadable) != readable, report.findings
    assert all(str(bad) in f.message and f.severity == "error" for f in unreadable)
    if not readable:
        assert 1 in {r for f in report.findings for r in f.culprits}, "the others are judged"
    assert report.world_size == 4


def test_files_that_crash_the_reader_are_listed_with_the_reason(tmp_path: Path) -> None:
    """Three of them: after the second crash every file is tried alone."""
    write(tmp_path, hung())
    for name in ("a_dump_5", "_dump_3", "z_dump_9"):
        (tmp_path / name).write_bytes(nested_key())
    started = time.monotonic()
    report: Report = diagnose_dumps(tmp_path)
    assert time.monotonic() - started < 30
    message = next(f.message for f in report.findings if f.cause == "unreadable_dump")
    assert message.count("SIGSEGV") == 3 and report.ranks_seen == 3
    assert 1 in {r for f in report.findings for r in f.culprits}


def test_a_file_that_exceeds_the_time_limit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real endless computation in the child: the CPU time limit ends it."""
    from distdiag import guard
    from distdiag.sources.dumps import files, verdict

    monkeypatch.setattr(verdict, "LIMITS", guard.Limits(cpu_s=0.3))
    real = files.parse
    monkeypatch.setattr(files, "parse", lambda path, c: real(path, c) if path.name != "_dump_3" else sum(iter(int, 1)))
    write(tmp_path, hung())
    report = diagnose_dumps(tmp_path)
    assert any("takes too long" in f.message and "_dump_3" in f.message for f in report.findings)


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    write(tmp_path, hung())
    os.mkfifo(tmp_path / "fifo")
    assert any("not a regular file" in f.message for f in diagnose_dumps(tmp_path).findings)


def test_a_folder_with_only_hostile_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rank0").write_bytes(nested_key())
    with pytest.raises(NoDumps) as e:
        diagnose_dumps(tmp_path)
    assert "SIGSEGV" in e.value.report.bad[0][1]


def test_the_command_escapes_text_that_is_not_utf8(tmp_path: Path) -> None:
    """Surrogates in the job's text and bytes in a file name: both text and JSON are written."""
    folder = tmp_path / os.fsdecode(b"d\xff")
    folder.mkdir()
    (folder / "rank3").write_bytes(CASES["names in surrogates"][0]())
    for args in (["diagnose", str(folder)], ["diagnose", "--json", str(folder)]):
        done = distdiag(*args)
        assert done.returncode in (0, 1) and not done.stderr, done.stderr
    assert json.loads(done.stdout)["ranks_seen"] == 1


def test_a_rank_number_in_a_file_name_is_limited(tmp_path: Path) -> None:
    (tmp_path / "trace_20261122").write_bytes(pickle.dumps({"entries": []}))
    (tmp_path / ("rank" + "9" * 200)).write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(NoDumps):
        diagnose_dumps(tmp_path)
