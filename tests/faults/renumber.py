"""Correct the line numbers in manifest.json after a job was edited, by the text of each line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def nearest(lines: list[str], code: str, old: int) -> int | None:
    """Return the number of the line whose text is `code`, nearest to the old number; None if there is none."""
    hits = [n for n, text in enumerate(lines, 1) if text.strip() == code]
    return min(hits, key=lambda n: abs(n - old), default=None)


def main() -> int:
    path = FOLDER / "manifest.json"
    manifest = json.loads(path.read_text())
    lost = 0
    for job in manifest["jobs"]:
        others = (p for other in job.get("on", {}).values() for p in other.get("positions", []))
        for p in (*job.get("positions", []), *others):
            line = nearest((FOLDER / p["file"]).read_text().splitlines(), p["code"], p["line"])
            if line is None:
                print(f"{p['file']}: no line {p['code']!r}", file=sys.stderr)
                lost += 1
                continue
            if "last_line" in p:
                p["last_line"] += line - p["line"]
            p["line"] = line
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
