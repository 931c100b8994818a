"""`python -m distdiag` is the `distdiag` command."""

import sys

if not sys.flags.safe_path:  # our libraries before the working directory, which may have a `click.py`
    sys.path.append(sys.path.pop(0))

from distdiag.cli import main

sys.exit(main())
