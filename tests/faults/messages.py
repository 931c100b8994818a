"""Every message that the tapes of the collection lead to, in one file: `messages.golden.txt`.

    python -m tests.faults.messages     # judge all tapes and write it again; `git diff` is what changed

Measured values are masked: they depend on the poll. Whoever changes a message reads the difference; none may lose a fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

from distdiag.diagnosis.model.findings import Finding, rank_list
from tests.faults.record import FOLDER, TAPES

GOLDEN = FOLDER / "messages.golden.txt"
_UNITS = "ms|s|minutes|hours|days|%|B|KiB|MiB|GiB|times"
MEASURED = re.compile(rf"\d[\d,]*\.\d+(e[-+]?\d+)?|\d+e-\d+|\d[\d,]*(?= ?({_UNITS})(?!\w))")


def masked(text: str) -> str:
    """Return a message with `~` in place of each measured value."""
    return MEASURED.sub("~", text.replace("\n", "\\n"))


def text(findings: Iterable[Finding]) -> str:
    """Return what findings state and advise, as the golden has it."""
    return "\n".join(_lines(findings))


def _lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield what findings state and how, in a fixed order."""
    for f in sorted(findings, key=lambda f: (f.kind, f.cause or "", f.culprits, f.victims, f.message)):
        cleared = " cleared" if f.cleared_s is not None else ""
        yield (
            f"  {f.kind}/{f.cause or '–'} {f.certainty} {f.severity}{cleared}: "
            f"culprits {rank_list(f.culprits)}, victims {rank_list(f.victims)}"
        )
        yield from (f"    {text}" for text in (masked(f.message), f"cost: {masked(f.cost)}", f"do: {masked(f.advice)}"))


@cache
def golden() -> dict[str, str]:
    """Return the accepted messages by tape, as BACKEND/JOB."""
    blocks = GOLDEN.read_text().split("\n\n")
    return {name: rest for name, _, rest in (block.strip("\n").partition("\n") for block in blocks)}


def main() -> None:
    """Judge all tapes and write the file."""
    from tests.faults import replay

    results = replay.replay_all(replay.tapes(TAPES), FOLDER / "manifest.json")
    blocks = [f"{one.name}\n{one.messages}".rstrip() for one in results if isinstance(one, replay.Replayed)]
    GOLDEN.write_text("\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
