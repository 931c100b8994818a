"""Checkpoints: written by rank 0 under a temporary name, renamed when whole; read by every rank.

One holds all that the next step depends on, so that a resumed run equals the uninterrupted one: model, optimizer,
scheduler, gradient scaler, the position in the data, and the random state of every rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distdiag.errors import DistdiagError
from distdiag.train.config import TrainConfig
from distdiag.train.ranks import Ranks

FORMAT = 1
# options that decide which batches come next, or what the saved tensors mean
_MUST_AGREE = ("strategy", "model", "batch_size", "accumulate", "loader", "seed", "sync_bn", "schedule")


class Checkpoints:
    """The directory that a run writes its checkpoints to."""

    def __init__(self, directory: Path, keep: int, ranks: Ranks) -> None:
        self.directory, self._keep, self._ranks = directory, keep, ranks
        self._complained = False
        self.newest: Path | None = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """Collective: every rank calls it after the same step. A failing disk costs the checkpoint, never the job.

        Args:
            state: What to keep; the random states of all ranks are added here.
            step: Optimizer steps done.
        """
        random_states = _gather_random_states(self._ranks)
        if self._ranks.rank == 0:
            path = self.directory / f"step-{step:08d}.pt"
            try:
                _write(path, state | {"format": FORMAT, "step": step, "random": random_states})
                self.newest = path
                for old in sorted(self.directory.glob("step-*.pt"))[: -self._keep]:
                    if old != path:
                        old.unlink(missing_ok=True)
            except (OSError, RuntimeError) as e:  # torch.save turns some of the first into the second
                self._complain(e)
        self._ranks.barrier()  # no rank continues to a step that a resumed run would repeat differently

    def _complain(self, error: Exception) -> None:
        if self._complained:
            return
        self._complained = True
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        print(f"distdiag: warning: no checkpoint in {self.directory}: {reason}; training continues", file=sys.stderr)
        print("hint: choose a directory with room by --checkpoint-dir, or --checkpoint-every -1", file=sys.stderr)


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())  # else a power cut could leave the name and not the content
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def random_state() -> dict[str, torch.Tensor]:
    """State of the random generators that a step draws from (dropout), of this process."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _gather_random_states(ranks: Ranks) -> list[dict[str, torch.Tensor]]:
    if ranks.control is None:
        return [random_state()]
    states: list[Any] | None = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(random_state(), states, dst=0, group=ranks.control)
    return states or []


def find_checkpoint(resume: str) -> Path:
    """The file that `--resume` means: itself, or the newest of a directory (or of `checkpoints` in it).

    Raises:
        DistdiagError: there is none.
    """
    path = Path(resume).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        for directory in (path, path / "checkpoints"):
            if found := sorted(directory.glob("step-*.pt")):
                return found[-1]
        raise DistdiagError(
            f"no checkpoint (step-….pt) in {path}", "name the directory that --checkpoint-dir was, or a file"
        )
    raise DistdiagError(f"no such checkpoint: {path}", "name a file, or the directory that --checkpoint-dir was")


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """A checkpoint's content, its tensors on `device`; no code in it is run (`weights_only`).

    Raises:
        DistdiagError: it is unreadable, damaged, or no checkpoint of this job.
    """
    others = [p.name for p in sorted(path.parent.glob("step-*.pt")) if p != path]
    hint = f"resume from an older one: {path.parent / others[-1]}" if others else "start anew without --resume"
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError as e:
        raise DistdiagError(f"checkpoint {path} cannot be read: {e.strerror or e}", hint) from None
    except Exception:  # a damaged file raises what it likes: RuntimeError, EOFError, UnpicklingError, KeyError …
        raise DistdiagError(f"checkpoint {path} is damaged, or no checkpoint", hint) from None
    if not isinstance(state, dict) or "format" not in state or "optimizer" not in state:
        raise DistdiagError(f"{path} is no checkpoint of this training job", hint)
    if state["format"] != FORMAT:
        raise DistdiagError(f"checkpoint {path} has format {state['format']}, this version reads {FORMAT}", hint)
    return state


def check_fits(state: dict[str, Any], config: TrainConfig, ranks: Ranks, data_fingerprint: str) -> None:
    """That the run which wrote the checkpoint would go on as this one.

    Raises:
        DistdiagError: another world size, data set, or option that changes which batches come next.
    """
    if state["world_size"] != ranks.world_size:
        raise DistdiagError(
            f"the checkpoint was written by {state['world_size']} ranks, this job has {ranks.world_size}",
            f"start it with torchrun --nproc-per-node {state['world_size']} … (in all), or anew without --resume",
        )
    for name in _MUST_AGREE:
        was = state["options"].get(name, getattr(config, name))  # missing in checkpoints of older versions
        if was != getattr(config, name):
            option = "--" + name.replace("_", "-")
            same = (option if was else "--no-" + option[2:]) if isinstance(was, bool) else f"{option} {was}"
            raise DistdiagError(
                f"the checkpoint was written with {same}", f"add {same}, or start anew without --resume"
            )
    if state["data"] != data_fingerprint:
        raise DistdiagError(
            "the checkpoint was written with another data set",
            "name that one with --data, or start anew without --resume",
        )


def options_of(config: TrainConfig) -> dict[str, Any]:
    """The options that a resumed run must share."""
    return {name: getattr(config, name) for name in _MUST_AGREE}
