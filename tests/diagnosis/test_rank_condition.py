"""Finds the condition on the rank that leads to a call, in realistic sources."""

from __future__ import annotations

import textwrap

import pytest

from distdiag.diagnosis.culprit.paths import Condition, rank_condition
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Model, Site
from tests.diagnosis.made import proved
from tests.diagnosis.waits import call, key, rank, snapshot

FILE = "/job/train.py"


def places(source: str) -> tuple[str, dict[str, int]]:
    """Return the source, and the lines that end in `# A`, `# B`, …"""
    text = textwrap.dedent(source).strip() + "\n"
    return text, {line[-1]: n for n, line in enumerate(text.splitlines(), 1) if "# " in line}


def found(source: str, mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> str | None:
    """Return the condition's line; frames are (mark, function), innermost first."""
    text, at = places(source)
    stacks = [[Site(FILE, at[m], f) for m, f in frames] for frames in (mine, theirs)]
    c = rank_condition(stacks[0], stacks[1], {FILE: text}.get)
    if c is None:
        return None
    line = text.splitlines()[c.line - 1].strip()
    assert (c.file, f"{c.text}:") == (FILE, line)
    return line


SAVE = """
    def gather(model):
        return [p.full_tensor() for p in model]  # A

    def save(model, rank):
        if rank == 0:
            torch.save(gather(model), "x")  # B
        dist.barrier()  # C

    def main(rank):
        for epoch in range(3):
            train()
            save(model, rank)  # D
"""


def test_a_call_under_if_rank_is_found() -> None:
    inside = [("A", "gather"), ("B", "save"), ("D", "main")]
    outside = [("C", "save"), ("D", "main")]
    assert found(SAVE, inside, outside) == "if rank == 0:"
    assert found(SAVE, outside, inside) is None


def test_the_frames_of_a_launcher_that_one_stack_has_are_left_out() -> None:
    """A crashed rank has a traceback from the script on, a killed one the stack of its last sample."""
    launched = [("C", "save"), ("D", "main"), ("D", "run_script")]
    assert found(SAVE, [("A", "gather"), ("B", "save"), ("D", "main")], launched) == "if rank == 0:"


@pytest.mark.parametrize(
    "condition",
    [
        "if dist.get_rank() == 0:",
        "if self.is_main_process and step % 10 == 0:",
        "if not args.local_rank:",
        "if isMaster():",
        "if self.is_world_process_zero():",
        'if int(os.environ["LOCAL_RANK"]) == 0:',
        "if args.process_index == 0:",
    ],
)
def test_all_common_tests_of_the_rank_are_recognised(condition: str) -> None:
    source = f"""
    def main(self, args, step):
        {condition}
            dist.all_reduce(x)  # A
        loss.backward()  # B
    """
    assert found(source, [("A", "main")], [("B", "main")]) == condition


@pytest.mark.parametrize(
    "condition",
    [
        "if step % 10 == 0:",
        "if ranking.best > 3:",
        'if __name__ == "__main__":',
        "if args.remainder:",
        "if threading.current_thread() is threading.main_thread():",
        "if process(batch):",
        'if os.environ["MODE"] == "offline":',
    ],
)
def test_conditions_on_other_values_are_ignored(condition: str) -> None:
    source = f"""
    {condition}
        dist.all_reduce(x)  # A
    loss.backward()  # B
    """
    assert found(source, [("A", "<module>")], [("B", "<module>")]) is None


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("r = dist.get_rank()", True),
        ("r = int(os.environ['RANK'])", True),
        ("w, r = dist.get_world_size(), dist.get_rank()", True),
        ("r = args.local_rank == 0", True),
        ("r = args.rank == 0 and args.epoch > 3", True),
        ("r = not self.is_main", True),
        ("r = not finished", False),
        ("r = DDP(net, device_ids=[rank])", False),
        ("r = dist.get_world_size()", False),
        ("r, w = pair(rank)", False),
    ],
)
def test_a_variable_that_holds_the_rank_is_recognised(given: str, asked: bool) -> None:
    source = f"""
    {given}
    if step == 60 and not r:
        evaluate()  # A
    train()  # B
    """
    assert (found(source, [("A", "<module>")], [("B", "<module>")]) is not None) is asked


EXPRESSION = """
    def evaluate(model):
        return gather(model(x))  # A

    def main(accelerator):
        for epoch in range(3):
            {}  # B
            accelerator.wait_for_everyone()  # C
"""


