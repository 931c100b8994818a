"""The pulse: four times a second, what the rank cannot say while it waits.

A daemon thread writes the heartbeat, the groups' counters, and the user's frames of the main thread into the page. It takes
the GIL for a tenth of a millisecond a beat; where the GIL is held by others it misses beats, and that is what a reader sees.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from distdiag.recorder import state
from distdiag.recorder.frames import raw_name, user_stack
from distdiag.recorder.page import STACK
from distdiag.recorder.state import guarded, now_ns

PERIOD_S = 0.25


class Pulse(threading.Thread):
    def __init__(self, r: state.Recorder) -> None:
        super().__init__(name="distdiag-pulse", daemon=True)
        self.r, self.h = r, r.h
        self.collectives: Any = None
        self.checks: Any = None
        self._ending = threading.Event()  # `_stop` is a method of Thread's own
        self._torch_cuda: Any = None

    def run(self) -> None:
        while not self._ending.wait(PERIOD_S):
            self.beat()

    def stop(self) -> None:
        self._ending.set()

    @guarded
    def beat(self) -> None:
        """One beat: what `run` does every quarter of a second."""
        self._sample()
        if self.collectives is not None:
            self.collectives.refresh_groups()
        if self.h.beats % 4 == 0:
            self._device()
        self.h.beats += 1
        self.h.heartbeat_ns = now_ns()

    def _sample(self) -> None:
        frame = sys._current_frames().get(self.r.main_thread or 0)
        if frame is None:
            return
        h = self.h
        sites = [self.r.site(f) for f in user_stack(frame, STACK)]
        raw = self.r.page.text(raw_name(frame))
        h.stack_version += 1  # odd: being written
        for i, s in enumerate(sites):
            h.stack[i] = s
        h.stack_depth = len(sites)
        h.raw_innermost = raw
        h.stack_ns = now_ns()
        h.stack_version += 1

    def _device(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
            return
        device = torch.cuda.current_device()
        self.h.gpu = _physical_index(torch, device)
        self.h.device_bytes = torch.cuda.memory_reserved(device)
        self.h.device_peak_bytes = torch.cuda.max_memory_reserved(device)
        self.h.device_total_bytes = torch.cuda.get_device_properties(device).total_memory


def _physical_index(torch: Any, device: int) -> int:
    """NVML's index of a CUDA device: CUDA_VISIBLE_DEVICES renumbers them."""
    import os

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    parts = [p.strip() for p in visible.split(",") if p.strip()]
    if device < len(parts) and parts[device].isdigit():
        return int(parts[device])
    return device
