"""Records which modules the first training forward of a model enters: an unused parameter's module was never called, or its output
is not in the loss. Only that forward is watched, and none if torch.compile is in use: its guards would notice the hook's removal.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


class FirstForward:
    """Collects the modules that are entered until `end()`."""

    def __init__(self) -> None:
        self._called: set[int] = set()
        self._hook = register_module_forward_pre_hook(self._enters)

    def _enters(self, module: Any, _inputs: Any) -> None:
        self._called.add(id(module))

    def end(self) -> None:
        self._hook.remove()

    def never_called(self, model: Any, parameters: list[str]) -> list[str]:
        """Return the names of the modules of `model` that own one of `parameters` and were not entered."""
        modules = dict(model.named_modules())
        owners = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
        return [name for name in owners if name in modules and id(modules[name]) not in self._called]


def watch() -> FirstForward | None:
    """Start to record; return None if something is compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        backends = getattr(dynamo, "cached_backends", None)
        if backends is None or any(b is not None for b in backends.values()):
            return None
    return FirstForward()
