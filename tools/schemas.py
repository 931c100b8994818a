"""Write docs/schemas/*.json, the JSON Schemas of every `--json` output, from the types that produce it.

Usage: python tools/schemas.py [DIRECTORY]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag.diagnosis.model.findings import Report
from distdiag.doctor.check import Examination
from distdiag.history.answers import Answers
from distdiag.probekit.verdict.result import Result
from distdiag.report.compare import Comparison
from distdiag.report.facts import RunFacts
from distdiag.store.stacks import Stacks
from distdiag.traces.model import Profile
from distdiag.tui.once import SnapshotJson

ROOT = Path(__file__).resolve().parents[1]

# schema: (command, type, keys that the command adds to the type, keys of the type that are not printed)
SCHEMAS: dict[str, tuple[str, Any, dict[str, str], tuple[str, ...]]] = {
    "distdiag.findings/1": ("diagnose --json", Report, {}, ()),
    "distdiag.snapshot/1": ("tui --once --json", SnapshotJson, {}, ()),
    "distdiag.stacks/1": ("dump --json", Stacks, {"run": "string"}, ()),
    "distdiag.profile/1": ("profile --json", Profile, {}, ()),
    "distdiag.compare/1": ("compare --json", Comparison, {}, ()),
    "distdiag.doctor/1": ("doctor --json", Examination, {}, ()),
    "distdiag.history/1": ("history --output-format json", Answers, {}, ()),
    "distdiag.report/1": ("report --format json", RunFacts, {}, ()),
    "distdiag.probe/1": ("probe NAME --json", Result, {}, ("measures", "comparison")),
}
ERROR = {
    "type": "object",
    "properties": {
        "schema": {"type": "string"},
        "error": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("kind", "message", "hint")},
            "required": ["kind", "message", "hint"],
        },
    },
    "required": ["schema", "error"],
}

ALL_PROBES = {  # for `probe all --json`
    "type": "object",
    "properties": {
        "schema": {"const": "distdiag.probe/1"},
        "probe": {"const": "all"},
        "world_size": {"type": "integer"},
        "backend": {"type": "string"},
        "device": {"type": "string"},
        "verdict": {"$ref": "#/$defs/Verdict"},
        "reasons": {"type": "array", "items": {"type": "string"}},
        "budget_s": {"type": "number"},
        "probes": {"type": "array", "items": {"$ref": "#/$defs/One"}},
    },
    "required": ["schema", "probe", "world_size", "backend", "device", "verdict", "reasons", "budget_s", "probes"],
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema of one output. Every key is always present; new keys may be added within the same version."""
    command, made_by, added, hidden = SCHEMAS[name]
    body = msgspec.json.schema(made_by)
    kinds = body.pop("$defs")
    top = kinds.pop(body["$ref"].rpartition("/")[2])
    for kind in (top, *kinds.values()):
        kind.pop("description", None)  # a docstring: its wording is not part of the contract
        if "properties" in kind:
            kind["required"] = sorted(kind["properties"])
            for about in kind["properties"].values():
                about.pop("default", None)
    for key in hidden:
        top["properties"].pop(key, None)
    top["properties"] = {
        "schema": {"const": name},
        **{key: {"type": kind} for key, kind in added.items()},
        **{key: about for key, about in top["properties"].items() if key != "schema"},
    }
    top["required"] = sorted(top["properties"])
    if hidden:
        kinds.pop("Measure", None)
    answers = [top, {"$ref": "#/$defs/Error"}]
    if name == "distdiag.probe/1":
        kinds["One"] = top
        answers = [{"$ref": "#/$defs/One"}, ALL_PROBES, {"$ref": "#/$defs/Error"}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": f"`distdiag {command}`: this object, or an error.",
        "anyOf": answers,
        "$defs": {**kinds, "Error": ERROR},
    }


def file_name(schema: str) -> str:
    """Return the file name of a schema: `distdiag.findings/1` is in `findings-1.json`."""
    return schema.removeprefix("distdiag.").replace("/", "-") + ".json"


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "schemas"
    directory.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        (directory / file_name(name)).write_text(json.dumps(schema_of(name), indent=1, sort_keys=False) + "\n")


if __name__ == "__main__":
    main()
