"""Memory on paper: the formulas, the decision tree, the link, and incompatible options."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.nn.functional as F

from distdiag.cli import main
from distdiag.errors import DistdiagError
from distdiag.probekit.command import main as command
from distdiag.probekit.command.options import parse
from distdiag.probekit.command.paper import parse_parameters
from distdiag.probekit.step.advice import recommend
from distdiag.probekit.step.memory import SavedBytes
from distdiag.probekit.step.on_paper import compute
from distdiag.probekit.step.paper import Link, Sheet, read_link
from distdiag.probekit.step.sizes import Counted, Stated
from distdiag.train.models import build_model
from tests.jobs import REPOSITORY, unwrapped

GIB = 2**30


def sheet(line: str, batch: int = 32, link: float | None = None) -> Sheet:
    """Return the sheet of a command line with --params."""
    options = parse(["step", *line.split()])
    paper = options.paper
    assert paper is not None and paper.parameters is not None and paper.memory_bytes is not None
    sizes = Stated(paper.parameters, paper.layers, paper.activations_bytes)
    return Sheet(sizes, paper, paper.memory_bytes, batch, Link(link, "--link") if link else None)


def test_state_buffers_and_exchange_follow_the_formulas() -> None:
    """7e9 parameters in bfloat16 with AdamW: 2 + 2 + 12 bytes."""
    s = sheet("--params 7e9 --memory 80GiB --layers 32")
    ddp, fsdp, pipeline = s.row("ddp", 8), s.row("fsdp", 8), s.row("pipeline", 8)
    assert (ddp.parameters_bytes, ddp.gradients_bytes, ddp.optimizer_bytes) == (14e9, 14e9, 84e9)
    assert ddp.buffers_bytes == 14e9 and ddp.left_bytes == 80 * GIB - 126e9 and ddp.fits == "no"
    assert fsdp.state_bytes == pipeline.state_bytes == 112e9 / 8
    assert fsdp.buffers_bytes == 7e9 / 32 * (2 * 2 + 2) and pipeline.buffers_bytes == 0
    assert ddp.exchange_bytes == 2 * 7 / 8 * 14e9
    assert fsdp.exchange_bytes == 7 / 8 * (2 * 14e9 + 14e9)
    assert pipeline.exchange_bytes is None and s.row("single", 1).exchange_bytes is None


@pytest.mark.parametrize(
    ("options", "per"),
    [
        ("", (2, 2, 12)),
        ("--dtype fp16 --optimizer sgd", (2, 2, 8)),
        ("--dtype fp32", (4, 4, 8)),
        ("--dtype float32 --optimizer sgd", (4, 4, 4)),
        ("--bytes-per-param 2,4,6.5", (2, 4, 6.5)),
    ],
)
def test_bytes_per_parameter(options: str, per: tuple[float, float, float]) -> None:
    paper = parse(f"step --params 1M {options}".split()).paper
    assert paper is not None
    sizes = paper.per_parameter
    assert (sizes.weights, sizes.gradients, sizes.optimizer) == per


@pytest.mark.parametrize(("text", "count"), [("7e9", 7e9), ("7B", 7e9), ("350M", 350e6), ("1.5k", 1500), ("12", 12)])
def test_numbers_of_parameters(text: str, count: float) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize(
    ("line", "ranks", "taken", "answers"),
    [
        ("--params 1e9 --memory 80G", [1], ("single", 1), ["yes", "not known"]),
        ("--params 1e9 --memory 80G", [1, 4, 8], ("ddp", 8), ["yes", "yes", "not known", "not known"]),
        # a copy fits on one device, but not with DDP's buckets
        ("--params 1e9 --memory 16.5G", [2, 4], ("fsdp", 2), ["tight", "no", "yes", "not known", "not known"]),
        ("--params 7e9 --memory 80G", [1, 8, 64], ("fsdp", 8), ["no", "yes", "not known", "not known"]),
        ("--params 7e9 --memory 80G", [1], (None, None), ["no"]),
        ("--params 70e9 --memory 24G", [8], (None, None), ["no", "no", "no"]),
        # one gathered block is larger than the device; a stage is not
        ("--params 20e9 --layers 4 --memory 24G", [16, 4], (None, None), ["no", "no", "no"]),
        ("--params 8e9 --layers 8 --bytes-per-param 4,4,1 --memory 12G", [8], ("pipeline", 8), ["no", "no", "yes", "not computed", "not known"]),
        # activations alone do not rule out a strategy: there is accumulation
        ("--params 1e9 --memory 80G --activations 500G", [4], ("ddp", 4), ["yes, with accumulation"] * 2 + ["not known", "no"]),
    ],
)  # fmt: skip
def test_the_tree_takes_the_simplest_strategy_that_fits(
    line: str, ranks: list[int], taken: tuple[str | None, int | None], answers: list[str]
) -> None:
    advice = recommend(sheet(line), sorted(ranks))
    assert (advice.strategy, advice.ranks) == taken
    assert [d.answer for d in advice.decisions] == answers
    assert all(d.because for d in advice.decisions)


@pytest.mark.parametrize(
    "line", ["--params 7e9 --memory 24G", "--params 70e9 --memory 80G --layers 80", "--params 3e9 --memory 40G"]
)
def test_no_smaller_number_of_ranks_fits(line: str) -> None:
    s = sheet(line)
    least = recommend(s, [2]).least_ranks
    assert least is not None
    assert s.row("fsdp", least).fits != "no" and (least == 2 or s.row("fsdp", least - 1).fits == "no")


def test_accumulation_makes_the_activations_fit() -> None:
    s = sheet("--params 1e9 --memory 80G --activations 500G", batch=64)
    *_, batch = recommend(s, [4]).decisions
    assert batch.because.endswith("; accumulate 3 micro-batches of 7")  # 16 samples of 7.8 GiB in 80 - 16.8 - 8
    row = s.row("ddp", 4)
    one = 500 * GIB / 64
    assert row.left_bytes - 7 * one >= 8 * GIB > row.left_bytes - 8 * one


@pytest.mark.parametrize(
    ("strategy", "line", "answer", "says"),
    [
        ("ddp", "--params 1e9 --step-ms 1600", "yes", "375 ms at 10 GB/s"),
        ("ddp", "--params 1e9 --step-ms 600", "only if hidden", "accumulate 3 micro-batches with no_sync()"),
        ("ddp", "--params 1e9 --step-ms 100", "no", "accumulate 15 micro-batches with no_sync()"),
        ("fsdp", "--params 20e9 --step-ms 1000", "no", "HSDP"),
        ("ddp", "--params 1e9", "not known", "--step-ms"),
    ],
)
def test_the_exchange_is_compared_with_computing(strategy: str, line: str, answer: str, says: str) -> None:
    """DDP of 1e9 parameters on 16 ranks: 2 * 15/16 * 2e9 bytes at 10 GB/s take 375 ms."""
    advice = recommend(sheet(f"{line} --memory 80G", link=10.0), [16])
    link = advice.decisions[-2]
    assert (advice.strategy, link.answer) == (strategy, answer) and says in link.because


def test_the_link_is_a_number_or_a_saved_allreduce(tmp_path: Path) -> None:
    assert read_link("12.5").gbps == 12.5
    result = tmp_path / "result.json"
    rows = [{"busbw_gbps": 0.5}, {"busbw_gbps": 11.0}, {"busbw_gbps": None}]
    result.write_text(json.dumps({"schema": "distdiag.probe/1", "probe": "allreduce", "world_size": 4, "rows": rows}))
    link = read_link(str(result))
    assert link.gbps == 11.0 and link.source == f"probe allreduce on 4 ranks, {result}"
    measures = [
        {"key": "1000", "unit": "us", "values": [5.0]},
        {"key": "8000000", "unit": "us", "values": [900.0, 1000.0, 9e9]},
    ]
    saved = {"key": {"probe": "allreduce", "world_size": 4}, "noisy": False, "measures": measures}
    baseline = tmp_path / "base.json"
    baseline.write_text(json.dumps({"schema": "distdiag.probe-baseline/1", "entries": [saved]}))
    assert read_link(str(baseline)).gbps == pytest.approx(8000000 / 1e-3 * 1.5 / 1e9)  # median, 2 (n - 1) / n


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "neither a number nor a file"),
        ("{", "not JSON"),
        ("[]", "no bandwidth"),
        ('{"probe": "pairs", "rows": []}', "no bandwidth"),
        ('{"probe": "allreduce", "world_size": 2, "rows": [{"busbw_gbps": 1e99}]}', "bandwidth of 1e.99"),
        ('{"entries": [{"key": {"probe": "allreduce", "world_size": 1}, "measures": []}]}', "no bandwidth"),
    ],
)
def test_a_link_that_cannot_be_read_is_refused(content: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DistdiagError, match=says) as refused:
        read_link(str(file))
    assert refused.value.hint


@pytest.mark.parametrize("name", ["simple", "resnet18"])
def test_activations_by_formula_are_those_of_a_real_step(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name)
    saved = SavedBytes()
    images, labels = torch.rand(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)
    with saved.counting(model, images, labels):
        F.cross_entropy(model(images), labels).backward()
    assert saved.now == 0, "backward has released everything"
    sizes = Counted(name, build_model(name), torch.float32)
    assert sizes.activations("single", 1, 4) == pytest.approx(saved.peak, rel=0.02)
    assert sizes.activations("ddp", 2, 8) == sizes.activations("fsdp", 2, 8) == sizes.activations("single", 1, 4)
    whole, stage = sizes.activations("model", 2, 4), sizes.activations("pipeline", 2, 4)
    assert whole is not None and stage is not None and stage < whole < saved.peak
    half = Counted(name, build_model(name), torch.bfloat16).activations("single", 1, 4)
    assert half is not None and saved.peak * 0.5 <= half < saved.peak * 0.65  # indices of pooling stay int64


def test_a_model_is_counted_without_running_it() -> None:
    found = compute(
        parse(
            [
                "step",
                "--paper",
                "--model",
                "resnet18",
                "--memory",
                "2G",
                "--ranks",
                "1,4,16",
                "--batch-size",
                "64",
                "--dtype",
                "fp32",
            ]
        )
    )
    by_case = {(r.strategy, r.ranks): r for r in found.rows}
    assert by_case["single", 1].parameters_bytes == 4 * 11_173_962
    assert by_case["fsdp", 16].buffers_bytes is not None and ("pipeline", 16) not in by_case
    assert [n["ranks"] for n in found.details["not_possible"]] == [16, 16]
    assert found.world_size == 0 and found.verdict == "pass"
    assert found.details["recommendation"]["strategy"] == "ddp"


def test_the_command_prints_table_tree_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["probe", "step", "--params", "7e9", "--ranks", "1,8,64", "--memory", "80GiB", "--link", "25", "--ascii"]
    assert main(line) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and out.isascii()
    assert unwrapped(out).startswith(
        "pass  step: recommended: fsdp on 8 ranks for 7B parameters (bfloat16, adamw: 2 + 2 + 12 bytes for each parameter); "
        "67.0 GiB of 80.0 GiB left for activations"
    )
    assert [text[6:8] for text in lines if text[6:8] in ("1.", "2.", "3.", "4.")] == ["1.", "2.", "3.", "4."]
    cells = next(text for text in lines if text.startswith("FSDP (fully_shard)      8")).split()
    assert cells[3:] == ["1.6", "GiB", "1.6", "GiB", "9.8", "GiB", "-", "67.0", "GiB", "yes", "34.2", "GiB", "1,470.0"]
    assert "ranks, none" not in out, "no rank ran"


def test_nothing_fits_is_a_failure_with_the_number_of_ranks_that_would(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["probe", "step", "--params", "70B", "--ranks", "8", "--memory", "24G"]
    assert main([*line, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads((REPOSITORY / "docs" / "schemas" / "probe-1.json").read_text()))
    assert found["verdict"] == "fail" and found["rows"][0]["strategy"] == "single"
    assert found["details"]["recommendation"]["least_ranks"] == 44
    assert found["details"]["paper"]["memory_bytes"] == 24 * GIB
    assert main([*line, "--as", "csv"]) == 1
    columns, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert columns[2:4] == ["strategy", "ranks"] and len(rows) == 5


def test_without_a_gpu_the_memory_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["probe", "step", "--params", "7e9", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    if code == 2:
        assert found["error"]["message"] == "this host has no GPU to take the memory from"
        assert "--memory 80GiB" in found["error"]["hint"]
    else:
        assert found["details"]["paper"]["memory_from"].startswith("NVML: ")


WRONG = {
    "step --memory 80G": "--memory is for memory on paper, not for measuring",
    "step --optimizer sgd": "--optimizer is for memory on paper, not for measuring",
    "step --ranks 1,2 --link 10": "--link is for memory on paper, not for measuring",
    "allreduce --params 7e9": "--params computes the memory of a training step, not allreduce",
    "step --params 7x": "--params 7x is not a number of parameters",
    "step --params 0": "--params 0 is not a number of parameters",
    "step --params 7e9 --model resnet18": "--params and --model both give the model",
    "step --params 7e9 --nproc 2": "--params runs nothing: --nproc does not apply",
    "step --params 7e9 --device cuda": "--params runs nothing: --device does not apply",
    "step --paper --save x.json": "--paper runs nothing: --save does not apply",
    "step --params 7e9 --inject delay:rank=1,ms=5": "--params runs nothing: --inject does not apply",
    "step --params 7e9 --svg x.svg": "--params runs nothing: --svg does not apply",
    "step --paper --layers 3": "--layers is counted in the model",
    "step --params 7e9 --layers 0": "--layers 0: a model has at least one",
    "step --params 7e9 --dtype int64": "--dtype int64 is not supported on paper",
    "step --params 7e9 --bytes-per-param 2,2": "--bytes-per-param 2,2: not three sizes",
    "step --params 7e9 --bytes-per-param 2,2,-1": "--bytes-per-param 2,2,-1: not three sizes",
    "step --params 7e9 --bytes-per-param 2,2,12 --optimizer sgd": "--bytes-per-param already contains the optimizer",
    "step --params 7e9 --memory lots": "--memory 'lots' is not a size",
    "step --params 7e9 --memory 80G --link 0": "--link 0 must be above 0 GB/s",
    "step --params 7e9 --memory 80G --link none.json": "--link none.json: neither a number nor a file (No such file or directory)",
    "step --params 7e9 --step-ms 0": "--step-ms 0 must be above 0",
    "step --params 7e9 --strategies single-threads": "--strategies single-threads: needs as much memory as single",
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_a_combination_that_cannot_work_is_two_lines(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(line.split()) == 2
    out, err = capsys.readouterr()
    error, hint = err.splitlines()
    assert out == "" and error == f"distdiag: error: {WRONG[line]}" and hint.startswith("hint: ")


def test_the_command_needs_no_launcher() -> None:
    class Torchrun:
        launcher = "torchrun"

    with pytest.raises(DistdiagError, match="needs no ranks, but torchrun has started this one"):
        command._on_paper(parse(["step", "--params", "7e9"]), Torchrun())  # type: ignore[arg-type]
