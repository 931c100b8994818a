"""The marks of modules in a profile: each collective gets the module in whose forward, or whose backward, it was issued."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules import module as nn_module

from distdiag.recorder.module_marks import ModuleMarks
from distdiag.traces.read import Trace, read


def summed(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks."""
    out = x.detach().clone()
    dist.all_reduce(out)
    return out


def add_sum(module: torch.nn.Module, inputs: Any, out: Any) -> Any:
    return out + summed(out)


class Reduced(torch.autograd.Function):
    """An all_reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return summed(grads[0])


class Block(torch.nn.Module):
    """A collective in the hook of a child, one in its own forward, and one in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.down.register_forward_hook(add_sum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(Reduced.apply(self.up(x)))
        return x + summed(x)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, in a process that has compiled nothing."""
    if (convert := sys.modules.get("torch._dynamo.convert_frame")) is not None:
        monkeypatch.setattr(convert, "FRAME_COUNTER", 0)  # another test may have compiled something
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def traced(run: Any, path: Path) -> Trace:
    profiler = torch.autograd.profiler.profile(use_kineto=True)
    marks = ModuleMarks()
    with profiler:
        marks.start()
        try:
            run()
        finally:
            marks.stop()
    assert profiler.kineto_results is not None
    profiler.kineto_results.save(str(path))
    return read(path)


def no_hooks(net: torch.nn.Module) -> bool:
    """True if no hook of ours is left; the second Linear has the user's hook."""
    own = [len(m._forward_hooks) for m in net.modules() if isinstance(m, torch.nn.Linear)]
    return not nn_module._global_forward_hooks and not nn_module._global_forward_pre_hooks and set(own) <= {0, 1}


@pytest.mark.usefixtures("alone")
def test_each_collective_gets_its_module(tmp_path: Path) -> None:
    net = torch.nn.Sequential(Block(), torch.nn.Sequential(Block()))
    x = torch.randn(2, 4)
    expected = net(x).sum()

    def run() -> None:
        loss = net(x).sum()
        assert torch.equal(loss, expected)
        loss.backward()

    trace = traced(run, tmp_path / "rank_0.json")
    forward = ["0.down", "0", "1.0.down", "1.0"]
    backward = ["1.0", "0"]  # the block calls `Reduced`
    assert [c.module for c in trace.comms] == forward + backward
    assert no_hooks(net)


@pytest.mark.usefixtures("alone")
def test_a_forward_that_raises_leaves_no_open_mark(tmp_path: Path) -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    net = torch.nn.Sequential(torch.nn.Sequential(Fails()), Block())

    def run() -> None:
        with pytest.raises(ValueError):
            net(torch.randn(2, 4))
        summed(torch.ones(2))
        net[1](torch.randn(2, 4))

    trace = traced(run, tmp_path / "rank_0.json")
    assert [c.module for c in trace.comms] == [None, "1.down", "1"]
    assert no_hooks(net)


def test_a_job_with_compiled_code_gets_no_hooks() -> None:
    """Dynamo guards on global hooks: with them, it would compile everything again."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    marks = ModuleMarks()
    marks.start()
    try:
        assert not nn_module._global_forward_hooks
    finally:
        marks.stop()
