"""`hf_trainer` with distdiag's callback, epochs and checkpoints."""

import os

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

from distdiag.callbacks.transformers import DistdiagCallback

callback = DistdiagCallback()
phases = set()


class Named(Trainer):
    def prediction_step(self, *args, **kwargs):
        phases.add(f"{callback._names.phase} evaluate")
        return super().prediction_step(*args, **kwargs)

    def save_model(self, *args, **kwargs):
        phases.add(f"{callback._names.phase} save")
        return super().save_model(*args, **kwargs)


class Tokens(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 500, (n, 32), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {"input_ids": ids, "labels": ids.clone()}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def main():
    config = BertConfig(
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = BertForMaskedLM(config)
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=80,
        logging_steps=10,
        save_strategy="steps",
        save_steps=30,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=30,
        seed=1,
    )
    trainer = Named(
        model=model, args=args, train_dataset=Tokens(512, 0), eval_dataset=Tokens(64, 1), callbacks=[Print(), callback]
    )
    trainer.train()
    # the first step of an evaluation comes before the Trainer's first call
    assert phases == {" evaluate", "validate evaluate", "checkpoint save"} and callback._names.phase == "", phases
    metrics = trainer.evaluate()
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        print("eval", round(metrics["eval_loss"], 6), flush=True)
        trainer.save_model(os.path.join("out", "last"))


if __name__ == "__main__":
    main()
