"""Build what the stand-in needs, once, before its jobs start; one line on stderr says why where that is impossible."""

import sys

from stream_backend import build

if __name__ == "__main__":
    try:
        build.build()
    except build.NoCompiler as e:
        sys.exit(str(e))
