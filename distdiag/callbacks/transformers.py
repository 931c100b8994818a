"""Hugging Face Trainer: `Trainer(…, callbacks=[DistdiagCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback  # type: ignore[import-not-found]

from distdiag.callbacks import Names


class DistdiagCallback(TrainerCallback):  # type: ignore[misc]  # pyright takes `transformers` for this file
    """Names the epoch, evaluation and prediction, and the saving of checkpoints."""

    def __init__(self) -> None:
        self._names = Names()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._names.handle.meta(max_steps=state.max_steps)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._names.handle.epoch(int((state.epoch or 0.0) + 1e-6))  # a fraction that may end just below

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the Trainer evaluates, then saves; it calls back after each, but before neither
        if control.should_save and not control.should_evaluate:
            self._names.enter("checkpoint")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._names.enter("validate")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._names.leave()
        self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._names.leave()

    on_epoch_end = on_step_end
    on_predict = on_train_end = on_save
