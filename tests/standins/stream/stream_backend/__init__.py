"""A process group over gloo with NCCL's semantics towards its caller; ../../README.md says what it imitates."""
