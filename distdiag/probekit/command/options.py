"""Options of a probe command, for `distdiag probe NAME` and `python probes/NAME.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import click

from distdiag.command_line import SectionedCommand, read
from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command import catalog
from distdiag.probekit.command.paper import OPTIMIZERS, RANKS, Paper, parse_paper
from distdiag.probekit.ranks.injection import Injection, parse_injection
from distdiag.terms.units import DTYPE_ALIASES, ITEM_BYTES, parse_bytes, sweep

DEFAULT_BUDGET_S = 10.0
QUICK_BUDGET_S = 6.0
ALL_BUDGET_S = 60.0
RANKS_BUDGET_S = 150.0  # of `step --ranks`: some 13 cases in five rounds
DEFAULT_STEP_MS = 10.0
LEAST_BUDGET_S = 2.0  # the start of Python, torch and two ranks takes most of it
FORMATS = ("table", "json", "csv", "junit", "nccl-tests")


@dataclass(slots=True)
class Options:
    """The checked options of one probe command."""

    name: str
    """A name of the catalog, or `all`."""
    nproc: int | None = None
    """Ranks to launch; None: one per GPU, two on a host with fewer than two GPUs."""
    backend: str | None = None
    """gloo or nccl; None: by device."""
    device: str = "cpu"
    """cpu or cuda."""
    share_gpus: bool = False
    """Several ranks may use one GPU."""
    dtype: str = "float32"
    min_bytes: int = 1024
    max_bytes: int = 64 * 2**20
    factor: float = 4.0
    """Each message size is this many times the one before."""
    budget_s: float = DEFAULT_BUDGET_S
    """Seconds for the whole command, with its start."""
    precision: float = 0.02
    """A size is done when the half-width of its p50's 95 % interval is below this share of the p50."""
    timeout_s: float = 10.0
    """Seconds that a rank may wait for the others before that counts as a hang."""
    inject: list[Injection] = field(default_factory=list)
    output_format: str = "table"
    output: str | None = None
    save: str | None = None
    against: str | None = None
    tolerance: float = 0.10
    """Share by which a value must be slower than the baseline to count."""
    floor_gbps: float | None = None
    force: bool = False
    run_dir: str | None = None
    record: bool = True
    dataset: str | None = None
    batch_size: int = 128
    workers: list[int] = field(default_factory=list)
    step_ms: float = DEFAULT_STEP_MS
    model: str | None = None
    strategies: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Numbers of ranks that `step` compares; empty: `nproc` alone."""
    block_s: float = 0.0
    """Seconds of measuring in one launch of such a comparison; not an option."""
    svg: str | None = None
    paper: Paper | None = None
    """Memory on paper instead of measuring; None: measure."""
    ascii: bool = False

    def sizes(self, world_size: int, in_parts: bool) -> list[int]:
        """Return the message sizes in bytes; `in_parts`: each rank holds 1/world_size of it, so it must be divisible."""
        return sweep(self.min_bytes, self.max_bytes, self.factor, ITEM_BYTES[self.dtype], world_size if in_parts else 1)


def _option(*names: str, **attrs: Any) -> click.Option:
    return click.Option(names, **attrs)


def _sections() -> dict[str, list[click.Parameter]]:
    """Return the options of a probe by their section in the help."""
    return {
        "where it runs": [
            _option("--nproc", type=count, metavar="N", help="ranks to launch (default: one per GPU; two on the CPU)"),
            _option("--device", type=click.Choice(["cpu", "cuda"]), help="default: cuda if there are two GPUs or more"),
            _option("--backend", type=click.Choice(["gloo", "nccl"]), help="default: nccl on cuda, gloo on cpu"),
            _option("--share-gpus", is_flag=True, help="let several ranks use one GPU"),
        ],
        "what is measured": [
            _option("--dtype", metavar="DTYPE", help=f"{', '.join(ITEM_BYTES)} (default float32; on paper bfloat16)"),
            _option("--min-bytes", default="1K", metavar="SIZE", help="smallest message (default 1K)"),
            _option("--max-bytes", metavar="SIZE", help="largest message (default 64M; with `all` 16M)"),
            _option("--factor", type=number, metavar="X", help="each size is X times the last (default 4; with `all` and --quick 16)"),
            _option("--dataset", metavar="MODULE:FUNCTION", help="dataloader: your own dataset"),
            _option("--batch-size", type=count, metavar="N", help="dataloader, step: global batch (default 128, 32)"),
            _option("--workers", metavar="N,N…", help="dataloader: worker counts to try"),
            _option("--step-ms", type=number, metavar="MS", help="dataloader: the consumer's step time (default 10); on paper: computing of a step"),
            _option("--model", metavar="MODULE:FUNCTION", help="step: your own model, a function without arguments; or simple, resnet18, resnet34"),
            _option("--strategies", metavar="NAME,…", help="step: single, single-threads, dataparallel, ddp, fsdp, model, pipeline, or all"),
            _option("--ranks", metavar="N,N…", help="step: compare these numbers of ranks, in interleaved rounds"),
        ],
        "memory on paper (probe step; no model is run)": [
            _option("--params", metavar="N", help="parameters of the model: 7e9, 7B, 350M"),
            _option("--paper", is_flag=True, help="count them, and the activations, in --model"),
            _option("--memory", metavar="SIZE", help="of one device, e.g. 80GiB (default: this host's smallest GPU)"),
            _option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="default adamw; sgd is with momentum"),
            _option("--bytes-per-param", metavar="W,G,O", help="weights, gradients, optimizer state (default by --dtype: bfloat16 2,2,12; float32 4,4,8)"),
            _option("--layers", type=count, metavar="N", help="equal blocks, of which FSDP gathers two at once"),
            _option("--activations", metavar="SIZE", help="saved for backward, of the whole --batch-size in one process"),
            _option("--link", metavar="GBPS|FILE", help="bus bandwidth between ranks, or a saved `probe allreduce` (--save, or --json -o)"),
        ],
        "how long": [
            _option("--budget", type=number, metavar="SECONDS", help="for the whole command (default 10; `all` 60; `step --ranks` 150)"),
            _option("--quick", is_flag=True, help=f"a budget of {QUICK_BUDGET_S:g} s: fewer sizes (--factor 16), coarser intervals"),
            _option("--precision", type=number, default=2.0, metavar="PCT", help="stop a size at this half-width of the p50's 95% interval (default 2)"),
            _option("--timeout", type=number, default=10.0, metavar="SECONDS", help="a rank that waits longer ends the probe (default 10)"),
        ],
        "the verdict": [
            _option("--floor", type=number, metavar="GBPS", help="fail if the best bus bandwidth (its whole 95 % interval) is below this"),
            _option("--save", metavar="FILE", help="keep the result as a baseline"),
            _option("--against", metavar="FILE", help="compare with a baseline: test and effect size"),
            _option("--tolerance", type=number, default=10.0, metavar="PCT", help="slower than the baseline by more than this fails (default 10)"),
            _option("--inject", multiple=True, metavar="FAULT", help="inject a fault: delay:rank=1,ms=5 | corrupt:rank=1 | drop:rank=1"),
        ],
        "output": [
            _option("--json", is_flag=True, help="one object on stdout"),
            _option("--as", "output_format", type=click.Choice(FORMATS), help="format on stdout (default table)"),
            _option("--svg", metavar="FILE", help="step --ranks: draw times, scaling and memory into FILE"),
            _option("-o", "--output", metavar="FILE", help="write to FILE instead of stdout"),
            _option("--force", is_flag=True, help="overwrite FILE"),
            _option("--run", "--run-dir", "run_dir", metavar="RUN", help="run to record the result into (default: the newest, if it is running)"),
            _option("--no-record", is_flag=True, help="do not write into a run"),
            _option("--ascii", is_flag=True, help="print ASCII characters only"),
        ],
    }  # fmt: skip


_LOADER, _STEP = frozenset({"dataloader"}), frozenset({"step"})
_MESSAGES = frozenset(catalog.PROBES) - {"barrier", "pairs", "dataloader", "step", "gpu"} | {catalog.ALL}
# Options that only some probes use; the help of the other probes omits them.
_USED_BY: dict[str, frozenset[str]] = {
    **dict.fromkeys(("dataset", "workers"), _LOADER),
    **dict.fromkeys(("batch_size", "step_ms"), _LOADER | _STEP),
    **dict.fromkeys(("model", "strategies", "ranks", "svg", "params", "paper", "memory", "optimizer"), _STEP),
    **dict.fromkeys(("bytes_per_param", "layers", "activations", "link"), _STEP),
    **dict.fromkeys(("min_bytes", "max_bytes", "factor"), _MESSAGES),
    "floor": _MESSAGES - {catalog.ALL},
}


def build_command(named: bool = False, probe: str | None = None) -> SectionedCommand:
    """Return the click command.

    Args:
        named: The script itself is the probe: there is no NAME argument.
        probe: The probe whose options the help lists; None: all options.
    """
    text = "Measure, with a verdict: pass, fail or inconclusive, and the reasons."
    params: list[click.Parameter] = []
    if probe is not None:
        about = catalog.PROBES.get(probe, "the whole health check in one budget")
        text = f"{probe}: {about}.\n\n{text} All options: distdiag probe --help."
    if not named and probe is None:
        names = "\n".join(f"  {name:14s}{about}" for name, about in catalog.PROBES.items())
        text += f"\n\n\b\n{names}\n  {'all':14s}the whole health check in one budget"
    if not named:
        params.append(click.Argument(["name"], metavar=(probe or "NAME")))
    codes = "Exit codes: " + ", ".join(f"{c.value} {c.name}" for c in ExitCode) + "."

    def shown(option: click.Parameter) -> bool:
        return probe is None or probe in _USED_BY.get(option.name or "", {probe})

    return SectionedCommand(_sections(), params, shown, name=None, help=text, epilog=codes)


def _known(name: str | None) -> str | None:
    """Return the catalog's name of a probe; None if `name` is not one."""
    try:
        return catalog.canonical(name) if name else None
    except DistdiagError:
        return None


