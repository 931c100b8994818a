"""Model parallel and pipeline: every rank has some layers of the model. Below: the schedules as drawings."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from distdiag.train.precision import autocast
from distdiag.train.strategies.base import Setup, Strategy
from distdiag.train.strategies.split import Stage, cut, pieces_of

IMAGE = (3, 32, 32)
MAX_DRAWN_SLOTS = 60  # longer schedules are not drawn
FORWARD, BACKWARD = "F", "B"
Action = tuple[str, int, int]  # (F or B, stage, micro-batch)


class Stages(Strategy):
    """Consecutive layers on each rank; neighbours exchange activations (forward) and gradients (backward) as messages.

    `--strategy model` sends the whole batch at once: one rank computes at a time. `pipeline` sends micro-batches.
    Every rank loads the same batch; the first uses its images, the last its labels. Batch norm sees micro-batches.
    """

    def __init__(self, setup: Setup) -> None:
        config, ranks = setup.config, setup.ranks
        self.kind = "gpipe" if config.strategy == "model" else config.schedule
        self.micro_batches = 1 if config.strategy == "model" else config.micro_batches
        self.per_rank = 2 if self.kind == "interleaved" else 1
        self.skeleton = copy.deepcopy(setup.network).to("meta")
        self._cut = cut(pieces_of(setup.network), ranks.world_size * self.per_rank, IMAGE)
        sizes = [sum(p.numel() for piece in pieces for p in piece.module.parameters()) for pieces in self._cut.stages]
        self.parameters_by_rank = [sum(sizes[r :: ranks.world_size]) for r in range(ranks.world_size)]
        self._step_s = 0.0
        super().__init__(setup)

    def build(self, network: nn.Module) -> nn.Module:
        """Return this rank's stages: stage i is on rank i modulo the number of ranks."""
        own = range(self.ranks.rank, len(self._cut.stages), self.ranks.world_size)
        self.stages = nn.ModuleDict({str(i): Stage(self._cut.stages[i]) for i in own})
        for i, pieces in enumerate(self._cut.stages):
            if i not in own:
                for piece in pieces:
                    piece.module.to("meta")  # frees the layers of other ranks
        if self.setup.config.channels_last:
            self.stages.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for i in own:
            self.setup.faults.apply_to_model(self.stages[str(i)])
        return self.stages.to(self.ranks.device)

    def wrap(self) -> None:
        self._timed = [self._stage(int(i), stage) for i, stage in self.stages.items()]  # type: ignore[arg-type]
        # the loss is divided, because torch's scale_grads would divide the gradients of earlier batches again
        common: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if self.kind == "interleaved":
            self._schedule: Any = ScheduleInterleaved1F1B([*self._timed], self.micro_batches, **common)
        else:
            build = ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B
            self._schedule = build(self._timed[0], self.micro_batches, **common)

    def _stage(self, index: int, module: Stage) -> TimedStage:
        config, device = self.setup.config, self.ranks.device
        size = config.batch_size // self.micro_batches
        shapes, count = self._cut.shapes, len(self._cut.stages)
        into = torch.empty(size, *shapes[index], device="meta", requires_grad=index > 0)
        out = torch.empty(size, *shapes[index + 1], device="meta", requires_grad=True)
        computing = _InPrecision(module, self.setup.amp, device)
        return TimedStage(computing, index, count, device, into, out, group=self.ranks.group)

    def _loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, labels) / (self.micro_batches * self.setup.config.accumulate)

    # -- one step ---------------------------------------------------------------------------------------------

    def backward(
        self, images: torch.Tensor, labels: torch.Tensor, completes_step: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        began = time.perf_counter()
        losses: list[torch.Tensor] = []
        first, last = self.ranks.rank == 0, self.ranks.rank == self.ranks.world_size - 1
        outputs = self._schedule.step(  # communication: send and receive between neighbours, for each micro-batch
            *((images.contiguous(),) if first else ()), target=labels if last else None, losses=losses if last else None
        )
        self._step_s += time.perf_counter() - began
        if not last:
            return None
        return torch.stack(losses).sum().detach() * self.setup.config.accumulate, outputs

    def clip(self, max_norm: float) -> None:
        """Scale the gradients of all stages by the norm of the whole model's gradient. Collective."""
        parameters = list(self.stages.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        squares = (norm**2).reshape(1)
        dist.all_reduce(squares, group=self.ranks.group)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, squares.sqrt()[0])

    # -- its state --------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, torch.Tensor]:
        return {k: v for stage in self.stages.values() for k, v in stage.whole_state().items()}  # type: ignore[operator]

    def whole_network(self) -> nn.Module:
        state = {k: v for part in self.ranks.gather(self._own_state()) for k, v in part.items()}
        return self._assembled(state)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        parts = self.ranks.gather((self._own_state(), optimizer.state_dict()))
        return {
            "model": {k: v for model, _ in parts for k, v in model.items()},
            "optimizer": [part for _, part in parts],
        }

    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        for stage in self.stages.values():
            stage.load_whole_state(state["model"])  # type: ignore[operator]
        optimizer.load_state_dict(state["optimizer"][self.ranks.rank])

    # -- what is printed ----------------------------------------------------------------------------------------

    def about(self) -> list[str]:
        shares = ", ".join(f"{s:.0%}" for s in self._cut.shares)
        lines = [f"{len(self._cut.shares)} stages with {shares} of the forward FLOPs"]
        if self.kind == "interleaved":
            lanes = [
                {slot: _action(a) for slot, a in enumerate(actions) if a is not None}
                for _, actions in sorted(self._schedule.pipeline_order.items())
            ]
        else:
            lanes = slots(self.kind, self.ranks.world_size, self.micro_batches)
        if max(slot for lane in lanes for slot in lane) < MAX_DRAWN_SLOTS:
            lines += drawing(lanes)
        return lines

    def expected_bubble(self) -> float:
        """Return the share of a step in which a rank has nothing to compute, by formula."""
        return bubble(self.ranks.world_size, self.micro_batches, self.per_rank)

    def busy_s(self) -> float:
        """Return the seconds since the start in which this rank's stages computed; on a GPU only the host's time."""
        return sum(stage.busy_s for stage in self._timed)

    def summary(self) -> list[str]:
        text = f"bubble {self.expected_bubble():.0%} by formula, for stages that take equally long"
        if self.ranks.device.type == "cpu":  # on a GPU the host's time is not the stage's
            times = self.ranks.gather((self.busy_s(), self._step_s))
            idle = [1 - b / s if s else 0.0 for b, s in times]
            text += f"; measured: {', '.join(f'rank {r} {share:.0%}' for r, share in enumerate(idle))}"
        return [text]


def _action(action: Any) -> Action:
    kind = FORWARD if action.computation_type.name == "FORWARD" else BACKWARD
    return kind, action.stage_index, action.microbatch_index


class TimedStage(PipelineStage):
    """A stage that adds up the seconds in which it computes (on the host)."""

    busy_s = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.busy_s += time.perf_counter() - began

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._timed():
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._timed():
            return super().backward_one_chunk(*args, **options)


class _InPrecision(nn.Module):
    """A stage under autocast; between stages activations are float32."""

    def __init__(self, stage: Stage, amp: str, device: torch.device) -> None:
        super().__init__()
        self.stage, self.amp, self.device = stage, amp, device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.amp, self.device):
            return self.stage(x).float().contiguous()


