"""Entering and leaving process groups, hooked at the functions that every caller reaches by module attribute."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as public
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as dist

from distdiag.page.layout import LifeWord, Phase, SampleKind
from distdiag.recorder.hooks.collectives import Collectives, note_caught
from distdiag.recorder.hooks.wrapping import hide_frame, wraps
from distdiag.recorder.state import guarded, now_ns

_FR_SIZE = "TORCH_FR_BUFFER_SIZE"


def install(col: Collectives) -> None:
    """Wrap `init_process_group`, `new_group` and `destroy_process_group`; called once per process."""

    def replace(name: str, make: Any) -> None:
        original = getattr(dist, name)
        wrapped = wraps(original)(make(original))
        for module in (dist, public):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)

    def init(original: Any) -> Any:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            col.generation += 1
            col.h.initialised = col.generation
            col.group_call("init_process_group", col.generation, [])
            sized = _size_flight_recorder()
            try:
                out = original(*args, **kwargs)
            except BaseException as e:
                hide_frame(e)
                note_caught(col.r, e)
                raise
            finally:
                if sized:
                    os.environ.pop(_FR_SIZE, None)
                col.group_call_ends()
            initialised(col)
            return out

        return init_process_group

    def new(original: Any) -> Any:
        def _new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
            col.new_group(args, kwargs)
            try:
                out = original(*args, **kwargs)
            except BaseException as e:
                hide_frame(e)
                raise
            finally:
                col.group_call_ends()
            _registered(col, out)
            return out

        return _new_group_with_tag

    def destroy(original: Any) -> Any:
        def destroy_process_group(group: Any = None) -> Any:
            col.group_destroyed(group)
            try:
                return original(group)
            except BaseException as e:
                hide_frame(e)
                raise

        return destroy_process_group

    def outside(original: Any) -> Any:
        def _warn_not_in_group(op_name: Any) -> Any:
            _not_a_member(col, op_name)
            try:
                return original(op_name)
            except BaseException as e:
                hide_frame(e)
                raise

        return _warn_not_in_group

    replace("init_process_group", init)
    replace("_warn_not_in_group", outside)
    replace("_new_group_with_tag", new)
    replace("destroy_process_group", destroy)


def _size_flight_recorder() -> bool:
    """Set the length of the flight recorder if the user has not; torch reads it when the first process group is made.

    A dump of it is evidence, and costs its length. Returns True if the variable is to be removed again: what the script
    starts later must not inherit it.
    """
    if any(name in os.environ for name in (_FR_SIZE, "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        return False
    os.environ[_FR_SIZE] = "1000"
    return True


@guarded
def initialised(col: Collectives) -> None:
    pg = dist.group.WORLD
    if pg is not None:
        col.group(pg)
        col.h.world_size = pg.size()
        col.h.life = LifeWord.RUNNING
        if col.h.phase == Phase.INIT:
            col.h.phase_since_ns = now_ns()


@guarded
def _not_a_member(col: Collectives, op: str) -> None:
    """A collective that this rank calls in a group of others, and that returns at once; each place of it is noted once."""
    site = col.r.user_site(sys._getframe(3))
    if (op, site) not in col.outside:
        col.outside.add((op, site))
        col.r.page.write_sample(int(SampleKind.NOT_A_MEMBER), col.h.step, 0.0, 0, op, site, now_ns())


@guarded
def _registered(col: Collectives, pg: Any) -> None:
    if isinstance(pg, c10d.ProcessGroup):
        col.group(pg)
