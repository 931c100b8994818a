"""`torchrun --logs-specs distdiag`: torchrun's own plug-in point; records the ranks of this launch, as DISTDIAG=1 does."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest

from distdiag.recorder.state import VARIABLE


class RecordedLogsSpecs(DefaultLogsSpecs):
    """torchrun's default, with DISTDIAG=1 in the environment of each rank, unless the user has set it."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env.setdefault(VARIABLE, "1")
        return super().reify(envs)
