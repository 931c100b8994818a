"""The report as text and as a trace."""

from __future__ import annotations

import io
import itertools
import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis.model.findings import Finding
from distdiag.report import html, perfetto, text
from distdiag.store.reader import open_run
from tests.report.runs import DEADLOCK, STRAGGLER, facts_of, make_run


def trace(path: Path, last_steps: int | None = None) -> list[dict[str, Any]]:
    out = io.BytesIO()
    with open_run(path) as run:
        count = perfetto.write(run, out, last_steps)
    events = json.loads(out.getvalue())["traceEvents"]
    assert len(events) == count
    return events


def test_text_starts_with_the_verdict_and_keeps_its_width(tmp_path: Path) -> None:
    output = text.render(
        facts_of(make_run(tmp_path / "r", state="deadlocked", findings=(STRAGGLER, DEADLOCK), slow_rank=2))
    )
    lines = output.splitlines()
    assert lines[0] == "deadlocked: 1 error; look at rank 1 first (4 of 4 ranks seen)"
    assert lines[1].startswith("cifar, ") and lines[4] == "ERROR  deadlock/missing_rank  (proved)"
    assert "  where    rank 1: /home/me/train.py:88 in evaluate (user_code)" in lines
    assert "WARNING  straggler/data  (suspected, cleared at 30.0 s)" in lines
    findings = lines[4 : lines.index("The job")]
    assert max(map(len, findings)) <= 80
    assert all(len(line) <= 80 for line in lines if line.startswith(("Ranks", "Collectives")))
    assert all(line == line.rstrip() for line in lines)


def test_text_escapes_what_comes_from_the_job(tmp_path: Path) -> None:
    evil = "x\x1b[2J\x07\r\n\u202e"
    run = make_run(
        tmp_path / "r", name=evil, host=evil, command=evil, exception=evil,
        findings=(Finding(kind="stall", message=evil, advice=evil, names=(evil,)),),
    )  # fmt: skip
    output = text.render(facts_of(run))
    assert set(output) & set("\x1b\x07\r\u202e") == set()
    assert output.count("x\\x1b[2J") >= 5


def test_an_unknown_number_of_ranks_leaves_no_gap_in_a_sentence(tmp_path: Path) -> None:
    facts = msgspec.structs.replace(facts_of(make_run(tmp_path / "r", ranks=2)), world_size=None)
    for shown in (text.render(facts), html.render(facts)):
        assert "2 ranks seen" in shown and "of –" not in shown


def test_steps_and_phases_nest_and_do_not_overlap(tmp_path: Path) -> None:
    events = trace(make_run(tmp_path / "r", ranks=2, steps=20, slow_rank=1))
    spans = defaultdict(list)
    for e in events:
        if e["ph"] == "X" and e["pid"] >= perfetto.FIRST_RANK:
            spans[e["pid"], e["tid"], e.get("cat")].append((e["ts"], e["ts"] + e["dur"]))
    steps = sorted(spans[perfetto.FIRST_RANK, perfetto.STEPS, "step"])
    phases = sorted(spans[perfetto.FIRST_RANK, perfetto.STEPS, "phase"])
    assert len(steps) == 20 and len(phases) == 4 * 20, "phases that took no time are not drawn"
    rounding_us = 0.01
    for spans_of in (steps, phases):
        assert all(a[1] <= b[0] + rounding_us for a, b in itertools.pairwise(spans_of))
    for begin, end in phases:
        assert any(a - rounding_us <= begin and end <= b + rounding_us for a, b in steps)
    waits = spans[perfetto.FIRST_RANK, perfetto.WAITING, "wait"]
    slow_waits = spans[perfetto.FIRST_RANK + 1, perfetto.WAITING, "wait"]
    assert sum(b - a for a, b in waits) > 2 * sum(b - a for a, b in slow_waits)


def test_findings_collectives_and_counters_are_in_the_trace(tmp_path: Path) -> None:
    events = trace(make_run(tmp_path / "r", ranks=2, steps=10, findings=(DEADLOCK, STRAGGLER), gpus=True))
    marks = {e["name"]: e for e in events if e["ph"] == "i"}
    assert marks["error: deadlock/missing_rank"]["ts"] == 41.2e6
    assert marks["error: deadlock/missing_rank"]["args"]["culprits"] == [1]
    held = [e for e in events if e["ph"] == "X" and e["pid"] == perfetto.FINDINGS]
    assert [e["dur"] for e in held] == [20e6], "only a finding that went away has a length"
    assert sum(e.get("cat") == "collective" for e in events) == 20
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert {"node 0 CPU %", "node 0 GPU 1 power W"} <= counters
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {"findings", "rank 0 (node0)", "rank 1 (node0)", "hosts", "GPUs"} <= names


def test_a_trace_can_be_limited_to_the_last_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", ranks=2, steps=50)
    shown = {e["name"] for e in trace(run, last_steps=5) if e.get("cat") == "step"}
    assert shown == {f"step {n}" for n in range(46, 51)}
    first_us = min(e["ts"] for e in trace(run, last_steps=5) if e.get("cat") == "collective")
    assert first_us > min(e["ts"] for e in trace(run) if e.get("cat") == "collective")


def test_a_run_without_steps_is_still_a_valid_trace(tmp_path: Path) -> None:
    assert not [e for e in trace(make_run(tmp_path / "r", steps=0)) if e.get("cat") == "step"]


def test_rows_with_a_time_or_name_of_another_type_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=20, gpus=True)
    con = sqlite3.connect(run / "run.db")
    con.execute("UPDATE step SET t_end_s = 'late' WHERE step % 2 = 0")
    con.execute("UPDATE collective SET op = x'ff' WHERE seq % 2 = 0")
    con.execute("UPDATE host SET t_s = 'noon' WHERE t_s = (SELECT max(t_s) FROM host)")
    con.commit()
    con.close()
    steps = {e["name"] for e in trace(run) if e.get("cat") == "step"}
    assert steps == {f"step {k}" for k in range(1, 21, 2)}


def test_a_trace_holds_nothing_that_a_terminal_obeys() -> None:
    """It may go to stdout; a viewer reads the same text."""
    text = "a\x9b2J\u202eb\x1b[2J"
    encoded = perfetto._encode({"name": text})
    assert encoded.isascii() and b"\x1b" not in encoded and json.loads(encoded) == {"name": text}
