"""The verdict for CI: on a line of the repository, nothing of a job's text taken for markup, and stable fingerprints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Certainty, Finding, Report, Severity, State, Where
from distdiag.report.formats import FORMATS, fingerprint, places, repository

ROOT = Path("/repo")
HOSTILE = "a%b\n::error::forged, <script>alert(1)</script> [x](y) @all ]]> \x1b[31m\u202e `c` |"


def where(file: str, line: int, function: str = "main", rank: int = 1) -> Where:
    return Where(rank=rank, file=file, line=line, function=function, state="collective")


HANG = Finding(
    kind="deadlock",
    cause="missing_rank",
    severity=Severity.ERROR,
    certainty=Certainty.PROVED,
    culprits=(1,),
    victims=(0,),
    message="rank 1 skipped all_reduce: `if n > 0` (line 3)",
    cost="the job makes no progress",
    advice="call it on all ranks",
    where=(where("/repo/src/train.py", 3), where("/repo/../etc/passwd", 1), where("/usr/lib/x.py", 9)),
    waiting=(where("/repo/src/loop.py", 7, rank=0),),
)
SLOW = Finding(kind="straggler", cause="data", severity=Severity.WARNING, message=HOSTILE, advice=HOSTILE)
CLEARED = msgspec.structs.replace(HANG, cause="rank_exited", cleared_s=3.0)
REPORT = Report(run="R", state=State.DEADLOCKED, world_size=2, ranks_seen=2, findings=(SLOW, CLEARED, HANG))


def test_only_lines_of_the_repository_are_places() -> None:
    assert list(places(HANG, ROOT)) == [("src/train.py", 3), ("src/loop.py", 7)]


def test_github_has_a_command_per_finding_and_none_of_the_jobs_own() -> None:
    first, second = FORMATS["github"](REPORT, ROOT).split("\n")
    assert first.startswith("::error file=src/train.py,line=3,title=distdiag deadlock/missing_rank::rank 1 skipped")
    assert (
        second.startswith("::warning title=distdiag straggler/data::a%25b") and "%3A" not in second.partition("::a")[2]
    )
    assert "\x1b" not in second and "\u202e" not in second


def test_gitlab_has_what_it_needs() -> None:
    (issue,) = json.loads(FORMATS["gitlab"](REPORT, ROOT))
    assert issue["location"] == {"path": "src/train.py", "lines": {"begin": 3}} and issue["severity"] == "critical"
    assert re.fullmatch("[0-9a-f]{32}", issue["fingerprint"]) and issue["check_name"] == "deadlock/missing_rank"


def test_a_fingerprint_stays_when_rank_line_and_numbers_change() -> None:
    moved = msgspec.structs.replace(
        HANG, culprits=(3,), message="rank 3 …", where=(where("/repo/src/train.py", 30, rank=3),), waiting=HANG.waiting
    )
    other = msgspec.structs.replace(HANG, where=(where("/repo/src/train.py", 3, "evaluate"),))
    assert fingerprint(moved, ROOT) == fingerprint(HANG, ROOT) != fingerprint(other, ROOT)


def test_sarif_names_rule_level_and_lines() -> None:
    log = json.loads(FORMATS["sarif"](REPORT, ROOT))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0" and run["tool"]["driver"]["name"] == "distdiag"
    assert [r["level"] for r in run["results"]] == ["error", "warning"]
    assert {r["ruleId"] for r in run["results"]} == {r["id"] for r in run["tool"]["driver"]["rules"]}
    (location,) = run["results"][0]["locations"]
    assert location["physicalLocation"] == {"artifactLocation": {"uri": "src/train.py"}, "region": {"startLine": 3}}
    assert run["results"][1]["locations"] == []


@pytest.mark.parametrize(
    ("report", "tests", "failures"),
    [
        (REPORT, 2, 2),
        (Report(state=State.ENDED), 1, 0),
        (Report(state=State.FAILED, state_text="killed by <b>"), 1, 1),
    ],
)
def test_junit_fails_for_each_finding_and_for_a_failed_job(report: Report, tests: int, failures: int) -> None:
    suite = ElementTree.fromstring(FORMATS["junit"](report, ROOT))
    assert (suite.get("tests"), suite.get("failures")) == (str(tests), str(failures))
    assert len(suite.findall("testcase")) == tests and len(suite.findall("testcase/failure")) == failures


def test_markdown_shows_code_and_obeys_no_markup_of_the_job() -> None:
    text = FORMATS["markdown"](REPORT, ROOT)
    assert "`if n > 0`" in text and "`src/train.py:3`" in text and "rank_exited" not in text
    for taken in ("<script", "[x]", "@all", "\x1b", "\n::error"):
        assert taken not in text
    assert FORMATS["markdown"](Report(state=State.ENDED), ROOT).endswith("Nothing found.")


def test_the_repository_is_the_nearest_directory_with_git(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert repository(tmp_path / "a" / "b") == tmp_path


PARTS = (
    "`",
    "``<img src=x>",
    "\x1b]0;x\x07",
    "\n::error::x",
    "\u202e",
    "\ud800",
    "\ufffe",
    "]]>",
    "&lt;",
    "a b",
    "%0A",
    "\r",
)


@pytest.mark.parametrize("text", ["".join(PARTS), "```<img src=x>`", *PARTS])
@pytest.mark.parametrize("form", FORMATS)
def test_no_text_of_a_run_breaks_a_format(form: str, text: str) -> None:
    """Also kinds, states, certainties and file names come from files that may be forged."""
    finding = Finding(
        kind=text, cause=text, certainty=text, severity=Severity.ERROR, message=text, cost=text, advice=text,
        where=(where(f"/repo/a{text}.py", 3, text),),
    )  # fmt: skip
    written = FORMATS[form](Report(state=text, state_text=text, findings=(finding,), notes=(text,)), ROOT)
    written.encode()
    assert all(c == "\n" or c.isprintable() for c in written)
    if form == "junit":
        ElementTree.fromstring(written)
    elif form in ("sarif", "gitlab"):
        json.loads(written)
    elif form == "github":
        assert len(written.splitlines()) == 1
    else:
        # code as Markdown finds it: between two equal runs of backticks
        assert "<img" not in re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", written)
        assert "&\\#" not in written


def test_a_message_has_no_link_in_sarif() -> None:
    odd = msgspec.structs.replace(HANG, message="[all is well](https://example.org)")
    (result,) = json.loads(FORMATS["sarif"](Report(findings=(odd,)), ROOT))["runs"][0]["results"]
    assert "](" not in result["message"]["text"] and "all is well" in result["message"]["text"]


def test_a_path_is_a_uri_in_sarif() -> None:
    odd = msgspec.structs.replace(HANG, where=(where("/repo/a b:c%.py", 3),), waiting=())
    (result,) = json.loads(FORMATS["sarif"](Report(findings=(odd,)), ROOT))["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b%3Ac%25.py"
