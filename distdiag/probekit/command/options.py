"""Options of a probe command, for `distdiag probe NAME` and `python probes/NAME.py`: one dataclass, as for the training job."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from distdiag.command_line import Parsed, SectionedCommand, count, number, option, options_of, read
from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command import catalog, node_check
from distdiag.probekit.command.paper import FLAGS, RANKS, Paper, byte_size, make_paper
from distdiag.probekit.step.possible import parse_strategies
from distdiag.terms.tables import wrapped
from distdiag.terms.units import DTYPE_ALIASES, ITEM_BYTES, counted, sweep

DEFAULT_BUDGET_S = 10.0
QUICK_BUDGET_S = 6.0
ALL_BUDGET_S = 60.0
RANKS_BUDGET_S = 150.0  # of `step --ranks`: some 13 cases in five rounds
LEAST_BUDGET_S = 2.0  # the start of Python, torch and two ranks takes most of it
FORMATS = ("table", "json", "csv", "junit", "nccl-tests", *node_check.FORMS)

# who uses an option; the help of the other probes omits it
_LOADER, _STEP = ("dataloader",), ("step",)
_MESSAGES = tuple(name for name in catalog.COLLECTIVES if name != "barrier")
_SWEEP = (*_MESSAGES, catalog.ALL)
_COUNT, _NUMBER = Parsed("count", count), Parsed("number", number)
_COUNTS = Parsed("text", lambda text: [count(word) for word in text.split(",")] if text else [])

_ON_PAPER = "memory on paper (probe step; no model is run)"
_INJECT_HINT = "write delay:rank=1,ms=5 or corrupt:rank=1 or drop:rank=1"


@dataclass(frozen=True, slots=True)
class Injection:
    kind: str  # delay | corrupt | drop
    rank: int
    delay_s: float = 0.0


def parse_injection(text: str) -> Injection:
    """Parse `delay:rank=1,ms=5` (late before every operation), `corrupt:rank=1` (one wrong value in its result) or
    `drop:rank=1` (takes no part).
    """
    kind, _, rest = text.partition(":")
    values: dict[str, float] = {}
    try:
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            values[key.strip()] = float(value)
    except ValueError:
        raise DistdiagError(f"--inject '{text}': a value is not a number", _INJECT_HINT) from None
    allowed = {"delay": {"rank", "ms"}, "corrupt": {"rank"}, "drop": {"rank"}}.get(kind)
    if allowed is None or set(values) != allowed or values["rank"] != int(values["rank"]):
        raise DistdiagError(f"--inject '{text}' is not a fault that can be injected", _INJECT_HINT)
    if values.get("ms", 1) <= 0:
        raise DistdiagError(f"--inject '{text}' needs a delay above 0 ms", _INJECT_HINT)
    return Injection(kind, int(values["rank"]), values.get("ms", 0.0) / 1e3)


def _positive(flag: str, scale: float = 1.0) -> Parsed:
    def parse(text: str) -> float:
        if (value := number(text)) <= 0:
            raise DistdiagError(f"{flag} {value:g} must be above 0", f"leave {flag} out for its default")
        return value / scale

    return Parsed("number", parse)


def _dtype(text: str) -> str:
    found = DTYPE_ALIASES.get(text, text)
    if found not in ITEM_BYTES:
        raise DistdiagError(f"--dtype {text} is not known", "one of " + ", ".join(ITEM_BYTES))
    return found


@dataclass(slots=True)
class Options:
    """The checked options of one probe command; each has its help below it."""

    name: str
    nproc: int | None = option(section="where it runs", type=_COUNT, metavar="N")
    """ranks to launch (default: one per GPU; two on the CPU)"""
    device: str = option("", type=click.Choice(["cpu", "cuda"]))
    """default: cuda if there are two GPUs or more"""
    backend: str | None = option(type=click.Choice(["gloo", "nccl"]))
    """default: nccl on cuda, gloo on cpu"""
    share_gpus: bool = option(False)
    """let several ranks use one GPU"""

    dtype: str = option(
        "float32", section="what is measured", type=Parsed("text", _dtype), metavar="DTYPE",
        help=f"{', '.join(ITEM_BYTES)} (default float32; on paper bfloat16)",
    )  # fmt: skip
    min_bytes: int = option(1024, type=byte_size("--min-bytes"), used_by=_SWEEP, metavar="SIZE")
    """smallest message (default 1K)"""
    max_bytes: int = option(64 * 2**20, type=byte_size("--max-bytes"), used_by=_SWEEP, metavar="SIZE")
    """largest message (default 64M; with `all` 16M)"""
    factor: float = option(4.0, type=_NUMBER, used_by=_SWEEP, metavar="X")
    """each size is X times the last (default 4; with `all` and --quick 16)"""
    dataset: str | None = option(used_by=_LOADER, metavar="MODULE:FUNCTION")
    """dataloader: your own dataset"""
    batch_size: int = option(128, type=_COUNT, used_by=_LOADER + _STEP, metavar="N")
    """dataloader, step: global batch (default 128, 32)"""
    workers: list[int] = option([], type=_COUNTS, used_by=_LOADER, metavar="N,N…")
    """dataloader: worker counts to try"""
    step_ms: float = option(10.0, type=_positive("--step-ms"), used_by=_LOADER + _STEP, metavar="MS")
    """dataloader: the consumer's step time (default 10); on paper: computing of a step"""
    model: str | None = option(used_by=_STEP, metavar="MODULE:FUNCTION")
    """step: your own model, a function without arguments; or simple, resnet18, resnet34"""
    strategies: list[str] = option([], type=Parsed("text", parse_strategies), used_by=_STEP, metavar="NAME,…")
    """step: single, single-threads, dataparallel, ddp, fsdp, model, pipeline, or all"""
    ranks: list[int] = option([], type=_COUNTS, used_by=_STEP, metavar="N,N…")
    """step: compare these numbers of ranks, in interleaved rounds"""

    paper: Paper | None = option(None, "--paper", section=_ON_PAPER, is_flag=True)
    """count them, and the activations, in --model"""

    budget_s: float = option(DEFAULT_BUDGET_S, "--budget", section="how long", type=_NUMBER, metavar="SECONDS")
    """for the whole command (default 10; `all` 60; `step --ranks` 150)"""
    quick: bool = option(False)
    """a budget of 6 s: fewer sizes (--factor 16), coarser intervals"""
    precision: float = option(0.02, type=_positive("--precision", 100), metavar="PCT")
    """stop a size at this half-width of the p50's 95% interval (default 2)"""
    timeout_s: float = option(10.0, "--timeout", type=_positive("--timeout"), metavar="SECONDS")
    """a rank that waits longer ends the probe (default 10)"""

    floor_gbps: float | None = option(
        None, "--floor", section="the verdict", type=_NUMBER, used_by=_MESSAGES, metavar="GBPS"
    )
    """fail if the best bus bandwidth (its whole 95 % interval) is below this"""
    save: str | None = option(metavar="FILE")
    """keep the result as a baseline"""
    against: str | None = option(metavar="FILE")
    """compare with a baseline: test and effect size"""
    tolerance: float = option(0.10, type=_positive("--tolerance", 100), metavar="PCT")
    """slower than the baseline by more than this fails (default 10)"""
    inject: tuple[Injection, ...] = option((), type=Parsed("text", parse_injection), multiple=True, metavar="FAULT")
    """inject a fault: delay:rank=1,ms=5 | corrupt:rank=1 | drop:rank=1"""

    as_json: bool = option(False, "--json", section="output")
    """one object on stdout"""
    output_format: str = option("table", "--as", type=click.Choice(FORMATS))
    """format on stdout (default table); prolog, healthcheck: one line, and exit 1 only for a proved fault"""
    svg: str | None = option(used_by=_STEP, metavar="FILE")
    """step --ranks: draw times, scaling and memory into FILE"""
    output: str | None = option(None, "-o", "--output", metavar="FILE")
    """write to FILE instead of stdout"""
    force: bool = option(False)
    """overwrite FILE"""
    run_dir: str | None = option(None, "--run", "--run-dir", metavar="RUN")
    """run to record the result into (default: the newest, if it is running)"""
    no_record: bool = option(False)
    """do not write into a run"""
    ascii: bool = option(False)
    """print ASCII characters only"""
    block_s: float = 0.0  # of measuring in one launch of a comparison; no option

    def sizes(self, world_size: int, in_parts: bool) -> list[int]:
        """Return the message sizes in bytes; `in_parts`: each rank holds 1/world_size of it, so it must be divisible."""
        return sweep(self.min_bytes, self.max_bytes, self.factor, ITEM_BYTES[self.dtype], world_size if in_parts else 1)