@pytest.mark.parametrize(
    ("line", "condition"),
    [
        ("score = evaluate(model) if accelerator.is_main_process else None", "if accelerator.is_main_process"),
        ("score = None if rank != 0 else evaluate(model)", "if rank != 0 … else"),
        ("score = rank == 0 and evaluate(model)", "rank == 0 and …"),
        ("score = evaluate(model) if epoch else None", None),
        ("score = evaluate(model) if rank == 0 else evaluate(other)", None),
    ],
)
def test_a_call_in_an_expression_that_asks_for_the_rank_is_found(line: str, condition: str | None) -> None:
    text, at = places(EXPRESSION.format(line))
    mine = [Site(FILE, at["A"], "evaluate"), Site(FILE, at["B"], "main")]
    c = rank_condition(mine, [Site(FILE, at["C"], "main")], {FILE: text}.get)
    assert c == (None if condition is None else Condition(FILE, at["B"], condition, on_rank=True))


LEFT = """
    def main(rank):
        for epoch in range(3):
            for x in loader:
                loss = model(x)
                loss.backward()  # A
                if rank == 0 and epoch == 1:
                    break
            evaluate(model)  # B
"""


def test_a_rank_that_left_the_loop_by_a_break_is_past_its_condition() -> None:
    inside, past = [("A", "main")], [("B", "main")]
    assert found(LEFT, past, inside) == "if rank == 0 and epoch == 1:"
    assert found(LEFT, inside, past) is None


def test_a_call_in_both_branches_is_not_an_extra_call() -> None:
    source = """
    def share(rank):
        if rank == 0:
            dist.broadcast(x, 0)  # A
        else:
            dist.broadcast(y, 0)  # B
        dist.barrier()  # C
    """
    assert found(source, [("A", "share")], [("C", "share")]) is None
    assert found(source, [("B", "share")], [("A", "share")]) is None


def test_an_early_return_of_the_other_ranks_is_found() -> None:
    source = """
    def log(rank, x):
        if rank != 0:
            return
        dist.all_reduce(x)  # A

    def main(rank):
        for _ in loader:
            step()  # B
            log(rank, x)  # C
    """
    assert found(source, [("A", "log"), ("C", "main")], [("B", "main")]) == "if rank != 0:"
    assert found(source, [("B", "main")], [("A", "log"), ("C", "main")]) is None


def test_two_calls_under_one_condition_do_not_differ() -> None:
    source = """
    def main(rank):
        if rank < 2:
            dist.all_reduce(x)  # A
            dist.barrier()  # B
    """
    assert found(source, [("A", "main")], [("B", "main")]) is None


def test_unreadable_source_gives_no_condition() -> None:
    site, other = Site(FILE, 3, "main"), Site(FILE, 9, "main")
    for source in ({}.get, {FILE: "def (:"}.get, {FILE: ""}.get):
        assert rank_condition([site], [other], source) is None
    assert rank_condition([], [other], {}.get) is None
    assert rank_condition([site], [Site("/job/other.py", 9, "main")], {FILE: "if rank:\n\n  x()\n"}.get) is None


BREAK = """
    def main(rank):
        for step in range(9):
            dist.all_reduce(x)  # A
            if rank == 1 and step == 5:
                break
        dist.barrier()  # B
"""


def test_a_rank_that_left_a_loop_is_not_the_only_one_that_makes_the_next_call() -> None:
    text, at = places(BREAK)
    a, b = (Site(FILE, at[m], "main") for m in ("A", "B"))
    s = snapshot(
        rank(0, call("all_reduce", 7, a), sites={key(a): 7}, user_stack=(a,)),
        rank(1, call("barrier", 7, b), sites={key(a): 6, key(b): 1}, user_stack=(b,)),
    )
    (f,) = proved(s, source={FILE: text}.get)
    assert (f.kind, f.culprits) == ("deadlock", (1,))
    condition = f"`if rank == 1 and step == 5` (line {at['A'] + 1})"
    assert f.message.startswith(f"rank 1 left the loop before all_reduce (train.py:{at['A']}): {condition}; ")
    assert "both as collective #7 of default_pg" in f.message and "leave that loop in the same round" in f.advice


def test_the_finding_of_two_ranks_names_the_condition() -> None:
    text, at = places(SAVE)
    a, b, c, d = (Site(FILE, at[m], f) for m, f in (("A", "gather"), ("B", "save"), ("C", "save"), ("D", "main")))
    s = snapshot(
        rank(0, call("all_gather", 7, a), sites={key(a): 1}, user_stack=(a, b, d)),
        rank(1, call("barrier", 7, c), sites={key(c): 1}, user_stack=(c, d)),
    )

    def verdict_with(source: dict[str, str]) -> Finding:
        (f,) = proved(s, source=source.get)
        return f

    f = verdict_with({FILE: text})
    assert (f.kind, f.cause, f.culprits, f.victims) == ("deadlock", "missing_rank", (0,), (1,))
    assert f.message.startswith("only rank 0 made ") and f": `if rank == 0` (line {at['B'] - 1}); " in f.message
    assert verdict_with({}).culprits == ()


