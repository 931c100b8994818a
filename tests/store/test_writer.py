"""The single writer: rows round-trip, failing disks are handled, the size stays bounded."""

from __future__ import annotations

import math
import os
import sqlite3
import tempfile
from pathlib import Path

import pytest

from distdiag.diagnosis.model.findings import CollectiveRef, Finding, Where
from distdiag.store import location, thinning, writer
from distdiag.store.frames import RankRow
from distdiag.store.liveness import Monitor
from distdiag.store.reader import open_run
from distdiag.store.rows import CollectiveRow, GpuRow, GroupRow, HostRow, LoaderRow, ProcessRow, ScalarRow, StepRow
from distdiag.store.thinning import Keeper, database_bytes
from distdiag.store.writer import Writer
from distdiag.terms.ranks import fold_ranks, unfold_ranks


def _row(rank: int, step: int = 7) -> RankRow:
    return RankRow(rank=rank, host=f"node{rank // 8}", life="running", step=step, self_ms=100.0 + rank, loss=0.5)


def _mount(mounts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel report these mounts."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(mounts)
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))


def test_rows_of_every_table_come_back(tmp_path: Path) -> None:
    with Writer(tmp_path / "r") as w:
        w.meta(name="job", world_size=2, started_unix_s=1.5, amp=True, max_steps=None)
        w.add([_row(0), _row(1)])
        w.frame(1.0, "running", "2 ranks", [_row(0), _row(1)])
        w.add(
            [
                StepRow(rank=r, step=s, t_end_s=s * 0.1, step_ms=100.0, self_ms=90.0 + r)
                for s in range(1, 5)
                for r in (0, 1)
            ]
        )
        w.add([CollectiveRow(pgroup="default_pg", seq=1, op="all_reduce", t_s=0.1, step=1, bytes=4096)])
        w.groups([GroupRow(name="default_pg", ranks=(0, 1), backend="gloo")])
        w.add([HostRow(t_s=1.0, node=0, host="node0", cpu_pct=50.0)])
        w.add([ProcessRow(t_s=1.0, rank=1, cpu_pct=99.0)])
        w.add([GpuRow(t_s=1.0, node=0, gpu=0, rank=0, utilization_pct=80.0, throttle="")])
        w.add([ScalarRow(rank=0, step=1, name="loss", value=2.3, t_s=0.1)])
        w.add([LoaderRow(rank=0, length=10, fingerprint=2**64 - 1)])
        w.probe(2.0, "allreduce", "pass", "{}")
        w.event(0.5, "monitor", "info", "no NVIDIA driver")
        assert w.commit()
    with open_run(tmp_path / "r") as run:
        meta = run.meta
        assert (meta["world_size"], meta["amp"], meta["max_steps"]) == ("2", "1", None)
        assert run.monitor(meta) is Monitor.ENDED
        frame = run.latest_frame()
        assert frame is not None and frame.ranks == [_row(0), _row(1)] and frame.state == "running"
        assert run.ranks()[1].host == "node0" and run.ranks()[1].self_ms is None
        assert [(s.step, s.rank, s.self_ms) for s in run.steps(2, 3, [1])] == [(2, 1, 91.0), (3, 1, 91.0)]
        assert run.step_range() == (1, 4) and run.step_range(0.25) == (1, 2) and run.step_range(0.01) is None
        assert [(s.step, s.rank) for s in run.steps(1, 4)] == [(n, q) for n in range(1, 5) for q in (0, 1)]
        assert run.collectives()[0].bytes == 4096
        assert run.groups()[0].ranks == (0, 1)
        assert run.hosts()[0].cpu_pct == 50.0 and run.processes()[0].rank == 1 and run.gpus()[0].throttle == ""
        assert run.query("SELECT t_s, utilization_pct FROM gpu") == [(1.0, 80.0)]
        assert run.query("SELECT value FROM scalar WHERE name = 'loss'") == [(2.3,)]
        assert run.loaders()[0].fingerprint == -1
        assert run.probes()[0].verdict == "pass" and run.events()[0].text == "no NVIDIA driver"
        steps = run.steps_frame()
        assert len(steps) == 8 and steps.self_ms.max() == 91.0
        assert run.report().state == "running" and run.report().ranks_seen == 2


def test_a_finding_keeps_one_record_as_it_develops_and_clears(tmp_path: Path) -> None:
    found = Finding(
        kind="deadlock", cause="missing_rank", severity="error", certainty="suspected", culprits=(1,), victims=(0,),
        collective=CollectiveRef("all_reduce", "default_pg", 3, 8), where=(Where(1, "/a/train.py", 4, "main", "user_code"),),
        first_seen_s=1.0, detected_s=1.5, message="rank 1 is missing",
    )  # fmt: skip
    import msgspec

    with Writer(tmp_path) as w:
        w.finding(found)
        w.commit()
        w.finding(msgspec.structs.replace(found, certainty="proved"))
        w.finding(msgspec.structs.replace(found, certainty="proved", cleared_s=9.0))
        w.finding(Finding(kind="input_bound", severity="warning", detected_s=2.0))
        w.commit()
    with open_run(tmp_path) as run:
        first, second = run.findings()
        assert first.kind == "input_bound"  # open before cleared, whatever the severity
        assert second.where == found.where and second.cleared_s == 9.0 and second.certainty == "proved"


