"""A script's modes, profiler, tensor subclasses, overrides and warnings are those of the job, and none of the recorder's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.jobs import ONE_RANK, launch, rows, start, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

RECORDED = ["-m", "distdiag.run", "--quiet", "--keep", "500M", "--name", "x", "--run-dir", "R"]
# Writes one line per part: the operations seen in it. Steps 2, 4, 8 have checksums; step 5 has a non-finite loss.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
import torch.distributed._functional_collectives as functional

seen, out = [], open(sys.argv[1], "w")

def name(f):
    return f"{getattr(getattr(f, '__self__', None), '__name__', '')}.{getattr(f, '__name__', f)}"

class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(name(func))
        return func(*args, **(kwargs or {}))

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

class Mine(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.append("Mine " + name(func))
        return super().__torch_function__(func, types, args, kwargs or {})

def part(title):
    print(title, *seen, file=out)
    seen.clear()

def train(title, wrap=lambda x: x):
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    part(title)
    for x, y in DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(40)), 4):
        optimizer.zero_grad()
        loss = model(wrap(x)).pow(2).mean()
        loss = loss * float("nan") if y[0] == 16 else loss
        loss.backward()
        optimizer.step()
        dist.all_reduce(wrap(loss.detach()))
        dist.all_gather([torch.zeros(())], loss.detach(), async_op=True).wait()
        functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))
        dist.broadcast_object_list([1], 0)
        part(title)
    with torch.no_grad():
        model(wrap(torch.randn(3, 4)))
    dist.barrier()
    part(title)

print(*sorted(os.environ), file=out)
dist.init_process_group("gloo")
print(*sorted(os.environ), file=out)  # nothing of ours, which a job that the script starts would inherit
with Functions():
    train("functions")
with Operators():
    train("operators")
train("subclass", lambda x: x.as_subclass(Mine))
with torch.profiler.profile() as profile:
    train("profiled")
    torch.ones(1, dtype=torch.float64, requires_grad=True).sum().backward()
seen.extend(sorted(f"{k.key}:{k.count}" for k in profile.key_averages() if k.key.startswith("aten::")))
part("profiler")
dist.destroy_process_group()
out.close()  # a file that is left open is not always flushed when Python ends
"""


def test_modes_profiler_and_subclasses_see_only_the_jobs_operations(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    seen = []
    for pure, *before in (
        ["0"],
        ["0", *RECORDED],
        ["1", *RECORDED],
    ):  # without recorder, with the hooks in C, with those in Python
        command = [*before, tmp_path / "script.py", f"seen{len(seen)}"]
        env = {"DISTDIAG_PURE": pure}
        with launch(command, nproc=1, cwd=tmp_path, env=env, timeout=250, fork_ranks=True) as job:
            assert job.wait() == 0, job.tail()
        seen.append((tmp_path / f"seen{len(seen)}").read_text().splitlines())
    alone, compiled, python = seen
    assert len(alone) == 2 + 4 * 12 + 1 and sum(len(line.split()) for line in alone) > 500
    assert compiled == alone
    assert python == alone


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).pow(2).mean()
    (loss * float("nan") if step == 9 else loss).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_only_this_ranks_part_of_sharded_parameters_is_read(tmp_path: Path) -> None:
    """A DTensor with dispatch off has no memory: reading it would crash the process."""
    (tmp_path / "script.py").write_text(SHARDED)
    with launch([*RECORDED, "script.py"], nproc=1, cwd=tmp_path, timeout=120, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")
    found = rows(tmp_path / "R", "SELECT kind, cause FROM finding")
    assert ("nonfinite", "gradient") in found or ("nonfinite", "loss") in found, found
    assert ("recorder", "failed") not in found


READ = """
import copy, warnings
import torch
from torch import distributed as dist, nn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
counted = {}


def counts(name):
    def method(self, *args, **kwargs):
        counted[name] = counted.get(name, 0) + 1
        return getattr(super(Complex, self), name)(*args, **kwargs)
    return method


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.cfloat))

    def forward(self, x):
        return (x * self.weight).abs()

    named_parameters, parameters, named_modules = map(counts, ("named_parameters", "parameters", "named_modules"))
    modules, named_buffers, get_submodule = map(counts, ("modules", "named_buffers", "get_submodule"))


class Rows:
    __slots__ = ()

    def __getattr__(self, name):
        counted[name] = counted.get(name, 0) + 1
        raise AttributeError(name)

    def __len__(self):
        warnings.warn("a length", stacklevel=2)
        return 8

    def __getitem__(self, i):
        return torch.ones(3)


def clone(module):
    new = copy.copy(module)
    new._parameters = {name: p.clone() for name, p in module._parameters.items()}
    new._modules = {name: clone(x) for name, x in module._modules.items()}
    return new


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x)


learner = Learner()
for rebinds in (False, True):  # the learner is cloned in each step, or gets gradients that have a graph
    optimizer = torch.optim.SGD(learner.parameters(), 0.01)
    for step in range(16):
        optimizer.zero_grad()
        net = learner if rebinds else clone(learner)
        loss = net(torch.ones(2, 3)).pow(2).mean()
        if rebinds:
            learner.used.bias.grad = torch.autograd.grad(loss, learner.used.bias, create_graph=True)[0]
        else:
            loss.backward()
            dist.all_reduce(learner.used.weight.grad)
        optimizer.step()
model = nn.parallel.DistributedDataParallel(Complex())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(16):
    for x in DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows())):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    for x in DataLoader(Rows(), batch_size=4, shuffle=True):
        pass
print(sorted(counted.items()))
dist.destroy_process_group()
"""


def test_a_script_prints_and_calls_what_it_does_without_recording(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(READ)
    shown = []
    for before in ([], RECORDED):
        with start([sys.executable, *before, "net.py"], cwd=tmp_path, env=ONE_RANK) as job:
            assert job.wait() == 0, job.tail()
            shown.append((job.stdout(), job.stderr()))
    assert shown[1] == shown[0] and "named_modules" in shown[0][0] and shown[0][1].count("UserWarning: a length") >= 2
