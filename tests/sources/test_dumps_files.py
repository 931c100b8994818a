"""Reading dump files: names, formats, versions, and files that are not dumps."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from distdiag.sources.dumps.entries import user_site
from distdiag.sources.dumps.verdict import NoDumps, diagnose_dumps, load
from tests.diagnosis.recordings import Job, as_json, as_pickle, frames, version_1, version_2_0, write


def hung(world: int = 4) -> Job:
    """Write dumps in which rank 1 does not enter the last collective."""
    job = Job(world)
    for _ in range(5):
        job.collective()
    job.collective(ranks=tuple(r for r in range(world) if r != 1))
    return job


def culprits(*paths: Path) -> set[int]:
    return {r for f in diagnose_dumps(paths).findings if f.severity == "error" for r in f.culprits}


# -- which rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("_dump_{}", "pickle"),
        ("nccl_trace_rank_{}", "pickle"),
        ("comm_lib_trace_rank_{}", "pickle"),
        ("rank{}.json", "json"),
        ("Rank-{:04d}.json", "json"),
        ("trace.{}.pkl", "pickle"),
        ("trace_{}.pkl.gz", "pickle.gz"),
        ("job7_rank{}_attempt2.json.gz", "json.gz"),
        ("nccl_trace_rank_container-node02_{}", "pickle"),
        ("{}", "pickle"),
        ("20260301_{}_dump.pkl", "pickle"),
    ],
)
def test_the_rank_is_read_from_the_file_name(tmp_path: Path, name: str, form: str) -> None:
    write(tmp_path / "d", hung(), name=name, form=form)
    snapshot, report = load(tmp_path / "d")
    assert sorted(report.files) == [0, 1, 2, 3]
    assert culprits(tmp_path / "d") == {1}
    assert snapshot.world_size == 4


def test_the_rank_is_read_from_the_content(tmp_path: Path) -> None:
    job = hung()
    for r, name in enumerate(("alpha", "beta", "gamma", "delta")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**json.loads(as_json(job.dump(r))), "rank": r}))
    assert culprits(tmp_path) == {1}


def test_the_rank_follows_from_the_groups_that_the_recorder_lists(tmp_path: Path) -> None:
    job = Job(3, {str(i + 1): ("self", (i,)) for i in range(3)})
    job.collective(ranks=(0, 2))
    for r, name in enumerate("abc"):
        (tmp_path / name).write_bytes(as_pickle(job.dump(r)))
    assert culprits(tmp_path) == {1}


def test_a_dump_whose_rank_is_unknown_is_reported(tmp_path: Path) -> None:
    write(tmp_path, hung())
    (tmp_path / "extra").write_bytes(as_pickle(Job(2).dump(0)))
    _, report = load(tmp_path)
    assert [Path(p).name for p, _ in report.bad] == ["extra"]


def test_ranks_are_read_from_the_folders_of_several_nodes(tmp_path: Path) -> None:
    job = hung()
    for r in range(4):
        folder = tmp_path / f"node{r // 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"nccl_trace_rank_{r}").write_bytes(as_pickle(job.dump(r)))
    assert culprits(tmp_path) == {1}
    assert culprits(tmp_path / "node0", tmp_path / "node1") == {1}
    assert culprits(*sorted(tmp_path.rglob("nccl*"))) == {1}


def test_only_the_newest_attempt_is_judged(tmp_path: Path) -> None:
    old = Job(2)
    old.collective(ranks=(1,))
    write(tmp_path / "attempt0", old)
    new = Job(2)
    new.now_ns += 3_600_000_000_000
    new.collective(ranks=(0,))
    write(tmp_path / "attempt1", new)
    report = diagnose_dumps(tmp_path)
    assert {r for f in report.findings for r in f.culprits} == {1}
    assert any("of an earlier run" in n for n in report.notes)


def test_two_recorders_of_one_rank_are_merged(tmp_path: Path) -> None:
    """gloo for CPU tensors next to NCCL, under one group name: each has its own numbers."""
    gpu, cpu = hung(), Job(4, backend="gloo")
    for _ in range(3):
        cpu.collective("barrier")
    write(tmp_path, gpu, name="nccl_trace_rank_{}")
    write(tmp_path, cpu, name="gloo_trace_rank_{}.json", form="json")
    snapshot, _ = load(tmp_path)
    assert snapshot.ranks[0].enqueued == {"0/nccl": 6, "0/gloo": 3}
    assert culprits(tmp_path) == {1}


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [version_1, version_2_0])
def test_old_dump_versions_are_read(tmp_path: Path, old: Any) -> None:
    job = hung()
    for r in range(4):
        (tmp_path / f"nccl_trace_rank_{r}").write_bytes(as_pickle(old(job.dump(r))))
    assert culprits(tmp_path) == {1}


def test_groups_of_version_1_2_are_read(tmp_path: Path) -> None:
    job = hung()
    for r in range(4):
        old = {"version": "1.2", "entries": version_1(job.dump(r)), "pg_config": {0: {0: 0, 1: 1}, "0": [0, 1, 2, 3]}}
        (tmp_path / f"rank_{r}").write_bytes(as_pickle(old))
    assert culprits(tmp_path) == {1}


def test_counters_of_groups_without_entries_are_used(tmp_path: Path) -> None:
    """`includeCollectives=False`: only each group's counters."""
    job = hung()
    for r in range(4):
        dump = json.loads(as_json(job.dump(r)))
        del dump["entries"]
        (tmp_path / f"rank{r}.json").write_text(json.dumps(dump))
    assert culprits(tmp_path) == {1}


