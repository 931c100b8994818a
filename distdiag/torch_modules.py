"""What recording needs in the script's process before it imports the recorder."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from typing import Any

_ours: set[str] = set()  # modules that were imported for us first
_hidden: dict[str, Any] = {}  # those whose names the script's folder has, too


@contextmanager
def own_imports() -> Iterator[None]:
    """Import modules of ours without a collection, and without the script's own `click.py` or `resource.py`.

    They hold enough objects to start a full collection, and torch so many that it takes 0.1 s: more than the imports themselves.
    """
    enabled, before = gc.isenabled(), {*sys.modules}
    theirs = {name: sys.modules[name] for name in _hidden if name in sys.modules}
    folder = "" if sys.flags.safe_path or not sys.path else sys.path[0]
    gc.disable()
    sys.modules.update(_hidden)
    if folder:  # last, not away: all packages may lie there
        sys.path.append(sys.path.pop(0))
    try:
        yield
    finally:
        with suppress(ValueError):
            if folder:
                sys.path.insert(0, sys.path.pop(len(sys.path) - 1 - sys.path[::-1].index(folder)))
        _ours.update({*sys.modules} - before)
        for name in _hidden:
            sys.modules.pop(name, None)
        sys.modules.update(theirs)
        if "torch" in sys.modules:  # else the script has not begun
            leave_names(folder)
        if enabled:
            gc.enable()


def leave_names(folder: str) -> None:
    """Forget the modules that were imported for us and of whose names the script's folder has another one, which the script imports."""
    for name in sorted(_ours & sys.modules.keys()):
        ours, of = getattr(sys.modules.get(name), "__spec__", None), name.partition(".")[0]
        spec = PathFinder.find_spec(of, [folder]) if folder and name == of else None
        if spec is not None and spec.loader is not None and spec.origin != getattr(ours, "origin", None):
            _hidden.update({x: sys.modules.pop(x) for x in [*sys.modules] if x.partition(".")[0] == of})


# that have `init_process_group`: `init_device_mesh` has imported it by name
_HOLDERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


def replace(old: Any, new: Any) -> None:
    """Give the modules of torch whose `init_process_group` is `old` the function `new`.

    Only these are looked at: in a forked rank, a reference to a module copies the page of memory that it is in, and torch has 1,000.
    """
    for module in map(sys.modules.get, _HOLDERS):
        if getattr(module, "__dict__", {}).get("init_process_group") is old:
            module.init_process_group = new  # type: ignore[union-attr]
