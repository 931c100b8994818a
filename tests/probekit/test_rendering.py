"""One result in every format that the contract names."""

from __future__ import annotations

import csv
import json
from typing import Any
from xml.etree import ElementTree

import pytest

from distdiag.errors import DistdiagError
from distdiag.probekit.command import rendering
from distdiag.probekit.command.options import parse
from distdiag.probekit.verdict import decide
from distdiag.probekit.verdict.result import Verdict

KEYS = ["schema", "probe", "world_size", "backend", "device", "dtype", "verdict", "reasons"]


@pytest.fixture
def result(make_result: Any, make_row: Any):
    made = make_result([make_row(1024, 312.4), make_row(2**26, 40_000.0, late_rank=1, skew_us=900.0)])
    decide.judge_collective(made, None, [])
    return made


def text(result: Any, *arguments: str) -> str:
    return rendering.render([result], parse(list(arguments), "allreduce"))


def test_json_follows_the_contract(result: Any):
    data = json.loads(text(result, "--json"))
    assert list(data)[: len(KEYS)] == KEYS and data["schema"] == "distdiag.probe/1"
    assert {"ceilings", "host_noise", "rows", "fit"} <= set(data)
    row = data["rows"][0]
    assert {"bytes", "iterations", "time_us", "algbw_gbps", "busbw_gbps", "skew_us", "late_rank", "correct"} <= set(row)
    assert list(row["time_us"]) == ["min", "p50", "p95", "max", "ci95"] and len(row["time_us"]["ci95"]) == 2
    assert row["late_rank"] is None and data["rows"][1]["late_rank"] == 1
    assert "measures" not in data


def test_nan_and_infinity_are_null_in_json(result: Any):
    result.rows[0].skew_us = float("nan")
    assert json.loads(text(result, "--json"))["rows"][0]["skew_us"] is None


def test_the_table_begins_with_the_verdict(result: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    lines = text(result).splitlines()
    assert lines[0].startswith("pass  allreduce: correct at all 2 sizes")
    assert any("1 KiB" in line and "312.4" in line for line in lines)
    assert any("rank 1" in line for line in lines)


def test_the_reasons_and_notes_fit_80_columns(result: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    result.reasons, result.notes = ["a reason of many words, " * 9] * 2, ["a note of many words, " * 9]
    lines = [line for line in text(result).splitlines() if "words" in line]
    assert len(lines) >= 9 and max(map(len, lines)) <= 80


def test_ascii_is_ascii_and_colour_only_when_forced(result: Any, monkeypatch: pytest.MonkeyPatch):
    assert text(result, "--ascii").isascii()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert text(result).startswith("\033[32mpass\033[0m")
    assert text(result, "-o", "FILE").startswith("pass  ")
    monkeypatch.setenv("FORCE_COLOR", "0")
    assert text(result).startswith("pass  ")


def test_csv_has_one_line_per_size(result: Any):
    rows = list(csv.reader(text(result, "--as", "csv").splitlines()))
    assert rows[0][:4] == ["probe", "verdict", "size", "n"] and len(rows) == 3
    assert rows[2][0] == "allreduce" and float(rows[2][rows[0].index("p50 us")]) == 40_000.0


@pytest.mark.parametrize(
    ("word", "tag"), [(Verdict.PASS, None), (Verdict.FAIL, "failure"), (Verdict.INCONCLUSIVE, "skipped")]
)
def test_junit_output_has_one_case_with_the_verdict(result: Any, word: Verdict, tag: str | None):
    result.verdict = word
    suite = ElementTree.fromstring(text(result, "--as", "junit"))
    case = suite.find("testcase")
    assert suite.get("tests") == "1" and case is not None and case.get("name") == "allreduce"
    assert suite.get("failures") == ("1" if word is Verdict.FAIL else "0")
    assert {child.tag for child in case} == {"system-out"} | ({tag} if tag else set())


def test_nccl_tests_output_has_its_columns(result: Any):
    lines = [line for line in text(result, "--as", "nccl-tests").splitlines() if not line.startswith("#")]
    fields = lines[1].split()
    assert fields[:5] == ["67108864", "16777216", "float", "sum", "-1"]
    assert fields[5:9] == ["N/A"] * 4  # all_reduce is measured in place
    assert [float(f) for f in fields[9:12]] == [40000.0, 1.68, 1.68] and fields[12] == "0"


def test_nccl_tests_has_no_table_for_everything():
    with pytest.raises(DistdiagError, match="no table for barrier"):
        rendering.check_output(parse(["--as", "nccl-tests"], "barrier"))


def test_all_is_one_verdict_and_one_line_per_probe(result: Any, make_result: Any, make_row: Any, monkeypatch: Any):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    other = make_result([make_row()], noisy=True, probe="broadcast")
    decide.judge_collective(other, None, [])
    options = parse(["all"])
    lines = rendering.render([result, other], options).splitlines()
    assert lines[0] == "inconclusive  2 probes: 1 pass, 1 inconclusive"
    assert lines[1].strip().startswith("others used up to 1.4 of 2 CPUs during 1 of them")
    assert lines[3].startswith("pass") and "allreduce" in lines[3]
    assert lines[4].startswith("inconclusive") and len(lines) == 5  # the noise is mentioned once
    data = rendering.as_json([result, other], options)
    assert data["probe"] == "all" and data["verdict"] == "inconclusive" and len(data["probes"]) == 2  # type: ignore[arg-type]
    assert all(str(r).startswith("broadcast: ") for r in data["reasons"])  # type: ignore[union-attr]