def _sections(probe: str | None) -> dict[str, list[click.Parameter]]:
    """Return all options by section; the help omits those that `probe` does not use."""

    def build(_name: str, kind: Any, attrs: dict[str, Any]) -> dict[str, Any]:
        is_flag = kind is bool or attrs.get("is_flag", False)
        used_by = attrs.pop("used_by", (probe,))
        attrs.pop("section", None)
        # the dataclass has the defaults: what is None was not given
        default = False if is_flag else () if attrs.get("multiple") else None
        return attrs | {"is_flag": is_flag, "default": default, "hidden": probe is not None and probe not in used_by}

    sections: dict[str, list[click.Parameter]] = {}
    title = ""
    for f, one in options_of(Options, build):
        title = f.metadata["attrs"].get("section", title)
        sections.setdefault(title, []).append(one)
        if f.name == "paper":
            params, *others = (on_paper for _, on_paper in options_of(Paper, build))
            sections[title] = [params, one, *others]
    if probe not in (None, "step"):
        for one in sections[_ON_PAPER]:
            one.hidden = True  # type: ignore[attr-defined]
    return sections


def build_command(named: bool = False, probe: str | None = None) -> SectionedCommand:
    """Return the click command, whose help lists the options of `probe`, or all.

    If it is `named`, the script itself is the probe: there is no argument NAME.
    """
    text = "Measure, with a verdict: pass, fail or inconclusive, and the reasons."
    params: list[click.Parameter] = []
    if probe is not None:
        about = catalog.PROBES.get(probe, "the whole health check in one budget")
        text = f"{probe}: {about}.\n\n{text} All options: distdiag probe --help."
    if not named and probe is None:
        names = "\n".join(line for x in catalog.PROBES.items() for line in wrapped(x[1], 78, f"  {x[0]:14s}"))
        text += f"\n\n\b\n{names}\n  {'all':14s}the whole health check in one budget"
    if not named:
        params.append(click.Argument(["name"], metavar=(probe or "NAME")))
    codes = "Exit codes: " + ", ".join(f"{c.value} {c.name}" for c in ExitCode) + "."
    return SectionedCommand(_sections(probe), params, name=None, help=text, epilog=codes)


