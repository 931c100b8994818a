"""`accelerate_loop` with distdiag's tracker."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_linear_schedule_with_warmup

from distdiag.callbacks.accelerate import DistdiagTracker


def loaders():
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 300, (330, 24), generator=g)
    labels = (ids.sum(1) % 2).long()
    train = TensorDataset(ids[:260], labels[:260])
    test = TensorDataset(ids[260:], labels[260:])
    return DataLoader(train, batch_size=8, shuffle=True, drop_last=True), DataLoader(test, batch_size=8)


def evaluate(accelerator, model, loader):
    model.eval()
    right = total = 0
    for ids, labels in loader:
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), labels))
        right += (predictions == references).sum().item()
        total += len(references)
    model.train()
    return right / total, total


def main():
    names = DistdiagTracker()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=names)
    accelerator.init_trackers("example", config={"lr": 1e-3})
    set_seed(0)
    config = DistilBertConfig(
        vocab_size=300, dim=64, hidden_dim=128, n_layers=2, n_heads=2, dropout=0.0, attention_dropout=0.0
    )
    model = DistilBertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_loader, test_loader = loaders()
    schedule = get_linear_schedule_with_warmup(optimizer, 4, 64)
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )
    for epoch in names.epochs(range(4)):
        for ids, labels in train_loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=labels).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        with names.phase("validate"):
            accuracy, total = evaluate(accelerator, model, test_loader)
        accelerator.log({"accuracy": accuracy})
        accelerator.print(f"epoch {epoch} loss {loss.item():.8f} accuracy {accuracy:.6f} of {total}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