def parse(argv: list[str], name: str | None = None, prog: str = "distdiag probe") -> Options:
    """Parse a command line into options.

    Args:
        name: The probe, if the script itself is one.

    Raises:
        DistdiagError: an option or value is wrong.
        SystemExit: `--help`, with 0.
    """
    about = _known(name or (argv[0] if argv else None))
    args = SimpleNamespace(**read(build_command(named=name is not None, probe=about), argv, prog))
    probe = catalog.canonical(name or args.name)
    paper = parse_paper(args, probe)
    step_ms = DEFAULT_STEP_MS if args.step_ms is None else args.step_ms
    dtype = DTYPE_ALIASES.get(args.dtype, args.dtype) if args.dtype else "float32"
    if dtype not in ITEM_BYTES:
        raise DistdiagError(f"--dtype {args.dtype} is not known", "one of " + ", ".join(ITEM_BYTES))
    budget = args.budget
    if budget is None:
        usual = RANKS_BUDGET_S if args.ranks else ALL_BUDGET_S if probe == catalog.ALL else DEFAULT_BUDGET_S
        budget = QUICK_BUDGET_S if args.quick else usual
    if budget < LEAST_BUDGET_S:
        raise DistdiagError(
            f"--budget {budget:g} s is too small: starting the ranks takes longer",
            f"give at least {LEAST_BUDGET_S:g} s",
        )
    for option, value in (("--timeout", args.timeout), ("--precision", args.precision), ("--tolerance", args.tolerance), ("--step-ms", step_ms)):  # fmt: skip
        if value <= 0:
            raise DistdiagError(f"{option} {value:g} must be above 0", f"leave {option} out for its default")
    if args.floor is not None and args.floor <= 0:
        raise DistdiagError(f"--floor {args.floor:g} must be above 0 GB/s", "take it from a run on a good machine")
    if args.floor is not None and probe in ("barrier", "pairs", "dataloader", "step", "gpu", catalog.ALL):
        raise DistdiagError(
            f"--floor does not apply to {probe}: it has no single bus bandwidth", "use --against a baseline"
        )
    whole = probe == catalog.ALL
    options = Options(
        name=probe,
        nproc=args.nproc,
        backend=args.backend,
        device=args.device or ("cuda" if args.backend == "nccl" else ""),
        share_gpus=args.share_gpus,
        dtype=dtype,
        min_bytes=parse_bytes(args.min_bytes, "--min-bytes"),
        max_bytes=parse_bytes(args.max_bytes or ("16M" if whole else "64M"), "--max-bytes"),
        factor=args.factor if args.factor is not None else 16.0 if whole or args.quick else 4.0,
        budget_s=budget,
        precision=args.precision / 100,
        timeout_s=args.timeout,
        inject=[parse_injection(text) for text in args.inject],
        output_format="json" if args.json else args.output_format or "table",
        output=args.output,
        save=args.save,
        against=args.against,
        tolerance=args.tolerance / 100,
        floor_gbps=args.floor,
        force=args.force,
        run_dir=args.run_dir,
        record=not args.no_record and paper is None,
        dataset=args.dataset,
        batch_size=args.batch_size or (32 if probe == "step" else 128),
        workers=[count(w) for w in args.workers.split(",")] if args.workers else [],
        step_ms=step_ms,
        model=args.model,
        strategies=[s.strip() for s in args.strategies.split(",")] if args.strategies else [],
        ranks=_ranks(args, probe) or (RANKS if paper else []),
        svg=args.svg,
        paper=paper,
        ascii=args.ascii,
    )
    options.sizes(1, False)  # report impossible bounds before anything starts
    return options


