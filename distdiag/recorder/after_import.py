"""Calls a function right after the script's own import of a module: the recorder imports no module before the job does."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

from distdiag.unpatched import get_ident


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then` once, right after module `name` has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then
        self._asking: set[int] = set()  # threads that ask the other finders, one of which may ask all again

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        thread = get_ident()
        if fullname != self.name or thread in self._asking or self not in sys.meta_path:
            return None
        self._asking.add(thread)
        try:
            others = sys.meta_path[sys.meta_path.index(self) + 1 :]
            finds = [find for other in others if (find := getattr(other, "find_spec", None))]
            spec = next((x for find in finds if (x := find(fullname, path, target)) is not None), None)
        finally:
            self._asking.discard(thread)
        loader: Any = spec.loader if spec is not None else None
        if not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return spec
        own, execute = vars(loader).get("exec_module"), loader.exec_module

        def exec_module(module: Any) -> None:
            # restore the loader: pickles and reloads must not see our function
            setattr(loader, "exec_module", own) if own else delattr(loader, "exec_module")
            try:
                execute(module)
            except BaseException as e:
                e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
                raise
            if self in sys.meta_path:  # here: a script may look for the module, and import it later
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module
        return spec


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as a module is imported (now, if it is)."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))
