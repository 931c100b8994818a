"""A torch without one of the private names that the recorder uses: the job runs as before, and its collectives are recorded."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

import distdiag
from distdiag.recorder.hooks.collectives import METHODS
from tests.jobs import clean_env

pytestmark = pytest.mark.timeout(300)

RECORDER = Path(distdiag.__file__).parent / "recorder"
# of Python, of C's structures, of a user's data set; and one that old torch lacks and that only the branch for new torch reads
NOT_TORCHS = {
    "_active", "_bootstrap", "_current_exceptions", "_current_frames", "_fields_", "_fingerprint", "_getframe", "_native_id", "_private",
    "_replace", "_distdiag", "_start_method", "_dump_", "_FR_SELF_RECORDING_BACKENDS",
}  # fmt: skip
# of every module and tensor: no torch is without
KEPT = {"_base", "_modules", "_version"}
# without which one part is left out, as a whole
PARTS = {"Join": "uneven inputs", "register_optimizer_step_pre_hook": "steps", "_BaseDataLoaderIter": "loaders"}
# Each child runs a job with one rank. In the source of its recorder, one of torch's names is replaced by another.
DRIVER = """
import importlib.abc, importlib.machinery, json, os, re, sys, warnings
import torch, torch._dynamo, torch.distributed as dist, torch.utils.data, torch.distributed.algorithms.join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import distdiag.page.reader, distdiag.page.writer, distdiag.guard

warnings.simplefilter("ignore")
folder, names = sys.argv[1], json.loads(sys.argv[2])


class Renaming(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        text = self.get_data(self.path).decode()
        return compile(re.sub(rf"\\b{name}\\b", f"{name}_gone", text), self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname.startswith("distdiag.recorder") else None
        if spec is not None and str(spec.origin).endswith(".py") and re.search(rf"\\b{name}\\b", open(spec.origin).read()):
            spec.loader = Renaming(fullname, spec.origin)
        return spec


def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    net, losses = DDP(net, find_unused_parameters=True), []
    optimizer = torch.optim.AdamW(net.parameters())
    for x, y in loader:
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.new_group([0])
    dist.barrier()
    dist.destroy_process_group()
    return losses


def rank(directory):
    os.makedirs(directory)
    from pathlib import Path
    from distdiag.page.reader import PageReader
    from distdiag.page.writer import PageWriter
    from distdiag.recorder import session, state

    writer = PageWriter(Path(directory, "r0.page"))
    writer.publish()
    recorder = state.current = state.Recorder(writer)
    session.Session(recorder, Path(directory), Path(directory)).install()
    losses = train()
    reader = PageReader(writer.path)
    h = reader.header()
    text = reader.text(h.error) if h.errors else ""
    return {"losses": losses, "calls": h.n_calls, "steps": h.n_steps, "errors": h.errors, "error": text,
            "lacks": recorder.facts.get("unsupported", "")}


sys.meta_path.insert(0, Finder())
for name in names:
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            found = rank(os.path.join(folder, name)) if name else {"losses": train()}
        except BaseException as e:
            found = {"raised": repr(e)}
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    print(json.dumps([name, json.loads(open(read).read() or "{}"), os.waitpid(pid, 0)[1]]), flush=True)
"""


def private_names() -> list[str]:
    """Return the private names of other modules that the recorder reads, as attributes or by `getattr` and such."""
    trees = [ast.parse(path.read_text()) for path in sorted(RECORDER.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    torchs = (
        x for x in read - own - NOT_TORCHS - KEPT if x.isidentifier() and x.startswith("_") and not x.startswith("__")
    )
    return sorted(torchs)


def test_a_name_that_torch_no_longer_has_costs_what_depends_on_it(tmp_path: Path) -> None:
    names = [*dict.fromkeys([*private_names(), *PARTS])]
    assert len(names) > 40 and {"_world", "_DisableTorchDispatch", "_FrameAction"} <= {*names}
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "R"), json.dumps(["", "no_name", *names])]
    done = subprocess.run(
        command, env=clean_env(tmp_path, {"DISTDIAG_RAISE": "0"}), capture_output=True, text=True, timeout=280
    )
    found = {name: of for name, of, _ in map(json.loads, done.stdout.splitlines())}
    assert {*found} == {"", "no_name", *names}, done.stderr
    whole = found["no_name"]
    assert whole["calls"] >= 3 and whole["steps"] == 8 and not whole["errors"] and not whole["lacks"], whole
    for name, of in found.items():
        assert of.get("losses") == found[""]["losses"], (name, of)
    found.pop("")
    for name, of in found.items():
        parts = {PARTS[name]} if name in PARTS else set()
        assert of["errors"] == len(parts) and parts <= {*of["lacks"].split(", ")}, (name, of)
        assert of["calls"] >= 2 and (of["steps"] == 8 or "steps" in parts), (name, of)


def test_every_collective_of_torch_is_recorded() -> None:
    """A method of ProcessGroup that torch's functions call and that is not wrapped is a call that nobody sees."""
    source = Path(distributed_c10d.__file__).read_text()
    called = {*re.findall(r"\bwork = group\.(\w+)\(", source)}
    assert {"allreduce", "allgather", "barrier"} <= called <= {*METHODS, "_end_coalescing"}
