"""Checkpoints: written by rank 0 under a temporary name, renamed when complete, read by every rank.

A checkpoint has everything that the next step depends on, so that a resumed run equals an uninterrupted one: model,
optimizer, scheduler, gradient scaler, position in the data, and the random state of every rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from distdiag.command_line import flag
from distdiag.errors import DistdiagError
from distdiag.files import replacing
from distdiag.train.config import TrainConfig
from distdiag.train.ranks import Ranks

FORMAT = 1
# options that determine the next batches, or the meaning of the saved tensors
_MUST_AGREE = ("strategy", "model", "batch_size", "accumulate", "loader", "seed", "schedule")


class Checkpoints:
    def __init__(self, directory: Path, keep: int, ranks: Ranks) -> None:
        self.directory, self._keep, self._ranks = directory, keep, ranks
        self._complained = False
        self.newest: Path | None = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """Write a checkpoint with the random states of all ranks; a failing disk does not end the job. Collective."""
        random_states = self._ranks.gather(random_state())
        if self._ranks.rank == 0:
            path = self.directory / f"step-{step:08d}.pt"
            try:
                _write(path, state | {"format": FORMAT, "step": step, "random": random_states})
                self.newest = path
                for old in sorted(self.directory.glob("step-*.pt"))[: -self._keep]:
                    if old != path:
                        old.unlink(missing_ok=True)
            except (OSError, RuntimeError) as e:  # torch.save raises RuntimeError for some OSErrors
                self._complain(e)
        self._ranks.barrier()  # so that no rank continues before the checkpoint is written

    def _complain(self, error: Exception) -> None:
        if self._complained:
            return
        self._complained = True
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        print(f"distdiag: warning: no checkpoint in {self.directory}: {reason}; training continues", file=sys.stderr)
        print("hint: choose another directory with --checkpoint-dir, or --checkpoint-every -1", file=sys.stderr)


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path.parent, path.name, own=False) as part, part.open("wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())  # else a power failure could leave the name without the content


def random_state() -> dict[str, torch.Tensor]:
    """Return the state of this process's random generators, which a step uses (dropout)."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def find_checkpoint(resume: str) -> Path:
    """Return the file of `--resume`: itself, or the newest in a directory (or in its `checkpoints`)."""
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
    """Return a checkpoint's content with tensors on `device`; runs no code from it (`weights_only`)."""
    others = [p.name for p in sorted(path.parent.glob("step-*.pt")) if p != path]
    hint = f"resume from an older one: {path.parent / others[-1]}" if others else "start anew without --resume"
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError as e:
        raise DistdiagError(f"checkpoint {path} cannot be read: {e.strerror or e}", hint) from None
    except Exception:  # a damaged file raises RuntimeError, EOFError, UnpicklingError, KeyError …
        raise DistdiagError(f"checkpoint {path} is damaged, or no checkpoint", hint) from None
    if not isinstance(state, dict) or "format" not in state or "optimizer" not in state:
        raise DistdiagError(f"{path} is no checkpoint of this training job", hint)
    if state["format"] != FORMAT:
        raise DistdiagError(f"checkpoint {path} has format {state['format']}, this version reads {FORMAT}", hint)
    return state


def check_fits(state: dict[str, Any], config: TrainConfig, ranks: Ranks, data_fingerprint: str) -> None:
    if state["world_size"] != ranks.world_size:
        raise DistdiagError(
            f"the checkpoint was written by {state['world_size']} ranks, this job has {ranks.world_size}",
            f"start it with torchrun --nproc-per-node {state['world_size']} … (in all), or anew without --resume",
        )
    for name in _MUST_AGREE:
        was = state["options"].get(name, getattr(config, name))  # missing in checkpoints of older versions
        if was != getattr(config, name):
            same = f"{flag(name)} {was}"
            raise DistdiagError(
                f"the checkpoint was written with {same}", f"add {same}, or start anew without --resume"
            )
    if state["data"] != data_fingerprint:
        raise DistdiagError(
            "the checkpoint was written with another data set",
            "name that one with --data, or start anew without --resume",
        )


def options_of(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _MUST_AGREE}
