"""The autopsy on made pages: what counts as a proof, damaged pages, memory, and pages that are gone."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sqlite3
import time
from pathlib import Path

import pytest

from distdiag import cgroups
from distdiag.cli import main
from distdiag.diagnosis.model.findings import Report
from distdiag.diagnosis.text.finding import last_seen_lines
from distdiag.history.collect import rows_of
from distdiag.monitor import deaths
from distdiag.monitor.autopsy import BEATS_S, autopsy
from distdiag.page import directories
from distdiag.page.layout import Blocked, LifeWord, page_path
from distdiag.page.writer import PageWriter
from distdiag.store.frames import RankRow
from distdiag.store.reader import open_run
from distdiag.store.rows import ProcessRow
from distdiag.store.writer import Writer
from tests.monitor.test_damaged_pages import a_page, changed

S = 10**9


def ns(ago_s: float) -> int:
    return time.monotonic_ns() - int(ago_s * S)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks on this host, with their pages, whose monitor never closed it."""
    path = tmp_path / "R"
    pages = directories.overflow(path, 0)
    directories.make(pages)
    directories.node_record(path, 0).write_text(f"h:1:1 {pages}\n")
    began = time.time() - 100
    with Writer(path) as w:
        w.meta(
            started_unix_s=began,
            world_size=2,
            state="running",
            heartbeat_unix_s=time.time() - 60,
            memory_cgroup=deaths.noted(),
        )
        w.add(
            [RankRow(rank=q, life="running", t_s=50.0, file="/job/train.py", line=7, function="main") for q in (0, 1)]
        )
    con = opened(path)
    con.execute("DELETE FROM meta WHERE key IN ('monitor_ended', 'ended_s')")
    con.commit()
    con.close()
    for rank in (0, 1):
        page(pages, rank, began)
    return path


def opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path / "run.db")


def page(pages: Path, rank: int, began: float) -> PageWriter:
    made = a_page(pages, rank)
    h = made.header
    h.host = made.text(socket.gethostname())
    h.started_wall_ns, h.started_mono_ns = int(began * S), ns(time.time() - began)
    h.phase_since_ns = h.stack_ns = ns(5)
    for call in made.page.calls[:3]:
        call.entered_ns, call.left_ns = ns(60), ns(59)
    beat(made, 2)
    return made


def beat(made: PageWriter, ago_s: float) -> None:
    made.header.heartbeat_ns = made.header.counted_ns = ns(ago_s)


def waits_in(run: Path, rank: int, op: str, ago_s: float) -> None:
    """Let a rank wait in collective 4 since `ago_s`."""
    made = reopened(run, rank)
    site = made.site("/job/train.py", 20 + rank, "main")
    at = ns(ago_s)
    number = made.write_call(made.text(op), 0, 4, 4, -1, 0, made.text("float32"), site, 1, 4, 0, 0, 0, 0, 0, 4, 16, -1, at, 0, 0, 0, 2)  # fmt: skip
    h = made.header
    made.page.groups[0].enqueued = 4
    h.blocked, h.blocked_at, h.blocked_since_ns, h.blocked_site = Blocked.WAIT, number, at, site
    h.stack[0], h.stack_ns = site, at


def reopened(run: Path, rank: int) -> PageWriter:
    """Return a new page of this rank in place of the old."""
    pages = directories.overflow(run, 0)
    path = page_path(pages, rank)
    if path.exists():
        path.unlink()
    began = float(opened(run).execute("SELECT value FROM meta WHERE key = 'started_unix_s'").fetchone()[0])
    return page(pages, rank, began)


def judged(run: Path) -> Report:
    found = autopsy(run)
    assert found is not None
    return found


def test_every_rank_is_named_with_its_last_line_and_collective(run: Path) -> None:
    found = judged(run)
    assert found.state == "failed" and found.ranks_seen == 2 and found.unjudged is None and found.findings == ()
    assert [(r.rank, r.line, r.waits) for r in found.last_seen] == [(0, 7, False), (1, 7, False)]
    assert all(
        r.collective is not None and (r.collective.op, r.collective.seq) == ("all_reduce", 3) for r in found.last_seen
    )
    assert "by whom is not known" in (found.state_text or "")


