"""Import the user's `module:function` from the working directory."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from distdiag.errors import DistdiagError


def find_function(option: str, text: str) -> Callable[[], Any]:
    module_name, _, name = text.partition(":")
    hint = f"write {option} package.module:function, a function without arguments in a file that Python can import from here"
    if not module_name or not name:
        raise DistdiagError(f"{option} '{text}' is not MODULE:FUNCTION", hint)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as e:
        raise DistdiagError(f"{option}: importing {module_name} failed: {type(e).__name__}: {e}", hint) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise DistdiagError(f"{option}: {module_name} has no function {name}", hint)
    return function
