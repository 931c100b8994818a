"""Injected faults (`--inject`), each in its own function, as in a real job.

| spec | what happens |
|---|---|
| `deadlock@rank1:step30` | rank 1 enters a barrier that no other rank calls |
| `kill@rank1:step30` | rank 1 is ended by SIGKILL, as the kernel does when memory runs out |
| `crash@rank1:step30` | rank 1 raises an exception |
| `stall@rank1:step30:10s` | rank 1 is busy for 10 s while the others wait |
| `nan@rank1:step30` | rank 1 reads a batch with a value that is no number |
| `straggler@rank1:20ms` | rank 1 loses 20 ms in every step, in forward unless `:data`, `:backward` or `:optimizer` is added |
| `unused` | the model has a second head that the loss does not use |
| `uneven`, `uneven@rank1` | rank 1 (the last rank if none is named) has fewer batches than the others |

Importing this module costs no torch.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    import torch
    from torch import nn

_NEEDS = {  # parts of a spec, by kind
    "deadlock": {"rank", "step"}, "kill": {"rank", "step"}, "crash": {"rank", "step"},
    "stall": {"rank", "step", "duration"}, "nan": {"rank", "step"}, "straggler": {"rank", "duration"},
    "unused": set[str](), "uneven": set[str](),
}  # fmt: skip
_MAY_HAVE = {"straggler": {"place"}, "uneven": {"rank"}}
KINDS = tuple(_NEEDS)
_PARTS = re.compile(
    r"rank(?P<rank>\d+)|step(?P<step>0*[1-9]\d*)|(?P<duration>\d+(?:\.\d+)?m?s)|(?P<place>forward|data|backward|optimizer)"
)
FEWER_BATCHES_SHARE = 0.1  # of an epoch's batches are missing on the rank with `uneven`, at least one

_EXAMPLES = {
    "stall": "stall@rank1:step30:10s",
    "straggler": "straggler@rank1:20ms",
    "unused": "unused",
    "uneven": "uneven@rank1",
}


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One `--inject`."""

    kind: str  # one of `KINDS`
    spec: str  # the words of the command line
    rank: int | None = None  # that has the fault; None for all (`unused`) or the last one (`uneven`)
    step: int | None = None  # optimizer step at whose start it happens, counted from 1
    duration_s: float = 0.0  # how long a stall lasts, or what a straggler loses per step
    place: str = "forward"  # part of the step in which a straggler loses its time


def parse_fault(spec: str) -> InjectedFault:
    """Parse a fault spec such as `deadlock@rank1:step30`."""
    kind, _, rest = spec.strip().partition("@")
    if kind not in KINDS:
        raise DistdiagError(f"--inject {spec}: there is no fault '{kind}'", f"choose from {', '.join(KINDS)}")
    example = _EXAMPLES.get(kind, f"{kind}@rank1:step30")
    wrong = DistdiagError(f"--inject {spec}: not of the form {example}", f"for example --inject {example}")
    found: dict[str, str] = {}
    for part in rest.split(":") if rest else []:
        match = _PARTS.fullmatch(part)
        if match is None or match.lastgroup is None or match.lastgroup in found:
            raise wrong
        found[match.lastgroup] = match[match.lastgroup]
    if not _NEEDS[kind] <= set(found) <= _NEEDS[kind] | _MAY_HAVE.get(kind, set()):
        raise wrong
    rank, step = (int(found[name]) if name in found else None for name in ("rank", "step"))
    duration = found.get("duration", "0s")
    duration_s = float(duration[:-2]) / 1e3 if duration.endswith("ms") else float(duration[:-1])
    return InjectedFault(kind, spec.strip(), rank, step, duration_s, found.get("place", "forward"))


class Faults:
    """The faults of this rank. Without faults, every method returns at once."""

    def __init__(self, faults: tuple[InjectedFault, ...], rank: int, world_size: int) -> None:
        self._unused = any(f.kind == "unused" for f in faults)
        last = world_size - 1
        self._uneven = any(f.kind == "uneven" and rank == (last if f.rank is None else f.rank) for f in faults)
        self._at_step = {f.step: f for f in faults if f.step is not None and f.rank == rank}
        self._slow = [f for f in faults if f.kind == "straggler" and f.rank == rank]
        self.slows_loading = any(f.place == "data" for f in self._slow)

    def before_step(self, step: int) -> None:
        """Inject the fault of optimizer step `step` (from 1), at its start."""
        fault = self._at_step.get(step)
        if fault is None:
            return
        if fault.kind == "deadlock":
            wait_for_the_others()
        elif fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "crash":
            read_next_shard(step)
        elif fault.kind == "stall":
            write_statistics(fault.duration_s)

    def on_batch(self, step: int, images: torch.Tensor) -> torch.Tensor:
        """Return the batch for optimizer step `step`, corrupted if that is the fault."""
        fault = self._at_step.get(step)
        return corrupt(images) if fault is not None and fault.kind == "nan" else images

    def on_loading(self) -> None:
        for fault in self._slow:
            if fault.place == "data":
                time.sleep(fault.duration_s)

    def batches(self, count: int) -> int:
        """Return the number of batches in this rank's epoch; `count` without the fault."""
        return count - max(1, int(count * FEWER_BATCHES_SHARE)) if self._uneven else count

    def apply_to_model(self, model: nn.Module) -> nn.Module:
        """Return the model to train instead of `model`, before it is wrapped."""
        if self._unused:
            model = _with_auxiliary_head(model)
        for fault in self._slow:
            if fault.place == "forward":
                model.register_forward_pre_hook(lambda *_, s=fault.duration_s: time.sleep(s))
            elif fault.place == "backward":
                model.register_forward_hook(lambda _m, _i, outputs, s=fault.duration_s: _slow_gradient(outputs, s))
        return model

    def apply_to_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for fault in self._slow:
            if fault.place == "optimizer":
                optimizer.register_step_pre_hook(lambda *_, s=fault.duration_s: time.sleep(s))


def wait_for_the_others() -> None:
    """Enter a barrier. The mistake: only one rank calls this."""
    import torch.distributed as dist

    dist.barrier()


def read_next_shard(step: int) -> None:
    raise RuntimeError(f"could not read the shard of step {step}")


def write_statistics(duration_s: float) -> None:
    """Work for a while on one rank while the others wait for its gradients."""
    end = time.monotonic() + duration_s
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


def _slow_gradient(outputs: Any, duration_s: float) -> None:
    if outputs.requires_grad:
        outputs.register_hook(lambda _: time.sleep(duration_s))


def corrupt(images: torch.Tensor) -> torch.Tensor:
    images = images.clone()
    images[0, 0, 0, 0] = float("nan")
    return images


def _with_auxiliary_head(model: nn.Module) -> nn.Module:
    from torch import nn

    class WithAuxiliaryHead(nn.Module):
        """A second classifier is built and then forgotten in `forward`."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = model
            self.auxiliary_head = nn.Linear(10, 10)

        def forward(self, images: Any) -> Any:
            return self.backbone(images)

    return WithAuxiliaryHead()