def parse(argv: list[str], name: str | None = None, prog: str = "distdiag probe") -> Options:
    """Parse a command line into options; `name` is the probe, if the script itself is one.

    Raises:
        DistdiagError: an option or value is wrong.
        SystemExit: `--help`, with 0.
    """
    about = None
    with suppress(DistdiagError, IndexError):
        about = catalog.canonical(name or argv[0])
    values = read(build_command(named=name is not None, probe=about), argv, prog)
    given = {key: value for key, value in values.items() if value is not None}
    probe = catalog.canonical(name or given["name"])
    own = {key: given.pop(key) for key in FLAGS if key in given}
    paper = make_paper(given, own, given["paper"], probe)
    options = Options(**given | {"name": probe, "paper": paper})
    _check(options, probe)
    whole = probe == catalog.ALL
    if "budget_s" not in given:
        usual = RANKS_BUDGET_S if options.ranks else ALL_BUDGET_S if whole else DEFAULT_BUDGET_S
        options.budget_s = QUICK_BUDGET_S if options.quick else usual
    if "max_bytes" not in given and whole:
        options.max_bytes = 16 * 2**20
    if "factor" not in given and (whole or options.quick):
        options.factor = 16.0
    if not given.get("batch_size"):
        options.batch_size = 32 if probe == "step" else 128
    if not options.device and options.backend == "nccl":
        options.device = "cuda"
    if options.as_json:
        options.output_format = "json"
    if paper is not None:
        options.no_record = True
        options.ranks = options.ranks or RANKS
    options.ranks = sorted(set(options.ranks))
    options.sizes(1, False)  # report impossible bounds before anything starts
    return options


