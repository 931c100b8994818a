"""What two ranks on one H100 showed (torch 2.11, NCCL 2.32.3, NCCL_MULTI_RANK_GPU_ENABLE=1), judged again.

`h100/*.tape` are the snapshots of the monitor, `h100/*/rank_*.json` the ends of the flight records. NCCL completes the smaller of two
all_reduces of different sizes on its rank alone: the kernel needs only the first packets of the larger one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.diagnosis.model.findings import Certainty
from distdiag.sources.dumps.verdict import diagnose_dumps
from distdiag.tapes.tape import judge, read_tape

HERE = Path(__file__).parent / "h100"


@pytest.mark.parametrize("name", ["missing_rank", "mismatch"])
def test_calls_of_different_sizes_are_proved_although_one_of_them_completed(name: str) -> None:
    tape = read_tape(HERE / f"{name}.tape")
    newest = tape.snapshots[-1].ranks
    assert [newest[r].completed["default_pg"] for r in (0, 1)] == [47, 46]
    (found,) = judge(tape).findings
    assert (found.kind, found.cause, found.certainty) == ("mismatch", "shape", Certainty.PROVED)
    assert found.detected_s is not None and found.detected_s - (newest[1].blocked.entered_s or 0.0) < 3.0
    assert found.collective is not None and found.collective.seq == 47
    assert (
        found.message.startswith("rank 0 has completed all_reduce of ")
        and "rank 1 is in all_reduce of" in found.message
    )


@pytest.mark.parametrize(("name", "culprits"), [("missing_rank", (0,)), ("mismatch", ())])
def test_the_flight_records_lead_to_the_same_verdict(name: str, culprits: tuple[int, ...]) -> None:
    (found,) = diagnose_dumps(HERE / name).findings
    assert (found.kind, found.cause, found.culprits) == ("mismatch", "shape", culprits)
