"""Tapes: what is written is read again, the verdict is the same, and no file of anybody does harm."""

from __future__ import annotations

import contextlib
import lzma
import os
import random
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.snapshot import Call, Site, Snapshot
from distdiag.errors import DistdiagError
from distdiag.tapes import tape as tapes
from distdiag.tapes.delta import apply, difference
from distdiag.tapes.tape import (
    EMPTY,
    LZMA,
    ZLIB,
    Frame,
    Tape,
    encoded,
    from_bytes,
    guarded,
    judge,
    judge_file,
    read_tape,
    to_bytes,
)
from distdiag.tapes.writer import NAME, ON, TapeWriter, wanted_bytes
from tests.diagnosis.made import job, rank, steps, waits_for_rank_one
from tests.fuzz.inputs import flip, somewhere

WAITING = [waits_for_rank_one(1.0, float(t), activity="user_code") for t in range(30)]
MOVING = [job(rank(0, step=100 + t), rank(1, step=100 + t), t_s=30.0 + t) for t in range(30)]


def calls(first: int, last: int, t_s: float) -> tuple[Call, ...]:
    """Return a ring of calls; the newest is still open."""
    return tuple(
        Call(
            op="all_reduce",
            group="default_pg",
            seq=k,
            entered_s=k / 4,
            completed_s=None if k == last else t_s,
            site=Site("a.py", k),
        )
        for k in range(first, last + 1)
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (EMPTY, WAITING[0]),
        (WAITING[0], WAITING[1]),
        (WAITING[0], EMPTY),
        (job(rank(0, calls=calls(1, 20, 5.0))), job(rank(0, calls=calls(5, 26, 5.0)))),
        (job(rank(0, calls=calls(1, 20, 5.0))), job(rank(0, calls=()))),
        (job(rank(0, steps=steps(10.0)[:40])), job(rank(0, steps=steps(10.0)[3:]))),
        (job(rank(0, memory=((1.0, 2), (2.0, 3)))), job(rank(0, memory=((2.0, 3), (3.0, 3), (4.0, 1))))),
        (job(rank(0, sites={"a": 1, "b": 2})), job(rank(0, sites={"b": 3, "c": 1}))),
        (job(rank(0), rank(1)), job(rank(1))),
        (job(rank(0, blocked=None)), job(rank(0, blocked=calls(1, 1, 0.0)[0]))),
    ],
)  # fmt: skip
def test_a_difference_leads_from_one_snapshot_to_the_next(old: Snapshot, new: Snapshot) -> None:
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(difference(old, new)), strict=False)
    assert apply(Snapshot, old, written) == new


def test_what_a_ring_keeps_is_not_written_again() -> None:
    old, new = job(rank(0, calls=calls(1, 200, 9.0))), job(rank(0, calls=calls(3, 202, 9.0)))
    assert len(msgspec.msgpack.encode(difference(old, new))) < len(msgspec.msgpack.encode(new)) / 20


def written(run: Path, snapshots: list[Snapshot], max_bytes: int = 8 << 20) -> Diagnosis:
    """Judge snapshots as the monitor does, with a tape."""
    writer = TapeWriter(run, max_bytes)
    diagnosis = Diagnosis(source=writer.source(lambda path: "password = 'hunter2'\nwork()\n"))
    for snapshot in snapshots:
        final = snapshot is snapshots[-1]
        writer.take(snapshot, diagnosis, diagnosis.update(snapshot, final=final), final)
    diagnosis.source("/job/train.py")
    writer.close()
    assert writer.failed is None
    return diagnosis


def test_a_failure_at_the_end_costs_the_tape_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TapeWriter(tmp_path, 1 << 20)
    writer.take(MOVING[0], Diagnosis(source=lambda _: None), [], final=False)
    monkeypatch.delenv("DISTDIAG_RAISE", raising=False)
    monkeypatch.setattr("distdiag.tapes.writer.difference", lambda *_: {}["x"])
    writer.close()
    assert "KeyError" in (writer.failed or "")


def test_a_tape_has_every_snapshot_and_leads_to_the_same_findings(tmp_path: Path) -> None:
    live = written(tmp_path, WAITING + MOVING)
    tape = read_tape(tmp_path / NAME)
    assert list(tape.snapshots) == WAITING + MOVING and tape.final
    assert live.findings and judge(tape).findings == tuple(live.findings)
    again = from_bytes(to_bytes(tape))
    assert judge(again).findings == tuple(live.findings) and again.moments == tape.moments
    assert judge_file(tmp_path / NAME).findings == tuple(live.findings)


def test_a_tape_is_the_users_alone_and_follows_no_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "run.tape").symlink_to(other)
    writer = TapeWriter(tmp_path / "run", 1 << 20)
    writer.close()
    assert other.read_text() == "kept"
    tape = tmp_path / "run" / "run.tape"
    assert tape.stat().st_mode & 0o777 == 0o600 and not tape.is_symlink()


def test_secrets_in_sources_are_masked(tmp_path: Path) -> None:
    written(tmp_path, WAITING[:2])
    text = read_tape(tmp_path / NAME).sources["/job/train.py"]
    assert text is not None and "hunter2" not in text and text.count("\n") == 2


