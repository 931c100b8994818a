"""A process group over gloo with NCCL's semantics for its caller; see ../../README.md."""
