import sys

import lightning as L
import torch


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, x, i):
        loss = self.layer(x).square().mean()
        if sys.argv[-1] == "hangs" and self.current_epoch == 3 and i == 2 and self.global_rank == 1:
            self.trainer.strategy.barrier()  # HERE
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(
        devices=2,
        accelerator="cpu",
        strategy=sys.argv[1],
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4))
    if trainer.is_global_zero:
        print(f"loss {model.layer.weight.sum().item():.8f}", flush=True)