def test_members_that_gloo_does_not_record_are_assumed(tmp_path: Path) -> None:
    job = Job(4, {"1": ("undefined", (0, 1)), "2": ("undefined", (2, 3))}, backend="gloo")
    for g in job.groups:
        job.collective(group=g)
    job.collective(group="2", ranks=(2,))
    write(tmp_path, job, name="rank{}.json", form="json")
    snapshot, report = load(tmp_path)
    assert snapshot.groups["2"].ranks == (2, 3)
    assert any("were not recorded" in n for n in report.notes)
    assert culprits(tmp_path) == {3}


def test_gloos_status_also_counts_messages(tmp_path: Path) -> None:
    """A group used for messages only has no entries, and its members may have sent different numbers of messages."""
    job = Job(3, {"1": ("undefined", (0, 1, 2))}, backend="gloo")
    job.collective()
    for r, messages in enumerate((12, 8, 4)):
        dump = job.dump(r)
        dump["pg_config"] = {str(n): {"name": str(n), "desc": "", "ranks": "[0, 1, 2]"} for n in range(2)}
        dump["pg_status"]["1"] = {
            "last_enqueued_collective": messages,
            "last_completed_collective": messages - (r == 0),
        }
        (tmp_path / f"rank{r}.json").write_bytes(as_json(dump))
    assert culprits(tmp_path) == set()


def test_one_name_may_be_several_groups_after_a_split(tmp_path: Path) -> None:
    job = Job(4)
    for r in range(4):
        for _ in range(3 if r < 2 else 2):
            job.issue(r, "all_reduce", "0", True)
        job.ranks[r].entries[-1].update(state="scheduled", retired=False)
    for r in range(4):
        dump = job.dump(r)
        dump["pg_config"] = {"0": {"name": "0", "desc": "half", "ranks": "[0, 1]" if r < 2 else "[2, 3]"}}
        (tmp_path / f"rank{r}").write_bytes(as_pickle(dump))
    snapshot, _ = load(tmp_path)
    assert {g.ranks for g in snapshot.groups.values()} == {(0, 1), (2, 3)}
    assert culprits(tmp_path) == set()


def test_an_nccl_entry_that_is_retired_and_not_completed_has_timed_out(tmp_path: Path) -> None:
    job = hung()
    for r in range(4):
        job.ranks[r].entries[-1]["retired"] = True
    write(tmp_path, job)
    assert culprits(tmp_path) == {1}


def test_an_invalid_entry_is_left_out(tmp_path: Path) -> None:
    job = hung()
    write(tmp_path, job)
    dump = job.dump(2)
    dump["entries"][2] = {"record_id": 2}
    (tmp_path / "_dump_2").write_bytes(as_pickle(dump))
    report = diagnose_dumps(tmp_path)
    assert {r for f in report.findings for r in f.culprits} == {1}
    assert any("1 entries" in n for n in report.notes)


# -- the user's frame ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (frames(7), 7),
        (frames(7)[:2], None),
        ([{"name": "f", "filename": "/x/site-packages/megatron/p2p.py", "line": 5}], 5),
        ([*frames(7)[:2], {"name": "f", "filename": "/x/site-packages/megatron/p2p.py", "line": 5}, *frames(9)[2:]], 9),
        ([{"name": "run", "filename": "/usr/lib/python3.11/runpy.py", "line": 86}], None),
        ([{"name": "op", "filename": "/build/ProcessGroupNCCL.cpp", "line": 1}, {"bad": 1}, "x"], None),
        ("frames", None),
        (None, None),
    ],
)
def test_the_site_is_the_users_innermost_frame(stack: Any, line: int | None) -> None:
    site = user_site(stack)
    assert (site.line if site else None) == line


# -- not a dump -------------------------------------------------------------------------------------------------------


def opcodes(*parts: bytes) -> bytes:
    return b"".join(parts)


