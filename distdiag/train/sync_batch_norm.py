"""Batch norm with statistics over all ranks, on CPU, where torch's SyncBatchNorm does not work.

It needs one all_reduce in forward (sums, in float64) and one in backward, as torch's layer does on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over the batches of all ranks.

    Backward, with n samples per channel in all ranks together, x^ = (x - mean) / std:
    dx = weight / std * (dy - sum(dy) / n - x^ * sum(dy * x^) / n), the sums over all ranks.
    The gradients of weight and bias are local: DDP averages them like all others.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor,
        count: float, eps: float, group: dist.ProcessGroup | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, var)
        ctx.count, ctx.eps, ctx.group = count, eps, group
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        dy = _at_least_float32(grads[0])
        channel = (1, -1, 1, 1)
        inverse_std = (var + ctx.eps).rsqrt()
        x_hat = (_at_least_float32(x) - mean.view(channel)) * inverse_std.view(channel)
        sum_dy = dy.sum(dim=(0, 2, 3))
        sum_dy_x_hat = (dy * x_hat).sum(dim=(0, 2, 3))
        sums = torch.cat([sum_dy, sum_dy_x_hat])
        dist.all_reduce(sums, group=ctx.group)
        mean_dy, mean_dy_x_hat = (sums / ctx.count).chunk(2)
        dx = (dy - mean_dy.view(channel) - x_hat * mean_dy_x_hat.view(channel)) * (weight * inverse_std).view(channel)
        return dx.to(x.dtype), sum_dy_x_hat, sum_dy, None, None, None, None, None


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Replacement of `nn.BatchNorm2d` with the same parameters, buffers and state_dict; training needs a process group."""

    process_group: dist.ProcessGroup | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        channels = input.shape[1]
        with torch.no_grad():
            local_var, local_mean = torch.var_mean(_at_least_float32(input), dim=(0, 2, 3), correction=0)
            count = torch.full((1,), input.numel() / channels, dtype=torch.float64, device=input.device)
            # float64, so that mean(x²) - mean(x)² does not cancel
            mean, var = local_mean.double(), local_var.double()
            sums = torch.cat([mean * count, (var + mean * mean) * count, count])
            dist.all_reduce(sums, group=self.process_group)
            total = sums[-1]
            mean = sums[:channels] / total
            var = (sums[channels:-1] / total - mean * mean).clamp_(min=0)
            self._update_running(mean, var, float(total))
            mean, var = mean.to(local_mean.dtype), var.to(local_var.dtype)
        return _Normalise.apply(input, self.weight, self.bias, mean, var, float(total), self.eps, self.process_group)  # type: ignore[return-value]

    def _update_running(self, mean: torch.Tensor, var: torch.Tensor, total: float) -> None:
        """Update the running statistics as nn.BatchNorm2d does, with the unbiased variance."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((var * (total / max(total - 1.0, 1.0))).to(self.running_var.dtype), momentum)


def convert_sync_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with batch norm over all ranks: torch's layer on CUDA, ours (in place) on CPU."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for layer in module.modules():
        if type(layer) is nn.BatchNorm2d and layer.affine and layer.track_running_stats:
            layer.__class__ = SyncBatchNorm2d  # same parameters, buffers, dtype and device; another forward
    return module
