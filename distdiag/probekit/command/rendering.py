"""Render results as a table, JSON, CSV, JUnit, or in nccl-tests' format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from xml.etree import ElementTree

from distdiag.errors import DistdiagError
from distdiag.probekit.command import catalog
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.probe import load_probe
from distdiag.probekit.verdict.decide import NOISE
from distdiag.probekit.verdict.result import SCHEMA, Result, Row, Verdict, worst
from distdiag.streams import PLAINER, columns, say, say_json, wants_colour
from distdiag.terms import tables
from distdiag.terms.operations import family
from distdiag.terms.units import counted

_COLOURS = {Verdict.PASS: "32", Verdict.FAIL: "31", Verdict.INCONCLUSIVE: "33"}


def write(results: list[Result], options: Options) -> None:
    """Print the results in the requested format, or write them to `--output`."""
    text = render(results, options)
    if options.output is None:
        say_json(text) if options.output_format == "json" else say(text, drawn=True)
        return
    try:
        Path(options.output).write_text(text + "\n", "utf-8")
    except OSError as e:
        raise DistdiagError(f"cannot write {options.output}: {e.strerror}", "choose another file with --output") from e
    say(f"written: {options.output}", err=True)


def check_output(options: Options) -> None:
    """Check before measuring that everything can be written."""
    for path in filter(None, (options.output, options.svg, options.save)):
        if Path(path).exists() and not options.force:
            raise DistdiagError(f"{path} already exists", "--force overwrites it")
        if not Path(path).resolve().parent.is_dir():
            raise DistdiagError(f"no directory for {path}", "create it first")
    if options.output_format == "nccl-tests" and (options.name == "barrier" or options.name not in catalog.COLLECTIVES):
        raise DistdiagError(f"nccl-tests has no table for {options.name}", "--as json, csv or junit")


def render(results: list[Result], options: Options) -> str:
    match options.output_format:
        case "json":
            return json.dumps(as_json(results, options), indent=2)
        case "csv":
            return as_csv(results)
        case "junit":
            return as_junit(results)
        case "nccl-tests":
            return as_nccl_tests(results[0])
    text = as_summary(results, options) if options.name == catalog.ALL else as_table(results[0], options)
    return _ascii(text) if options.ascii else text


def as_json(results: list[Result], options: Options) -> dict[str, object]:
    """Return the contract's object; for `all`, one that contains all probes."""
    if options.name != catalog.ALL:
        return results[0].as_json()
    first = results[0]
    return {
        "schema": SCHEMA,
        "probe": catalog.ALL,
        "world_size": first.world_size,
        "backend": first.backend,
        "device": first.device,
        "verdict": worst([r.verdict for r in results]),
        "reasons": [f"{r.probe}: {reason}" for r in results if r.verdict is not Verdict.PASS for reason in r.reasons],
        "budget_s": options.budget_s,
        "probes": [r.as_json() for r in results],
    }


def _coloured(text: str, verdict: Verdict, options: Options) -> str:
    """Return the text in the verdict's colour where a terminal shows it; never in a file."""
    wanted = options.output is None and wants_colour()[1]
    return f"\033[{_COLOURS[verdict]}m{text}\033[0m" if wanted else text


def _ascii(text: str) -> str:
    return text.replace("…", "..").encode("ascii", PLAINER).decode()


def as_table(result: Result, options: Options) -> str:
    probe = load_probe(result.probe)
    word = result.verdict.value
    lines = tables.wrapped(f"{word}  {result.probe}: {result.reasons[0]}", columns())
    lines[0] = lines[0].replace(word, _coloured(word, result.verdict, options), 1)
    for reason in result.reasons[1:]:
        lines += tables.wrapped(reason, columns(), "      ")
    ranks = counted(result.world_size, "rank")
    where = f"{result.backend} on {result.device}" if result.world_size > 1 else result.device
    dtype = f", {result.dtype}" if result.dtype else ""
    hosts = f", {len(result.hosts)} hosts" if len(result.hosts) > 1 else ""
    noise = ""
    if result.host_noise and result.host_noise.foreign_cpus is not None:
        noise = f", others used {result.host_noise.foreign_cpus:.1f} of {result.host_noise.cpus} CPUs"
    versions = "".join(f", {k} {v}" for k, v in result.versions.items())
    if result.world_size:  # else nothing was run
        text = f"{ranks}, {where}{dtype}{hosts}{versions}, {result.elapsed_s:.1f} s{noise}"
        lines += tables.wrapped(text, columns(), "      ")
    table = probe.table(result)
    if table.rows:
        cells = [table.headers, *table.rows]
        shown = [[*map(_ascii, row)] for row in cells] if options.ascii else cells  # before columns are aligned
        lines += ["", *tables.table(shown, table.left), ""]
    lines += probe.drawing(result)
    for note in result.notes:
        lines += tables.wrapped(f"note: {note}", columns())
    return "\n".join(lines)


