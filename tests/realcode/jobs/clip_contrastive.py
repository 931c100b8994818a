"""A CLIP from transformers with features gathered from all ranks (autograd through all_gather), as in open_clip."""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig


def tiny():
    text = CLIPTextConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        eos_token_id=99,
        bos_token_id=98,
    )
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=24))


class Features(torch.nn.Module):
    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def forward(self, ids, pixels):
        out = self.clip(input_ids=ids, pixel_values=pixels)
        return out.text_embeds, out.image_embeds, self.clip.logit_scale.exp()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Features(tiny()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    g = torch.Generator().manual_seed(rank)
    for step in range(45):
        ids = torch.randint(0, 97, (6, 16), generator=g)
        ids[:, -1] = 99
        pixels = torch.randn(6, 3, 16, 16, generator=g)
        text, image, scale = model(ids, pixels)
        every_text, every_image = torch.cat(all_gather(text)), torch.cat(all_gather(image))
        logits = every_text @ every_image.t() * scale
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(6 * world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
