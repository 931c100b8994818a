"""Inject faults, to check that a probe finds them: `--inject delay:rank=1,ms=5`."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.errors import DistdiagError

_HINT = "write delay:rank=1,ms=5 or corrupt:rank=1 or drop:rank=1"


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault on one rank."""

    kind: str  # delay | corrupt | drop
    rank: int
    delay_s: float = 0.0


def parse_injection(text: str) -> Injection:
    """Parse `delay:rank=1,ms=5` (late before every operation), `corrupt:rank=1` (one wrong value in its result) or
    `drop:rank=1` (takes no part).

    Raises:
        DistdiagError: the text is none of these.
    """
    kind, _, rest = text.partition(":")
    values: dict[str, float] = {}
    try:
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            values[key.strip()] = float(value)
    except ValueError:
        raise DistdiagError(f"--inject '{text}': a value is not a number", _HINT) from None
    allowed = {"delay": {"rank", "ms"}, "corrupt": {"rank"}, "drop": {"rank"}}.get(kind)
    if allowed is None or set(values) != allowed or values["rank"] != int(values["rank"]):
        raise DistdiagError(f"--inject '{text}' is not a fault that can be injected", _HINT)
    if values.get("ms", 1) <= 0:
        raise DistdiagError(f"--inject '{text}' needs a delay above 0 ms", _HINT)
    return Injection(kind, int(values["rank"]), values.get("ms", 0.0) / 1e3)