DEEP = b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b"."
HOSTILE = {
    "imports a function": b"cos\nsystem\n(S'touch executed'\ntR.",
    "imports a class": pickle.dumps(OrderedDict(a=1)),
    "by stack": opcodes(
        b"\x80\x04", b"\x8c\x05posix", b"\x8c\x06system", b"\x93", b"\x8c\x0etouch executed", b"\x85R."
    ),
    "evaluates": b"\x80\x02c__builtin__\neval\nX\x04\x00\x00\x001+1 \x85R.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an extension": b"\x80\x02\x82\x01.",
    "a huge memo": b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "a huge string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "deep": DEEP,
    "a zip bomb of nothing": gzip.compress(b""),
}
FOREIGN = {
    "text": b"Fault ranks: [9, 14]\n",
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "other json": b'{"traceEvents": []}',
    "json list of numbers": b"[1, 2, 3]",
    "a number": pickle.dumps(7),
    "entries of another kind": pickle.dumps({"entries": {"a": 1}}),
    "nothing": b"",
    "half json": b'{"version": "2.9", "entries": [{"record_id"',
    "not utf-8": b'{"version": "\xff\xfe"}',
    "deep json": b"[" * 100_000,
}


@pytest.mark.parametrize("what", [*HOSTILE, *FOREIGN])
def test_unreadable_files_are_listed_and_the_others_judged(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d", hung())
    bad = tmp_path / "d" / "_dump_3"
    bad.write_bytes({**HOSTILE, **FOREIGN}[what])
    report = diagnose_dumps(tmp_path / "d")
    stalls = [f for f in report.findings if f.kind == "stall"]
    assert [f.culprits for f in stalls] == [(1,)]
    unreadable = [f for f in report.findings if f.cause == "unreadable_dump"]
    assert len(unreadable) == 1 and str(bad) in unreadable[0].message and unreadable[0].severity == "error"
    assert "rank 3" in unreadable[0].message
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("form", ["pickle", "json", "pickle.gz", "json.gz"])
def test_a_dump_cut_anywhere_is_cut_short(tmp_path: Path, form: str) -> None:
    job = hung()
    write(tmp_path / "d", job, form=form)
    path = tmp_path / "d" / "_dump_2"
    whole = path.read_bytes()
    for at in range(1, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:at])
        snapshot, report = load(tmp_path / "d")
        assert [Path(p).name for p, _ in report.bad] == ["_dump_2"], at
        assert report.unreadable == (2,)
        assert snapshot.ranks[0].enqueued == {"0": 6}


def test_flipped_bytes_never_raise(tmp_path: Path) -> None:
    """A pickle with one byte changed, at many places, is read or refused, without a traceback."""
    whole = as_pickle(hung().dump(0))
    for at in range(0, len(whole), 97):
        (tmp_path / "_dump_0").write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with contextlib.suppress(NoDumps):
            assert diagnose_dumps(tmp_path).ranks_seen <= 1


def test_other_files_in_the_folder_are_noted(tmp_path: Path) -> None:
    write(tmp_path, hung())
    (tmp_path / "fault_injection.log").write_text("Fault ranks: [1]")
    (tmp_path / ".hidden").write_text("x")
    report = diagnose_dumps(tmp_path)
    assert not any(f.cause == "unreadable_dump" for f in report.findings)
    assert any("fault_injection.log" in n for n in report.notes)


def test_a_foreign_file_that_was_named_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, hung())
    log = tmp_path / "notes.log"
    log.write_text("hello")
    report = diagnose_dumps([*sorted(tmp_path.glob("_dump*")), log])
    assert any(
        f.cause == "unreadable_dump" and str(log) in f.message and f.severity == "error" for f in report.findings
    )


def test_a_folder_without_dumps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoDumps):
        diagnose_dumps(tmp_path)


def test_invalid_numbers_do_not_stop_the_reader(tmp_path: Path) -> None:
    job = hung()
    for r in range(4):
        dump = job.dump(r)
        for e in dump["entries"]:
            e["time_created_ns"] = None
            e["input_sizes"] = [["x"]]
            e["input_dtypes"] = [3]
        dump["pg_status"] = {"0": {"last_enqueued_collective": "?"}, "1": 5}
        (tmp_path / f"rank{r}").write_bytes(as_pickle(dump))
    assert culprits(tmp_path) == {1}


def test_control_characters_in_dumps_are_escaped(tmp_path: Path) -> None:
    from distdiag.diagnosis.text.finding import finding_lines

    job = Job(3, {"1": ("dp\x1b[2J\n", (0, 1, 2))})
    job.collective(group="1", ranks=(0, 2), line=5)
    write(tmp_path, job)
    f = next(f for f in diagnose_dumps(tmp_path).findings if f.severity == "error")
    text = "\n".join(finding_lines(f))
    assert "\x1b" not in text and "\\x1b" in text
    assert io.StringIO(text).readlines()[0].startswith("█ ERROR")