EVALUATE = """
    def evaluate(model, loader, rank):
        if rank == 0:
            for x in loader:
                model(x)  # A
        dist.barrier()  # B

    def main(rank):
        for epoch in range(3):
            train()
            evaluate(model, loader, rank)  # C
"""


@pytest.mark.parametrize("wrapped", [True, False])
def test_the_advice_for_a_call_of_one_rank_says_how_to_make_it_equal(wrapped: bool) -> None:
    text, at = places(EVALUATE)
    a, b, c = (Site(FILE, at[m], f) for m, f in (("A", "evaluate"), ("B", "evaluate"), ("C", "main")))
    models = (Model(group="default_pg", forwards=9, synced_backwards=9),) if wrapped else ()
    s = snapshot(
        rank(0, call("broadcast", 7, a), models=models, phase="forward", user_stack=(a, c)),
        rank(1, call("barrier", 7, b), models=models, user_stack=(b, c)),
        rank(2, call("barrier", 7, b), models=models, user_stack=(b, c)),
    )
    (f,) = proved(s, source={FILE: text}.get)
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "op", (0,))
    guard = "`if rank == 0` at line 2"
    if wrapped:  # DDP broadcasts the buffers in its forward, so the forward itself must change
        assert f.advice.startswith("on rank 0 call the module inside DDP (`model.module(...)` at train.py:4")
        assert guard in f.advice
    else:
        assert f.advice == f"make broadcast at train.py:4 on all ranks or on none: {guard} keeps it to rank 0"


@pytest.mark.parametrize(
    ("guard", "culprit"),
    [
        ('if mode == "fast" and rank == 1:', 1),
        ("if dist.get_rank() == 1:", 1),
        ("if self.is_main:", 1),  # rank 1 is the main one here
        ("if rank != 0:", 0),
        ("if not self.is_main:", 0),
        ("if rank:", 0),
    ],
)
def test_an_early_return_blames_the_rank_that_its_condition_names(guard: str, culprit: int) -> None:
    """`if rank == 1: return` lets rank 1 leave; after `if rank != 0: return` rank 0 goes on alone."""
    text, at = places(f"""
        def validate(model, rank):
            {guard}
                return 0.0
            dist.all_reduce(total)  # A

        def main(rank):
            validate(model, rank)  # B
            dist.barrier()  # C
    """)
    a, b, c = (Site(FILE, at[m], f) for m, f in (("A", "validate"), ("B", "main"), ("C", "main")))
    s = snapshot(
        rank(0, call("all_reduce", 7, a), user_stack=(a, b)),
        rank(1, call("barrier", 7, c), user_stack=(c,)),
    )
    (f,) = proved(s, source={FILE: text}.get)
    assert f.culprits == (culprit,)
    guarded = f"`{guard.removesuffix(':')}` at line 2"
    if culprit == 1:
        assert f.message.startswith(f"rank 1 skipped all_reduce (train.py:4): `{guard.removesuffix(':')}` (line 2); ")
        assert f.advice.endswith(f"on all ranks or on none: {guarded} leads rank 1 past it")
    else:
        assert (
            f.message.startswith("only rank 0 made ") and f", past `{guard.removesuffix(':')}` (line 2); " in f.message
        )
        assert f.advice.endswith(f"on all ranks or on none: {guarded} keeps it to rank 0")


FIRST_ON_ONE = """
    @contextmanager
    def one_by_one():
        if {before}:
            dist.{call}()
        yield
        if dist.get_rank() == 0:
            work()
            dist.barrier()  # A

    def main():
        for part in parts:
            if stale(part):
                with one_by_one():  # B
                    prepare(part)
            loss.backward()  # C
"""


@pytest.mark.parametrize(
    ("before", "call", "asked"),
    [
        ("dist.get_rank() != 0", "barrier", False),
        ("not dist.get_rank() == 0", "barrier", False),
        ("dist.get_rank() != 0", "monitor", True),  # another call
        ("dist.get_rank() == 1", "barrier", True),  # not for all other ranks
    ],
)
def test_a_call_that_every_rank_makes_under_its_own_test_of_the_rank_is_no_call_of_one_rank(
    before: str, call: str, asked: bool
) -> None:
    inside, outside = [("A", "one_by_one"), ("B", "main")], [("C", "main")]
    condition = found(FIRST_ON_ONE.format(before=before, call=call), inside, outside)
    assert condition == ("if dist.get_rank() == 0:" if asked else None)