def test_a_tape_that_a_kill_has_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    written(tmp_path, WAITING)
    data = (tmp_path / NAME).read_bytes()
    got = from_bytes(data[: len(data) * 3 // 4])
    assert 0 < len(got.snapshots) < len(WAITING) and list(got.snapshots) == WAITING[: len(got.snapshots)]


def test_a_full_tape_keeps_the_snapshots_around_changes_of_findings(tmp_path: Path) -> None:
    rng = random.Random(0)
    noise = [
        job(*(rank(q, step=t, phase_stacks={str(rng.random()): ()}) for q in (0, 1)), t_s=t / 4) for t in range(1200)
    ]
    stalled = [msgspec.structs.replace(s, t_s=300.0 + i / 4) for i, s in enumerate(WAITING * 4)]
    limit = 30_000
    live = written(tmp_path, noise + stalled, max_bytes=limit)
    tape = read_tape(tmp_path / NAME)
    assert (tmp_path / NAME).stat().st_size <= limit
    assert len(tape.snapshots) < len(noise) / 2
    (found,) = live.findings
    near = [s.t_s for s in tape.snapshots if abs(s.t_s - (found.detected_s or 0.0)) < 4.0]
    assert len(near) >= 30
    assert [(f.kind, f.culprits) for f in judge(tape).findings] == [("stall", (1,))]


def test_a_tape_of_another_schema_is_read(tmp_path: Path) -> None:
    """A newer recorder may write fields that are not known here, and an older one leaves some out."""
    change = difference(EMPTY, WAITING[0])
    assert isinstance(change, dict)
    plain: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(change), strict=False)
    plain["a_new_field"] = [[1, 2]]
    for state in plain["ranks"].values():
        state[0]["marks"] = [{"what": "forward"}]
    old_head: Any = {"type": "head", "stamp": "of the types"}
    items = encoded(old_head) + encoded(Frame(change=plain))
    assert from_bytes(ZLIB + zlib.compress(items)).snapshots == (WAITING[0],)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a tape",
        ZLIB + b"nonsense",
        LZMA + b"nonsense",
        ZLIB + zlib.compress(b"\xff\xff\xff\x7f" + b"x" * 64),
        ZLIB + zlib.compress(encoded(Frame(change={"ranks": {0: 3}}))),
        ZLIB + zlib.compress(encoded(Frame(change={"world_size": [1 << 40]}))),
        ZLIB + zlib.compress(encoded(Frame(change={"ranks": {7: [{"rank": 1}]}}))),
        ZLIB + zlib.compress(encoded(Frame(change={"arrivals": [9, {}, []]}))),
    ],
)  # fmt: skip
def test_a_file_that_is_no_tape_is_one_line_of_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.tape"
    path.write_bytes(data)
    with pytest.raises(DistdiagError, match="is not a tape that can be read") as error:
        read_tape(path)
    assert "\n" not in error.value.message and error.value.hint


@pytest.mark.parametrize("packed", [LZMA + lzma.compress(bytes(2 << 20)), ZLIB + zlib.compress(bytes(2 << 20))])
def test_a_small_file_with_huge_contents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bytes
) -> None:
    monkeypatch.setattr(tapes, "MAX_BYTES", 1 << 20)
    (tmp_path / "x.tape").write_bytes(packed)
    with pytest.raises(DistdiagError, match="larger than"):
        read_tape(tmp_path / "x.tape")


def test_a_small_tape_that_asks_for_all_memory_costs_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its frames changes one rank of 1,000: 40 bytes, and a new table of all ranks."""
    monkeypatch.setattr(tapes, "MAX_MEMORY", 96 << 20)
    ranks = {rank: [{"rank": rank}] for rank in range(1000)}
    frames = [{"world_size": [1000], "ranks": ranks}, *[{"ranks": {0: None}}, {"ranks": {0: ranks[0]}}] * 10_000]
    (tmp_path / NAME).write_bytes(ZLIB + zlib.compress(b"".join(encoded(Frame(change=change)) for change in frames)))
    with pytest.raises(DistdiagError, match=r"memory|takes too long"):  # which is met first depends on the machine
        guarded(tmp_path / NAME, to_bytes, bytes)


def test_a_pipe_is_no_tape(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(DistdiagError, match="not a regular file"):
        read_tape(tmp_path / NAME)


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_tape_is_judged_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "x.tape"
    changes = [difference(old, new) for old, new in zip((EMPTY, *WAITING), WAITING, strict=False)]
    plain: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(changes), strict=False)
    if seed % 3:
        index = rng.randrange(3)
        plain[index] = somewhere(rng, plain[index])
    items = b"".join(encoded(Frame(change=change)) for change in plain if _encodable(change))
    data = ZLIB + zlib.compress(items)
    path.write_bytes(data if seed % 3 else flip(rng, data))
    with contextlib.suppress(DistdiagError):  # any other exception fails
        judge_file(path)


def _encodable(change: Any) -> bool:
    try:
        msgspec.msgpack.encode(change)
    except Exception:  # a value that msgpack does not have
        return False
    return True


def test_an_empty_tape_has_no_findings() -> None:
    assert judge(Tape(snapshots=())).findings == ()


def test_a_size_of_a_tape_that_is_no_number_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("9" * 5000, "-1", "nan", "²", ""):
        monkeypatch.setenv(ON, text)
        assert wanted_bytes() == 0
