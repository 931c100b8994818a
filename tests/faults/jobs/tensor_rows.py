"""2 x 2 mesh: activations are summed over rows (tensor parallel), gradients over columns (data parallel)."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn

DIM = 128
ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def build_mesh(rank):
    row_group = col_group = None
    for r in range(2):
        g = dist.new_group([2 * r, 2 * r + 1])
        if rank // 2 == r:
            row_group = g
    for c in range(2):
        g = dist.new_group([c, c + 2])
        if rank % 2 == c:
            col_group = g
    return row_group, col_group


class RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, g):
        return g, None


class SplitMLP(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.a = nn.Linear(DIM, DIM // 2)
        self.b = nn.Linear(DIM // 2, DIM)

    def forward(self, x):
        return RowSum.apply(self.b(torch.relu(self.a(x))), self.group)


def sync_stats(step, rank, act, grad, rows, cols):
    """Activation scale along the row, gradient scale along the column; the diagonal has its gradients first."""
    if rank in (0, 3):
        dist.all_reduce(act, group=rows)
        dist.all_reduce(grad, group=cols)
    else:
        dist.all_reduce(grad, group=cols)
        dist.all_reduce(act, group=rows)
    return act / 2, grad / 2


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows, cols = build_mesh(rank)
    torch.manual_seed(rank % 2)
    net = SplitMLP(rows)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank // 2)
    for step in range(1, 301):
        x = torch.randn(16, DIM, generator=gen)
        loss = (net(x) - x.flip(1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad, group=cols)
            p.grad /= 2
        opt.step()
        time.sleep(0.03)
        if step % 75 == 0:
            act = torch.tensor([x.std()])
            grad = torch.tensor([net.a.weight.grad.norm()])
            act, grad = sync_stats(step, rank, act, grad, rows, cols)
            if rank == 0:
                print(f"{step} loss {loss.item():.4f} act {act.item():.3f} grad {grad.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
