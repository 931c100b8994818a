"""Hooks on the creation and destruction of process groups, at the functions that every caller reaches by module attribute."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch.distributed as public
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as dist

from distdiag.page.layout import LifeWord, Phase, SampleKind
from distdiag.recorder.hooks.collectives import Collectives, note_caught
from distdiag.recorder.hooks.wrapping import around
from distdiag.recorder.state import guarded, now_ns

_FR_SIZE = "TORCH_FR_BUFFER_SIZE"
# methods of ProcessGroup after which a group has other members, no communicator, or operations without number and peer
_UNFOLLOWED = ("reconfigure", "abort", "new_window")


def install(collectives: Collectives) -> list[str]:
    """Wrap what creates, changes and destroys groups; return the functions that this torch lacks.

    Called once per process.
    """
    hooks = _Hooks(collectives)
    missing = []
    for name, begins, ends in (
        ("init_process_group", hooks.initialises, hooks.has_initialised),
        ("_warn_not_in_group", hooks.not_a_member, None),
        ("_new_group_with_tag", collectives.new_group, hooks.has_created),
        ("destroy_process_group", collectives.group_destroyed, None),
        ("_abort_process_group", lambda group=None: group, lambda group, *_: collectives.group_destroyed(group)),
        ("shrink_group", hooks.shrinks, hooks.has_shrunk),
    ):
        original = getattr(dist, name, None)
        if original is None:
            if name != "shrink_group":  # an old torch cannot shrink a group: nothing is missing
                missing.append(f"distributed_c10d.{name}")
            continue
        wrapped = around(original, begins, ends)
        for module in (dist, public):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)
    for name in _UNFOLLOWED:
        original = getattr(c10d.ProcessGroup, name, None)
        if original is not None:  # some are of torch 2.14
            setattr(c10d.ProcessGroup, name, around(original, partial(hooks.unfollows, name), c_method=True))
    return missing


class _Hooks:
    """What is recorded before and after each function."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    @guarded
    def initialises(self, *_args: Any, **_kwargs: Any) -> bool:
        c = self.collectives
        c.generation += 1
        c.header.initialised = c.generation
        c.lost = False
        c.group_call("init_process_group", c.generation, [])
        return _size_flight_recorder()

    @guarded
    def has_initialised(self, sized: bool, _out: Any, error: BaseException | None) -> None:
        if sized:
            os.environ.pop(_FR_SIZE, None)
        if error is not None:
            note_caught(self.collectives.recorder, error)
        self.collectives.group_call_ends()
        if error is None:
            initialised(self.collectives)

    @guarded
    def has_created(self, _began: None, pg: Any, _error: BaseException | None) -> None:
        self.collectives.group_call_ends()
        if isinstance(pg, c10d.ProcessGroup):
            self.collectives.group(pg)

    @guarded
    def shrinks(self, _ranks_to_exclude: Any, group: Any = None, *_args: Any, **_kwargs: Any) -> tuple[Any, bool]:
        world = dist.group.WORLD
        return self.collectives.groups.get(id(group or world)), group is None or group is world

    @guarded
    def has_shrunk(self, began: tuple[Any, bool], pg: Any, error: BaseException | None) -> None:
        """Note that the members of a group are fewer. In a smaller default group, ranks have other numbers."""
        if error is not None:
            return
        before, is_default = began
        self.collectives.unfollow(pg, "shrink_group", sys._getframe(1), before)
        if is_default:
            self.collectives.lost = True
            self.collectives.header.life = LifeWord.RUNNING  # torch has destroyed the default group and made another

    @guarded
    def unfollows(self, name: str, pg: Any, *_args: Any, **_kwargs: Any) -> None:
        self.collectives.unfollow(pg, name, sys._getframe(1))

    @guarded
    def not_a_member(self, op: str) -> None:
        """Record a collective that this rank calls in a group it is not a member of. It returns at once; each site is recorded once."""
        c = self.collectives
        site = c.recorder.user_site(sys._getframe(1))
        if (op, site) not in c.outside:
            c.outside.add((op, site))
            c.page.write_sample(SampleKind.NOT_A_MEMBER, c.header.step, 0.0, name=op, site=site)


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
