"""`lightning_ddp` with distdiag's callback."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from distdiag.callbacks.lightning import DistdiagCallback

callback = DistdiagCallback()
phases = set()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, 5),
        )
        self.accuracy = MulticlassAccuracy(5)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            print(
                f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['train_loss'].item():.8f}", flush=True
            )

    def validation_step(self, batch, batch_idx):
        phases.add(callback._names.phase)
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 16, 16, generator=g)
    return TensorDataset(x, (x.mean((1, 2, 3)) * 20).long().clamp(0, 4))


def main():
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="out",
        callbacks=[ModelCheckpoint("out", monitor="val_loss"), EarlyStopping("val_loss", patience=3), callback],
    )
    model = Classifier()
    trainer.fit(model, DataLoader(data(384, 0), 16, shuffle=True), DataLoader(data(64, 1), 16))
    assert phases == {"validate"} and callback._names.phase == "", phases
    if trainer.is_global_zero:
        print("done", trainer.global_step, flush=True)


if __name__ == "__main__":
    main()