def _ranks(args: SimpleNamespace, probe: str) -> list[int]:
    """Return the numbers of `--ranks`, sorted.

    Raises:
        DistdiagError: not a number above 0, or options that exclude it.
    """
    if args.svg and not args.ranks:
        raise DistdiagError("--svg draws the comparison of `step --ranks`", "add --ranks 1,2")
    if not args.ranks:
        return []
    if probe != "step":
        raise DistdiagError(f"--ranks compares strategies: {probe} has none", "distdiag probe step --ranks 1,2")
    if args.nproc is not None:
        raise DistdiagError("--nproc and --ranks both give the number of ranks", "leave --nproc out")
    if args.inject:
        raise DistdiagError("--inject does not go with --ranks", "--nproc 2 instead of --ranks")
    ranks = sorted({count(n) for n in args.ranks.split(",")})
    if ranks[0] < 1:
        raise DistdiagError("--ranks 0: no rank, nothing to measure", "--ranks 1,2")
    return ranks


def count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise DistdiagError(f"'{text}' is not a whole number", "give a count, e.g. 2") from None
    if value < 0:
        raise DistdiagError(f"{text} is below 0", "give a count, e.g. 2")
    return value


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise DistdiagError(f"'{text}' is not a number", "give a number, e.g. 10") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise DistdiagError(f"'{text}' is not a finite number", "give a number, e.g. 10")
    return value


