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
    return [(code, site.line) for code, site in kept([[Site(FILE, line, "main")]], {FILE: text}.get)]


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
