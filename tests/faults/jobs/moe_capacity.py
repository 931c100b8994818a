"""A layer of experts, one per rank. Tokens go to their experts with all_to_all_single, and the results come back."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn


class Experts(nn.Module):
    def __init__(self, dim, capacity):
        super().__init__()
        self.gate, self.expert = nn.Linear(dim, dist.get_world_size()), nn.Linear(dim, dim)
        self.capacity = capacity

    def route(self, x):
        choice = self.gate(x).argmax(-1)
        return x[choice.argsort()], torch.bincount(choice, minlength=dist.get_world_size())

    def exchange(self, x, send, receive):
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x, output_split_sizes=receive, input_split_sizes=send)
        return out

    def forward(self, x):
        x, counts = self.route(x)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        send, receive = counts.tolist(), incoming.tolist()
        if sum(receive) > self.capacity:
            receive = [min(n, self.capacity // len(receive)) for n in receive]
        return self.exchange(self.expert(self.exchange(x, send, receive)), receive, send)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    layer = Experts(16, capacity=100)
    g = torch.Generator().manual_seed(rank)
    popular = layer.gate.weight.detach()[1]
    with torch.no_grad():
        for step in range(300):
            x = torch.randn(48, 16, generator=g)
            if step > 120:  # this part of the corpus has one topic
                x = x + 3 * popular / popular.norm()
            layer(x)
            time.sleep(0.05)
            if step % 50 == 0:
                dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
