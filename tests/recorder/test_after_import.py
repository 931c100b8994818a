"""A function is called after the script's own import of a module, whatever looked for the module before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from distdiag.recorder.after_import import after_import


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "wanted_module.py").write_text("import sys\nif 'fails' in vars(sys):\n    raise OSError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.invalidate_caches()
    yield "wanted_module"
    sys.modules.pop("wanted_module", None)


def test_looking_for_a_module_and_a_failed_import_are_no_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    after_import(name, lambda: called.append("first"))
    after_import(name, lambda: called.append("second"))
    assert importlib.util.find_spec(name) is not None
    with monkeypatch.context() as failing:
        failing.setattr(sys, "fails", True, raising=False)
        with pytest.raises(OSError, match=r"^$"):
            importlib.import_module(name)
    assert not called
    module = importlib.import_module(name)
    assert sorted(called) == ["first", "second"] and "exec_module" not in vars(module.__loader__)


def test_a_finder_of_the_job_loads_the_module(name: str) -> None:
    """An agent's import hook asks all finders again, and wraps what they find."""
    events: list[str] = []

    class Finder:
        asking = False

        def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname != name or self.asking:
                return None
            self.asking = True
            spec = importlib.util.find_spec(fullname)
            self.asking = False
            assert spec is not None and spec.loader is not None
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), events.append("agent"))  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    after_import(name, lambda: events.append("ours"))
    importlib.import_module(name)
    assert events == ["agent", "ours"] and PathFinder in sys.meta_path