def _check(options: Options, probe: str) -> None:
    if options.budget_s < LEAST_BUDGET_S:
        text = f"--budget {options.budget_s:g} s is too small: starting the ranks takes longer"
        raise DistdiagError(text, f"give at least {LEAST_BUDGET_S:g} s")
    if (floor := options.floor_gbps) is not None:
        if floor <= 0:
            raise DistdiagError(f"--floor {floor:g} must be above 0 GB/s", "take it from a run on a good machine")
        if probe not in _MESSAGES:
            text = f"--floor does not apply to {probe}: it has no single bus bandwidth"
            raise DistdiagError(text, "use --against a baseline")
    if options.svg and not options.ranks:
        raise DistdiagError("--svg draws the comparison of `step --ranks`", "add --ranks 1,2")
    if options.ranks:
        if probe != "step":
            raise DistdiagError(f"--ranks compares strategies: {probe} has none", "--nproc 2 sets how many ranks run")
        if options.nproc is not None:
            raise DistdiagError("--nproc and --ranks both give the number of ranks", "leave --nproc out")
        if options.inject:
            raise DistdiagError("--inject does not go with --ranks", "--nproc 2 instead of --ranks")
        if min(options.ranks) < 1:
            raise DistdiagError("--ranks 0: no rank, nothing to measure", "--ranks 1,2")


def place_ranks(options: Options, gpus: int, min_ranks: int, default_ranks: int) -> int:
    """Fill in device and backend for a host with `gpus` GPUs; return how many ranks to launch."""
    if not options.device:
        options.device = "cuda" if gpus >= max(2, min_ranks) or (gpus and min_ranks == 1) else "cpu"
        wanted = max(options.ranks, default=options.nproc)
        if options.device == "cuda" and wanted is not None and wanted > gpus:
            options.device = "cpu"
    check_backend(options, gpus)
    ranks = max(options.ranks) if options.ranks else options.nproc
    if ranks is None:
        ranks = gpus if options.device == "cuda" and default_ranks > 1 else default_ranks
    if ranks < 1:
        raise DistdiagError(f"--nproc {ranks}: no rank, nothing to measure", f"--nproc {max(2, min_ranks)}")
    check_ranks(options, ranks, min_ranks)
    if options.device == "cuda" and ranks > gpus and not options.share_gpus:
        raise DistdiagError(
            f"--nproc {ranks} on {counted(gpus, 'GPU')}",
            f"--nproc {gpus}, or --share-gpus where several ranks on one GPU are meant, or --device cpu",
        )
    return ranks


def check_backend(options: Options, gpus: int) -> None:
    """Check that the backend works on the device, and choose one if none was given."""
    if options.backend == "nccl" and options.device == "cpu":
        raise DistdiagError("--backend nccl cannot move CPU tensors", "--backend gloo, or --device cuda")
    if options.device == "cuda" and gpus == 0:
        asked = "--backend nccl" if options.backend == "nccl" else "--device cuda"
        text = f"{asked}, but this host has no NVIDIA GPU that torch can use"
        raise DistdiagError(text, "--device cpu --backend gloo")
    if options.backend is None:
        options.backend = "nccl" if options.device == "cuda" and not options.share_gpus else "gloo"


def check_ranks(options: Options, ranks: int, min_ranks: int) -> None:
    if ranks < min_ranks:
        raise DistdiagError(f"{options.name} needs {min_ranks} ranks, not {ranks}", f"--nproc {min_ranks}, or more")
    for injection in options.inject:
        if not 0 <= injection.rank < ranks:
            text = f"--inject names rank {injection.rank}, but the ranks are 0 to {ranks - 1}"
            raise DistdiagError(text, f"rank={ranks - 1}, or --nproc")
