"""Hooks that wait: for torch to be imported, for a process to become a rank, for children to be started.

Importing torch ourselves would be a change: a script may set OMP_NUM_THREADS before it does. So an import hook acts right
after the script's own import. A process without a rank in its environment (a launcher that spawns its ranks) is recorded
from the moment it shows to be one: it joins a process group, or runs a backward pass.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

from distdiag.recorder import run_claim, session
from distdiag.recorder.state import guarded


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then` once, right after module `name` has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        loader, then = spec.loader, self.then
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            del loader.exec_module  # the loader as it was: pickles and reloads see nothing of us
            then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_torch(then: Callable[[], None]) -> None:
    """Call `then` as soon as torch is imported (now, if it is)."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport("torch", then))


def record_process(run_dir: str | None, name: str | None) -> None:
    """Record this process: at once where it is a rank, else when it becomes one; its children likewise."""
    rank, world, local = session._from_environment()
    if any(v in os.environ for v in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")):
        started = session.start(run_dir, name, rank, world, local)
        if started is not None:
            after_torch(started.install)
        return
    os.environ.setdefault(run_claim.ENV_JOB, run_claim.job_token())
    after_torch(lambda: _becomes_rank(run_dir, name))
    _watch_children(run_dir, name)


@guarded
def _becomes_rank(run_dir: str | None, name: str | None) -> None:
    """Without a rank yet: wrap the two doors through which a process becomes one."""
    import torch

    def begin(rank: int, world: int) -> None:
        local = int(os.environ.get("LOCAL_RANK", rank))
        session.start(run_dir, name, rank, world, local)

    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d as dist

        original = dist.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if session.current is None:
                rank, world = _rank_of_call(args, kwargs)
                dist.init_process_group = torch.distributed.init_process_group = original
                begin(rank, world)
                return dist.init_process_group(*args, **kwargs)
            return original(*args, **kwargs)

        dist.init_process_group = torch.distributed.init_process_group = init_process_group
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if session.current is None and torch.autograd.backward is backward:
            torch.autograd.backward = plain
            begin(0, 1)
            return torch.autograd.backward(*args, **kwargs)
        return plain(*args, **kwargs)

    torch.autograd.backward = backward


def _rank_of_call(args: tuple, kwargs: dict) -> tuple[int, int]:
    """rank and world_size of an `init_process_group` call, by argument or by environment or by its URL."""
    names = ("backend", "init_method", "timeout", "world_size", "rank")
    given = dict(zip(names, args, strict=False)) | kwargs
    rank, world = given.get("rank", -1), given.get("world_size", -1)
    if not isinstance(rank, int) or rank < 0:
        rank = int(os.environ.get("RANK", "0"))
    if not isinstance(world, int) or world < 1:
        world = int(os.environ.get("WORLD_SIZE", "1"))
    return rank, world


class _Child:
    """Target of a spawned child process: prepares the recorder, then does what it was started for."""

    def __init__(self, target: Callable[..., Any], run_dir: str | None, name: str | None) -> None:
        self.target, self.run_dir, self.name = target, run_dir, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record_process(self.run_dir, self.name)
        return self.target(*args, **kwargs)


def _watch_children(run_dir: str | None, name: str | None) -> None:
    """Children started by `multiprocessing` (torch's spawn among them) may become ranks; forked ones have our hooks."""
    from multiprocessing.process import BaseProcess

    original = BaseProcess.start
    os.environ.setdefault(run_claim.ENV_DIR, str(run_claim.claim(run_dir, name or run_claim.script_name())))

    def start(self: Any) -> None:
        target = getattr(self, "_target", None)
        method = getattr(self, "_start_method", None)
        ours = (
            target is not None
            and method != "fork"
            and not getattr(target, "__module__", "").startswith("torch.utils.data")
        )
        if ours and target is not None:
            self._target = _Child(target, run_dir, name)
        try:
            original(self)
        finally:
            if ours and hasattr(self, "_target"):
                self._target = target

    BaseProcess.start = start  # type: ignore[method-assign]
