"""open_clip: a tiny CLIP under DDP with its own loss, which gathers the features of all ranks with gradients."""

import torch
import torch.distributed as dist
from torch.library import Library
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VISION = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
TEXT = {"context_length": 12, "vocab_size": 64, "width": 64, "heads": 2, "layers": 2}


def declare_operators():
    """The registry's torchvision is built for CUDA: without it, it has no operators, and its import fails."""
    library = Library("torchvision", "DEF")
    pooled = ["roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"]
    for name in ["nms", "qnms", *pooled, *(f"_{operator}_backward" for operator in pooled)]:
        library.define(f"{name}(Tensor x) -> Tensor")
    return library


def main():
    declared = declare_operators()
    from open_clip import CLIP, ClipLoss

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    kinds = torch.randint(0, 16, (256,))
    images = torch.randn(16, 3, 32, 32)[kinds] + 0.3 * torch.randn(256, 3, 32, 32)
    texts = torch.randint(1, 63, (16, 12))[kinds]
    texts[:, -1] = 63
    data = TensorDataset(images, texts)
    sampler = DistributedSampler(data, seed=5, drop_last=True)
    loader = DataLoader(data, 8, sampler=sampler)
    model = DistributedDataParallel(CLIP(32, VISION, TEXT))
    loss_of = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for image, text in loader:
            features = model(image, text)
            loss = loss_of(*features)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    del declared


if __name__ == "__main__":
    main()
