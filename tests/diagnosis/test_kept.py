"""Lines that keep something across steps, as the source shows them."""

from __future__ import annotations

from textwrap import dedent

import pytest

from distdiag.diagnosis.kept import kept
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.rules import memory
from tests.diagnosis.made import findings, job, rank

FILE = "/job/train.py"
BANK = dedent("""\
    class Bank:
        def push(self, feats):
            row = []
            row.append(feats)
            self.rows.append(feats.repeat(1, 16))

        def add(self, n):
            self.n += n

    def main():
        names, losses = [], []
        names.append(model)
        for x in loader:
            batch = []
            batch.append(x)
            losses.append(loss.item())
            names.append(f"step {n}")
            bank.push(feats)
            meter.add(x)
            loss.backward()
""")


def at(text: str, line: int = 20) -> list[tuple[str, int]]:
    return [(x.text, x.site.line) for x in kept([[Site(FILE, line, "main")]], {FILE: text}.get)]


def test_only_what_outlives_the_step_is_named() -> None:
    assert at(BANK) == [("self.rows.append(feats.repeat(1, 16))", 5)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("losses.append(loss)", True),  # made before the loop, with its graph
        ("losses.append(loss.item())", False),
        ("batch.append(loss)", False),  # made anew in every step
        ("self.outputs[name].append(out)", True),
        ("self.points.append((step, loss.item()))", False),
        ("self.points.append((step, loss))", True),
        ("self.mean = 0.9 * self.mean + 0.1 * loss", True),
        ("self.total += loss", True),
        ("self.total += loss.item()", False),
        ("self.mean = 0.9 * self.mean + 0.1 * loss.detach()", False),
        ("self.last = loss", False),
    ],
)
def test_a_list_is_kept_if_it_was_made_before_the_loop(line: str, found: bool) -> None:
    text = BANK.replace("losses.append(loss.item())", line).replace("bank.push(feats)", "pass")
    assert at(text) == ([(line, 16)] if found else [])


def test_none_of_many_is_named_and_an_unreadable_source_shows_none() -> None:
    assert at(BANK.replace("pass", "").replace("meter.add(x)", "a.b.append(x); c.d.append(x); e.f.append(x)")) != []
    many = BANK.replace(
        "        losses.append(loss.item())\n", "".join(f"        log.x{i}.append(x)\n" for i in range(3))
    )
    assert at(many, 22) == at("def (:") == at("") == []


def test_the_finding_of_growing_memory_names_the_line() -> None:
    points = tuple((float(t), int(4e8 + 10e6 * t)) for t in range(60))
    flat = tuple((t, 400_000_000) for t, _ in points)
    stack = (Site(FILE, 20, "main"), Site(FILE, 22, "<module>"))
    s = job(rank(0, memory=points, warm_since_s=5.0, user_stack=stack), rank(1, memory=flat, warm_since_s=5.0))
    (found,) = (f for f in findings(s, memory, source={FILE: BANK + "\nmain()\n"}.get) if f.cause == "growth")
    assert found.advice.count("self.rows.append") == 1
    assert "`self.rows.append(feats.repeat(1, 16))` at train.py:5 in push" in found.advice
    assert "train.py" not in found.message, "memory does not grow where the rank happens to be"


POOL = dedent("""\
    class Window:
        def put(self, frame):
            if self.frames is None:
                return frame
            LINES

    def main():
        for x in loader:
            window.put(net(x))
""")


def limit_of(lines: str, *, before: str = "", step: int = 0) -> list[tuple[str, str | None]]:
    text = before + "\n" + POOL.replace("LINES", lines.replace("\n", "\n        "))
    line = text.splitlines().index("        window.put(net(x))") + 1
    found = kept([[Site(FILE, line, "main")]], {FILE: text}.get, step=step)
    return [(x.text, x.limit and x.limit[0]) for x in found]


