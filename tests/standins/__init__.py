"""Stand-ins for hardware that test machines lack."""

import pytest
import torch

needs_stream = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="the stand-in for NCCL needs torch 2.13: on 2.10 its own messages hang, without distdiag, too",
)