def place_ranks(options: Options, gpus: int, min_ranks: int, default_ranks: int) -> int:
    """Fill in device and backend; return how many ranks to launch.

    Args:
        gpus: GPUs of this host.
        min_ranks: Fewest ranks that the probe needs.
        default_ranks: Ranks without --nproc and GPUs.

    Raises:
        DistdiagError: more ranks than GPUs, NCCL without a GPU, too few ranks, or a fault injected on a rank that does not
            exist.
    """
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
            f"--nproc {ranks} on {gpus} GPU{'s' if gpus != 1 else ''}",
            f"--nproc {gpus}, or --share-gpus where several ranks on one GPU are meant, or --device cpu",
        )
    return ranks


def check_backend(options: Options, gpus: int) -> None:
    """Check that the backend works on the device, and choose one if none was given.

    Raises:
        DistdiagError: `--backend nccl` or `--device cuda` cannot work here.
    """
    if options.backend == "nccl" and options.device == "cpu":
        raise DistdiagError("--backend nccl cannot move CPU tensors", "--backend gloo, or --device cuda")
    if options.device == "cuda" and gpus == 0:
        asked = "--backend nccl" if options.backend == "nccl" else "--device cuda"
        raise DistdiagError(
            f"{asked}, but this host has no NVIDIA GPU that torch can use", "--device cpu --backend gloo"
        )
    if options.backend is None:
        options.backend = "nccl" if options.device == "cuda" and not options.share_gpus else "gloo"


def check_ranks(options: Options, ranks: int, min_ranks: int) -> None:
    """Check the number of ranks.

    Raises:
        DistdiagError: too few ranks for the probe, or a fault injected on a rank that does not exist.
    """
    if ranks < min_ranks:
        raise DistdiagError(f"{options.name} needs {min_ranks} ranks, not {ranks}", f"--nproc {min_ranks}, or more")
    for injection in options.inject:
        if not 0 <= injection.rank < ranks:
            raise DistdiagError(
                f"--inject names rank {injection.rank}, but the ranks are 0 to {ranks - 1}",
                f"rank={ranks - 1}, or --nproc",
            )
