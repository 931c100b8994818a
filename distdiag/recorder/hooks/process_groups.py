"""Hooks on the creation and destruction of process groups, at the functions that every caller reaches by module attribute."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as public
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as dist

from distdiag.page.layout import LifeWord, Phase, SampleKind
from distdiag.recorder.hooks.collectives import Collectives, note_caught
from distdiag.recorder.hooks.wrapping import as_c_method, hide_frame, wraps
from distdiag.recorder.state import guarded, now_ns

Function = Callable[..., Any]
_FR_SIZE = "TORCH_FR_BUFFER_SIZE"
# methods of ProcessGroup after which a group has other members, no communicator, or operations without number and peer
_UNFOLLOWED = ("reconfigure", "abort", "new_window")


def install(collectives: Collectives) -> list[str]:
    """Wrap what creates, changes and destroys groups; return the functions that this torch lacks.

    Called once per process.
    """
    missing = []
    for name, make in (
        ("init_process_group", _init_process_group),
        ("_warn_not_in_group", _warn_not_in_group),
        ("_new_group_with_tag", _new_group),
        ("destroy_process_group", _destroy_process_group),
        ("_abort_process_group", _abort_process_group),
        ("shrink_group", _shrink_group),
    ):
        original = getattr(dist, name, None)
        if original is None:
            if name != "shrink_group":  # an old torch cannot shrink a group: nothing is missing
                missing.append(f"distributed_c10d.{name}")
            continue
        wrapped = wraps(original)(make(collectives, original))
        for module in (dist, public):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)
    for name in _UNFOLLOWED:
        original = getattr(c10d.ProcessGroup, name, None)
        if original is not None:  # some are of torch 2.14
            setattr(c10d.ProcessGroup, name, as_c_method(_unfollowed(collectives, name, original), original))
    return missing


def _init_process_group(collectives: Collectives, original: Function) -> Function:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        collectives.generation += 1
        collectives.header.initialised = collectives.generation
        collectives.lost = False
        collectives.group_call("init_process_group", collectives.generation, [])
        sized = _size_flight_recorder()
        try:
            out = original(*args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            note_caught(collectives.recorder, e)
            raise
        finally:
            if sized:
                os.environ.pop(_FR_SIZE, None)
            collectives.group_call_ends()
        initialised(collectives)
        return out

    return init_process_group


def _new_group(collectives: Collectives, original: Function) -> Function:
    def _new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
        collectives.new_group(args, kwargs)
        try:
            out = original(*args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            raise
        finally:
            collectives.group_call_ends()
        _registered(collectives, out)
        return out

    return _new_group_with_tag


def _destroy_process_group(collectives: Collectives, original: Function) -> Function:
    def destroy_process_group(group: Any = None) -> Any:
        collectives.group_destroyed(group)
        try:
            return original(group)
        except BaseException as e:
            hide_frame(e)
            raise

    return destroy_process_group


def _abort_process_group(collectives: Collectives, original: Function) -> Function:
    def _abort_process_group(group: Any = None) -> Any:
        try:
            return original(group)
        except BaseException as e:
            hide_frame(e)
            raise
        finally:
            collectives.group_destroyed(group)

    return _abort_process_group


def _shrink_group(collectives: Collectives, original: Function) -> Function:
    def shrink_group(ranks_to_exclude: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        world = dist.group.WORLD
        before = collectives.groups.get(id(group or world))
        try:
            out = original(ranks_to_exclude, group, *args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            raise
        _shrunk(collectives, out, before, group is None or group is world)
        return out

    return shrink_group


@guarded
def _shrunk(collectives: Collectives, pg: Any, before: Any, is_default: bool) -> None:
    """Note that the members of a group are fewer. In a smaller default group, ranks have other numbers."""
    collectives.unfollow(pg, "shrink_group", sys._getframe(3), before)
    if is_default:
        collectives.lost = True
        collectives.header.life = LifeWord.RUNNING  # torch has destroyed the default group and made another


def _unfollowed(collectives: Collectives, name: str, original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives.unfollow(self, name, sys._getframe(1))
        try:
            return original(self, *args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            raise

    return call


def _warn_not_in_group(collectives: Collectives, original: Function) -> Function:
    def _warn_not_in_group(op_name: Any) -> Any:
        _not_a_member(collectives, op_name)
        try:
            return original(op_name)
        except BaseException as e:
            hide_frame(e)
            raise

    return _warn_not_in_group


def _size_flight_recorder() -> bool:
    """Set the length of the flight recorder unless the user has; torch reads it when the first process group is created.

    Returns True if the variable must be removed again, so that the script's child processes do not inherit it.
    """
    if any(name in os.environ for name in (_FR_SIZE, "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        return False
    os.environ[_FR_SIZE] = "1000"
    return True


@guarded
def initialised(collectives: Collectives) -> None:
    pg = dist.group.WORLD
    if pg is not None:
        collectives.group(pg)
        collectives.header.world_size = pg.size()
        collectives.header.life = LifeWord.RUNNING
        if collectives.header.phase == Phase.INIT:
            collectives.header.phase_since_ns = now_ns()


@guarded
def _not_a_member(collectives: Collectives, op: str) -> None:
    """Record a collective that this rank calls in a group it is not a member of. It returns at once; each site is recorded once."""
    site = collectives.recorder.user_site(sys._getframe(3))
    if (op, site) not in collectives.outside:
        collectives.outside.add((op, site))
        collectives.recorder.page.write_sample(
            int(SampleKind.NOT_A_MEMBER), collectives.header.step, 0.0, 0, op, site, now_ns()
        )


@guarded
def _registered(collectives: Collectives, pg: Any) -> None:
    if isinstance(pg, c10d.ProcessGroup):
        collectives.group(pg)