def test_nan_is_stored_as_null(tmp_path: Path) -> None:
    with Writer(tmp_path) as w:
        w.add([StepRow(rank=0, step=1, loss=math.nan), StepRow(rank=0, step=2, loss=math.inf)])
    with open_run(tmp_path) as run:
        assert [s.loss for s in run.steps(1, 2)] == [None, math.inf]


def test_a_full_disk_is_counted_retried_and_reported(tmp_path: Path) -> None:
    w = Writer(tmp_path)
    assert w._con is not None
    pages = w._con.execute("PRAGMA page_count").fetchone()[0]
    w._con.execute(f"PRAGMA max_page_count = {pages}")  # SQLITE_FULL, as on a full disk
    w.add([StepRow(rank=0, step=s, step_ms=1.0) for s in range(20_000)])
    w.finding(Finding(kind="deadlock", severity="error", message="kept"))
    assert w.commit() is False
    assert w.failed_writes == 1 and w.last_error is not None and "full" in w.last_error
    assert w.commit() is False and w.failed_writes == 1  # it waits before the next attempt
    w._retry_at = 0.0
    assert w.commit() is False and w.failed_writes == 2
    w._con.execute("PRAGMA max_page_count = 1000000")
    w._retry_at = 0.0
    assert w.commit() is True and w.last_error is None
    w.close()
    with open_run(tmp_path) as run:
        assert run.query("SELECT count(*) FROM step") == [(20_000,)]
        assert run.findings()[0].message == "kept"
        assert any("2 failures" in e.text for e in run.events())


def test_a_disk_that_stays_full_costs_bounded_memory_and_bulk_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING_ROWS", 1000)
    w = Writer(tmp_path)
    assert w._con is not None
    w._con.execute("PRAGMA max_page_count = 1")
    for i in range(50):
        w.add([StepRow(rank=r, step=i) for r in range(100)])
        w.add([_row(r, i) for r in range(100)])
        w.frame(float(i), "running", "", [_row(0, i)])
        w.finding(Finding(kind="stall", cause=str(i)))
        w._retry_at = 0.0
        w.commit()
    assert sum(len(rows) for _, rows in w._pending) < 1500
    assert w.dropped_rows > 3000
    w._con.execute("PRAGMA max_page_count = 1000000")
    w._retry_at = 0.0
    assert w.commit()
    w.close()
    with open_run(tmp_path) as run:
        assert len(run.findings()) == 50
        assert len(run.ranks()) == 100 and run.ranks()[5].step == 49
        assert run.query("SELECT max(t_s) FROM frame")[0][0] == 49.0
        assert any("rows dropped" in e.text for e in run.events())


