"""The reference training job: CIFAR-10 on any number of ranks.

    torchrun --nproc-per-node 2 -m distdiag.train -- --monitor

Importing this package does not import torch.
"""
