"""Bandit-style training; rank 0 asks the experiment server for the temperature every 40 steps (line protocol)."""
import ctypes
import signal
import socket
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def experiment_server(listener, answers):
    """Stand-in for the server of our lab, runs in a thread of the main process."""
    conn, _ = listener.accept()
    for _ in range(answers):
        conn.recv(64)
        conn.sendall(b"0.9\n")
    time.sleep(3600)  # overloaded


class Client:
    def __init__(self, port):
        self.sock = socket.create_connection(("127.0.0.1", port))

    def temperature(self, step):
        self.sock.sendall(f"temp? {step}\n".encode())
        line = self.sock.recv(64)
        return float(line)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    client = None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=experiment_server, args=(listener, 3), daemon=True).start()
        client = Client(listener.getsockname()[1])
    torch.manual_seed(0)
    policy = DDP(nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 4)))
    opt = torch.optim.Adam(policy.parameters(), 5e-3)
    temp = torch.ones(1)
    torch.manual_seed(10 + rank)
    for step in range(1, 601):
        ctx = torch.randn(24, 6)
        logits = policy(ctx) / temp
        a = torch.distributions.Categorical(logits=logits)
        act = a.sample()
        reward = (act == ctx[:, :4].argmax(1)).float()
        loss = -(a.log_prob(act) * (reward - reward.mean())).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
        if step % 40 == 0:
            if client is not None:
                temp.fill_(client.temperature(step))
            dist.broadcast(temp, src=0)
            if rank == 0:
                print(f"step {step} reward {reward.mean().item():.2f} temp {temp.item()}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
