"""What a training step costs under each strategy: time, speed-up, memory. Used by `distdiag probe step`."""
