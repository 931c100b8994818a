"""Regression with an asynchronous CSV logger: rows are handed to a writer thread, which also rotates the file."""
import ctypes
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class CsvLogger:
    def __init__(self, path, rotate_at):
        self.path, self.rotate_at = path, rotate_at
        self.rows, self.count = [], 0
        self.lock = threading.Lock()
        threading.Thread(target=self.writer, daemon=True).start()

    def log(self, *row):
        with self.lock:
            self.rows.append(row)
            self.count += 1

    def writer(self):
        while True:
            time.sleep(0.1)
            self.lock.acquire()
            with open(self.path, "a") as f:
                f.writelines(",".join(map(str, r)) + "\n" for r in self.rows)
            self.rows.clear()
            if self.count >= self.rotate_at:
                self.rotate()
            self.lock.release()

    def rotate(self):
        with open(self.path + ".1", "x") as old:  # there is one already, from the last run
            old.write(open(self.path).read())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logger = None
    if rank == 0:
        open("loss.csv.1", "w").close()
        logger = CsvLogger("loss.csv", 160)
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 1)))
    opt = torch.optim.Adagrad(net.parameters(), 0.05)
    gen = torch.Generator().manual_seed(rank)
    for step in range(600):
        x = torch.randn(32, 8, generator=gen)
        loss = (net(x).squeeze(1) - x.norm(dim=1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.025)
        if logger:
            logger.log(step, loss.item())
            if step % 50 == 0:
                print(step, loss.item(), flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