def as_summary(results: list[Result], options: Options) -> str:
    verdict = worst([r.verdict for r in results])
    counts = ", ".join(f"{n} {v}" for v in Verdict if (n := sum(r.verdict is v for r in results)))
    lines = [f"{_coloured(verdict.value, verdict, options)}  {len(results)} probes: {counts}"]
    noisy = [r.host_noise for r in results if r.host_noise and r.host_noise.noisy]
    if noisy:
        most = max(n.foreign_cpus or 0.0 for n in noisy)
        lines.append(
            f"      others used up to {most:.1f} of {noisy[0].cpus} CPUs during {len(noisy)} of them: measure again when it is idle"
        )
    lines.append("")
    for r in results:
        possible = not r.reasons or not r.reasons[0].startswith("not possible here")
        word = r.verdict.value if possible else "–"
        summary = load_probe(r.probe).headline(r) if r.rows and possible else r.reasons[0]
        lines.append(f"{_coloured(f'{word:13s}', r.verdict, options)} {r.probe:14s}{r.elapsed_s:5.1f} s  {summary}")
        if r.verdict is not Verdict.PASS:
            # the noise is already reported above
            lines += [f"{'':13s} {'':14s}         {reason}" for reason in r.reasons if not reason.startswith(NOISE)]
    return "\n".join(lines)


def as_csv(results: list[Result]) -> str:
    """Return one line per row of every probe: the probe, its verdict, and the table's columns in ASCII."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for result in results:
        table = load_probe(result.probe).table(result)
        writer.writerow(["probe", "verdict", *map(_ascii, table.headers)])
        for row in table.rows:
            writer.writerow([result.probe, result.verdict.value, *(_ascii(cell).replace(",", "") for cell in row)])
    return out.getvalue().rstrip("\n")


def as_junit(results: list[Result]) -> str:
    """Return one test case per probe; inconclusive and not possible are `skipped`."""
    failures = sum(r.verdict is Verdict.FAIL for r in results)
    skipped = [r for r in results if r.verdict is Verdict.INCONCLUSIVE or (r.reasons[:1] and r.reasons[0].startswith("not possible"))]  # fmt: skip
    suite = ElementTree.Element(
        "testsuite", name="distdiag probe", tests=str(len(results)), failures=str(failures), errors="0", skipped=str(len(skipped)),
        time=f"{sum(r.elapsed_s for r in results):.3f}",
    )  # fmt: skip
    for r in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname="distdiag.probe", name=r.probe, time=f"{r.elapsed_s:.3f}"
        )
        text = "; ".join(r.reasons)
        if r.verdict is Verdict.FAIL:
            ElementTree.SubElement(case, "failure", message=text[:500]).text = text
        elif r in skipped:
            ElementTree.SubElement(case, "skipped", message=text[:500])
        ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")


_NCCL_TYPES = {"float32": "float", "bfloat16": "bfloat16", "float16": "half", "float64": "double", "int32": "int32", "int64": "int64", "uint8": "uint8"}  # fmt: skip


def as_nccl_tests(result: Result) -> str:
    """Return the result in the columns of nccl-tests (v2.13 and later).

    Only one of its two halves is measured: in place if the operation works in place, else out of place. `time` is our p50,
    while nccl-tests prints a mean. #wrong counts the wrong elements of the correctness check.
    """
    operation = family(result.probe)
    redop = "sum" if operation is not None and operation.reduces else "none"
    root = 0 if operation is not None and operation.rooted else -1
    in_place = result.probe in ("allreduce", "broadcast", "reduce")
    out = [
        f"# {result.probe} by distdiag, {result.world_size} ranks, {result.backend}, {result.device}; verdict: {result.verdict}",
        "#",
        "#                                                              out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)",
    ]
    rows: list[Row] = result.rows
    for r in rows:
        wrong = sum(w.elements for w in r.wrong)
        figures = f"{r.time_us.p50:8.1f} {r.algbw_gbps or 0:7.2f} {r.busbw_gbps or 0:7.2f} {wrong:7d}"
        nothing = f"{'N/A':>8} {'N/A':>7} {'N/A':>7} {'N/A':>7}"
        halves = (nothing, figures) if in_place else (figures, nothing)
        out.append(
            f"{r.bytes:12d}  {r.elements:12d}  {_NCCL_TYPES.get(result.dtype or '', '?'):>8}  {redop:>6}  {root:6d}  "
            f"{halves[0]}  {halves[1]}"
        )
    mean = sum(r.busbw_gbps or 0 for r in rows) / max(1, len(rows))
    wrong = sum(1 for r in rows if not r.correct)
    out += [
        f"# Out of bounds values : {wrong} {'OK' if not wrong else 'FAILED'}",
        f"# Avg bus bandwidth    : {mean:.4g}",
    ]
    return "\n".join(out)
