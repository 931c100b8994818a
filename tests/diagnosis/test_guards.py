"""The guards of a line: which conditions decide whether it runs, read from the source."""

from __future__ import annotations

import textwrap

import pytest

from distdiag.diagnosis.culprit.paths import Condition, Pair, conditions_between, only_under, rank_condition
from distdiag.diagnosis.model import guards, syntax
from distdiag.diagnosis.model.snapshot import Site
from tests.diagnosis.test_rank_condition import FILE, places


def texts(source: str) -> list[str]:
    """Return `KIND text` of the guards of the line that ends in `# A`."""
    text, at = places(source)
    return [f"{g.kind.name} {g.text}" for g in guards.on_stack([Site(FILE, at["A"])], {FILE: text}.get)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if a:\n    f()\nelif b:\n    g()  # A", ["HOLDS if a … else", "HOLDS elif b"]),
        ("if a:\n    return\ng()  # A", ["PASSED if a"]),
        ("if a:\n    f()\nelse:\n    raise E\ng()  # A", ["PASSED if a … else"]),
        ("with lock:\n    if a:\n        os._exit(1)\ng()  # A", ["PASSED if a"]),
        ("for x in xs:\n    if a:\n        continue\n    g()  # A", ["INSIDE for x in xs", "PASSED if a"]),
        ("for x in xs:\n    if a:\n        break\ng()  # A", ["ENDED for x in xs"]),
        ("with b:\n    for x in xs:\n        f()\ng()  # A", ["ENDED for x in xs"]),
        ("while a:\n    f()\nelse:\n    g()  # A", ["ENDED while a"]),
        ("for x in xs:\n    for y in x:\n        if a:\n            return\n    g()  # A",
         ["INSIDE for x in xs", "PASSED if a", "ENDED for y in x"]),
        ("try:\n    g()  # A\nexcept E:\n    pass\nexcept F:\n    raise", ["PASSED except E"]),
        ("try:\n    g()  # A\nexcept E as e:\n    if a:\n        return\n    raise", ["PASSED except E as e"]),
        ("try:\n    f()\nexcept E:\n    g()  # A", ["HOLDS except E"]),
        ("try:\n    f()\nexcept E:\n    return\ng()  # A", ["PASSED except E"]),
        ("try:\n    f()\nexcept E as e:\n    if a:\n        return\ng()  # A", ["PASSED except E as e"]),
        ("try:\n    f()\nexcept E as e:\n    if a:\n        g()  # A", ["HOLDS except E as e", "HOLDS if a"]),
        ("try:\n    f()\nexcept E:\n    pass\nelse:\n    g()  # A", ["PASSED except E"]),
        ("try:\n    f()\nexcept E:\n    pass\nfinally:\n    g()  # A", []),
        ("with suppress(E):\n    g()  # A", ["PASSED with suppress(E)"]),
        ("match a:\n    case 1:\n        f()\n    case _:\n        g()  # A", ["HOLDS match a: case _"]),
        ("match a:\n    case 1:\n        return\ng()  # A", ["PASSED match a: case 1"]),
        ("if a:\n    f()\nelse:\n    g()  # A", ["HOLDS if a … else"]),
        ("if a:\n    f()\nelif (b\n      and c):\n    g()  # A", ["HOLDS if a … else", "HOLDS elif b and c"]),
        ("while (\n    a  # first\n    and b\n):\n    g()  # A", ["INSIDE while a and b"]),
        ("for x in zip(\n    a,\n    b,\n):\n    g()  # A", ["INSIDE for x in zip(a, b)"]),
        ("x = f() if a else g(1)  # A", []),
        ("x = None if a else g()  # A", ["HOLDS if a … else"]),
        ("for x in xs:\n    if a:\n        break\nelse:\n    g()  # A", ["ENDED for x in xs", "PASSED if a"]),
        ("x = g() if a else None  # A", ["HOLDS if a"]),
        ("x = a and g()  # A", ["HOLDS a and …"]),
        ("x = [g(y) for y in ys if a]  # A", ["REPEATED x = [g(y) for y in ys if a]", "HOLDS if a"]),
        ("x = {k: g(y) for k, y in ys if a}  # A", ["REPEATED x = {k: g(y) for k, y in ys if a}", "HOLDS if a"]),
        ("x = [y for y in g()]  # A", []),
        ("with g() if a else nothing:  # A\n    pass", ["HOLDS if a"]),
        ("if a: g()  # A", ["HOLDS if a: g()"]),
        ("if h(): g()  # A", []),  # either call can be meant
        ("def inner():\n    if a:\n        return\n    g()  # A", ["PASSED if a"]),
    ],
)  # fmt: skip
def test_guards_are_the_branches_that_a_line_needs(body: str, expected: list[str]) -> None:
    """The `if` around the function's definition is none of them."""
    source = "if __name__:\n    def f():\n" + textwrap.indent(body, " " * 8)
    assert texts(source) == expected


