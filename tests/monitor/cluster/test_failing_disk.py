"""Node 0's disk fails while the states of another node arrive: the verdict is printed, and written once the disk works again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failing_disk import failing_disk
from tests.jobs import rows
from tests.simulated import Job, connected

pytest.importorskip("zmq", reason="pyzmq is not installed")


@pytest.mark.timeout(180)
def test_a_disk_of_node_0_that_fails_for_a_while_costs_no_verdict(tmp_path: Path) -> None:
    flag = tmp_path / "failing"
    with connected(Job(16, 8, sent=True), tmp_path, failing_disk(tmp_path, flag)) as s:

        def steps() -> int:
            return (rows(s.run_dir, "SELECT count(*) FROM step WHERE rank = 15") or [(0,)])[0][0]

        assert s.run(60, lambda: steps() > 5)[2]
        flag.touch()
        s.run(4)
        before = steps()
        s.hang()
        printed = s.run_dir / "stderr"
        assert s.run(30, lambda: "deadlock/missing_rank" in printed.read_text())[2]
        assert s.found("deadlock") == [] and s.process.poll() is None
        flag.unlink()
        assert s.run(30, lambda: bool(s.found("deadlock")))[2]
        (found,) = s.found("deadlock")
        assert (found.certainty, found.culprits, len(found.victims)) == ("proved", (s.odd,), 15)
        assert s.run(10, lambda: steps() > before)[2]  # steps of another node that were reported meanwhile
        (reported,) = s.found("recorder")
        assert "could not be written" in reported.message and "I/O error" in reported.message
        notes = "SELECT text FROM event WHERE text LIKE 'writing works again%'"
        assert s.run(10, lambda: bool(rows(s.run_dir, notes)))[2]
        assert "I/O error" in rows(s.run_dir, notes)[0][0]
        missing = "SELECT max(step) - min(step) + 1 - count(*) FROM step WHERE rank = 15"
        assert rows(s.run_dir, missing) == [(0,)]
        assert rows(s.run_dir, "PRAGMA integrity_check") == [("ok",)]
