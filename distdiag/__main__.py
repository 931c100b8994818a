"""`python -m distdiag` is the `distdiag` command."""

import sys

from distdiag.cli import main

sys.exit(main())