def test_lines_are_those_that_python_counts() -> None:
    text = "x = 1\n\f\nif a:  # after a form feed, which ends no line\r    g()\r\n"
    (guard,) = guards.on_stack([Site(FILE, 4)], {FILE: text}.get)
    assert (guard.line, guard.text) == (3, "if a")


DEEP = "if a:\n" + "".join(f"{' ' * i}if a:\n" for i in range(1, 90)) + " " * 90 + "g()  # A\n"


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "-" * 200_000 + "1\n",
        "x = " + "(" * 5_000 + ")" * 5_000 + "\n",
        "x = a" + ".b" * 100_000 + "\n",
        "if a:\n    pass\n" + "elif a:\n    pass\n" * 5_000,
        "x = 1\n" * (syntax.MAX_TEXT // 6 + 1),
        "\0",
        "def (:",
    ],
    ids=["signs", "brackets", "attributes", "elif", "long", "nul", "syntax"],
)
def test_a_hostile_source_has_no_guards_and_does_no_harm(text: str) -> None:
    sites = [Site(FILE, 2, "<module>")], [Site(FILE, 4, "<module>")]
    assert isinstance(conditions_between(*sites, {FILE: text}.get), list)
    assert rank_condition(*sites, {FILE: text}.get) is None
    assert guards.may_end_early(text, 2)


def test_deep_blocks_and_many_exits_are_read() -> None:
    assert len(texts(DEEP)) == 90
    chain = "if a:\n    pass\n" + "elif b:\n    pass\n" * 150 + "else:\n    g()  # A\n"
    assert len(texts(chain)) == 151
    assert len(texts("def f():\n" + "    if a:\n        return\n" * 5_000 + "    g()  # A\n")) == 5_000


@pytest.mark.parametrize(
    ("test", "asks"),
    [
        ("trainer.is_global_zero", True),
        ("run.is_chief", True),
        ("accelerator.is_local_main_process", True),
        ("self.should_save", True),
        ("is_rank_zero()", True),
        ("boss()", True),
        ("self.writes", True),
        ("self.other", False),
        ("lora_rank > 4", False),
        ("main_loss > 3", False),
    ],
)
def test_the_words_and_functions_for_a_certain_rank_are_conditions_on_it(test: str, asks: bool) -> None:
    text, at = places(f"""
        def boss():
            return dist.get_rank() == 0

        class Run:
            @property
            def writes(self):
                return self.rank == 0

            @property
            def other(self):
                return self.n == 0

        def main(self, trainer):
            if {test}:
                save()  # A
            barrier()  # B
    """)
    mine, theirs = ([Site(FILE, at[mark], "main")] for mark in "AB")
    assert (rank_condition(mine, theirs, {FILE: text}.get) is not None) is asks


