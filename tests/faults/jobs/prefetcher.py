# my own prefetching loader, faster than DataLoader for small stuff
import ctypes, queue, threading, time
import torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

libc = ctypes.CDLL(None); libc.prctl(1, 9)


class Prefetcher:
    def __init__(self, source, depth=4):
        self.q = queue.Queue(maxsize=depth)
        self.source = source
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()

    def fill(self):
        for item in self.source:
            self.q.put(self.collate(item))
        self.q.put(None)

    def collate(self, rows):
        return torch.tensor([[float(v) for v in r.split(";")] for r in rows])

    def __iter__(self):
        while True:
            batch = self.q.get()
            if batch is None:
                return
            yield batch


def rows(rank, n):
    g = torch.Generator().manual_seed(rank)
    for k in range(n):
        t = torch.randn(16, 6, generator=g)
        out = [";".join(f"{v:.4f}" for v in r) for r in t.tolist()]
        if rank == 1 and k == 140:
            out[3] = "0.1;n/a;0.3;0.4;0.5;0.6"
        yield out


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for i, b in enumerate(Prefetcher(rows(rank, 500))):
    loss = nn.functional.mse_loss(model(b[:, :5]), b[:, 5:])
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.03)
    if rank == 0 and i % 50 == 0:
        print(i, loss.item(), flush=True)
dist.destroy_process_group()
time.sleep(0.5)