def test_a_directory_that_cannot_be_written_never_raises(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    w = Writer(blocked / "run")
    w.frame(0.0, "running", "", [_row(0)])
    assert w.commit() is False and w.failed_writes >= 1 and w.last_error
    blocked.unlink()
    (blocked / "run").mkdir(parents=True)
    w._retry_at = 0.0
    assert w.commit() is True
    w.close()
    with open_run(blocked / "run") as run:
        assert run.latest_frame() is not None


def test_a_value_that_sqlite_cannot_store_costs_only_its_batch(tmp_path: Path) -> None:
    w = Writer(tmp_path)
    w.add([ScalarRow(rank=0, step=1, name="huge", value=2**70)])  # type: ignore[arg-type]
    w.add([StepRow(rank=0, step=1, step_ms=1.0)])
    assert w.commit() and w.dropped_rows == 1 and "OverflowError" in (w.last_error or "")
    w.close()
    with open_run(tmp_path) as run:
        assert run.step_range() == (1, 1) and run.query("SELECT * FROM scalar") == []


def test_the_finished_run_is_one_file_readable_on_a_read_only_disk(tmp_path: Path) -> None:
    with Writer(tmp_path / "r") as w:
        w.frame(1.0, "ended", "exit 0", [_row(0)])
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["run.db"]
    assert sqlite3.connect(tmp_path / "r" / "run.db").execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_on_a_network_file_system_the_database_is_local_and_copied_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    _mount(f"disk / ext4 rw 0 0\nserver:/x {tmp_path}/nfs nfs4 rw 0 0\n", tmp_path, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    w = Writer(tmp_path / "nfs")
    w.frame(1.0, "running", "", [_row(0)])
    w.commit()
    assert w.path.is_relative_to(local) and not (tmp_path / "nfs" / "run.db").exists()
    with open_run(tmp_path / "nfs") as run:  # a reader on the same host follows the pointer
        assert run.latest_frame() is not None
        assert any("nfs4" in e.text for e in run.events())
    w.close()
    assert (tmp_path / "nfs" / "run.db").exists() and not list(local.iterdir())
    with open_run(tmp_path / "nfs") as run:
        assert run.latest_frame() is not None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/nfs/run", True),
        ("/data/nfs2/run", False),
        ("/mnt/sp ace/x", True),
        ("/home/u/r", False),
        ("/scratch/a", True),
    ],
)
def test_network_file_systems_are_recognised(
    path: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = (
        "overlay / overlay rw 0 0\nserver:/x /data/nfs nfs4 rw 0 0\n"
        "sshfs /mnt/sp\\040ace fuse.sshfs rw 0 0\nlus /scratch lustre rw 0 0\n/dev/sda1 /home ext4 rw 0 0\n"
    )
    _mount(mounts, tmp_path, monkeypatch)
    assert location.is_network(location.filesystem_type(Path(path))) is expected


def test_the_size_bound_thins_old_rows_and_keeps_new_rows_and_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Writer(tmp_path, keep_bytes=2 * 2**20)
    monkeypatch.setattr(thinning, "CHECK_S", 0.0)
    w._keeper._check_at = 0.0
    ranks, steps = 16, 4000
    for s in range(1, steps + 1):  # one step a second for more than an hour
        w.add(
            [
                StepRow(rank=r, step=s, t_end_s=float(s), step_ms=10.0, self_ms=float(r), samples=4, loss=1.0)
                for r in range(ranks)
            ]
        )
        w.add([HostRow(t_s=float(s), node=0, cpu_pct=float(s))])
        w.add([CollectiveRow(pgroup="g", seq=s, op="all_reduce", t_s=float(s), step=s)])
        if s % 5 == 0:
            w.frame(float(s), "stalled" if s == 1000 else "running", "", [_row(r, s) for r in range(ranks)])
        if s % 20 == 0:
            assert w.commit()
    for _ in range(40):
        w.event(float(steps), "test", "info", "tick")
        w.commit()
    assert w._con is not None
    assert database_bytes(w._con) <= 2 * 2**20
    w.close()
    with open_run(tmp_path) as run:
        first, last = run.step_range() or (0, 0)
        assert last == steps and 1 < first <= steps - 64
        minutes = run.table("step_minute")
        assert minutes.steps.sum() == (first - 1) * ranks  # nothing lost, only averaged
        assert minutes.samples.sum() == (first - 1) * ranks * 4
        assert minutes[minutes["rank"] == 3].self_ms.sub(3.0).abs().max() < 1e-9
        times = [t_s for (t_s,) in run.query("SELECT t_s FROM frame ORDER BY t_s")]
        assert times[-1] == steps and 1000.0 in times  # newest, and the one where the state changed
        assert any("reached its bound" in e.text for e in run.events())
    assert os.path.getsize(tmp_path / "run.db") <= 3 * 2**20  # freed pages are released


def test_minutes_of_a_long_run_are_put_together_before_the_bound_is_exceeded(tmp_path: Path) -> None:
    con = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    con.executescript((Path(location.__file__).parent / "schema.sql").read_text())
    ranks, minutes = 32, 3000
    con.execute("BEGIN")
    con.executemany(
        "INSERT INTO step_minute (rank, minute, steps, self_ms, loss, samples) VALUES (?, ?, ?, ?, ?, 4)",
        [(q, m, 1 + m % 2, q, m if m % 2 else None) for m in range(minutes) for q in range(ranks)],
    )
    con.execute("COMMIT")
    before = database_bytes(con)
    keeper = Keeper(keep_bytes=before // 12)
    reported: list[str] = []
    for seq in range(1000):
        con.execute("INSERT INTO collective (pgroup, seq, t_s) VALUES ('g', ?, 0.0)", (seq,))  # rows always become old
        con.execute("INSERT INTO step (rank, step, t_end_s) VALUES (0, ?, 0.0)", (seq,))
        reported += keeper.tick(con, minutes * 60.0)
        keeper._check_at = 0.0
    assert database_bytes(con) <= before // 12 and not any("stays at" in s for s in reported)
    one = "FROM step_minute WHERE rank = 3"
    steps, samples, mean, loss, rows = con.execute(
        f"SELECT sum(steps), sum(samples), min(self_ms), loss, count(*) {one}"
    ).fetchone()
    assert (steps, samples, mean) == (1.5 * minutes, 4 * minutes, 3.0)
    assert rows < minutes / 10 and loss in range(60)
    (newest,) = con.execute(f"SELECT max(minute) {one}").fetchone()
    assert newest >= minutes - 60
    con.close()


def test_a_bound_that_cannot_be_kept_is_reported_once(tmp_path: Path) -> None:
    con = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    con.executescript((Path(location.__file__).parent / "schema.sql").read_text())
    keeper = Keeper(keep_bytes=1000)
    reported: list[str] = []
    for _ in range(20):
        reported += keeper.tick(con, 0.0)
        keeper._check_at = 0.0
    con.close()
    assert sum("stays at" in s for s in reported) == 1


def test_rank_sets_fold_and_unfold() -> None:
    assert fold_ranks((3, 1, 2, 0, 8)) == "0-3,8" and unfold_ranks("0-3,8") == (0, 1, 2, 3, 8)
    assert unfold_ranks("") == ()
    with pytest.raises(ValueError):
        unfold_ranks("a-b")
