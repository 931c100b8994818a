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


def replace(old: Any, new: Any) -> None:
    """Give the modules of torch whose `init_process_group` is `old` the function `new`: `init_device_mesh` has imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and getattr(module, "__dict__", {}).get("init_process_group") is old:
            module.init_process_group = new  # type: ignore[attr-defined]
