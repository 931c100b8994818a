"""Make `torchrun … -m distdiag.train --monitor` work: torchrun would read `--monitor` as an abbreviation of one of its options.

torchrun has `--monitor-interval` and `--monitor_interval`. Before Python 3.12 argparse expands abbreviations even after
the script's name: "ambiguous option: --monitor". torch calls `autoload` at its import, by way of
`_distdiag_autoload` (entry point group `torch.backends`, made for device extensions). In the launcher's process alone, `autoload` puts a `--` before the module.
"""

from __future__ import annotations

import os
import sys


def autoload() -> None:
    """Called by `import torch` in every process of this environment: an exception here would break that import."""
    try:
        argv = sys.argv
        if "distdiag.run" in argv and "TORCHELASTIC_RUN_ID" not in os.environ:
            import time

            from distdiag import launcher

            launcher.watch(list(argv), time.time())
        if "distdiag.train" not in argv:
            return
        at = argv.index("distdiag.train")
        if argv[at - 1] in ("-m", "--module") and "--" not in argv[:at] and at > 1:
            argv.insert(at, "--")
    except Exception:  # no argv (an embedded Python), or one that is no list of strings
        pass
