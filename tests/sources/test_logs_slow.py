"""Jobs that run on slowly, or wait for storage, by the reports of Megatron and the kernel. All numbers are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import about, diagnose, only, raised, timeout

ITERATION = "iteration {:6}/ 9000 | consumed samples: 9 | elapsed time per iteration (ms): {:.1f} | learning rate: 1E-04 | global batch size: {} | lm loss: 2.1E+00 |\n"


def report(rank: int, most: float, slow: int | None = None, clock: float = 1900.0) -> str:
    return (
        f"INFO:megatron.core.utils:[x] | MnRtt/Rnk: 310.20ms/2 | MxRtt/Rnk: {most:.2f}ms/{rank} | MnPwr/Rnk: 90.0W/1 | MxPwr/Rnk: 99.0W/0 "
        f"| MnTmp/Rnk: 40.00C/0 | MxTmp/Rnk: 91.00C/{rank} | MnUtl/Rnk: 99.00%/0 | MxUtl/Rnk: 99.00%/0 | MnClk/Rnk: {clock:.2f}MHz/{rank} "
        f"| MxClk/Rnk: 1965.00MHz/3 | MnDRtt/Rnk: 0.1ms/1 | MxDRtt/Rnk: 0.2ms/0 | MnEtpt/Rnk: 90.10TF/{rank if slow is None else slow} "
        "| MxEtpt/Rnk: 99.00TF/2 | \n"
    )


def test_the_rank_that_the_last_reports_name_is_a_straggler(tmp_path: Path) -> None:
    text = report(4, 330.0) * 3 + report(6, 700.0, clock=800.0) * 3
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("straggler", "forward", (6,), ()) and (f.severity, f.certainty) == ("warning", "suspected")
    assert "0.70 s" in f.message and "800 MHz" in f.message and "hottest (91 C)" in f.message
    assert "PERFORMANCE" in f.advice
    f = only(diagnose(tmp_path, report(6, 700.0) * 3))
    assert "MHz" not in f.message and "test it alone" in f.advice


@pytest.mark.parametrize(
    "text",
    [
        report(6, 700.0) * 3 + report(4, 330.0),  # it was slow only for a while
        report(6, 400.0) * 5,
        report(6, 700.0) + report(5, 700.0) + report(6, 700.0),
        report(6, 700.0, slow=1) * 3,
        report(6, 700.0) * 2,
    ],
)
def test_ranks_that_are_slow_in_turn_or_a_little_are_none(tmp_path: Path, text: str) -> None:
    assert not diagnose(tmp_path, text).findings


def times(*ms: float, batch: int = 64, step: int = 10) -> str:
    return "".join(ITERATION.format(step * n, t, batch) for n, t in enumerate(ms, 1))


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        (times(900, 210, 209, 212, 400, 411, 402), True),
        (times(900, 210, 209, 212, 400, 411, 402, 208), False),  # not to the end
        (times(210, 209, 212, 250, 260, 280, 330, 400, 420), False),  # no jump
        (times(210, 209, 212, 214) + times(400, 402, 411), False),  # another run
        (times(210, 209, 212, 214) + ITERATION.format(50, 400, 128) + ITERATION.format(60, 401, 128) + ITERATION.format(70, 402, 128), False),  # a larger batch
        (times(900, 210, 209, 212, 400, 411, 402) + raised(1, "ValueError: x"), False),
    ],
)  # fmt: skip
def test_iterations_that_take_longer_to_the_end_are_noted(tmp_path: Path, text: str, noted: bool) -> None:
    notes = [note for note in diagnose(tmp_path, text).notes if "times as long" in note]
    assert bool(notes) is noted
    if noted:
        assert "from line 5 on (iteration 50): 0.40 s, 0.21 s before" in notes[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[rank2]: [81.4] nfs: server fs-4 not responding, still trying\n", "NFS server fs-4 does not respond, which may be why"),
        ("[81.4] Lustre: s1-OST3-osc-ff: Connection to s1-OST3 (at 10.0.0.8@o2ib) was lost; in progress\n", "connection to s1-OST3"),
        ("[81.4] INFO: task python:88 blocked for more than 122 seconds.\n", "process 88 (python) was blocked for more than 122 seconds"),
        ("[rank1]: [81.4] nfs: server fs-4 not responding, still trying\n", ""),
        ("[81.4] nfs: server fs-4 not responding, still trying\n[85.0] nfs: server fs-4 OK\n", ""),
    ],
)  # fmt: skip
def test_storage_that_the_late_rank_waits_for_is_named(tmp_path: Path, line: str, words: str) -> None:
    f = only(diagnose(tmp_path, line + "".join(map(timeout, (0, 1, 3)))))
    assert f.culprits == (2,) and words in f.message
    assert ("storage" in f.advice) is bool(words)
    assert not words or any("the kernel reports" in note for note in diagnose(tmp_path, line).notes)


def scores(slow: str, score: str = "0.61") -> str:
    """Return one report of NVRx."""
    text = f"[NeMo W 2031-01-02 nemo_logging:393] STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: {slow}\n" * bool(slow)  # fmt: skip
    lines = "".join(f"      Rank={r} Node=pool-{r // 8} Score={s}\n" for r, s in ((21, score), (3, "0.98")))
    return f"{text}[NeMo I 2031-01-02 nemo_logging:393] \n    GPU relative performance:\n     Worst performing 2/32 ranks:\n{lines}[NeMo I 2031-01-02 nemo_logging:393] Straggler report processing time: 0.03 sec.\n"


@pytest.mark.parametrize("slow", ["{StragglerId(rank=21, node='pool-2')}", "[21]", "[(21, 'pool-2')]"])
def test_the_one_rank_that_the_last_reports_of_nvrx_name_is_a_straggler(tmp_path: Path, slow: str) -> None:
    f = only(diagnose(tmp_path, scores("") + scores(slow) * 3))
    assert about(f) == ("straggler", "forward", (21,), ()) and (f.severity, f.certainty) == ("warning", "suspected")
    assert f.message.startswith("rank 21 on pool-2 is the one slow rank") and "score is 0.61" in f.message
    assert any("calls rank 21 on pool-2 slow" in note for note in diagnose(tmp_path, scores(slow) * 2).notes)
    throttled = "    Clocks Event Reasons\n        HW Power Brake Slowdown           : Active\n"
    f = only(diagnose(tmp_path, scores(slow).rpartition("[NeMo I")[0] + throttled))
    assert f.culprits == (21,) and "`HW Power Brake Slowdown: Active`" in f.message and "clocked down" in f.advice
    assert not diagnose(tmp_path, scores(slow) + throttled.replace("Active", "Not Active")).findings
    warning, _, rest = scores(slow).rpartition("[NeMo I")[0].partition("\n")  # after its scores, and no line ends it
    assert only(diagnose(tmp_path, f"{rest}{warning}\n" * 3)).culprits == (21,)
    for text in (scores(slow) * 2, scores(slow) * 3 + scores(""), scores(slow) * 2 + scores("[21, 3]"), scores("") * 4):
        assert not diagnose(tmp_path, text).findings
