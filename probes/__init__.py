"""Probes: one runnable script each.

torchrun --nproc-per-node 2 probes/allreduce.py        # or srun, or mpirun
distdiag probe allreduce                               # starts the ranks itself
"""
