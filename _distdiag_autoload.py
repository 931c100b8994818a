"""What `import torch` calls in every process of an environment that has distdiag (entry point group `torch.backends`).

torch refuses to be imported if an entry point fails to load. So this module is outside the package, which another directory named
distdiag may hide; it imports nothing at its import, and it cannot fail. TORCH_DEVICE_BACKEND_AUTOLOAD=0 makes torch skip it.
"""


def autoload() -> None:
    """Make torchrun understand our commands; with DISTDIAG=1, record this process once it joins a process group."""
    try:
        import os
        import sys

        named = "distdiag.run" in sys.argv or "distdiag.train" in sys.argv
        if (os.environ.get("DISTDIAG") or "0") != "0" and not named:
            from distdiag import everywhere

            everywhere.install()
        elif named:
            from distdiag import torchrun_compat

            torchrun_compat.autoload()
    except Exception:  # no argv (an embedded Python), a damaged installation, another package of this name
        pass
