"""What recording needs in a process that has imported torch, before it imports the recorder."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold the garbage collector off while modules of ours are imported.

    They hold enough objects to start a full collection, and torch so many that it takes 0.1 s: more than the imports themselves.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# that have `init_process_group`: `init_device_mesh` has imported it by name
_HOLDERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


def replace(old: Any, new: Any) -> None:
    """Give the modules of torch whose `init_process_group` is `old` the function `new`.

    Only these are looked at: in a forked rank, a reference to a module copies the page of memory that it is in, and torch has 1,000.
    """
    for module in map(sys.modules.get, _HOLDERS):
        if getattr(module, "__dict__", {}).get("init_process_group") is old:
            module.init_process_group = new  # type: ignore[union-attr]
