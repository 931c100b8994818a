"""Replaces `init_process_group` in every module of torch that has it: `init_device_mesh` has imported it by name."""

from __future__ import annotations

import sys
from typing import Any


def replace(old: Any, new: Any) -> None:
    """Give the modules of torch whose `init_process_group` is `old` the function `new`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and getattr(module, "__dict__", {}).get("init_process_group") is old:
            module.init_process_group = new  # type: ignore[attr-defined]
