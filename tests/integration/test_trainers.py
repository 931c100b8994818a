"""Unchanged training loops of other libraries, if installed: Hugging Face Trainer, Accelerate, Lightning."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.jobs import distdiag, launch, wait_for

TRAINER = """
    import os, torch
    from torch.utils.data import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class Numbers(Dataset):
        def __init__(self): self.x = torch.randint(0, 100, (800, 16))
        def __len__(self): return len(self.x)
        def __getitem__(self, i):
            return {"input_ids": self.x[i], "labels": self.x[i].sum() % 2, "attention_mask": torch.ones(16, dtype=torch.long)}

    class Mine(Trainer):
        def training_step(self, *args, **more):
            if os.environ.get("HANG") and self.state.global_step == 20 and self.args.process_index == 1:
                torch.distributed.barrier()
            return super().training_step(*args, **more)

    model = BertForSequenceClassification(
        BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )
    options = TrainingArguments(
        "out", per_device_train_batch_size=8, max_steps=45, use_cpu=True, report_to=[], eval_strategy="steps",
        eval_steps=20, save_steps=20, ddp_backend="gloo",
    )
    Mine(model=model, args=options, train_dataset=Numbers(), eval_dataset=Numbers()).train()
"""
ACCELERATE = """
    import os, torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    x = torch.randn(1601, 20)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8, shuffle=True)
    )
    for i, (a, b) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(a), b))
            optimizer.step()
            optimizer.zero_grad()
        if os.environ.get("HANG") and i == 60 and accelerator.process_index == 1:
            accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    accelerator.end_training()
"""
LIGHTNING = """
    import os, torch, lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

        def training_step(self, batch, i):
            loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            if os.environ.get("HANG") and i == 20 and self.global_rank == 1:
                torch.distributed.barrier()
            return loss

        def validation_step(self, batch, i):
            self.log("loss", torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    x = torch.randn(1600, 20)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, enable_progress_bar=False, logger=False,
        default_root_dir="out",
    ).fit(Module(), DataLoader(data, 16, shuffle=True), DataLoader(data, 16))
"""
LOOPS = {"transformers": TRAINER, "accelerate": ACCELERATE, "lightning": LIGHTNING}


def _run(library: str, tmp_path: Path, **env: str):
    pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LOOPS[library]))
    run = ["-m", "distdiag.run", "--run-dir", str(tmp_path / "run"), str(script)]
    return launch(run, nproc=2, cwd=tmp_path, env=env, timeout=200)


@pytest.mark.job
@pytest.mark.parametrize("library", LOOPS)
def test_a_healthy_training_has_no_finding(library: str, tmp_path: Path) -> None:
    with _run(library, tmp_path) as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: re.search("nothing found|no error or warning found", job.stderr()), 20, "the summary")
    answer = distdiag("diagnose", str(tmp_path / "run"), "--json")
    assert answer.returncode == 0
    assert [f for f in json.loads(answer.stdout)["findings"] if f["severity"] != "info"] == []


@pytest.mark.job
@pytest.mark.parametrize("library", LOOPS)
def test_a_rank_with_another_control_flow_is_named(library: str, tmp_path: Path) -> None:
    with _run(library, tmp_path, HANG="1") as job:

        def verdict() -> dict | None:
            answer = distdiag("diagnose", str(tmp_path / "run"), "--json")
            found = json.loads(answer.stdout)["findings"] if answer.returncode == 1 else []
            return next((f for f in found if f["severity"] == "error"), None)

        f = wait_for(verdict, 150, "the deadlock", job)
        assert (f["kind"], f["cause"], f["culprits"]) == ("deadlock", "missing_rank", [1]), f
        source = (tmp_path / "train.py").read_text().splitlines()
        line = next(w["line"] for w in f["where"] if w["rank"] == 1)
        assert "barrier()" in source[line - 1] or "wait_for_everyone()" in source[line - 1]
