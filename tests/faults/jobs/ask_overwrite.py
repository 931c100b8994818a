"""train.py of a student project: asks before it overwrites an older result."""
import ctypes, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ctypes.CDLL(None).prctl(1, 9)
OUT = "result.pt"


def save(model, is_best):
    if os.path.exists(OUT) and not is_best:
        answer = input(f"{OUT} exists and this model is not better. Overwrite? [y/N] ")
        if answer.lower() != "y":
            return
    torch.save(model.state_dict(), OUT)


def train_epoch(model, opt, epoch):
    total = 0
    torch.manual_seed(1000 * epoch + dist.get_rank())
    for i in range(50):
        x = torch.randn(20, 3)
        target = (x ** 2).sum(dim=1, keepdim=True)
        loss = nn.MSELoss()(model(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total = total + loss.item()
        time.sleep(0.03)
    return total / 50


dist.init_process_group("gloo")
torch.manual_seed(42)
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.02)
best = 1e9
for epoch in range(10):
    loss = train_epoch(model, opt, epoch)
    if epoch == 2:
        loss += 10  # new data from here on
    if dist.get_rank() == 0:
        print("epoch", epoch, "loss", loss, flush=True)
        save(model.module, loss < best)
        best = min(best, loss)
dist.destroy_process_group()
time.sleep(0.5)