def test_the_last_collective_of_a_rank_is_the_one_that_its_group_counts(run: Path) -> None:
    """Those that C++ makes are no recorded calls, as DDP's: the newest call of Python is older."""
    reopened(run, 0).page.groups[0].enqueued = 63
    found = judged(run).last_seen
    assert [(r.collective.op, r.collective.seq) for r in found if r.collective] == [("", 63), ("all_reduce", 3)]
    assert "; last collective: #63 (default_pg)" in last_seen_lines(found)[0]


@pytest.mark.parametrize(("since_s", "proved"), [(4.0, True), (2.1, False)])
def test_a_wait_is_proved_only_if_all_its_ranks_were_alive_in_it(run: Path, since_s: float, proved: bool) -> None:
    """The last beats are 2 s old: of a wait that began 0.1 s before, no second look exists."""
    waits_in(run, 0, "all_reduce", 4.0)
    waits_in(run, 1, "broadcast", since_s)
    found = judged(run)
    assert [f.certainty for f in found.findings if f.severity == "error"] == ["proved"] * proved
    assert [r.waits for r in found.last_seen] == [True, True] and [r.line for r in found.last_seen] == [20, 21]


def test_all_readers_use_the_state_of_diagnose_from_the_first_second(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(run) as con:  # the last beat is so young that by itself it would be a monitor that lives
        con.execute("UPDATE meta SET value = ? WHERE key = 'heartbeat_unix_s'", (time.time(),))
        con.execute("UPDATE meta SET value = 'deadlocked' WHERE key = 'state'")
    monkeypatch.chdir(run.parent)
    main(["report", "R", "--format", "text"])
    report = capsys.readouterr().out
    main(["tui", "R", "--once", "--json"])
    shown = json.loads(capsys.readouterr().out)
    with open_run(run) as opened_run:
        rows = rows_of(opened_run)
    assert (judged(run).state, shown["state"], rows[0].state) == ("failed",) * 3
    assert "failed: ranks 0 and 1 and the monitor were killed" in report.replace("0, 1", "0 and 1")
    assert "monitor were killed" in shown["state_text"] and "deadlocked" not in report


def test_an_error_that_follows_from_a_killed_rank_is_no_crash(run: Path) -> None:
    made = reopened(run, 0)
    made.header.life = LifeWord.RAISED
    made.header.exception = made.text("RuntimeError: Connection closed by peer [127.0.0.1]:25494")
    made.header.exception_ns = ns(3)
    found = judged(run)
    assert found.last_seen[0].state == "cut_off"
    assert "rank 1 and the monitor were killed" in (found.state_text or "")
    assert any(note.startswith("rank 0 failed because a rank that it needed was gone") for note in found.notes)


def test_a_rank_that_was_silent_before_the_others_proves_nothing(run: Path) -> None:
    """It may have been killed first: the others then wait for a dead rank, and not for one that called something else."""
    waits_in(run, 0, "all_reduce", 10.0)
    waits_in(run, 1, "broadcast", 10.0)
    made = reopened(run, 1)
    beat(made, 2 + BEATS_S + 3)
    found = judged(run)
    assert not [f for f in found.findings if f.certainty == "proved"]
    assert any("rank 1 was last heard of" in note for note in found.notes)
    assert found.last_seen[1].state == "silent"


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_was_set_changes_no_verdict(
    run: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    waits_in(run, 0, "all_reduce", 4.0)
    waits_in(run, 1, "broadcast", 4.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    found = judged(run)
    assert [f.certainty for f in found.findings if f.severity == "error"] == ["proved"]
    assert [r.line for r in found.last_seen] == [20, 21]


def test_a_run_that_a_process_still_uses_is_left_alone(run: Path) -> None:
    held = directories.hold(directories.overflow(run, 0))
    assert held is not None and autopsy(run) is None
    os.close(held)
    assert autopsy(run) is not None


def test_a_rank_of_another_host_may_still_live(run: Path) -> None:
    made = reopened(run, 1)
    made.header.host = made.text("elsewhere")
    assert autopsy(run) is None
    made = reopened(run, 1)
    made.header.host = made.text("elsewhere")
    beat(made, 40)
    made.header.phase_since_ns = ns(50)
    assert judged(run).ranks_seen == 2


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_page_costs_only_its_rank(run: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = page_path(directories.overflow(run, 0), 1)
    path.write_bytes(changed(path.read_bytes(), rng))
    began_s = time.process_time()
    found = autopsy(run)
    assert time.process_time() - began_s < 5.0
    if found is not None:  # None: its host is another now, on which it may live
        assert 0 in [r.rank for r in found.last_seen]
        assert not [f for f in found.findings if f.certainty == "proved" and f.kind == "deadlock"]


def test_pages_that_are_gone_leave_what_the_database_knows(run: Path) -> None:
    shutil.rmtree(directories.overflow(run, 0))
    found = judged(run)
    assert found.state == "running" and found.unjudged is not None  # exit code 3: no verdict
    assert any("the pages of its ranks were on h, " in n and "until 50 s after the start" in n for n in found.notes)
    directories.node_record(run, 0).write_text(f"{socket.gethostname()}:1:1 /nowhere\n")
    assert any("the pages of its ranks are gone" in n for n in judged(run).notes)
    assert [(r.rank, r.line, r.t_s) for r in found.last_seen] == [(0, 7, 50.0), (1, 7, 50.0)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_pages_of_another_user_are_not_called_gone(run: Path) -> None:
    shutil.rmtree(directories.overflow(run, 0))
    os.chown(run, 54_321, 54_321)
    assert any(n.startswith("only uid 54321 may read the pages") for n in judged(run).notes)


def test_a_closed_run_has_no_autopsy(run: Path) -> None:
    con = opened(run)
    con.execute("INSERT INTO meta VALUES ('ended_s', '12.0')")
    con.commit()
    con.close()
    assert autopsy(run) is None


def test_whose_memory_grew_is_reported_with_its_time(run: Path) -> None:
    con = opened(run)
    names = ProcessRow.__struct_fields__
    for t_s in range(40, 50):
        for rank in (0, 1):
            row = dict.fromkeys(names) | {
                "t_s": float(t_s),
                "rank": rank,
                "rss_bytes": (400 + rank * (t_s - 40) * 300) << 20,
            }
            con.execute(
                f"INSERT INTO process ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", list(row.values())
            )
    con.commit()
    con.close()
    notes = judged(run).notes
    assert any(
        "memory: rank 1 grew by 2.6 GiB to 3.0 GiB in the last 9.0 s; the others by at most 0 B" in n for n in notes
    ), notes


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (3, "out-of-memory killer ended 2 processes of the job's cgroup"),
        (1, "the kernel killed no process"),
        (0, "cannot be read"),
    ],
)
def test_kills_for_memory_are_those_of_the_jobs_own_cgroup(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, said: str
) -> None:
    """A count below the monitor's is that of another cgroup with the same name."""
    folder = tmp_path / "cgroup" / "job"
    folder.mkdir(parents=True)
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    con = opened(run)
    con.execute(
        "UPDATE meta SET value = ? WHERE key = 'memory_cgroup'", (json.dumps([str(folder), folder.stat().st_ino, 1]),)
    )
    con.commit()
    con.close()
    (folder / "memory.events").write_text(f"low 0\nmax 7\noom 3\noom_kill {after}\noom_group_kill 0\n")
    found = judged(run)
    assert any(said in n for n in found.notes), found.notes
    assert ("out-of-memory" in (found.state_text or "")) == (after == 3)


@pytest.mark.parametrize(
    "noted", ["", "{}", "[1]", '["/etc", 1, 0]', '["/sys/fs/cgroup/../../etc", 1, 0]', '["\\u0000", 1, 0]', "[" * 9000]
)
def test_a_forged_cgroup_is_not_read(noted: str) -> None:
    assert deaths.oom_kills({deaths.KEY: noted}) is None
