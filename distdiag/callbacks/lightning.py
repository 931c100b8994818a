"""Lightning: `Trainer(callbacks=[DistdiagCallback()])`, from `lightning` or from `pytorch_lightning`."""

from __future__ import annotations

import sys
from typing import Any

from distdiag.callbacks import Names

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback  # type: ignore[import-not-found]
else:
    from lightning.pytorch.callbacks import Callback  # type: ignore[import-not-found]


class DistdiagCallback(Callback):
    """Names the epoch, and validation, test and prediction; the sanity check is a validation."""

    def __init__(self) -> None:
        self._names = Names()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        steps = {"max_steps": trainer.max_steps} if trainer.max_steps and trainer.max_steps > 0 else {}
        self._names.handle.meta(model=type(pl_module).__name__, **steps)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._names.handle.epoch(trainer.current_epoch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._names.enter("validate")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._names.leave()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._names.leave()
