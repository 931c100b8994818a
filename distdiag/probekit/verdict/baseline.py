"""Save results as a baseline, and compare later results with it: significance test and effect size."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from distdiag import guard
from distdiag.errors import DistdiagError
from distdiag.files import replacing
from distdiag.probekit.verdict.result import Measure, Result, Verdict
from distdiag.terms import statistics
from distdiag.terms.units import message_size

SCHEMA = "distdiag.probe-baseline/1"
_ALPHA = 0.01  # over all sizes of a probe together (Holm)
_LARGE_DELTA = 0.474  # Cliff's delta above this is called large (Romano 2006)
_LEAST_VALUES = 4  # on both sides, for a test
_MOST_BYTES = 64 << 20  # of a saved file


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    key: dict[str, Any]
    noisy: bool
    measures: list[Measure]
    verdict: str = ""


def key_of(result: Result) -> dict[str, Any]:
    """Return what must be equal for two results to be comparable."""
    return {
        "probe": result.probe,
        "host_class": result.details.get("host_class"),
        "hosts": len(result.hosts),
        "device": result.device,
        "backend": result.backend,
        "world_size": result.world_size,
        "dtype": result.dtype,
        "torch": result.versions.get("torch"),
    }


def save(path: str, results: list[Result]) -> None:
    """Write the measures of all results, atomically."""
    entries = [
        Entry(key_of(r), bool(r.host_noise and r.host_noise.noisy), r.measures, r.verdict)
        for r in results
        if r.measures
    ]
    data = {"schema": SCHEMA, "created_unix_s": int(time.time()), "entries": entries}
    try:
        with replacing(Path(path).parent, Path(path).name, own=False) as part:
            part.write_bytes(msgspec.json.encode(data) + b"\n")
    except OSError as e:
        raise DistdiagError(f"cannot write {path}: {e.strerror}", "choose another file with --save") from e


def saved(path: str) -> Any:
    """Return the content of a JSON file that a probe has written.

    Raises:
        OSError: it cannot be read, or is no regular file: a pipe may never end.
        ValueError: it is not JSON.
    """
    with guard.regular(Path(path)) as file:
        try:
            return msgspec.json.decode(file.read(_MOST_BYTES))
        except (msgspec.DecodeError, RecursionError) as e:
            raise ValueError(str(e)) from None


def load(path: str) -> list[Entry]:
    hint = "`distdiag probe NAME --save FILE` writes one"
    try:
        data = saved(path)
    except OSError as e:
        raise DistdiagError(f"no baseline {path}: {e.strerror}", hint) from None
    except ValueError:
        raise DistdiagError(f"{path} is not a baseline: not JSON", hint) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise DistdiagError(f"{path} is not a baseline: schema {found!r}, not {SCHEMA!r}", hint)
    try:
        return msgspec.convert(data.get("entries"), list[Entry])
    except msgspec.ValidationError:
        raise DistdiagError(f"{path} is a damaged baseline", hint) from None


def compare(
    result: Result, entries: list[Entry], tolerance: float, again: Callable[[Result], list[Measure] | None] | None = None
) -> None:  # fmt: skip
    """Compare `result` with its entry of the baseline; add `comparison` and the verdict.

    A value is slower if the difference is significant (Mann-Whitney on block medians, Holm over the sizes),
    larger than `tolerance`, and a large effect (Cliff's delta). Blocks of one run share its placement and
    neighbours, so their spread is too narrow for a verdict: slower values are measured again, and only those
    that are slower both times fail. Without a second measurement, or on a noisy host, the verdict is
    inconclusive; so it is against a baseline of a noisy host, which anything passes.

    Args:
        tolerance: Share, 0.1 = 10 %.
        again: Measures the probe again; None if that is not possible. It returns None on failure or a noisy host.

    Raises:
        DistdiagError: the baseline is of another probe, host class, backend, world size, type or torch.
    """
    entry = _entry_of(result, entries)
    if entry is None:
        return  # not possible here or on the baseline's host
    rows = _compare_measures(result.measures, entry.measures, tolerance)
    result.comparison = rows
    noisy = entry.noisy or bool(result.host_noise and result.host_noise.noisy)
    tested = [r for r in rows if r["p_value"] is not None]
    first = [r for r in tested if r["slower"]]
    second = again(result) if first and again is not None else None
    if second is not None:
        confirmed = {r["key"] for r in _compare_measures(second, entry.measures, tolerance) if r["slower"]}
        for row in first:
            row["slower"] = row["key"] in confirmed
    slower = [r for r in first if r["slower"]]
    if slower:
        worst = max(slower, key=lambda r: r["ratio"])
        sure = second is not None and not noisy
        why = (
            "" if sure else " (a host was busy: measure both when quiet)" if noisy else " (one measurement: repeat it)"
        )
        twice = ", in two measurements" if second is not None else ""
        result.judge(
            Verdict.FAIL if sure else Verdict.INCONCLUSIVE,
            f"slower than the baseline at {len(slower)} of {len(tested)}{twice}: {_name(worst['key'])} by "
            f"{worst['ratio'] - 1:.0%} (p {worst['p_value']:.1g}, Cliff's delta {worst['cliffs_delta']:+.2f}){why}",
        )
    elif entry.noisy:
        result.judge(Verdict.INCONCLUSIVE, "the baseline is that of a busy host: save another when it is quiet")
    elif first:
        result.reasons.append(
            f"no slower than the baseline: {', '.join(_name(r['key']) for r in first)} was in one measurement of two"
        )
    elif not tested:
        result.judge(Verdict.INCONCLUSIVE, "too few repeats to compare with the baseline: give more with --budget")
    else:
        ratio = float(np.median([r["ratio"] for r in tested]))
        result.reasons.append(f"no slower than the baseline (median ratio {ratio:.2f} over {len(tested)})")


def _entry_of(result: Result, entries: list[Entry]) -> Entry | None:
    """Return the entry that was measured under the same conditions (an error if there is none).

    None if the result has nothing to compare.
    """
    mine = key_of(result)
    of_probe = [e for e in entries if e.key.get("probe") == result.probe]
    if not of_probe:
        if not result.measures:
            return None
        had = ", ".join(sorted({str(e.key.get("probe")) for e in entries})) or "nothing"
        raise DistdiagError(f"the baseline has no {result.probe} (it has {had})", "save one with --save")
    entry = next((e for e in of_probe if e.key == mine), None)
    if entry is None:
        theirs = of_probe[0].key
        differs = "; ".join(f"{k}: {theirs.get(k)} there, {v} here" for k, v in mine.items() if theirs.get(k) != v)
        raise DistdiagError(f"the baseline was made under other conditions ({differs})", "save one here with --save")
    return entry


def _name(key: str) -> str:
    """Return `4 MiB` for a size in bytes; other keys unchanged."""
    return message_size(int(key)) if key.isdigit() else key


def _compare_measures(mine: list[Measure], theirs: list[Measure], tolerance: float) -> list[dict[str, Any]]:
    before = {m.key: m for m in theirs}
    rows: list[dict[str, Any]] = []
    for m in mine:
        other = before.get(m.key)
        if other is None:
            continue
        row: dict[str, Any] = {"key": m.key, "ratio": None, "p_value": None, "cliffs_delta": None, "slower": False}
        if min(len(m.values), len(other.values)) >= _LEAST_VALUES:
            c = statistics.compare(np.array(other.values), np.array(m.values))
            row |= {"ratio": c.ratio, "p_value": c.p_value, "cliffs_delta": c.cliffs_delta}
        rows.append(row)
    tested = sorted((r for r in rows if r["p_value"] is not None), key=lambda r: r["p_value"])
    for i, row in enumerate(tested):
        if row["p_value"] * (len(tested) - i) > _ALPHA:
            break  # Holm: nothing after the first that fails
        row["slower"] = row["ratio"] > 1 + tolerance and row["cliffs_delta"] > _LARGE_DELTA
    return rows
