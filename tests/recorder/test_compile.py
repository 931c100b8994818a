"""A job does not notice our wrappers: compiled graphs, tracebacks and lifetimes are the same without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import launch

pytestmark = [pytest.mark.job, pytest.mark.timeout(170)]

SCRIPT = """
import datetime, gc, json, logging, re, sys, traceback, warnings, weakref
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

if "cuda" in sys.argv:
    torch.version.cuda = "13.0"  # how the recorder knows that this torch is built with CUDA
if "recorded" in sys.argv:
    import distdiag
    distdiag.attach()
dist.init_process_group("gloo")
found = {}

import torch._dynamo as dynamo
from torch._dynamo.utils import counters

def compiled(name, function, *args, **options):
    dynamo.reset()
    counters.clear()
    graphs = []
    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward
    run = torch.compile(function, backend=backend, **options)
    for _ in range(3):
        run(*args)
    reasons = sorted((re.sub("0x[0-9a-f]+", "address", text), n) for text, n in counters["graph_break"].items())
    found[name] = [graphs, reasons, counters["frames"]]

x = torch.randn(4, 4)
compiled("Tensor.to, full graph", lambda x: x.to(torch.float64) + 1, x, fullgraph=True)
explained = dynamo.explain(lambda x: x.to(torch.float64) + 1)(x)
found["explain"] = [explained.graph_count, explained.graph_break_count, explained.op_count]

model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
def forward_and_backward(x):
    model(x.to(torch.float32)).sum().backward()
def whole_step(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
compiled("DDP", model, x)
compiled("DDP forward and backward", forward_and_backward, x)
compiled("whole step", whole_step, x)
compiled("optimizer.step", optimizer.step)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sharded = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
mesh = init_device_mesh("cpu", (1,))
for module in (sharded[0], sharded):
    fully_shard(module, mesh=mesh)
compiled("FSDP2", sharded, x)
compiled("FSDP2 forward and backward", lambda x: sharded(x).sum().backward(), x)

import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def functional(x):
    y = funcol.all_reduce(x, "sum", mesh)
    return funcol.wait_tensor(y) + funcol.broadcast(x, 0, mesh)
def gathered(x):
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(mesh, [Replicate()]).to_local() + 1
parallel = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
functional(x), gathered(x), parallel(x).sum().backward()  # as they are first
compiled("functional collectives, full graph", functional, x, fullgraph=True)
compiled("DTensor, full graph", gathered, x, fullgraph=True)
compiled("tensor parallel", parallel, x)
compiled("tensor parallel forward and backward", lambda x: parallel(x).sum().backward(), x)

def collectives(x):
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.barrier()
    return x + 1
loader = DataLoader(torch.randn(8, 4), 4)
def batches():
    return sum(batch.sum() for batch in loader)
compiled("collectives", collectives, x)
compiled("batches", batches)

# Tracebacks: what raises inside torch, called through each wrapper.
class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        raise ValueError("no such sample")
def failed_work():
    future = torch.futures.Future()
    future.set_exception(ValueError("no such work"))
    return c10d._create_work_from_future(future)
SOON = datetime.timedelta(milliseconds=1)  # such a work refuses a timeout
work = failed_work()
calls = {
    "forward": lambda: model(torch.randn(4, 3)),
    "backward": lambda: torch.ones(2).sum().backward(),
    "next": lambda: next(iter(DataLoader(Broken(), 2))),
    "collective": lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
    "wait": lambda: work.wait(SOON),
    "functional collective": lambda: funcol.all_reduce(torch.ones(2), "nonsense", mesh),
    "functional result": lambda: funcol.wait_tensor(torch.ones(2), 1),
    "DDP": lambda: DDP(torch.nn.Linear(1, 1).requires_grad_(False)),
    "new_group": lambda: dist.new_group([0, 7]),
    "init_process_group": lambda: dist.init_process_group("gloo"),
}
for name, call in calls.items():
    try:
        call()
        found["error in " + name] = "none"
    except Exception as e:
        found["error in " + name] = [(f.filename.rpartition("/")[2], f.lineno, f.name) for f in traceback.extract_tb(e.__traceback__)]

# A failed wait keeps nothing of its callers alive.
gc.collect()
gc.disable()
def waits(work):
    kept = torch.ones(3)
    try:
        work.wait(SOON)
    except Exception:
        return weakref.ref(kept)
found["freed"] = waits(failed_work())() is None

if "recorded" in sys.argv:
    from distdiag.recorder import session
    h = session.current.recorder.header
    assert h.errors == 0 and h.micro_steps > 0, (h.errors, session.current.recorder.page._strings)
json.dump(found, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


def observed(folder: Path, *switches: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    folder.mkdir()
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    variables = {"DISTDIAG_RUN_DIR": str(folder / "R"), **(env or {})}
    arguments = [script, "found.json", *switches]
    with launch(arguments, nproc=1, cwd=folder, timeout=100, env=variables, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = observed(tmp_path_factory.mktemp("plain") / "run")
    assert found["freed"]
    assert [name for name, value in found.items() if value == "none"] == []
    assert found["DDP forward and backward"][0], "the model was not compiled at all"
    return found


@pytest.mark.parametrize(
    ("switches", "env"),
    [((), {}), (("cuda",), {"DISTDIAG_PURE": "1"})],
    ids=["cpu_build", "cuda_build_and_python_hooks"],
)
def test_graphs_tracebacks_and_lifetimes_equal_those_of_the_unrecorded_job(
    plain: dict[str, Any], switches: tuple[str, ...], env: dict[str, str], tmp_path: Path
) -> None:
    recorded = observed(tmp_path / "run", "recorded", *switches, env=env)
    for what, value in plain.items():
        if what in ("whole step", "optimizer.step") and sys.version_info >= (3, 13):
            # there the wrapper of `Optimizer.step`, which holds no operation, runs eagerly if an optimizer has any hook
            assert recorded[what][0] == value[0], what
            continue
        assert recorded[what] == value, what