def slots(kind: str, ranks: int, micro_batches: int) -> list[dict[int, Action]]:
    """Return each rank's actions by time slot, with one stage per rank, if every action takes one slot.

    Args:
        kind: "gpipe": all forwards, then all backwards. "1f1b": a backward as soon as one can run, with at least as many
            micro-batches as ranks.
    """
    lanes: list[dict[int, Action]] = []
    for rank in range(ranks):
        lane: dict[int, Action] = {}
        later = ranks - 1 - rank  # ranks behind this one, through which a micro-batch goes before its backward
        for m in range(micro_batches):
            if kind == "gpipe":
                forward, backward = rank + m, micro_batches + ranks - 1 + later + m
            else:
                forward, backward = rank + (m if m <= later else 2 * m), ranks + later + 2 * m
            lane[forward], lane[backward] = (FORWARD, rank, m), (BACKWARD, rank, m)
        lanes.append(lane)
    return lanes


def bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return the share of a step in which a rank is idle, if all stages take equally long.

    (p-1) / (v*m + p-1) with p ranks, m micro-batches and v stages per rank (Narayanan et al. 2021, section 2.2).
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def drawing(lanes: Sequence[Mapping[int, Action]]) -> list[str]:
    """Return one line per rank, one column per slot: `F0` forward of micro-batch 0, `B0` its backward, `.` idle."""
    length = max(slot for lane in lanes for slot in lane) + 1
    width = max(len(f"{a[0]}{a[2]}") for lane in lanes for a in lane.values())
    return [
        f"rank {rank}  "
        + " ".join((f"{lane[s][0]}{lane[s][2]}" if s in lane else ".").ljust(width) for s in range(length)).rstrip()
        for rank, lane in enumerate(lanes)
    ]
