"""The reference training job: CIFAR-10, trained on any number of ranks by a loop that reads top to bottom.

    torchrun --nproc-per-node 2 -m distdiag.train -- --monitor

Importing this package costs no torch.
"""
