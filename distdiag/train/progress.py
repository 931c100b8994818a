"""Print the lines of rank 0 while the job trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from distdiag.terms.units import counted
from distdiag.train.checkpoint import find_checkpoint
from distdiag.train.config import TrainConfig
from distdiag.train.ranks import Ranks
from distdiag.train.recording import Recording
from distdiag.train.shared_memory import SharedPixels


class Progress:
    """Prints start, progress and end on rank 0. Sums stay on the device until a line is printed."""

    def __init__(self, config: TrainConfig, ranks: Ranks, recorder: Recording, device: torch.device) -> None:
        self._config, self._ranks, self._recorder = config, ranks, recorder
        self._window = torch.zeros(3, device=device)  # loss x samples, correct, samples
        self._begun = self._since = time.monotonic()
        self._total_steps = 0
        self._loss: float | None = None
        self._accuracy: float | None = None

    def _print(self, text: str, always: bool = False) -> None:
        if self._ranks.rank == 0 and (always or not self._config.quiet):
            print(text, flush=True)

    def begin(self, pixels: SharedPixels, model: str, amp: str, step: int, total_steps: int, data_ranks: int) -> None:
        """Print the first line. If fewer than all ranks share a global batch, every rank loads the whole batch."""
        config, ranks = self._config, self._ranks
        if pixels.notice:
            self._print(pixels.notice, always=True)
        layout = ", channels_last" if config.channels_last else ""
        accumulate = f" x {config.accumulate} accumulated" if config.accumulate > 1 else ""
        count = counted(ranks.world_size, "rank")
        whole = data_ranks < ranks.world_size
        samples = f"{config.batch_size} samples on {count}" if whole else f"{count} x {config.batch_size} samples"
        self._print(
            f"{model} on {pixels.address.name} "
            f"({pixels.address.train_images:,} + {pixels.address.test_images:,} images): {samples}{accumulate}, "
            f"{config.strategy}, {ranks.device.type} ({ranks.backend}), amp {amp}{layout}, {total_steps - step:,} steps",
            always=True,
        )
        if step:
            self._print(f"resumed after step {step} from {find_checkpoint(config.resume)}", always=True)
        self._total_steps = total_steps
        self._begun = self._since = time.monotonic()

    def lines(self, texts: list[str]) -> None:
        for text in texts:
            self._print(text, always=True)

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch to the sums on the device, without waiting for it."""
        with torch.no_grad():
            count = len(labels)
            self._window[0] += loss.detach() * count
            self._window[1] += (outputs.argmax(1) == labels).sum()
            self._window[2] += count

    def report(self, epoch: int, step: int, lr: float) -> None:
        """Print loss and accuracy of all ranks since the last report. Collective; waits for the device."""
        own_loss = float(self._window[0] / self._window[2]) if self._window[2] else None
        loss, correct, count = self._ranks.sum(self._window).tolist()
        now = time.monotonic()
        rate = count / max(now - self._since, 1e-9)
        self._window.zero_()
        self._since = now
        mean_loss = self._loss = loss / max(count, 1)
        accuracy = correct / max(count, 1)
        if own_loss is not None:  # only the rank with the last stage computes a loss
            self._recorder.log(loss=own_loss)
        self._recorder.log(mean_loss=mean_loss, train_accuracy=accuracy, learning_rate=lr, samples_per_s=rate)
        self._print(
            f"epoch {epoch + 1}  step {step}/{self._total_steps}  loss {mean_loss:.4f}  accuracy {accuracy:6.2%}  "
            f"lr {lr:.4f}  {rate:,.0f} samples/s"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context from the samples per second."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def validated(self, epoch: int, step: int, loss: float, accuracy: float) -> None:
        self._accuracy = accuracy
        self._recorder.log(test_loss=loss, test_accuracy=accuracy)
        self._print(
            f"epoch {epoch + 1}  step {step}/{self._total_steps}  test loss {loss:.4f}  test accuracy {accuracy:.2%}"
        )

    def end(self, step: int, checkpoint: Path | None) -> None:
        seconds = time.monotonic() - self._begun
        accuracy = "" if self._accuracy is None else f", test accuracy {self._accuracy:.2%}"
        loss = "" if self._loss is None else f", loss {self._loss:.4f}"
        written = f"; checkpoint {checkpoint}" if checkpoint else ""
        self._print(f"done: {step:,} steps in {seconds:.1f} s{loss}{accuracy}{written}", always=True)
