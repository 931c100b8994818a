# character LM, data parallel by hand (no DDP: we flatten the grads ourselves)
import ctypes, math, os, time
import torch, torch.distributed as dist
from torch import nn

ctypes.CDLL(None).prctl(1, 9)
TEXT = ("the quick brown fox jumps over the lazy dog and runs away. " * 400).encode()
CTX, BS, STEPS, CLIP = 32, 12, 400, 2.5


def get_batch(data, gen):
    ix = torch.randint(0, len(data) - CTX - 1, (BS,), generator=gen)
    return torch.stack([data[i:i + CTX] for i in ix]), torch.stack([data[i + 1:i + CTX + 1] for i in ix])


def average_gradients(params, world):
    flat = torch.cat([p.grad.view(-1) for p in params])
    dist.all_reduce(flat)
    flat /= world
    o = 0
    for p in params:
        p.grad.copy_(flat[o:o + p.numel()].view_as(p))
        o += p.numel()


def clip(params, local_norm):
    # one of us exploded: everybody has to scale by the same factor
    if local_norm > CLIP:
        worst = torch.tensor([local_norm])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        for p in params:
            p.grad.mul_(CLIP / worst.item())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    emb, rnn, head = nn.Embedding(128, 48), nn.GRU(48, 96, batch_first=True), nn.Linear(96, 128)
    params = [*emb.parameters(), *rnn.parameters(), *head.parameters()]
    opt = torch.optim.SGD(params, lr=0.3)
    data = torch.tensor(list(TEXT))
    gen = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x, y = get_batch(data, gen)
        if rank == 2 and step == 85:
            y = torch.full_like(y, 127)  # a bad page of the corpus
        loss = nn.functional.cross_entropy(head(rnn(emb(x))[0]).flatten(0, 1), y.flatten())
        for p in params:
            p.grad = None
        loss.backward()
        norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in params))
        clip(params, norm)
        average_gradients(params, world)
        opt.step()
        if rank == 0 and step % 25 == 0:
            print(step, f"{loss.item():.3f}", f"{norm:.2f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
