"""A tiny T5 with DDP by hand, a DistributedSampler, and generation on every rank with predictions gathered as objects."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=120,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = DDP(T5ForConditionalGeneration(config))
    g = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randint(2, 120, (192, 12), generator=g))
    sampler = DistributedSampler(data, shuffle=True, seed=9)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for (ids,) in loader:
            loss = model(input_ids=ids, labels=ids.flip(1)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            made = model.module.generate(data.tensors[0][rank::2][:4], max_new_tokens=5, do_sample=False)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, made.tolist())
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.8f} generated {sum(len(m) for m in gathered)}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
