"""Memory and gradient exchange of a training step on paper: one row for each strategy and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distdiag.errors import DistdiagError
from distdiag.probekit.command.paper import Paper
from distdiag.probekit.step.memory import StateBytes, expected_state
from distdiag.probekit.step.possible import LABELS, SINGLE, STAGED, Case, micro_batches
from distdiag.probekit.step.sizes import Sizes
from distdiag.probekit.verdict import baseline
from distdiag.terms.operations import bus_bandwidth, bus_factor

STRATEGIES: tuple[str, ...] = (SINGLE, "ddp", "fsdp", "model", "pipeline")
# A rule of thumb, for the device's context, fragmentation and what kernels allocate; more if activations are not known.
_RESERVE_SHARE = 0.10
_RESERVE_SHARE_WITHOUT_ACTIVATIONS = 0.20
_MOST_GBPS = 1e6


@dataclass(slots=True)
class PaperRow:
    """One strategy on one number of ranks, bytes of the rank that has most."""

    strategy: str
    label: str
    ranks: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int | None  # DDP's buckets; FSDP's gathered blocks (None: `--layers` is not given)
    activations_bytes: int | None  # saved for backward; None: not known
    left_bytes: int  # of the device, for activations and everything else; below 0: the state does not fit
    samples: int  # of the global batch that are on this rank at once; of a pipeline, in one micro-batch
    fits: str  # "yes"; "accumulate": with fewer samples at once; "tight": with less than the reserve; "no"
    # of parameters and gradients over this rank's link in one step; None: one process, or stages
    exchange_bytes: int | None = None
    exchange_ms: float | None = None  # the same at the link's bandwidth; None: not given

    @property
    def state_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(slots=True)
class Link:
    """Bus bandwidth between ranks, and where it comes from."""

    gbps: float
    source: str


@dataclass(slots=True)
class Sheet:
    sizes: Sizes
    paper: Paper
    memory_bytes: int
    batch: int
    link: Link | None = None
    _rows: dict[tuple[str, int], PaperRow] = field(default_factory=dict)

    def row(self, strategy: str, ranks: int) -> PaperRow:
        key = (strategy, ranks)
        if key not in self._rows:
            self._rows[key] = self._made(strategy, ranks)
        return self._rows[key]

    def rows(self, strategies: list[str], ranks: list[int]) -> tuple[list[PaperRow], dict[Case, str]]:
        rows: list[PaperRow] = []
        reasons: dict[Case, str] = {}
        for strategy in strategies:
            for n in [1] if strategy == SINGLE else ranks:
                if n == 1 and strategy != SINGLE:
                    continue  # the single process
                if why := self.sizes.why_not(strategy, n):
                    reasons[Case(strategy, n)] = why
                else:
                    rows.append(self.row(strategy, n))
        return rows, reasons

    def _made(self, strategy: str, ranks: int) -> PaperRow:
        sizes, per = self.sizes, self.paper.per_parameter
        stage = sizes.largest_stage(ranks) if strategy in STAGED else None
        state = expected_state(strategy, ranks, sizes.parameters, stage, per)
        assert state is not None
        buffers = self._buffers(strategy, state)
        activations = sizes.activations(strategy, ranks, self.batch)
        left = self.memory_bytes - state.total - (buffers or 0)
        parts = {"ddp": ranks, "fsdp": ranks, "pipeline": micro_batches(ranks)}.get(strategy, 1)
        samples = -(-self.batch // parts)
        row = PaperRow(
            strategy, LABELS[strategy], ranks, state.parameters, state.gradients, state.optimizer, buffers, activations,
            left, samples, self._fits(left, activations, samples), self._exchange(strategy, ranks),
        )  # fmt: skip
        if self.link is not None and row.exchange_bytes is not None:
            row.exchange_ms = row.exchange_bytes / (self.link.gbps * 1e9) * 1e3
        return row

    def reserve_bytes(self, activations: int | None) -> float:
        """Return the bytes that should stay free in addition to the known sizes."""
        return self.memory_bytes * (_RESERVE_SHARE_WITHOUT_ACTIVATIONS if activations is None else _RESERVE_SHARE)

    def _fits(self, left: int, activations: int | None, samples: int) -> str:
        needed = activations or 0
        reserve = self.reserve_bytes(activations)
        if left - needed >= reserve:
            return "yes"
        one = needed / samples
        if one and left - one >= reserve:
            return "accumulate"
        return "tight" if left - one >= 0 else "no"

    def _buffers(self, strategy: str, state: StateBytes) -> int | None:
        """Return DDP's buckets, a copy of all gradients; FSDP's gathered blocks and the gradients of one."""
        if strategy == "ddp":
            return state.gradients
        if strategy != "fsdp":
            return 0
        if self.sizes.gathered is None or self.sizes.block is None:
            return None
        per = self.paper.per_parameter
        return round(self.sizes.gathered * per.weights + self.sizes.block * per.gradients)

    def _exchange(self, strategy: str, ranks: int) -> int | None:
        """Return the bytes that cross this rank's link, in a ring: the least for any algorithm without multicast.

        DDP: all_reduce of the gradients. FSDP: all_gather of the parameters before forward and before backward,
        reduce_scatter of the gradients.
        """
        per, count = self.paper.per_parameter, self.sizes.parameters
        if strategy == "ddp":
            return round(bus_factor("all_reduce", ranks) * count * per.gradients)
        if strategy == "fsdp":
            gathers = 2 * bus_factor("all_gather", ranks) * count * per.weights
            return round(gathers + bus_factor("reduce_scatter", ranks) * count * per.gradients)
        return None


def read_link(text: str) -> Link:
    """Return the bus bandwidth: `--link`'s number, or the best of a saved `probe allreduce`."""
    hint = "GB/s, e.g. 25; or the file of `distdiag probe allreduce --save FILE`"
    try:
        gbps = float(text)
    except ValueError:
        return _measured_link(text, hint)
    if not 0 < gbps < _MOST_GBPS:
        raise DistdiagError(f"--link {text} must be above 0 GB/s", hint)
    return Link(gbps, "--link")


def _measured_link(path: str, hint: str) -> Link:
    try:
        data = baseline.saved(path)
    except OSError as e:
        raise DistdiagError(f"--link {path}: neither a number nor a file ({e.strerror})", hint) from None
    except ValueError:
        raise DistdiagError(f"--link {path} is not a saved probe: not JSON", hint) from None
    try:
        found = _best(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError):
        found = None
    if found is None:
        raise DistdiagError(f"--link {path} holds no bandwidth of an allreduce", hint)
    gbps, ranks = found
    if not 0 < gbps < _MOST_GBPS:
        raise DistdiagError(f"--link {path} holds a bandwidth of {gbps:g} GB/s", hint)
    return Link(gbps, f"probe allreduce on {ranks} ranks, {path}")


def _best(data: Any) -> tuple[float, int] | None:
    """Return (best bus bandwidth in GB/s, ranks) of a `--json` result or of a baseline; None if it has none."""
    if "entries" not in data:
        if data["probe"] != "allreduce":
            return None
        rates = [float(r["busbw_gbps"]) for r in data["rows"] if r["busbw_gbps"]]
        return (max(rates), int(data["world_size"])) if rates else None
    for entry in data["entries"]:
        key = entry["key"]
        if key["probe"] == "allreduce":
            ranks = int(key["world_size"])
            times = [(int(m["key"]), sorted(map(float, m["values"]))) for m in entry["measures"] if m["unit"] == "us"]
            return max(bus_bandwidth("all_reduce", size, us[len(us) // 2] / 1e6, ranks) for size, us in times), ranks
    return None
