"""The recorder runs inside a rank. It writes into the rank's page and never raises, prints or blocks in the job.

Importing this package does not import torch: the hooks are installed once the script has imported torch.
"""

from distdiag.recorder.handle import Handle, attach

__all__ = ["Handle", "attach"]
