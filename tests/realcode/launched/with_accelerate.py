import sys

import torch
from accelerate import Accelerator


def train():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for epoch in range(6):
        for x in data:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        if sys.argv[-1] == "hangs" and epoch == 3 and accelerator.process_index == 1:
            accelerator.wait_for_everyone()  # HERE
        accelerator.print(f"epoch {epoch} loss {loss.item():.8f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    train()
