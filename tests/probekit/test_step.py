"""The cost of a step under each strategy: intervals, speed-ups, memory by formula, and cases that cannot run."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from distdiag.errors import DistdiagError
from distdiag.probekit.command.options import parse
from distdiag.probekit.command.paper import PerParameter
from distdiag.probekit.measure.noise import BlockNoise, over_blocks, usable_cpus
from distdiag.probekit.measure.probe import load_probe
from distdiag.probekit.step import possible, rounds, rows, show, svg
from distdiag.probekit.step.blocks import Block
from distdiag.probekit.step.memory import StateBytes, expected_state, gradient_bytes, measured_state
from distdiag.probekit.step.possible import Case, Machine, why_not
from distdiag.probekit.step.sizes import Counted
from distdiag.probekit.verdict.result import Result, Verdict
from distdiag.terms.statistics import interval_of_rounds
from distdiag.train.models import SimpleCNN, build_model, count_parameters

CPU = Machine("cpu", "gloo", 0)
STATE = StateBytes(100, 100, 100)


def block(strategy: str, ranks: int, ms: float, threads: int = 1, quiet: float = 0.0) -> Block:
    """Return a block of four steps of about `ms`."""
    times = [ms, ms * 1.02, ms * 0.98, ms]
    alone = strategy in ("single", "single-threads")
    noise = BlockNoise(0.0, usable_cpus(), ranks)
    without = [quiet] * 4 if quiet else []
    return Block(
        Case(strategy, ranks), strategy, 1 if alone else ranks, threads, times, without, {}, STATE, STATE, noise=noise
    )


def result_of(blocks: list[Block], batch: int = 50) -> Result:
    found = Result("step", 2, "gloo", "cpu")
    found.rows = rows.rows_of(blocks, batch, "cpu")
    found.host_noise = over_blocks([b.noise for b in blocks if b.noise is not None])
    found.details = {"model": "A<B>&C", "global_batch": batch, "rounds": 3, "not_possible": []}
    rows.judge(found)
    return found


def test_rows_have_time_epoch_speed_up_and_intervals() -> None:
    """Every round is slower than the previous one for all cases: the times' intervals are wide, the ratio's is narrow."""
    blocks = [b for f in (1.0, 1.1, 1.2) for b in (block("single", 1, 100 * f), block("ddp", 2, 50 * f, quiet=40 * f))]
    found = result_of(blocks)
    single, ddp = found.rows
    assert single.speed_up == 1.0 and single.rounds == ddp.rounds == 3 and single.speed_up_ci95 is None
    assert ddp.step_ms == pytest.approx(54.85, rel=0.001) and ddp.ci95_ms[0] < 50 and ddp.ci95_ms[1] > 60
    assert ddp.speed_up == pytest.approx(2.0) and ddp.efficiency == pytest.approx(1.0)
    assert ddp.speed_up_ci95 == pytest.approx((2.0, 2.0))
    assert ddp.epoch_s == pytest.approx(ddp.step_ms / 1e3 * 1000)  # 50,000 images in batches of 50
    assert ddp.exposed_ms == pytest.approx(11.0) and ddp.exposed_share == pytest.approx(11 / 54.85, rel=0.001)
    assert found.verdict is Verdict.PASS and found.reasons[0].startswith("fastest: ddp on 2, 54.8 ms a step")
    assert "DDP on 2 ranks is 2.00 [2.00, 2.00] times as fast as one process" in found.reasons


def test_exposed_communication_of_fsdp_is_its_time_in_collectives() -> None:
    blocks = [block("single", 1, 100), block("fsdp", 2, 80)]
    blocks[1].blocked_ms = [20.0, 24.0, 20.0, 20.0]
    found = result_of(blocks)
    assert found.rows[1].exposed_ms == 20.0 and found.rows[1].exposed_share == pytest.approx(0.25)
    text = "\n".join(show.drawing(found))
    assert "of FSDP: time in all_gather and reduce_scatter" in text and "not measured" not in text
    blocks[1].blocked_ms = []
    unknown = result_of(blocks)
    assert unknown.rows[1].exposed_ms is None
    assert "FSDP's exposed communication is not measured" in "\n".join(show.drawing(unknown))


def test_a_machine_that_changes_between_rounds_decides_nothing() -> None:
    found = result_of([b for ms in (100, 180, 110) for b in (block("single", 1, ms), block("ddp", 2, 100))])
    assert found.verdict is Verdict.INCONCLUSIVE
    assert (
        "too noisy to compare: a step of the single process took 100.0 ms in one round and 180.0 ms in another"
        in found.reasons
    )
    assert any("the interval contains 1, so this cannot tell which is faster" in r for r in found.reasons)
    assert "no clear difference to single" in found.reasons[1]


def test_more_ranks_than_cores_are_marked() -> None:
    many = 2 * usable_cpus()
    found = result_of([block("single", 1, 100), block("ddp", usable_cpus(), 60), block("ddp", many, 60)])
    assert [r.competing for r in found.rows] == [False, False, True]
    text = f"{many} ranks on {usable_cpus()} cores compete: their speed-up here says nothing about more machines"
    assert found.reasons[-1] == text
    marked = [row[7] for row in show.table(found).rows]
    assert [m.endswith("*") for m in marked] == [False, False, True]


def test_the_interval_of_rounds_uses_students_t() -> None:
    """ln 90, ln 100, ln 111.1: mean ln 100, deviation 0.105, t(2) = 4.30."""
    interval = interval_of_rounds([90.0, 100.0, 1000 / 9])
    half = 4.30 * math.log(10 / 9) / math.sqrt(3)
    assert interval.low == pytest.approx(100 * math.exp(-half)) and interval.high == pytest.approx(100 * math.exp(half))
    with pytest.raises(ValueError, match="two rounds"):
        interval_of_rounds([1.0])


@pytest.mark.parametrize(
    ("case", "machine", "batch", "why"),
    [
        (Case("single", 1), CPU, 32, None),
        (Case("pipeline", 1), CPU, 32, "one rank has all layers: there is nothing to divide"),
        (Case("ddp", 1), CPU, 32, "one rank has no other to exchange gradients with"),
        (Case("pipeline", 2), CPU, 32, None),
        (Case("pipeline", 2), CPU, 30, "a batch of 30 cannot be divided into 4 equal micro-batches"),
        (Case("pipeline", 8), CPU, 32, None),
        (Case("dataparallel", 4), Machine("cuda", "nccl", 2), 32, "4 copies need 4 GPUs, this host has 2"),
        (Case("single-threads", 2), Machine("cuda", "nccl", 2), 32, "one process uses a whole GPU"),
        (Case("model", 2), Machine("cuda", "gloo", 1), 32, "on CUDA it needs NCCL, and so a GPU for each rank"),
    ],
    ids=str,
)
def test_a_case_that_cannot_run_has_a_reason(case: Case, machine: Machine, batch: int, why: str | None) -> None:
    assert why_not(case, machine, batch) == why


def test_strategies_are_named_as_in_the_training_job_too() -> None:
    assert possible.parse_strategies("all") == list(possible.STRATEGIES)
    assert possible.parse_strategies("dp, ddp,dataparallel") == ["dataparallel", "ddp"]
    with pytest.raises(DistdiagError, match="no 'magic'"):
        possible.parse_strategies("ddp,magic")


def test_the_formula_gives_the_bytes_of_a_real_training() -> None:
    model = SimpleCNN()
    count = count_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(torch.rand(2, 3, 32, 32)), torch.tensor([0, 1])).backward()
    gradients = gradient_bytes(model.parameters())
    optimizer.step()
    measured = measured_state(model.parameters(), gradients, optimizer)
    assert expected_state("single", 1, count) == measured == StateBytes(4 * count, 4 * count, 4 * count)
    assert expected_state("ddp", 8, count) == measured
    quarter = expected_state("fsdp", 4, count)
    assert quarter is not None and quarter.total == pytest.approx(measured.total / 4)
    assert expected_state("pipeline", 4, count) is None, "unknown without the stages"
    stage = expected_state("pipeline", 4, count, 10, PerParameter(4, 4, 8))
    assert stage == StateBytes(40, 40, 80)


def test_the_drawing_is_xml_with_all_three_charts_and_the_users_text_escaped() -> None:
    found = result_of([b for f in (1.0, 1.1, 1.2) for b in (block("single", 1, 100 * f), block("ddp", 2, 50 * f))])
    text = svg.draw(found)
    root = ElementTree.fromstring(text)
    words = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "A<B>&C, global batch 50, gloo on cpu"
    assert [w for w in words if w.startswith(("time of a step", "speed-up against", "memory of a rank"))] != []
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 1


def test_a_wide_interval_is_cut_off_in_the_drawing() -> None:
    found = result_of([b for f in (1.0, 40.0, 1.0) for b in (block("single", 1, 100), block("ddp", 2, 50 * f))])
    assert found.rows[1].speed_up_ci95[1] > 100
    root = ElementTree.fromstring(svg.draw(found))
    lines = list(root.iter("{http://www.w3.org/2000/svg}line"))
    height = float(root.attrib["viewBox"].split()[3])
    assert len(lines) < 30
    for line in lines:
        assert 0 <= float(line.attrib["x1"]) <= float(line.attrib["x2"]) <= 900
        assert 0 <= min(float(line.attrib["y1"]), float(line.attrib["y2"])) <= height


WRONG = {
    "allreduce --ranks 1,2": "--ranks compares strategies: allreduce has none",
    "step --ranks 0,2": "--ranks 0: no rank, nothing to measure",
    "step --ranks 1,x": "'x' is not a whole number",
    "step --ranks 2 --nproc 2": "--nproc and --ranks both give the number of ranks",
    "step --svg x.svg": "--svg draws the comparison of `step --ranks`",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_combination_that_cannot_work_is_one_line(line: str) -> None:
    with pytest.raises(DistdiagError) as refused:
        parse(line.split())
    assert refused.value.message == WRONG[line]
    assert refused.value.hint and "\n" not in refused.value.hint


@pytest.mark.job
@pytest.mark.timeout(300)
def test_all_cases_are_measured_on_real_ranks_or_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_layers.py").write_text(
        "from torch import nn\n"
        "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--model", "two_layers:make", "--batch-size", "24", "--timeout", "60"]
    options = parse([*arguments, "--strategies", "single,ddp,fsdp,pipeline", "--ranks", "1,2,3"], "step")
    options.backend = "gloo"
    probe: Any = load_probe("step")
    probe.check(options)
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "_BLOCK_S", (0.05, 0.05))
    found = rounds.compare(options, 0, time.monotonic() + 200.0)

    measured = {(r.strategy, r.ranks): r for r in found.rows}
    assert set(measured) == {("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("pipeline", 2)}
    reasons = {(n["strategy"], n["ranks"]): n["reason"] for n in found.details["not_possible"]}
    assert reasons["pipeline", 1] == "one rank has all layers: there is nothing to divide"
    assert reasons["pipeline", 3] == "3 stages, but the model has 2 layers with parameters"
    assert set(reasons) == {("ddp", 1), ("fsdp", 1), ("pipeline", 1), ("pipeline", 3)}
    assert not [r for r in found.reasons if "failed" in r or "budget ended" in r]
    for row in found.rows:
        assert row.step_ms > 0 and row.speed_up > 0 and row.rounds == 1
        expected = sum(row.expected_memory.values())
        assert row.state_bytes == pytest.approx(expected, rel=0.1 if row.strategy == "fsdp" else 0), row.label
        assert row.activations_bytes == pytest.approx(row.expected_activations_bytes, rel=0.05), row.label
    assert measured["fsdp", 2].state_bytes < 0.6 * measured["ddp", 2].state_bytes
    assert measured["fsdp", 2].activations_bytes == measured["ddp", 2].activations_bytes
    assert measured["fsdp", 2].exposed_ms is not None and 0 < measured["fsdp", 2].exposed_share <= 1
    assert measured["ddp", 2].exposed_ms is not None and 0 <= measured["pipeline", 2].idle_share <= 1
    assert any(line.startswith("not possible: pipeline on 3 ranks: 3 stages") for line in found.notes)


@pytest.mark.parametrize("name", ["simple", "resnet18"])
def test_the_formulas_give_what_torchs_own_memory_tracker_counts(name: str) -> None:
    torch.manual_seed(0)
    model, images, labels = build_model(name), torch.rand(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)

    def counted() -> dict[str, int]:
        (found,) = tracker.get_tracker_snapshot("current").values()
        return {getattr(kind, "name", str(kind)): size for kind, size in found.items()}

    with tracker:
        loss = F.cross_entropy(model(images), labels)
        forward = counted()
        loss.backward()
        del loss
        optimizer.step()
        step = counted()
    expected = expected_state("single", 1, count_parameters(model))
    assert expected == StateBytes(step["PARAM"], step["GRAD"], step["OPT"])
    activations = Counted(name, build_model(name), torch.float32).activations("single", 1, 8)
    assert activations == pytest.approx(forward["ACT"], rel=0.02)
