"""`python -m distdiag` is the `distdiag` command."""

import sys

if not sys.flags.safe_path:  # last, not first: the working directory may have a `click.py` of its own
    sys.path.append(sys.path.pop(0))

from distdiag.cli import main

sys.exit(main())
