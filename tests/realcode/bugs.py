"""Bugs of one to three lines in the healthy scripts of `jobs/`, each with the right diagnosis.

A bug is a healthy script with some text replaced. `line` is text of the culprit's line after that; `any_rank` means that people
would disagree about the rank, so that any of the ranks, or none, is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HANG: tuple[str, ...] = ("deadlock", "mismatch")
ANY_END: tuple[str, ...] = (*HANG, "rank_lost")


@dataclass(frozen=True)
class Bug:
    """One bug, and what is right to say of it."""

    name: str
    base: str
    about: str
    edits: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    line: str | None = None
    any_rank: bool = False
    ends: Literal["hang", "crash", "ok"] = "hang"


BUGS = (
    Bug(
        "hf_eval_on_main", "hf_trainer", "only rank 0 evaluates, and Trainer.evaluate gathers from all ranks",
        (("metrics = trainer.evaluate()", "metrics = trainer.evaluate() if trainer.is_world_process_zero() else None"),),
        HANG, (0,), "trainer.evaluate() if",
    ),
    Bug(
        "hf_slow_items", "hf_trainer", "reading an item takes rank 1 much longer: a slow disk",
        (("        ids = self.ids[i]\n", "        ids = self.ids[i]\n        time.sleep(0.03 * int(os.environ['RANK']))\n"),
         ("import os\n", "import os\nimport time\n"), ("max_steps=60", "max_steps=150"), ("eval_steps=30", "eval_steps=200")),
        ("straggler",), (1,), "time.sleep(0.03", ends="ok",
    ),
    Bug(
        "accelerate_eval_on_main", "accelerate_loop", "only the main process evaluates; gather_for_metrics waits for all",
        (("evaluate(accelerator, model, test_loader)\n        accelerator.print",
          "evaluate(accelerator, model, test_loader) if accelerator.is_main_process else (0, 0)\n        accelerator.print"),),
        HANG, (0,), "logits = model(input_ids=ids).logits",
    ),
    Bug(
        "accelerate_debug_break", "accelerate_loop", "a debugging break is left in, and only the main process takes it",
        (("                optimizer.zero_grad()\n",
          "                optimizer.zero_grad()\n            if accelerator.is_main_process and epoch == 1:\n                break\n"),),
        (*HANG, "uneven_batches"), (0,),
    ),
    Bug(
        "accelerate_wait_on_main", "accelerate_loop", "wait_for_everyone has slipped under is_main_process",
        (("        accelerator.wait_for_everyone()\n        if accelerator.is_main_process:\n",
          "        if accelerator.is_main_process:\n            accelerator.wait_for_everyone()\n"),),
        HANG, (0,), "accelerator.wait_for_everyone()",
    ),
    Bug(
        "lightning_barrier_on_zero", "lightning_ddp", "a barrier in a hook that only rank 0 reaches",
        (("        if self.global_rank == 0:\n", "        if self.global_rank == 0:\n            self.trainer.strategy.barrier()\n"),),
        HANG, (0,), "self.trainer.strategy.barrier()",
    ),
    Bug(
        "lightning_bad_sample", "lightning_ddp", "one rank raises in training_step",
        (("        x, y = batch\n        loss", "        x, y = batch\n        if (self.global_rank, self.global_step) == (1, 17):\n            raise ValueError('bad sample')\n        loss"),),
        ("rank_lost",), (1,), "raise ValueError('bad sample')", ends="crash",
    ),
    Bug(
        "lightning_unused_head", "lightning_ddp", "a layer that forward never uses, under plain ddp",
        (("        self.accuracy =", "        self.aux = nn.Linear(4, 4)\n        self.accuracy ="),),
        ("unused_parameters",), (), ends="crash",
    ),
    Bug(
        "fabric_save_on_zero", "fabric_loop", "fabric.save, which ends in a barrier, is called by rank 0 alone",
        (('        fabric.save("fabric.ckpt"', '        if fabric.global_rank == 0:\n            fabric.save("fabric.ckpt"'),),
        HANG, (0,), 'fabric.save("fabric.ckpt"',
    ),
    Bug(
        "fabric_slow_rank", "fabric_loop", "rank 1 does extra work in every step",
        (("import lightning as L\n", "import time\n\nimport lightning as L\n"), ("range(5)", "range(12)"),
         ("            optimizer.step()\n", "            optimizer.step()\n            time.sleep(0.06 * fabric.global_rank)\n")),
        ("straggler",), (1,), "time.sleep(0.06", ends="ok",
    ),
    Bug(
        "fsdp_skipped_batch", "fsdp2_llama", "one rank skips a bad batch",
        (("        loss = model(", "        if rank == 1 and step == 20:\n            continue\n        loss = model("),),
        (*HANG, "uneven_batches"), (1,),
    ),
    Bug(
        "tp_crash", "tensor_parallel", "one rank of a 2-D mesh raises",
        (("        loss.backward()\n", "        loss.backward()\n        if (dist.get_rank(), step) == (3, 30):\n            raise RuntimeError('bad shard')\n"),),
        ("rank_lost",), (3,), "raise RuntimeError('bad shard')", ends="crash",
    ),
    Bug(
        "pipeline_fewer_steps", "pipeline_stages", "the first stage runs one step less",
        (("range(50)", "range(49 + rank)"),), HANG, (0,),
    ),
    Bug(
        "pipeline_microbatches", "pipeline_stages", "the stages cut the batch into different numbers of micro-batches",
        (("n_microbatches=MICRO", "n_microbatches=MICRO * (1 + rank)"),), ANY_END, any_rank=True,
    ),
    Bug(
        "join_left_out", "join_uneven", "uneven inputs without the Join context",
        (("        with Join([model]):\n", "        if True:\n"),), (*HANG, "uneven_batches"), (0,),
    ),
    Bug(
        "checkpoint_on_zero", "async_checkpoint", "async_save, a collective, is called by rank 0 alone",
        (("        if step % 20 == 19:\n", "        if step % 20 == 19 and rank == 0:\n"),), (*ANY_END, "stall"), (0,),
    ),
    Bug(
        "spawned_return", "spawn_ddp", "one spawned rank returns early",
        (("        if rank == 0 and step", "        if rank == 1 and step == 30:\n            return\n        if rank == 0 and step"),),
        HANG, (1,),
    ),
    Bug(
        "compiled_skip", "compiled_ddp", "one rank skips a step of a compiled model",
        (("        loss = nn", "        if rank == 0 and step == 25:\n            continue\n        loss = nn"),),
        (*HANG, "uneven_batches"), (0,),
    ),
    Bug(
        "zero_state_on_zero", "zero_optimizer", "consolidate_state_dict is called by rank 0 alone",
        (("    optimizer.consolidate_state_dict(to=0)\n    if rank == 0:\n",
          "    if rank == 0:\n        optimizer.consolidate_state_dict(to=0)\n"),),
        ANY_END, (0,), "optimizer.consolidate_state_dict(to=0)",
    ),
    Bug(
        "clip_last_batch", "clip_contrastive", "the last batch of rank 1 is smaller, and all_gather wants equal shapes",
        (("(6, 16)", "(6 - (rank and step == 30), 16)"), ("randn(6, 3", "randn(6 - (rank and step == 30), 3")),
        ANY_END, (1,), "all_gather(text)",
    ),
    Bug(
        "clip_temperature", "clip_contrastive", "a schedule divides by a temperature that becomes zero: the loss is NaN",
        (("* scale", "* scale / (1.0 if step < 20 else 0.0)"),), ("nonfinite",), any_rank=True, ends="ok",
    ),
    Bug(
        "seq2seq_same_data", "seq2seq_generate", "no DistributedSampler: every rank trains on the same batches",
        (("sampler=sampler)", "shuffle=True)"),), ("duplicate_data",), any_rank=True, ends="ok",
    ),
    Bug(
        "seq2seq_gather_on_zero", "seq2seq_generate", "all_gather_object is called by rank 0 alone",
        (("        dist.all_gather_object(", "        if rank == 0:\n            dist.all_gather_object("),),
        HANG, (0,), "dist.all_gather_object(",
    ),
    Bug(
        "metric_on_zero", "metric_callbacks", "torchmetrics' compute synchronises, and only rank 0 calls it",
        (("accuracy.compute().item(), mean.compute().item()\n",
          "(accuracy.compute().item(), mean.compute().item()) if rank == 0 else (0.0, 0.0)\n"),),
        HANG, (0,), "accuracy.compute().item()",
    ),
    Bug(
        "metric_learning_rates", "metric_callbacks", "the ranks have different learning rates",
        (("lr=2e-3", "lr=2e-3 * (rank + 1)"),), ("replica_drift",), any_rank=True, ends="ok",
    ),
    Bug(
        "timm_distribute_on_zero", "timm_images", "only rank 0 distributes the statistics of batch norm, which all-reduces them",
        (("        distribute_bn(", "        if rank == 0:\n            distribute_bn("),), ANY_END, (0,), "distribute_bn(model, world",
    ),
    Bug(
        "timm_odd_batch", "timm_images", "one rank leaves out a batch by its labels, and with it forward and backward",
        (("            images, targets = mixup", "            if rank == 1 and epoch == 2 and labels[0] == labels[1]:\n                continue\n            images, targets = mixup"),),
        (*HANG, "uneven_batches"), (1,),
    ),
    Bug(
        "open_clip_last_batch", "open_clip_pairs", "one rank gets a smaller batch, and the loss gathers equal shapes",
        (("            features =", "            if rank == 1 and text[0, 0] == text[1, 0]:\n                image, text = image[:5], text[:5]\n            features ="),),
        ANY_END, (1,), "loss = loss_of(*features)",
    ),
    Bug(
        "open_clip_loss_on_zero", "open_clip_pairs", "rank 0 computes the loss once more for its log, and the loss gathers",
        (("            optimizer.step()\n", "            optimizer.step()\n            if rank == 0 and loss < 1.5:\n                print('low', loss_of(*(f.detach() for f in features)).item())\n"),),
        ANY_END, (0,), "print('low'",
    ),
)  # fmt: skip
