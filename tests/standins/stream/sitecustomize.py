"""Imported by Python at its start if this folder is on PYTHONPATH: the process's groups become stand-ins."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from stream_backend import install

install.on_import()

# the sitecustomize that this one hides
_here = str(Path(__file__).resolve().parent)
_spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p and str(Path(p).resolve()) != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
