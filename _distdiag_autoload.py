"""What `import torch` calls in every process of an environment that has distdiag (entry point group `torch.backends`).

torch refuses to be imported if an entry point fails to load. So this module is outside the package, which another directory named
distdiag may hide; it imports nothing at its import, and it cannot fail. TORCH_DEVICE_BACKEND_AUTOLOAD=0 makes torch skip it.
"""


def autoload() -> None:
    """Call `distdiag.torchrun_compat.autoload` in a process whose command line names distdiag; do nothing in all others."""
    try:
        import sys

        if "distdiag.run" in sys.argv or "distdiag.train" in sys.argv:
            from distdiag import torchrun_compat

            torchrun_compat.autoload()
    except Exception:  # no argv (an embedded Python), a damaged installation, another package of this name
        pass
