"""Install the hooks when torch is imported, and start recording when a process becomes a rank.

The recorder does not import torch itself: a script may set OMP_NUM_THREADS before it does. An import hook acts right
after the script's own import. A process without a rank in its environment (a launcher that spawns its ranks) is recorded
from the moment it joins a process group or runs a backward pass; processes that it spawns are treated the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from distdiag.recorder import joining, run_claim, session, start_monitor, state
from distdiag.recorder.after_import import after_import
from distdiag.recorder.hooks.wrapping import around, wraps
from distdiag.recorder.state import VARIABLE, guarded, switched_off
from distdiag.terms.launchers import TORCHRUN, launched, number
from distdiag.torch_modules import replace


def record_process(run_dir: str | None, name: str | None, job: str | None = None) -> None:
    """Record this process: now if it is a rank, else when it or a child becomes one. `job`: of the process that spawned it."""
    if switched_off():
        return
    rank, world, local = session.from_environment()
    if job is not None:
        run_claim.belong_to(job)
    if launched(os.environ):
        session.start(run_dir, name, rank, world, local)
        return
    spawned = job is not None
    try:
        if job is None:
            job = run_claim.job_token()
            run_claim.belong_to(job)
            if VARIABLE not in os.environ:
                # For ranks that the script starts as other programs: they have no hook of ours. Below `os.environ`, which stays
                # what the script was given; a child that is given another environment is not recorded.
                os.putenv(VARIABLE, "1")
        directory = str(run_claim.claim(run_dir, name or run_claim.script_name()))
    except Exception as e:
        if state.RAISE:
            raise
        session.report_not_recorded(e)
        return
    after_import("torch", lambda: _becomes_rank(directory, name, spawned))
    _watch_children(directory, name, job)


def enter_group(
    dist: Any, args: tuple, kwargs: dict, run_dir: str | None = None, name: str | None = None,
    spawned: bool = False,
) -> Any:  # fmt: skip
    """Call `init_process_group` in a process that is not recorded yet, and record it as a rank.

    A rank that a launcher has numbered is recorded before the call, so a hang in it is seen, too. For any other the group itself tells
    which job it is in, after the call.

    Args:
        dist: torch.distributed.distributed_c10d; its function is torch's own again.
        spawned: A recorded process has spawned this one, for its own job.
    """
    wanted = session.current is None and not switched_off()
    if wanted and (spawned or joining.launched()):
        _begin(run_dir, name, *_rank_of_call(args, kwargs))
        wanted = False
    helper = getattr(dist, "_new_process_group_helper", None) if wanted else None
    if helper is not None:
        dist._new_process_group_helper = around(helper, lambda *of, **_: _offers(dist, of, run_dir))
    try:
        out = dist.init_process_group(*args, **kwargs)
    except BaseException as e:
        e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
        raise
    finally:
        if helper is not None:
            dist._new_process_group_helper = helper
    if wanted:
        _join_group(dist, run_dir, name)
    return out


def _begin(run_dir: str | None, name: str | None, rank: int, world: int) -> None:
    local = number(TORCHRUN.local)
    session.start(run_dir, name, rank, world, rank if local is None else local)


@guarded
def _offers(dist: Any, of: tuple, run_dir: str | None) -> None:
    """Let rank 0 write its run into the store of a default group that is about to be made."""
    _, rank, _, _, store, name, *_ = of
    if rank == 0:
        joining.offer(dist.PrefixStore(f"{name}/", store), run_dir)


def _join_group(dist: Any, run_dir: str | None, name: str | None) -> None:
    """Record a rank whose process group exists, in the run of that group."""
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        joining.join(dist._get_default_store(), rank, run_dir, str(dist.get_backend_config()))
    except Exception as e:
        if state.RAISE:
            raise
        reason = OSError(f"it found no run of its process group ({type(e).__name__}: {e})")
        session.report_not_recorded(reason, "set DISTDIAG=1 for all ranks, or name one DISTDIAG_RUN_DIR")
        return
    _begin(run_dir, name, rank, world)


@guarded
def _becomes_rank(run_dir: str | None, name: str | None, spawned: bool) -> None:
    """Wrap the two functions by which a process becomes a rank; until then nothing is recorded."""
    import torch

    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d as dist

        # without the wrapper of DISTDIAG=1, which this one replaces: children that are spawned have both
        original = getattr(dist.init_process_group, "_distdiag", dist.init_process_group)

        @wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            replace(init_process_group, original)
            try:
                return enter_group(dist, args, kwargs, run_dir, name, spawned)
            except BaseException as e:
                replace(original, init_process_group)  # the script may try again
                e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
                raise

        replace(dist.init_process_group, init_process_group)
    plain = torch.autograd.backward

    @wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        function = plain
        if session.current is None and torch.autograd.backward is backward:
            torch.autograd.backward = plain
            _begin(run_dir, name, 0, 1)
            function = torch.autograd.backward
        try:
            return function(*args, **kwargs)
        except BaseException as e:
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            raise

    torch.autograd.backward = backward


def _rank_of_call(args: tuple, kwargs: dict) -> tuple[int, int]:
    """Return (rank, world_size) of an `init_process_group` call, from its arguments, the environment or its URL."""
    names = ("backend", "init_method", "timeout", "world_size", "rank")
    given = dict(zip(names, args, strict=False)) | kwargs
    rank, world = given.get("rank", -1), given.get("world_size", -1)
    if not isinstance(rank, int) or rank < 0:
        rank = number(TORCHRUN.rank) or 0
    if not isinstance(world, int) or world < 1:
        world = number(TORCHRUN.world) or 1
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
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
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