DIVERGE = """
    STEPS = 40

    def value(self):
        if self.n:
            all_reduce(self.n)  # V

    def upload(blob):
        for attempt in range(3):
            try:
                put(blob)
                break
            except ConnectionError:
                barrier()  # R
        barrier()  # U

    def main(rank):
        for step in range(STEPS):
            loss.backward()  # B
            if step % args.every == 0:
                value()  # C
            if rank == 0:
                if full():
                    return
                broadcast(model)  # S
            if rank == 0 and step == 5:
                for x in loader:
                    evaluate(x)  # E
        barrier()  # Z
"""


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        pytest.param("B main", "V value C main", ["if self.n"], id="an interval is equal on all ranks"),
        pytest.param("R upload", "U upload", ["except ConnectionError"], id="the handler around the extra call"),
        pytest.param("Z main", "B main", [], id="a loop with a constant number of rounds"),
        pytest.param("B main", "S main", ["if rank == 0"], id="only one rank evaluates what is inside"),
        pytest.param("Z main", "E main", ["if rank == 0 and step == 5"], id="not the loop inside a rank's branch"),
    ],
)
def test_a_condition_counts_only_if_both_evaluated_it_and_it_can_differ(
    mine: str, theirs: str, expected: list[str]
) -> None:
    text, at = places(DIVERGE)

    def stack(frames: str) -> list[Site]:
        words = frames.split()
        return [Site(FILE, at[mark], name) for mark, name in zip(words[::2], words[1::2], strict=True)]

    found = conditions_between(stack(mine), stack(theirs), {FILE: text}.get)
    assert [c.text for c in found] == expected


def test_the_call_in_one_branch_of_an_expression_is_chosen_by_its_name() -> None:
    text = "with nullcontext() if last else no_sync():\n    x = net.head(y) if use else net.tail(y)\n"
    assert only_under("head", FILE, {FILE: text}.get) == Condition(FILE, 2, "if use")
    assert only_under("tail", FILE, {FILE: text}.get) is None


ACCUMULATE = """
    def main():
        for x in loader:
            with nullcontext() if full else model.no_sync():
                loss = model(x)
                loss.backward()  # B
        gather(done)  # Z

    class Mixture:
        def __init__(self):
            self.experts = nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x):
            for expert in self.experts:
                if rows.numel():
                    y = expert(x)  # E

    def step():
        loss = net(x)  # M
        loss.backward()  # L
"""


def test_no_sync_is_a_condition_of_the_gradients_and_a_list_of_modules_is_equal_on_all_ranks() -> None:
    text, at = places(ACCUMULATE)
    site = {mark: Site(FILE, line, "main") for mark, line in at.items()}
    in_loop = conditions_between([site["Z"]], [site["B"]], {FILE: text}.get)
    assert [c.text for c in in_loop] == ["for x in loader"]
    # the rank has run the loop as often: it has not ended early
    counted = conditions_between([site["Z"]], [site["B"]], {FILE: text}.get, Pair(as_often=lambda _, node: True))
    assert [c.text for c in counted] == ["if full"]
    expert = [Site(FILE, at["E"], "forward"), Site(FILE, at["M"], "step")]
    found = conditions_between([Site(FILE, at["L"], "step")], expert, {FILE: text}.get)
    assert [c.text for c in found] == ["if rows.numel()"]


HOOKS = """
    def reduce(expert, group):
        for p in expert.parameters():
            if p.grad is not None:
                all_reduce(p.grad, group)  # E

    def step():
        reduce(expert, group)  # M
        norm(trunk)  # L
"""


def test_what_a_module_lists_is_equally_long_on_all_ranks() -> None:
    text, at = places(HOOKS)
    theirs = [Site(FILE, at["E"], "reduce"), Site(FILE, at["M"], "step")]
    for loop in ("expert.parameters()", "enumerate(expert.parameters())", "self.expert.named_modules()"):
        source = text.replace("expert.parameters()", loop)
        found = conditions_between([Site(FILE, at["L"], "step")], theirs, {FILE: source}.get)
        assert [c.text for c in found] == ["if p.grad is not None"]
    of_data = text.replace("expert.parameters()", "batch.parts()")
    found = conditions_between([Site(FILE, at["L"], "step")], theirs, {FILE: of_data}.get)
    assert [c.text for c in found] == ["for p in batch.parts()"]


@pytest.mark.parametrize(("learners", "uneven"), [("(0, 1)", False), ("(0, *found())", True), ("[0, 1]", True)])
def test_a_tuple_of_literals_is_equally_long_on_all_ranks(learners: str, uneven: bool) -> None:
    source = f"LEARNERS, SIM = {learners}, 2\nfor who in LEARNERS:\n    send(x, who)\nrecv(x)\n"
    found = conditions_between([Site(FILE, 4, "main")], [Site(FILE, 3, "main")], {FILE: source}.get)
    assert [c.text for c in found] == (["for who in LEARNERS"] if uneven else [])
