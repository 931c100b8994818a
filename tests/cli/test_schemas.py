"""`--json` output is valid against docs/schemas; `make wheel-check` checks commands that need a live job."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from distdiag.cli import main
from tests.jobs import REPOSITORY
from tests.report.runs import DEADLOCK, make_run

SCHEMAS = REPOSITORY / "docs" / "schemas"


def schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schemas", REPOSITORY / "tools" / "schemas.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("findings-1", ["diagnose", "RUN", "--json"]),
        ("findings-1", ["diagnose", "absent", "--json"]),
        ("snapshot-1", ["tui", "RUN", "--once", "--json"]),
        ("report-1", ["report", "RUN", "--format", "json"]),
        ("compare-1", ["compare", "RUN", "RUN", "--json"]),
        ("doctor-1", ["doctor", "--no-torch", "--json"]),
        ("stacks-1", ["dump", "absent", "--json"]),
        ("profile-1", ["profile", "absent", "--json"]),
        ("probe-1", ["probe", "allredcue", "--json"]),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else v,
)
def test_the_output_of_a_command_is_valid(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], name: str, args: list[str]
) -> None:
    make_run(tmp_path / "run", findings=(DEADLOCK,))
    main([str(tmp_path / "run") if a == "RUN" else a for a in args])
    printed = json.loads(capfdbinary.readouterr().out)
    assert next(iter(printed)) == "schema"
    jsonschema.validate(printed, schema(name))
    assert "checks" not in printed.get("details", {})  # only for `diagnose --why`
    del printed["error" if "error" in printed else next(k for k in printed if k != "schema")]
    with pytest.raises(jsonschema.ValidationError):  # a removed key is noticed
        jsonschema.validate(printed, schema(name))


def test_the_files_describe_the_types_that_are_printed() -> None:
    made = generator()
    for name in made.SCHEMAS:
        assert schema(made.file_name(name).removesuffix(".json")) == made.schema_of(name), "python tools/schemas.py"
    assert len(list(SCHEMAS.glob("*.json"))) == len(made.SCHEMAS)
