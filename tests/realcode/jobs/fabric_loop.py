"""A regression with Lightning Fabric: its own loop, backward through Fabric, a reduced validation loss."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(320, 16, generator=g)
    y = x.sin().sum(1, keepdim=True)
    train = fabric.setup_dataloaders(DataLoader(TensorDataset(x[:256], y[:256]), 8, shuffle=True))
    valid = fabric.setup_dataloaders(DataLoader(TensorDataset(x[256:], y[256:]), 8))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 1e-3))
    for epoch in range(5):
        model.train()
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
        model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for inputs, targets in valid:
                total += nn.functional.mse_loss(model(inputs), targets)
        total = fabric.all_reduce(total / len(valid))
        fabric.print(f"epoch {epoch} loss {total.item():.8f}")
        fabric.save("fabric.ckpt", {"model": model, "epoch": epoch})
    fabric.barrier()


if __name__ == "__main__":
    main()
