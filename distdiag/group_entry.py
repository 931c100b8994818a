"""Where a process joins its first group: `init_process_group`, under each name that torch has for it."""

from __future__ import annotations

import sys
from typing import Any


def replace(old: Any, new: Any) -> None:
    """Give every module of torch that has `init_process_group` another one: `init_device_mesh` calls it by another name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and getattr(module, "__dict__", {}).get("init_process_group") is old:
            module.init_process_group = new  # type: ignore[attr-defined]
