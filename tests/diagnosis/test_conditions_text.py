"""What is advised about the condition by which ranks parted."""

from __future__ import annotations

import pytest

from distdiag.diagnosis.culprit.callers import is_inside
from distdiag.diagnosis.culprit.paths import Condition, Way
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.text.conditions import decision_advice
from tests.diagnosis.test_rank_condition import FILE

LEADS_PAST = "on rank 1, too, where `if n > 0` at line 3 leads past it"


@pytest.mark.parametrize(
    ("way", "op", "ddp", "advice"),
    [
        (
            Way.SKIPPED,
            "all_reduce",
            False,
            f"make all_reduce at train.py:7 {LEADS_PAST}, with zeros if it has nothing to add",
        ),
        (
            Way.ROUND,
            "barrier",
            False,
            f"make barrier at train.py:7 {LEADS_PAST}, or leave it out only where all ranks do",
        ),
        (
            Way.SKIPPED,
            "all_reduce",
            True,
            f"make DDP's all_reduce at train.py:7 {LEADS_PAST}, for example with the backward",
        ),
        (
            Way.SKIPPED,
            "",
            False,
            f"make the collective at train.py:7 {LEADS_PAST}, or leave it out only where all ranks do",
        ),
        (Way.SKIPPED, "send", False, "see that rank 1 sends its message to rank 2, too, where `if n > 0` at line 3"),
        (
            Way.ALONE,
            "barrier",
            False,
            "make barrier at train.py:7 on all ranks or on none: `if n > 0` at line 3 keeps it to rank 1",
        ),
        (
            Way.LEFT,
            "barrier",
            False,
            "find why `if n > 0` at line 3 had another result on rank 1, or let all ranks decide",
        ),
    ],
)
def test_the_advice_is_about_the_call_that_a_condition_leads_past(way: Way, op: str, ddp: bool, advice: str) -> None:
    call = Call(op=op, group="default_pg", site=Site(FILE, 7, "step"), peer=2 if op == "send" else None)
    assert decision_advice(Condition(FILE, 3, "if n > 0", way), (1,), call, ddp).startswith(advice)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        *((text, True) for text in ("if not rows", "if self.training and len(x) > 1", "if n", "if not sum(recv)", "if x.numel() == 0")),
        *((text, False) for text in ("if loss < best", "if not math.isfinite(loss)", "if token == END", "if self.done() and a > b")),
        ("except Empty", True),
    ],
)  # fmt: skip
def test_only_a_decision_is_to_be_made_together(text: str, amount: bool) -> None:
    call = Call(op="all_reduce", group="default_pg", site=Site(FILE, 7, "step"))
    advice = decision_advice(Condition(FILE, 3, text, Way.SKIPPED), (1,), call)
    assert advice.startswith(
        "make all_reduce" if amount else "let all ranks decide together whether they make all_reduce at train.py:7: "
    )


@pytest.mark.parametrize(
    ("line", "inside"),
    [("x = block(x)", True), ("dist.all_gather_into_tensor(out, x)", False), ("parts = accelerator.gather(x)", False)],
)
def test_a_collective_that_a_library_makes_in_a_line_is_told_from_one_that_the_line_calls(
    line: str, inside: bool
) -> None:
    call = Call(op="all_gather_into_tensor", group="g", site=Site(FILE, 1, "forward"))
    assert is_inside(call, {FILE: line}.get) is inside
    condition = Condition(FILE, 4, "except Empty", Way.SKIPPED)
    advice = decision_advice(condition, [1], call, inside=inside)
    assert (
        "run the line at train.py:1, in which a library makes all_gather_into_tensor, on rank 1, too" in advice
    ) is inside
    assert ("with its own part, or an empty one" in advice) is not inside


@pytest.mark.parametrize(
    ("loop", "start"),
    [
        ("for epoch in range(first, EPOCHS)", "(compare `first`, from which it counts, on the ranks)"),
        ("for epoch in range(0, EPOCHS)", ""),
        ("for epoch in range(EPOCHS)", ""),
        ("for x in loader", ""),
    ],
)
def test_of_a_loop_that_counts_from_a_loaded_value_that_value_is_to_be_compared(loop: str, start: str) -> None:
    advice = decision_advice(Condition(FILE, 3, loop, Way.LEFT), (0,))
    assert advice.startswith(f"let the loop `{loop}` at line 3 run equally often") and ("compare" in advice) is bool(
        start
    )
    assert start in advice
