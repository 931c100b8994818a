"""`torchrun … -m distdiag.train --monitor`: keeps torchrun from taking `--monitor` for an abbreviation of its own.

torchrun knows `--monitor-interval` and `--monitor_interval`, and before Python 3.12 argparse looks for abbreviations even
behind the script's name: "ambiguous option: --monitor". torch calls `autoload` when it is imported (entry point group
`torch.backends`, as any device extension); in the launcher's process, and only there, a `--` is put before the module.
"""

from __future__ import annotations

import sys


def autoload() -> None:
    """Called by `import torch` in every process of this environment: must cost nothing and never fail."""
    argv = sys.argv
    if "distdiag.train" not in argv:
        return
    at = argv.index("distdiag.train")
    if argv[at - 1] in ("-m", "--module") and "--" not in argv[:at] and at > 1:
        argv.insert(at, "--")
