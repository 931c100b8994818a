"""DDP's own communication times reach run.db, on the steps that DDP measured."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distdiag.page.layout import ModelSlot
from distdiag.recorder.hooks.ddp_times import DdpTimes, _broadcast, _last_quarter, _of_embedding
from distdiag.store.reader import Run, open_run
from tests.jobs import closed, launch, rows

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

# One module averages in every second backward pass (accumulation), the other is never called.
JOB = """
    import contextlib
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(9)]
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    idle = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for step in range(26):
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    script = tmp_path_factory.mktemp("ddp") / "job.py"
    script.write_text(textwrap.dedent(JOB))
    path = script.with_name("run")
    with launch(["-m", "distdiag.run", "--run-dir", path, script], timeout=240, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(path)
    with open_run(path) as opened:
        yield opened


def test_measured_steps_have_times_and_the_others_have_none(run: Run) -> None:
    steps = run.steps(1, 26)
    assert {x.rank for x in steps} == {0, 1} and all(x.step_ms for x in steps)
    measured = [x for x in steps if x.comm_ms is not None]
    # DDP's first ten iterations, then every eighth; results are available in the following step
    assert {x.step for x in measured} == {*range(1, 11), 16, 24}
    assert all(x.exposed_ms is None for x in steps if x.comm_ms is None)
    assert all(0 <= x.exposed_ms <= x.comm_ms <= x.step_ms for x in measured)  # type: ignore[operator]


def test_recorded_buckets_match_the_gradients(run: Run) -> None:
    found = run.ddp()
    assert [(x.rank, x.model) for x in found] == [(0, 0), (1, 0)]  # the idle module was never measured
    for x in found:
        assert x.bytes == 9 * (256 * 256 + 256) * 4 and x.bucket_bytes is not None
        sizes = [int(n) for n in x.bucket_bytes.split(",")]
        assert len(sizes) == x.buckets and sum(sizes) == x.bytes and len(sizes) > 1
        assert x.comm_hook is None and x.gradient_as_bucket_view is False and x.dtypes == "float"
        assert x.backwards is not None and x.backwards >= 24


@pytest.mark.parametrize(("sizes", "last"), [([1] * 8, 2), ([1, 90, 9], 91), ([9, 90, 1], 99), ([], 0)])
def test_the_last_gradients_are_those_of_the_first_parameters(sizes: list[int], last: int) -> None:
    assert _last_quarter(sizes) == last


def test_a_table_with_a_dense_gradient_is_told_from_other_layers() -> None:
    model = torch.nn.ModuleDict({
        "users": torch.nn.Embedding(9, 4), "films": torch.nn.Embedding(9, 4, sparse=True), "head": torch.nn.Linear(4, 9),
    })  # fmt: skip
    assert [_of_embedding(model, f"{name}.weight") for name in model] == [True, False, False]
    assert not _of_embedding(torch.nn.Linear(2, 2), "weight")


@pytest.mark.parametrize(("on", "sent"), [(True, (4096 + 12, "tables.0.angles")), (False, (0, ""))])
def test_the_buffers_that_a_forward_broadcasts_are_those_that_ddp_does_not_ignore(
    on: bool, sent: tuple[int, str]
) -> None:
    model = torch.nn.Module()
    model.tables = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    model.register_buffer("scale", torch.zeros(3))
    for table in model.tables:
        table.register_buffer("angles", torch.zeros(32, 32), persistent=False)
    kept = [model.scale, model.tables[0].angles]
    ddp = SimpleNamespace(module=model, broadcast_buffers=on, modules_buffers=kept)
    assert _broadcast(ddp) == sent


def test_the_recorder_had_no_errors(run: Run) -> None:
    assert rows(run.path, "SELECT recorder_errors FROM rank") == [(0,), (0,)]


@pytest.mark.parametrize(
    ("steps", "synced", "expected"),
    [(8, 8, 1), (8, 4, 1), (8, 0, 1), (8, 32, 4), (8, 12, 0)],
    ids=["each", "every second", "none since", "four a step", "not always as many"],
)
def test_backward_passes_per_step_are_counted(steps: int, synced: int, expected: int) -> None:
    ddp = SimpleNamespace(module=torch.nn.Linear(2, 2), _set_ddp_runtime_logging_sample_rate=lambda _: None)
    times = DdpTimes(ddp, 0, ModelSlot(), 0)
    times._per_step(2, 2)
    assert times._per_step(2 + steps, 2 + synced) == expected


@pytest.mark.parametrize(("unused_bytes", "hits"), [(80, 1), (0, 0)])
def test_what_a_rank_has_not_used_is_counted_although_another_rank_gave_it_a_gradient(
    unused_bytes: int, hits: int
) -> None:
    data = {"iteration": 5, "backward_comm_time": 1, "unused_parameter_size": unused_bytes}
    ddp = SimpleNamespace(
        module=torch.nn.Linear(2, 2), broadcast_buffers=False, _get_ddp_logging_data=lambda: data,
        _set_ddp_runtime_logging_sample_rate=lambda _: None,
    )  # fmt: skip
    page = SimpleNamespace(words=[5], add=lambda *_, **__: None, text=lambda _: 0, header=SimpleNamespace(heap_used=0))
    DdpTimes(ddp, 0, slot := ModelSlot(), 0).read(ddp, page, 5)
    assert slot.unused_hits == hits


def test_many_modules_one_after_the_other_lose_no_records(tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(
        textwrap.dedent("""
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        teacher = DDP(torch.nn.Linear(3, 3))  # lives on
        for width in range(4, 20):
            model = DDP(torch.nn.Linear(8, width))
            for _ in range(3):
                model(torch.randn(4, 8)).sum().backward()
                torch.optim.SGD(model.parameters(), 0.1).step()
        dist.destroy_process_group()
    """)
    )
    command = ["-m", "distdiag.run", "--run-dir", tmp_path / "run", tmp_path / "search.py"]
    with launch(command, nproc=1, timeout=60, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT message FROM finding") == []
    newest = rows(tmp_path / "run", "SELECT bytes, backwards FROM ddp ORDER BY model DESC LIMIT 1")
    assert newest == [((8 * 19 + 19) * 4, 3)]
