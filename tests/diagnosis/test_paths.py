"""Where the paths of two ranks diverge: conditions, loops and handlers in the source."""

from __future__ import annotations

import ast

import pytest

from distdiag.diagnosis.culprit.callers import call_stack, torn, with_callers
from distdiag.diagnosis.culprit.paths import (
    Pair,
    Way,
    conditions_between,
    leaving,
    rank_condition,
    short_rounds,
)
from distdiag.diagnosis.model.rank_tests import reads_clock
from distdiag.diagnosis.model.snapshot import Site
from tests.diagnosis.test_rank_condition import FILE, places


def part(source: str, mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> list[str]:
    """Return the texts of the conditions; frames are (mark, function), innermost first."""
    text, at = places(source)
    stacks = [[Site(FILE, at[m], f) for m, f in frames] for frames in (mine, theirs)]
    return [c.text for c in conditions_between(stacks[0], stacks[1], {FILE: text}.get)]


STEP = """
    def train_step(model, opt, x, y):
        loss = lossf(model(x), y)  # A
        if loss.item() < 0.2:
            return None
        loss.backward()  # B

    def main():
        for step in range(9):
            if step % 10 == 0:
                log()
            train_step(model, opt, x, y)  # C
"""

FIT = """
    class Trainer:
        def fit(self, batches):
            for self.epoch in range(9):
                for x in batches:
                    self.step(x)  # A
                    if self.bad(x):
                        continue
                if self.should_stop:  # on "#1", too
                    break
    def main():
        trainer.fit(batches)  # B
        dist.barrier()  # C
"""

BUDGET = """
    class Timer:
        def over(self):
            return time.time() > self.end
    def one(x):
        if x is None:
            return
        loss.backward()  # A
    def fit():
        while {test}:
            if bad(x):
                continue
            one(x)  # B
            loss.backward()  # C
            {last}
        all_reduce(loss)  # D
"""

AFTER = """
    def main():
        while not done:
            loss.backward()  # A
        if config.evaluate:
            all_gather(parts)  # B
"""

FLUSH = """
    def flush(self):
        if self.items:
            gather(self.items)  # A

    def sync(self):
        if self.n == 0:
            return 0.0
        all_reduce(self.n)  # B

    def main():
        for step in range(9):
            all_reduce(g)  # C
            c.flush()  # D
            m.sync()  # E
"""

STREAM = """
    def main():
        while True:
            try:
                x = next(it)
            except StopIteration:
                break
            loss.backward()  # A
        all_reduce(total)  # B
"""


SKIPS = """
    def main():
        for x in records:
            try:
                step(x)  # A
            except ValueError:
                log(x)
                continue
            all_reduce(mean)  # B
        barrier()  # C
"""

ENDS = """
    def main():
        for x in records:
            loss = step(x)
            if loss.isnan():
                continue
            loss.backward()  # A
            all_reduce(loss)  # B
"""

CAUGHT = """
    def fit(model, x):
        try:
            loss = model(x)  # A
            loss.backward()  # B
        except RuntimeError as e:
            opt.zero_grad()
"""

TRIES = """
    def main():
        try:
            train(model)  # A
        except KeyboardInterrupt:
            print("stopping early")
        except RuntimeError:
            raise
        all_reduce(loss)  # B
"""

RETURNS = """
    def finetune():
        first = restore()
        for epoch in range(first, 9):
            for x in loader:
                loss.backward()  # A

    def update(x):
        if dist.is_initialized():
            all_reduce(x)  # B

    def fetch(batches):
        while True:
            try:
                x = next(batches)
            except StopIteration:
                break
            except (RuntimeError, OSError):
                break
            loss.backward()  # C

    def main():
        finetune()  # D
        fetch(batches)  # E
        update(x)  # F
        barrier()  # G
"""

ROUNDS = """
    def main():
        for step in range(9):
            while tokens < 256:
                loss.backward()  # A
            all_reduce(tokens)  # B
        for epoch in range(start, 5):
            for x in loader:
                loss.backward()  # C
        all_reduce(loss)  # D
"""


LOGGED = """
    def log(self, values):
        if not self.enabled:
            return
        for v in values:
            if callable(v):
                v()  # B

    def compute():
        gather(states)  # C

    def main():
        log(values)  # E
        loss.backward()  # F
"""


@pytest.mark.parametrize(
    ("source", "mine", "theirs", "conditions"),
    [
        pytest.param(STEP, "A train_step C main", "B train_step C main", ["if loss.item() < 0.2"], id="returns before"),
        pytest.param(FIT, "C main", "A fit B main", ["if self.should_stop"], id="breaks out of the outer loop"),
        pytest.param(
            FIT, "A fit B main", "C main", ["if self.should_stop"], id="the others break out of the outer loop"
        ),
        pytest.param(FLUSH, "A flush D main", "C main", ["if self.items"], id="enters a block"),
        pytest.param(FLUSH, "C main", "B sync E main", ["if self.n == 0"], id="leaves a function"),
        pytest.param(STREAM, "B main", "A main", ["except StopIteration"], id="an exception ends the loop"),
        pytest.param(FIT, "", "A fit B main", ["if self.should_stop"], id="has ended"),
        pytest.param(STEP, "C main", "C main", [], id="one site"),
        pytest.param(SKIPS, "A main", "B main", ["except ValueError"], id="a round earlier, an exception skipped it"),
        pytest.param(ENDS, "A main", "B main", ["if loss.isnan()"], id="a round earlier, a condition skipped it"),
        pytest.param(CAUGHT, "A fit", "B fit", ["except RuntimeError as e"], id="an exception between two calls"),
        pytest.param(TRIES, "B main", "A main", ["except KeyboardInterrupt"], id="an exception ended it, caught"),
        pytest.param(ROUNDS, "A main", "B main", ["while tokens < 256"], id="one more round of an inner loop"),
        pytest.param(ROUNDS, "D main", "C main", ["for epoch in range(start, 5)"], id="its loop ended earlier"),
        pytest.param(
            RETURNS,
            "G main",
            "A finetune D main",
            ["for epoch in range(first, 9)"],
            id="a callee's loop ended earlier",
        ),
        pytest.param(
            AFTER, "B main", "A main", ["while not done"], id="the others are still in the loop before the branch"
        ),
        pytest.param(
            AFTER.replace("main():", "main():\n      for epoch in range(9):"),
            "B main",
            "A main",
            ["if config.evaluate", "while not done"],
            id="the others may have passed the branch in the epoch before",
        ),
        *(
            pytest.param(BUDGET.format(test=test, last=last), "D fit", there, [found], id=f"{test}, {last}, {there[0]}")
            for test, last, found in (
                ("time.time() < end", "pass", "while time.time() < end"),
                ("not timer.over()", "pass", "while not timer.over()"),
                ("tokens < total", "pass", "while tokens < total"),
                ("True", "if loss < good: break", "if loss < good: break"),
            )
            for there in ("C fit", "A one B fit")
        ),
        pytest.param(
            BUDGET.format(test="step < steps", last="pass"), "D fit", "C fit", ["if bad(x)"], id="a counted loop"
        ),
        pytest.param(RETURNS, "A finetune D main", "G main", [], id="it is still in a callee's loop"),
        pytest.param(RETURNS, "B update F main", "G main", [], id="a condition that is the same on all ranks"),
        pytest.param(
            LOGGED,
            "C compute B log E main",
            "F main",
            ["if not self.enabled", "if callable(v)"],
            id="which of two kept the other away is not known",
        ),
        pytest.param(
            RETURNS,
            "G main",
            "C fetch E main",
            ["except StopIteration", "except (RuntimeError, OSError)"],
            id="two handlers",
        ),
    ],
)
def test_conditions_at_which_two_paths_diverge_are_found(
    source: str, mine: str, theirs: str, conditions: list[str]
) -> None:
    a, b = (list(zip(x.split()[::2], x.split()[1::2], strict=True)) for x in (mine, theirs))
    assert part(source, a, b) == conditions


@pytest.mark.parametrize(
    ("text", "test", "reads"),
    [
        ("took = time.time() - start", "took > 9", True),
        ("end = start + 9", "time.monotonic() < end", True),
        ("def over(self):\n    return not now() < self.end", "timer.over()", True),
        ("state = State(since=time.time())", "state.loss < 1", False),
        ("def run():\n    return loss, time.time()", "run() < 1", False),
        ("import time", "time.loss < 1", False),
    ],
)
def test_a_test_of_the_time_is_told_from_one_of_what_has_a_time(text: str, test: str, reads: bool) -> None:
    assert reads_clock(ast.parse(test, mode="eval").body, text) is reads


def test_a_parameter_that_a_caller_gives_a_comparison_of_the_rank_is_a_condition_on_the_rank() -> None:
    text, at = places(LOGGED)
    main = "log = Log(enabled=rank == 0)\nlog.log(values)\nloss.backward()\n"
    sources = {FILE: text, "/job/main.py": main}
    mine = (Site(FILE, at["C"], "compute"), Site(FILE, at["B"], "log"), Site("/job/main.py", 2, "<module>"))
    theirs = (Site("/job/main.py", 3, "<module>"),)
    assert [c.text for c in conditions_between(mine, theirs, sources.get)] == ["if not self.enabled"]
    found = rank_condition(mine, theirs, sources.get)
    assert found is not None and found.line == at["B"] - 4


ACTOR = """
    import utils

    def push(policy):
        broadcast(policy)  # A

    def update(x):
        all_reduce(x)  # B

    def actor(policy, progress):
        push(policy)  # C
        for _ in range(4):
            episode = play(policy)  # D
            if len(episode) < 2:
                continue
            send(episode)  # E
        progress.update(1)

    def learner(policy):
        push(policy)
        push(policy)  # F
        recv()  # G
"""


def test_callers_of_a_call_on_a_device_are_found_after_its_function_has_returned() -> None:
    text, at = places(ACTOR)

    def sites(frames: str) -> list[Site]:
        return [Site(FILE, at[m], f) for m, f in zip(frames.split()[::2], frames.split()[1::2], strict=True)]

    def callers(call: str, host: str) -> list[int]:
        return [x.line for x in call_stack(sites(call), sites(host), {FILE: text}.get)[1:]]

    assert callers("A push", "D actor") == [at["C"]]
    assert callers("A push", "G learner") == []  # two calls: which of them is not known
    assert callers("B update", "D actor") == []  # the method of another object
    stack = call_stack(sites("A push"), sites("D actor"), {FILE: text}.get)
    assert [c.text for c in conditions_between(stack, sites("E actor"), {FILE: text}.get)] == ["if len(episode) < 2"]


def test_the_condition_around_sys_exit_is_found() -> None:
    text, at = places("""
        def check(loss):
            if not isfinite(loss):
                sys.exit(0)  # A

        def main():
            for x in batches:
                check(model(x))
                loss.backward()  # B
                if done(x):
                    break
    """)
    theirs = (Site(FILE, at["B"], "main"),)

    def left_at(place: Site | None) -> list[str]:
        return [c.text for c in leaving(place, theirs, {FILE: text}.get)]

    assert left_at(Site(FILE, at["A"], "check")) == ["if not isfinite(loss)"]
    assert left_at(Site(FILE, at["B"], "main")) == left_at(None) == ["if done(x)"]


def test_a_stale_caller_of_a_killed_rank_is_corrected() -> None:
    """The sample of the caller is older than the call in which the rank was killed."""
    text, at = places(FLUSH)
    flush, old, now = Site(FILE, at["A"], "flush"), Site(FILE, at["C"], "main"), Site(FILE, at["D"], "main")
    assert with_callers((flush, old), {FILE: text}.get) == (flush, now)
    assert with_callers((flush, now), {FILE: text}.get) == (flush, now)
    assert with_callers((flush, old), {}.get) == (flush, old)


def test_a_source_that_cannot_be_read_has_no_conditions() -> None:
    mine, theirs = [Site(FILE, 3, "main")], [Site(FILE, 9, "main")]
    for source in ({}.get, {FILE: "def (:"}.get, {FILE: ""}.get):
        assert conditions_between(mine, theirs, source) == []


SHARED_HELPER = """
    def fetch(first):
        if first is None:
            recv(x)  # A

    def train():
        for step in range(9):
            fetch(None)  # B
            if step % 3 == 0 and stage.last:
                preview()  # C

    def preview():
        fetch(None)  # D
"""

SHORT_ROUNDS = """
    def main():
        for step in range({rounds}):
            y = model(x)  # A
            if y.isnan().any():
                continue
            y.backward()
        barrier()  # B
"""


def test_a_condition_in_a_helper_that_both_ranks_are_in_has_led_neither_away() -> None:
    mine = [("A", "fetch"), ("D", "preview"), ("C", "train")]
    assert part(SHARED_HELPER, mine, [("A", "fetch"), ("B", "train")]) == ["if step % 3 == 0 and stage.last"]


@pytest.mark.parametrize(
    ("rounds", "found"),
    [("9", ["if y.isnan().any()"]), ("len(loader.dataset)", ["for step in range(len(loader.dataset))"])],
)
def test_a_rank_past_a_loop_with_as_many_rounds_everywhere_has_ended_one_early(rounds: str, found: list[str]) -> None:
    assert part(SHORT_ROUNDS.format(rounds=rounds), [("B", "main")], [("A", "main")]) == found


CALLBACKS = """
    def fit(self):
        for x in self.{items}:
            x.begins()  # A
        step()  # B

    def begins(self):
        if self.path.exists():
            broadcast()  # C
"""


@pytest.mark.parametrize(
    ("items", "found"),
    [("callbacks", ["if self.path.exists()"]), ("parts", ["for x in self.parts"])],
)
def test_of_the_callbacks_that_all_ranks_have_one_went_another_way(items: str, found: list[str]) -> None:
    source = CALLBACKS.format(items=items)
    assert part(source, [("B", "fit")], [("C", "begins"), ("A", "fit")]) == found


RELAYED = """
    class Node:
        def __init__(self, place):
            self.tail, self.heard = place == 3, None

        def incoming(self):
            for _ in range(4):
                x = recv(self.before)  # A
                if self.tail:
                    continue
                if x.numel() == 0:
                    continue
                self.heard = x
                yield x

        def work(self):
            for x in self.incoming():  # B
                if not self.tail:
                    send(self.after, x)  # C
                if self.heard is x:
                    send(self.log, x)  # D
"""


def test_what_never_changes_in_a_rank_did_not_lead_it_away_this_time() -> None:
    text, at = places(RELAYED)
    caller = (Site(FILE, at["B"], "work"),)
    stack = (Site(FILE, at["A"], "incoming"), *caller)
    assert [c.text for c in short_rounds(stack, {FILE: text}.get)] == ["if x.numel() == 0"]
    sends = {mark: (Site(FILE, at[mark], "work"),) for mark in "CD"}
    texts = {
        mark: [c.text for c in conditions_between(caller, to, {FILE: text}.get, Pair(changed=True))]
        for mark, to in sends.items()
    }
    assert texts == {"C": [], "D": ["if self.heard is x"]}
    assert [c.text for c in conditions_between(caller, sends["C"], {FILE: text}.get)] == ["if not self.tail"]


EPOCHS = """
    def train(log, batches, length={default}):
        for epoch in range(9):
            for i in range(length):
                loss.backward()  # A
            log.info("epoch %d  %s", epoch, meters)  # B

    {call}
"""


@pytest.mark.parametrize(
    ("default", "call", "found"),
    [
        ("60", "train(log, batches)", []),
        ("None", "train(log, batches, length=60)", []),
        ("60", "train(log, batches, 50)", []),
        ("60", "train(log, batches, len(batches))", ["for i in range(length)"]),
        ("60", "train(log, *more)", ["for i in range(length)"]),
        ("60", "", ["for i in range(length)"]),  # another file may call it with anything
    ],
)
def test_a_loop_over_a_number_that_every_call_gives_as_a_literal_has_not_ended_early(
    default: str, call: str, found: list[str]
) -> None:
    text = EPOCHS.format(default=default, call=call)
    assert part(text, [("B", "train")], [("A", "train")]) == found


def test_a_loop_over_an_option_of_the_command_line_has_as_many_rounds_on_all_ranks() -> None:
    text = """
    def main():
        args = parser.parse_args()
        for i in range(args.steps):
            loss.backward()  # A
        barrier()  # B
    """
    assert part(text, [("B", "main")], [("A", "main")]) == []
    text = text.replace("for i", "args.steps = len(loader)\n        for i")
    assert part(text, [("B", "main")], [("A", "main")]) == ["for i in range(args.steps)"]


def test_an_option_that_holds_the_rank_differs_between_ranks() -> None:
    text = """
    def save():
        barrier()  # A
    def main():
        args = parser.parse_args()
        if args.local_rank == 0:
            save()  # B
        step()  # C
    """
    assert part(text, [("A", "save"), ("B", "main")], [("C", "main")]) == ["if args.local_rank == 0"]


def test_frames_are_equal_whether_or_not_one_knows_its_callers() -> None:
    """The site of a call in a helper has its callers, those of a call in a loop have none."""
    text, at = places("""
    def finish():
        barrier()  # A

    def run(batches):
        while not stopped():
            train(batches)  # B
        finish()  # C

    def main():
        run(load())  # D

    main()  # E
    """)
    site = Site(FILE, at["E"], "<module>")
    mine: tuple[Site, ...] = (site,)
    for line, function in ((at["D"], "main"), (at["C"], "run"), (at["A"], "finish")):
        site = Site(FILE, line, function, site)
        mine = (site, *mine)
    theirs = Site(FILE, at["B"], "run"), Site(FILE, at["D"], "main"), Site(FILE, at["E"], "<module>")
    assert [(c.text, c.way) for c in conditions_between(mine, theirs, {FILE: text}.get)] == [
        ("while not stopped()", Way.LEFT)
    ]


def test_a_loop_that_an_exception_can_have_left_has_not_ended_early_for_sure() -> None:
    text, at = places("""
    def fit(batch):
        try:
            for part in batch.split(4):
                loss(part)  # A
        except MemoryError:
            oom = True
        agree(oom)  # B
    """)
    mine, theirs = (Site(FILE, at["B"], "fit"),), (Site(FILE, at["A"], "fit"),)
    assert [c.text for c in conditions_between(mine, theirs, {FILE: text}.get, Pair(again=True))] == [
        "except MemoryError"
    ]


@pytest.mark.parametrize(
    ("merged", "loop"),
    [
        ("[x for part in gather(states[name]) for x in part]", "for name in sorted(states)"),
        ("{k: gather(v) for k, v in states[name].items()}", "for metric in metrics.values()"),
    ],
)
def test_a_loop_has_ended_early_if_no_comprehension_makes_its_call_again(merged: str, loop: str) -> None:
    text, at = places(f"""
    def sync(states):
        for name in sorted(states):
            merged[name] = {merged}  # A
    def compute():
        for metric in metrics.values():
            metric.sync()  # B
        return merged
    def main():
        compute()  # C
        broadcast()  # D
    def gather(value):
        all_gather(value)  # E
    """)
    theirs = [Site(FILE, at[m], f) for m, f in (("E", "gather"), ("A", "sync"), ("B", "compute"), ("C", "main"))]
    found = conditions_between([Site(FILE, at["D"], "main")], theirs, {FILE: text}.get, Pair(again=True))
    assert [c.text for c in found] == [loop]


SOLVE = """
    def solve(f, x):
        for it in range(limit):
            residual = norm(f(x))
            all_reduce(residual)  # A
            if residual < tol:
                break
    def average(model):
        for p in model.parameters():
            if p.grad is not None:
                all_reduce(p.grad)  # B
    def main():
        for x in loader:
            solve(model, x)  # C
            average(model)  # D
"""


@pytest.mark.parametrize(("stays", "text"), [(True, "if residual < tol"), (False, "if p.grad is not None")])
def test_a_rank_that_makes_its_call_once_more_has_stayed_in_the_loop_around_it(stays: bool, text: str) -> None:
    """It has not skipped what the others do later in the round."""
    source, at = places(SOLVE)
    mine, theirs = (
        [Site(FILE, at[m], f) for m, f in frames]
        for frames in ((("A", "solve"), ("C", "main")), (("B", "average"), ("D", "main")))
    )
    (found,) = conditions_between(mine, theirs, {FILE: source}.get, Pair(stays=stays))
    assert (found.text, found.way) == (text, Way.STAYED if stays else Way.SKIPPED)


def test_one_more_pass_is_one_of_the_innermost_loop_that_can_differ() -> None:
    """A loop over a model's blocks has as many rounds on every rank."""
    source, at = places("""
    def __init__(self):
        self.blocks = nn.ModuleList()
    def forward(self, x):
        for block in self.blocks:
            x = block(x)  # A
    def log_probs(samples):
        for ids in micro_batches(samples):
            model(ids)  # B
    def main():
        for samples in loader:
            log_probs(samples)  # C
            reduce_metrics()  # D
    """)
    mine = [Site(FILE, at[m], f) for m, f in (("A", "forward"), ("B", "log_probs"), ("C", "main"))]
    (found,) = conditions_between(mine, [Site(FILE, at["D"], "main")], {FILE: source}.get, Pair(stays=True))
    assert (found.text, found.way) == ("for ids in micro_batches(samples)", Way.MORE)


@pytest.mark.parametrize(("stays", "way"), [(True, Way.AGAIN), (False, Way.ALONE)])
def test_what_a_handler_tries_again_has_been_made_once_by_all(stays: bool, way: Way) -> None:
    text, at = places("""
    def robust(save, *args):
        for attempt in range(3):
            try:
                return save(*args)  # A
            except OSError as e:
                log.info(e)
    def save(names):
        all_gather(names)  # B
        os.makedirs(names[0])
    def main():
        for batch in batches:
            step(batch)  # C
            robust(save, names)  # D
    """)
    mine = [Site(FILE, at[m], f) for m, f in (("B", "save"), ("A", "robust"), ("D", "main"))]
    (found,) = conditions_between(mine, [Site(FILE, at["C"], "main")], {FILE: text}.get, Pair(stays=stays))
    assert (found.text, found.way) == ("except OSError as e", way)


def test_a_comprehension_under_an_older_sample_gets_the_callers_of_its_own_function() -> None:
    text, at = places("""
    def norms(model):
        return {k: all_gather(w) for k, w in model.items()}  # A
    def fit():
        step()  # B
        log(norms(model))  # C
    """)
    inner, old = Site(FILE, at["A"], "<dictcomp>"), Site(FILE, at["B"], "fit")
    expected = (inner, Site(FILE, at["A"], "norms"), Site(FILE, at["C"], "fit"))
    assert torn((inner, old), {FILE: text}.get) and not torn(expected, {FILE: text}.get)
    assert with_callers((inner, old), {FILE: text}.get) == expected


@pytest.mark.parametrize(
    ("inner", "text"),
    [("for part in order(batch).chunk(parts)", "if divergence > limit"), ("while left(batch)", "while left(batch)")],
)
def test_a_break_of_the_outer_loop_comes_before_the_end_of_an_inner_for(inner: str, text: str) -> None:
    source, at = places(f"""
    def update(batch):
        for epoch in range(epochs):
            {inner}:
                all_reduce(grads)  # A
            if divergence > limit:
                break
    def main():
        for batch in rollouts:
            update(batch)  # B
            all_gather(batch)  # C
    """)
    theirs = [Site(FILE, at["A"], "update"), Site(FILE, at["B"], "main")]
    (found,) = conditions_between([Site(FILE, at["C"], "main")], theirs, {FILE: source}.get, Pair(again=True))
    assert (found.text, found.way) == (text, Way.LEFT)


@pytest.mark.parametrize(("leave", "ways"), [("break", (Way.STAYED, Way.LEFT)), ("return", (Way.ALONE, Way.SKIPPED))])
def test_a_break_before_a_call_ends_the_loop_and_not_only_this_round(leave: str, ways: tuple[Way, Way]) -> None:
    text, at = places(f"""
    def run(self):
        for x in self.batches():
            if self.done():
                {leave}
            loss.backward()  # A
    def main(trainer):
        trainer.run()  # B
        barrier()  # C
    """)
    inside, after = [Site(FILE, at["A"], "run"), Site(FILE, at["B"], "main")], [Site(FILE, at["C"], "main")]
    found = [conditions_between(*stacks, {FILE: text}.get) for stacks in ((inside, after), (after, inside))]
    assert [(c.text, c.way) for (c,) in found] == [("if self.done()", way) for way in ways]


@pytest.mark.parametrize(
    ("inner", "alone", "texts"),
    [
        ("if p.norm() > 3", True, ["for hook in self.hooks", "if p.norm() > 3"]),
        ("if p.norm() > 3", False, ["if p.norm() > 3"]),
    ],
)
def test_a_condition_in_a_function_that_the_others_may_never_have_run_is_not_named_alone(
    inner: str, alone: bool, texts: list[str]
) -> None:
    source, at = places(f"""
    def norms(p):
        {inner}:
            all_reduce(p)  # A
    def run(self):
        for batch in self.loader:
            for hook in self.hooks:
                norms(batch)  # B
            self.step(batch)  # C
    """)
    mine, theirs = [Site(FILE, at["A"], "norms"), Site(FILE, at["B"], "run")], [Site(FILE, at["C"], "run")]
    assert [c.text for c in conditions_between(mine, theirs, {FILE: source}.get, Pair(alone=alone))] == texts


CACHED = """
    @{decorator}
    def vocabulary(name):
        if not name:
            return None
        all_gather(name)  # A

    def main(rank):
        for batch in loader:
            if {test}:
                vocabulary(batch.name)  # B
            all_reduce(batch)  # C
"""


@pytest.mark.parametrize(
    ("decorator", "test", "text"),
    [
        ("functools.lru_cache(maxsize=None)", "batch", "@functools.lru_cache(maxsize=None)"),
        ("cache", "batch", "@cache"),
        ("cache", "rank == 0", "if rank == 0"),
        ("torch.no_grad()", "batch", "if not name"),
    ],
)
def test_kept_results_come_before_other_conditions_but_not_before_the_rank(
    decorator: str, test: str, text: str
) -> None:
    source, at = places(CACHED.format(decorator=decorator, test=test))
    inside, after = [Site(FILE, at["A"], "vocabulary"), Site(FILE, at["B"], "main")], [Site(FILE, at["C"], "main")]
    skipped = conditions_between(after, inside, {FILE: source}.get)[0]
    assert (skipped.text, skipped.way) == (text, Way.SKIPPED)
    assert conditions_between(inside, after, {FILE: source}.get)[0].way is Way.ALONE


def test_a_rank_that_went_past_the_way_out_of_the_others_is_told_from_one_under_a_condition() -> None:
    text, at = places(STEP)
    forward, backward = ([Site(FILE, at[m], "train_step")] for m in "AB")
    (left,), (past,) = (
        conditions_between(*stacks, {FILE: text}.get) for stacks in ((forward, backward), (backward, forward))
    )
    assert (left.way, left.past, past.way, past.past) == (Way.SKIPPED, False, Way.ALONE, True)


def test_the_class_of_gpus_is_equal_on_all_ranks() -> None:
    text = """
    def main():
        if torch.cuda.is_available():
            all_reduce(x)  # A
        barrier()  # B
    """
    assert part(text, [("A", "main")], [("B", "main")]) == []
