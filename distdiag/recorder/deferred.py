"""Install the hooks when torch is imported, and start recording when a process becomes a rank.

The recorder does not import torch itself: a script may set OMP_NUM_THREADS before it does. An import hook acts right
after the script's own import. A process without a rank in its environment (a launcher that spawns its ranks) is recorded
from the moment it joins a process group or runs a backward pass; processes that it spawns are treated the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from distdiag.recorder import run_claim, session, start_monitor, state
from distdiag.recorder.after_import import after_import
from distdiag.recorder.hooks.wrapping import hide_frame, wraps
from distdiag.recorder.state import guarded


def record_process(run_dir: str | None, name: str | None, job: str | None = None) -> None:
    """Record this process: now if it is a rank, else when it or a spawned child becomes one.

    Args:
        job: The job of the process that spawned this one.
    """
    rank, world, local = session.from_environment()
    if job is not None:
        run_claim.belong_to(job)
    if any(v in os.environ for v in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")):
        started = session.start(run_dir, name, rank, world, local)
        if started is not None:
            after_import("torch", started.install)
        return
    try:
        if job is None:
            job = run_claim.job_token()
            run_claim.belong_to(job)
        directory = str(run_claim.claim(run_dir, name or run_claim.script_name()))
    except Exception as e:
        if state.RAISE:
            raise
        session.report_not_recorded(e)
        return
    after_import("torch", lambda: _becomes_rank(directory, name))
    _watch_children(directory, name, job)


@guarded
def _becomes_rank(run_dir: str | None, run_name: str | None) -> None:
    """Wrap the two functions by which a process becomes a rank; until then nothing is recorded."""
    import torch

    def wrap(
        owners: tuple[Any, ...], name: str, rank_of: Callable[[tuple, dict], tuple[int, int]], always: bool
    ) -> None:
        original = getattr(owners[0], name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            function = original
            if session.current is None and (always or getattr(owners[0], name) is call):
                rank, world = rank_of(args, kwargs)
                for owner in owners:
                    setattr(owner, name, original)
                session.start(run_dir, run_name, rank, world, int(os.environ.get("LOCAL_RANK", rank)))
                function = getattr(owners[0], name)
            try:
                return function(*args, **kwargs)
            except BaseException as e:
                hide_frame(e)
                raise

        for owner in owners:
            setattr(owner, name, call)

    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d as dist

        wrap((dist, torch.distributed), "init_process_group", _rank_of_call, always=True)
    # not if the script has wrapped it: restoring the original would remove its wrapper
    wrap((torch.autograd,), "backward", lambda _args, _kwargs: (0, 1), always=False)


def _rank_of_call(args: tuple, kwargs: dict) -> tuple[int, int]:
    """Return (rank, world_size) of an `init_process_group` call, from its arguments, the environment or its URL."""
    names = ("backend", "init_method", "timeout", "world_size", "rank")
    given = dict(zip(names, args, strict=False)) | kwargs
    rank, world = given.get("rank", -1), given.get("world_size", -1)
    if not isinstance(rank, int) or rank < 0:
        rank = int(os.environ.get("RANK", "0"))
    if not isinstance(world, int) or world < 1:
        world = int(os.environ.get("WORLD_SIZE", "1"))
    return rank, world


class _Child:
    """Target of a spawned child process: prepares the recorder, then calls the script's own target."""

    def __init__(self, target: Callable[..., Any], run_dir: str, name: str | None, job: str) -> None:
        self.target, self.run_dir, self.name, self.job = target, run_dir, name, job
        self.options = start_monitor.options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start_monitor.options = self.options
        record_process(self.run_dir, self.name, self.job)
        try:
            return self.target(*args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            raise


def _watch_children(run_dir: str, name: str | None, job: str) -> None:
    """Prepare children spawned by `multiprocessing` (also by torch's spawn) to become ranks. Forked children have our hooks."""
    from multiprocessing.process import BaseProcess

    original = BaseProcess.start

    def start(self: Any) -> None:
        target = getattr(self, "_target", None)
        method = getattr(self, "_start_method", None)
        ours = (
            target is not None
            and method != "fork"
            and not getattr(target, "__module__", "").startswith("torch.utils.data")
        )
        if ours and target is not None:
            self._target = _Child(target, run_dir, name, job)
        try:
            original(self)
        finally:
            if ours and hasattr(self, "_target"):
                self._target = target

    BaseProcess.start = start  # type: ignore[method-assign]