PUT = "self.frames.append(frame)"


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        (f"if len(self.frames) < self.most:\n    {PUT}", "if len(self.frames) < self.most"),
        (f"if len(self) < 4096:\n    {PUT}", "if len(self) < 4096"),
        (f"if self.used < self.capacity:\n    self.used += 1\n    {PUT}", "if self.used < self.capacity"),
        (f"if len(self.frames) >= 4096:\n    return\n{PUT}", "if len(self.frames) >= 4096"),
        (f"if 4096 <= len(self.frames):\n    self.frames[self.at] = 1\nelse:\n    {PUT}", "if 4096 <= len(self.frames)"),
        (f"{PUT}\nif len(self.frames) > self.most:\n    self.frames.pop(0)", "if len(self.frames) > self.most"),
        (f"{PUT}\nwhile len(self.frames) > self.most:\n    del self.frames[0]", "while len(self.frames) > self.most"),
        (f"if not self.is_full():\n    {PUT}", "if not self.is_full()"),
        (f"if self.full:\n    return\n{PUT}", "if self.full"),
        # no limit of this container
        (PUT, None),
        (f"if len(self.frames) > 0:\n    {PUT}", None),
        (f"if len(self.frames) != 0:\n    {PUT}", None),
        (f"if len(self.others) < self.most:\n    {PUT}", None),
        (f"if len(frame) < self.most:\n    {PUT}", None),
        (f"if self.full:\n    {PUT}", None),
        (f"if not self.full_precision:\n    {PUT}", None),
        (f"if self.used < self.capacity:\n    {PUT}", None),
        (f"if self.step >= self.max_steps:\n    return\nself.step += 1\n{PUT}", None),
        (f"if step < args.max_steps:\n    {PUT}", None),
        (f"{PUT}\nif len(self.frames) > self.most:\n    print(self.frames[-1])", None),
    ],
)  # fmt: skip
def test_a_test_of_its_own_length_is_a_limit(lines: str, limit: str | None) -> None:
    assert limit_of(lines) == [(PUT, limit)]


def test_a_deque_and_a_cache_have_limits() -> None:
    made = "class Made:\n    def __init__(self, n):\n        self.frames = deque([], maxlen={})"
    assert limit_of(PUT, before=made.format("n")) == [(PUT, "self.frames = deque([], maxlen=n)")]
    assert limit_of(PUT, before=made.format("None")) == [(PUT, None)]
    assert limit_of(PUT, before=made.format("20"), step=19) == [(PUT, "self.frames = deque([], maxlen=20)")]
    assert limit_of(PUT, before=made.format("20"), step=20) == [], "it is full: something else grows"
    assert limit_of("self.frames.append(value)", before=made.format("n")) == [], "a meter's numbers"
    cached = "@functools.lru_cache({})\ndef put(x): ..."
    assert limit_of("pass", before=cached.format("maxsize=None")) == [("@functools.lru_cache(maxsize=None)", None)]
    assert limit_of("pass", before=cached.format("9000"), step=50) == [("@functools.lru_cache(9000)",) * 2]
    assert (
        limit_of("pass", before=cached.format(""), step=500) == limit_of("pass", before="@cache\ndef put(): ...") == []
    )


def test_an_item_counts_if_it_is_set_once() -> None:
    put = "self.frames[key] = frame"
    assert limit_of(put) == [], "it may overwrite"
    assert limit_of(f"if key not in self.frames:\n    {put}") == [(put, None)]
    assert limit_of(f"if key in self.frames:\n    return\n{put}") == [(put, None)]
    assert limit_of(f"if key in self.frames:\n    {put}") == []
    assert limit_of(f"if len(self.frames) < 9:\n    {put}") == [(put, "if len(self.frames) < 9")]


def test_what_has_a_limit_is_not_named_next_to_what_has_none() -> None:
    assert limit_of(f"self.all.append(frame)\nif len(self.frames) < 9:\n    {PUT}") == [
        ("self.all.append(frame)", None)
    ]


def test_what_workers_keep_is_read_from_the_functions_that_they_call() -> None:
    text = "class Data:\n    def __getitem__(self, i):\n        if i not in self.seen:\n            self.seen[i] = decode(i)\n        return self.seen[i]\n\ndef main():\n    for x in loader:\n        self.losses.append(net(x))\n"
    stack = [[Site(FILE, 9, "main")]]
    assert [x.text for x in kept(stack, {FILE: text}.get, in_workers=True)] == ["self.seen[i] = decode(i)"]
    assert [x.text for x in kept(stack, {FILE: text}.get)] == ["self.losses.append(net(x))"]


@pytest.mark.parametrize("full", [True, False])
def test_growth_towards_a_limit_is_an_info(full: bool) -> None:
    points = tuple((float(t), int(4e8 + 10e6 * t)) for t in range(60))
    text = POOL.replace("LINES", f"if len(self.frames) < self.most:\n            {PUT}" if full else PUT)
    stack = (Site(FILE, len(text.splitlines()), "main"),)
    s = job(*(rank(q, memory=points, warm_since_s=5.0, user_stack=stack) for q in range(2)))
    (found,) = (f for f in findings(s, memory, source={FILE: text}.get) if f.cause == "growth")
    assert (found.severity == "info") == full
    assert ("fills up to its limit: `if len(self.frames) < self.most` at train.py:5 in put" in found.message) == full
    assert f"`{PUT}` at train.py:{6 if full else 5} in put" in found.advice
