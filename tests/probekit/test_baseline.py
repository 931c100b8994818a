"""A result is compared with a baseline by a significance test and an effect size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distdiag.errors import DistdiagError
from distdiag.probekit.command import again
from distdiag.probekit.command.options import parse
from distdiag.probekit.verdict import baseline
from distdiag.probekit.verdict.result import Measure, Result, Verdict


def measures(seed: int, factor: float = 1.0, n: int = 16) -> list[Measure]:
    rng = np.random.default_rng(seed)
    return [Measure(str(size), "us", (rng.normal(100, 4, n) * factor).tolist()) for size in (1024, 4096, 16384)]


@pytest.fixture
def saved(make_result: Any, make_row: Any, tmp_path: Path) -> list[baseline.Entry]:
    file = tmp_path / "base.json"
    baseline.save(str(file), [make_result([make_row()], measures=measures(1))])
    return baseline.load(str(file))


def compared(result: Result, entries: list[baseline.Entry], second: list[Measure] | None = None) -> Result:
    baseline.compare(result, entries, 0.10, lambda _: second)
    return result


def test_the_same_machine_passes(saved: Any, make_result: Any, make_row: Any):
    result = compared(make_result([make_row()], measures=measures(2)), saved)
    assert result.verdict is Verdict.PASS and "no slower than the baseline" in result.reasons[-1]
    assert result.comparison is not None and len(result.comparison) == 3


def test_a_slower_machine_fails_with_test_and_effect_size(saved: Any, make_result: Any, make_row: Any):
    result = compared(make_result([make_row()], measures=measures(3, 1.3)), saved, measures(13, 1.3))
    assert result.verdict is Verdict.FAIL
    assert "in two measurements" in result.reasons[-1] and " KiB by " in result.reasons[-1]
    assert "slower than the baseline at 3 of 3" in result.reasons[-1] and "Cliff's delta" in result.reasons[-1]


def test_an_outlier_passes_if_the_second_measurement_is_normal(saved: Any, make_result: Any, make_row: Any):
    result = compared(make_result([make_row()], measures=measures(3, 1.8)), saved, measures(14))
    assert result.verdict is Verdict.PASS and "in one measurement of two" in result.reasons[-1]
    assert result.comparison is not None and not any(r["slower"] for r in result.comparison)


def test_only_sizes_slower_in_both_measurements_fail(saved: Any, make_result: Any, make_row: Any):
    second = [*measures(15)[:2], measures(16, 1.8)[2]]
    result = compared(make_result([make_row()], measures=measures(3, 1.8)), saved, second)
    assert result.verdict is Verdict.FAIL and "at 1 of 3, in two measurements: 16 KiB by" in result.reasons[-1]


def test_slower_without_a_second_measurement_is_inconclusive(saved: Any, make_result: Any, make_row: Any):
    result = compared(make_result([make_row()], measures=measures(3, 1.8)), saved)
    assert result.verdict is Verdict.INCONCLUSIVE and "repeat it" in result.reasons[-1]


def test_a_significant_but_small_difference_passes(saved: Any, make_result: Any, make_row: Any):
    result = compared(make_result([make_row()], measures=measures(4, 1.06, n=200)), saved)
    assert result.verdict is Verdict.PASS
    assert result.comparison is not None and max(r["p_value"] for r in result.comparison) < 0.01


def test_faster_passes(saved: Any, make_result: Any, make_row: Any):
    assert compared(make_result([make_row()], measures=measures(5, 0.5)), saved).verdict is Verdict.PASS


def test_slower_on_a_busy_host_is_inconclusive(saved: Any, make_result: Any, make_row: Any):
    result = compared(make_result([make_row()], noisy=True, measures=measures(6, 1.5)), saved)
    assert result.verdict is Verdict.INCONCLUSIVE and "busy" in result.reasons[-1]


def test_a_baseline_of_a_busy_host_proves_nothing(make_result: Any, make_row: Any, tmp_path: Path):
    file = str(tmp_path / "base.json")
    baseline.save(file, [make_result([make_row()], noisy=True, measures=measures(1, 2.0))])
    result = compared(make_result([make_row()], measures=measures(2)), baseline.load(file))
    assert result.verdict is Verdict.INCONCLUSIVE and "of a busy host" in result.reasons[-1]


@pytest.mark.parametrize("noisy", [False, True])
def test_a_second_measurement_on_a_busy_host_confirms_nothing(
    make_result: Any, make_row: Any, monkeypatch: pytest.MonkeyPatch, noisy: bool
):
    result = make_result([make_row()], measures=measures(3, 1.8))

    def measured(command: list[str], **_: Any) -> None:
        baseline.save(command[-1], [make_result([make_row()], noisy, measures=measures(13, 1.8))])

    monkeypatch.setattr(again, "command_of", lambda _result, _options, save: [str(save)])
    monkeypatch.setattr(again.subprocess, "run", measured)
    assert (again.measure(result, parse(["allreduce"])) is None) is noisy


def test_too_few_repeats_are_inconclusive(saved: Any, make_result: Any, make_row: Any):
    result = compared(make_result([make_row()], measures=measures(7, n=3)), saved)
    assert result.verdict is Verdict.INCONCLUSIVE and "too few repeats" in result.reasons[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"world_size": 4}, "world_size: 2 there, 4 here"),
        ({"backend": "nccl"}, "backend"),
        ({"versions": {"torch": "2.10.0"}}, "torch: 2.13.0 there, 2.10.0 here"),
        ({"details": {"host_class": "aarch64 other x96"}}, "host_class"),
        ({"probe": "broadcast"}, "the baseline has no broadcast (it has allreduce)"),
    ],
)
def test_a_baseline_of_other_conditions_is_refused(
    saved: Any, make_result: Any, make_row: Any, change: dict[str, Any], says: str
):
    with pytest.raises(DistdiagError) as e:
        compared(make_result([make_row()], measures=measures(8), **change), saved)
    assert says in e.value.message and "--save" in e.value.hint


@pytest.mark.parametrize("name", ["allreduce", "dataloader", "step", "all"])
def test_the_second_measurement_has_the_same_options(make_result: Any, make_row: Any, name: str):
    asked = [
        "--nproc",
        "2",
        "--min-bytes",
        "4K",
        "--max-bytes",
        "1M",
        "--factor",
        "8",
        "--step-ms",
        "5",
        "--budget",
        "9",
    ]
    options = parse([name, *asked, "--workers", "0,2", "--against", "good.json"])
    probe = "allreduce" if name == "all" else name
    result = make_result([make_row()], probe=probe)
    words = again.command_of(result, options, Path("kept.json"))
    assert words[1:4] == ["-m", "distdiag", "probe"]
    second = parse(words[4:])
    assert (second.name, second.nproc, second.save, second.against) == (probe, result.world_size, "kept.json", None)
    for field in (
        "min_bytes",
        "max_bytes",
        "factor",
        "dtype",
        "budget_s",
        "precision",
        "timeout_s",
        "step_ms",
        "workers",
    ):
        assert getattr(second, field) == getattr(options, field), field
    if name != "all":
        assert second.batch_size == options.batch_size
