"""timm: a small ResNet under DDP with label smoothing, mixup, EMA, cosine schedule, and batch norm distributed after each epoch."""

import os

import torch
import torch.distributed as dist
from torch.library import Library
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def declare_operators():
    """The registry's torchvision is built for CUDA: without it, it has no operators, and its import fails."""
    library = Library("torchvision", "DEF")
    pooled = ["roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"]
    for name in ["nms", "qnms", *pooled, *(f"_{operator}_backward" for operator in pooled)]:
        library.define(f"{name}(Tensor x) -> Tensor")
    return library


def main():
    declared = declare_operators()
    import timm
    from timm.data.mixup import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, accuracy, distribute_bn, random_seed, reduce_tensor

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random_seed(0)
    x, y = torch.randn(240, 3, 32, 32), torch.randint(0, 5, (240,))
    x += y.view(-1, 1, 1, 1) * 0.3
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, 10, sampler=sampler)
    model = timm.create_model("test_resnet", num_classes=5)
    ema = ModelEmaV3(model, decay=0.9)
    model = DistributedDataParallel(model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.02)
    schedule = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1)
    mixup = Mixup(mixup_alpha=0.2, num_classes=5)
    loss_of = SoftTargetCrossEntropy()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, targets = mixup(images, labels)
            loss = loss_of(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model.module)
        schedule.step(epoch + 1)
        distribute_bn(model, world, reduce=True)
        model.eval()
        with torch.no_grad():
            (top1,) = accuracy(model.module(x[rank::world]), y[rank::world])
            top1 = reduce_tensor(top1, world)
        if rank == 0:
            torch.save(ema.module.state_dict(), os.devnull)
            print(f"epoch {epoch} loss {loss.item():.6f} accuracy {top1.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    del declared


if __name__ == "__main__":
    main()
